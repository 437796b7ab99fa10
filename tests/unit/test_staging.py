"""The two staging buffers of the publisher, and the two shared files of a receiver."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_queue.messages import Version
from weight_sync import staging
from weight_sync.buckets import BLOCK
from weight_sync.checksum import BlockSums
from weight_sync.errors import Refused, Superseded, SyncError, TransferFailed
from weight_sync.ledger import VersionLedger
from weight_sync.manifest import Manifest
from weight_sync.regions import Reading, Region
from weight_sync.shm_files import SharedFiles, clean
from weight_sync.staging import StagingArea


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((5,), float(value)))]


def value(area: StagingArea) -> float:
    taken = area.take()
    assert taken is not None
    found = float(taken.manifest.views(taken.flat)["w"][0])
    taken.release()
    return found


def test_the_newest_version_wins_and_the_one_in_use_is_untouched() -> None:
    area = StagingArea()
    assert area.take() is None
    area.stage(1, weights(1), None)
    used = area.take()
    assert used is not None
    for number in (2, 3, 4):
        area.stage(number, weights(number), None)
    assert area.skipped == 2
    assert float(used.manifest.views(used.flat)["w"][0]) == 1.0
    used.release()
    assert value(area) == 4.0
    assert area.take() is None


def test_two_buffers_serve_for_ever() -> None:
    area = StagingArea()
    places = set()
    before = None
    for number in range(20):
        area.stage(number, weights(number), None)
        taken = area.take()
        assert taken is not None
        places.add(taken.flat.data_ptr())
        if before is not None:
            before.release()
        before = taken
    assert len(places) == 2
    assert area.skipped == 0


def test_a_buffer_is_free_when_its_last_holder_lets_go() -> None:
    area = StagingArea()
    held = []
    for number in (0, 1):
        area.stage(number, weights(number), None)
        taken = area.take()
        assert taken is not None
        held.append(taken)
    held[0].retain()
    held[0].release()
    with pytest.raises(SyncError, match="both staging buffers are held"):
        area.stage(2, weights(2), None)
    held[0].release()
    area.stage(2, weights(2), None)
    assert value(area) == 2.0


def test_a_version_is_summed_up_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "FOLLOW_BYTES", BLOCK)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    area = StagingArea()
    followed = []

    def slowly(first: float) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            yield f"w{i}", torch.full((2 * BLOCK // 4,), first + i)
            followed.append(area.follow(0.01))

    area.stage(0, slowly(1.0), None)
    assert followed == [False] * 3, "the first version's buffer still moves while it grows"
    for number, first in ((1, 10.0), (2, 20.0)):  # 2 overwrites 1, which nobody took
        area.stage(number, slowly(first), None)
    assert followed[3:] == [True] * 6
    assert not area.follow(0.01)
    taken = area.take()
    assert taken is not None
    whole = BlockSums(taken.flat).hex("d")
    taken.flat.zero_()
    assert taken.sums.hex("d") == whole, "nothing had to be read again"


def test_a_single_core_is_left_to_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    area = StagingArea()
    area.stage(0, weights(0), None)
    area.stage(1, ((n, t) for n, t in weights(1) if not area.follow(10.0)), None)
    assert value(area) == 1.0


def test_a_failed_first_copy_does_not_fix_the_layout() -> None:
    class Broken(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise RuntimeError("lost")

    area = StagingArea()
    with pytest.raises(RuntimeError, match="lost"):
        area.stage(0, [("w", torch.zeros(3).as_subclass(Broken))], None)
    area.stage(0, [("w", torch.ones(1000))], None)
    assert value(area) == 1.0
    with pytest.raises(Refused, match=r"w float32\[1000\] has become w float32\[5\]"):
        area.stage(1, weights(1), None)
    with pytest.raises(Refused, match="bfloat16"):
        area.stage(1, [("w", torch.ones(1000))], torch.bfloat16)
    area.stage(1, [("w", torch.ones(1000) * 2)], None)
    assert value(area) == 2.0


def test_weights_with_gradients_are_copied_without_a_graph() -> None:
    area = StagingArea()
    parameter = torch.nn.Parameter(torch.ones(3))
    area.stage(0, [("w", parameter)], torch.bfloat16)
    taken = area.take()
    assert taken is not None
    assert not taken.flat.requires_grad
    assert taken.manifest.views(taken.flat)["w"].dtype == torch.bfloat16


# --- shared files
def version(number: int) -> Version:
    return Version(1, number, f"c{number}")


def fill(files: SharedFiles, number: int, size: int = 64) -> Path:
    slot = files.acquire(size)
    assert slot is not None
    assert slot.flat is not None
    slot.flat.fill_(number)
    files.keep(slot, version(number))
    return slot.path


def test_files_are_written_in_turn_and_never_before_they_are_taken(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path, "run", "member")
    first, second = fill(files, 1), fill(files, 2)
    assert first != second
    assert files.acquire(64) is None
    assert files.free == 0
    assert first.read_bytes() == bytes([1]) * 64
    files.swapped(version(1))
    assert files.free == 1
    assert fill(files, 3) == first
    files.swapped(version(3))  # frees 2 as well: the generator went past it
    assert files.free == 2
    files.swapped(version(3))
    with pytest.raises(SyncError, match="version 2 was reported"):
        files.swapped(version(2))
    assert fill(files, 4) == second, "the file that was filled longest ago, not the one just swapped in"
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_discarded_file_is_free_and_another_size_makes_it_anew(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path, "run", "member")
    slot = files.acquire(64)
    assert slot is not None
    files.discard(slot)
    assert files.free == 2
    path = fill(files, 1, size=100_000)
    assert path.stat().st_size == 100_000
    assert fill(files, 2, size=0).stat().st_size == 1
    files.close()


def test_memory_that_is_not_there_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path, "run", "member")
    with pytest.raises(SyncError, match="cannot reserve"):
        files.acquire(1 << 50)
    assert list(tmp_path.iterdir()) == []
    assert fill(files, 1).exists()
    files.close()
    with pytest.raises(SyncError, match="cannot make"):
        SharedFiles(tmp_path / "missing", "run", "member").acquire(1)


def test_only_files_that_nobody_holds_are_cleaned(tmp_path: Path) -> None:
    left = tmp_path / "nbehind-weights-run-member-1-abc-0"
    left.write_bytes(b"x")
    foreign = tmp_path / "something-else"
    foreign.write_bytes(b"x")
    living = SharedFiles(tmp_path, "run/../..", "a member:1")
    path = fill(living, 1)
    assert path.parent == tmp_path
    assert not left.exists()
    clean(tmp_path)
    assert path.exists()
    assert foreign.exists()
    living.close()
    assert list(tmp_path.iterdir()) == [foreign]


# --- who was offered what
def test_the_ledger_knows_what_was_offered_to_whom() -> None:
    ledger = VersionLedger(3)
    ledger.seed({1: "old"})
    for number in (2, 4):
        ledger.computed(Version(3, number, f"c{number}"))
    ledger.offer(Version(3, 2, "c2"), ["a", "b"])
    assert ledger.offered() == {1: "old", 2: "c2"}
    assert (ledger.given("a"), ledger.given("c")) == ({2}, set())
    ledger.given("a").add(9)
    assert ledger.given("a") == {2}
    assert ledger.wait(4, 0.0, lambda: None) == Version(3, 4, "c4")
    with pytest.raises(Superseded):
        ledger.wait(3, 0.0, lambda: None)
    with pytest.raises(TransferFailed):
        ledger.wait(5, 0.0, lambda: None)
    ledger.prune(3)
    assert (ledger.offered(), ledger.given("a")) == ({}, set())


# --- sources that do not hold the whole model
def test_a_generator_is_taken_in_tensor_by_tensor() -> None:
    """A sharded trainer gathers one tensor at a time: none may be kept, for the first version or a later one."""
    alive = weakref.WeakSet()
    most = 0

    def gathered(number: int) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(30):
            tensor = torch.full((100 + i, 7), float(number + i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield f"w{i}", tensor
            del tensor

    area = StagingArea()
    for number in range(4):
        area.stage(number, gathered(number), torch.bfloat16)
        taken = area.take()
        assert taken is not None
        assert [float(t[-1, -1]) for t in taken.buffer.views.values()] == [number + i for i in range(30)]
        taken.release()
    assert most <= 2, "the one being copied, and the next while it is made"
    assert not alive


def test_a_generator_that_differs_in_the_middle_leaves_the_area_as_it_was() -> None:
    area = StagingArea()
    good = [("a", torch.ones(100)), ("b", torch.ones(5)), ("c", torch.ones(3))]
    area.stage(0, iter(good), None)
    for bad, message in (
        (good[:2], "3 tensors have become 2"),
        ([*good, ("d", torch.ones(1)), ("e", torch.ones(1))], "3 tensors have become 5"),
        ([good[0], good[2], good[1]], r"b float32\[5\] has become c float32\[3\]"),
        ([good[0], ("b", torch.ones(6)), good[2]], r"b float32\[5\] has become b float32\[6\]"),
        ([good[0], good[0], good[2]], "given twice"),
    ):
        with pytest.raises(Refused, match=message):
            area.stage(1, iter(bad), None)
    taken = area.take()
    assert taken is not None
    assert taken.number == 0
    assert float(taken.flat.view(torch.float32).sum()) == 108.0
    taken.release()
    area.stage(1, iter(good), None)


# --- memory that others read
def test_memory_that_is_read_is_not_written_and_a_spare_lives_as_long_as_it_is_needed(tmp_path: Path) -> None:
    names = itertools.count()
    area = StagingArea(lambda: Region(tmp_path / f"region{next(names)}"))
    readings = []
    for number in range(4):
        area.stage(number, weights(number), None)
        taken = area.take()
        assert taken is not None
        assert taken.path is not None
        readings.append(Reading(taken.path, tmp_path / f"mine{number}", taken.manifest.total_bytes))
        taken.release()
    assert [float(r.raw.view(np.float32)[0]) for r in readings] == [0.0, 1.0, 2.0, 3.0]
    assert Manifest.decode(readings[0].trailer) == area.manifest
    assert len(list(tmp_path.glob("region*"))) == 4
    for reading in readings:
        reading.release()
    assert list(tmp_path.glob("mine*")) == []
    for number in range(4, 8):
        area.stage(number, weights(number), None)
        assert value(area) == float(number)
    assert len(list(tmp_path.glob("region*"))) == 2
    area.close()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_being_written_or_gone_or_short_cannot_be_read(tmp_path: Path) -> None:
    region = Region(tmp_path / "region")
    region.grow(100)
    with pytest.raises(TransferFailed, match="being written"):
        Reading(tmp_path / "region", tmp_path / "mine", 100)
    region.end_write()
    with pytest.raises(TransferFailed, match="has 100 of 101 bytes"):
        Reading(tmp_path / "region", tmp_path / "mine", 101)
    with pytest.raises(TransferFailed, match="cannot be opened"):
        Reading(tmp_path / "other", tmp_path / "mine", 1)
    assert not (tmp_path / "mine").exists()
    held = Reading(tmp_path / "region", tmp_path / "mine", 100)
    assert not region.begin_write()
    region.close()
    assert (tmp_path / "mine").stat().st_size == 100, "the reader's own name stays"
    with pytest.raises((ValueError, TypeError)):
        held.raw[0] = 1
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_full_shared_memory_makes_the_weights_private_where_they_need_not_be_shared(tmp_path: Path) -> None:
    region = Region(tmp_path / "region", must_share=False)
    region.grow(8)[:] = torch.arange(8, dtype=torch.uint8)
    os.close(region._descriptor)
    region._descriptor = os.open(tmp_path / "region", os.O_RDONLY)  # nothing more can be reserved through this one
    flat = region.grow(16)
    assert flat.tolist() == [*range(8), *[0] * 8]
    assert region.path is None
    assert list(tmp_path.iterdir()) == []
    region.end_write()
    assert region.begin_write()
    with pytest.raises(SyncError, match="cannot reserve"):
        Region(tmp_path / "must").grow(1 << 60)
