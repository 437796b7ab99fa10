"""Remove each protection of tests/protections.py in a copy of the project and see its test fail.

python scripts/check_protections.py [--only TEXT] [--json FILE]        one line a protection; exit 1 when a test still passes
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.protections import PROTECTIONS, Protection  # noqa: E402

LIMIT_S = 600  # a test that hangs without its protection has failed, too
TESTS_FAILED = 1  # pytest's exit status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only guarantees with this text in them")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    arguments = parser.parse_args()
    chosen = [p for p in PROTECTIONS if arguments.only in p.guarantee]
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="nbehind-protections-") as folder:
        copy = Path(folder) / "copy"
        copy_project(copy)
        for protection in chosen:
            began = time.monotonic()
            outcome = outcomes[protection.guarantee] = check(copy, protection)
            print(f"{outcome:<14} {time.monotonic() - began:5.0f} s  {protection.guarantee}", flush=True)
    caught = sum(o == "caught" for o in outcomes.values())
    print(f"{caught} of {len(chosen)}: the test fails when the protection is removed")
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    return 0 if caught == len(chosen) else 1


def copy_project(to: Path) -> None:
    """What git knows or would add, as it is now."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def check(copy: Path, protection: Protection) -> str:
    """'caught', or what else became of it."""
    file = copy / protection.file
    source = file.read_text()
    if source.count(protection.old) != 1:
        return f"text found {source.count(protection.old)} times"
    file.write_text(source.replace(protection.old, protection.new))
    try:
        status = run_test(copy, protection.test)
    finally:
        file.write_text(source)
    return {TESTS_FAILED: "caught", 0: "NOT CAUGHT"}.get(status, f"pytest ended with {status}")


def run_test(copy: Path, test: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(test)]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    child = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return child.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return TESTS_FAILED
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
