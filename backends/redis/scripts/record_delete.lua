-- ARGV: name, key of the record
writable()
load()
if call('HDEL', key, 'r:' .. ARGV[2]) == 1 then
	records = records - 1
	put('m', int(records))
	commit()
end
return {'ok'}
