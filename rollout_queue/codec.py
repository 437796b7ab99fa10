"""Messages to bytes and back. A header is a small msgpack map (schema version first), a body the raw arrays.

Body layout, little-endian, no padding, in this order (N samples, P prompt tokens, T completion tokens, K spans):

    prompt_ids int32 [P] | lengths int32 [N] | token_ids int32 [T] | logprobs float32 [T] | spans int32 [K, 4]
    | rewards float32 [N] | each reward part float32 [N], in the header's order | finish uint8 [N]

Decoding copies nothing: the arrays are read-only views into the body. Nothing here unpickles or evaluates. Whatever is
not a message of this schema raises MessageError, on both sides, so a broken producer hears it first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_queue.errors import MessageError
from rollout_queue.messages import (
    SCHEMA_VERSION,
    Group,
    GroupHeader,
    Request,
    RequestId,
    Sampling,
    Version,
)
from rollout_queue.validate import all_equal, check_group_arrays, expect
from rollout_queue.wire import MAX_COUNT, count, is_count, is_number, pack, plain, typed, unpack

Buffer = bytes | memoryview


def encode_request(request: Request) -> bytes:
    """The request as one msgpack map. MessageError if it could not be decoded again."""
    expect(request.prompt_ids, "prompt_ids", np.int32, 1)
    plain(request.payload, "payload")
    sampling = request.sampling
    fields = {
        "v": SCHEMA_VERSION,
        "id": list(request.id),
        "inc": request.incarnation,
        "min": request.min_version,
        "seed": request.seed,
        "prompt": np.ascontiguousarray(request.prompt_ids, "<i4").tobytes(),
        "sampling": [
            sampling.num_generations,
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            list(sampling.stop_token_ids),
        ],
        "item": request.item_id,
        "payload": request.payload,
        "att": request.attempt,
        "fail": request.failures,
    }
    raw = pack(fields)
    decode_request(raw)
    return raw


def decode_request(raw: bytes) -> Request:
    """Inverse of `encode_request`; MessageError on anything else."""
    try:
        fields = unpack(raw)
        prompt = typed(fields, "prompt", bytes)
        if len(prompt) % 4:
            raise MessageError("prompt is not a whole number of int32")
        prompt_ids = np.frombuffer(prompt, "<i4")
        if prompt_ids.size and int(prompt_ids.min()) < 0:
            raise MessageError("a negative prompt token id")
        payload = typed(fields, "payload", dict)
        plain(payload, "payload")
        return Request(
            id=_request_id(fields),
            incarnation=count(fields, "inc"),
            min_version=count(fields, "min"),
            seed=count(fields, "seed", 2**64 - 1),
            prompt_ids=prompt_ids,
            sampling=_sampling(typed(fields, "sampling", list)),
            item_id=typed(fields, "item", str),
            payload=payload,
            attempt=count(fields, "att"),
            failures=count(fields, "fail"),
        )
    except MessageError as error:
        raise MessageError(f"request: {error.reason}", raw) from None


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """(header, body) of the group. MessageError if the group is inconsistent."""
    header, parts = encode_group_parts(group)
    return header, b"".join(parts)


def encode_group_parts(group: Group) -> tuple[bytes, list[memoryview]]:
    """Like `encode_group`, with the body as views of the group's arrays, to be sent one after the other."""
    arrays: list[tuple[NDArray[Any], str, type, int]] = [
        (group.prompt_ids, "prompt_ids", np.int32, 1),
        (group.lengths, "lengths", np.int32, 1),
        (group.token_ids, "token_ids", np.int32, 1),
        (group.logprobs, "logprobs", np.float32, 1),
        (group.spans, "spans", np.int32, 2),
        (group.rewards, "rewards", np.float32, 1),
        *((part, f"reward part {name}", np.float32, 1) for name, part in group.reward_parts.items()),
        (group.finish, "finish", np.uint8, 1),
    ]
    for array, name, dtype, ndim in arrays:
        expect(array, name, dtype, ndim)
    check_group_arrays(group)
    parts = [_raw(array) for array, _, _, _ in arrays]
    fields = {
        "v": SCHEMA_VERSION,
        "id": list(group.id),
        "inc": group.incarnation,
        "att": group.attempt,
        "producer": group.producer,
        "versions": [list(version) for version in group.versions],
        "n": len(group.lengths),
        "p": len(group.prompt_ids),
        "t": len(group.token_ids),
        "k": len(group.spans),
        "parts": list(group.reward_parts),
        "eq": all_equal(group.rewards),
        "bytes": sum(map(len, parts)),
        "at": [group.started_at, group.generated_at, group.scored_at],
    }
    _header_fields(fields)
    return pack(fields), parts


def decode_header(raw: bytes, entry: str) -> GroupHeader:
    """The header of stream entry `entry`; `body_key` is left empty. MessageError if malformed."""
    try:
        fields = _header_fields(unpack(raw))
    except MessageError as error:
        raise MessageError(f"header: {error.reason}", raw) from None
    return GroupHeader(
        id=fields["id"],
        incarnation=fields["inc"],
        attempt=fields["att"],
        producer=fields["producer"],
        versions=fields["versions"],
        num_tokens=fields["n"] * fields["p"] + fields["t"],
        equal_rewards=fields["eq"],
        body_bytes=fields["bytes"],
        entry=entry,
        raw=raw,
        body_key="",
    )


