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

DEAD_LETTERS_KEPT = 1000

_PRELUDE = """
local STATE, OPEN, REQUESTS, ROLLOUTS, DEAD = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PRODUCERS, TRAINER, RANK0 = 'producers', 'trainer', 'rank0'
local RETURNED = '-'  -- consumer that holds what was given back
local NEVER = 2000000000  -- idle ms: abandoned for long

local function full_memory_is_fine() redis.call('PERSIST', STATE) end

local function parse(raw)
  local inc, att, state, start, fails, entry, owner =
    string.match(raw or '', '^(%d+)|(%d+)|(%a)|(%-?%d+)|(%d+)|([%d%-]+)|(.*)$')
  if not inc then return nil end
  return {inc = tonumber(inc), att = tonumber(att), state = state, start = tonumber(start),
          fails = tonumber(fails), entry = entry, owner = owner}
end

local function record(id)
  local raw = redis.call('HGET', OPEN, id)
  return raw and parse(raw)
end

local function put(id, r)
  redis.call('HSET', OPEN, id, string.format('%.0f|%.0f|%s|%.0f|%.0f|%s|%s',
    r.inc, r.att, r.state, r.start, r.fails, r.entry, r.owner))
end

local function fields(list)
  local map = {}
  for i = 1, #list, 2 do map[list[i]] = list[i + 1] end
  return map
end

local function read(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)
  return found[1] and fields(found[1][2])
end

local function drop(stream, group, entry)
  redis.pcall('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

local function drop_record(id, r)
  if r.state == 'q' or r.state == 'l' then drop(REQUESTS, PRODUCERS, r.entry)
  else drop(ROLLOUTS, TRAINER, r.entry) end
  redis.call('HDEL', OPEN, id)
end

local function has_group(stream, name)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return nil end
  for _, group in ipairs(groups) do
    local info = fields(group)
    if info['name'] == name then return info['last-delivered-id'] end
  end
  return nil
end

local function need_group(stream, name)
  local last = has_group(stream, name)
  if last then return last end
  redis.call('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM')
  return '0-0'
end

local function bury(kind, reason, id, payload)
  redis.call('XADD', DEAD, 'MAXLEN', DEAD_LETTERS_KEPT, '*',
    'kind', kind, 'reason', reason, 'id', id, 'payload', payload)
end

-- The trainer's right to act, from ARGV[1..3] = its incarnation, published version and floor.
local function fenced()
  local inc, published, floor = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
  local s = redis.call('HMGET', STATE, 'incarnation', 'published', 'floor')
  local known = tonumber(s[1] or '0')
  if known > inc then return redis.error_reply('FENCED incarnation ' .. known .. ' owns the run') end
  if known < inc then
    redis.call('HSET', STATE, 'incarnation', ARGV[1], 'published', ARGV[2], 'floor', ARGV[3], 'ended', '')
  else
    if tonumber(s[2] or '-1') < published then redis.call('HSET', STATE, 'published', ARGV[2]) end
    if tonumber(s[3] or '0') < floor then redis.call('HSET', STATE, 'floor', ARGV[3]) end
  end
  return nil
end
""".replace("DEAD_LETTERS_KEPT", str(DEAD_LETTERS_KEPT))

# at_least -> incarnation
_CLAIM = """
full_memory_is_fine()
local known = tonumber(redis.call('HGET', STATE, 'incarnation') or '0')
local inc = math.max(known + 1, tonumber(ARGV[1]))
redis.call('HSET', STATE, 'incarnation', string.format('%.0f', inc), 'published', '-1', 'floor', '0', 'ended', '')
local all = redis.call('HGETALL', OPEN)
for i = 1, #all, 2 do
  local r = parse(all[i + 1])
  if not r or r.state == 'q' or r.state == 'l' then redis.call('HDEL', OPEN, all[i]) end
end
redis.call('DEL', REQUESTS)
need_group(REQUESTS, PRODUCERS)
need_group(ROLLOUTS, TRAINER)
return string.format('%.0f', inc)
"""

# guard | published
_ANNOUNCE = """
full_memory_is_fine()
return fenced() or redis.call('HGET', STATE, 'published')
"""

# guard (with the new floor) -> all open records
_RAISE_FLOOR = """
full_memory_is_fine()
return fenced() or redis.call('HGETALL', OPEN)
"""

