"""What can be told of a run from its Redis alone: `nbehind status` and `nbehind dead`. Nothing here changes a run,
except that a dead letter is taken away when it is re-queued.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import redis

from nbehind.config import Config
from nbehind.config_load import apply_overrides, config_of
from nbehind.errors import InputError
from nbehind.run_folder import RunFolder
from nbehind.services import open_client, open_queue
from rollout_queue.connection import server_name
from rollout_queue.errors import ConnectionRefused, UnsuitableRedis
from rollout_queue.keys import PREFIX, Keys
from rollout_queue.redis_queue import RedisQueue
from weight_sync.errors import SyncError
from weight_sync.membership import Record
from weight_sync.redis_io import unpack_map

RETRY_S = 2.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Server:
    """An open connection, and the config that it was opened with."""

    client: redis.Redis
    config: Config
    url: str

    def runs(self) -> list[str]:
        """Names of the runs that have a state here."""
        match = re.compile(rf"{PREFIX}:\{{(.+)\}}:state")
        found = (
            match.fullmatch(key.decode()) for key in self.client.scan_iter(match=f"{PREFIX}:{{*}}:state", count=1000)
        )
        return sorted(m[1] for m in found if m)

    def chosen(self, run: str) -> list[str]:
        """`run` alone, or every run when it is ''. InputError if there is none."""
        runs = self.runs()
        where = server_name(self.client)
        if not runs:
            raise InputError(f"no run is known in Redis at {where}: is it the right server (--redis)?")
        if run and run not in runs:
            raise InputError(f"run {run} is not known in Redis at {where}; there: {', '.join(runs)}")
        return [run] if run else runs

    @contextmanager
    def queue(self, run: str) -> Iterator[RedisQueue]:
        config = self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": run})})
        client, _, queue = open_queue(config, self.url)
        try:
            yield queue
        finally:
            client.close()


@contextmanager
def server(url: str, run: str, sets: Sequence[str]) -> Iterator[Server]:
    """Connect to `url`, or to the Redis of the run `run` that goes on in this folder. InputError if that cannot be."""
    if not url:
        known = RunFolder(Path("runs") / run).redis_url_file if run else None
        if known is None or not known.is_file():
            raise InputError("give --redis URL (without a password), or the --run that goes on below runs/ here")
        url = known.read_text().strip()
    overrides = [f"redis.url={url}", f"redis.retry_s={RETRY_S}", *sets]
    config = config_of(apply_overrides({}, overrides), "--redis")
    try:
        client = open_client(config, url)
    except (ConnectionRefused, UnsuitableRedis) as error:
        raise InputError(str(error)) from None
    try:
        yield Server(client, config, url)
    finally:
        client.close()


def run_status(at: Server, run: str) -> dict[str, Any]:
    """Everything that Redis knows of the run, as plain JSON types."""
    keys = Keys(run)
    with at.queue(run) as queue:
        state, census = queue.state(), queue.census()
    counts = Counter(mark.state for mark in census.values())
    return {
        "run": run,
        "incarnation": state.incarnation,
        "published": state.published,
        "floor": state.floor,
        "ended": state.ended,
        "trainer_alive": state.trainer_alive,
        "queue": {
            **{name: counts[name] for name in ("queued", "leased", "delivered")},
            "dead_letters": int(at.client.xlen(keys.dead)),
            "requeued": int(at.client.llen(keys.requeued)),
        },
        "producers": _producers(at.client, keys),
        "members": _members(at.client, keys),
    }


def _producers(client: redis.Redis, keys: Keys) -> dict[str, dict[str, Any]]:
    infos: dict[bytes, bytes] = client.hgetall(keys.producer_info)  # type: ignore[assignment]
    lines = {name.decode(): _map(raw, "producer") for name, raw in sorted(infos.items())}
    alive = _exist(client, [keys.producer_alive(name) for name in lines])
    return {name: {**line, "alive": ok} for (name, line), ok in zip(lines.items(), alive, strict=True)}


def _members(client: redis.Redis, keys: Keys) -> dict[str, dict[str, Any]]:
    """Every registered receiver: what it holds, how fast it came, and whether it still lives."""
    records: dict[bytes, bytes] = client.hgetall(keys.members)  # type: ignore[assignment]
    statuses: dict[bytes, bytes] = client.hgetall(keys.member_status)  # type: ignore[assignment]
    names = sorted(records)
    alive = _exist(client, [keys.member_alive(name.decode()) for name in names])
    return {
        name.decode(): {**_member(records[name], statuses.get(name)), "alive": ok}
        for name, ok in zip(names, alive, strict=True)
    }


def _member(record: bytes, status: bytes | None) -> dict[str, Any]:
    known = _map(status, "member") if status else {}
    seconds, nbytes = float(known.get("seconds", 0)), int(known.get("bytes", 0))
    epoch = known.get("epoch", -1)  # -1: its transport needs no group
    try:
        where = Record.decode(record).where
    except SyncError:
        where = "?"
    return {
        "where": where,
        "received": known.get("version"),  # [incarnation, number, checksum]
        "in_use": known.get("swapped"),
        "epoch": epoch if isinstance(epoch, int) and epoch >= 0 else None,
        "transfer_s": seconds or None,
        "transfer_mib": round(nbytes / MIB, 3) if nbytes else None,
        "mib_per_s": round(nbytes / MIB / seconds, 1) if seconds and nbytes else None,
    }


def _map(raw: bytes, what: str) -> dict[str, Any]:
    try:
        return unpack_map(raw, what)
    except (SyncError, msgpack.UnpackException):
        return {}


def _exist(client: redis.Redis, names: Sequence[str]) -> list[bool]:
    return [mark is not None for mark in client.mget(names)] if names else []


def status_text(status: Mapping[str, Any]) -> str:
    """The status for people."""
    trainer = "trainer alive" if status["trainer_alive"] else "no trainer"
    over = f"ended: {status['ended']}" if status["ended"] else trainer
    queue = status["queue"]
    lines = [
        f"run {status['run']}: incarnation {status['incarnation']}, version {status['published']} published, "
        f"floor {status['floor']}, {over}",
        f"requests: {queue['queued']} queued, {queue['leased']} in work, {queue['delivered']} delivered; "
        f"{queue['dead_letters']} dead letters, {queue['requeued']} re-queued",
    ]
    producers = [
        [
            name,
            *(str(p.get(k, "-")) for k in ("version", "tokens_per_s", "in_flight", "groups")),
            _life(p, p.get("stage")),
        ]
        for name, p in status["producers"].items()
    ]
    lines += table("producers", ["producer", "version", "tokens/s", "in flight", "groups", "state"], producers)
    members = [
        [
            name, _version(m["received"]), _version(m["in_use"]), _shown(m["epoch"]), _shown(m["transfer_s"], " s"),
            _shown(m["mib_per_s"], " MiB/s"), _life(m, m["where"]),
        ]
        for name, m in status["members"].items()
    ]  # fmt: skip
    heads = ["member", "received", "in use", "epoch", "transfer", "rate", "where"]
    return "\n".join([*lines, *table("weight channel", heads, members)]) + "\n"


def _version(version: Sequence[Any] | None) -> str:
    return f"{version[0]}.{version[1]}" if version else "-"


def _shown(value: Any, unit: str = "") -> str:
    return "-" if value is None else f"{value}{unit}"


def _life(entry: Mapping[str, Any], text: Any) -> str:
    return str(text or "-") if entry["alive"] else "silent: its heartbeat has stopped"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns below a title; one line when there is nothing."""
    if not rows:
        return [f"{title}: none"]
    rows = [["".join(c if c.isprintable() else " " for c in cell) for cell in row] for row in rows]  # no control codes
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    return [f"{title}:", *(f"  {line.rstrip()}" for line in lines)]
