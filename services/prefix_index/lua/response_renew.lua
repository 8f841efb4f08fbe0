-- Begins or renews a lease, unless it is over.
--
-- KEYS[1]   the lease
-- ARGV[1]   how long it lasts, in ms
-- Returns   what it was before, empty where it was not there
if lease ~= 'over' then
  begin_lease(string.format('%.0f', now), ARGV[1])
end
return lease or ''
