"""The command line. Every failure is one line with its remedy on standard error, and an exit code:
0 done, 2 bad config or input, 1 anything else, 130 interrupted.

A service parses its config before anything heavy is imported, so that a bad one fails at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nbehind.cli_inspect import add_dead, add_status, dead_command, status_command
from nbehind.config import Config
from nbehind.config_load import apply_overrides, config_of, dump_config, load_config
from nbehind.environment import enter
from nbehind.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    InputError,
    Interrupted,
    ServiceDied,
    exit_code_of,
    expected_errors,
)
from nbehind.logs import setup_logging
from nbehind.process import die_with_parent
from nbehind.run_folder import Mode, RunFolder

Arguments = argparse.Namespace
DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.toml"


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
    return parser


def run_command(arguments: Arguments) -> int:
    from nbehind.launch import RunOptions, launch

    file, overrides, mode = _what_to_run(arguments)
    config = load_config(file, [*overrides, *arguments.set, *_redis_override(arguments)])
    hint = f"; go on with: nbehind run {config.run_dir / 'config.toml'} --resume"
    return launch(config, RunOptions(mode, arguments.plain, arguments.json, hint))


def demo_command(arguments: Arguments) -> int:
    from nbehind.launch import RunOptions, launch

    if not DEMO.is_file():
        raise InputError(f"{DEMO} is not there: run the demo from a checkout of the project")
    return launch(load_config(DEMO, arguments.set), RunOptions("overwrite", arguments.plain, arguments.json))


def producer_command(arguments: Arguments) -> int:
    supervised = die_with_parent()
    config, url = _service_start(arguments, arguments.name or f"producer-{arguments.index}", supervised)
    if not supervised:
        enter(config, "producer")
    from producer_svc.main import main as producer_main

    return producer_main(config, url, arguments.index, arguments.name)


def trainer_command(arguments: Arguments) -> int:
    supervised = die_with_parent()
    config, url = _service_start(arguments, "trainer", supervised)
    if not supervised:
        enter(config, "trainer")
    from trainer_svc.main import main as trainer_main

    return trainer_main(config, url, arguments.resume)


def model_command(arguments: Arguments) -> int:
    die_with_parent()
    config = load_config(arguments.config, arguments.set)
    setup_logging("model")
    from nbehind.models import prepare_model

    sys.stdout.write(f"{prepare_model(config.model.path)}\n")
    return EXIT_OK


def config_command(arguments: Arguments) -> int:
    if arguments.markdown:
        from nbehind.config_docs import markdown_table

        sys.stdout.write(markdown_table())
        return EXIT_OK
    file = arguments.config
    config = load_config(file, arguments.set) if file else config_of(apply_overrides({}, arguments.set), "--set")
    sys.stdout.write(dump_config(config))
    return EXIT_OK


def chaos_command(arguments: Arguments) -> int:
    from nbehind.chaos.command import main as chaos_main
    from nbehind.chaos.scenario import Options

    a = arguments
    return chaos_main(Options(a.minutes, a.seed, a.backend, a.json, a.keep, a.n_behind, a.order, tuple(a.only)))


def report_command(arguments: Arguments) -> int:
    from nbehind.report import summary_table, write_report

    setup_logging("report")
    path = write_report(arguments.run_dir)
    sys.stdout.write(summary_table(RunFolder(arguments.run_dir).read_summary()))
    sys.stdout.write(f"report: {path}\n")
    return EXIT_OK


def _what_to_run(arguments: Arguments) -> tuple[Path, list[str], Mode]:
    """Config file, overrides that name the run, and what to do with an earlier run of that name."""
    resume: str | None = arguments.resume
    if resume is not None and arguments.overwrite:
        raise InputError("--resume and --overwrite: give one of them")
    if arguments.config is None and resume is not None and resume.endswith(".toml"):
        arguments.config, resume = resume, ""  # `run --resume CONFIG`: argparse took CONFIG for RUN
    if resume is None:
        if arguments.config is None:
            raise InputError("give the config file, such as: nbehind run examples/demo.toml")
        return Path(arguments.config), [], "overwrite" if arguments.overwrite else "new"
    overrides: list[str] = []
    if resume:
        folder = Path(resume) if Path(resume).parent != Path() else Path("runs") / resume
        overrides.append(f"run.name={folder.name}")
        if folder != Path("runs") / folder.name or arguments.config is None:
            overrides.append(f"run.dir={folder.parent}")
        if arguments.config is None:
            arguments.config = RunFolder(folder).config_file
            if not Path(arguments.config).is_file():
                raise InputError(f"--resume {resume}: {folder} is not the folder of a run")
    elif arguments.config is None:
        raise InputError("--resume needs the config file, or the run: nbehind run --resume RUN")
    return Path(arguments.config), overrides, "resume"


def _service_start(arguments: Arguments, service: str, supervised: bool) -> tuple[Config, str]:
    """Config and Redis URL of a service; both are checked. A supervised one may start while its Redis restarts."""
    from nbehind.launch import check_redis

    config = load_config(arguments.config, [*arguments.set, *_redis_override(arguments)])
    setup_logging(service)
    url = config.redis.url
    if not url:
        known = RunFolder(config.run_dir).redis_url_file
        if not known.is_file():
            raise InputError(f"no Redis is known for run {config.run.name}: give --redis URL (without a password)")
        url = known.read_text().strip()
    check_redis(config, url, config.redis.retry_s if supervised else 0.0)
    return config, url


def _redis_override(arguments: Arguments) -> list[str]:
    return [f"redis.url={arguments.redis}"] if arguments.redis else []


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: Callable[[Arguments], int], text: str
) -> argparse.ArgumentParser:
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