def decode_group(header_raw: bytes, body: Buffer) -> Group:
    """The group as read-only views into `body`. MessageError if header or body are malformed or do not fit together."""
    try:
        fields = _header_fields(unpack(header_raw))
        if len(body) != fields["bytes"]:
            raise MessageError(f"body has {len(body)} bytes, its header says {fields['bytes']}")
        group = _group_views(fields, body)
        check_group_arrays(group)
        if fields["eq"] != all_equal(group.rewards):
            raise MessageError("header and body disagree on whether all rewards are equal")
        return group
    except MessageError as error:
        raise MessageError(f"group: {error.reason}", header_raw) from None


# ------------------------------------------------------------------------------------------------ the pieces


def _header_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The checked content of a header."""
    versions = tuple(_version(item) for item in typed(fields, "versions", list))
    if not versions:
        raise MessageError("no versions")
    parts = typed(fields, "parts", list)
    if not all(isinstance(name, str) for name in parts) or len(set(parts)) != len(parts):
        raise MessageError("reward parts are not distinct names")
    times = typed(fields, "at", list)
    if len(times) != 3 or not all(is_number(value) for value in times):
        raise MessageError("times are not three numbers")
    out: dict[str, Any] = {
        "id": _request_id(fields),
        "inc": count(fields, "inc"),
        "att": count(fields, "att"),
        "producer": typed(fields, "producer", str),
        "versions": versions,
        "parts": parts,
        "eq": typed(fields, "eq", bool),
        "at": [float(value) for value in times],
    }
    for key in ("n", "p", "t", "k"):
        out[key] = count(fields, key, MAX_COUNT)
    out["bytes"] = count(fields, "bytes")
    expected = 4 * (out["p"] + 2 * out["n"] + 2 * out["t"] + 4 * out["k"] + len(parts) * out["n"]) + out["n"]
    if out["n"] < 1 or out["bytes"] != expected:
        raise MessageError(f"sizes add up to {expected} bytes, the header says {out['bytes']}")
    return out


def _group_views(fields: Mapping[str, Any], body: Buffer) -> Group:
    offset = 0

    def take(dtype: str, count: int) -> NDArray[Any]:
        nonlocal offset
        view = np.frombuffer(body, dtype, count, offset) if count else np.empty(0, dtype)
        offset += view.nbytes
        view.flags.writeable = False
        return view

    samples, tokens = fields["n"], fields["t"]
    return Group(
        id=fields["id"],
        incarnation=fields["inc"],
        attempt=fields["att"],
        producer=fields["producer"],
        versions=fields["versions"],
        prompt_ids=take("<i4", fields["p"]),
        lengths=take("<i4", samples),
        token_ids=take("<i4", tokens),
        logprobs=take("<f4", tokens),
        spans=take("<i4", 4 * fields["k"]).reshape(-1, 4),
        rewards=take("<f4", samples),
        reward_parts={name: take("<f4", samples) for name in fields["parts"]},
        finish=take("u1", samples),
        started_at=fields["at"][0],
        generated_at=fields["at"][1],
        scored_at=fields["at"][2],
    )


def _sampling(items: list[Any]) -> Sampling:
    if len(items) != 6 or not isinstance(items[5], list):
        raise MessageError("sampling does not have its six fields")
    generations, new_tokens, temperature, top_p, top_k, stops = items
    whole = (generations, new_tokens, top_k, *stops)
    if not all(is_count(value, MAX_COUNT) for value in whole) or generations < 1 or new_tokens < 1:
        raise MessageError("sampling: a count is negative, zero or not a whole number")
    if not is_number(temperature) or temperature <= 0 or not is_number(top_p) or not 0 < top_p <= 1:
        raise MessageError("sampling: temperature or top_p out of range")
    return Sampling(generations, new_tokens, float(temperature), float(top_p), top_k, tuple(stops))


def _version(item: object) -> Version:
    if not isinstance(item, list) or len(item) != 3 or not isinstance(item[2], str):
        raise MessageError("a version is not (incarnation, number, checksum)")
    if not is_count(item[0]) or not is_count(item[1]):
        raise MessageError("a version with a number that is negative or not whole")
    return Version(item[0], item[1], item[2])


def _request_id(fields: Mapping[str, Any]) -> RequestId:
    parts = typed(fields, "id", list)
    if len(parts) != 3 or not all(is_count(part) for part in parts):
        raise MessageError("id is not (step, slot, round)")
    return RequestId(*parts)


def _raw(array: NDArray[Any]) -> memoryview:
    """The little-endian bytes of the array, without a copy where it has them already."""
    if sys.byteorder == "big":
        array = array.astype(array.dtype.newbyteorder("<"))
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat).cast("B") if flat.size else memoryview(b"")
