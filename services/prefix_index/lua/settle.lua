-- Ends a request of a key with limits: it runs no more, and the tokens of its answer count, whatever the limit. A
-- repeated call counts them once.
--
-- KEYS      as those of limits.lua
-- ARGV[1]   tokens per minute; 0: no limit
-- ARGV[2]   tokens that were generated
-- ARGV[3]   the name of the request's lease
-- ARGV[4]   how long leases last, in ms
if text(KEYS[4]) == 'settled' then
  return 0
end
redis.call('SET', KEYS[4], 'settled', 'PX', 5000)
local leases = read_leases(KEYS[3], ARGV[4])
leases[ARGV[3]] = nil
keep_leases(KEYS[3], leases)
if ARGV[1] ~= '0' and ARGV[2] ~= '0' then
  keep_level(KEYS[2], level(KEYS[2]) + tonumber(ARGV[2]) * WINDOW / tonumber(ARGV[1]))
end
return 0
