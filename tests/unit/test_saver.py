import json
import threading
from pathlib import Path

import pytest

from trainer_svc import checkpoint
from trainer_svc.errors import CheckpointError
from trainer_svc.saver import Saver


def write_step(folder: Path) -> None:
    (folder / "weights").write_text(folder.name)


def allowed() -> None:
    """A guard that lets everything pass."""


def test_saving_goes_on_beside_the_steps(tmp_path: Path):
    saver = Saver(tmp_path, keep=2, guard=allowed)
    go = threading.Event()

    def slow(folder: Path) -> None:
        assert go.wait(30)
        write_step(folder)

    saver.begin(1, slow, {"step": 1})
    assert saver.busy and saver.finished() is None
    assert checkpoint.newest(tmp_path) is None
    go.set()
    assert saver.finished(wait=True) == 1
    assert not saver.busy and saver.finished() is None
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest[1] == {"step": 1}


def test_only_the_newest_and_the_protected_are_kept(tmp_path: Path):
    saver = Saver(tmp_path, keep=2, guard=allowed)
    saver.protected.add(2)
    for step in range(1, 7):
        saver.begin(step, write_step, {"step": step})
        assert saver.finished(wait=True) == step
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000005", "step-000006"]


def test_what_the_disk_refuses_is_raised_in_the_trainers_thread(tmp_path: Path):
    saver = Saver(tmp_path, keep=1, guard=allowed)

    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    saver.begin(3, fail, {})
    with pytest.raises(CheckpointError, match="free space"):
        saver.finished(wait=True)
    assert list(tmp_path.iterdir()) == []
    assert not saver.busy


def test_a_fenced_trainer_changes_nothing(tmp_path: Path):
    Saver(tmp_path, keep=1, guard=allowed).begin(1, write_step, {"step": 1})
    threading.Event().wait(0.2)

    def fenced() -> None:
        raise RuntimeError("a newer trainer owns the run")

    saver = Saver(tmp_path, keep=1, guard=fenced)
    saver.begin(1, lambda folder: (folder / "weights").write_text("zombie") and None, {"step": 1})
    with pytest.raises(RuntimeError, match="newer trainer"):
        saver.finished(wait=True)
    assert [json.loads((p / "meta.json").read_text())["meta"] for p in tmp_path.iterdir()] == [{"step": 1}]
    assert (tmp_path / "step-000001" / "weights").read_text() != "zombie"
