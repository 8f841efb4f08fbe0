-- Takes back a request that limits.lua was asked to count, or ends one for which nothing was done: it runs no more, and
-- where it was counted, within the last minute, it is no longer. What was counted before that has left the buckets.
--
-- KEYS      as those of limits.lua
-- ARGV[1]   requests per minute; 0: no limit
-- ARGV[2]   tokens per minute; 0: no limit
-- ARGV[3]   tokens of the prompt
-- ARGV[4]   the name of the request's lease
-- ARGV[5]   how long leases last, in ms
local leases = read_leases(KEYS[3], ARGV[5])
if leases[ARGV[4]] then
  leases[ARGV[4]] = nil
  keep_leases(KEYS[3], leases)
end
if text(KEYS[4]) ~= 'counted' then
  return 0
end
redis.call('DEL', KEYS[4])

local function lower(key, limit, cost)
  if limit ~= '0' then
    keep_level(key, math.max(0, level(key) - cost * WINDOW / tonumber(limit)))
  end
end

lower(KEYS[1], ARGV[1], 1)
lower(KEYS[2], ARGV[2], tonumber(ARGV[3]))
return 1
