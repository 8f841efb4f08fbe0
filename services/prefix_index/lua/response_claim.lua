-- Tells whether somebody has a lease, and ends one that ran out, so that its owner gets it no more.
--
-- KEYS[1]   the lease
-- ARGV[1]   how long it lasts, in ms
-- ARGV[2]   how long it is known that it is over, in ms; '0': one that ran out is left as it is
-- Returns   'lives', 'gone' or 'over'
if lease == 'over' then
  return lease
end
if lease then
  if (tonumber(lease) or 0) > now then -- the clock was set back since
    begin_lease(string.format('%.0f', now), ARGV[1])
  end
  return 'lives'
end
if ARGV[2] == '0' then
  return 'gone'
end
begin_lease('over', ARGV[2])
return 'over'
