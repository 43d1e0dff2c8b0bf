-- Stands after every script, whose own part is the function main.
local ok, answer = pcall(main)
if ok or type(answer) == 'table' then return answer end
error(answer)
