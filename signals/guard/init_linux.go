package guard

import (
	"os"
	"syscall"
)

// Name is the guardian's whole command line, and the name that process lists show: another one than the wrapper's, so that a signal to all
// processes of that name does not reach it.
const Name = "ul-guard"

func init() {
	if len(os.Args) == 1 && os.Args[0] == Name {
		// Nothing of what a program does at its end is for a guardian: a race detector's wait of a second, say.
		code := run()
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0)
	}
	if len(os.Args) == 1 && os.Args[0] == InitName {
		code := runInit()
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0)
	}
	ignoreAgain()
	launchEarly()
}
