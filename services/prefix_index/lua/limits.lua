-- A request of a key with limits: counts it, or refuses it and counts nothing.
--
-- KEYS[1]   requests: when, in us, the key's bucket of requests will be empty
-- KEYS[2]   tokens: the same, of tokens
-- KEYS[3]   running: leases with the time, in us, at which they run out, packed
-- KEYS[4]   gateways: those that asked, with the time, in us, until which they count, packed
-- ARGV[1]   requests per minute; 0: no limit
-- ARGV[2]   tokens per minute; 0: no limit
-- ARGV[3]   requests at once; 0: no limit
-- ARGV[4]   tokens of the prompt
-- ARGV[5]   the name of the request's lease
-- ARGV[6]   how long its lease lasts, in ms
-- ARGV[7]   the gateway's id
-- Returns   0, or which limit refuses: 1 at once, 2 requests, 3 tokens; how full both buckets are; how long the request
--           has to wait, 0 where nobody knows; all three in us; how many gateways asked within the last minute
--
-- services/gateway/keys/rates.py has the same arithmetic, and says where it is from. Only GET and SET are used: gateways
-- may send them, and may not write to the registry, whose sorted sets say which workers live.
local WINDOW = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function level(key)
  return math.max(0, tonumber(redis.call('GET', key) or '0') - now)
end

local function keep(key, filled)
  redis.call('SET', key, string.format('%.0f', now + filled), 'PX', string.format('%.0f', filled / 1000 + 1000))
end

-- Those that have not run out yet, and how many they are.
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
local asking, gateways = living(KEYS[4])
gateways = asking[ARGV[7]] and gateways or gateways + 1
asking[ARGV[7]] = now + WINDOW
redis.call('SET', KEYS[4], cmsgpack.pack(asking), 'PX', WINDOW / 1000)

local function answer(verdict, wait)
  return {verdict, math.ceil(requests), math.ceil(tokens), math.ceil(wait), gateways}
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
return answer(0, 0)
