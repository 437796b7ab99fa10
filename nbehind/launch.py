"""`nbehind run`: run folder, Redis, guardian and display around the supervisor, and what is shown at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nbehind.config import Config
from nbehind.config_load import dump_config
from nbehind.embedded import EmbeddedRedis, EmbeddedRedisError
from nbehind.errors import EXIT_OK, InputError, Interrupted, NbehindError, StartError
from nbehind.guardian import Guardian
from nbehind.live import Display, make_display
from nbehind.live_data import Probe, RunQueue
from nbehind.logs import setup_logging
from nbehind.report import summary_table, write_report
from nbehind.run_folder import Mode, RunFolder, open_run_folder
from nbehind.services import open_client, open_queue
from nbehind.supervisor import Interrupts, ServiceCommands, Supervisor
from rollout_queue.errors import ConnectionRefused, UnsuitableRedis

log = logging.getLogger(__name__)

REDIS_RESTARTS = 3
PROBE_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run: what to do with an earlier run of that name, and how to show progress and result."""

    mode: Mode = "new"
    plain: bool = False
    as_json: bool = False
    resume_hint: str = ""  # the command that goes on after an interruption


CommandsOf = Callable[[Config, RunFolder, str, bool], ServiceCommands]


def nbehind_commands(config: Config, folder: RunFolder, redis_url: str, resume: bool) -> ServiceCommands:
    """This package's own commands: each service reads the resolved config from the run folder."""
    file = str(folder.config_file.resolve())

    def command(service: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "nbehind", service, file, *more]

    return ServiceCommands(
        trainer=command("trainer", "--redis", redis_url, *(["--resume"] if resume else [])),
        producer=lambda index: command("producer", "--redis", redis_url, "--index", str(index)),
        model=None if config.model.path == "fake" else command("model"),
    )


def launch(config: Config, options: RunOptions, commands_of: CommandsOf = nbehind_commands) -> int:
    """Run to the end and show the result on standard output; progress goes to standard error. Returns the exit code.

    Errors reach the caller when every process is gone: InputError, ServiceDied, Interrupted, QueueError.
    """
    if config.redis.url:
        check_redis(config, config.redis.url)
    try:
        folder = _supervise(config, options, commands_of)
    except Interrupted as stop:
        folder = RunFolder(config.run_dir)
        if folder.read_summary():
            show_result(folder, as_json=options.as_json)
        raise Interrupted(f"{stop}{options.resume_hint}") from None
    return show_result(folder, as_json=options.as_json)


def _supervise(config: Config, options: RunOptions, commands_of: CommandsOf) -> RunFolder:
    """From locked run folder and Redis to the end of every process."""
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        folder = stack.enter_context(open_run_folder(config.run_dir, options.mode))
        stack.enter_context(_own_log(folder))
        guardian = stack.enter_context(Guardian())
        redis = stack.enter_context(_redis(config, folder))
        config = redis.config
        folder.config_file.write_text(f"# nbehind: the resolved configuration of this run\n{dump_config(config)}")
        folder.redis_url_file.write_text(redis.url + "\n")
        display = make_display(sys.stderr, plain=options.plain)
        stack.callback(display.close)
        _greet(display, config, folder, redis.url)
        probe = Probe(lambda: _open_queue(config, redis.url))
        stack.callback(probe.close)
        probe.start()
        supervisor = Supervisor(
            config,
            folder,
            commands_of(config, folder, redis.url, options.mode == "resume"),
            display,
            guardian,
            interrupts,
            probe=probe.current,
            keep_redis=redis.keep,
        )
        supervisor.run()
        return folder


def show_result(folder: RunFolder, *, as_json: bool) -> int:
    """Summary on standard output, and the report beside it. A report that fails is said, and changes nothing else."""
    summary = folder.read_summary()
    if not summary:
        raise NbehindError(f"the trainer left no {folder.summary}; its log is {folder.log_file('trainer')}")
    try:
        report: Path | None = write_report(folder.path)
    except (NbehindError, OSError, ImportError) as error:
        report = None
        sys.stderr.write(f"nbehind: the report could not be written: {error}\n")
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        sys.stdout.write(summary_table(summary))
        sys.stdout.write(f"report: {report}\n" if report else "")
    return EXIT_OK


def check_redis(config: Config, url: str, retry_s: float = 0.0) -> None:
    """InputError unless the server is there within `retry_s`, lets us in, and keeps what it is given."""
    try:
        open_client(config, url, retry_s).close()
    except (ConnectionRefused, UnsuitableRedis) as error:
        raise InputError(str(error)) from None


@dataclass(slots=True)
class RunRedis:
    """The Redis of a run: `keep` restarts an embedded server that died."""

    config: Config  # with the credentials that fit this server
    url: str
    server: EmbeddedRedis | None = None
    restarts: int = 0

    def keep(self) -> str:
        """What was done, '' = nothing. StartError when it died too often."""
        if self.server is None or self.server.pid:
            return ""
        if self.restarts >= REDIS_RESTARTS:
            raise StartError(
                f"the embedded Redis died {self.restarts + 1} times; see {self.server.folder / 'redis.log'}"
            )
        self.restarts += 1
        count = f"{self.restarts} of {REDIS_RESTARTS}"
        try:
            self.server.restart()
        except EmbeddedRedisError as error:
            return f"the embedded Redis died and did not start again ({count}): {error}"
        return f"the embedded Redis died and was started again ({count}); work in flight is asked for again"


@contextlib.contextmanager
def _redis(config: Config, folder: RunFolder) -> Iterator[RunRedis]:
    """The server that the config names, or an embedded one for this run, which has no password and no other user."""
    if config.redis.url:
        yield RunRedis(config, config.redis.url)
        return
    bare = config.redis.model_copy(update={"username": "", "password_env": "", "password_file": ""})
    with EmbeddedRedis(folder.path / "redis", config.redis.embedded_max_mb) as server:
        yield RunRedis(config.model_copy(update={"redis": bare}), server.url, server)


@contextlib.contextmanager
def _own_log(folder: RunFolder) -> Iterator[None]:
    """The supervisor's own records go to a file: the terminal belongs to the display."""
    path = folder.log_file("supervisor")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        setup_logging("supervisor", stream=stream)
        try:
            yield
        finally:
            setup_logging("nbehind")


def _open_queue(config: Config, url: str) -> RunQueue:
    """The queue for the live view, which would rather say that Redis is away than wait for it."""
    impatient = config.redis.model_copy(update={"retry_s": PROBE_RETRY_S})
    return open_queue(config.model_copy(update={"redis": impatient}), url)[2]


def _greet(display: Display, config: Config, folder: RunFolder, url: str) -> None:
    run, producer = config.run, config.producer
    display.note(
        f"run {run.name}: {config.model.path}, {producer.count} {producer.backend} producer(s), "
        f"n_behind {run.n_behind}, order {run.order}, logs in {folder.path / 'logs'}"
    )
    display.note(f"another producer may join: nbehind producer {folder.config_file}  (Redis: {url})")
