"""How close a step comes to max(generation, training): `python bench/overlap.py [--json FILE]`.

Runs the fake engine and the fake generator, with constant durations, through the real queue and the real weight
channel, one run per n_behind, and compares the time per step with the ideal: generation + training at n_behind = 0,
max(generation, training) above. Every producer has room for the groups of all open steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SKIPPED_STEPS = 3  # the first ones contain start-up


def run(folder: Path, n_behind: int, generate_s: float, train_s: float, steps: int, producers: int) -> dict[str, Any]:
    """One run; returns its figures."""
    groups = 4
    overrides = {
        "run.name": f"overlap{n_behind}",
        "run.dir": str(folder),
        "run.n_behind": n_behind,
        "run.max_steps": steps,
        "sampling.groups_per_step": groups,
        "sampling.num_generations": 4,
        "model.path": "fake",
        "trainer.engine": "fake",
        "trainer.fake_step_s": train_s,
        "producer.backend": "fake",
        "producer.fake_generate_s": generate_s,
        "producer.count": producers,
        "producer.max_requests": groups * (n_behind + 1),
        "checkpoint.every_steps": 0,
    }
    config = folder / "empty.toml"
    config.write_text("")
    command = [sys.executable, "-m", "nbehind", "run", str(config), "--plain"]
    for key, value in overrides.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    rows = [json.loads(line) for line in (folder / f"overlap{n_behind}" / "metrics.jsonl").read_text().splitlines()]
    stamps = [row["t"] for row in rows][SKIPPED_STEPS:]
    period_s = statistics.median(b - a for a, b in itertools.pairwise(stamps))
    ideal_s = generate_s + train_s if n_behind == 0 else max(generate_s, train_s)
    return {
        "n_behind": n_behind,
        "period_s": round(period_s, 4),
        "ideal_s": ideal_s,
        "ratio": round(period_s / ideal_s, 3),
        "lag_max": max(row["lag_max"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate-s", type=float, default=0.5, help="duration of every generation, seconds")
    parser.add_argument("--train-s", type=float, default=0.5, help="duration of every training step, seconds")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--producers", type=int, default=2, help="producers of each run")
    parser.add_argument("--n-behind", type=int, nargs="+", default=[0, 1, 2], help="the bounds to measure")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for n_behind in args.n_behind:
            result = run(Path(folder), n_behind, args.generate_s, args.train_s, args.steps, args.producers)
            results.append(result)
            print(
                f"n_behind {n_behind}: {result['period_s']:.3f} s a step, ideal {result['ideal_s']:.3f} s, "
                f"ratio {result['ratio']:.3f}"
            )
    report = {"generate_s": args.generate_s, "train_s": args.train_s, "steps": args.steps, "results": results}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
