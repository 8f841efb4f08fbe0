-- A gateway that asks for keys lives.
--
-- KEYS[1]   gateways: ids with the time, in us, until which they count, packed
-- ARGV[1]   the gateway's id
-- ARGV[2]   how long it counts from now, in ms
-- Returns   how many gateways count
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local packed = redis.call('GET', KEYS[1])
local found, number = {}, 1
for id, ends in pairs(packed and cmsgpack.unpack(packed) or {}) do
  if ends > now and id ~= ARGV[1] then
    found[id], number = ends, number + 1
  end
end
found[ARGV[1]] = now + tonumber(ARGV[2]) * 1000
redis.call('SET', KEYS[1], cmsgpack.pack(found), 'PX', ARGV[2])
return number
