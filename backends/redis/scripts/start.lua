-- Stands before every script: the lease as it is, and what may be done to it. The form of the key stands at package redis.
-- ARGV[1] is the name, namespace and lease with a zero byte between. Every answer is a list of strings, its kind first.
local key, name = KEYS[1], ARGV[1]
local retention = 7 * 24 * 3600 * 1000
local largest = 9007199254740991 -- 2^53-1, the largest term
local length = 50 -- of the history

local function fail(...) error({...}, 0) end

-- An error of the server keeps its code that way, also on servers before 7.0.
local function call(...)
	local r = redis.pcall(...)
	if type(r) == 'table' and r.err then error(r, 0) end
	return r
end

local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function int(n) return string.format('%.0f', n) end

local last, count, records, version, past, queue, ended = 0, 0, 0, 0, '', '', ''
local was = {} -- what is long and seldom changes, as it was loaded
local slots = {} -- by number; those that were ever used
local exists = false
local fields = {} -- to be written, name and value by turns

local function decode(i, raw)
	local ok, s = pcall(cjson.decode, raw)
	if not ok or type(s) ~= 'table' or type(s.h) ~= 'string' or type(s.w) ~= 'string' or not tonumber(s.t) or type(s.p) ~= 'table' then
		fail('broken', 'slot ' .. i .. ' cannot be read')
	end
	for _, f in ipairs({'b', 'l', 'e', 'd', 'k'}) do
		if type(s[f]) ~= 'number' then fail('broken', 'slot ' .. i .. ' cannot be read') end
	end
	s.i, s.t = i, tonumber(s.t)
	-- The clock was set back: what ends later than it can counts from now.
	if s.e - now > s.l then s.e, s.moved = now + s.l, true end
	if s.k - now > s.d then s.k, s.moved = now + s.d, true end
	return s
end

