// Package file keeps leases in a directory of this host. It needs no server.
//
// # The promise
//
// A slot is held by whoever has an exclusive lock, flock(2), on the slot's file. The kernel gives it up when the last
// copy of its descriptor is closed, so that a lease is free as soon as the processes that hold it are gone, however they
// ended, and no clock decides that. Grants need no ttl. Where a request has one all the same, it is a deadline that the
// holder sets itself: nothing here ends a grant by time, and the ttl is stored only to be shown.
//
// # The directory
//
//	DIR/v1/NAMESPACE/LEASE.d/slot.0, slot.1, ...   the locks
//	DIR/v1/NAMESPACE/LEASE.d/rec                   what is known about the lease
//	DIR/v1/NAMESPACE/LEASE.d/mu                    locked while rec is read and written, for microseconds
//
// NAMESPACE and LEASE are keys by [backends.Key]; the empty namespace is `_`. The form of rec stands at the type record.
//
// # The rules
//
//   - Every lock is compared with its path after it was taken (device and inode): what was deleted or replaced
//     meanwhile is no lock. A holder looks at the same in every Renew, so that a deleted or replaced file is a lost lease.
//   - A lock is given up by close alone, never by LOCK_UN, which would free the copies of other processes too.
//   - Every lock of a slot is tried while mu is held, because a probe would make others see the slot taken. A probe
//     opens the file for reading: closing it then wakes no waiter, who listens for IN_CLOSE_WRITE.
//   - rec is replaced by rename and never changed in place, and the new one is on the disk before it gets the name: what a
//     crash of the host leaves is a whole record. An Acquire is on the disk before it returns. A release is not waited for;
//     at worst a crash of the host forgets how the last holder ended.
//   - A missing rec starts from the clock, which is above every term it had. One that is there and cannot be read is
//     [backends.ErrBroken] and stays as it is.
//   - A term is handed out only when the clock has passed the one before it (where the clock was set back by more than
//     50 ms, the terms go on without it). Terms therefore never run ahead of the clock, and a deleted record cannot
//     repeat one. It makes more than a thousand acquisitions a second of one lease wait, and the first one for up to a
//     millisecond.
//   - Each release looks at a few other leases and removes at most two that nobody used for 7 days and that keep no
//     records, so that names which are used once do not pile up.
//
// # The limits
//
// One host: inodes and locks of a network file system are not to be relied upon, and it is refused unless the URL says
// ?network=1. One user: the directory and its files belong to one, and a directory that another may write to is refused,
// because whoever writes there can free every lease; so is one below a directory in which another could rename it (his own, or
// one that others may write to and that is not sticky). Root and another user have different default directories and do not
// exclude each other. A program that copies the lock's descriptor and lives on keeps the lease. Whoever deletes a lock's
// file frees the slot at once; its holder is told by inotify and stops, but for that moment two run.
package file

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// Scheme returns how `file:` URLs are opened: `file:` names the default directory and `file:///dir` another one. The
// default is /var/lib/underlease for root, else $XDG_STATE_HOME/underlease or ~/.local/state/underlease; both variables
// are read from the environment when a store is opened.
func Scheme() backends.Scheme {
	return backends.Scheme{Endless: true, Open: host().open}
}

// system is what opening a store asks of its host.
type system struct {
	getenv func(string) string
	uid    int
	// kind returns the number of the kind of file system that a path is on; see networks.
	kind func(path string) (int64, error)
}

func host() system {
	return system{getenv: os.Getenv, uid: os.Geteuid(), kind: fileSystem}
}

const rightForm = "write file: for the default directory, or file:///dir with an absolute path"

