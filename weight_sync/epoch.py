"""The publisher's current epoch: a set of members with one channel."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Set

import redis

from rollout_queue.keys import Keys
from weight_sync.calls import EpochCall, send_call
from weight_sync.channel import Channel, SyncSettings, Transport
from weight_sync.errors import TransferFailed
from weight_sync.rendezvous import HostedStore, local_address

log = logging.getLogger(__name__)


class Absent(TransferFailed):
    """Members that did not come to the rendezvous."""

    def __init__(self, members: list[str], timeout_s: float) -> None:
        super().__init__(f"{', '.join(members)} did not come to the rendezvous (deadline {timeout_s:g} s)")
        self.members = members


class EpochHost:
    """Opens and closes epochs. Used by the publisher's thread alone."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        incarnation: int,
        settings: SyncSettings,
        transports: Mapping[str, Transport],
    ) -> None:
        self._client, self._keys, self._incarnation = client, keys, incarnation
        self._settings, self._transports = settings, transports
        self._transport = ""
        redis_host = str(client.connection_pool.connection_kwargs.get("host", ""))
        self._address = local_address(settings.interface, redis_host)
        self._sessions: Mapping[str, str] = {}
        self._channel: Channel | None = None
        self._store: HostedStore | None = None
        self.number = 0

    def ensure(
        self,
        transport: str,
        sessions: Mapping[str, str],
        manifest: bytes,
        stop: threading.Event,
        gone: Callable[[], Set[str]],
    ) -> Channel:
        """The channel over `transport` to exactly these members (member -> session): the open one, or a new epoch's.

        `gone` tells which of them have left meanwhile. Raises Absent for members that did not come, TransferFailed when the group did not form.
        """
        if self._channel is not None and (self._transport, dict(self._sessions)) == (transport, dict(sessions)):
            return self._channel
        self.close()
        self.number += 1
        self._transport = transport
        began = time.monotonic()
        timeout_s = self._settings.join_timeout_s
        ranks = {name: rank for rank, name in enumerate(sorted(sessions), start=1)}
        call_prefix = f"{self._incarnation}.{self.number}"
        self._store = HostedStore(self._address, call_prefix, manifest, timeout_s)
        call = EpochCall(
            self._incarnation,
            self.number,
            self._store.host,
            self._store.port,
            dict(sessions),
            ranks,
            timeout_s,
            transport,
        )
        send_call(self._client, self._keys, call)
        try:
            self._meet(ranks, timeout_s, stop, gone)
        except BaseException:
            self.close()
            raise
        self._sessions = dict(sessions)
        seconds = time.monotonic() - began
        log.info("epoch %d over %s: %s, met in %.2f s", self.number, transport, ", ".join(ranks), seconds)
        assert self._channel is not None
        return self._channel

    def _meet(
        self, ranks: Mapping[str, int], timeout_s: float, stop: threading.Event, gone: Callable[[], Set[str]]
    ) -> None:
        assert self._store is not None
        missing = self._store.missing(ranks.values(), timeout_s, stop, lambda: {ranks[name] for name in gone()})
        if missing:
            raise Absent([name for name, rank in ranks.items() if rank in missing], timeout_s)
        self._store.go()
        self._channel = self._transports[self._transport].open(
            self._store.store, 0, len(ranks) + 1, self._address, timeout_s
        )

    def close(self) -> None:
        """Leave the epoch: its members see their collectives fail, and wait for the next call."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self._store, self._sessions = None, None, {}
