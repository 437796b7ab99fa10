"""Lua that every script of the queue begins with: the keys, the records of open requests, the fence."""

from __future__ import annotations

from rollout_queue.keys import REQUEST_GROUP, ROLLOUT_CONSUMER, ROLLOUT_GROUP

DEAD_LETTERS_KEPT = 1000

PRELUDE = """
local STATE, OPEN, REQUESTS, ROLLOUTS, DEAD = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PRODUCERS, TRAINER, RANK0 = 'REQUEST_GROUP', 'ROLLOUT_GROUP', 'ROLLOUT_CONSUMER'
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
"""
for _name, _value in {
    "DEAD_LETTERS_KEPT": str(DEAD_LETTERS_KEPT),
    "REQUEST_GROUP": REQUEST_GROUP,
    "ROLLOUT_GROUP": ROLLOUT_GROUP,
    "ROLLOUT_CONSUMER": ROLLOUT_CONSUMER,
}.items():
    PRELUDE = PRELUDE.replace(_name, _value)
