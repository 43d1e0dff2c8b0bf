-- ARGV: name, slot, kind, reason, by, now (1: a break that frees the slot at once)
writable()
load()
local s = slots[tonumber(ARGV[2])]
if not s then return {'ok'} end
if ARGV[6] == '1' then
	if s.h ~= '' then finish(s, unknown) end
	s.k, s.x = 0, nil
	wake(s.i)
elseif held(s) and not broken_by(s) then
	s.q = {k = ARGV[3], r = ARGV[4], b = ARGV[5], a = now}
else
	return {'ok'}
end
save(s)
commit()
return {'ok'}
