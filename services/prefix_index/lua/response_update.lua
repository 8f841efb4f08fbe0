-- Keeps a response that is generated in the background as it is now, unless one that has ended is kept: an end is final.
--
-- KEYS[1]   the response
-- ARGV[1]   the response, packed
-- ARGV[2]   how long it is kept, in ms
-- ARGV[3]   how packed responses end that have not ended
-- ARGV[4]   '1': it is kept also where nothing is
-- Returns   1; 0 where nothing was kept, and nothing is; or the response that has ended
local kept = redis.pcall('GET', KEYS[1])
if type(kept) == 'string' and string.sub(kept, -#ARGV[3]) ~= ARGV[3] then
  return kept
end
if type(kept) ~= 'string' and ARGV[4] ~= '1' then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
