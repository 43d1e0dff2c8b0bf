package file

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// longestWait is how long a waiter sleeps at most: a notification can be missed when files are deleted and made again.
const longestWait = time.Second

// unlockDelay is how long after IN_CLOSE_WRITE a lock may still be there: the kernel tells of the close first.
//
// Source: Linux, fs/file_table.c, __fput: fsnotify_close comes before locks_remove_file.
const unlockDelay = time.Millisecond

// WaitFree implements [backends.Waiter]. It promises no order.
func (c *Client) WaitFree(ctx context.Context, req backends.Request) error {
	if err := req.Check(true); err != nil {
		return err
	}
	dir := c.lease(req.Namespace, req.Lease)
	w := c.watch(ctx)
	defer w.close()
	for {
		// Watch first, then look, so that nothing is missed between the two.
		for number := range req.Slots {
			w.add(slotPath(dir, number), unix.IN_CLOSE_WRITE|unix.IN_ATTRIB|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF)
		}
		left, err := c.busyFor(ctx, req)
		if err != nil || left == 0 {
			return err
		}
		if !w.wait(ctx, min(left, longestWait), nil) {
			continue
		}
		if left, err = c.busyFor(ctx, req); err != nil || left == 0 {
			return err
		}
		pause(ctx, unlockDelay)
	}
}

// busyFor returns how long every slot is known to stay taken, or zero when one is free.
func (c *Client) busyFor(ctx context.Context, req backends.Request) (time.Duration, error) {
	d, err := c.enter(ctx, req.Namespace, req.Lease, false)
	if ctx.Err() != nil {
		if d != nil {
			d.leave()
		}
		return 0, ctx.Err()
	}
	if err != nil || d == nil {
		return 0, err
	}
	defer d.leave()
	shortest := backends.Forever
	for number := range req.Slots {
		var kept time.Duration
		if s := d.record().slot(number); s != nil {
			kept = c.clock.left(s)
		}
		held, _, err := d.locked(number)
		if err != nil {
			return 0, err
		}
		if !held {
			shortest = min(shortest, kept)
		}
	}
	return shortest, nil
}

// WaitChange implements [backends.Watcher]. It returns when the grant is gone or another thing is asked of its holder
// than g says; what happens in the directory besides does not wake the caller.
func (c *Client) WaitChange(ctx context.Context, g backends.Grant) error {
	h := c.holds(c.lease(g.Namespace, g.Lease), g.Handle)
	if h == nil {
		return nil
	}
	w := c.watch(ctx)
	defer w.close()
	if w == nil {
		<-ctx.Done() // nothing notifies here: the caller's own looks have to do
		return ctx.Err()
	}
	matters := func(name string, mask uint32) bool {
		switch name {
		case "", "rec": // the directory or the slot's file itself, or the record
			return true
		case "slot." + strconv.Itoa(h.grant.Slot):
			return mask&unix.IN_CLOSE_WRITE == 0
		default:
			return false
		}
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		w.add(h.dir, unix.IN_MODIFY|unix.IN_MOVED_TO|unix.IN_MOVED_FROM|unix.IN_DELETE|unix.IN_CLOSE_WRITE|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF)
		// A file that somebody holds open is not deleted but loses its name, which is a change of its attributes.
		w.add(slotPath(h.dir, h.grant.Slot), unix.IN_ATTRIB|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF)
		if seen, err := h.look(); err != nil || !sameAsk(seen.Ask, g.Ask) {
			return nil // the caller renews and sees for itself what it is
		}
		for ctx.Err() == nil && !w.wait(ctx, backends.Forever, matters) {
			continue
		}
	}
}

func sameAsk(a, b *backends.Ask) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Kind == b.Kind && a.Reason == b.Reason && a.By == b.By && a.At.Equal(b.At)
}

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

func (w *watch) close() {
	if w != nil {
		w.stop()
		_ = w.file.Close()
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
