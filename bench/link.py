"""A loopback of limited rate, as if the processes were on machines with a link of that rate between them.

Loopback moves bytes as fast as memory does, so what else reads memory meanwhile, such as a checksum, slows it down; a
link does not. The limit is of all traffic together. Needs Linux, `unshare` and `tc` (util-linux, iproute2).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

INSIDE = "NBEHIND_BENCH_LINK_GBIT"
SHAPE = 'ip link set lo up && tc qdisc add dev lo root tbf rate {gbit}gbit burst 8mb latency 50ms && exec "$@"'


def limited() -> float:
    """Gbit/s of the link that this process runs on, 0 = not limited."""
    return float(os.environ.get(INSIDE, "0"))


def run_limited(gbit: float, module: str, arguments: Sequence[str]) -> None:
    """Start this program again in a network of its own, which goes with it. SystemExit where that is not possible."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"bench: --link-gbit needs {', '.join(missing)} (util-linux, iproute2)")
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = ["sh", "-c", SHAPE.format(gbit=f"{gbit:g}"), "sh", sys.executable, "-m", module, *arguments]
    os.execvpe("unshare", ["unshare", "--net", *rights, *inside], {**os.environ, INSIDE: f"{gbit:g}"})  # noqa: S606, S607
