-- ARGV: name (empty: whatever it is)
writable() -- a replica may be behind: it would say free where a run is refused
load()
local waiting = 0
for _, w in ipairs(waiters()) do
	if w.ends > now then waiting = waiting + 1 end
end
local out = {'ok', int(now), name, past, int(waiting)}
for i = 0, count - 1 do
	local s = slots[i]
	if s then
		out[#out + 1] = cjson.encode({
			i = s.i, w = s.w, t = int(s.t), b = s.b, l = left(s), h = held(s), u = s.h ~= '' and not held(s), p = s.p, q = s.q,
		})
	end
end
return out
