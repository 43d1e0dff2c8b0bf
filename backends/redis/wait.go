package redis

import (
	"context"
	"errors"
	"net"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/underlease/underlease/backends"
)

const (
	// ticketLife is how long a place in the queue lasts without its owner. Who died there holds up nobody: a wake that nobody
	// hears goes to the next.
	ticketLife = 10 * time.Second
	// ticketAgain is how often a waiter confirms his place.
	ticketAgain = 3 * time.Second
	// afterExpiry is how much later than the store said a lease is looked at: it counts whole milliseconds.
	afterExpiry = time.Millisecond
)

// waiting is a place in the queue of a lease, and the subscription that tells when its turn has come. It outlives the call,
// because a waiter calls again and again: what was told in between is not missed.
type waiting struct {
	sub   *goredis.PubSub
	place string    // as the store gave it
	again time.Time // when the place has to be confirmed; zero: now
	free  time.Time // when the store frees the lease by itself, as far as was known at the last confirmation
	busy  bool      // a call is under way
}

// Leave implements [backends.Leaver].
func (c *Client) Leave(ctx context.Context, req backends.Request) error {
	c.mu.Lock()
	waits := c.waiting[req.Handle] != nil
	c.mu.Unlock()
	if !waits {
		return nil
	}
	return c.Release(ctx, backends.Grant{Namespace: req.Namespace, Lease: req.Lease, Handle: req.Handle}, backends.End{})
}

// WaitFree implements [backends.Waiter]. Waiters are told in the order in which they came.
func (c *Client) WaitFree(ctx context.Context, req backends.Request) error {
	if err := req.Check(false); err != nil {
		return err
	}
	w, err := c.enter(ctx, req)
	if w == nil {
		return err
	}
	err = c.wait(ctx, w, req)
	c.mu.Lock()
	w.busy = false
	c.mu.Unlock()
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		c.stopWaiting(req.Handle)
	}
	return err
}

// enter returns the place of a handle, with a subscription that stands. A second call for one handle gets none: it returns
// at once, which is only too early.
func (c *Client) enter(ctx context.Context, req backends.Request) (*waiting, error) {
	c.mu.Lock()
	w := c.waiting[req.Handle]
	switch {
	case c.closed:
		c.mu.Unlock()
		return nil, c.classify(goredis.ErrClosed, "")
	case w != nil && w.busy:
		c.mu.Unlock()
		return nil, nil
	case w != nil:
		w.busy = true
		c.mu.Unlock()
		return w, nil
	}
	w = &waiting{busy: true, place: "0"}
	c.waiting[req.Handle] = w
	c.mu.Unlock()
	if err := c.subscribe(ctx, w, req); err != nil {
		c.stopWaiting(req.Handle)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, err
	}
	return w, nil
}

func (c *Client) subscribe(ctx context.Context, w *waiting, req backends.Request) error {
	key := keyOf(req.Namespace, req.Lease)
	addr, err := c.route.to(ctx, key)
	if err != nil {
		return c.classify(err, key)
	}
	_, err = c.node(addr).do(ctx, func(ctx context.Context, l *link) (any, error) {
		sub := l.Subscribe(ctx, key+":"+ticket(req.Handle))
		c.mu.Lock()
		closed := c.closed
		w.sub = sub
		c.mu.Unlock()
		if closed {
			_ = sub.Close() // nobody waits any more
			return nil, goredis.ErrClosed
		}
		return sub.Receive(ctx) // the server's word that the subscription stands
	})
	if err != nil {
		return c.classify(err, key)
	}
	return nil
}

// wait returns nil when the lease may be free.
func (c *Client) wait(ctx context.Context, w *waiting, req backends.Request) error {
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) { // a deadline, the reading sees by itself
			c.stopWaiting(req.Handle)
		}
	})
	defer stop()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		now := time.Now()
		if !now.Before(w.again) {
			left, err := c.queue(ctx, w, req)
			if err != nil || left == 0 {
				return err
			}
			w.again, w.free = now.Add(ticketAgain), now.Add(left+afterExpiry)
		}
		until := w.again
		if w.free.Before(until) {
			until = w.free
		}
		deadline, limited := ctx.Deadline()
		if limited && deadline.Before(until) {
			until = deadline
		}
		got, err := w.sub.ReceiveTimeout(ctx, max(until.Sub(now), time.Millisecond))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if _, told := got.(*goredis.Message); told {
			w.again = time.Time{} // the place is used up
			return nil
		}
		if e, ok := errors.AsType[net.Error](err); err != nil && (!ok || !e.Timeout()) {
			return c.classify(err, "")
		}
		if now := time.Now(); limited && !now.Before(deadline) {
			return context.DeadlineExceeded
		} else if !now.Before(w.free) {
			w.again = time.Time{}
			return nil
		}
	}
}

// queue takes or confirms a place and returns for how long the lease is taken, or zero when it is free.
func (c *Client) queue(ctx context.Context, w *waiting, req backends.Request) (time.Duration, error) {
	words, err := c.eval(ctx, toWait, req.Namespace, req.Lease, false, req.Slots, ticket(req.Handle), w.place, ticketLife.Milliseconds())
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return 0, err
	}
	if words[0] == "free" {
		return 0, nil
	}
	if len(words) != 3 {
		return 0, c.unreadable(nil)
	}
	left, err := strconv.ParseInt(words[2], 10, 64)
	if err != nil {
		return 0, c.unreadable(err)
	}
	w.place = words[1]
	return max(millis(left), time.Millisecond), nil
}

// stopWaiting ends the subscription of a handle. Its place is given up by whatever ends the wait, or with its life.
func (c *Client) stopWaiting(handle string) {
	c.mu.Lock()
	w := c.waiting[handle]
	delete(c.waiting, handle)
	var sub *goredis.PubSub
	if w != nil {
		sub = w.sub
	}
	c.mu.Unlock()
	if sub != nil {
		_ = sub.Close() // nobody reads from it any more
	}
}
