"""Checkpoints as folders that exist whole or not at all.

    root/step-000123/            what `write` put there, and
                     meta.json   the caller's meta and a manifest: size and CRC-32 of every other file
    root/.tmp-…                  a checkpoint being written or deleted; left over only by a kill
    root/.replaced-step-000123   the older one of a step that is saved again, until the new one has its name

Order of a save: files, meta.json, fsync of all of them and their folders, rename, fsync of root. So a folder with the
final name is complete, and `newest` verifies that it still is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from trainer_svc.errors import CheckpointError

log = logging.getLogger(__name__)

META = "meta.json"
FORMAT = 1
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"
_NAME = re.compile(r"step-(\d{6,})")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK = 1 << 20  # bytes read at a time


def save(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    meta: Mapping[str, Any],
    guard: Callable[[], None] = lambda: None,
) -> Path:
    """Write root/step-<step> durably: `write(folder)` fills it, `meta` (plain JSON) goes with it. Replaces an older one of that step.

    `guard` is called last before the rename and may raise, so that a trainer that was fenced meanwhile changes nothing.

    Raises CheckpointError when the disk refuses; then nothing of this checkpoint is left and the others are untouched.
    ValueError or TypeError, before anything is written, on a meta that is not JSON.
    """
    text = json.dumps(dict(meta), allow_nan=False)
    final, temporary = root / f"step-{step:06d}", root / f"{_TEMPORARY}step-{step:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        temporary.mkdir()
        write(temporary)
        _write_meta(temporary, text)
        _sync_tree(temporary)
        guard()
        _put_in_place(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        remedy = "free space there" if error.errno in _FULL else "check that the folder is there and writable"
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error.strerror or error}; {remedy}, or set run.dir to another disk"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def newest(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """(folder, meta) of the newest complete checkpoint, or None. Damaged ones are passed over with a warning.

    Only the process that writes checkpoints here may call it: what a kill left halfway is put in order first.
    """
    _put_back(root)
    for folder in reversed(_folders(root)):
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            log.warning("passing over a checkpoint: %s", error)
    return None


def verify(folder: Path, contents: bool = True) -> dict[str, Any]:
    """The meta of a complete checkpoint. Raises CheckpointError when a file is missing, of another size or, with `contents`, of another CRC."""
    try:
        record = json.loads((folder / META).read_text())
        files, meta = dict(record["files"]), dict(record["meta"])
        if record["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {record['format']}, this version reads {FORMAT}")
        if record["crc32"] != _crc_of(meta, files):
            raise CheckpointError(f"{folder / META} is damaged")
        for name, (size, crc) in files.items():
            if (folder / name).stat().st_size != size:
                raise CheckpointError(f"{folder / name} is truncated: {(folder / name).stat().st_size} of {size} bytes")
            if contents and _crc(folder / name) != crc:
                raise CheckpointError(f"{folder / name} is damaged")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is incomplete: {error}") from error
    return meta


def prune(root: Path, keep: int, protected: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` complete checkpoints and those of the `protected` steps, and the damaged ones older than those.

    Completeness by names and sizes, without reading the files. What cannot be deleted is reported and left.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    kept = 0
    for folder in reversed(_folders(root)):
        if kept >= keep:
            if int(folder.name.removeprefix("step-")) in protected:
                continue
            try:
                _delete(folder)
            except OSError as error:
                log.warning("cannot delete old checkpoint %s: %s", folder, error)
            continue
        try:
            verify(folder, contents=False)
            kept += 1
        except CheckpointError as error:
            log.warning("not counting a checkpoint: %s", error)


def remove_leftovers(root: Path) -> None:
    """Delete what a killed save or prune left behind. Only the process that writes checkpoints here may call it."""
    _put_back(root)
    for path in root.glob(f"{_TEMPORARY}*"):
        log.info("removing unfinished %s", path)
        shutil.rmtree(path)


def _put_back(root: Path) -> None:
    """After a kill between the two renames of a replacement the older checkpoint is the one of its step."""
    for path in root.glob(f"{_REPLACED}*"):
        final = root / path.name.removeprefix(_REPLACED)
        if final.exists():
            _delete(path)
        else:
            log.info("putting back %s: its replacement was not finished", final)
            path.rename(final)


def _folders(root: Path) -> list[Path]:
    """Folders with a checkpoint's name, oldest step first."""
    found = [(int(m.group(1)), p) for p in root.glob("step-*") if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


def _put_in_place(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _sync(final.parent)
    if replaced.exists():
        _delete(replaced)


def _delete(folder: Path) -> None:
    """Rename first, so that a kill halfway does not leave a torn checkpoint under a real name."""
    doomed = folder.with_name(f"{_TEMPORARY}old-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _write_meta(folder: Path, text: str) -> None:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    files = {p.relative_to(folder).as_posix(): [p.stat().st_size, _crc(p)] for p in paths}
    meta = json.loads(text)
    record = {"format": FORMAT, "crc32": _crc_of(meta, files), "meta": meta, "files": files}
    (folder / META).write_text(json.dumps(record, indent=1))


def _crc_of(meta: Mapping[str, Any], files: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([meta, files], sort_keys=True).encode())


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
