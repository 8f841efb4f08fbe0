-- Changes of what one publication holds of one tree.
--
-- KEYS[1]  the tree
-- ARGV[1]  the publication's id, 12 bytes
-- ARGV[2]  number of this batch in this tree, from 1
-- ARGV[3]  hashes of blocks that are held now
-- ARGV[4]  hashes of blocks that are not held any more
-- ARGV[5]  '1' when nothing of the tree is held after this
-- Returns  'done', or without a change: 'unknown' (the tree knows nothing of this publication: it was evicted, or the
--          server lost it) or 'gap' (it knows another past: the server lost a part)
--
-- A batch may come twice: what is held is a set.
local HASH, ID = 16, 12
local tree, id, number = KEYS[1], ARGV[1], tonumber(ARGV[2])
local last = tonumber(redis.call('HGET', tree, id) or 0)
if last == 0 and number ~= 1 then
  return 'unknown'
end
if last ~= number and last ~= number - 1 then
  return 'gap'
end

local function find(packed)
  local at = string.find(packed, id, 1, true)
  while at and at % ID ~= 1 do
    at = string.find(packed, id, at + 1, true)
  end
  return at
end

for at = 1, #ARGV[3], HASH do
  local hash = string.sub(ARGV[3], at, at + HASH - 1)
  local packed = redis.call('HGET', tree, hash) or ''
  if not find(packed) then
    redis.call('HSET', tree, hash, packed .. id)
  end
end
for at = 1, #ARGV[4], HASH do
  local hash = string.sub(ARGV[4], at, at + HASH - 1)
  local packed = redis.call('HGET', tree, hash)
  local found = packed and find(packed)
  if found and #packed == ID then
    redis.call('HDEL', tree, hash)
  elseif found then
    redis.call('HSET', tree, hash, string.sub(packed, 1, found - 1) .. string.sub(packed, found + ID))
  end
end
if ARGV[5] == '1' then
  redis.call('HDEL', tree, id)
else
  redis.call('HSET', tree, id, number)
end
return 'done'
