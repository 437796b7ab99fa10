"""The contract package stays light: no engine, no trainer framework, not even by a detour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "ray", "colossalai", "transformers")
PROGRAM = """
import importlib, pkgutil, sys
import rollout_queue
names = [info.name for info in pkgutil.walk_packages(rollout_queue.__path__, "rollout_queue.")]
for name in names:
    importlib.import_module(name)
print(len(names), *sorted(set(sys.modules) & set(sys.argv[1:])))
"""


def test_the_contract_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *HEAVY], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert int(count) >= len(list((ROOT / "rollout_queue").glob("[a-z]*.py")))
    assert heavy == []
