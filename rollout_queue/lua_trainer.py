"""Lua of the trainer's side. `guard` = ARGV[1..3]: its incarnation, published version and floor (see `fenced`)."""

from __future__ import annotations

# at_least -> incarnation
CLAIM = """
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
ANNOUNCE = """
full_memory_is_fine()
return fenced() or redis.call('HGET', STATE, 'published')
"""

# guard (with the new floor) -> all open records
RAISE_FLOOR = """
full_memory_is_fine()
return fenced() or redis.call('HGETALL', OPEN)
"""

# guard | n, then n times: id, attempt, min_version, failures, data
ISSUE = """
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

# guard | last seen entry, count -> entries {entry, fields}
POLL = """
full_memory_is_fine()
local no = fenced()
if no then return no end
local count, out = tonumber(ARGV[5]), {}
-- A request is given up by the script that says so here; anything else that claims it is passed on as what it is.
local function check_notice(entry, f)
  if f[1] ~= 'dead' then return end
  local r = record(string.match(f[2] or '', '^([^|]*)|') or '')
  if not (r and r.state == 'x' and r.entry == entry) then f[1] = 'forged' end
end
local function read_group(from)
  return redis.pcall('XREADGROUP', 'GROUP', TRAINER, RANK0, 'COUNT', count - #out, 'STREAMS', ROLLOUTS, from)
end
local function collect(from)
  local got = read_group(from)
  if got and got.err then
    need_group(ROLLOUTS, TRAINER)
    got = read_group(from)
  end
  if not got then return end
  if got.err then error(got.err) end
  for _, entry in ipairs(got[1][2]) do
    if entry[2] then
      check_notice(entry[1], entry[2])
      out[#out + 1] = entry
    else
      redis.call('XACK', ROLLOUTS, TRAINER, entry[1])
    end
  end
end
collect(ARGV[4])
if #out < count then collect('>') end
return out
"""

# guard | entry, id, reason, payload | KEYS[6] body
REJECT = """
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

# guard | n times: id, inc, attempt (-1: a dead notice), entry | KEYS[6..] bodies
RELEASE = """
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
WITHDRAW = """
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
REPAIR = """
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

# entry of a dead letter, mark | KEYS[6] the list of re-queued prompts. Anybody may call it
REQUEUE = """
if redis.call('XDEL', DEAD, ARGV[1]) == 0 then return 0 end
redis.call('RPUSH', KEYS[6], ARGV[2])
return 1
"""

# guard | reason
FINISH = """
full_memory_is_fine()
local no = fenced()
if no then return no end
redis.call('HSET', STATE, 'ended', ARGV[4])
return 1
"""

# guard | ttl_ms | KEYS[6] the trainer's heartbeat
TRAINER_ALIVE = """
full_memory_is_fine()
local no = fenced()
if no then return no end
redis.call('SET', KEYS[6], ARGV[1], 'PX', ARGV[4])
return 1
"""
