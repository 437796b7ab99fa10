"""`nbehind chaos`: a real training run under the injector, the same run undisturbed, and the verdict."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbehind.chaos import ledger
from nbehind.chaos.drive import disturbed, undisturbed
from nbehind.chaos.report import judge
from nbehind.chaos.scenario import Options
from nbehind.errors import EXIT_FAILED, EXIT_OK, InputError
from nbehind.guardian import Guardian
from nbehind.models import prepare_model


def chaos(options: Options, say: Callable[[str], None] = lambda line: None) -> tuple[dict[str, Any], list[str]]:
    """Run it; returns the report and the guarantees that failed, each as a line."""
    with _folder(options.keep) as folder:
        with Guardian() as guardian:
            if options.backend == "vllm":
                prepare_model("demo", say=say)
            run = disturbed(folder, options, guardian, say)
            reference: list[ledger.Step] | None = None
            if options.reproducible:
                say(f"the same {run.steps} steps without faults")
                reference = undisturbed(folder, options, run.steps, guardian)
        return judge(options, run, reference)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise InputError(f"--keep {keep}: the folder is not empty; give a new one")
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="nbehind-chaos-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(options: Options) -> int:
    """Run, print the report as JSON, write it where it is wanted. EXIT_FAILED when a guarantee does not hold."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same end as by Ctrl-C: everything is killed
    began = time.monotonic()
    report, failures = chaos(options, lambda line: _say(f"{time.monotonic() - began:6.1f} s  {line}"))
    report = {**report, "passed": not failures, "failures": failures}
    text = json.dumps(report, indent=2) + "\n"
    sys.stdout.write(text)
    if options.json_file is not None:
        options.json_file.write_text(text)
    for line in failures:
        _say(f"FAILED: {line}")
    return EXIT_FAILED if failures else EXIT_OK


def _say(line: str) -> None:
    sys.stderr.write(f"nbehind chaos: {line}\n")
    sys.stderr.flush()
