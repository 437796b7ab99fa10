"""How the processes of an epoch meet: a TCP store that the publisher hosts for this one epoch.

    publisher: host, put manifest, announce ─▶ wait for here/<rank> ─▶ go ─────────▶ transport.open
    member:    announced address ─▶ connect ─▶ here/<rank> ─▶ wait for go, manifest ─▶ transport.open

The publisher learns who is missing before anybody enters the transport's own rendezvous, which cannot tell.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Set
from datetime import timedelta
from ipaddress import ip_address

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed exports them without types

from weight_sync.errors import SyncError, TransferFailed

POLL_S = 0.005
GONE_S = 0.5
SIOCGIFADDR = 0x8915  # Linux: address of an interface


class NotHosted(TransferFailed):
    """No member is to blame: the publisher cannot host the rendezvous."""


class HostedStore:
    """The publisher's end.

    The listening socket is made here: it binds to `host` alone, and with the socket that TCPStore makes itself (all
    addresses, IPv6 and IPv4 in one) one rendezvous in forty never came about on the machine this was written on.
    """

    def __init__(self, host: str, prefix: str, manifest: bytes, timeout_s: float) -> None:
        """Raises NotHosted when this machine does not allow it."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=256)
            self.host, self.port = host, int(listener.getsockname()[1])
            self._tcp = TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
            self.store = PrefixStore(prefix, self._tcp)
            self.store.set("manifest", manifest)  # type: ignore[arg-type]
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            raise NotHosted(f"no rendezvous can be hosted at {host}: {' '.join(str(error).split())[:200]}") from error

    def missing(
        self, ranks: Iterable[int], timeout_s: float, stop: threading.Event, gone: Callable[[], Set[int]] = set
    ) -> set[int]:
        """Ranks that have not come within `timeout_s`.

        Returns early when all have, on `stop`, or when all that are missing are among those that `gone` tells (asked
        every GONE_S): the dead are not waited for.
        """
        absent = set(ranks)
        now = time.monotonic()
        end, ask = now + timeout_s, now + GONE_S
        while absent and now < end and not stop.is_set():
            absent = {rank for rank in absent if not self.store.check([f"here/{rank}"])}
            if absent:
                stop.wait(POLL_S)
            now = time.monotonic()
            if absent and now >= ask:
                if absent <= gone():
                    break
                ask = now + GONE_S
        return absent

    def go(self) -> None:
        """Let the members that came enter the transport's rendezvous."""
        self.store.set("go", "1")


def join(host: str, port: int, prefix: str, rank: int, timeout_s: float, stop: threading.Event) -> tuple[Store, bytes]:
    """The member's end: the epoch's store and the encoded manifest. Raises TransferFailed."""
    end = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            pass  # a refusal shows at once here, while TCPStore would try until its deadline
        tcp = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        store = PrefixStore(prefix, tcp)
        store.set(f"here/{rank}", "1")
        while not store.check(["go"]):
            if time.monotonic() > end or stop.is_set():
                raise TransferFailed(
                    f"the publisher at {host}:{port} did not start epoch {prefix} within {timeout_s:g} s"
                )
            stop.wait(POLL_S)
        return store, bytes(store.get("manifest"))
    except (OSError, RuntimeError) as error:
        raise TransferFailed(
            f"cannot reach the publisher's store at {host}:{port} ({str(error).splitlines()[0][:120]}); if the trainer is on "
            "another machine, set sync.interface there"
        ) from error


def local_address(interface: str, peer_host: str) -> str:
    """This machine's address for the weight channel: of `interface`, or the one that talks to `peer_host`.

    `peer_host` is where Redis is ("" for a unix socket). SyncError for an unknown interface or an unreachable peer.
    """
    if interface:
        return _interface_address(interface)
    if not peer_host or peer_host == "localhost" or _is_loopback(peer_host):
        return "127.0.0.1"
    try:
        family, kind, proto, _, target = socket.getaddrinfo(peer_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # sends nothing; asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SyncError(f"no route to {peer_host} ({error}); set sync.interface") from error


def _interface_address(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise SyncError(f"sync.interface {interface!r} has no IPv4 address; interfaces here: {known}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