local function load()
	local f = call('HMGET', key, 'f', 'n', 't', 'c', 'm', 'v', 'p', 'q', 'z')
	if not f[1] then
		if call('EXISTS', key) == 1 then fail('foreign') end
		return
	end
	if f[1] ~= '1' then fail('newer', f[1]) end
	if name == '' then name = f[2] end -- asked for by its key alone
	if f[2] ~= name then fail('broken', 'it is of another lease') end
	exists = true
	last, count, records, version = tonumber(f[3]), tonumber(f[4]), tonumber(f[5]), tonumber(f[6])
	if not (last and count and records and version) then fail('broken', 'its counters cannot be read') end
	past, queue, ended = f[7] or '', f[8] or '', f[9] or ''
	was = {p = past, q = queue, z = ended}
	for from = 0, count - 1, 500 do -- Lua's stack has room for so many
		local want = {}
		for i = from, math.min(count, from + 500) - 1 do want[#want + 1] = 's' .. i end
		for n, raw in ipairs(call('HMGET', key, unpack(want))) do
			if raw then slots[from + n - 1] = decode(from + n - 1, raw) end
		end
	end
end

local function held(s) return s.h ~= '' and s.e > now end

-- left is how long a slot stays taken unless renewed.
local function left(s)
	local most = math.max(0, s.k - now)
	if held(s) then most = math.max(most, s.e - now) end
	return most
end

local function carrying(handle)
	if handle == '' then return nil end
	for i = 0, count - 1 do
		if slots[i] and slots[i].h == handle then return slots[i] end
	end
	return nil
end

-- was_carrying finds the slot of a holder that has expired, as long as nobody else took it.
local function was_carrying(handle)
	if handle == '' then return nil end
	for i = 0, count - 1 do
		if slots[i] and slots[i].x == handle then return slots[i] end
	end
	return nil
end

local function broken_by(s) return s.q and s.q.k == 'break' end

local function is_over(ticket) return string.find(ended, ticket .. ' ', 1, true) ~= nil end

local function put(field, value)
	fields[#fields + 1], fields[#fields + 2] = field, value
end

local function save(s)
	put('s' .. s.i, cjson.encode({
		h = s.h, w = s.w, t = int(s.t), b = s.b, l = s.l, e = s.e, d = s.d, k = s.k, p = s.p, q = s.q, x = s.x,
	}))
end

-- commit writes what was put. The key lives as long as it has records, and else for the retention after its last use.
local function commit()
	for field, value in pairs({p = past, q = queue, z = ended}) do
		if value ~= (was[field] or '') then put(field, value) end
	end
	if #fields == 0 then return end
	if not exists then
		put('f', '1')
		put('n', name)
	end
	put('t', int(last)); put('c', int(count)); put('m', int(records)); put('v', int(version))
	for from = 1, #fields, 500 do
		call('HSET', key, unpack(fields, from, math.min(#fields, from + 499)))
	end
	if records > 0 then
		call('PERSIST', key)
		return
	end
	-- A last term ahead of a clock that was set back outlives it: the next one is greater, whenever it comes.
	local longest = math.max(0, last - now)
	for _, s in pairs(slots) do longest = math.max(longest, left(s)) end
	call('PEXPIRE', key, int(longest + retention))
end

-- writable fails where nothing can be written, by a write that changes nothing: a replica or a primary without its replicas must
-- not answer as if it knew. What follows is then done even where memory has run out: a lease that is held is kept and given back.
local function writable() call('HDEL', key, '') end

-- finish writes how a holder ended.
local function finish(s, p)
	local line = cjson.encode({s = s.i, t = int(s.t), w = s.w, b = s.b, p = p})
	local kept, at = 1, 0
	while kept < length do
		local cut = string.find(past, '\n', at + 1, true)
		if not cut then break end
		at, kept = cut, kept + 1
	end
	if kept == length and at > 0 then past = string.sub(past, 1, at) end
	past = line .. '\n' .. past
	s.p, s.h, s.q = p, '', nil
end

local unknown = {o = 'unknown', c = 0, m = 0}

local function waiters()
	local all = {}
	for at, ends, n, ticket in string.gmatch(queue, '(%d+) (%d+) (%d+) (%x+)\n') do
		all[#all + 1] = {at = at, ends = tonumber(ends), n = tonumber(n), ticket = ticket}
	end
	return all
end

local function wait_in(all)
	local lines = {}
	for i, w in ipairs(all) do lines[i] = w.at .. ' ' .. int(w.ends) .. ' ' .. int(w.n) .. ' ' .. w.ticket .. '\n' end
	queue = table.concat(lines)
end

-- leave takes a ticket out of the queue and returns whether it was there.
local function leave(ticket)
	if queue == '' or not string.find(queue, ' ' .. ticket .. '\n', 1, true) then return false end
	local rest = {}
	for _, w in ipairs(waiters()) do
		if w.ticket ~= ticket then rest[#rest + 1] = w end
	end
	wait_in(rest)
	return true
end

-- wake tells the first waiter who may take a slot that it is free. Who does not listen any more loses his place.
local function wake(slot)
	if queue == '' then return end
	local rest, told = {}, false
	for _, w in ipairs(waiters()) do
		if told or w.n <= slot then
			rest[#rest + 1] = w
		elseif w.ends > now then
			local heard = redis.pcall('PUBLISH', key .. ':' .. w.ticket, '1')
			if type(heard) ~= 'number' then return end -- without the right to publish waiters poll
			told = heard > 0
		end
	end
	wait_in(rest)
end

-- over remembers for a while that an acquisition has ended: a request of it that was held back on its way grants nothing any more.
local function over(ticket)
	if is_over(ticket) then return end
	ended = ticket .. ' ' .. string.sub(ended, 1, 15 * (#ticket + 1))
end

local function asked(s)
	if s.q then return cjson.encode(s.q) end
	return ''
end

-- The last word: in how many microseconds the clock will have passed the term.
local function granted(s)
	return {'ok', int(s.i), int(s.t), int(s.l), s.w, cjson.encode(s.p), asked(s), int(math.max(0, (s.t + 1) * 1000 - micros))}
end

local function version_of(raw)
	if not raw then return 0 end
	local v = tonumber(string.match(raw, '^(%d+) %d+ '))
	if not v then fail('broken', 'a record cannot be read') end
	return v
end

-- write_records compares and puts the records from ARGV[from] on, three each: key, version (-1: any), value. It returns the
-- key of a conflict; then nothing may be committed.
local function write_records(from)
	local there = {}
	for i = from, #ARGV, 3 do
		local k, want = ARGV[i], tonumber(ARGV[i + 1])
		local v = there[k]
		if not v then
			v = version_of(call('HGET', key, 'r:' .. k))
			if v == 0 then records = records + 1 end
		end
		if want >= 0 and want ~= v then return k end
		version = math.max(version + 1, now)
		there[k] = version
		put('r:' .. k, int(version) .. ' ' .. int(now) .. ' ' .. ARGV[i + 2])
	end
	return nil
end
