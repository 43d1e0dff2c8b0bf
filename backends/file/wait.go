package file

import (
	"context"
	"strconv"
	"time"

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
			w.add(slotPath(dir, number), inCloseWrite|inAttrib|inDeleteSelf|inMoveSelf)
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
	d, err := c.enter(ctx, req.Namespace, req.Lease, toChange)
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
			return mask&inCloseWrite == 0
		default:
			return false
		}
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		w.add(h.dir, inModify|inMovedTo|inMovedFrom|inDelete|inCloseWrite|inDeleteSelf|inMoveSelf)
		// A file that somebody holds open is not deleted but loses its name, which is a change of its attributes.
		w.add(slotPath(h.dir, h.grant.Slot), inAttrib|inDeleteSelf|inMoveSelf)
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
