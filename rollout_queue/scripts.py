"""The atomic operations of the queue, in Lua, run by EVALSHA. Every one is safe to repeat.

What the queue knows of an open request is one value of the hash `open`:

    incarnation|attempt|state|start_version|failures|entry|owner

    state q queued    entry is in the stream of requests, owner ''
          l leased    ... and pending at `owner`; its idle time in the consumer group is the clock of the lease
          d delivered entry is in the stream of rollouts
          x dead      entry is a dead notice in the stream of rollouts

`start_version` is -1 before the first generation; a later one, by takeover or reissue, never begins with an older.

Memory: a script whose first write is refused at full memory (XADD, HSET) fails as a whole; after any other write the
server lets the rest pass. So what must work on a full server starts with a PERSIST, which changes nothing.

`incarnation` is compared first in everything a trainer does: a trainer that was stopped and wakes up changes nothing.
A state that is older than the trainer's own (a flushed or failed-over server) is restored from its arguments.
"""

from __future__ import annotations

import hashlib
from typing import Any

import redis

from rollout_queue import lua_producer, lua_trainer
from rollout_queue.exchange import Command, exchange
from rollout_queue.lua_common import PRELUDE


class Script:
    """A script, loaded where it is missing: one EVALSHA a call, after NOSCRIPT one EVAL."""

    def __init__(self, body: str) -> None:
        self.text = PRELUDE + body
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def run(self, client: redis.Redis, keys: list[str], args: list[Any], first: Command | None = None) -> Any:
        """The script's answer; `first` is a command that goes before it in the same round trip."""
        call = ("EVALSHA", self.sha, len(keys), *keys, *args)
        *before, answer = exchange(client, first, call) if first else exchange(client, call)
        if isinstance(answer, redis.exceptions.NoScriptError):  # also after a refused `first`: COMMIT counts those
            (answer,) = exchange(client, ("EVAL", self.text, len(keys), *keys, *args))
        for error in before:
            if isinstance(error, Exception):
                raise error
        if isinstance(answer, Exception):
            raise answer
        return answer


CLAIM = Script(lua_trainer.CLAIM)
ANNOUNCE = Script(lua_trainer.ANNOUNCE)
RAISE_FLOOR = Script(lua_trainer.RAISE_FLOOR)
ISSUE = Script(lua_trainer.ISSUE)
POLL = Script(lua_trainer.POLL)
REJECT = Script(lua_trainer.REJECT)
RELEASE = Script(lua_trainer.RELEASE)
WITHDRAW = Script(lua_trainer.WITHDRAW)
REPAIR = Script(lua_trainer.REPAIR)
FINISH = Script(lua_trainer.FINISH)
REQUEUE = Script(lua_trainer.REQUEUE)
TRAINER_ALIVE = Script(lua_trainer.TRAINER_ALIVE)
LEASE = Script(lua_producer.LEASE)
RENEW = Script(lua_producer.RENEW)
COMMIT = Script(lua_producer.COMMIT)
GIVE_BACK = Script(lua_producer.GIVE_BACK)
REJECT_REQUEST = Script(lua_producer.REJECT_REQUEST)
PRODUCER_ALIVE = Script(lua_producer.PRODUCER_ALIVE)
LEAVE = Script(lua_producer.LEAVE)
