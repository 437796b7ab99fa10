import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainer_svc import checkpoint
from trainer_svc.errors import CheckpointError

REPO = Path(__file__).parents[2]


def write(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 5000)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "empty").write_bytes(b"")


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_save_and_find(tmp_path):
    root = tmp_path / "deep" / "checkpoints"
    folder = checkpoint.save(root, 123, write, {"step": 123, "history": {"1": "ab"}, "x": [1, 2.5, None]})
    assert folder == root / "step-000123"
    assert checkpoint.newest(root) == (folder, {"step": 123, "history": {"1": "ab"}, "x": [1, 2.5, None]})
    assert (folder / "weights.bin").read_bytes() == b"w" * 5000
    assert names(root) == ["step-000123"]
    assert set(json.loads((folder / "meta.json").read_text())["files"]) == {"weights.bin", "model/config.json", "empty"}


def test_nothing_there(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-000004").write_text("a file, not a folder")
    assert checkpoint.newest(tmp_path) is None


def test_newest_is_by_number_not_by_name(tmp_path):
    for step in (999_999, 1_000_000, 5):
        checkpoint.save(tmp_path, step, write, {"step": step})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found[1] == {"step": 1_000_000}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "file truncated": lambda f: cut(f / "weights.bin"),
    "file flipped": lambda f: flip(f / "weights.bin"),
    "file missing": lambda f: (f / "model" / "config.json").unlink(),
    "meta missing": lambda f: (f / "meta.json").unlink(),
    "meta truncated": lambda f: cut(f / "meta.json"),
    "meta empty": lambda f: (f / "meta.json").write_text(""),
    "meta not a map": lambda f: (f / "meta.json").write_text("[1]"),
    "meta not utf-8": lambda f: (f / "meta.json").write_bytes(b"\xff\xfe"),
    "meta changed": lambda f: (f / "meta.json").write_text(
        (f / "meta.json").read_text().replace('"step": 2', '"step": 3')
    ),
    "folder empty": lambda f: (shutil.rmtree(f), f.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_ones_are_passed_over(tmp_path, caplog, damage):
    good = checkpoint.save(tmp_path, 1, write, {"step": 1})
    DAMAGE[damage](checkpoint.save(tmp_path, 2, write, {"step": 2}))
    assert checkpoint.newest(tmp_path) == (good, {"step": 1})
    assert "passing over" in caplog.text
    assert "step-000002" in caplog.text


def test_a_damaged_one_is_replaced(tmp_path):
    DAMAGE["meta missing"](checkpoint.save(tmp_path, 2, write, {"step": 2}))
    checkpoint.save(tmp_path, 2, write, {"step": 2, "again": True})
    assert checkpoint.newest(tmp_path) == (tmp_path / "step-000002", {"step": 2, "again": True})
    assert names(tmp_path) == ["step-000002"]


def test_prune_keeps_the_newest_complete(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, write, {"step": step})
    DAMAGE["file truncated"](tmp_path / "step-000005")
    DAMAGE["meta missing"](tmp_path / "step-000002")
    checkpoint.prune(tmp_path, 2)  # 5 is torn and does not count; 4 and 3 are kept; 2 and 1 go
    assert names(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    checkpoint.prune(tmp_path, 2)
    assert names(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    with pytest.raises(ValueError, match="keep"):
        checkpoint.prune(tmp_path, 0)


def test_leftovers_go_at_the_next_save(tmp_path):
    left = tmp_path / ".tmp-step-000007"
    left.mkdir()
    (left / "half").write_text("x")
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, 8, write, {})
    assert names(tmp_path) == ["step-000008"]


@pytest.mark.parametrize("meta", [{"b": b"bytes"}, {"s": {1}}, {"n": float("nan")}])
def test_meta_must_be_json(tmp_path, meta):
    with pytest.raises((TypeError, ValueError)):
        checkpoint.save(tmp_path, 1, write, meta)
    assert names(tmp_path) == []


def test_a_failing_writer_leaves_nothing(tmp_path):
    checkpoint.save(tmp_path, 1, write, {})

    def fails(folder: Path) -> None:
        write(folder)
        raise RuntimeError("engine")

    with pytest.raises(RuntimeError, match="engine"):
        checkpoint.save(tmp_path, 2, fails, {})
    assert names(tmp_path) == ["step-000001"]


def test_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        CheckpointError, match=r"cannot write checkpoint .*file/step-000001.*(exists|directory).*run\.dir"
    ):
        checkpoint.save(tmp_path / "file", 1, write, {})


def run(code: str, *args: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*(before or []), sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)


SAVES_TOO_MUCH = """
    import sys
    from pathlib import Path
    from trainer_svc import checkpoint
    from trainer_svc.errors import CheckpointError
    root = Path(sys.argv[1])
    def small(folder): (folder / "a").write_bytes(b"x" * 1000)
    def large(folder):
        small(folder)
        (folder / "b").write_bytes(b"x" * (4 << 20))
    checkpoint.save(root, 1, small, {"step": 1})
    for step in (2, 1):  # a new one, and one that would replace a good one
        try:
            checkpoint.save(root, step, large, {})
        except CheckpointError as error:
            print(error)
        print(sorted(p.name for p in root.iterdir()), checkpoint.newest(root)[1])
"""


def check_full(done: subprocess.CompletedProcess[str], root: Path, cause: str) -> None:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for step, line in zip((2, 1), lines[::2], strict=True):
        assert line == (
            f"cannot write checkpoint {root}/step-{step:06d}: {cause}; free space there, or set run.dir to another disk"
        )
    assert lines[1::2] == ["['step-000001'] {'step': 1}"] * 2


def test_full_disk(tmp_path):
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && shift && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path)]
    if shutil.which("unshare") is None or run("", before=inside).returncode:
        pytest.skip("user namespaces are not allowed here: no small file system to fill")
    done = run(SAVES_TOO_MUCH, str(tmp_path), before=inside)
    check_full(done, tmp_path, "No space left on device")


def test_file_size_limit(tmp_path):
    limit = "    import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    check_full(run(limit + SAVES_TOO_MUCH, str(tmp_path)), tmp_path, "File too large")


@pytest.mark.parametrize("older", [1, 2], ids=["another-step", "the-same-step"])
def test_kill_at_any_moment_of_a_save(tmp_path, older):
    """The process is killed at every file operation of a save in turn; a complete checkpoint always remains."""
    code = """
        import os, signal, sys
        from pathlib import Path
        from trainer_svc import checkpoint
        root, countdown = Path(sys.argv[1]), int(sys.argv[2])
        def write(folder):
            (folder / "a").write_bytes(b"new" * 1000)
            (folder / "sub").mkdir()
            (folder / "sub" / "b").write_bytes(b"new")
        def hook(event, args):
            global countdown
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree") and armed:
                countdown -= 1
                if countdown == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        armed = False
        sys.addaudithook(hook)
        armed = True
        checkpoint.save(root, 2, write, {"step": "new"})
        checkpoint.prune(root, 1)
    """
    seen = set()
    for moment in range(1, 60):
        root = tmp_path / str(moment)
        checkpoint.save(root, older, write, {"step": "old"})
        done = run(code, str(root), str(moment))
        found = checkpoint.newest(root)
        assert found is not None
        seen.add((done.returncode, found[1]["step"]))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        checkpoint.save(root, 3, write, {"step": 3})
        checkpoint.prune(root, 1)
        assert names(root) == ["step-000003"]
    assert seen == {(-signal.SIGKILL, "old"), (-signal.SIGKILL, "new"), (0, "new")}
