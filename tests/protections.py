"""Each guarantee's protection, as the edit that removes it, and the test that must then fail (scripts/check_protections.py)."""

from __future__ import annotations

from dataclasses import dataclass

QUEUE, FAULTS, SYNC, SHM = (
    "tests/contract/test_queue.py",
    "tests/integration/test_redis_faults.py",
    "tests/integration/test_weight_sync.py",
    "tests/integration/test_weight_shm.py",
)


@dataclass(frozen=True, slots=True)
class Protection:
    """`old` occurs once in `file`; with `new` in its place, `test` (as pytest selects it) fails."""

    guarantee: str
    file: str
    old: str
    new: str
    test: str


PROTECTIONS = (
    # --- resume
    Protection(
        "a damaged checkpoint is passed over",
        "trainer_svc/checkpoint.py",
        "if contents and _crc(folder / name) != crc:",
        "if False:",
        "tests/unit/test_checkpoint.py -k damaged_ones",
    ),
    Protection(
        "a checkpoint that is replaced by one of its step is there until the new one is",
        "trainer_svc/checkpoint.py",
        "    _put_back(root)\n    for folder in",
        "    for folder in",
        "tests/unit/test_checkpoint.py -k same-step",
    ),
    Protection(
        "a resumed trainer continues with the saved weights",
        "trainer_svc/main.py",
        "            self.engine.load_state(path)\n",
        "",
        "tests/integration/test_resume.py -k killed_at_any_step",
    ),
    Protection(
        "groups of a discarded history are refused",
        "trainer_svc/intake.py",
        "elif discarded := self._discarded(arrival):",
        'elif discarded := "":',
        "tests/unit/test_intake.py -k discarded",
    ),
    Protection(
        "producers are given the version that counts now before they generate again",
        "rollout_queue/lua_producer.py",
        "if ARGV[5] ~= '0' and tonumber(ARGV[5]) ~= inc then return {2, '0-0', out} end",
        "",
        f"{QUEUE} -k weights_of_a_discarded_history",
    ),
    # --- ack with the checkpoint
    Protection(
        "a full Redis is freed by the trainer",
        "trainer_svc/durability.py",
        "self._release((kept + 1) // 2)",
        "pass",
        "tests/integration/test_redis_outages.py -k full_memory",
    ),
    Protection(
        "a new trainer gets every group that no checkpoint covers",
        "rollout_queue/lua_trainer.py",
        "collect(ARGV[4])\n",
        "",
        f"{QUEUE} -k gets_all_that_was_never_released",
    ),
    # --- leases
    Protection(
        "leases are renewed during a long generation",
        "producer_svc/keeper.py",
        "lost = self._queue.renew(leases)",
        "lost: list[Lease] = []",
        "tests/integration/test_producer_service.py -k long_generations",
    ),
    Protection(
        "a producer whose loop hangs loses its leases",
        "producer_svc/keeper.py",
        "if leases and moving:",
        "if leases:",
        "tests/integration/test_producer_service.py -k blocked_event_loop",
    ),
    Protection(
        "a hung generation is aborted, tried again and dead-lettered",
        "producer_svc/service.py",
        "asyncio.wait_for(self._generator.generate(lease.request), timeout_s)",
        "self._generator.generate(lease.request)",
        "tests/integration/test_producer_service.py -k takes_too_long",
    ),
    Protection(
        "a poison prompt stops no step",
        "rollout_queue/lua_producer.py",
        "if failure ~= '' and r.fails >= tonumber(ARGV[6]) then",
        "if false then",
        "tests/integration/test_lease_faults.py",
    ),
    Protection(
        "deaths of producers are no failures",
        "rollout_queue/lua_producer.py",
        "if r.state == 'l' then r.att = r.att + 1 end",
        "if r.state == 'l' then r.att = r.att + 1; r.fails = r.fails + 1 end",
        f"{QUEUE} -k deaths_of_producers",
    ),
    Protection(
        "an abandoned lease is taken over",
        "rollout_queue/lua_producer.py",
        "'IDLE', lease_ms, '-', '+', 1000",
        "'IDLE', NEVER, '-', '+', 1000",
        f"{QUEUE} -k abandoned_lease",
    ),
    # --- Redis
    Protection(
        "lost consumer groups are made again",
        "rollout_queue/lua_common.py",
        "  redis.call('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')\n",
        "",
        f"{FAULTS} -k lost_consumer_groups",
    ),
    Protection(
        "what a flushed Redis has lost is issued again",
        "trainer_svc/intake.py",
        "missing = self.window.missing(self.census)",
        "missing: list[RequestId] = []",
        "tests/integration/test_redis_outages.py -k whatever_happens",
    ),
    Protection(
        "a lost connection is tried again",
        "rollout_queue/connection.py",
        "return isinstance(error, _TRANSIENT) or (",
        "return (",
        f"{FAULTS} -k survives_a_restart",
    ),
    Protection(
        "a server that loads or fails over is waited for",
        "rollout_queue/connection.py",
        "in _PASSING\n    )",
        "in ()\n    )",
        "tests/integration/test_redis_outages.py -k whatever_happens",
    ),
    Protection(
        "a silent peer is given up",
        "rollout_queue/connection.py",
        "socket_timeout=socket_timeout_s,",
        "socket_timeout=None,",
        f"{FAULTS} -k silent_peer",
    ),
    Protection(
        "an evicting Redis is refused",
        "rollout_queue/connection.py",
        'if policy != "noeviction":',
        "if False:",
        f"{FAULTS} -k evicting",
    ),
    Protection(
        "a body above the limit is refused by its sender",
        "rollout_queue/redis_producer.py",
        "raise TooLarge(",
        "TooLarge(",
        f"{QUEUE} -k too_large",
    ),
    Protection(
        "a commit whose answer was lost counts once",
        "rollout_queue/lua_producer.py",
        "if mine and r.state == 'd' then return 'DUP' end",
        "",
        f"{QUEUE} -k ok_then_dup",
    ),
    Protection(
        "malformed entries are dead-lettered",
        "rollout_queue/lua_trainer.py",
        "if redis.call('XDEL', ROLLOUTS, entry) == 1 then bury('rollout', ARGV[6], id, ARGV[7]) end",
        "",
        f"{FAULTS} -k stream_of_rollouts",
    ),
    Protection(
        "a request is given up by the queue alone",
        "rollout_queue/lua_trainer.py",
        "if not (r and r.state == 'x' and r.entry == entry) then f[1] = 'forged' end",
        "",
        f"{FAULTS} -k stream_of_rollouts",
    ),
    # --- the weight channel
    Protection(
        "a damaged version is never used (shared memory)",
        "weight_sync/member.py",
        "    if found != told:",
        "    if False:",
        f"{SHM} -k damaged_memory",
    ),
    Protection(
        "a damaged version is never used (group)",
        "weight_sync/member.py",
        "    if found != told:",
        "    if False:",
        f"{SYNC} -k flipped_bit",
    ),
    Protection(
        "memory that is read is not written",
        "weight_sync/regions.py",
        "return _lock_byte(self._descriptor, fcntl.F_WRLCK)",
        "return True",
        f"{SHM} -k slow_member",
    ),
    Protection(
        "a member that stopped costs its deadline and no more",
        "weight_sync/sender.py",
        "limit_s, total = self._settings.transfer_timeout_s, staged.manifest.total_bytes",
        "limit_s, total = 1000.0, staged.manifest.total_bytes",
        f"{SYNC} -k lost_in_mid_transfer",
    ),
    Protection(
        "a dead member is not waited for",
        "weight_sync/attendance.py",
        "return self._register.gone(sessions) | {n for n in local if has_died(views[n].record.hello)}",
        "return self._register.gone(sessions)",
        f"{SHM} -k dead_member_of_this_machine",
    ),
    Protection(
        "a member left out joins again",
        "weight_sync/member.py",
        '            log.warning("the publisher left us out (%s); joining again", call.reason)\n            self._registered = False\n',
        "",
        f"{SHM} -k damaged_memory",
    ),
    # --- fencing
    Protection(
        "an older trainer is fenced by the queue",
        "rollout_queue/lua_common.py",
        "if known > inc then return redis.error_reply('FENCED incarnation ' .. known .. ' owns the run') end",
        "if known > inc then return nil end",
        f"{QUEUE} -k older_trainer",
    ),
    Protection(
        "a trainer that slept writes no checkpoint",
        "trainer_svc/checkpoint.py",
        "        guard()\n",
        "",
        "tests/unit/test_saver.py",
    ),
    Protection(
        "a producer whose lease was taken over commits nothing",
        "rollout_queue/lua_producer.py",
        "if not mine or r.state ~= 'l' then return 'FENCED' end",
        "",
        f"{QUEUE} -k taken_over_under",
    ),
    # --- the end
    Protection(
        "SIGTERM drains and saves",
        "trainer_svc/service.py",
        "self._durability.finish(self.step)",
        "pass",
        "tests/integration/test_run_fake.py -k interrupted",
    ),
    Protection(
        "a second signal ends at once",
        "nbehind/supervisor.py",
        "signals_seen: int | None = None) -> None:",
        "signals_seen: int | None = None) -> None:\n        signals_seen = 99",
        "tests/integration/test_supervisor.py -k second_ctrl_c",
    ),
    Protection(
        "data that do not divide end with a smaller step",
        "trainer_svc/order.py",
        "return min(self.groups_per_step, self.epochs * self.num_items - step * self.groups_per_step)",
        "return self.groups_per_step",
        "tests/unit/test_order.py -k do_not_divide",
    ),
    Protection(
        "producers leave when the trainer declares the end",
        "producer_svc/keeper.py",
        'self._ended = "done"',
        "pass",
        "tests/integration/test_producer_service.py -k declares_the_end",
    ),
    Protection(
        "a message never prints the secret",
        "rollout_queue/connection.py",
        'return re.sub(r"//.*@", "//***@", url, flags=re.DOTALL).partition("?")[0]',
        "return url",
        f"{FAULTS} -k without_the_secret",
    ),
    # --- stalls
    Protection(
        "a run that stands still is given up with its reason",
        "trainer_svc/intake.py",
        "if waited_s > self._config.run.give_up_s:",
        "if False:",
        "tests/integration/test_stall.py",
    ),
    # --- staleness
    Protection(
        "no token beyond the bound is trained",
        "rollout_queue/staleness.py",
        "if lags.size and int(lags.max()) > n_behind:",
        "if False:",
        "tests/unit/test_staleness.py -k too_old",
    ),
    Protection(
        "a version that was never given out is refused",
        "rollout_queue/staleness.py",
        "if known is None or known != version.checksum:",
        "if False:",
        "tests/unit/test_staleness.py -k never_given",
    ),
    Protection(
        "metrics are for this machine only",
        "nbehind/config.py",
        'host: str = Field("127.0.0.1"',
        'host: str = Field("0.0.0.0"',
        "tests/unit/test_security.py -k this_machine",
    ),
    Protection(
        "a member that cannot take weights is tried less and less often",
        "weight_sync/attendance.py",
        "or self._trouble[n].rests_until <= now",
        "or True",
        "tests/integration/test_weight_trouble.py -k less_often",
    ),
    Protection(
        "adapters go on only upon the weights and the scale that they were trained with",
        "trainer_svc/torch_engine.py",
        'if info.get("adapters", self._added_to) != self._added_to:',
        "if False:",
        "tests/integration/test_adapters.py -k its_base",
    ),
    Protection(
        "a config that can be read only once is read once",
        "nbehind/environment.py",
        "_is_own_program() and config_file.is_file()",
        "_is_own_program()",
        "tests/unit/test_environment.py -k pipe",
    ),
)
