//go:build unix

package signals

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
)

// ResolveError says why no file was found for a command's name.
type ResolveError struct {
	Name  string
	Errno syscall.Errno // ENOENT where there is none; else why the one that there is cannot be executed
}

func (e *ResolveError) Error() string {
	switch {
	case e.NotFound():
		return fmt.Sprintf("%s: command not found", e.Name)
	case e.Errno == syscall.EISDIR:
		return fmt.Sprintf("%s: is a directory", e.Name)
	default:
		return fmt.Sprintf("%s: cannot be executed: %v", e.Name, e.Errno)
	}
}

func (e *ResolveError) Unwrap() error { return e.Errno }

// NotFound tells exit code 127 from 126.
func (e *ResolveError) NotFound() bool {
	return e.Errno == syscall.ENOENT || e.Errno == syscall.ENOTDIR
}

// Resolve finds the file of a command as execvp(3) does: a name with a slash is a path; else the directories of PATH, which is taken
// from env, are searched in their order. Relative directories count, and so does an empty one, the working directory. Files that
// may not be executed are passed over, and are the answer only when nothing better follows. Unlike there, a directory that may not be
// searched counts as one without the file, as it does for a shell.
func Resolve(name string, env []string) (path string, err error) {
	if name == "" {
		return "", &ResolveError{name, syscall.ENOENT}
	}
	if strings.Contains(name, "/") {
		if e := executable(name); e != 0 {
			return "", &ResolveError{name, e}
		}
		return name, nil
	}
	dirs := "/bin:/usr/bin" // confstr(_CS_PATH)
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			dirs = v
			break // the first one, as getenv(3)
		}
	}
	worst := syscall.ENOENT
	for dir := range strings.SplitSeq(dirs, ":") {
		if dir == "" {
			dir = "."
		}
		path := strings.TrimSuffix(dir, "/") + "/" + name
		switch e := executable(path); e {
		case 0:
			return path, nil
		case syscall.EACCES, syscall.EISDIR, syscall.EPERM:
			// A directory that may not be searched hides whether the file is there. execvp reports EACCES for it; a
			// mistyped name under such a PATH, as sudo and cron leave it behind, would then never be "not found".
			var st syscall.Stat_t
			if syscall.Lstat(path, &st) == nil {
				worst = e
			}
		default: // not here, or no directory: the next one
		}
	}
	return "", &ResolveError{name, worst}
}

// executable says why a file cannot be executed by this process, or zero.
func executable(path string) syscall.Errno {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		e, _ := errors.AsType[syscall.Errno](err)
		return e
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		return syscall.EISDIR
	case syscall.S_IFREG:
	default:
		return syscall.EACCES
	}
	if err := mayRun(path); err != nil {
		e, ok := errors.AsType[syscall.Errno](err)
		if !ok {
			e = syscall.EACCES
		}
		return e
	}
	return 0
}
