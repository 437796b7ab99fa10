"""Groups per second through the queue, against raw redis-py streams with the same bytes, in the same run.

    python bench/queue.py [--json FILE] [--rounds N] [--redis URL] [--require RATIO]

Ours:  a producer process leases, encodes and commits; the trainer polls, fetches, decodes and releases.
Raw:   a producer process XADDs the same body bytes; the reader XREADGROUPs, XACKs and XDELs them.

Rounds of both alternate, so that noise of the machine meets both. A round's time runs from the first request issued
(first XADD) to the last group released (deleted). The number that counts is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import redis

from nbehind.embedded import EmbeddedRedis
from rollout_queue.codec import encode_group
from rollout_queue.connection import check_server, connect
from rollout_queue.keys import Keys
from rollout_queue.messages import Group, GroupHeader, Lease, Request, RequestId, Sampling, Version
from rollout_queue.redis_queue import RedisQueue

SIZES = (16 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
ROUND_BYTES = 128 * 2**20
MOST_GROUPS = 600
SAMPLES = 8
IN_FLIGHT = 8  # requests that a producer holds
RAW = "bench:raw"


def make_queue(client: redis.Redis, run: str) -> RedisQueue:
    return RedisQueue(client, Keys(run), lease_s=60.0, max_attempts=3, max_body_bytes=2**30)


def make_arrays(size: int) -> dict[str, Any]:
    """The arrays of a group whose body has about `size` bytes."""
    rng = np.random.default_rng(0)
    length = max(1, (size - 1000) // 8 // SAMPLES)
    return {
        "prompt_ids": rng.integers(0, 30_000, 64, dtype=np.int32),
        "lengths": np.full(SAMPLES, length, np.int32),
        "token_ids": rng.integers(0, 30_000, SAMPLES * length, dtype=np.int32),
        "logprobs": -rng.random(SAMPLES * length, dtype=np.float32),
        "spans": np.array([(sample, 0, 0, length) for sample in range(SAMPLES)], np.int32),
        "rewards": rng.random(SAMPLES, dtype=np.float32),
        "finish": np.zeros(SAMPLES, np.uint8),
    }


def make_group(lease: Lease, arrays: dict[str, Any]) -> Group:
    asked = lease.request
    versions = (Version(asked.incarnation, 0, "0" * 64),)
    return Group(asked.id, asked.incarnation, asked.attempt, lease.owner, versions, **arrays)


def produce(url: str, run: str, orders: Connection) -> None:
    """The producer process: does the rounds it is told."""
    client = connect(url)
    queue = make_queue(client, run)
    while (order := orders.recv()) is not None:
        kind, size, count = order
        arrays = make_arrays(size)
        body = raw_body(arrays)
        orders.send("ready")
        done = 0
        while done < count:
            if kind == "raw":
                client.xadd(RAW, {"body": body})
                done += 1
                continue
            for lease in queue.lease("bench", 0, IN_FLIGHT, 5.0):
                queue.commit(lease, make_group(lease, arrays))
                done += 1
    client.close()


def raw_body(arrays: dict[str, Any]) -> bytes:
    request = Request(RequestId(0, 0), 1, 0, 0, arrays["prompt_ids"], Sampling(SAMPLES, 1), "item")
    return encode_group(make_group(Lease(request, "bench", ""), arrays))[1]


def ours_round(queue: RedisQueue, incarnation: int, number: int, count: int) -> float:
    prompt = np.arange(64, dtype=np.int32)
    requests = [
        Request(RequestId(number, slot), incarnation, 0, slot, prompt, Sampling(SAMPLES, 1), f"item-{slot}")
        for slot in range(count)
    ]
    start = time.perf_counter()
    queue.issue(requests)
    done = 0
    while done < count:
        headers = [header for header in queue.poll(5.0) if isinstance(header, GroupHeader)]
        assert None not in queue.fetch(headers)
        queue.release(headers)
        done += len(headers)
    return time.perf_counter() - start


def raw_round(client: redis.Redis, count: int) -> float:
    start = time.perf_counter()
    done = 0
    while done < count:
        reply: Any = client.xreadgroup("readers", "r0", {RAW: ">"}, count=64, block=5000)
        for _stream, entries in reply:
            names = [name for name, _fields in entries]
            client.xack(RAW, "readers", *names)
            client.xdel(RAW, *names)
            done += len(names)
    return time.perf_counter() - start


def bench_size(client: redis.Redis, run: str, orders: Connection, size: int, rounds: int) -> dict[str, Any]:
    """Alternate rounds of both; returns rates in groups/s and the median of the ratios."""
    queue = make_queue(client, run)
    incarnation = queue.claim(0)
    count = max(4, min(MOST_GROUPS, ROUND_BYTES // size))
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    for number in range(rounds + 1):
        for kind in ("ours", "raw") if number % 2 else ("raw", "ours"):
            orders.send((kind, size, count))
            orders.recv()
            seconds = raw_round(client, count) if kind == "raw" else ours_round(queue, incarnation, number, count)
            if number:  # the first round warms up
                rates[kind].append(count / seconds)
    ratios = [a / b for a, b in zip(rates["ours"], rates["raw"], strict=True)]
    return {
        "bytes": size,
        "groups_a_round": count,
        "rounds": rounds,
        "ours_groups_per_s": round(statistics.median(rates["ours"]), 1),
        "raw_groups_per_s": round(statistics.median(rates["raw"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def bench(url: str, rounds: int) -> list[dict[str, Any]]:
    run = f"bench-{uuid.uuid4().hex[:8]}"
    client = connect(url)
    check_server(client)
    client.delete(RAW)
    client.xgroup_create(RAW, "readers", mkstream=True)
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    producer = context.Process(target=produce, args=(url, run, theirs), daemon=True)
    producer.start()
    theirs.close()
    results = []
    try:
        print(f"{'bytes':>10} {'ours/s':>10} {'raw/s':>10} {'ratio':>7}   min – max of {rounds} rounds")
        for size in SIZES:
            row = bench_size(client, run, orders, size, rounds)
            results.append(row)
            print(
                f"{row['bytes']:>10} {row['ours_groups_per_s']:>10} {row['raw_groups_per_s']:>10} {row['ratio']:>7}"
                f"   {row['ratio_min']} – {row['ratio_max']}",
                flush=True,
            )
        orders.send(None)
        producer.join(10.0)
    finally:
        if producer.is_alive():
            producer.terminate()
            producer.join()
        client.delete(RAW, *client.scan_iter(match=f"nbehind:{{{run}}}:*"))
        client.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind at each size (default 7)")
    parser.add_argument("--redis", metavar="URL", default="", help="server to use (default: an embedded one)")
    parser.add_argument("--require", type=float, default=0.7, help="least ratio at 256 KiB and more (default 0.7)")
    args = parser.parse_args()
    if args.redis:
        results = bench(args.redis, args.rounds)
    else:
        with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder, max_mb=1024) as server:
            results = bench(server.url, args.rounds)
    worst = min(row["ratio"] for row in results if row["bytes"] >= 256 * 2**10)
    good = worst >= args.require
    print(f"worst ratio at ≥ 256 KiB: {worst} ({'≥' if good else '<'} {args.require})")
    if args.json:
        Path(args.json).write_text(json.dumps({"bench": "queue", "ok": good, "results": results}, indent=1) + "\n")
    return 0 if good else 1
