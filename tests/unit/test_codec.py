"""Round trips of messages, and that nothing but MessageError comes out of bad bytes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_samples import group, request, same_group

from rollout_queue.codec import decode_group, decode_header, decode_request, encode_group, encode_request
from rollout_queue.errors import MessageError
from rollout_queue.messages import Group, Lease, Request, RequestId, Sampling, Version

LEASE = Lease(request(1, 3), "p1", "1-1")
MODERATE = settings(max_examples=150, deadline=None)
int32s = st.integers(0, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
places = st.integers(0, 2**53)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    stops = tuple(draw(st.lists(int32s, max_size=3)))
    return Request(
        id=RequestId(draw(places), draw(places), draw(places)),
        incarnation=draw(places),
        min_version=draw(places),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt_ids=np.array(draw(st.lists(int32s, max_size=12)), np.int32),
        sampling=Sampling(draw(st.integers(1, 99)), draw(st.integers(1, 9999)), 0.7, 0.9, draw(int32s), stops),
        item_id=draw(texts),
        payload=draw(st.dictionaries(texts, plain, max_size=4)),
        attempt=draw(places),
        failures=draw(places),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    count, tokens = len(lengths), sum(lengths)
    versions = draw(st.lists(st.builds(Version, places, places, texts), min_size=1, max_size=3))
    rows = []
    for sample, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=2))) if length > 1 else []
        edges = [0, *cuts, length] if length else [0]
        rows += [(sample, draw(st.integers(0, len(versions) - 1)), a, b) for a, b in pairwise(edges)]

    def values(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.array(draw(st.lists(floats, min_size=size, max_size=size)), np.float32)

    return Group(
        id=RequestId(draw(places), draw(places), draw(places)),
        incarnation=draw(places),
        attempt=draw(places),
        producer=draw(texts),
        versions=tuple(versions),
        prompt_ids=np.array(draw(st.lists(int32s, max_size=6)), np.int32),
        lengths=np.array(lengths, np.int32),
        token_ids=np.array(draw(st.lists(int32s, min_size=tokens, max_size=tokens)), np.int32),
        logprobs=values(tokens),
        spans=np.array(rows, np.int32).reshape(-1, 4),
        rewards=values(count),
        finish=np.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), np.uint8),
        reward_parts={name: values(count) for name in draw(st.lists(texts, unique=True, max_size=2))},
        started_at=draw(st.floats(0, 1e10)),
    )


class TestRoundTrips:
    @MODERATE
    @given(requests())
    def test_request(self, sent: Request) -> None:
        got = decode_request(encode_request(sent))
        assert np.array_equal(got.prompt_ids, sent.prompt_ids) and got.prompt_ids.dtype == np.int32
        plain = [field.name for field in dataclasses.fields(Request) if field.name != "prompt_ids"]
        assert [getattr(got, name) for name in plain] == [getattr(sent, name) for name in plain]

    @MODERATE
    @given(groups())
    def test_group(self, sent: Group) -> None:
        header, body = encode_group(sent)
        assert same_group(decode_group(header, body), sent)
        seen = decode_header(header, "5-0")
        assert (seen.id, seen.incarnation, seen.attempt, seen.entry) == (sent.id, sent.incarnation, sent.attempt, "5-0")
        assert (seen.versions, seen.body_bytes) == (sent.versions, len(body))
        assert seen.num_tokens == len(sent.lengths) * len(sent.prompt_ids) + len(sent.token_ids)
        assert seen.equal_rewards == (len(set(sent.rewards.tolist())) == 1)

    def test_decoding_copies_nothing(self) -> None:
        header, body = encode_group(group(LEASE))
        views = decode_group(header, memoryview(body))
        raw = np.frombuffer(body, np.uint8)
        for name in ("prompt_ids", "lengths", "token_ids", "logprobs", "spans", "rewards", "finish"):
            array = getattr(views, name)
            assert np.shares_memory(array, raw), name
            assert not array.flags.writeable

    def test_arrays_that_are_not_contiguous(self) -> None:
        sent = group(LEASE)
        strided = dataclasses.replace(sent, token_ids=np.repeat(sent.token_ids, 2)[::2])
        assert same_group(decode_group(*encode_group(strided)), sent)

    def test_a_large_group(self) -> None:
        sent = group(LEASE, lengths=(400_000, 300_000))
        assert same_group(decode_group(*encode_group(sent)), sent)


class TestBadBytes:
    HEADER, BODY = encode_group(group(LEASE))
    REQUEST = encode_request(LEASE.request)

    def test_every_truncation_is_refused(self) -> None:
        for end in range(len(self.HEADER)):
            with pytest.raises(MessageError):
                decode_header(self.HEADER[:end], "1-1")
        for end in range(len(self.REQUEST)):
            with pytest.raises(MessageError):
                decode_request(self.REQUEST[:end])
        for end in range(len(self.BODY)):
            with pytest.raises(MessageError):
                decode_group(self.HEADER, self.BODY[:end])

    def test_every_changed_byte_is_refused_or_valid(self) -> None:
        for raw, decode in ((self.HEADER, lambda raw: decode_header(raw, "")), (self.REQUEST, decode_request)):
            for place in range(len(raw)):
                for change in (0x01, 0x40, 0x80, 0xFF):
                    _refused_or(decode, raw[:place] + bytes([raw[place] ^ change]) + raw[place + 1 :])

    @MODERATE
    @given(st.binary(max_size=300))
    def test_noise(self, raw: bytes) -> None:
        _refused_or(decode_request, raw)
        _refused_or(lambda data: decode_header(data, ""), raw)
        _refused_or(lambda data: decode_group(data, b""), raw)
        _refused_or(lambda data: decode_group(self.HEADER, data), raw)

    @MODERATE
    @given(st.dictionaries(st.sampled_from(list(msgpack.unpackb(HEADER))), plain, max_size=3))
    def test_changed_fields_of_a_header(self, changes: dict[str, Any]) -> None:
        raw = msgpack.packb(msgpack.unpackb(self.HEADER) | changes)
        _refused_or(lambda data: decode_header(data, ""), raw)
        _refused_or(lambda data: decode_group(data, self.BODY), raw)

    @MODERATE
    @given(st.dictionaries(st.sampled_from(list(msgpack.unpackb(REQUEST))), plain, max_size=3))
    def test_changed_fields_of_a_request(self, changes: dict[str, Any]) -> None:
        _refused_or(decode_request, msgpack.packb(msgpack.unpackb(self.REQUEST) | changes))

    @MODERATE
    @given(st.integers(0, len(BODY) - 1), st.integers(1, 255))
    def test_changed_bytes_of_a_body(self, place: int, change: int) -> None:
        body = bytearray(self.BODY)
        body[place] ^= change
        _refused_or(lambda data: decode_group(self.HEADER, data), bytes(body))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"v": 2}, "schema 2 is unknown"),
            ({"v": True}, "schema True"),
            ({"n": -1}, "n is not"),
            ({"t": 2**62}, "t is not"),
            ({"t": 6}, "sizes add up"),
            ({"n": 0}, "sizes add up"),
            ({"bytes": 10**12}, "sizes add up"),
            ({"versions": []}, "no versions"),
            ({"versions": [[1, -2, "x"]]}, "negative"),
            ({"parts": ["a", "a"]}, "distinct"),
            ({"producer": b"p"}, "producer is not a str"),
            ({"at": [0.0, float("nan"), 0.0]}, "times"),
            ({"id": [0, 0]}, "id is not"),
            ({"att": 1.0}, "att is not"),
        ],
    )
    def test_reasons(self, changes: dict[str, Any], reason: str) -> None:
        raw = msgpack.packb(msgpack.unpackb(self.HEADER) | changes)
        with pytest.raises(MessageError, match=reason) as error:
            decode_header(raw, "1-1")
        assert error.value.payload_head == raw[:256]

    def test_hostile_msgpack(self) -> None:
        deep = b"\x91" * 100_000 + b"\x90"
        huge = b"\xdd\xff\xff\xff\xff"
        extension = msgpack.packb({"v": 1, "id": msgpack.ExtType(5, b"x")})
        stamp = msgpack.packb({"v": 1, "id": msgpack.Timestamp(1, 1)})
        for raw in (deep, huge, extension, stamp, b"\x80" * 2, b"", b"\xde\xff\xff"):
            with pytest.raises(MessageError):
                decode_header(raw, "")
            with pytest.raises(MessageError):
                decode_request(raw)


class TestInconsistentGroups:
    """The sender refuses them, and so does the receiver, who may have an honest header and a broken body."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"lengths": np.array([2, 4], np.int32)}, "add up"),
            ({"lengths": np.array([-1, 6], np.int32)}, "add up"),
            ({"lengths": np.array([], np.int32)}, "no samples"),
            ({"logprobs": np.array([-1, -1, np.nan, -1, -1], np.float32)}, "logprob is not finite"),
            ({"logprobs": np.array([-1, -1, -np.inf, -1, -1], np.float32)}, "logprob is not finite"),
            ({"rewards": np.array([np.inf, 0], np.float32)}, "reward is not finite"),
            ({"reward_parts": {"x": np.array([np.nan, 0], np.float32)}}, "reward part"),
            ({"reward_parts": {"x": np.zeros(3, np.float32)}}, "reward part"),
            ({"finish": np.array([0, 3], np.uint8)}, "finish"),
            ({"finish": np.array([0], np.uint8)}, "finish"),
            ({"token_ids": np.array([0, 1, -2, 3, 4], np.int32)}, "negative token"),
            ({"prompt_ids": np.array([-1], np.int32)}, "negative token"),
            ({"token_ids": np.arange(5)}, "token_ids is int64"),
            ({"logprobs": np.zeros(5)}, "logprobs is float64"),
            ({"rewards": [0.0, 1.0]}, "rewards is list"),
            ({"spans": np.zeros(4, np.int32)}, "spans is int32"),
            ({"spans": np.zeros((1, 3), np.int32)}, "rows of four"),
            ({"versions": ()}, "not listed"),
            ({"producer": "\ud800"}, "cannot be packed"),
            ({"started_at": float("nan")}, "times"),
        ],
    )
    def test_refused_by_the_sender(self, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(MessageError, match=reason):
            encode_group(dataclasses.replace(group(LEASE), **changes))

    @pytest.mark.parametrize(
        "rows",
        [
            [],
            [(0, 0, 0, 2)],  # the second sample is missing
            [(0, 0, 0, 1), (1, 0, 0, 3)],  # a token is missing
            [(0, 0, 0, 2), (1, 0, 1, 3)],  # ... at the start
            [(0, 0, 0, 2), (0, 0, 1, 2), (1, 0, 0, 3)],  # a token twice
            [(1, 0, 0, 3), (0, 0, 0, 2)],  # out of order
            [(0, 0, 0, 5)],  # over the end of its sample
            [(0, 0, 0, 2), (1, 0, 0, 0), (1, 0, 0, 3)],  # an empty one
            [(0, 0, 2, 0), (1, 0, 0, 3)],
            [(0, 0, 0, 2), (2, 0, 0, 3)],  # no such sample
            [(0, 0, 0, 2), (1, 0, 0, 3), (2, 0, 0, 1)],  # one after the last
            [(0, 0, 0, 2), (1, 0, 0, 3), (1, 0, 0, 3)],
            [(0, 0, 0, 2), (-1, 0, 0, 3)],
            [(0, 1, 0, 2), (1, 0, 0, 3)],  # no such version
            [(0, -1, 0, 2), (1, 0, 0, 3)],
            [(0, 0, -1, 2), (1, 0, 0, 3)],
            [(0, 0, 0, 2**31 - 1), (1, 0, 0, 3)],
        ],
    )
    def test_spans_cover_every_token_once(self, rows: list[tuple[int, ...]]) -> None:
        spans = np.array(rows, np.int32).reshape(-1, 4)
        with pytest.raises(MessageError, match="span"):
            encode_group(dataclasses.replace(group(LEASE), spans=spans))

    def test_a_header_that_lies_about_the_rewards(self) -> None:
        header, body = encode_group(group(LEASE, rewards=(0.0, 1.0)))
        lie = msgpack.packb(msgpack.unpackb(header) | {"eq": True})
        with pytest.raises(MessageError, match="equal"):
            decode_group(lie, body)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"payload": {"x": object()}}, "plain type"),
            ({"payload": {"x": {1, 2}}}, "plain type"),
            ({"payload": {"x": np.float32(1)}}, "plain type"),
            ({"payload": {1: "x"}}, "not a string"),
            ({"payload": {"x": 2**70}}, "cannot be packed"),
            ({"payload": {"x": "\udcff"}}, "cannot be packed"),
            ({"prompt_ids": np.arange(3)}, "prompt_ids is int64"),
            ({"prompt_ids": np.array([-5], np.int32)}, "negative"),
            ({"seed": -1}, "seed"),
            ({"min_version": -1}, "min"),
            ({"sampling": Sampling(0, 1)}, "sampling"),
            ({"sampling": Sampling(1, 1, temperature=0.0)}, "temperature"),
            ({"sampling": Sampling(1, 1, top_p=1.5)}, "top_p"),
            ({"item_id": 7}, "item is not a str"),
        ],
    )
    def test_requests_that_could_not_be_read_are_not_sent(self, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(MessageError, match=reason):
            encode_request(dataclasses.replace(LEASE.request, **changes))


def _refused_or(decode: Any, raw: bytes) -> None:
    """`decode` returns something or raises MessageError; any other exception fails the test."""
    try:
        decode(raw)
    except MessageError as error:
        assert error.reason