# guard | n, then n times: id, attempt, min_version, failures, data
_ISSUE = """
local no = fenced()
if no then return no end
local inc = tonumber(ARGV[1])
need_group(REQUESTS, PRODUCERS)
for i = 5, 4 + 5 * tonumber(ARGV[4]), 5 do
  local id, att, minimum, fails, data = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4]
  local old = record(id)
  if not old or old.inc < inc or (old.inc == inc and old.att < att) then
    local entry = redis.call('XADD', REQUESTS, '*', 'id', id, 'inc', ARGV[1], 'min', minimum, 'data', data)
    if old then drop_record(id, old) end
    local start = old and old.inc == inc and old.start or -1
    put(id, {inc = inc, att = att, state = 'q', start = start, fails = fails, entry = entry, owner = ''})
  end
end
return 1
"""

# owner, version, free, lease_ms -> {ended, last entry id, {entry, attempt, failures, data}...}
_LEASE = """
local owner, version, free, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local s = redis.call('HMGET', STATE, 'incarnation', 'floor', 'ended')
local inc, out = tonumber(s[1] or '0'), {}
if (s[3] or '') ~= '' then return {1, '0-0', out} end
if redis.call('EXISTS', REQUESTS) == 0 then return {0, '0-0', out} end
full_memory_is_fine()
local last = need_group(REQUESTS, PRODUCERS)

local function live(entry, f)
  if not f.id or not f.inc or not f.min or not f.data then
    bury('request', 'entry without the fields of a request', '', '')
    return nil
  end
  local r = record(f.id)
  if r and r.inc == inc and r.entry == entry and (r.state == 'q' or r.state == 'l') then return r end
  return nil
end

local function take(entry, f, r)
  if r.state == 'l' then r.att = r.att + 1 end
  r.state, r.start, r.owner = 'l', version, owner
  put(f.id, r)
  out[#out + 1] = {entry, string.format('%.0f', r.att), string.format('%.0f', r.fails), f.data}
end

local function may_begin(f, r)
  return version >= tonumber(s[2] or '0') and version >= tonumber(f.min) and version >= r.start
end
for _, pending in ipairs(redis.call('XPENDING', REQUESTS, PRODUCERS, 'IDLE', lease_ms, '-', '+', 1000)) do
  if #out >= free then break end
  local entry = pending[1]
  local f = read(REQUESTS, entry)
  local r = f and live(entry, f)
  if not r then
    drop(REQUESTS, PRODUCERS, entry)
  elseif may_begin(f, r) then
    redis.call('XCLAIM', REQUESTS, PRODUCERS, owner, 0, entry, 'IDLE', 0, 'JUSTID')
    take(entry, f, r)
  end
end

local looked = 0
while #out < free and looked < 1000 do
  looked = looked + 1
  local next = redis.call('XREAD', 'COUNT', 1, 'STREAMS', REQUESTS, last)
  if not next then break end
  local entry, f = next[1][2][1][1], fields(next[1][2][1][2])
  local r = live(entry, f)
  if not r then
    redis.call('XDEL', REQUESTS, entry)
  elseif may_begin(f, r) then
    redis.call('XREADGROUP', 'GROUP', PRODUCERS, owner, 'COUNT', 1, 'STREAMS', REQUESTS, '>')
    take(entry, f, r)
    last = entry
  else
    break
  end
end
local newest = redis.call('XREVRANGE', REQUESTS, '+', '-', 'COUNT', 1)[1]
return {0, newest and newest[1] or last, out}
"""

# owner, then for each lease: id, inc, attempt, entry -> indices (from 0) of the lost ones
_RENEW = """
local owner, lost = ARGV[1], {}
for i = 2, #ARGV, 4 do
  local r, held = record(ARGV[i]), false
  if r and r.owner == owner and r.inc == tonumber(ARGV[i + 1]) and r.att == tonumber(ARGV[i + 2]) then
    if r.state == 'd' then held = true
    elseif r.state == 'l' and r.entry == ARGV[i + 3] then
      local got = redis.pcall('XCLAIM', REQUESTS, PRODUCERS, owner, 0, r.entry, 'IDLE', 0, 'JUSTID')
      held = not got.err and #got == 1
    end
  end
  if not held then lost[#lost + 1] = (i - 2) / 4 end
end
return lost
"""

