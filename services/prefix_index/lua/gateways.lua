-- Notes that a gateway lives which asks its clients for keys.
--
-- KEYS[1]   gateways: a lease for each id
-- ARGV[1]   the gateway's id
-- ARGV[2]   how long it counts from now, in ms
-- Returns   how many gateways live; 1 if this one had a lease
local leases = read_leases(KEYS[1], ARGV[2])
local known = leases[ARGV[1]] and 1 or 0
leases[ARGV[1]] = now + tonumber(ARGV[2]) * 1000
keep_leases(KEYS[1], leases)
local number = 0
for _ in pairs(leases) do
  number = number + 1
end
return {number, known}
