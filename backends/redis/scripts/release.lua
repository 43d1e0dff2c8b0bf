-- ARGV: name, handle, slot, term (both empty: whatever carries the handle), ticket, outcome, code, milliseconds, then records
writable()
load()
local abandon = ARGV[4] == ''
local nothing = abandon or ARGV[6] == 'not-started' -- the hold counts for what was started
local s = carrying(ARGV[2])
leave(ARGV[5])
over(ARGV[5])
if not s or not abandon and (int(s.i) ~= ARGV[3] or int(s.t) ~= ARGV[4]) or not nothing and not held(s) then
	s = nothing and was_carrying(ARGV[2])
	if s then
		s.k, s.x = 0, nil
		wake(s.i)
		save(s)
	end
	if exists or abandon then commit() end
	return {'ok'}
end
local conflict = write_records(9)
if conflict then return {'conflict', conflict} end
finish(s, {o = ARGV[6], c = tonumber(ARGV[7]), m = tonumber(ARGV[8])})
if nothing then s.k = 0 end
if left(s) == 0 then wake(s.i) end
save(s)
commit()
return {'ok'}
