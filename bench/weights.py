"""What a weight update costs: `python -m bench.weights [--members 1 2] [--params 1 135] [--json FILE]`.

The same float32 tensors go from one process to 1 or 2 others in three ways: one gloo broadcast of a flat buffer (the
most that gloo can do), one gloo broadcast a tensor (what a plain loop over the parameters does), and our channel from
publish() to the last member's ack, which copies, sums, verifies and hands over as well. "stall" is how long the trainer
waits: the whole broadcast for the plain ways, the return of publish() for ours; for members, the longest pause of
another Python thread while a version arrives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbehind.embedded import EmbeddedRedis
from rollout_queue.connection import connect
from rollout_queue.keys import Keys
from weight_sync.channel import SyncSettings
from weight_sync.checksum import checksum
from weight_sync.publisher import Publisher
from weight_sync.receiver import Receiver
from weight_sync.rendezvous import HostedStore, join

HELLO = {"dtype": "float32", "transport": "gloo"}
TICK_S = 0.002
DEADLINE_S = 120.0


def shapes(millions: float) -> list[tuple[int, ...]]:
    """A transformer's: an embedding, and 30 layers of 9 tensors, with `millions` parameters in all."""
    width = max(8, round((millions * 1e6 / 135e6) ** 0.5 * 576 / 8) * 8)
    ff, small = width * 8 // 3, width // 3
    layer = [(width, width), (small, width), (small, width), (width, width), (ff, width), (ff, width), (width, ff)]
    layers = [*layer, (width,), (width,)] * 30
    rest = round(millions * 1e6) - sum(torch.Size(s).numel() for s in layers)
    return [(max(1, rest // width), width), *layers, (width,)]


def make(millions: float) -> list[tuple[str, torch.Tensor]]:
    return [(f"tensor{i}", torch.rand(shape)) for i, shape in enumerate(shapes(millions))]


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


def plain_peer(pipe: Connection, millions: float, rank: int, size: int, port: int, repeats: int) -> None:
    """A receiver of the plain ways."""
    torch.set_num_threads(1)
    store, _ = join("127.0.0.1", port, "bench", rank, DEADLINE_S, threading.Event())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE_S))
    tensors = [t for _, t in make(millions)]
    flat = torch.empty(sum(t.numel() for t in tensors))
    for parts in ([flat], tensors):
        for _ in range(repeats):
            dist.barrier()
            for part in parts:
                dist.broadcast(part, 0)
            dist.barrier()
    pipe.send("done")
    dist.destroy_process_group()


def measure_plain(millions: float, members: int, repeats: int, context: Any) -> dict[str, float]:
    """Seconds of one flat broadcast and of a broadcast a tensor: medians."""
    host = HostedStore("127.0.0.1", "bench", b"", DEADLINE_S)
    peers = []
    for rank in range(1, members + 1):
        ours, theirs = context.Pipe()
        arguments = (theirs, millions, rank, members + 1, host.port, repeats)
        process = context.Process(target=plain_peer, args=arguments, daemon=True)
        process.start()
        peers.append((process, ours))
    missing = host.missing(range(1, members + 1), DEADLINE_S, threading.Event())
    if missing:
        raise SystemExit(f"bench: processes {sorted(missing)} did not start")
    host.go()
    limit = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", store=host.store, rank=0, world_size=members + 1, timeout=limit)
    tensors = [t for _, t in make(millions)]
    flat = torch.cat([t.reshape(-1) for t in tensors])
    seconds = {}
    for name, parts in (("flat_s", [flat]), ("per_tensor_s", tensors)):
        times = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            for part in parts:
                dist.broadcast(part, 0)
            dist.barrier()
            times.append(time.perf_counter() - began)
        seconds[name] = statistics.median(times[1:])
    for process, pipe in peers:
        pipe.recv()
        process.join()
    dist.destroy_process_group()
    return seconds


def member(pipe: Connection, url: str, run: str, name: str, settings: SyncSettings) -> None:
    """A member of our channel, whose engine takes each version at once."""
    torch.set_num_threads(1)
    client, ticker = connect(url), Ticker()
    receiver = Receiver(client, Keys(run), name, HELLO, settings, lambda staged: receiver.swapped(staged.version))
    receiver.start()
    ticker.start()
    while pipe.recv() != "close":
        pipe.send(ticker.longest_s)
        ticker.longest_s = 0.0
    receiver.check()
    receiver.close()
    client.close()


def measure_ours(millions: float, members: int, repeats: int, context: Any, settings: SyncSettings) -> dict[str, float]:
    """Seconds of our channel, and what the trainer and the members see of it: medians."""
    keys = Keys("bench")
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder, max_mb=64) as server:
        client = connect(server.url)
        publisher = Publisher(client, keys, 1, HELLO, settings)
        publisher.start()
        peers = []
        for i in range(members):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=member, args=(theirs, server.url, keys.run, f"m{i}", settings), daemon=True
            )
            process.start()
            peers.append((process, ours))
        _wait(lambda: len(publisher.members()) == members, publisher)
        named = make(millions)
        total, stall, pauses = [], [], []
        for number in range(repeats):
            for _, pipe in peers:
                pipe.send("reset")
                pipe.recv()
            began = time.perf_counter()
            publisher.publish(number, named)
            stall.append(time.perf_counter() - began)
            _wait(lambda number=number: all(v == number for v in publisher.members().values()), publisher)
            total.append(time.perf_counter() - began)
            for _, pipe in peers:
                pipe.send("pause")
                pauses.append(pipe.recv())
        for process, pipe in peers:
            pipe.send("close")
            process.join()
        publisher.close()
        client.close()
    return {
        "ours_s": statistics.median(total[2:]),
        "ours_first_s": total[0],
        "stall_trainer_s": statistics.median(stall[2:]),
        "pause_member_s": statistics.median(pauses[2 * members :]),
    }


def _wait(true: Any, publisher: Publisher) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        publisher.check()
        if time.monotonic() > end:
            raise SystemExit(f"bench: nothing within {DEADLINE_S:g} s; {publisher.status()}")
        time.sleep(0.001)


def measure_copy(millions: float, repeats: int) -> dict[str, float]:
    """A plain copy of the bytes against their checksum, best of `repeats`."""
    flat = torch.ones(round(millions * 1e6) * 4 // 8 * 8, dtype=torch.uint8)
    target = torch.empty_like(flat)
    copies, sums = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(flat)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        checksum(flat, "digest")
        sums.append(time.perf_counter() - began)
    return {"memcpy_s": min(copies), "checksum_s": min(sums)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, nargs="+", default=[1, 135], help="million float32 parameters")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2], help="receiving processes")
    parser.add_argument("--repeats", type=int, default=7, help="updates a case; the first are not counted")
    parser.add_argument("--bucket-mb", type=float, default=32.0, help="sync.bucket_mb")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    settings = SyncSettings(bucket_bytes=round(arguments.bucket_mb * 2**20))
    rows = []
    for millions in arguments.params:
        for members in arguments.members:
            row = {"million_params": millions, "members": members, "tensors": len(shapes(millions))}
            row |= measure_copy(millions, arguments.repeats)
            row |= measure_plain(millions, members, arguments.repeats, context)
            row |= measure_ours(millions, members, arguments.repeats, context, settings)
            row["ours_over_flat"] = row["ours_s"] / row["flat_s"]
            row["ours_over_per_tensor"] = row["ours_s"] / row["per_tensor_s"]
            rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
