"""`python -m nbehind` is `nbehind`."""

import sys

from nbehind.cli import main

if __name__ == "__main__":
    sys.exit(main())
