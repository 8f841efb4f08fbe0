-- Nobody waits any more for the answer to a request that limits.lua was asked to count: where it was counted after all,
-- it is no longer.
--
-- KEYS      as those of limits.lua
-- ARGV[1]   requests per minute; 0: no limit
-- ARGV[2]   tokens per minute; 0: no limit
-- ARGV[3]   tokens of the prompt
-- ARGV[4]   the name of the request's lease
if not redis.call('GET', KEYS[4]) then
  return 0
end
redis.call('DEL', KEYS[4])
local packed = redis.call('GET', KEYS[3])
if packed then
  local leases = cmsgpack.unpack(packed)
  leases[ARGV[4]] = nil
  redis.call('SET', KEYS[3], cmsgpack.pack(leases), 'PX', 86400000)
end

local function lower(key, limit, cost)
  local empty = redis.call('GET', key)
  if limit ~= '0' and empty then
    local lowered = string.format('%.0f', tonumber(empty) - cost * 60000000 / tonumber(limit))
    redis.call('SET', key, lowered, 'KEEPTTL')
  end
end

lower(KEYS[1], ARGV[1], 1)
lower(KEYS[2], ARGV[2], tonumber(ARGV[3]))
return 1
