#!/bin/sh
# wrappers.sh UNDERLEASE: kills flock, timeout, tini, dumb-init, cronlock and underlease above a command with a background child,
# and prints what became of both, as the rows of the table of README.md. A program that is not in PATH is named on standard error.
# A Redis on 127.0.0.1:6379 is asked for cronlock.
set -u
[ $# -eq 1 ] || {
	printf 'usage: wrappers.sh UNDERLEASE\n' >&2
	exit 64
}
underlease=$1
dir=$(mktemp -d) || exit 71
trap 'rm -rf "$dir"' EXIT

# The command says its number and that of its child, and both last for a minute.
job='sleep 60 & echo $$ $! > "$1.new" && mv "$1.new" "$1"; wait'

# start WRAPPER...: the wrapper's number is in $wrapper, the others in $command and $child.
start() {
	rm -f "$dir/pids"
	"$@" sh -c "$job" sh "$dir/pids" 2>/dev/null &
	wrapper=$!
	tries=0
	while ! [ -s "$dir/pids" ]; do
		tries=$((tries + 1))
		[ "$tries" -lt 100 ] || {
			kill -KILL "$wrapper" 2>/dev/null
			return 1
		}
		sleep 0.1
	done
	read -r command child <"$dir/pids"
}

# alive PID: a process that is dead and not yet collected is not.
alive() {
	state=$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null) && [ -n "$state" ] && [ "$state" != Z ]
}

# fate SIGNAL WRAPPER...: what is left five seconds after the signal, which is longer than a stop takes, on a busy machine too, and shorter than the minute.
fate() {
	signal=$1
	shift
	start "$@" || {
		printf 'did not start'
		return
	}
	kill -"$signal" "$wrapper"
	{ wait "$wrapper"; } 2>/dev/null
	tries=0
	while { alive "$command" || alive "$child"; } && [ "$tries" -lt 50 ]; do
		tries=$((tries + 1))
		sleep 0.1
	done
	if alive "$command"; then
		printf 'the command runs on'
	elif alive "$child"; then
		printf 'its child runs on'
	else
		printf 'nothing is left'
	fi
	kill -KILL "$command" "$child" 2>/dev/null
}

# code WRAPPER...: how it ends when the command exits with 3.
code() {
	"$@" sh -c 'exit 3' >/dev/null 2>&1
	printf '%s' "$?"
}

row() { # NAME WRAPPER...
	name=$1
	shift
	if ! command -v "$1" >/dev/null; then
		printf 'wrappers.sh: not here: %s\n' "$name" >&2
		return
	fi
	printf '| `%s` | %s | %s | %s |\n' "$name" "$(fate TERM "$@")" "$(fate KILL "$@")" "$(code "$@")"
}

printf '| | killed with SIGTERM | killed with SIGKILL | the command exits with 3 |\n|---|---|---|---|\n'
row flock flock "$dir/lock"
row timeout timeout 60
row tini tini -s --
row dumb-init dumb-init --
CRONLOCK_HOST=127.0.0.1 CRONLOCK_GRACE=0 row cronlock cronlock
# A second of grace in place of ten, so that nobody has to wait for it.
row underlease "$underlease" run --grace 1s --backend "file://$dir/store" x --
