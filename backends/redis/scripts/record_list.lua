-- ARGV: name
load()
local out = {'ok', int(now)}
if records == 0 then return out end
local all = call('HGETALL', key)
for i = 1, #all, 2 do
	if string.sub(all[i], 1, 2) == 'r:' then
		out[#out + 1], out[#out + 2] = string.sub(all[i], 3), all[i + 1]
	end
end
return out
