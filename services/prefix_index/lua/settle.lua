-- A request of a key with limits has ended: it runs no more, and the tokens of its answer count, whatever the limit.
--
-- KEYS      as those of limits.lua
-- ARGV[1]   tokens per minute; 0: no limit
-- ARGV[2]   tokens that were generated
-- ARGV[3]   the name of the request's lease
local packed = redis.call('GET', KEYS[3])
if packed then
  local leases = cmsgpack.unpack(packed)
  leases[ARGV[3]] = nil
  redis.call('SET', KEYS[3], cmsgpack.pack(leases), 'PX', 86400000)
end
redis.call('DEL', KEYS[4])
if ARGV[1] ~= '0' and ARGV[2] ~= '0' then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local level = math.max(0, tonumber(redis.call('GET', KEYS[2]) or '0') - now)
  level = level + tonumber(ARGV[2]) * 60000000 / tonumber(ARGV[1])
  redis.call('SET', KEYS[2], string.format('%.0f', now + level), 'PX', string.format('%.0f', level / 1000 + 1000))
end
return 0
