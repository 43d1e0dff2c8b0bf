//go:build darwin || freebsd

package cmd

import (
	"os"

	"golang.org/x/sys/unix"
)

const (
	termiosRequest = unix.TIOCGETA
	pathFlag       = unix.O_RDONLY // a directory has to be readable to be passed through
	errNoAttribute = unix.ENOATTR
)

// isProc says no: there are no links here that only the kernel can follow.
func isProc(*unix.Statfs_t) bool { return false }

// stopSelf stops this process, and returns when it is continued. It is not the signal of Ctrl-Z, for which the Go runtime keeps a
// handler that does nothing.
func stopSelf() { _ = unix.Kill(os.Getpid(), unix.SIGSTOP) } // fails for a signal or a process that does not exist
