"""The commands that look into a run from outside: `nbehind status` and `nbehind dead`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nbehind.errors import EXIT_OK, InputError


def add_status(parser: argparse.ArgumentParser) -> None:
    _add_place(parser, "run to show (default: every run there)")
    parser.add_argument("--json", action="store_true", help="print JSON: a list with an entry a run")


def add_dead(parser: argparse.ArgumentParser) -> None:
    _add_place(parser, "run whose dead letters are meant (may be left out when there is one run)")
    parser.add_argument("--json", action="store_true", help="print the letters as JSON")
    parser.add_argument(
        "--requeue", metavar="ENTRY|all", help="give the prompt of this dead request to the run's next replacement"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the prompts as JSONL, for a later run's data.source"
    )


def _add_place(parser: argparse.ArgumentParser, run_help: str) -> None:
    parser.add_argument(
        "--redis", metavar="URL", help="Redis, without a password (default: that of the run below runs/)"
    )
    parser.add_argument("--run", default="", metavar="NAME", help=run_help)


def status_command(arguments: argparse.Namespace) -> int:
    from nbehind.inspect_run import run_status, server, status_text

    with server(arguments.redis or "", arguments.run, arguments.set) as at:
        found = [run_status(at, run) for run in at.chosen(arguments.run)]
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if arguments.json else "\n".join(map(status_text, found)))
    return EXIT_OK


def dead_command(arguments: argparse.Namespace) -> int:
    from nbehind.dead_letters import ALL, described, export, letters_text, requeue
    from nbehind.inspect_run import server

    with server(arguments.redis or "", arguments.run, arguments.set) as at:
        runs = at.chosen(arguments.run)
        if len(runs) > 1:
            raise InputError(f"several runs are known there, give one with --run: {', '.join(runs)}")
        with at.queue(runs[0]) as queue:
            letters = queue.dead_letters(ALL)[::-1]
            if arguments.export:
                count = export(letters, arguments.export)
                sys.stdout.write(f"{count} prompts written to {arguments.export}\n")
            if arguments.requeue:
                count = requeue(queue, runs[0], letters, arguments.requeue)
                sys.stdout.write(f"{count} prompts re-queued: the next replacements of run {runs[0]} roll them out\n")
    if arguments.json:
        sys.stdout.write(json.dumps([described(letter) for letter in letters], indent=2) + "\n")
    elif not (arguments.export or arguments.requeue):
        sys.stdout.write(letters_text(runs[0], letters))
    return EXIT_OK
