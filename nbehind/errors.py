"""Errors of the front door, and which exit code an error of any package stands for.

NbehindError            exit 1
├── ConfigError         exit 2: the configuration cannot be used; one line a problem
├── InputError          exit 2: a file, folder, model, Redis or argument that is missing or does not fit
├── StartError          a part of the run (embedded Redis, model folder) that did not start
└── ServiceDied         a service that ended the run; carries its last log lines
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class NbehindError(Exception):
    """Base of every error that the front door raises on purpose."""

    exit_code = EXIT_FAILED


class ConfigError(NbehindError):
    """The configuration cannot be used. `problems` holds one line each: key, value, what is allowed."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class InputError(NbehindError):
    """A file, folder, model, Redis or argument that is missing or does not fit."""

    exit_code = EXIT_BAD_INPUT


class StartError(NbehindError):
    """A part of the run that did not start."""


class ServiceDied(NbehindError):
    """A service that ended the run. `exit_code` is 2 if the service found its input bad, else 1."""

    def __init__(self, message: str, log_lines: Sequence[str] = (), *, bad_input: bool = False) -> None:
        super().__init__(message)
        self.log_lines = list(log_lines)
        self.exit_code = EXIT_BAD_INPUT if bad_input else EXIT_FAILED


class Interrupted(NbehindError):
    """The run was asked to stop."""

    exit_code = EXIT_INTERRUPTED


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that ends a command."""
    from producer_svc.errors import RewardError
    from trainer_svc.errors import DataError

    if isinstance(error, NbehindError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_BAD_INPUT if isinstance(error, (DataError, RewardError)) else EXIT_FAILED


def expected_errors() -> tuple[type[BaseException], ...]:
    """Every error that ends a command with one line instead of a traceback."""
    from redis.exceptions import RedisError

    from producer_svc.errors import ProducerError
    from rollout_queue.errors import QueueError
    from trainer_svc.errors import TrainerError
    from weight_sync.errors import SyncError

    return (NbehindError, QueueError, ProducerError, TrainerError, SyncError, RedisError, OSError)
