"""Starts one producer: connects, loads the engine, joins the weight channel, serves, leaves."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time

from nbehind.config import Config
from nbehind.hello import hello
from nbehind.models import prepare_model
from nbehind.services import open_queue, sync_settings
from nbehind.stopping import EXIT_INTERRUPTED, StopFlag
from nbehind.tokenizer import load_tokenizer
from producer_svc.adapters import Base
from producer_svc.engines import make_generator
from producer_svc.keeper import Keeper
from producer_svc.rewards import Scorer
from producer_svc.service import ProducerService, start_in_time
from producer_svc.telemetry import Telemetry
from rollout_queue.metrics import serve
from weight_sync.receiver import Receiver
from weight_sync.staged import StagedWeights

log = logging.getLogger(__name__)


async def serve_run(config: Config, redis_url: str, index: int, name: str, stop: StopFlag) -> str:
    """The life of one producer; returns why it ended."""
    began = time.monotonic()
    folder = prepare_model(config.model.path)
    tokenizer = load_tokenizer(config.model.path, folder)
    client, keys, queue = open_queue(config, redis_url)
    telemetry = Telemetry(name)
    port = config.metrics.producer_port + index if config.metrics.producer_port else 0
    web = serve(telemetry.registry, config.metrics.host, port, telemetry.health)
    base = Base(str(folder), config.lora.scale) if config.lora.rank else None
    generator = make_generator(folder, config.model, config.producer, config.sampling, base)
    scorer = Scorer(config.reward, tokenizer.decode)
    service = ProducerService(name, config, queue, generator, scorer, telemetry)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, service, stop)

    def on_staged(staged: StagedWeights) -> None:
        loop.call_soon_threadsafe(service.stage, staged)

    receiver = Receiver(client, keys, name, hello(config, tokenizer, folder), sync_settings(config), on_staged)
    keeper = Keeper(
        queue,
        name,
        config.producer.lease_s,
        config.run.give_up_s,
        lambda: telemetry.info(service.version, len(service.leases())),
    )
    try:
        receiver.start()
        keeper.start()
        await start_in_time(generator, config.producer.start_timeout_s)
        log.info("%s is ready after %.1f s (metrics on port %d)", name, time.monotonic() - began, web.port)
        telemetry.stage = "ready"
        return await service.run(receiver, keeper)
    finally:
        telemetry.stage = "leaving"
        keeper.close()
        receiver.close()
        await scorer.close()
        await generator.close()
        web.close()
        client.close()


def on_signal(service: ProducerService, stop: StopFlag) -> None:
    """First signal: drain. Second: StopFlag ends the process."""
    stop.receive("a signal")
    service.leave("interrupted")


def main(config: Config, redis_url: str, index: int = 0, name: str | None = None) -> int:
    """Run producer number `index`; returns the exit code. Errors reach the caller (nbehind/errors.py gives codes)."""
    stop = StopFlag()
    unique = f"{name or f'producer-{index}'}.{secrets.token_hex(3)}"
    reason = asyncio.run(serve_run(config, redis_url, index, unique, stop))
    log.info("%s leaves: %s", unique, reason)
    if reason == "interrupted":
        return EXIT_INTERRUPTED
    return 0 if reason == "done" else 1
