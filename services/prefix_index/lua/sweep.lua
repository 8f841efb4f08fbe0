-- Takes dead publications out of a slice of one tree.
--
-- KEYS[1]  the tree
-- ARGV[1]  where the slice begins: the cursor that the last call returned, '0' at first
-- ARGV[2]  ids of the dead, 12 bytes each
-- Returns  the cursor of the next slice, '0' after the last
local ID, SLICE = 12, 256
local tree = KEYS[1]
local dead = {}
for at = 1, #ARGV[2], ID do
  dead[string.sub(ARGV[2], at, at + ID - 1)] = true
end
local slice = redis.call('HSCAN', tree, ARGV[1], 'COUNT', SLICE)
local fields = slice[2]
for index = 1, #fields, 2 do
  local field, packed = fields[index], fields[index + 1]
  if #field == ID then -- a publication and the number of its last batch
    if dead[field] then
      redis.call('HDEL', tree, field)
    end
  else
    local alive = {}
    for at = 1, #packed, ID do
      local id = string.sub(packed, at, at + ID - 1)
      if not dead[id] then
        alive[#alive + 1] = id
      end
    end
    if #alive == 0 then
      redis.call('HDEL', tree, field)
    elseif #alive * ID < #packed then
      redis.call('HSET', tree, field, table.concat(alive))
    end
  end
end
return slice[1]
