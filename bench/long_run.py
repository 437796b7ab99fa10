"""What grows in a long run: `python -m bench.long_run [--steps 5000] [--json FILE]`.

Trains with the fake engine and fake producers through the real queue and the real weight channel, and samples Redis
(`used_memory_dataset`), the resident memory of every service, and the logs and other files of the run folder. Growth is the mean
of the last quarter of the samples over the mean of the first quarter after `--settle` steps; that of the logs, which hold a line a
checkpoint, is counted against the size at which they are rotated. Two files grow by design and are reported apart:
metrics.jsonl, the record of the run, by a line a step, and rollouts.jsonl, up to metrics.rollouts_max_mb.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbehind.embedded import EmbeddedRedis
from nbehind.process import LOG_MAX_BYTES
from rollout_queue.connection import connect

LIMIT = 0.05  # growth that is still called bounded
SAMPLE_S = 0.5
MIB = 2**20
Sample = dict[str, float]


def command(folder: Path, url: str, steps: int, producers: int) -> list[str]:
    overrides = {
        "run.dir": str(folder),
        "run.max_steps": steps,
        "run.n_behind": 1,
        "sampling.groups_per_step": 4,
        "sampling.num_generations": 4,
        "model.path": "fake",
        "trainer.engine": "fake",
        "producer.backend": "fake",
        "producer.count": producers,
        "checkpoint.every_steps": 20,
        "metrics.rollouts_max_mb": 1.0,
    }
    config = folder / "empty.toml"
    config.write_text("")
    line = [sys.executable, "-m", "nbehind", "run", str(config), "--plain", "--redis", url]
    for key, value in overrides.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    return line


def services(parent: int) -> dict[str, int]:
    """Name -> pid of the supervisor's trainer and producers, and of itself."""
    found = {"supervisor": parent}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "trainer" in words:
            found["trainer"] = int(entry.name)
        elif "producer" in words:
            found[f"producer-{words[words.index('--index') + 1]}"] = int(entry.name)
    return found


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def take_sample(run: Path, client: Any, pids: Mapping[str, int]) -> Sample:
    """One look at everything; `step` is the number of lines of metrics.jsonl."""
    memory = client.info("memory")
    sample: Sample = {
        "step": (run / "metrics.jsonl").read_bytes().count(b"\n"),
        "redis_dataset_mb": memory["used_memory_dataset"] / MIB,
        "redis_used_mb": memory["used_memory"] / MIB,
        "logs_mb": sum(f.stat().st_size for f in (run / "logs").iterdir()) / MIB,
    }
    for name, pid in pids.items():
        sample[f"rss_{name}_mb"] = rss_mb(pid)
    return sample


def watch(process: subprocess.Popen[bytes], run: Path, url: str) -> list[Sample]:
    """Samples until the run has ended."""
    client = connect(url)
    samples: list[Sample] = []
    try:
        while process.poll() is None:
            time.sleep(SAMPLE_S)
            pids = services(process.pid)
            if "trainer" not in pids or not (run / "metrics.jsonl").exists():
                continue
            try:
                samples.append(take_sample(run, client, pids))
            except (FileNotFoundError, ProcessLookupError, IndexError):  # a process ended while it was looked at
                continue
    finally:
        client.close()
    return samples


def growth(samples: Sequence[Sample], settle: int) -> dict[str, dict[str, float]]:
    """name -> first, last, most, and relative growth of what was sampled after `settle` steps."""
    rows = [s for s in samples if s["step"] >= settle]
    if len(rows) < 10:
        raise SystemExit(f"only {len(rows)} samples after step {settle}: give more --steps")
    quarter = len(rows) // 4
    names = sorted({name for row in rows for name in row} - {"step"})
    report = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        first, last = statistics.mean(values[:quarter]), statistics.mean(values[-quarter:])
        base = LOG_MAX_BYTES / MIB if name == "logs_mb" else first
        report[name] = {
            "first": round(first, 4),
            "last": round(last, 4),
            "most": round(max(values), 4),
            "growth": round((last - first) / base, 4),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="trainer steps")
    parser.add_argument("--settle", type=int, default=500, help="steps before the growth counts")
    parser.add_argument("--producers", type=int, default=2, help="producers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        with EmbeddedRedis(folder / "redis", 256) as server, (folder / "out").open("wb") as out:
            line = command(folder, server.url, args.steps, args.producers)
            process = subprocess.Popen(line, stdout=out, stderr=out)
            try:
                samples = watch(process, folder / "run", server.url)
            finally:
                if process.poll() is None:
                    process.terminate()
                process.wait(60)
        if process.returncode:
            raise SystemExit(f"the run failed:\n{(folder / 'out').read_text()[-2000:]}")
        by_design = {n: (folder / "run" / n).stat().st_size / args.steps for n in ("metrics.jsonl",)}
        seconds = time.monotonic() - began
    grown = growth(samples, args.settle)
    bounded = all(entry["growth"] < LIMIT for entry in grown.values())
    for name, entry in grown.items():
        print(f"{name:>24}: {entry['first']:9.3f} → {entry['last']:9.3f} MiB  ({entry['growth']:+.1%})")
    print(f"bounded (< {LIMIT:.0%} after {args.settle} steps): {bounded}")
    report = {
        "steps": args.steps, "settle": args.settle, "seconds": round(seconds, 1), "samples": len(samples),
        "limit": LIMIT, "bounded": bounded, "growth": grown, "bytes_per_step_by_design": by_design,
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
