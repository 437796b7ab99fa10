"""The command line. Every failure is one line with its remedy on standard error, and an exit code:
0 done, 2 bad config or input, 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbehind.cli_inspect import add_dead, add_status, dead_command, status_command
from nbehind.commands import (
    chaos_command,
    config_command,
    demo_command,
    model_command,
    producer_command,
    report_command,
    run_command,
    trainer_command,
)
from nbehind.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigError,
    Interrupted,
    ServiceDied,
    exit_code_of,
    expected_errors,
)

Arguments = argparse.Namespace
if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    command: Callable[[Arguments], int] = arguments.run_command
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left
        sys.stderr.close()
        return EXIT_FAILED
    except expected_errors() as error:
        sys.stderr.write(describe(error, arguments.command))
        return exit_code_of(error)


def describe(error: BaseException, command: str) -> str:
    """What is shown of an error: a line a problem, and the log lines of a service that died."""
    if isinstance(error, OSError) and error.strerror:
        lines = [f"{error.strerror}: {error.filename}" if error.filename else error.strerror]
    elif isinstance(error, ConfigError):
        lines = error.problems
    else:
        lines = [" ".join(str(error).split()) or type(error).__name__]
    label = "" if isinstance(error, Interrupted) else "error: "
    shown = "".join(f"nbehind {command}: {label}{line}\n" for line in lines)
    log_lines = error.log_lines if isinstance(error, ServiceDied) else []
    return "".join(f"    {line}\n" for line in log_lines) + shown


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbehind",
        formatter_class=_OneLineHelp,
        description="RL post-training of language models as a message-queue system with a staleness bound that holds.",
        epilog="Passwords are read from the environment or a file (redis.password_env, redis.password_file), never from here.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_runs(commands)
    _add_services(commands)
    _add_tools(commands)
    return parser


def _add_runs(commands: Commands) -> None:
    run = _command(
        commands, "run", run_command, "start Redis, a trainer and producers, and see the run through to its end"
    )
    run.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; may be left out with --resume RUN")
    run.add_argument("--redis", metavar="URL", help="use this Redis instead of an embedded one")
    run.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="go on from the last checkpoint of RUN (name or folder; default: run.name)",
    )
    run.add_argument("--overwrite", action="store_true", help="delete what an earlier run of this name left")
    _add_set(run)
    _add_display(run)
    demo = _command(commands, "demo", demo_command, "run examples/demo.toml: a tiny model learns arithmetic in minutes")
    _add_set(demo)
    _add_display(demo)


def _add_services(commands: Commands) -> None:
    producer = _command(commands, "producer", producer_command, "start one producer alone")
    _add_service(producer)
    producer.add_argument(
        "--index",
        type=_index,
        default=0,
        metavar="N",
        help="number of this producer; shifts its metrics port (default 0)",
    )
    producer.add_argument(
        "--name", metavar="NAME", help="name in logs and metrics (default: made from host and process)"
    )
    trainer = _command(commands, "trainer", trainer_command, "start the trainer alone")
    _add_service(trainer)
    trainer.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the run folder")


def _add_tools(commands: Commands) -> None:
    model = _command(
        commands, "model", model_command, "prepare the model folder that the config names, and print where it is"
    )
    model.add_argument("config", metavar="CONFIG", help="TOML file")
    _add_set(model)
    config = _command(commands, "config", config_command, "check a config and print it with every default filled in")
    config.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file (default: the defaults)")
    config.add_argument("--markdown", action="store_true", help="print the table of all keys instead")
    _add_set(config)
    chaos = _command(
        commands, "chaos", chaos_command, "train while services are killed, stopped and cut off, and judge the result"
    )
    _add_chaos(chaos)
    status = _command(
        commands, "status", status_command, "show what Redis knows of a run: versions, producers, weight channel, queue"
    )
    add_status(status)
    _add_set(status)
    dead = _command(
        commands, "dead", dead_command, "list requests and rollouts that were given up; re-queue or export them"
    )
    add_dead(dead)
    _add_set(dead)
    report = _command(commands, "report", report_command, "write report.html of a run, and print its summary")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/demo")


def _command(commands: Commands, name: str, run: Callable[[Arguments], int], text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=_OneLineHelp
    )
    parser.set_defaults(run_command=run)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override section.key of the config; may be repeated",
    )


def _add_display(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="plain progress lines, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=_minutes, default=3.0, metavar="M", help="time with faults (default 3)")
    parser.add_argument("--seed", type=_index, default=0, metavar="S", help="draws faults, data order and samples")
    parser.add_argument("--backend", choices=("fake", "vllm"), default="fake", help="what generates (default fake)")
    parser.add_argument("--n-behind", type=_index, default=0, metavar="N", help="run.n_behind (default 0)")
    parser.add_argument("--order", choices=("strict", "ready"), default="strict", help="run.order (default strict)")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND", help="only faults of these kinds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="run there and keep it (default: a temporary folder)"
    )


def _add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="TOML file, or config.toml in the folder of a run that goes on"
    )
    parser.add_argument(
        "--redis", metavar="URL", help="Redis of the run, without a password (default: redis.url, or the running run's)"
    )
    _add_set(parser)


class _OneLineHelp(argparse.HelpFormatter):
    """A line a flag, whatever the width of the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=130)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 60 * 24:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0.1 to {60 * 24}")
    return value


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 0")
    return int(text)
