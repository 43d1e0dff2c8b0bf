-- ARGV: name, key of the record
load()
local raw = call('HGET', key, 'r:' .. ARGV[2])
if not raw then return {'none'} end
return {'ok', int(now), raw}
