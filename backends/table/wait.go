package table

import (
	"context"
	"time"

	"github.com/underlease/underlease/backends"
)

// The waits between two looks of a waiter that nobody tells anything.
const (
	firstLook   = 50 * time.Millisecond
	longestLook = 250 * time.Millisecond
	afterExpiry = time.Millisecond // the database counts whole milliseconds
)

// Teller is what a [Database] does that can tell when a lease may be free.
type Teller interface {
	// Listen waits until it is told. Before, when nothing that comes afterwards can be missed, it reads the row and calls left
	// with it, and then waits for no longer than that returns. It returns false where nobody can be told anything.
	Listen(ctx context.Context, k Key, left func(*Row) (time.Duration, error)) (bool, error)
}

// WaitFree implements [backends.Waiter]. Where the database can tell, it waits to be told; else it looks again and again, with
// one reading statement, as often as what is left says.
func (c *Client) WaitFree(ctx context.Context, req backends.Request) error {
	if err := req.Check(false); err != nil {
		return err
	}
	k := Key{req.Namespace, req.Lease}
	if t, ok := c.db.(Teller); ok {
		able, err := t.Listen(ctx, k, func(row *Row) (time.Duration, error) { return c.left(row, req.Slots) })
		if able || err != nil {
			return c.waited(ctx, err)
		}
	}
	for look := firstLook; ; look = min(2*look, longestLook) {
		row, err := c.db.Look(ctx, k)
		switch {
		case err != nil && c.db.Missing(err):
			return nil
		case err != nil:
			return c.waited(ctx, c.db.Classify(ctx, err))
		}
		left, err := c.left(row, req.Slots)
		if err != nil || left <= 0 {
			return err
		}
		if err := pause(ctx, min(left, jitter(look))); err != nil {
			return err
		}
	}
}

// waited gives the end of a wait its error: the context's, where that has ended.
func (c *Client) waited(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	return ctx.Err()
}

// left is how long a lease stays taken for who may take so many slots.
func (c *Client) left(row *Row, slots int) (time.Duration, error) {
	if row == nil {
		return 0, nil
	}
	l, err := c.read(row)
	if err != nil || len(l.slots) < slots {
		return 0, err
	}
	shortest := int64(-1)
	for i := range slots {
		if n := l.left(&l.slots[i]); shortest < 0 || n < shortest {
			shortest = n
		}
	}
	if shortest == 0 {
		return 0, nil
	}
	return millis(shortest) + afterExpiry, nil
}
