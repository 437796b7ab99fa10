"""What each subcommand does, from parsed arguments to an exit code.

A service parses its config before anything heavy is imported, so that a bad one fails at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nbehind.config import Config
from nbehind.config_load import apply_overrides, config_of, dump_config, load_config
from nbehind.environment import Kind, enter
from nbehind.errors import EXIT_OK, InputError
from nbehind.logs import setup_logging
from nbehind.process import die_with_parent
from nbehind.run_folder import Mode, RunFolder

Arguments = argparse.Namespace
DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo.toml"


def run_command(arguments: Arguments) -> int:
    from nbehind.launch import RunOptions, launch

    file, overrides, mode = what_to_run(arguments)
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
    name = arguments.name or f"producer-{arguments.index}"
    config, url = _service_start(arguments, "producer", name, supervised)
    from producer_svc.main import main as producer_main

    return producer_main(config, url, arguments.index, arguments.name)


def trainer_command(arguments: Arguments) -> int:
    supervised = die_with_parent()
    config, url = _service_start(arguments, "trainer", "trainer", supervised)
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


def what_to_run(arguments: Arguments) -> tuple[Path, list[str], Mode]:
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


def _service_start(arguments: Arguments, kind: Kind, name: str, supervised: bool) -> tuple[Config, str]:
    """Config and Redis URL of a service; both are checked. A supervised one may start while its Redis restarts."""
    from nbehind.launch import check_redis

    config = load_config(arguments.config, [*arguments.set, *_redis_override(arguments)])
    if not supervised:
        enter(config, kind, Path(arguments.config))
    setup_logging(name)
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
