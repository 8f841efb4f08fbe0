-- A worker says that it lives, and under which id it publishes.
--
-- KEYS[1]     records: a hash that maps an id to what a person and a gateway want to know of it
-- KEYS[2]     leases: a sorted set of ids by the time, in ms, at which they run out
-- KEYS[3]     dead: a set of ids whose entries are to be swept
-- ARGV[1]     id, in hex
-- ARGV[2]     its record
-- ARGV[3]     how long the lease lasts, in ms
-- ARGV[4]     '1' when the worker was told before that the id has its lease
-- ARGV[5]...  ids that it published under before
-- Returns     1; or 0 when the id ought to have a lease and has none: then it is dead
--
-- 0 is returned until the worker takes another id: an answer that gets lost must not be the only one.
--
-- Workers renew several times in a lease. Where none has for half a lease, none could: the server was away or stood
-- still, or its clock was set forward. Then all leases begin anew. None ends later than one that begins now: the clock
-- was set back since.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local lasts = tonumber(ARGV[3])

-- Deletes a key of another type: none of ours, and in the way.
local function clear(key, command, ...)
  local answer = redis.pcall(command, key, ...)
  if type(answer) == 'table' and string.find(answer.err or '', 'WRONGTYPE', 1, true) then
    redis.call('DEL', key)
  end
end

clear(KEYS[1], 'HGET', '')
clear(KEYS[2], 'ZSCORE', '')
clear(KEYS[3], 'SREM', '')
local heard = redis.call('ZRANGEBYSCORE', KEYS[2], now + lasts / 2, '+inf', 'LIMIT', 0, 1)
local since = #heard == 0 and '-inf' or '(' .. now + lasts
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], since, '+inf')) do
  redis.call('ZADD', KEYS[2], now + lasts, id)
end
local lost = ARGV[4] == '1' and not redis.call('ZSCORE', KEYS[2], ARGV[1])
local past = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)
for index = 5, #ARGV do
  past[#past + 1] = ARGV[index]
end
for _, id in ipairs(past) do
  if id ~= ARGV[1] then
    redis.call('ZREM', KEYS[2], id)
    redis.call('HDEL', KEYS[1], id)
    redis.call('SADD', KEYS[3], id)
  end
end
if lost then
  redis.call('SADD', KEYS[3], ARGV[1])
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + lasts, ARGV[1])
return 1
