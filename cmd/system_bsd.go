//go:build darwin || freebsd

package cmd

import "golang.org/x/sys/unix"

const (
	termiosRequest = unix.TIOCGETA
	pathFlag       = unix.O_RDONLY // a directory has to be readable to be passed through
	errNoAttribute = unix.ENOATTR
)

// isProc says no: there are no links here that only the kernel can follow.
func isProc(*unix.Statfs_t) bool { return false }
