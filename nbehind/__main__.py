"""`python -m nbehind` is `nbehind`."""

import os
import sys
from pathlib import Path


def run() -> int:
    """One command; returns its exit code."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - closed by who started us, and used to the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    try:
        from nbehind.cli import main

        return main()
    except KeyboardInterrupt:  # while modules load
        return 130


if __name__ == "__main__":
    sys.exit(run())
