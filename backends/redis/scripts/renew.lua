-- ARGV: name, handle, slot, term
writable()
load()
local s = slots[tonumber(ARGV[3])]
if not s then return {'lost', exists and 'its slot was deleted' or 'it was deleted'} end
if s.h == '' or s.h ~= ARGV[2] or int(s.t) ~= ARGV[4] then
	if int(s.t) == ARGV[4] and not held(s) then return {'lost', 'it has ended'} end
	return {'lost', 'another holder has it'}
end
if not held(s) then return {'lost', 'it has expired'} end
if broken_by(s) then return {'lost', 'broken by an operator: ' .. s.q.r} end
s.e = now + s.l
save(s)
commit()
return granted(s)
