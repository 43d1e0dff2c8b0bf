package cmd

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	termiosRequest = unix.TCGETS
	pathFlag       = unix.O_PATH
	errNoAttribute = unix.ENODATA
)

// isProc says whether links of this file system lead where only the kernel can follow.
func isProc(fs *unix.Statfs_t) bool { return fs.Type == unix.PROC_SUPER_MAGIC }

// stopSelf stops this process as Ctrl-Z does, and returns when it is continued, or where nobody could continue it.
//
// The Go runtime never takes its handler back, and then does nothing: the default is put in its place by hand, and back. The signal
// goes to the thread that sends it, which does not come back from the call before the process has stopped; another thread could
// take it a moment later.
//
// Source: Go 1.26, runtime/signal_unix.go, sigdisable and sigInstallGoHandler; rt_sigaction(2): a handler of zero is SIG_DFL.
func stopSelf() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var byDefault, ours [4]uint64 // as large as the kernel's struct sigaction, or larger
	swap := func(to, old *[4]uint64) {
		// It fails for a signal or an address that does not exist.
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGTSTP), uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(old)), 8, 0, 0)
	}
	swap(&byDefault, &ours)
	_ = unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGTSTP) // this thread exists
	swap(&ours, nil)
}
