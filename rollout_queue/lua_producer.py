"""Lua of the producers' side."""

from __future__ import annotations

# owner, version, free, lease_ms, incarnation of the weights (0 = the run's) -> {outcome, last entry id, {entry, attempt, failures, data}...}
# outcome: 0 nothing to say, 1 the run has ended, 2 a request needs newer weights
LEASE = """
local owner, version, free, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local s = redis.call('HMGET', STATE, 'incarnation', 'floor', 'ended')
local inc, out = tonumber(s[1] or '0'), {}
if (s[3] or '') ~= '' then return {1, '0-0', out} end
if redis.call('EXISTS', REQUESTS) == 0 then return {0, '0-0', out} end
if ARGV[5] ~= '0' and tonumber(ARGV[5]) ~= inc then return {2, '0-0', out} end
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

local outcome = 0
local function may_begin(f, r)
  if version >= tonumber(s[2] or '0') and version >= tonumber(f.min) and version >= r.start then return true end
  outcome = 2
  return false
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

for _ = 1, 1000 do
  local wanted = free - #out
  local seen = wanted > 0 and redis.call('XREAD', 'COUNT', wanted, 'STREAMS', REQUESTS, last)
  if not seen then break end
  local ready, gone, waits = {}, 0, false
  for _, item in ipairs(seen[1][2]) do
    local entry, f = item[1], fields(item[2])
    local r = live(entry, f)
    if not r then
      redis.call('XDEL', REQUESTS, entry)
      gone = gone + 1
    elseif may_begin(f, r) then
      ready[#ready + 1] = {entry, f, r}
    else
      waits = true
      break
    end
  end
  if #ready > 0 then
    redis.call('XREADGROUP', 'GROUP', PRODUCERS, owner, 'COUNT', #ready, 'STREAMS', REQUESTS, '>')
    for _, item in ipairs(ready) do take(unpack(item)) end
    last = ready[#ready][1]
  end
  if waits or gone == 0 then break end
end
local newest = redis.call('XREVRANGE', REQUESTS, '+', '-', 'COUNT', 1)[1]
return {outcome, newest and newest[1] or last, out}
"""

# owner, then for each lease: id, inc, attempt, entry -> indices (from 0) of the lost ones
RENEW = """
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
COMMIT = """
local id, inc, att, owner, header = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local r = record(id)
local mine = r and r.inc == inc and r.att == att and r.owner == owner
if mine and r.state == 'd' then return 'DUP' end
if tonumber(redis.call('HGET', STATE, 'incarnation') or '0') > inc then return 'FENCED' end
if not r or r.state == 'x' then return 'GONE' end
if not mine or r.state ~= 'l' then return 'FENCED' end
full_memory_is_fine()
if redis.call('EXISTS', KEYS[6]) == 0 then
  redis.call('HINCRBY', STATE, 'refused', 1)  -- most likely for want of memory: the trainer looks here
  return 'NOBODY'
end
local entry = redis.call('XADD', ROLLOUTS, '*', 'group', id .. '|' .. ARGV[2] .. '|' .. ARGV[3], 'header', header)
drop(REQUESTS, PRODUCERS, r.entry)
r.state, r.entry = 'd', entry
put(id, r)
return 'OK'
"""

# id, inc, attempt, owner, failure ('' = none), max_attempts -> 'LOST', 'RETURNED' or 'DEAD'
GIVE_BACK = """
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
  r.entry = redis.call('XADD', ROLLOUTS, '*', 'dead', id .. '|' .. ARGV[2], 'reason', failure)
  put(id, r)
  return 'DEAD'
end
redis.pcall('XCLAIM', REQUESTS, PRODUCERS, RETURNED, 0, r.entry, 'IDLE', NEVER, 'JUSTID')
r.att, r.state, r.owner = r.att + 1, 'q', ''
put(id, r)
return 'RETURNED'
"""

# id ('' = unknown), entry, reason, payload: a request that its producer cannot decode
REJECT_REQUEST = """
full_memory_is_fine()
local id, entry = ARGV[1], ARGV[2]
if redis.call('XDEL', REQUESTS, entry) == 1 then bury('request', ARGV[3], id, ARGV[4]) end
redis.pcall('XACK', REQUESTS, PRODUCERS, entry)
local r = record(id)
if r and r.entry == entry then redis.call('HDEL', OPEN, id) end
return 1
"""

# owner, ttl_ms, info | KEYS[6] its heartbeat, KEYS[7] the info of all
PRODUCER_ALIVE = """
full_memory_is_fine()
redis.call('SET', KEYS[6], '1', 'PX', ARGV[2])
redis.call('HSET', KEYS[7], ARGV[1], ARGV[3])
return 1
"""

# owner | KEYS[6] its heartbeat, KEYS[7] the info of all: the leases it still holds are given back
LEAVE = """
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
