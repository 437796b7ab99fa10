"""Groups per second through the queue against raw redis-py: `python bench/queue.py [--json FILE]` (queue_rates.py).

A script's folder comes first on sys.path, where this file would hide the standard library's `queue` from everything
that the scripts here import. So it hands out the library's.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def load_the_library_queue() -> None:
    """Put the standard library's `queue` where imports find it."""
    kept = sys.path[:]
    sys.path[:] = [entry for entry in kept if Path(entry or ".").resolve() != HERE]
    sys.modules.pop("queue", None)
    importlib.import_module("queue")
    sys.path[:] = kept


load_the_library_queue()

if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    from queue_rates import main

    sys.exit(main())