# KEYS[6] body | id, inc, attempt, owner, header
_COMMIT = """
local id, inc, att, owner, header = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local r = record(id)
local mine = r and r.inc == inc and r.att == att and r.owner == owner
if mine and r.state == 'd' then return 'DUP' end
if tonumber(redis.call('HGET', STATE, 'incarnation') or '0') > inc then return 'FENCED' end
if not r or r.state == 'x' then return 'GONE' end
if not mine or r.state ~= 'l' then return 'FENCED' end
if redis.call('EXISTS', KEYS[6]) == 0 then return 'NOBODY' end
full_memory_is_fine()
local entry = redis.call('XADD', ROLLOUTS, '*', 'kind', 'group', 'id', id, 'inc', ARGV[2], 'att', ARGV[3], 'h', header)
drop(REQUESTS, PRODUCERS, r.entry)
r.state, r.entry = 'd', entry
put(id, r)
return 'OK'
"""

# id, inc, attempt, owner, failure ('' = none), max_attempts -> 'LOST', 'RETURNED' or 'DEAD'
_GIVE_BACK = """
local id, failure = ARGV[1], ARGV[5]
local r = record(id)
if not r or r.state ~= 'l' or r.inc ~= tonumber(ARGV[2]) or r.att ~= tonumber(ARGV[3]) or r.owner ~= ARGV[4] then
  return 'LOST'
end
full_memory_is_fine()
if failure ~= '' then r.fails = r.fails + 1 end
if failure ~= '' and r.fails >= tonumber(ARGV[6]) then
  local f = read(REQUESTS, r.entry)
  bury('request', failure, id, f and f.data or '')
  drop(REQUESTS, PRODUCERS, r.entry)
  r.state = 'x'
  r.entry = redis.call('XADD', ROLLOUTS, '*', 'kind', 'dead', 'id', id, 'inc', ARGV[2], 'reason', failure)
  put(id, r)
  return 'DEAD'
end
redis.pcall('XCLAIM', REQUESTS, PRODUCERS, RETURNED, 0, r.entry, 'IDLE', NEVER, 'JUSTID')
r.att, r.state, r.owner = r.att + 1, 'q', ''
put(id, r)
return 'RETURNED'
"""

# guard | last seen entry, count -> entries {entry, fields}
_POLL = """
full_memory_is_fine()
local no = fenced()
if no then return no end
need_group(ROLLOUTS, TRAINER)
local count, out = tonumber(ARGV[5]), {}
local function collect(from)
  local got = redis.call('XREADGROUP', 'GROUP', TRAINER, RANK0, 'COUNT', count - #out, 'STREAMS', ROLLOUTS, from)
  if not got then return 0 end
  for _, entry in ipairs(got[1][2]) do
    if entry[2] then out[#out + 1] = entry else redis.call('XACK', ROLLOUTS, TRAINER, entry[1]) end
  end
  return #got[1][2]
end
collect(ARGV[4])
if #out < count then collect('>') end
return out
"""

# guard | entry, id, reason, payload | KEYS[6] body
_REJECT = """
full_memory_is_fine()
local no = fenced()
if no then return no end
local entry, id = ARGV[4], ARGV[5]
if redis.call('XDEL', ROLLOUTS, entry) == 1 then bury('rollout', ARGV[6], id, ARGV[7]) end
redis.pcall('XACK', ROLLOUTS, TRAINER, entry)
local r = record(id)
if r and r.entry == entry and (r.state == 'd' or r.state == 'x') then redis.call('HDEL', OPEN, id) end
if KEYS[6] then redis.call('UNLINK', KEYS[6]) end
return 1
"""

# id, inc, attempt, entry, reason, payload: a request that its producer cannot decode
_REJECT_REQUEST = """
full_memory_is_fine()
local r = record(ARGV[1])
if redis.call('XDEL', REQUESTS, ARGV[4]) == 1 then bury('request', ARGV[5], ARGV[1], ARGV[6]) end
redis.pcall('XACK', REQUESTS, PRODUCERS, ARGV[4])
if r and r.entry == ARGV[4] then redis.call('HDEL', OPEN, ARGV[1]) end
return 1
"""

