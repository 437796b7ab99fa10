"""Messages to bytes and back. A header is a small msgpack map (schema version first), a body the raw arrays.

Body layout, little-endian, no padding, in this order (N samples, P prompt tokens, T completion tokens, K spans):

    prompt_ids int32 [P] | lengths int32 [N] | token_ids int32 [T] | logprobs float32 [T] | spans int32 [K, 4]
    | rewards float32 [N] | each reward part float32 [N], in the header's order | finish uint8 [N]

Decoding copies nothing: the arrays are read-only views into the body. Nothing here unpickles or evaluates. Whatever is
not a message of this schema raises MessageError, on both sides, so a broken producer hears it first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout_queue.errors import MessageError
from rollout_queue.messages import (
    SCHEMA_VERSION,
    Finish,
    Group,
    GroupHeader,
    Request,
    RequestId,
    Sampling,
    Version,
)

Buffer = bytes | memoryview

_MAX_COUNT = 2**31 - 1  # entries of one array
_MAX_PLACE = 2**53  # step, slot, version, attempt: exact as a double, which Lua computes with
_MAX_DEPTH = 32


def encode_request(request: Request) -> bytes:
    """The request as one msgpack map. MessageError if it could not be decoded again."""
    _expect(request.prompt_ids, "prompt_ids", np.int32, 1)
    _plain(request.payload, "payload")
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
    raw = _pack(fields)
    decode_request(raw)
    return raw


def decode_request(raw: bytes) -> Request:
    """Inverse of `encode_request`; MessageError on anything else."""
    try:
        fields = _unpack(raw)
        prompt = _typed(fields, "prompt", bytes)
        if len(prompt) % 4:
            raise MessageError("prompt is not a whole number of int32")
        prompt_ids = np.frombuffer(prompt, "<i4")
        if prompt_ids.size and int(prompt_ids.min()) < 0:
            raise MessageError("a negative prompt token id")
        payload = _typed(fields, "payload", dict)
        _plain(payload, "payload")
        return Request(
            id=_request_id(fields),
            incarnation=_count(fields, "inc"),
            min_version=_count(fields, "min"),
            seed=_count(fields, "seed", 2**64 - 1),
            prompt_ids=prompt_ids,
            sampling=_sampling(_typed(fields, "sampling", list)),
            item_id=_typed(fields, "item", str),
            payload=payload,
            attempt=_count(fields, "att"),
            failures=_count(fields, "fail"),
        )
    except MessageError as error:
        raise MessageError(f"request: {error.reason}", raw) from None


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """(header, body) of the group. MessageError if the group is inconsistent."""
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
        _expect(array, name, dtype, ndim)
    check_group_arrays(group)
    body = b"".join(_raw(array, dtype) for array, _, dtype, _ in arrays)
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
        "eq": _all_equal(group.rewards),
        "bytes": len(body),
        "at": [group.started_at, group.generated_at, group.scored_at],
    }
    header = _pack(fields)
    decode_header(header, "")
    return header, body


def decode_header(raw: bytes, entry: str) -> GroupHeader:
    """The header of stream entry `entry`; `body_key` is left empty. MessageError if malformed."""
    try:
        fields = _header_fields(raw)
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
        fields = _header_fields(header_raw)
        if len(body) != fields["bytes"]:
            raise MessageError(f"body has {len(body)} bytes, its header says {fields['bytes']}")
        group = _group_views(fields, body)
        check_group_arrays(group)
        if fields["eq"] != _all_equal(group.rewards):
            raise MessageError("header and body disagree on whether all rewards are equal")
        return group
    except MessageError as error:
        raise MessageError(f"group: {error.reason}", header_raw) from None


def check_group_arrays(group: Group) -> None:
    """Raise MessageError unless the arrays of the group are consistent with each other."""
    samples, tokens = len(group.lengths), len(group.token_ids)
    if samples < 1:
        raise MessageError("no samples")
    if int(group.lengths.min()) < 0 or int(group.lengths.sum(dtype=np.int64)) != tokens:
        raise MessageError("lengths do not add up to the number of tokens")
    if len(group.logprobs) != tokens or len(group.rewards) != samples or len(group.finish) != samples:
        raise MessageError("logprobs, rewards or finish of another length than tokens or samples")
    for name, part in group.reward_parts.items():
        if len(part) != samples or not np.isfinite(part).all():
            raise MessageError(f"reward part {name!r} is not finite, or of another length than the samples")
    if not np.isfinite(group.rewards).all():
        raise MessageError("a reward is not finite")
    if not np.isfinite(group.logprobs).all():
        raise MessageError("a logprob is not finite")
    if (tokens and int(group.token_ids.min()) < 0) or (len(group.prompt_ids) and int(group.prompt_ids.min()) < 0):
        raise MessageError("a negative token id")
    if int(group.finish.max()) > max(Finish):
        raise MessageError("an unknown finish reason")
    check_spans(group.spans, group.lengths, len(group.versions))


def _all_equal(rewards: NDArray[np.float32]) -> bool:
    return bool((rewards == rewards[:1]).all())


def check_spans(spans: NDArray[np.int32], lengths: NDArray[np.int32], num_versions: int) -> None:
    """Raise MessageError unless the rows (sample, version index, start, end) cover every sample exactly, in order."""
    if spans.ndim != 2 or spans.shape[1] != 4:
        raise MessageError("spans are not rows of four")
    total = int(lengths.sum(dtype=np.int64))
    if not len(spans):
        if total:
            raise MessageError("tokens without a version span")
        return
    sample, version, start, end = spans.astype(np.int64).T
    if int(sample.min()) < 0 or int(sample.max()) >= len(lengths):
        raise MessageError("a span of a sample that does not exist")
    if int(version.min()) < 0 or int(version.max()) >= num_versions:
        raise MessageError("a span of a version that is not listed")
    if bool((start < 0).any()) or bool((start >= end).any()) or bool((end > lengths[sample]).any()):
        raise MessageError("an empty span, or one outside of its sample")
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[sample]
    first, last = offsets + start, offsets + end
    if int(first[0]) != 0 or int(last[-1]) != total or bool((first[1:] != last[:-1]).any()):
        raise MessageError("spans do not cover the tokens exactly once, in order")


# ------------------------------------------------------------------------------------------------ the pieces


def _header_fields(raw: bytes) -> dict[str, Any]:
    fields = _unpack(raw)
    versions = tuple(_version(item) for item in _typed(fields, "versions", list))
    if not versions:
        raise MessageError("no versions")
    parts = _typed(fields, "parts", list)
    if not all(isinstance(name, str) for name in parts) or len(set(parts)) != len(parts):
        raise MessageError("reward parts are not distinct names")
    times = _typed(fields, "at", list)
    if len(times) != 3 or not all(_is_number(value) for value in times):
        raise MessageError("times are not three numbers")
    out: dict[str, Any] = {
        "id": _request_id(fields),
        "inc": _count(fields, "inc"),
        "att": _count(fields, "att"),
        "producer": _typed(fields, "producer", str),
        "versions": versions,
        "parts": parts,
        "eq": _typed(fields, "eq", bool),
        "at": [float(value) for value in times],
    }
    for key in ("n", "p", "t", "k"):
        out[key] = _count(fields, key, _MAX_COUNT)
    out["bytes"] = _count(fields, "bytes")
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
    if not all(_is_count(value, _MAX_COUNT) for value in whole) or generations < 1 or new_tokens < 1:
        raise MessageError("sampling: a count is negative, zero or not a whole number")
    if not _is_number(temperature) or temperature <= 0 or not _is_number(top_p) or not 0 < top_p <= 1:
        raise MessageError("sampling: temperature or top_p out of range")
    return Sampling(generations, new_tokens, float(temperature), float(top_p), top_k, tuple(stops))


def _version(item: object) -> Version:
    if not isinstance(item, list) or len(item) != 3 or not isinstance(item[2], str):
        raise MessageError("a version is not (incarnation, number, checksum)")
    if not _is_count(item[0]) or not _is_count(item[1]):
        raise MessageError("a version with a number that is negative or not whole")
    return Version(item[0], item[1], item[2])


def _request_id(fields: Mapping[str, Any]) -> RequestId:
    parts = _typed(fields, "id", list)
    if len(parts) != 3 or not all(_is_count(part) for part in parts):
        raise MessageError("id is not (step, slot, round)")
    return RequestId(*parts)


def _pack(fields: Mapping[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"cannot be packed: {error}") from None


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"msgpack extension {code} of {len(data)} bytes")


def _unpack(raw: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(raw, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(f"not msgpack: {error or type(error).__name__}") from None
    if not isinstance(fields, dict):
        raise MessageError("not a map")
    if fields.get("v") != SCHEMA_VERSION or isinstance(fields.get("v"), bool):
        raise MessageError(f"schema {str(fields.get('v'))[:20]} is unknown, this is {SCHEMA_VERSION}")
    return fields


def _typed(fields: Mapping[str, Any], key: str, kind: type) -> Any:
    value = fields.get(key)
    if type(value) is not kind:
        raise MessageError(f"{key} is not a {kind.__name__}")
    return value


def _count(fields: Mapping[str, Any], key: str, most: int = _MAX_PLACE) -> int:
    value = fields.get(key)
    if not _is_count(value, most):
        raise MessageError(f"{key} is not a whole number from 0 to {most}")
    return int(value)  # type: ignore[arg-type]


def _is_count(value: object, most: int = _MAX_PLACE) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _plain(value: object, where: str, depth: int = 0) -> None:
    """Raise MessageError unless `value` consists of plain msgpack types."""
    if depth > _MAX_DEPTH:
        raise MessageError(f"{where} is nested too deeply")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise MessageError(f"{where} has a key that is not a string")
            _plain(item, where, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _plain(item, where, depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str, bytes):
        raise MessageError(f"{where} holds a {type(value).__name__}, which is not a plain type")


def _raw(array: NDArray[Any], dtype: type) -> memoryview:
    """The little-endian bytes of the array, without a copy where it has them already."""
    flat: Any = np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).reshape(-1)
    return memoryview(flat.view(np.uint8))


def _expect(array: NDArray[Any], name: str, dtype: type, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != ndim:
        kind = f"{array.dtype}[{array.ndim}d]" if isinstance(array, np.ndarray) else type(array).__name__
        raise MessageError(f"{name} is {kind}, expected {np.dtype(dtype)}[{ndim}d]")
