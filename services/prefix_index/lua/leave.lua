-- Publications whose worker will not renew them any more.
--
-- KEYS     as in register.lua
-- ARGV     their ids, in hex
for _, id in ipairs(ARGV) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('HDEL', KEYS[1], id)
  redis.call('SADD', KEYS[3], id)
end
