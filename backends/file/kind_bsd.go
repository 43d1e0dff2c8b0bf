//go:build darwin || freebsd

package file

import "golang.org/x/sys/unix"

// networks are the file systems that are refused. These systems say themselves whether one is local.
var networks = map[int64]string{1: "not local"}

// fileSystem returns 0 for a path on a local file system, and else 1.
func fileSystem(path string) (int64, error) {
	var st unix.Statfs_t
	err := again(func() error { return unix.Statfs(path, &st) })
	if err == nil && st.Flags&unix.MNT_LOCAL == 0 {
		return 1, nil
	}
	return 0, fault("statfs", path, err)
}

func networkName(kind int64) string { return networks[kind] }

// ordered is never known here: every record is written with an fsync.
func ordered(int64) bool { return false }
