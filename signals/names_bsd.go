//go:build darwin || freebsd

package signals

import "syscall"

// Source: sys/signal.h of both systems.
var names = []string{
	1: "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "EMT", "FPE", "KILL", "BUS", "SEGV", "SYS", "PIPE", "ALRM", "TERM", "URG",
	"STOP", "TSTP", "CONT", "CHLD", "TTIN", "TTOU", "IO", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "INFO", "USR1", "USR2",
}

// There are no real-time signals on one of them, and none that are passed on on the other.
const (
	rtMin        syscall.Signal = 32
	lastRealTime syscall.Signal = 31
)

// mayRun asks whether the real user may execute a file.
func mayRun(path string) error {
	const execute = 1
	return syscall.Access(path, execute)
}
