package cmd

import "golang.org/x/sys/unix"

const (
	termiosRequest = unix.TCGETS
	pathFlag       = unix.O_PATH
	errNoAttribute = unix.ENODATA
)

// isProc says whether links of this file system lead where only the kernel can follow.
func isProc(fs *unix.Statfs_t) bool { return fs.Type == unix.PROC_SUPER_MAGIC }
