-- Counts a request of a key with limits, or refuses it and counts nothing. A repeated call counts once.
--
-- KEYS[1]   requests: the key's bucket of requests
-- KEYS[2]   tokens: the same, of tokens
-- KEYS[3]   running: leases of the key's requests
-- KEYS[4]   the request: 'counted', until it is settled; 'settled', for some seconds
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
-- services/gateway/keys/rates.py has the same arithmetic, and says where it is from.
local requests, tokens = level(KEYS[1]), level(KEYS[2])

local function answer(verdict, wait)
  return {verdict, math.ceil(requests), math.ceil(tokens), math.ceil(wait)}
end

if text(KEYS[4]) == 'counted' then
  return answer(0, 0)
end
local leases, running = {}, 0
if ARGV[3] ~= '0' then
  leases, running = read_leases(KEYS[3], ARGV[6])
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
  keep_level(KEYS[1], requests)
end
if ARGV[2] ~= '0' then
  keep_level(KEYS[2], tokens)
end
if ARGV[3] ~= '0' then
  leases[ARGV[5]] = now + tonumber(ARGV[6]) * 1000
  keep_leases(KEYS[3], leases)
end
redis.call('SET', KEYS[4], 'counted', 'PX', WINDOW / 1000)
return answer(0, 0)
