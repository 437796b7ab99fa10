"""Set-up: pins that are plain, targets that are listed, and a script that says what it misses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+( ; platform_machine == \"x86_64\")?")


def pins(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_requirements_are_exact_pins_and_each_package_has_one_place() -> None:
    assert [p.stem for p in REQUIREMENTS] == ["base", "dev", "torch", "vllm"]
    lines = [line for path in REQUIREMENTS for line in pins(path)]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert sorted(names) == sorted(set(names))
    assert not {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python"} & set(names), "vLLM breaks with them"
    assert pins(ROOT / "requirements" / "torch.txt")[0].startswith("torch==")


def test_make_lists_its_targets() -> None:
    make = shutil.which("make")
    assert make
    out = subprocess.run([make, "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, timeout=30)
    assert out.returncode == 0
    listed = {line.split()[1] for line in out.stdout.splitlines()}
    assert {"help", "setup", "demo", "test", "lint", "types", "check", "bench"} <= listed


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("requirements", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": python, "HOME": str(folder)}
    return subprocess.run([str(folder / "scripts" / "setup.sh")], env=env, capture_output=True, text=True, timeout=60)


def test_a_missing_python_is_named_with_the_remedy(checkout: Path) -> None:
    done = set_up(checkout, "python-of-nowhere")
    assert done.returncode == 1
    assert done.stderr == (
        "setup: error: python-of-nowhere is not there: install Python 3.11, or name it with PYTHON=/path/to/python3.11\n"
    )


def test_another_python_is_refused(checkout: Path) -> None:
    other = checkout / "python"
    other.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1\n[ "$1" = -V ]\n')
    other.chmod(0o755)
    done = set_up(checkout, str(other))
    assert done.returncode == 1
    assert "is Python 3.9.1, but Python 3.11 is needed" in done.stderr
    assert not (checkout / ".venv").exists()
