"""The staleness bound as pure functions: the only place where lag is computed.

A step s trains tokens of version v with lag = s − v. The bound of a run is n_behind ≥ 0 (0 = on-policy).
Asynchronous RL under a lag bound: Noukhovitch et al. 2024 (arXiv:2410.18252); AReaL (arXiv:2505.24298), eq. 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rollout_queue.errors import StalenessError
from rollout_queue.messages import Group, Version


def min_version(step: int, n_behind: int) -> int:
    """The oldest version that a group for `step` may begin with: max(0, step − n_behind)."""
    return max(0, step - n_behind)


def last_open_step(published: int, n_behind: int) -> int:
    """The last step whose requests may be open once version `published` is out: published + n_behind."""
    return published + n_behind


def deadline(oldest_version: int, n_behind: int) -> int:
    """The last step that may train tokens of `oldest_version`: oldest_version + n_behind."""
    return oldest_version + n_behind


def floor_after(step: int, n_behind: int) -> int:
    """While `step` is closed, a generation may only begin with a version that step + 1 may still train."""
    return min_version(step + 1, n_behind)


def must_publish(step_done: int, published: int, n_behind: int, publish_every: int) -> bool:
    """Is version step_done + 1 due? By the publishing period, or because the next window would not open."""
    version = step_done + 1
    return version % publish_every == 0 or published < min_version(version, n_behind)


def token_lags(step: int, group: Group) -> NDArray[np.int32]:
    """[T] lag of each completion token when `step` trains it."""
    return (step - group.token_versions()).astype(np.int32)


def check_group(step: int, n_behind: int, group: Group, history: Mapping[int, str]) -> NDArray[np.int32]:
    """Return the lags [T], or raise StalenessError. This check is the guarantee; pacing only keeps it quiet.

    `history` maps every version number of this run's surviving history that was ever given out to its checksum.
    """
    for version in group.versions:
        _check_version(version, group, history)
    lags = token_lags(step, group)
    if lags.size and int(lags.max()) > n_behind:
        raise StalenessError(f"group {group.id}: lag {int(lags.max())} at step {step} exceeds n_behind = {n_behind}")
    if lags.size and int(lags.min()) < 0:
        raise StalenessError(f"group {group.id}: a token of version {step - int(lags.min())} at step {step}")
    return lags


def _check_version(version: Version, group: Group, history: Mapping[int, str]) -> None:
    known = history.get(version.number)
    if known is None or known != version.checksum:
        raise StalenessError(
            f"group {group.id} of producer {group.producer} is stamped with version {version.number} "
            f"({version.checksum or 'no checksum'}), which is not on this history"
            + (f" (expected {known})" if known else "")
        )
