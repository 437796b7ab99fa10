"""The folder of a run: who may use it, and what lies where in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbehind.errors import InputError

Mode = Literal["new", "resume", "overwrite"]
LOCK = ".lock"
NOT_WORTH_KEEPING = {"logs", "redis"}  # folders that a run leaves before its first step


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the parts of a run lie."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved configuration; its presence marks the folder of a run."""
        return self.path / "config.toml"

    @property
    def redis_url_file(self) -> Path:
        """Where the run's Redis listens, for producers started by hand. Only while the run goes on."""
        return self.path / "redis.url"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def log_file(self, service: str) -> Path:
        return self.path / "logs" / f"{service}.log"

    def read_summary(self) -> dict[str, Any]:
        """summary.json, {} if there is none or it is not whole."""
        try:
            found = json.loads(self.summary.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def open_run_folder(path: Path, mode: Mode) -> Iterator[RunFolder]:
    """The folder, made or checked, and locked while the context lasts. InputError if it may not be used."""
    if mode == "resume" and not RunFolder(path).config_file.is_file():
        raise InputError(f"--resume: {path} is not the folder of a run; leave --resume out to begin it")
    folder = RunFolder(path)
    try:
        _refuse_foreign(folder)
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("a+")
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{path}: a file is in the way; choose another place with --set run.dir=…") from None
    except PermissionError:
        raise InputError(f"{path}: no permission to write there; choose another place with --set run.dir=…") from None
    with lock:
        _take(lock.fileno(), path)
        if mode == "new" and _used(folder):
            raise InputError(
                f"{path} holds an earlier run: go on with it (--resume), replace it (--overwrite), "
                "or choose another name (--set run.name=…)"
            )
        if mode == "overwrite":
            _clear(path)
        for stale in (folder.summary, folder.report, folder.redis_url_file):
            stale.unlink(missing_ok=True)
        try:
            yield folder
        finally:
            folder.redis_url_file.unlink(missing_ok=True)


def _refuse_foreign(folder: RunFolder) -> None:
    """Never mix with, or delete, files that are not a run's."""
    names = {p.name for p in folder.path.iterdir()} - {LOCK} if folder.path.exists() else set()
    if names and not folder.config_file.is_file():
        raise InputError(f"{folder.path} has files that are not of a run; choose another name with --set run.name=…")


def _used(folder: RunFolder) -> bool:
    """Did an earlier run get as far as a step or a checkpoint?"""
    if folder.metrics.is_file() and folder.metrics.stat().st_size > 0:
        return True
    return any(p.is_dir() and p.name not in NOT_WORTH_KEEPING for p in folder.path.iterdir())


def _take(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "another process"
        raise InputError(
            f"the run in {path} is going on (process {owner}); end it, or choose another --set run.name=…"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())


def _clear(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