func (s system) open(_ context.Context, u *url.URL) (*backends.Store, error) {
	dir, network, err := s.settings(u)
	if err != nil {
		return nil, err
	}
	dir, base, err := resolve(dir)
	if err != nil {
		return nil, err
	}
	// What is to be made yet is checked when it was: another could be first.
	safe := &trust{system: s, dir: dir}
	if err := safe.check(dir); err != nil {
		return nil, err
	}
	magic, err := s.kind(base)
	if err != nil {
		return nil, classify(err)
	}
	if name := networkName(magic); name != "" && !network {
		return nil, backends.Configf("name a directory of a local file system, or add ?network=1 if only one host uses it",
			"%s is on a network file system (%s), whose locks cannot be relied upon", dir, name)
	}
	c := newClient(dir, network, ordered(magic))
	c.trust = safe
	address := url.URL{Scheme: "file", Path: dir}
	return &backends.Store{
		Backend:  c,
		Scheme:   "file",
		Address:  address.String(),
		Identity: "file:" + dir,
		Endless:  true,
	}, nil
}

// settings reads the URL.
func (s system) settings(u *url.URL) (dir string, network bool, err error) {
	switch {
	case u.Opaque != "":
		return "", false, backends.Configf(rightForm, "the path %q of the file store is not absolute", u.Opaque)
	case u.User != nil:
		return "", false, backends.Configf(rightForm, "the file store has no user and no password")
	case u.Host != "":
		return "", false, backends.Configf(rightForm, "the file store has no host, but its URL names %q", u.Host)
	case u.Fragment != "":
		return "", false, backends.Configf("write # in a path as %23", "the URL of the file store has the fragment %q", u.Fragment)
	case strings.ContainsRune(u.Path, 0):
		return "", false, backends.Configf(rightForm, "the path %q of the file store has a zero byte", u.Path)
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "", false, backends.Configf("the only parameter is network=1", "the parameters of the file store cannot be read")
	}
	for key, values := range query {
		if key != "network" {
			return "", false, backends.Configf("the only parameter is network=1", "the file store has no parameter %q", key)
		}
		if len(values) != 1 || values[0] != "1" {
			return "", false, backends.Configf("write ?network=1 or leave it out", "the parameter network of the file store cannot be %q", values[len(values)-1])
		}
		network = true
	}
	switch dir = u.Path; {
	case dir == "":
		dir, err = s.standard()
	case filepath.Clean(dir) == "/":
		err = backends.Configf(rightForm, "the root directory cannot be the file store's own")
	}
	return dir, network, err
}

// standard returns the default directory.
//
// Source: XDG Base Directory Specification 0.8: a relative path in XDG_STATE_HOME is invalid and is ignored.
func (s system) standard() (string, error) {
	if s.uid == 0 {
		return "/var/lib/underlease", nil
	}
	if state := s.getenv("XDG_STATE_HOME"); filepath.IsAbs(state) {
		return filepath.Join(state, "underlease"), nil
	}
	home := s.getenv("HOME")
	if !filepath.IsAbs(home) {
		what := "HOME is not set"
		if home != "" {
			what = "HOME is not an absolute path"
		}
		return "", backends.Configf("set HOME, or name a directory with file:///dir", "%s, so that the file store has no default directory", what)
	}
	return filepath.Join(home, ".local/state/underlease"), nil
}

// resolve follows every link of dir, of which the last parts may not exist yet, and returns the part that does as base.
// Two names of one directory give the same result, before and after it was made.
func resolve(dir string) (whole, base string, err error) {
	base = filepath.Clean(dir)
	rest := ""
	for {
		followed, err := filepath.EvalSymlinks(base)
		if err == nil {
			return filepath.Join(followed, rest), followed, nil
		}
		if !errors.Is(err, os.ErrNotExist) || base == "/" {
			if errors.Is(err, unix.ENOTDIR) {
				return "", "", backends.Configf(rightForm, "%s cannot be a directory: a part of the path is a file", dir)
			}
			return "", "", classify(err)
		}
		if there, err := os.Lstat(base); err == nil {
			if there.Mode()&os.ModeSymlink != 0 {
				return "", "", backends.Configf(rightForm, "%s is a symbolic link to nothing", base)
			}
			continue // another process has made it just now
		}
		base, rest = filepath.Dir(base), filepath.Join(filepath.Base(base), rest)
	}
}
