"""Which transport a member gets, and who is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weight_sync.channel import SyncSettings
from weight_sync.choice import MODES, common, has_died, possible, shares_memory, shm_offer
from weight_sync.errors import Refused
from weight_sync.membership import Record, mismatch
from weight_sync.shm_files import SharedFiles
from weight_sync.transports import facts

NCCL = "2.30.1 (nccl4py 0.6.0)"
HERE = {"gpu": "GPU-1", "nccl": NCCL}
BESIDE = {"gpu": "GPU-2", "nccl": NCCL}
OLD = {"gpu": "GPU-3", "nccl": "2.21.5 (nccl4py 0.6.0)"}
NO_NCCL = {"gpu": "GPU-4", "nccl": ""}


@pytest.mark.parametrize(
    ("ours", "theirs", "shared", "expected"),
    [
        ({}, {}, True, ["shm", "gloo"]),
        ({}, {}, False, ["gloo"]),
        (HERE, HERE, True, ["shm", "ipc", "gloo"]),
        (HERE, HERE, False, ["ipc", "gloo"]),
        (HERE, BESIDE, False, ["nccl", "gloo"]),
        (HERE, OLD, False, ["gloo"]),
        (HERE, NO_NCCL, False, ["gloo"]),
        (NO_NCCL, {**NO_NCCL, "gpu": "GPU-5"}, False, ["gloo"]),
        (HERE, {}, False, ["gloo"]),
        ({}, HERE, True, ["shm", "gloo"]),
    ],
)
def test_auto_takes_the_best_that_both_have(
    ours: dict[str, str], theirs: dict[str, str], shared: bool, expected: list[str]
) -> None:
    assert possible("auto", ours, theirs, shared, "p") == expected


@pytest.mark.parametrize(
    ("mode", "theirs", "words"),
    [
        ("nccl", OLD, ["producer p", "2.21.5", "2.30.1", "install the same nccl4py"]),
        ("nccl", NO_NCCL, ["none (no GPU, or nccl4py is not installed)", "2.30.1"]),
        ("nccl", {}, ["none (no GPU", "2.30.1"]),
        ("nccl", HERE, ["GPU-1", "two ranks on one GPU"]),
        ("ipc", BESIDE, ["GPU-2", "GPU-1", "put both on one GPU"]),
        ("ipc", {}, ["none", "GPU-1"]),
        ("shm", HERE, ["/dev/shm", "--ipc"]),
    ],
)
def test_a_named_transport_that_cannot_be_is_refused_with_both_sides(
    mode: str, theirs: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(Refused) as refused:
        possible(mode, HERE, theirs, False, "p")
    for word in [*words, f'sync.transport = "{mode}"', '"auto"']:
        assert word in str(refused.value)


def test_a_named_transport_that_can_be_is_the_only_one() -> None:
    assert possible("nccl", HERE, BESIDE, True, "p") == ["nccl"]
    assert possible("ipc", HERE, HERE, True, "p") == ["ipc"]
    assert possible("gloo", HERE, HERE, True, "p") == ["gloo"]
    assert possible("shm", {}, {}, True, "p") == ["shm"]


def test_a_group_takes_what_all_of_it_can() -> None:
    assert common([["ipc", "gloo"], ["ipc", "gloo"]]) == "ipc"
    assert common([["ipc", "gloo"], ["nccl", "gloo"]]) == "gloo"
    assert common([["nccl"]]) == "nccl"
    assert common([["shm", "gloo"], ["nccl", "gloo"]]) == "gloo"


def test_memory_is_shared_when_the_token_is_here(tmp_path: Path) -> None:
    offer = shm_offer(tmp_path / "a-token")
    assert shares_memory(offer)
    boot, user, secret, path = offer["can_shm"].split(" ", 3)
    assert user == str(os.getuid())
    for changed in (
        f"other-boot {user} {secret} {path}",
        f"{boot} {os.getuid() + 1} {secret} {path}",
        f"{boot} {user} {secret[:-1]} {path}",
        f"{boot} {user} {secret} {tmp_path}/missing",
        f"{boot} {user} {secret} {tmp_path}",
        f"{boot} {user} {secret} /dev/zero",
        f"{boot} {user} {secret}",
        "",
        "\x00 \x00",
    ):
        assert not shares_memory({"can_shm": changed}), changed
    assert not shares_memory({})
    (tmp_path / "a-token").write_text("x" * 10_000)
    assert not shares_memory(offer)


def test_a_token_tells_whether_its_process_lives(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path, "run", "a")
    offer = shm_offer(files.token())
    assert shares_memory(offer) and not has_died(offer)
    files.close()
    assert has_died(offer)
    unlocked = shm_offer(tmp_path / "unlocked")
    assert has_died(unlocked)
    os.mkfifo(tmp_path / "pipe")
    boot, user, secret, _ = offer["can_shm"].split(" ", 3)
    assert not shares_memory(
        {"can_shm": f"{boot} {user} {secret} {tmp_path}/pipe"}
    )  # and it does not wait for a writer


def test_modes_are_checked_and_need_no_gpu() -> None:
    for mode in MODES:
        assert SyncSettings(transport=mode).transport == mode
    with pytest.raises(ValueError, match="must be one of auto, gloo"):
        SyncSettings(transport="carrier pigeon")
    assert facts("gloo") == facts("shm") == {}


def test_a_quantized_engine_is_refused_unless_it_can_quantize_again() -> None:
    ours = {"dtype": "bfloat16", "quantization": "none"}
    plain = Record("s", {"dtype": "bfloat16"}, "host h", None, 2)
    assert mismatch(ours, "p", plain) == ""
    fp8 = {"dtype": "bfloat16", "quantization": "fp8"}
    text = mismatch(ours, "p", Record("s", fp8, "host h", None, 2))
    for word in ("producer p", "fp8", "bfloat16", "model.path"):
        assert word in text
    assert mismatch(ours, "p", Record("s", {**fp8, "requantize": "yes"}, "host h", None, 2)) == ""
