-- The state of limits: buckets, and leases with the times at which they run out. Scripts of limits begin with this file.
--
-- What none of these scripts wrote is as if nothing were there, and is replaced. Only GET, SET and DEL are used: gateways
-- may send them, and may not write to the registry, whose sorted sets say which workers live. All times are in us.
-- The server's clock may have been set back since something was written: nothing is further away than it was then, and
-- what seems so is written anew.
local WINDOW = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(key)
  local found = redis.pcall('GET', key)
  return type(found) == 'string' and found or nil
end

-- A bucket is kept as the moment at which it is empty, and after a point how full it was when that was written, which an
-- older version takes for a fraction of the moment, and does not write.
local function keep_level(key, filled)
  local value = string.format('%.0f.%.0f', now + filled, filled)
  redis.call('SET', key, value, 'PX', string.format('%.0f', filled / 1000 + 1000))
end

-- How full a bucket is: the time until it is empty.
local function level(key)
  local empty, filled = string.match(text(key) or '', '^(%d+)%.?(%d*)$')
  local left, most = (tonumber(empty) or 0) - now, tonumber(filled) or WINDOW
  if left > most then
    keep_level(key, most)
    return most
  end
  return math.max(0, left)
end

-- Keeps leases until the last of them has run out.
local function keep_leases(key, leases)
  local last = now
  for _, ends in pairs(leases) do
    last = math.max(last, ends)
  end
  if last > now then
    redis.call('SET', key, cmsgpack.pack(leases), 'PX', string.format('%.0f', math.ceil((last - now) / 1000)))
  else
    redis.call('DEL', key)
  end
end

-- The leases that have not run out yet, and how many they are. lasts: how long each of them may last from now on, in ms.
local function read_leases(key, lasts)
  local fine, kept = pcall(cmsgpack.unpack, text(key) or '')
  local found, number, longest, shortened = {}, 0, now + tonumber(lasts) * 1000, false
  for name, ends in pairs(fine and type(kept) == 'table' and kept or {}) do
    if type(ends) == 'number' and ends > now then
      found[name], number = math.min(ends, longest), number + 1
      shortened = shortened or ends > longest
    end
  end
  if shortened then
    keep_leases(key, found)
  end
  return found, number
end
