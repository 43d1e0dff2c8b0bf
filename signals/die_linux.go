package signals

import (
	"os"
	"syscall"
	"time"
	"unsafe"

	"github.com/underlease/underlease/signals/guard"
)

// DieBy ends this process by a signal, so that whoever waits for it sees what became of the command. It leaves no core dump: the command left
// its own. Process 1 cannot be ended by a signal from within; it exits with 128+n, as do signals that end nobody.
func DieBy(sig syscall.Signal) {
	if os.Getpid() != 1 && sig > 0 && sig <= lastRealTime {
		const prSetDumpable = 4
		_, _, _ = syscall.RawSyscall6(syscall.SYS_PRCTL, prSetDumpable, 0, 0, 0, 0, 0)
		_ = guard.Default(sig) // if it fails, the exit below says what the signal would have
		set := uint64(1) << (sig - 1)
		const sigUnblock = 1
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigUnblock, uintptr(unsafe.Pointer(&set)), 0, 8, 0, 0)
		if !harmless(sig) && syscall.Kill(os.Getpid(), sig) == nil {
			time.Sleep(time.Second) // it is delivered before that
		}
	}
	os.Exit(128 + int(sig))
}

// harmless says that the default action of a signal does not end a process.
func harmless(sig syscall.Signal) bool {
	switch sig {
	case syscall.SIGCHLD, syscall.SIGURG, syscall.SIGWINCH, syscall.SIGCONT,
		syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU:
		return true
	default:
		return false
	}
}
