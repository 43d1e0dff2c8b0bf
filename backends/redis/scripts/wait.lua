-- ARGV: name, slots, ticket, its place (0: the one that it has, else at the end), its life in milliseconds
writable()
load()
local n, ticket, at, life = tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local shortest
for i = 0, n - 1 do
	local l = slots[i] and left(slots[i]) or 0
	if l == 0 then return {'free'} end
	if not shortest or l < shortest then shortest = l end
end
if at == '0' then
	at = int(micros)
	for _, w in ipairs(waiters()) do
		if w.ticket == ticket and w.ends > now then at = w.at end
	end
end
local all, placed = {}, false
local mine = {at = at, ends = now + life, n = n, ticket = ticket}
for _, w in ipairs(waiters()) do
	if w.ticket ~= ticket and w.ends > now then
		w.ends = math.min(w.ends, now + life)
		if not placed and tonumber(w.at) > tonumber(at) then
			all[#all + 1], placed = mine, true
		end
		all[#all + 1] = w
	end
end
if not placed then all[#all + 1] = mine end
wait_in(all)
commit()
return {'wait', at, int(shortest)}
