-- Stands after every script, whose own part is the function main.
local ok, answer = pcall(main)
if ok or type(answer) == 'table' then return answer end
-- Since 7.0 pcall turns an error of the server into its text. One of Lua's own begins with the place.
if string.match(answer, '^%u+ ') then return {err = answer} end
error(answer)
