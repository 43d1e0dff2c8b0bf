-- ARGV: name (empty: whatever it is)
load()
local out = {'ok', int(now), name, past}
for i = 0, count - 1 do
	local s = slots[i]
	if s then
		out[#out + 1] = cjson.encode({
			i = s.i, w = s.w, t = int(s.t), b = s.b, l = left(s), h = held(s), u = s.h ~= '' and not held(s), p = s.p, q = s.q,
		})
	end
end
return out
