"""Which transport a member's weights take. Pure, except for the first three functions, which look at files.

    member: offers ─▶ its registration          publisher: shares_memory, possible ─▶ the member's transports

auto: the same shared memory → shm; the same GPU → ipc; a GPU and the same NCCL on both sides → nccl; else gloo.
Members that share memory need no group. All others form one group, whose transport all of them can use (`common`).
"""

from __future__ import annotations

import fcntl
import io
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from weight_sync.errors import Refused

MODES = ("auto", "gloo", "nccl", "ipc", "shm")
SHM, IPC, NCCL, GLOO = "shm", "ipc", "nccl", "gloo"
SECRET_BYTES = 16
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def shm_offer(token: Path) -> dict[str, str]:
    """For a member's registration. `token` is a file of its own in shared memory, which gets a secret."""
    secret = secrets.token_hex(SECRET_BYTES)
    token.write_text(secret)
    return {"can_shm": f"{_place()} {secret} {token}"}


def shares_memory(theirs: Mapping[str, str]) -> bool:
    """Is the member's token file here to be read, by the same user of the same machine?"""
    boot, user, secret, path = _offer(theirs)
    if not path or f"{boot} {user}" != _place():
        return False
    try:
        with _open_token(path) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return regular and file.read(2 * SECRET_BYTES + 1) == secret.encode()
    except OSError:
        return False


def has_died(theirs: Mapping[str, str]) -> bool:
    """Has a member that shares_memory() ended? The lock of its token (SharedFiles.token) says so at once, where its mark in Redis lasts."""
    try:
        with _open_token(_offer(theirs)[3]) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except OSError:  # locked: it lives
        return False


def _offer(theirs: Mapping[str, str]) -> list[str]:
    """Boot id, user, secret and path; empty without an offer."""
    return (theirs.get("can_shm", "").split(" ", 3) + [""] * 4)[:4]


def _open_token(path: str) -> io.FileIO:
    """Never waits, whatever the path names."""
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def _place() -> str:
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = os.uname().nodename
    return f"{boot} {os.getuid()}"


def possible(mode: str, ours: Mapping[str, str], theirs: Mapping[str, str], shared: bool, member: str) -> list[str]:
    """Transports between a publisher and a member, the best first; `shared`: they share memory.

    `ours` and `theirs` are facts about GPUs (`gpu`: UUID, `nccl`: versions). Refused when `mode` names one that cannot be.
    """
    same_gpu = bool(ours.get("gpu")) and ours.get("gpu") == theirs.get("gpu")
    both_nccl = bool(ours.get("nccl")) and ours.get("nccl") == theirs.get("nccl") and not same_gpu
    can = {SHM: shared, IPC: same_gpu, NCCL: both_nccl, GLOO: True}
    if mode == "auto":
        return [name for name, true in can.items() if true]
    if not can[mode]:
        raise Refused(
            f'producer {member} cannot receive over sync.transport = "{mode}": {_why(mode, ours, theirs)}; '
            'or set sync.transport = "auto"'
        )
    return [mode]


def _why(mode: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    gpus = f"its GPU is {theirs.get('gpu') or 'none'}, the trainer's {ours.get('gpu') or 'none'}"
    if mode == SHM:
        return (
            "it does not share /dev/shm with the trainer; run both on one machine as one user, in containers with --ipc"
        )
    if mode == IPC:
        return f"{gpus}; put both on one GPU"
    if ours.get("gpu") and ours.get("gpu") == theirs.get("gpu"):
        return f"{gpus}, and NCCL refuses two ranks on one GPU; put them on two"
    missing = "none (no GPU, or nccl4py is not installed)"
    return (
        f"it has NCCL {theirs.get('nccl') or missing}, the trainer {ours.get('nccl') or missing}; "
        "install the same nccl4py and nvidia-nccl package on both"
    )


def common(each: Iterable[list[str]]) -> str:
    """The best transport that all members of a group can use, of what possible() says for each; without shm."""
    lists = list(each)
    return next((n for n in (IPC, NCCL, GLOO) if all(n in one for one in lists)), GLOO)
