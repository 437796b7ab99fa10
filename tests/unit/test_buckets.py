"""Buckets cover the buffer once, in order; the pure parts of membership and of what is called."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_queue.messages import Version
from weight_sync.buckets import BLOCK, buckets
from weight_sync.calls import Ack, Call, DropCall, EpochCall, Started, TransferCall, decode_ack, decode_call, encode
from weight_sync.channel import SyncSettings
from weight_sync.errors import SyncError
from weight_sync.member import newest_epoch_only
from weight_sync.membership import MAX_FAILURES, Record, Roster, mismatch

HELLO = {"dtype": "float32", "tokenizer": "t"}


@given(total=st.integers(0, 10**6), size=st.integers(1, 10**6))
def test_buckets_cover_everything_once(total: int, size: int) -> None:
    size = max(size, total // 50)  # keeps the list short
    cut = buckets(total, size)
    assert [b for pair in cut for b in pair] == sorted(b for pair in cut for b in pair)
    assert sum(stop - start for start, stop in cut) == total
    assert all(stop - start == size for start, stop in cut[:-1])
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))


def test_golden_buckets() -> None:
    assert buckets(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert buckets(8, 4) == [(0, 4), (4, 8)]
    assert buckets(0, 4) == []
    for wrong in ((-1, 4), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match="cannot cut"):
            buckets(*wrong)


def test_settings_round_buckets_to_blocks_and_refuse_nonsense() -> None:
    assert SyncSettings(bucket_bytes=1).bucket_bytes == BLOCK
    assert SyncSettings(bucket_bytes=3 * BLOCK + 1).bucket_bytes == 3 * BLOCK
    with pytest.raises(ValueError, match="join_timeout_s"):
        SyncSettings(join_timeout_s=0)


EPOCH = EpochCall(2, 5, "127.0.0.1", 1234, {"a": "s"}, {"a": 1}, 3.0)
TRANSFER = TransferCall(2, 5, 9, 7, "m", 100, BLOCK, 3.0)


@pytest.mark.parametrize("call", [EPOCH, TRANSFER, Started(2), DropCall(2, "a", "s", "why")])
def test_calls_round_trip(call: EpochCall) -> None:
    assert decode_call(encode(call)) == call


def test_acks_round_trip_and_are_not_calls() -> None:
    ack = Ack("a", "s", "received", 3, 1, 2, 5, 9, 7, "")
    assert decode_ack(encode(ack)) == ack
    with pytest.raises(SyncError):
        decode_call(encode(ack))
    with pytest.raises(SyncError):
        decode_ack(encode(EPOCH))


@pytest.mark.parametrize("position", range(0, 120, 3))
def test_damaged_calls_are_errors_of_ours(position: int) -> None:
    raw = encode(TRANSFER)
    for damaged in (raw[:position], raw[:position] + b"\xc3" + raw[position + 1 :], raw + b"\x00"):
        try:
            decode_call(damaged)
        except SyncError:
            continue
        assert len(damaged) == len(raw), "only a changed value may still be a call"


def test_whoever_slept_does_not_go_to_an_old_rendezvous() -> None:
    def epoch(number: int, incarnation: int = 1) -> EpochCall:
        return EpochCall(incarnation, number, "h", 1, {}, {}, 1.0)

    def transfer(number: int, incarnation: int = 1) -> TransferCall:
        return TransferCall(incarnation, number, 1, 1, "", 0, BLOCK, 1.0)

    drop = DropCall(1, "a", "s", "")
    slept: list[Call] = [epoch(1), transfer(1), drop, epoch(2), transfer(2)]
    assert newest_epoch_only(slept) == [drop, epoch(2), transfer(2)]
    assert newest_epoch_only([transfer(2), epoch(3)]) == [epoch(3)]
    assert newest_epoch_only([transfer(2)]) == [transfer(2)]
    mixed: list[Call] = [epoch(9), Started(2), epoch(1, 2), transfer(1, 2)]
    assert newest_epoch_only(mixed) == mixed, "epochs of different incarnations do not compare"


def record(session: str, have: Version | None = None, free: int = 2) -> Record:
    return Record(session, HELLO, "host h, pid 1", have, free)


def test_records_round_trip() -> None:
    for one in (record("s"), record("s", Version(1, 2, "c"), 0)):
        assert Record.decode(one.encode()) == one
    for raw in (b"", b"\xc0", b"\x93\x01\x02\x03"):
        with pytest.raises(SyncError):
            Record.decode(raw)


def test_mismatch_names_both_sides_and_ignores_torch() -> None:
    ours = {**HELLO, "torch": "2"}
    assert mismatch(ours, "p", record("s")) == ""
    text = mismatch({**ours, "dtype": "bfloat16", "new": "1"}, "p", record("s"))
    assert text == (
        "producer p (host h, pid 1) has dtype = float32 where the trainer has bfloat16, new = missing where the trainer "
        "has 1: give both the same model.dtype; make new the same on both"
    )


def test_targets_are_those_who_lack_the_version_and_have_room() -> None:
    roster = Roster(incarnation=2)
    fresh = {
        "new": record("1"),
        "has_it": record("2", Version(2, 5, "c5")),
        "older": record("3", Version(2, 4, "c4")),
        "other_life": record("4", Version(1, 5, "c5")),
        "other_history": record("5", Version(2, 5, "xx")),
        "full": record("6", free=0),
    }
    assert sorted(roster.update(fresh, {4: "c4", 5: "c5"})) == sorted(fresh)
    assert roster.targets(5) == {"new": "1", "older": "3", "other_life": "4", "other_history": "5"}
    roster.members["new"].dropped = "late"
    roster.members["older"].refused = "dtype"
    assert set(roster.targets(5)) == {"other_life", "other_history"}
    fresh["new"] = record("again")
    del fresh["other_life"]
    assert roster.update(fresh, {}) == ["new"]
    assert set(roster.targets(5)) == {"new", "other_history"}


def test_the_latest_statement_of_a_member_holds() -> None:
    roster = Roster(incarnation=2)
    roster.update({"a": record("s")}, {})
    assert not roster.take_ack(Ack("a", "old session", "free", 99, 0))
    assert not roster.take_ack(Ack("b", "s", "free", 99, 0))
    assert roster.take_ack(Ack("a", "s", "free", 5, 0))
    assert roster.targets(1) == {}
    roster.take_ack(Ack("a", "s", "received", 4, 1, incarnation=2, number=7))  # overtaken, but the version counts
    assert roster.members["a"].free == 0
    assert roster.members["a"].acked == 7
    roster.take_ack(Ack("a", "s", "received", 6, 1, incarnation=1, number=99))  # of an older trainer
    assert roster.members["a"].acked == 7
    roster.take_status("a", {"session": "s", "order": 8, "free": 2})
    roster.take_status("a", {"session": "other", "order": 9, "free": 0})
    roster.take_status("nobody", {})
    assert roster.targets(8) == {"a": "s"}
    roster.take_status("a", {"session": "s", "order": 9, "free": 2, "version": [1, 9, "c"]})  # of an older trainer
    assert roster.targets(8) == {"a": "s"}
    roster.take_status("a", {"session": "s", "order": 9, "free": 2, "version": [2, 8, "c"]})  # its ack was lost
    assert roster.targets(8) == {}
    assert MAX_FAILURES >= 2, "one flipped bit costs a second copy, not the membership"
