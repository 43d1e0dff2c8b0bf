package file

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/underlease/underlease/backends"
)

// fault is a system call that failed on a path.
func fault(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// classify gives an error of the system its kind. It is the only place that does. The texts name the file, because
// every error that comes here was made by [fault].
func classify(err error) error {
	if err == nil || errors.Is(err, backends.ErrBroken) {
		return err // what stands in a file's place was seen by our own look, not by the system
	}
	var path string
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		path = p.Path
	}
	var number syscall.Errno
	if !errors.As(err, &number) {
		return backends.Unavailable(err, "")
	}
	//exhaustive:ignore
	switch number {
	case syscall.EROFS:
		return backends.WithHint(backends.Denied(err, ""), "the file system is mounted read-only: name a directory elsewhere with file:///dir")
	case syscall.EACCES, syscall.EPERM:
		return backends.WithHint(backends.Denied(err, ""),
			"run as the owner of the directory, or name one of your own with file:///dir")
	case syscall.ENOSPC, syscall.EDQUOT:
		return backends.WithHint(backends.Unavailable(err, ""), "make room on the file system of %s", path)
	case syscall.EMFILE, syscall.ENFILE:
		return backends.WithHint(backends.Unavailable(err, ""), "raise the limit of open files (ulimit -n)")
	case syscall.ENOTDIR, syscall.EISDIR, syscall.ELOOP, syscall.ENXIO:
		// Something that is not ours stands where a file of ours has to be.
		return foreign(err, path)
	default:
		return backends.Unavailable(err, "")
	}
}

// foreign says that what stands at path was not put there by underlease.
func foreign(cause error, path string) error {
	text := ""
	if cause == nil {
		text = fmt.Sprintf("%s is not a regular file", path)
	}
	return backends.WithHint(backends.Broken(cause, "%s", text), "move %s away: nothing there was changed", path)
}

// unreadable says that the record at path cannot be used. Nothing overwrites it.
func unreadable(path string, cause error) error {
	err := backends.Broken(nil, "%s %v", path, cause)
	if n := newer(""); errors.As(cause, &n) {
		return backends.WithHint(err, "update underlease on this host; %s was not changed", path)
	}
	return backends.WithHint(err, "look at %s, then move it away: the next term starts from the clock", path)
}
