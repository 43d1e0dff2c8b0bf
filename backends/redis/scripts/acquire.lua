-- ARGV: name, handle, holder, slots, ttl, hold, ticket
local handle, holder, n, ttl, hold, ticket = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
load()
if is_over(ticket) then return {'lost', 'it was given back'} end
local s = carrying(handle)
if s and held(s) then
	if broken_by(s) then return {'lost', 'broken by an operator: ' .. s.q.r} end
	writable()
	s.e = now + s.l
	leave(ticket)
	save(s)
	commit()
	return granted(s)
end
for i = 0, count - 1 do
	local s = slots[i]
	if s and (s.h ~= '' and not held(s)) then
		if s.h == handle then -- it was granted too late for its own run
			finish(s, {o = 'not-started', c = 0, m = 0})
			s.k = 0
		else
			s.x = s.h
			finish(s, unknown)
		end
		s.moved = true
	elseif s and s.x == handle then
		s.k, s.x, s.moved = 0, nil, true
	end
end
local busy
for i = 0, n - 1 do
	local s = slots[i]
	if not s or left(s) == 0 then
		if last >= largest or now > largest then fail('broken', 'its term leaves no room for a larger one') end
		last = math.max(last + 1, now)
		s = {i = i, h = handle, w = holder, t = last, b = now, l = ttl, e = now + ttl, d = hold, k = 0, p = s and s.p or {o = 'none', c = 0, m = 0}}
		if hold > 0 then s.k = now + hold end
		slots[i] = s
		count = math.max(count, i + 1)
		leave(ticket)
		for j = 0, count - 1 do
			if slots[j] and (slots[j].moved or j == i) then save(slots[j]) end
		end
		commit()
		return granted(s)
	end
	if not busy or left(s) < left(busy) then busy = s end
end
writable()
for i = 0, count - 1 do
	if slots[i] and slots[i].moved then save(slots[i]) end
end
commit()
return {'busy', int(busy.i), busy.w, int(busy.t), int(busy.b), int(left(busy)), held(busy) and '0' or '1'}
