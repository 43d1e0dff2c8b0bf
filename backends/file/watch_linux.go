package file

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// Source: inotify(7).
const (
	inAttrib     = unix.IN_ATTRIB
	inCloseWrite = unix.IN_CLOSE_WRITE
	inDelete     = unix.IN_DELETE
	inDeleteSelf = unix.IN_DELETE_SELF
	inModify     = unix.IN_MODIFY
	inMovedFrom  = unix.IN_MOVED_FROM
	inMovedTo    = unix.IN_MOVED_TO
	inMoveSelf   = unix.IN_MOVE_SELF
)

// watch is an inotify instance. A nil watch never notifies.
type watch struct {
	fd   int
	file *os.File // fd, read through the runtime's poller so that no thread is blocked
	stop func() bool
}

// watch returns nil where nothing can notify: on a network file system, or when no inotify instance is to be had.
func (c *Client) watch(ctx context.Context) *watch {
	if c.network {
		return nil
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil
	}
	w := &watch{fd: fd, file: os.NewFile(uintptr(fd), "inotify")}
	w.stop = context.AfterFunc(ctx, func() { _ = w.file.SetReadDeadline(time.Unix(1, 0)) })
	return w
}

// close does not wait: whoever was told that a lease is free would lose it meanwhile to others.
//
// Source: Linux, fs/notify/mark.c: the last close of an inotify instance waits for a grace period of SRCU, 5 to 25 ms.
func (w *watch) close() {
	if w != nil {
		w.stop()
		go func() { _ = w.file.Close() }()
	}
}

// add watches what is at path now. A path that does not exist is found by the look that follows.
func (w *watch) add(path string, mask uint32) {
	if w != nil {
		_, _ = unix.InotifyAddWatch(w.fd, filepath.Clean(path), mask)
	}
}

// wait waits for an event that matters and reports whether one came before the time was over or the context ended.
func (w *watch) wait(ctx context.Context, limit time.Duration, matters func(name string, mask uint32) bool) bool {
	if w == nil {
		pause(ctx, max(limit, time.Millisecond))
		return false
	}
	var deadline time.Time // none
	if limit < backends.Forever {
		deadline = time.Now().Add(limit)
	}
	if err := w.file.SetReadDeadline(deadline); err != nil {
		pause(ctx, min(limit, longestWait))
		return false
	}
	if ctx.Err() != nil {
		return false // its deadline may have been set before ours
	}
	var b [4096]byte
	n, err := w.file.Read(b[:])
	if err != nil {
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			pause(ctx, min(limit, longestWait))
		}
		return false
	}
	// Source: inotify(7): wd int32, mask uint32, cookie uint32, len uint32, name padded with zero bytes.
	for e := b[:n]; len(e) >= unix.SizeofInotifyEvent; {
		mask := binary.NativeEndian.Uint32(e[4:])
		length := int(binary.NativeEndian.Uint32(e[12:]))
		name := strings.TrimRight(string(e[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+length]), "\x00")
		if matters == nil || matters(name, mask) {
			return true
		}
		e = e[unix.SizeofInotifyEvent+length:]
	}
	return false
}
