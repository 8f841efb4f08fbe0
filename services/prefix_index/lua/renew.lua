-- Requests of a key still run: their leases last longer. One that is not there stays away: its request was settled.
--
-- KEYS[1]      running, as KEYS[3] of limits.lua
-- ARGV[1]      how long the leases last from now, in ms
-- ARGV[2]...   the names of the leases
local packed = redis.call('GET', KEYS[1])
if not packed then
  return 0
end
local time = redis.call('TIME')
local ends = time[1] * 1000000 + time[2] + tonumber(ARGV[1]) * 1000
local leases = cmsgpack.unpack(packed)
for index = 2, #ARGV do
  if leases[ARGV[index]] then
    leases[ARGV[index]] = ends
  end
end
redis.call('SET', KEYS[1], cmsgpack.pack(leases), 'PX', 86400000)
return 1
