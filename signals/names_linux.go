package signals

import "syscall"

var names = []string{
	1: "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
	"STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
}

// rtMin is what the C libraries call SIGRTMIN: two signals below it are theirs.
const rtMin syscall.Signal = 34

// mayRun asks whether the effective user may execute a file.
func mayRun(path string) error {
	const (
		atCwd     = -100
		atEaccess = 0x200
		execute   = 1
	)
	return syscall.Faccessat(atCwd, path, execute, atEaccess)
}
