-- A request of a key with limits: counts it, or refuses it and counts nothing.
--
-- KEYS[1]   requests: when, in us, the key's bucket of requests will be empty
-- KEYS[2]   tokens: the same, of tokens
-- KEYS[3]   running: leases with the time, in us, at which they run out, packed
-- KEYS[4]   counted: there for a request that was counted, until it is settled; for undo.lua
-- ARGV[1]   requests per minute; 0: no limit
-- ARGV[2]   tokens per minute; 0: no limit
-- ARGV[3]   requests at once; 0: no limit
-- ARGV[4]   tokens of the prompt
-- ARGV[5]   the name of the request's lease
-- ARGV[6]   how long its lease lasts, in ms
-- ARGV[7]   '1': nothing is counted, whatever the answer
-- Returns   0, or which limit refuses: 1 at once, 2 requests, 3 tokens; how full both buckets are; how long the request
--           has to wait, 0 where nobody knows; all three in us
--
-- services/gateway/keys/rates.py has the same arithmetic, and says where it is from. Only GET, SET and DEL are used:
-- gateways may send them, and may not write to the registry, whose sorted sets say which workers live.
local WINDOW = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function level(key)
  return math.max(0, tonumber(redis.call('GET', key) or '0') - now)
end

local function keep(key, filled)
  redis.call('SET', key, string.format('%.0f', now + filled), 'PX', string.format('%.0f', filled / 1000 + 1000))
end

-- The leases that have not run out yet, and how many they are.
local function living(key)
  local packed, found, number = redis.call('GET', key), {}, 0
  for name, ends in pairs(packed and cmsgpack.unpack(packed) or {}) do
    if ends > now then
      found[name], number = ends, number + 1
    end
  end
  return found, number
end

local requests, tokens = level(KEYS[1]), level(KEYS[2])

local function answer(verdict, wait)
  return {verdict, math.ceil(requests), math.ceil(tokens), math.ceil(wait)}
end

local leases, running = {}, 0
if ARGV[3] ~= '0' then
  leases, running = living(KEYS[3])
  if running >= tonumber(ARGV[3]) then
    return answer(1, 0)
  end
end
local more_requests, more_tokens = requests, tokens
if ARGV[1] ~= '0' then
  more_requests = requests + WINDOW / tonumber(ARGV[1])
  if more_requests > WINDOW + 1 then
    return answer(2, more_requests - WINDOW)
  end
end
if ARGV[2] ~= '0' then
  more_tokens = tokens + tonumber(ARGV[4]) * WINDOW / tonumber(ARGV[2])
  if more_tokens > WINDOW + 1 then
    return answer(3, more_tokens - WINDOW)
  end
end
if ARGV[7] == '1' then
  return answer(0, 0)
end
requests, tokens = more_requests, more_tokens
if ARGV[1] ~= '0' then
  keep(KEYS[1], requests)
end
if ARGV[2] ~= '0' then
  keep(KEYS[2], tokens)
end
if ARGV[3] ~= '0' then
  leases[ARGV[5]] = now + tonumber(ARGV[6]) * 1000
  redis.call('SET', KEYS[3], cmsgpack.pack(leases), 'PX', 86400000)
end
redis.call('SET', KEYS[4], '', 'PX', WINDOW / 1000)
return answer(0, 0)
