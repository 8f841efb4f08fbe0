-- Has the leases of requests that still run last longer. A lease that is not there is not made again: its request was
-- settled, or it ran out.
--
-- KEYS[1]      running, as KEYS[3] of limits.lua
-- ARGV[1]      how long the leases last from now, in ms
-- ARGV[2]...   the names of the leases
local leases = read_leases(KEYS[1])
for index = 2, #ARGV do
  if leases[ARGV[index]] then
    leases[ARGV[index]] = now + tonumber(ARGV[1]) * 1000
  end
end
keep_leases(KEYS[1], leases)
return 1
