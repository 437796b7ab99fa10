"""`nbehind status` and `nbehind dead` on a real run, and on what is left of one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import redis

from nbehind.cli import main
from nbehind.embedded import EmbeddedRedis
from rollout_queue.codec import encode_request
from rollout_queue.keys import Keys
from rollout_queue.messages import Request, RequestId, Sampling
from tests.runs import check_conservation, command, running, summary, wait_for

# Durations are drawn from the seed, so what is too slow once is too slow always.
SLOW = {
    "producer__fake_generate_s": 0.15, "producer__fake_sigma": 1.5, "producer__request_timeout_s": 0.5,
    "producer__lease_s": 0.4, "producer__max_attempts": 1, "producer__count": 1, "run__max_steps": 25,
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_a_run_seen_from_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(command("run", tmp_path, **SLOW), tmp_path) as child:
        url_file = tmp_path / "runs" / "run" / "redis.url"
        url = wait_for(lambda: url_file.exists() and url_file.read_text().strip(), "a Redis")

        def letters() -> list[dict]:
            try:
                return json.loads(printed(capsys, "dead", "--redis", url, "--run", "run", "--json"))
            except AssertionError:  # the run has no state yet
                return []

        first = wait_for(letters, "a dead letter")[0]
        assert first["kind"] == "request" and "request_timeout_s" in first["reason"]
        assert first["item"] and first["payload"] and first["time"].startswith("20")
        check_status(capsys, url)
        assert first["entry"] in printed(capsys, "dead", "--redis", url)

        exported = tmp_path / "dead.jsonl"
        printed(capsys, "dead", "--redis", url, "--export", str(exported))
        rows = [json.loads(line) for line in exported.read_text().splitlines()]
        assert first["item"] in {row["id"] for row in rows} and all(row["messages"] for row in rows)
        assert "there already" in error(capsys, "dead", "--redis", url, "--export", str(exported))

        assert "1 prompts re-queued" in printed(capsys, "dead", "--redis", url, "--requeue", first["entry"])
        assert first["entry"] not in {letter["entry"] for letter in letters()}
        assert "no dead letter" in error(capsys, "dead", "--redis", url, "--requeue", first["entry"])
        assert child.wait(120) == 0
    trainer = (tmp_path / "runs" / "run" / "logs" / "trainer.log").read_text()
    assert f"rolls out the re-queued prompt {first['item']}" in trainer
    result = summary(tmp_path)
    check_conservation(result)
    assert result["trained"] == 25 * 4 and result["dead_lettered"] >= 1


def check_status(capsys: pytest.CaptureFixture[str], url: str) -> None:
    (status,) = json.loads(printed(capsys, "status", "--redis", url, "--json"))
    assert (status["run"], status["incarnation"], status["ended"]) == ("run", 1, "")
    assert status["trainer_alive"] and status["published"] >= 0
    assert status["queue"]["queued"] + status["queue"]["leased"] + status["queue"]["delivered"] > 0
    (producer,) = status["producers"].values()
    assert producer["alive"] and int(producer["version"]) >= 0
    (member,) = status["members"].values()
    assert member["alive"] and member["received"][0] == 1 and member["mib_per_s"] > 0
    text = printed(capsys, "status", "--redis", url, "--run", "run")
    for part in ("run run: incarnation 1", "trainer alive", "weight channel:", "MiB/s", *status["producers"]):
        assert part in text


def test_no_run_and_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedRedis(tmp_path, max_mb=16) as server:
        assert "no run is known" in error(capsys, "status", "--redis", server.url)
        client = redis.Redis.from_url(server.url)
        for run in ("a", "b"):
            client.hset(Keys(run).run_state, "incarnation", "1")
        assert "run c is not known" in (line := error(capsys, "status", "--redis", server.url, "--run", "c"))
        assert "there: a, b" in line
        assert "give one with --run: a, b" in error(capsys, "dead", "--redis", server.url)
        both = json.loads(printed(capsys, "status", "--redis", server.url, "--json"))
        assert [status["run"] for status in both] == ["a", "b"]
        assert "producers: none" in printed(capsys, "status", "--redis", server.url)
        check_odd_letters(capsys, client, server.url)
        client.close()


def check_odd_letters(capsys: pytest.CaptureFixture[str], client: redis.Redis, url: str) -> None:
    """Letters that hold no request, hostile bytes in what others wrote, and a run that is over."""
    keys, at = Keys("a"), ("dead", "--redis", url, "--run", "a")
    good = Request(RequestId(3, 1), 1, 0, 0, np.zeros(2, np.int32), Sampling(1, 1), "x", {"messages": []})
    for kind, payload in (("rollout", b"\xff\x00"), ("request", b"torn"), ("request", encode_request(good))):
        client.xadd(keys.dead, {"kind": kind, "reason": "why\n\x1b[31m", "id": "3.1.0", "payload": payload})
    client.hset(keys.producer_info, "p", b"\xc1not msgpack")
    client.hset(keys.members, "m", b"\xc1")
    rollout, torn, request = json.loads(printed(capsys, *at, "--json"))
    assert (rollout["item"], torn["item"], request["item"]) == ("", "", "x")
    text = printed(capsys, *at)
    assert text.count("\n") == 5 and "\x1b" not in text
    assert "silent" in printed(capsys, "status", "--redis", url, "--run", "a")
    assert "issued again" in error(capsys, *at, "--requeue", rollout["entry"])
    assert "cannot be read" in error(capsys, *at, "--requeue", torn["entry"])
    assert "1 prompts re-queued" in printed(capsys, *at, "--requeue", "all")
    assert client.lrange(keys.requeued, 0, -1) == [f"{request['entry']} x".encode()]
    client.hset(keys.run_state, "ended", "done")
    assert "has ended (done): use --export" in error(capsys, *at, "--requeue", "all")


def test_where_to_look_must_be_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "give --redis URL" in error(capsys, "status")
    assert "cannot be used" in error(capsys, "status", "--redis", "redis://127.0.0.1:1")
    assert "hunter2" not in (line := error(capsys, "dead", "--redis", "redis://:hunter2@127.0.0.1:1"))
    assert "NBEHIND_REDIS_PASSWORD" in line
