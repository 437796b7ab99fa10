"""What is left of a run: processes, and files in shared memory."""

from __future__ import annotations

import os
from pathlib import Path

from weight_sync.channel import SyncSettings

MARK = "NBEHIND_CHAOS"  # in the environment of every process of the run


def left_over(folder: Path) -> list[str]:
    """Command lines of the live processes that were started for `folder`, this one and those it comes from aside."""
    found = []
    mark, own = f"{MARK}={folder}".encode(), _ancestors()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            ours = str(folder).encode() in command or mark in (entry / "environ").read_bytes().split(b"\0")
            state = _stat(entry)[0]
        except OSError:  # gone, or of another user
            continue
        if ours and state != "Z":
            found.append(command.replace(b"\0", b" ").decode(errors="replace").strip())
    return found


def _ancestors() -> set[int]:
    out, pid = set(), os.getpid()
    while pid > 1:
        out.add(pid)
        pid = int(_stat(Path("/proc") / str(pid))[1])
    return out


def _stat(process: Path) -> list[str]:
    """State, parent's pid, ... as proc(5) lists them."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def shared_memory_left(run: str) -> int:
    """How many files of dead processes of the run were there; they are removed."""
    from weight_sync.shm_files import PREFIX, clean

    folder = SyncSettings().shm_dir
    before = len(list(folder.glob(f"{PREFIX}-{run}-*")))
    clean(folder)
    return before - len(list(folder.glob(f"{PREFIX}-{run}-*")))
