package cmd

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// place is where a path leads: a name in a directory that is open, and what is there. What is done there is done relative
// to the directory, so that nobody can put another in its place in the meantime.
type place struct {
	dir   int    // with O_PATH; closed by close
	base  string // no link, unless magic
	path  string // for people
	there bool
	magic bool // a link that only the kernel can follow
	stat  unix.Stat_t
}

func (p *place) close() { _ = unix.Close(p.dir) }

const (
	mostLinks = 40 // as the kernel: path_resolution(7)
	pathOnly  = pathFlag | unix.O_NOFOLLOW | unix.O_CLOEXEC
)

// locate follows path, component by component.
//
// A link that somebody else has put into a directory that everybody may write to is not followed: there a report of root
// could be led over any file. The kernel has the same rule, which an administrator can switch off.
//
// Source: Linux, Documentation/admin-guide/sysctl/fs.rst, protected_symlinks.
func locate(path string) (*place, error) {
	start := "."
	if filepath.IsAbs(path) {
		start = "/"
	}
	dir, err := unix.Open(start, pathOnly|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	p := &place{dir: dir, path: path}
	if err := p.walk(path); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *place) walk(path string) error {
	linked := false // the last part of path is a link
	for links, rest := 0, path; ; {
		name, after, more := strings.Cut(strings.TrimLeft(rest, "/"), "/")
		last := strings.Trim(after, "/") == ""
		directory := more // a slash after it, or more
		if name == "" {
			name = "."
		}
		p.base, p.there, p.magic = name, true, false
		err := unix.Fstatat(p.dir, name, &p.stat, unix.AT_SYMLINK_NOFOLLOW)
		switch {
		case err == unix.ENOENT && linked:
			return fmt.Errorf("%s is a link to nothing", p.path)
		case err == unix.ENOENT && last && !directory:
			p.there = false
			return nil
		case err == unix.ENOENT:
			return fmt.Errorf("cannot write into the directory of %s: %w", p.path, err)
		case err != nil:
			return &pathError{p.path, err}
		}
		if p.stat.Mode&unix.S_IFMT == unix.S_IFLNK {
			if links++; links > mostLinks {
				return &pathError{p.path, unix.ELOOP}
			}
			if err := p.trust("a link in a directory that everybody may write to"); err != nil {
				return err
			}
			var fs unix.Statfs_t
			if err := unix.Fstatfs(p.dir, &fs); err != nil {
				return &pathError{p.path, err}
			}
			if p.magic = isProc(&fs); !p.magic {
				target, err := readlinkat(p.dir, name)
				if err != nil {
					return &pathError{p.path, err}
				}
				if filepath.IsAbs(target) {
					if err := p.enter(unix.AT_FDCWD, "/", 0); err != nil {
						return err
					}
				}
				if directory {
					target += "/" + after
				}
				linked = linked || last
				rest = target
				continue
			}
			if err := unix.Fstatat(p.dir, name, &p.stat, 0); err != nil {
				return &pathError{p.path, err}
			}
		}
		if last {
			if directory && p.stat.Mode&unix.S_IFMT != unix.S_IFDIR {
				return &pathError{p.path, unix.ENOTDIR}
			}
			return nil
		}
		nofollow := unix.O_NOFOLLOW
		if p.magic {
			nofollow = 0
		}
		if err := p.enter(p.dir, name, nofollow); err != nil {
			return err
		}
		rest = after
	}
}

func (p *place) enter(at int, name string, nofollow int) error {
	dir, err := unix.Openat(at, name, pathFlag|unix.O_DIRECTORY|unix.O_CLOEXEC|nofollow, 0)
	if err != nil {
		return &pathError{p.path, err}
	}
	p.close()
	p.dir = dir
	return nil
}

// trust refuses what another user has put into a directory that everybody may write to.
func (p *place) trust(what string) error {
	var dir unix.Stat_t
	if err := unix.Fstat(p.dir, &dir); err != nil {
		return &pathError{p.path, err}
	}
	if dir.Mode&0o002 == 0 || int(p.stat.Uid) == os.Geteuid() || p.stat.Uid == dir.Uid {
		return nil
	}
	return fmt.Errorf("%s: %s belongs to the user %d: name a file in a directory of your own", p.path, what, p.stat.Uid)
}

func readlinkat(dir int, name string) (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, b)
	return string(b[:max(n, 0)]), err
}

// open opens what is there for writing, without waiting for a reader of a pipe.
func (p *place) open(flags int) (*os.File, error) {
	flags |= unix.O_WRONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	if !p.magic {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := unix.Openat(p.dir, p.base, flags, 0)
	if err != nil {
		return nil, &pathError{p.path, err}
	}
	return os.NewFile(uintptr(fd), p.path), nil
}

// createTemp makes a file of our own, with mode 0600, beside what is there.
func (p *place) createTemp() (f *os.File, name string, err error) {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails: it ends the program instead
		name = ".underlease-" + hex.EncodeToString(b[:])
		fd, err := unix.Openat(p.dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), name), name, nil
		case unix.EEXIST:
			continue
		}
		return nil, "", fmt.Errorf("cannot write into the directory of %s: %w", p.path, err)
	}
}

// replace puts data in the place of what is there, in one step. A file that is there keeps its mode, its owner and its access
// control list: whoever reads it has been given that right. Where one of them cannot be kept, or where the directory may
// not be written to and the file may, it is written in place.
func (p *place) replace(data []byte) error {
	var old *os.File
	if p.there {
		var err error
		if old, err = p.open(0); err != nil {
			return err
		}
		defer func() { _ = old.Close() }() // writes to it are checked
		if info, err := old.Stat(); err != nil || !info.Mode().IsRegular() {
			return fmt.Errorf("%s is not the regular file that it was", p.path)
		}
	}
	tmp, name, err := p.createTemp()
	if err != nil {
		if old != nil && isDenied(err) {
			return overwrite(old, data)
		}
		return err
	}
	if old != nil {
		if err := copyRights(int(old.Fd()), int(tmp.Fd())); err != nil {
			_ = tmp.Close()
			_ = unix.Unlinkat(p.dir, name, 0) // it is empty, and the report is what counts
			return overwrite(old, data)
		}
	}
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = unix.Renameat(p.dir, name, p.dir, p.base)
	}
	if err != nil {
		_ = unix.Unlinkat(p.dir, name, 0) // the first error is the one to tell
		return &pathError{p.path, err}
	}
	return nil
}

func overwrite(f *os.File, data []byte) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt(data, 0)
	return err
}

func copyRights(from, to int) error {
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(to, uint32(st.Mode)&0o777); err != nil { //nolint:unconvert // the type is not the same on every system
		return err
	}
	const acl = "system.posix_acl_access" // xattr(7)
	b := make([]byte, 64<<10)             // the most that an attribute has
	n, err := unix.Fgetxattr(from, acl, b)
	if errors.Is(err, errNoAttribute) || errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return err
	}
	return unix.Fsetxattr(to, acl, b[:n], 0)
}

// pathError is an error of the system with the path that was given.
type pathError struct {
	path string
	err  error
}

func (e *pathError) Error() string { return e.path + ": " + e.err.Error() }
func (e *pathError) Unwrap() error { return e.err }

// isDenied says that a right is missing, or that the file system is read-only.
func isDenied(err error) bool {
	return errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EROFS)
}
