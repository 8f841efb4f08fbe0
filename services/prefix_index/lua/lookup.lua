-- How deep each publication holds a chain of blocks. One tree, one hash slot, one round trip.
--
-- KEYS[1]  the tree: a hash that maps a block's hash (16 bytes) to its holders (12 bytes each)
-- ARGV[1]  the chain: the hashes of its blocks, first block first
-- Returns  id, depth, id, depth, ...
--
-- A holder of a block holds its ancestors, so those of block n + 1 are among those of block n. Gallops along the chain
-- until nobody is left; between two blocks that were asked for, bisects only for those who dropped out there. How many
-- hold a block often says enough of who does.
local HASH, ID = 16, 12
local chain = ARGV[1]
local length = #chain / HASH
local answer = {}

local function holders(number)
  return redis.call('HGET', KEYS[1], string.sub(chain, HASH * (number - 1) + 1, HASH * number)) or ''
end

local function has(packed, id)
  local at = string.find(packed, id, 1, true)
  while at and at % ID ~= 1 do
    at = string.find(packed, id, at + 1, true)
  end
  return at ~= nil
end

-- Which of `ids` hold block `number`, and which do not; `deeper` others hold it for certain.
local function split(ids, number, deeper)
  local packed = holders(number)
  local count = #packed / ID - deeper
  if count <= 0 then
    return {}, ids
  elseif count == #ids then
    return ids, {}
  end
  local still, gone = {}, {}
  for _, id in ipairs(ids) do
    local side = has(packed, id) and still or gone
    side[#side + 1] = id
  end
  return still, gone
end

-- All of `ids` hold block `low` and none holds block `high`, which `deeper` others hold.
local function settle(ids, low, high, deeper)
  if #ids == 0 then
    return
  end
  if high - low == 1 then
    for _, id in ipairs(ids) do
      answer[#answer + 1] = id
      answer[#answer + 1] = low
    end
    return
  end
  local middle = math.floor((low + high) / 2)
  local still, gone = split(ids, middle, deeper)
  settle(still, middle, high, deeper)
  settle(gone, low, middle, deeper + #still)
end

local ids, packed, low = {}, holders(1), 1
for at = 1, #packed, ID do
  ids[#ids + 1] = string.sub(packed, at, at + ID - 1)
end
while #ids > 0 and low < length do
  local high = math.min(2 * low, length)
  local still, gone = split(ids, high, 0)
  settle(gone, low, high, #still)
  ids, low = still, high
end
settle(ids, low, low + 1, 0)
return answer
