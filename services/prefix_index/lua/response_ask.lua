-- Asks whoever has a lease to end the response, which the next renewal hears.
--
-- KEYS[1]   the lease
-- ARGV[1]   how long it lasts, in ms
if lease and lease ~= 'over' and lease ~= 'end' then
  begin_lease('end', ARGV[1])
end
return 1
