"""Ids, and which version every token is of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_samples import group, request

from rollout_queue.codec import decode_header, encode_group
from rollout_queue.messages import CommitResult, Lease, RequestId, Version

LEASE = Lease(request(0, 1), "p1", "1-1")


@given(st.integers(0), st.integers(0), st.integers(0))
def test_ids_survive_their_text(step: int, slot: int, round_: int) -> None:
    request_id = RequestId(step, slot, round_)
    assert RequestId.parse(str(request_id)) == request_id


@pytest.mark.parametrize("text", ["", "1.2", "1.2.3.4", "a.b.c", "-1.0.0", "1..2", "1.2.-3"])
def test_other_texts_are_no_ids(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        RequestId.parse(text)


def test_every_token_has_the_version_of_its_span() -> None:
    # sample 0: two tokens of version 5; sample 1: none; sample 2: one of version 5, then two of version 6
    spans = np.array([(0, 0, 0, 2), (2, 0, 0, 1), (2, 1, 1, 3)], np.int32)
    mixed = dataclasses.replace(
        group(LEASE, lengths=(2, 0, 3)), versions=(Version(1, 5, "a"), Version(1, 6, "b")), spans=spans
    )
    assert mixed.token_versions().tolist() == [5, 5, 5, 6, 6]
    assert mixed.num_samples == 3
    header, _body = encode_group(mixed)
    assert decode_header(header, "1-1").oldest_version == 5


def test_attempts_of_a_request() -> None:
    later = LEASE.request.with_attempt(4)
    assert (later.attempt, later.failures) == (4, 0)
    assert later.with_attempt(5, failures=2).failures == 2
    assert LEASE.request.attempt == 0


def test_results_are_the_words_that_the_scripts_say() -> None:
    assert [CommitResult(word) for word in ("OK", "DUP", "GONE", "FENCED")] == list(CommitResult)


def test_two_attempts_of_one_request_can_be_told_apart_in_a_list() -> None:
    """A producer may hold a request again before it hears that it has lost the attempt before."""
    asked = request(1, 1)
    old, new = Lease(asked, "p", "1-0"), Lease(asked.with_attempt(1), "p", "1-0")
    assert new not in [old]
    assert old in [new, old]
    assert group(old) not in [group(new)]