# guard | n times: id, inc, attempt (-1: a dead notice), entry | KEYS[6..] bodies
_RELEASE = """
full_memory_is_fine()
local no = fenced()
if no then return no end
for i = 4, #ARGV, 4 do
  local id, inc, att, entry = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), ARGV[i + 3]
  drop(ROLLOUTS, TRAINER, entry)
  local r = record(id)
  if r and r.inc == inc and (r.state == 'd' or r.state == 'x') and (r.att == att or r.entry == entry) then
    redis.call('HDEL', OPEN, id)
  end
end
for i = 6, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""

# guard | ids -> {id, inc, attempt} of the delivered ones, whose bodies are to be deleted
_WITHDRAW = """
full_memory_is_fine()
local no = fenced()
if no then return no end
local out = {}
for i = 4, #ARGV do
  local r = record(ARGV[i])
  if r then
    drop_record(ARGV[i], r)
    if r.state == 'd' then
      out[#out + 1] = {ARGV[i], string.format('%.0f', r.inc), string.format('%.0f', r.att)}
    end
  end
end
return out
"""

# guard: forget open marks whose stream entry is lost, so that they are issued again
_REPAIR = """
full_memory_is_fine()
local no = fenced()
if no then return no end
local all = redis.call('HGETALL', OPEN)
for i = 1, #all, 2 do
  local r = parse(all[i + 1])
  local stream = r and ((r.state == 'q' or r.state == 'l') and REQUESTS or ROLLOUTS)
  if not r or not redis.call('XRANGE', stream, r.entry, r.entry)[1] then redis.call('HDEL', OPEN, all[i]) end
end
return redis.call('HGETALL', OPEN)
"""

# guard | reason
_FINISH = """
full_memory_is_fine()
local no = fenced()
if no then return no end
redis.call('HSET', STATE, 'ended', ARGV[4])
return 1
"""

# guard | ttl_ms | KEYS[6] the trainer's heartbeat
_TRAINER_ALIVE = """
full_memory_is_fine()
local no = fenced()
if no then return no end
redis.call('SET', KEYS[6], ARGV[1], 'PX', ARGV[4])
return 1
"""

# owner, ttl_ms, info | KEYS[6] its heartbeat, KEYS[7] the info of all
_PRODUCER_ALIVE = """
full_memory_is_fine()
redis.call('SET', KEYS[6], '1', 'PX', ARGV[2])
redis.call('HSET', KEYS[7], ARGV[1], ARGV[3])
return 1
"""

# owner | KEYS[6] its heartbeat, KEYS[7] the info of all: the leases it still holds are given back
_LEAVE = """
full_memory_is_fine()
redis.call('DEL', KEYS[6])
redis.call('HDEL', KEYS[7], ARGV[1])
if not has_group(REQUESTS, PRODUCERS) then return 0 end
local all = redis.call('HGETALL', OPEN)
for i = 1, #all, 2 do
  local r = parse(all[i + 1])
  if r and r.state == 'l' and r.owner == ARGV[1] then
    redis.call('XCLAIM', REQUESTS, PRODUCERS, RETURNED, 0, r.entry, 'IDLE', NEVER, 'JUSTID')
    r.att, r.state, r.owner = r.att + 1, 'q', ''
    put(all[i], r)
  end
end
if #redis.call('XPENDING', REQUESTS, PRODUCERS, '-', '+', 1, ARGV[1]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', REQUESTS, PRODUCERS, ARGV[1])
end
return 1
"""


class Script:
    """A script, loaded where it is missing. One EVALSHA a call; after NOSCRIPT one EVAL."""

    def __init__(self, body: str) -> None:
        self.text = _PRELUDE + body
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def run(self, client: redis.Redis, keys: list[str], args: list[Any]) -> Any:
        try:
            return client.evalsha(self.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            return client.eval(self.text, len(keys), *keys, *args)


CLAIM = Script(_CLAIM)
ANNOUNCE = Script(_ANNOUNCE)
RAISE_FLOOR = Script(_RAISE_FLOOR)
ISSUE = Script(_ISSUE)
LEASE = Script(_LEASE)
RENEW = Script(_RENEW)
COMMIT = Script(_COMMIT)
GIVE_BACK = Script(_GIVE_BACK)
POLL = Script(_POLL)
REJECT = Script(_REJECT)
REJECT_REQUEST = Script(_REJECT_REQUEST)
RELEASE = Script(_RELEASE)
WITHDRAW = Script(_WITHDRAW)
REPAIR = Script(_REPAIR)
FINISH = Script(_FINISH)
TRAINER_ALIVE = Script(_TRAINER_ALIVE)
PRODUCER_ALIVE = Script(_PRODUCER_ALIVE)
LEAVE = Script(_LEAVE)
