"""What a weight update costs: `python -m bench.weight_sync [--members 1 2 4] [--params 1 135 500] [--link-gbit 10] [--json FILE]`.

In each round the same bytes go from one process to the others in five ways:
  flat        one gloo broadcast of one buffer: the most that gloo can do
  per_tensor  one gloo broadcast a tensor: what a plain loop over the parameters does
  gloo        our channel from publish() to the last member's ack: copies, sums, sends, verifies, hands over
  shm         the same for members that read the publisher's memory
  memcpy      a warm copy of the bytes within one process, by one thread as everything here
Ratios are medians over the rounds. "stall" is how long the trainer waits: the return of publish(), against memcpy.
"transfer" is the rest, from there to the last ack, of which the trainer sees nothing. "pause" is the longest time that another Python thread of a member had to wait while a version arrived.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis
import torch
import torch.distributed as dist

from bench.link import limited, run_limited
from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from weight_sync.channel import SyncSettings
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.rendezvous import HostedStore, join
from weight_sync.staged import StagedWeights

WAYS = ("gloo", "shm")
TICK_S = 0.002
DEADLINE_S = 120.0
WARM_UP = 2  # rounds that fill every buffer for the first time


def shapes(millions: float) -> list[tuple[int, ...]]:
    """A transformer's: an embedding, and 30 layers of 9 tensors, with `millions` parameters in all."""
    width = max(8, round((millions * 1e6 / 135e6) ** 0.5 * 576 / 8) * 8)
    ff, small = width * 8 // 3, width // 3
    layer = [(width, width), (small, width), (small, width), (width, width), (ff, width), (ff, width), (width, ff)]
    layers = [*layer, (width,), (width,)] * 30
    rest = round(millions * 1e6) - sum(torch.Size(s).numel() for s in layers)
    return [(max(1, rest // width), width), *layers, (width,)]


def make(millions: float, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """One buffer, and the tensors as views of it."""
    sizes = [torch.Size(s).numel() for s in shapes(millions)]
    flat = torch.rand(sum(sizes), dtype=dtype)
    named = [
        (f"tensor{i}", part.view(shape))
        for i, (part, shape) in enumerate(zip(torch.split(flat, sizes), shapes(millions), strict=True))
    ]
    return flat, named


def settings_of(way: str, bucket_mb: float) -> SyncSettings:
    return SyncSettings(bucket_bytes=round(bucket_mb * 2**20), transport=way)


class Ticker(threading.Thread):
    """Measures the longest pause of a Python thread that wants to run every TICK_S."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0

    def run(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(TICK_S)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now


def hello(dtype: torch.dtype, way: str) -> dict[str, str]:
    return {"dtype": str(dtype).removeprefix("torch."), "transport": way}


def _receiver(client: redis.Redis, way: str, name: str, dtype: torch.dtype, mb: float) -> Receiver:
    def on_staged(staged: StagedWeights) -> None:
        made.swapped(staged.version)

    made = Receiver(client, Keys(way), name, hello(dtype, way), settings_of(way, mb), on_staged)
    return made


def member(pipe: Connection, url: str, millions: float, dtype: torch.dtype, rank: int, port: int, mb: float) -> None:
    """A receiver of every way, whose engine takes each version at once. Does what the pipe says."""
    torch.set_num_threads(1)
    store, _ = join("127.0.0.1", port, "bench", rank, DEADLINE_S, threading.Event())
    world = int(store.get("world"))
    limit = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    flat, named = make(millions, dtype)
    client, receivers, ticker = connect(url), [], Ticker()
    for way in WAYS:
        made = _receiver(client, way, f"m{rank}", dtype, mb)
        made.start()
        receivers.append(made)
    ticker.start()
    pipe.send("ready")
    while (said := pipe.recv()) != "close":
        if said == "pause":
            pipe.send(ticker.longest_s)
            ticker.longest_s = 0.0
            continue
        dist.barrier()
        for part in [flat] if said == "flat" else [tensor for _, tensor in named]:
            dist.broadcast(part, 0)
        dist.barrier()
    for receiver in receivers:
        receiver.check()
        receiver.close()
    client.close()
    dist.destroy_process_group()


class Rig:
    """The trainer's end of a case, and its members."""

    def __init__(self, url: str, millions: float, dtype: torch.dtype, members: int, bucket_mb: float) -> None:
        context = multiprocessing.get_context("spawn")
        host = HostedStore("127.0.0.1", "bench", b"", DEADLINE_S)
        host.store.set("world", str(members + 1))
        self._client = connect(url)
        self.flat, self.named = make(millions, dtype)
        self._copy = torch.empty_like(self.flat)
        self._number = -1
        self._publishers: dict[str, Publisher] = {}
        for way in WAYS:
            made = Publisher(self._client, Keys(way), 1, hello(dtype, way), settings_of(way, bucket_mb))
            made.start()
            self._publishers[way] = made
        self._peers = []
        for rank in range(1, members + 1):
            ours, theirs = context.Pipe()
            arguments = (theirs, url, millions, dtype, rank, host.port, bucket_mb)
            process = context.Process(target=member, args=arguments, daemon=True)
            process.start()
            self._peers.append((process, ours))
        if missing := host.missing(range(1, members + 1), DEADLINE_S, threading.Event()):
            raise SystemExit(f"bench: processes {sorted(missing)} did not start")
        host.go()
        limit = timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", store=host.store, rank=0, world_size=members + 1, timeout=limit)
        for _, pipe in self._peers:
            pipe.recv()
        for publisher in self._publishers.values():
            _wait(partial(_all_there, publisher, members), publisher)

    def round(self) -> dict[str, float]:
        """Seconds of every way, once."""
        self._number += 1
        self.flat.view(torch.uint8)[:: 2**20] += 1
        seconds = {"memcpy_s": _timed(lambda: self._copy.copy_(self.flat))}
        seconds["flat_s"] = self._plain("flat", [self.flat])
        seconds["per_tensor_s"] = self._plain("per_tensor", [tensor for _, tensor in self.named])
        for way, publisher in self._publishers.items():
            seconds |= {f"{way}_{what}": value for what, value in self._ours(publisher).items()}
        return seconds

    def close(self) -> None:
        for _, pipe in self._peers:
            pipe.send("close")
        for process, _ in self._peers:
            process.join()
        for publisher in self._publishers.values():
            publisher.check()
            publisher.close()
        self._client.close()
        dist.destroy_process_group()

    def _plain(self, command: str, parts: list[torch.Tensor]) -> float:
        for _, pipe in self._peers:
            pipe.send(command)
        dist.barrier()
        began = time.perf_counter()
        for part in parts:
            dist.broadcast(part, 0)
        dist.barrier()
        return time.perf_counter() - began

    def _pauses(self) -> float:
        for _, pipe in self._peers:
            pipe.send("pause")
        return max(float(pipe.recv()) for _, pipe in self._peers)

    def _ours(self, publisher: Publisher) -> dict[str, float]:
        self._pauses()
        number = self._number
        began = time.perf_counter()
        publisher.publish(number, self.named)
        stall = time.perf_counter() - began
        _wait(lambda: all(v == number for v in publisher.members().values()), publisher)
        total = time.perf_counter() - began
        return {"s": total, "stall_s": stall, "transfer_s": total - stall, "pause_s": self._pauses()}


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _all_there(publisher: Publisher, members: int) -> bool:
    return len(publisher.members()) == members


def _wait(true: Callable[[], bool], publisher: Publisher) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        publisher.check()
        if time.monotonic() > end:
            raise SystemExit(f"bench: nothing within {DEADLINE_S:g} s; {publisher.status()}")
        time.sleep(0.0005)


RATIOS: Mapping[str, tuple[str, str]] = {
    "gloo_over_flat": ("gloo_s", "flat_s"),
    "gloo_transfer_over_flat": ("gloo_transfer_s", "flat_s"),
    "gloo_over_per_tensor": ("gloo_s", "per_tensor_s"),
    "gloo_stall_over_memcpy": ("gloo_stall_s", "memcpy_s"),
    "shm_write_over_memcpy": ("shm_stall_s", "memcpy_s"),
    "shm_over_flat": ("shm_s", "flat_s"),
    "shm_over_memcpy": ("shm_s", "memcpy_s"),
}


def measure(millions: float, members: int, dtype: torch.dtype, rounds: int, bucket_mb: float) -> dict[str, Any]:
    """Medians of seconds and of the ratios within a round."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder, max_mb=64) as server:
        rig = Rig(server.url, millions, dtype, members, bucket_mb)
        found = [rig.round() for _ in range(WARM_UP + rounds)]
        nbytes = rig.flat.numel() * dtype.itemsize
        rig.close()
    counted = found[WARM_UP:]
    row: dict[str, Any] = {"million_params": millions, "members": members, "mb": round(nbytes / 1e6, 1)}
    row |= {"tensors": len(shapes(millions)), "rounds": rounds, "cores": os.cpu_count()}
    row["link_gbit"] = limited()
    row |= {key: statistics.median(r[key] for r in counted) for key in counted[0]}
    row |= {f"{way}_first_s": found[0][f"{way}_s"] for way in WAYS}
    row |= {name: statistics.median(r[a] / r[b] for r in counted) for name, (a, b) in RATIOS.items()}
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, nargs="+", default=[1, 135, 500], help="million parameters")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 4], help="receiving processes")
    parser.add_argument("--rounds", type=int, default=7, help=f"counted rounds, after {WARM_UP} others")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 from 500 million on")
    parser.add_argument("--bucket-mb", type=float, default=32.0, help="sync.bucket_mb")
    parser.add_argument("--link-gbit", type=float, default=0.0, help="limit loopback to that rate (default: memory's)")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    if arguments.link_gbit > 0 and not limited():
        run_limited(arguments.link_gbit, "bench.weight_sync", sys.argv[1:])
    torch.set_num_threads(1)
    rows = []
    for millions in arguments.params:
        name = arguments.dtype or ("bfloat16" if millions >= 500 else "float32")
        for members in arguments.members:
            row = measure(millions, members, getattr(torch, name), arguments.rounds, arguments.bucket_mb)
            rows.append({"dtype": name, **row})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
