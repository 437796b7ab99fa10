"""Rules between keys, checked before anything starts. Each message names the keys, their values and the remedy."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

from nbehind.config import Config, Section

MIB = 2**20
GROUP_BYTES_PER_TOKEN = 12  # id, logprob, and room for spans and rewards; see rollout_queue/codec.py


def check(config: Config) -> list[str]:
    """Every broken rule as one line; empty when the config can be used."""
    problems: list[str] = []
    for rule in (_finite, _batch, _lengths, _pacing, _fake, _times, _ports, _redis, _memory, _data, _evaluation, _lora):
        problems += rule(config)
    return problems


def _finite(c: Config) -> list[str]:
    out = []
    for section in Config.model_fields:
        values: Section = getattr(c, section)
        for key, value in values:
            if isinstance(value, float) and not math.isfinite(value):
                out.append(f"{section}.{key} = {value}: must be a finite number")
    if not all(0 <= beta < 1 for beta in c.trainer.betas):
        out.append(f"trainer.betas = {list(c.trainer.betas)}: both must be ≥ 0 and < 1")
    return out


def _batch(c: Config) -> list[str]:
    out = []
    if c.sampling.num_generations < 2:
        out.append(
            f'algo.advantage = "{c.algo.advantage}" compares completions of one prompt, '
            f"so sampling.num_generations = {c.sampling.num_generations} must be at least 2"
        )
    if c.sampling.groups_per_step % c.trainer.updates_per_step:
        out.append(
            f"sampling.groups_per_step = {c.sampling.groups_per_step} must be a multiple of "
            f"trainer.updates_per_step = {c.trainer.updates_per_step}"
        )
    return out


def _evaluation(c: Config) -> list[str]:
    out = []
    if c.eval.every_steps and (not c.checkpoint.every_steps or c.eval.every_steps % c.checkpoint.every_steps):
        out.append(
            f"eval.every_steps = {c.eval.every_steps} must be a multiple of checkpoint.every_steps = "
            f"{c.checkpoint.every_steps}, so that the best checkpoint can be kept"
        )
    if c.eval.every_steps and c.eval.every_steps % c.run.publish_every:
        out.append(
            f"eval.every_steps = {c.eval.every_steps} must be a multiple of run.publish_every = {c.run.publish_every}: "
            "only published versions can be evaluated"
        )
    if c.eval.every_steps and not c.eval.source and c.data.source.endswith(".jsonl"):
        out.append(
            f"eval.every_steps = {c.eval.every_steps} needs eval.source: data.source = {c.data.source} has one set only"
        )
    return out


def _lengths(c: Config) -> list[str]:
    out = []
    if c.sampling.max_new_tokens >= c.model.max_context:
        out.append(
            f"sampling.max_new_tokens = {c.sampling.max_new_tokens} must be below "
            f"model.max_context = {c.model.max_context}, which also holds the prompt"
        )
    if c.trainer.tokens_per_micro_batch < c.model.max_context:
        out.append(
            f"trainer.tokens_per_micro_batch = {c.trainer.tokens_per_micro_batch} must be at least "
            f"model.max_context = {c.model.max_context}: one sample must fit"
        )
    return out


def _pacing(c: Config) -> list[str]:
    out = []
    if c.run.publish_every > c.run.n_behind + 1:
        out.append(
            f"run.publish_every = {c.run.publish_every} must be ≤ run.n_behind + 1 = {c.run.n_behind + 1}: "
            "rarer versions cannot keep the bound"
        )
    if c.run.max_steps == 0 and c.data.epochs == 0:
        out.append("run.max_steps = 0 and data.epochs = 0: give one of them, or the run would have no end")
    return out


def _fake(c: Config) -> list[str]:
    keys = {"model.path": c.model.path, "trainer.engine": c.trainer.engine, "producer.backend": c.producer.backend}
    if len({value == "fake" for value in keys.values()}) == 1:
        return []
    shown = ", ".join(f'{key} = "{value}"' for key, value in keys.items())
    return [f'{shown}: all three must be "fake", or none']


def _lora(c: Config) -> list[str]:
    if c.lora.rank and c.trainer.engine == "fake":
        return [f'lora.rank = {c.lora.rank} needs trainer.engine = "torch": the fake engine has no layers to adapt']
    return []


def _times(c: Config) -> list[str]:
    out = []
    if c.producer.lease_s >= c.producer.request_timeout_s:
        out.append(
            f"producer.lease_s = {c.producer.lease_s} must be below "
            f"producer.request_timeout_s = {c.producer.request_timeout_s}"
        )
    if c.run.stall_s >= c.run.give_up_s:
        out.append(f"run.stall_s = {c.run.stall_s} must be below run.give_up_s = {c.run.give_up_s}")
    if c.producer.fake_generate_s >= c.producer.request_timeout_s:
        out.append(
            f"producer.fake_generate_s = {c.producer.fake_generate_s} must be below "
            f"producer.request_timeout_s = {c.producer.request_timeout_s}"
        )
    return out


def _ports(c: Config) -> list[str]:
    first, last = c.metrics.producer_port, c.metrics.producer_port + max(0, c.producer.count - 1)
    if first == 0:
        return []
    if last > 65535:
        return [
            f"metrics.producer_port = {first} and producer.count = {c.producer.count} need ports up to {last}, above 65535"
        ]
    if first <= c.metrics.trainer_port <= last:
        return [
            f"metrics.trainer_port = {c.metrics.trainer_port} is one of the producers' ports {first} to {last} "
            f"(metrics.producer_port and producer.count = {c.producer.count})"
        ]
    return []


def _redis(c: Config) -> list[str]:
    if not c.redis.url:
        return [f'redis.tls_ca = "{c.redis.tls_ca}" needs redis.url = "rediss://…"'] if c.redis.tls_ca else []
    try:
        url = urlsplit(c.redis.url)
        secret, _ = url.password, url.port
    except ValueError as error:
        return [f'redis.url = "{_without_secret(c.redis.url)}": not a URL: {error}']
    shown = _without_secret(c.redis.url)
    if url.scheme not in ("redis", "rediss", "unix"):
        return [f'redis.url = "{shown}": must begin with redis://, rediss:// or unix://']
    out = []
    if secret is not None or "password=" in url.query:
        out.append(
            f'redis.url = "{shown}": keep the password out of it, since it is shown and saved; '
            f"put it into the environment variable {c.redis.password_env or 'named by redis.password_env'} "
            "or a file named by redis.password_file"
        )
    if c.redis.tls_ca and url.scheme != "rediss":
        out.append(f'redis.tls_ca = "{c.redis.tls_ca}" needs a rediss:// URL, not redis.url = "{shown}"')
    return out


def _without_secret(url: str) -> str:
    """The URL up to its query, with whatever stands before the last @ hidden."""
    scheme, _, rest = url.partition("?")[0].rpartition("://")
    return f"{scheme}://{'…@' if '@' in rest else ''}{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]


def _memory(c: Config) -> list[str]:
    group = c.sampling.num_generations * c.model.max_context * GROUP_BYTES_PER_TOKEN / MIB
    out = []
    if group > c.redis.max_body_mb:
        out.append(
            f"redis.max_body_mb = {c.redis.max_body_mb} is below the {group:.0f} MiB of a full group: "
            f"sampling.num_generations = {c.sampling.num_generations} × model.max_context = {c.model.max_context}"
        )
    window = (c.run.n_behind + 1) * c.sampling.groups_per_step * group + c.redis.retention_mb
    if not c.redis.url and window > c.redis.embedded_max_mb:
        out.append(
            f"redis.embedded_max_mb = {c.redis.embedded_max_mb} is below the {window:.0f} MiB that may be held: "
            f"(run.n_behind = {c.run.n_behind} + 1) × sampling.groups_per_step = {c.sampling.groups_per_step} "
            f"full groups and redis.retention_mb = {c.redis.retention_mb}"
        )
    return out


def _data(c: Config) -> list[str]:
    out = []
    if c.data.source.endswith(".jsonl") and c.data.options:
        out.append(f'data.options = {c.data.options} has no meaning for the file data.source = "{c.data.source}"')
    if c.producer.tensor_parallel > 1 and c.producer.backend != "vllm":
        out.append(
            f'producer.tensor_parallel = {c.producer.tensor_parallel} needs producer.backend = "vllm", '
            f'not "{c.producer.backend}"'
        )
    return out
