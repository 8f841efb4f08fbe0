-- Makes the leases of requests that still run last longer. A lease that is not there is made again: the server lost it,
-- or its clock was set forward. The lease of a request that was settled meanwhile is not.
--
-- KEYS[1]      running, as KEYS[3] of limits.lua
-- KEYS[2]...   the requests, as KEYS[4] of limits.lua
-- ARGV[1]      how long the leases last from now, in ms
-- ARGV[2]...   the names of the leases, in the order of the requests
local leases = read_leases(KEYS[1], ARGV[1])
for index = 2, #ARGV do
  if text(KEYS[index]) ~= 'settled' then
    leases[ARGV[index]] = now + tonumber(ARGV[1]) * 1000
  end
end
keep_leases(KEYS[1], leases)
return 1
