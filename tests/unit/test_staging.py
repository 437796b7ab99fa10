"""The two staging buffers of the publisher, and the two shared files of a receiver."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout_queue.messages import Version
from weight_sync.errors import Refused, Superseded, SyncError, TransferFailed
from weight_sync.ledger import VersionLedger
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
