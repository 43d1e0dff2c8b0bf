package quorum

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/underlease/underlease/backends"
)

const (
	// ticketLife is how long a place in the queue lasts without its owner, and how long one who died there delays the others.
	// It is the shortest session of a Consul that nobody configured. Source: Consul, session_ttl_min.
	ticketLife = 10 * time.Second
	// ticketAgain is how often a waiter keeps his place.
	ticketAgain = 3 * time.Second
)

// waiting is a place in the queue. It outlives the call, because a waiter calls again and again.
type waiting struct {
	key     string
	session Session
	kept    time.Time
}

// ticketOf returns the key of a waiter's place, or nothing.
func (c *Client) ticketOf(digest string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.waiting[digest]; w != nil {
		return w.key
	}
	return ""
}

// leaveQueue forgets a place whose key is gone.
func (c *Client) leaveQueue(digest string) *waiting {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.waiting[digest]
	delete(c.waiting, digest)
	return w
}

// giveUp gives a place in the queue back.
func (c *Client) giveUp(ctx context.Context, digest string) error {
	w := c.leaveQueue(digest)
	if w == nil {
		return nil
	}
	return c.store.End(ctx, w.session.ID)
}

// Leave implements [backends.Leaver].
func (c *Client) Leave(ctx context.Context, req backends.Request) error {
	return c.giveUp(ctx, digest(req.Namespace, req.Lease, req.Handle))
}

// WaitFree implements [backends.Waiter]. Waiters are woken in the order in which they came.
func (c *Client) WaitFree(ctx context.Context, req backends.Request) error {
	if err := req.Check(false); err != nil {
		return err
	}
	p, d := c.place(req.Namespace, req.Lease), digest(req.Namespace, req.Lease, req.Handle)
	for {
		free, err := c.wait(ctx, p, d, req.Slots)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if free || err != nil {
			return err
		}
	}
}

// wait looks once at queue and lease, and waits until something changes there. Free says that a slot may be free for the waiter.
func (c *Client) wait(ctx context.Context, p place, d string, slots int) (free bool, _ error) {
	var queue, view View
	var queueErr, leaseErr error
	looking, stop := context.WithTimeout(ctx, ticketAgain) // who waits for long must not hang for as long
	together(
		func() { queue, queueErr = c.enter(looking, p, d, slots) },
		func() { view, leaseErr = c.store.Read(looking, p.lease()) },
	)
	stop()
	if err := first(queueErr, leaseErr); err != nil {
		return false, err
	}
	l, err := c.parse(p, view)
	if err != nil {
		return false, err
	}
	before, from := ahead(queue, p.ticket(d))
	if l.free(from, slots) >= 0 {
		return true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, ticketAgain)
	defer cancel()
	type change struct {
		lease bool
		err   error
	}
	changes := make(chan change, 2)
	watches := 0
	watch := func(lease bool, prefix string, after int64) {
		watches++
		go func() { changes <- change{lease, c.store.Await(ctx, prefix, after)} }()
	}
	if before != "" {
		watch(false, before, queue.Version)
	}
	if from < slots {
		watch(true, p.lease(), view.Version)
	}
	got := <-changes
	cancel()
	for range watches - 1 {
		<-changes // so that nothing is left behind
	}
	switch {
	case errors.Is(got.err, context.DeadlineExceeded) || errors.Is(got.err, context.Canceled):
		return false, nil // time to keep the place
	case got.err != nil:
		return false, got.err
	}
	// Who stands first acquires at once: a look at what has changed would cost as much.
	return got.lease && from == 0, nil
}

// enter takes a place in the queue, or keeps it, and returns the queue.
func (c *Client) enter(ctx context.Context, p place, d string, slots int) (View, error) {
	c.mu.Lock()
	w := c.waiting[d]
	c.mu.Unlock()
	if w != nil && time.Since(w.kept) >= ticketAgain/2 {
		now := time.Now()
		err := c.store.Keep(ctx, w.session.ID)
		switch {
		case errors.Is(err, ErrGone):
			w = nil
		case err != nil:
			return View{}, err
		default:
			w.kept = now
		}
	}
	for range mostRounds {
		if w == nil {
			now := time.Now()
			session, err := c.store.Begin(ctx, queueSeed(d), ticketLife)
			if err != nil {
				return View{}, err
			}
			w = &waiting{key: p.ticket(d), session: session, kept: now}
			c.mu.Lock()
			c.waiting[d] = w
			c.mu.Unlock()
			var t Txn
			t.check(w.key, 0) // else it is there already: an answer was lost
			t.put(w.key, []byte(strconv.Itoa(slots)), session.ID)
			if _, _, err := c.store.Commit(ctx, t); err != nil && !errors.Is(err, ErrGone) {
				return View{}, err
			}
		}
		queue, err := c.store.Read(ctx, p.queue())
		if err != nil {
			return View{}, err
		}
		if slices.ContainsFunc(queue.Pairs, func(pair Pair) bool { return pair.Key == w.key }) {
			return queue, nil
		}
		w = nil // somebody deleted it, or its session has ended
	}
	return View{}, c.contended(p)
}

// ahead returns the key of who stands before another, and from which slot on nobody before him may take one: who asks for
// fewer slots holds up no one who may take more.
func ahead(queue View, mine string) (before string, from int) {
	slices.SortFunc(queue.Pairs, func(a, b Pair) int { return int(max(-1, min(1, a.Created-b.Created))) })
	for _, pair := range queue.Pairs {
		if pair.Key == mine {
			break
		}
		slots, err := strconv.Atoi(string(pair.Value))
		if err != nil {
			continue // somebody else's
		}
		before, from = pair.Key, max(from, slots)
	}
	return before, from
}

// WaitChange implements [backends.Watcher].
func (c *Client) WaitChange(ctx context.Context, g backends.Grant) error {
	p := c.place(g.Namespace, g.Lease)
	view, err := c.store.Read(ctx, p.slot(g.Slot))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	l, err := c.parse(p, view)
	if err != nil {
		return err
	}
	if _, err := l.of(g); err != nil || !sameAsk(l.asks[g.Slot].ask(), g.Ask) {
		return nil //nolint:nilerr // it has changed
	}
	err = c.store.Await(ctx, p.slot(g.Slot), view.Version)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func sameAsk(a, b *backends.Ask) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Kind == b.Kind && a.Reason == b.Reason && a.By == b.By
}
