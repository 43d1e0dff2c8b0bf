package file

import (
	"errors"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// Whoever may write to a directory of the store could free every lease, give terms of his own choice and name processes in
// a record; whoever may rename one could put a tree of his own in its place. So nothing is believed of a tree before every
// directory on the way to it was looked at, from the root of the file system downwards: once one is proven to be out of
// reach for other users, so is the name of the next in it.
//
// Others are all users but us and root. A group of one user, and the group of root, are taken for that user.

// trust is what is known of directories. What was found good stays so as long as nobody but us and root changes it.
type trust struct {
	system system
	dir    string // of the store, without symbolic links

	mu   sync.Mutex
	good map[string]bool // directories, each with all above it
}

// check refuses a directory of the store, or one above it, that others could change. What does not exist yet is no reason: it has to be checked
// again when it was made.
func (t *trust) check(path string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := t.ascend(path)
	return err
}

// ascend looks at a directory after those above it, and reports whether it exists.
func (t *trust) ascend(path string) (there bool, err error) {
	if t.good[path] {
		return true, nil
	}
	if path != "/" {
		if there, err := t.ascend(above(path)); err != nil || !there {
			return there, err
		}
	}
	var st unix.Stat_t
	if err := again(func() error { return unix.Lstat(path, &st) }); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return false, nil
		}
		return false, classify(fault("stat", path, err))
	}
	if len(path) >= len(t.dir) {
		err = t.system.own(path, &st)
	} else {
		err = t.system.parent(path, t.dir, &st)
	}
	if err != nil {
		return true, err
	}
	if t.good == nil {
		t.good = make(map[string]bool)
	}
	t.good[path] = true
	return true, nil
}

func above(path string) string {
	if i := strings.LastIndexByte(path, '/'); i > 0 {
		return path[:i]
	}
	return "/"
}

const elsewhere = "name a directory of your own with file:///dir"

// own refuses a directory of the store that others may write to.
func (s system) own(path string, st *unix.Stat_t) error {
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return backends.Configf(rightForm, "%s is not a directory", path)
	case int(st.Uid) != s.uid && st.Uid != 0:
		return backends.Configf(elsewhere, "%s belongs to the user %d, who could free every lease in it", path, st.Uid)
	case st.Mode&0o022 != 0:
		return backends.Configf("chmod go-w "+path+", or name another directory with file:///dir",
			"%s can be written to by others, who could free every lease in it", path)
	}
	return nil
}

// parent refuses a directory above the store in which others may rename what is ours. Its owner may always, and others who may write to it
// unless it is sticky.
//
// Source: unlink(2) and rename(2), EPERM: in a sticky directory only the owner of the file and that of the directory may.
func (s system) parent(path, dir string, st *unix.Stat_t) error {
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return backends.Configf(rightForm, "%s is not a directory", path)
	case int(st.Uid) != s.uid && st.Uid != 0 && !unmapped(st.Uid):
		return backends.Configf(elsewhere, "%s, above %s, belongs to the user %d, who could put another directory in its place", path, dir, st.Uid)
	case st.Mode&unix.S_ISVTX != 0:
	case st.Mode&0o002 != 0, st.Mode&0o020 != 0 && !s.alone(path, st.Gid):
		return backends.Configf("chmod go-w "+path+", or name another directory with file:///dir",
			"%s, above %s, can be written to by others, who could put another directory in its place", path, dir)
	}
	return nil
}

// alone says that a group is that of root, or of our user alone, as systems with a group for each user and a umask of 002 make it: it has the
// number of the user, and the list of groups names nobody else in it. The group's right must not stand for an access control list.
func (s system) alone(path string, group uint32) bool {
	if n, err := unix.Lgetxattr(path, "system.posix_acl_access", nil); err == nil && n > 0 {
		return false
	}
	if group == 0 {
		return true
	}
	if int(group) != s.uid {
		return false
	}
	b, err := readSmall("/etc/group")
	if err != nil {
		return isNotExist(err)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) == 4 && f[2] == strconv.Itoa(s.uid) && f[3] != "" && f[3] != f[0] {
			return false
		}
	}
	return true
}

// unmapped says that an owner is none of this user namespace: root of the host looks like that from within it. Nothing more can be known.
//
// Source: user_namespaces(7), "Unmapped user and group IDs".
func unmapped(uid uint32) bool {
	over, err := readSmall("/proc/sys/kernel/overflowuid")
	if err != nil || strings.TrimSpace(string(over)) != strconv.FormatUint(uint64(uid), 10) {
		return false
	}
	m, err := readSmall("/proc/self/uid_map")
	if err != nil {
		return false
	}
	f := strings.Fields(string(m))
	return len(f) != 3 || f[0] != "0" || f[1] != "0" || f[2] != "4294967295"
}
