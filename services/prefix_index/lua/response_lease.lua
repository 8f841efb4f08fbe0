-- The lease on a response that is generated in the background: the time in us at which it was renewed, until it runs out;
-- 'end' where somebody wants the response to end; or 'over' where the response counts as lost, and nobody gets the lease
-- any more. Scripts of these leases begin with this file.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local found = redis.pcall('GET', KEYS[1])
local lease = type(found) == 'string' and found or nil

local function begin_lease(value, lasts_ms)
  redis.call('SET', KEYS[1], value, 'PX', lasts_ms)
end
