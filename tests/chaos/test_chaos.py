"""`nbehind chaos` as a user starts it, for 3 minutes; and that it tells when a guarantee does not hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nbehind.chaos.faults import KINDS
from tests import runs

TIMEOUT_S = 500.0


def chaos(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbehind", "chaos", "--json", str(folder / "report.json"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=runs.environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.timeout(540)
def test_nothing_is_lost_or_trained_twice_whatever_dies(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--minutes", "3", "--seed", "11", "--keep", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads(done.stdout)
    assert report["passed"] and not report["failures"]
    assert report["fault_kinds"] >= 8 and report["faults_total"] >= 20
    assert report["weights_equal"] is True
    for zero in ("trained_twice", "lost", "lag_violations", "open", "processes_left_over"):
        assert report[zero] == 0
    assert report["steps"] >= 20 and report["trained"] == 4 * report["steps"]
    assert not runs.processes_of(tmp_path)


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--only", "earthquake")
    assert done.returncode == 2
    assert "earthquake" in done.stderr and all(kind in done.stderr for kind in KINDS)


def test_a_folder_with_files_is_not_used(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--keep", str(Path(__file__).parent))
    assert done.returncode == 2
    assert "not empty" in done.stderr
