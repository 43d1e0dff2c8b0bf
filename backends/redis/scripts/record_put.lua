-- ARGV: name, handle, slot, term (all empty: whoever holds it), then one record
load()
if ARGV[2] ~= '' or ARGV[4] ~= '' then
	local s = slots[tonumber(ARGV[3])]
	if not s or s.h == '' or s.h ~= ARGV[2] or int(s.t) ~= ARGV[4] or not held(s) or broken_by(s) then
		writable()
		return {'lost', 'it is not in force'}
	end
end
local conflict = write_records(5)
if conflict then return {'conflict', conflict} end
commit()
return {'ok', int(version)}
