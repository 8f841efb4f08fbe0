-- The state of limits: buckets, and leases with the times at which they run out. Scripts of limits begin with this file.
--
-- What none of these scripts wrote is as if nothing were there, and is replaced. Only GET, SET and DEL are used: gateways
-- may send them, and may not write to the registry, whose sorted sets say which workers live. All times are in us.
local WINDOW = 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function text(key)
  local found = redis.pcall('GET', key)
  return type(found) == 'string' and found or nil
end

-- How full a bucket is: the time until it is empty.
local function level(key)
  return math.max(0, (tonumber(text(key) or '') or 0) - now)
end

local function keep_level(key, filled)
  redis.call('SET', key, string.format('%.0f', now + filled), 'PX', string.format('%.0f', filled / 1000 + 1000))
end

-- The leases that have not run out yet, and how many they are.
local function read_leases(key)
  local fine, kept = pcall(cmsgpack.unpack, text(key) or '')
  local found, number = {}, 0
  for name, ends in pairs(fine and type(kept) == 'table' and kept or {}) do
    if type(ends) == 'number' and ends > now then
      found[name], number = ends, number + 1
    end
  end
  return found, number
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
