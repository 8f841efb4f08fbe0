-- The records of all workers whose lease lasts.
--
-- KEYS     as in register.lua, without the dead
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answer = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now, '+inf')) do
  answer[#answer + 1] = redis.call('HGET', KEYS[1], id) or nil
end
return answer
