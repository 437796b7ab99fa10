"""One worker process: reads jobs from standard input, answers on standard output, ends with its parent.

First frame: {reward, options}; the answer is {ready} or
{error}. Each other frame: {text, payload}; the answer is {total, parts} or {error}. It never decides how long a job may
take: the parent kills it.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from nbehind.process import die_with_parent
from producer_svc.errors import RewardError
from producer_svc.rewards.answers import Check
from producer_svc.rewards.frames import read_frame, write_frame
from producer_svc.rewards.shipped import make_check

MEMORY_BYTES = 4 * 2**30  # of address space: a number with 10^10 digits must not take the machine's memory


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which decides
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    setup = read_frame(sys.stdin.buffer)
    if setup is None:
        return 0
    try:
        check = prepare(setup)
    except (RewardError, ImportError) as error:
        write_frame(answers, {"error": f"{type(error).__name__}: {error}"})
        return 1
    write_frame(answers, {"ready": True})
    while (job := read_frame(sys.stdin.buffer)) is not None:
        write_frame(answers, run_job(check, job))
    return 0


def prepare(setup: Mapping[str, Any]) -> Check:
    """The reward, with evaluation of texts turned off in the libraries that it uses."""
    if setup["reward"] != "regex":
        from producer_svc.rewards.no_eval import guard_sympy

        guard_sympy()
    return make_check(setup["reward"], setup["options"])


def run_job(check: Check, job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        total, parts = check(job["text"], job["payload"])
    except RewardError as error:
        return {"error": str(error)}
    except (MemoryError, RecursionError):
        return {"total": 0.0, "parts": {"timeout": 1.0}}  # more than this completion may take
    except Exception as error:  # noqa: BLE001  # the parent raises it
        return {"error": f"{type(error).__name__}: {error}"}
    return {"total": total, "parts": {**parts, "timeout": 0.0}}


if __name__ == "__main__":
    sys.exit(main())
