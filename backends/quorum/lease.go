package quorum

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/underlease/underlease/backends"
)

// mostRounds bounds how often one call begins anew because somebody else was faster. Each time somebody was.
const mostRounds = 100

// contended is the error after so many rounds.
func (c *Client) contended(p place) error {
	return backends.Unavailable(nil, "%s: others changed %q %d times meanwhile", c.store.Address(), backends.Display(p.namespace, p.name), mostRounds)
}

// Acquire implements [backends.Backend].
func (c *Client) Acquire(ctx context.Context, req backends.Request) (backends.Grant, error) {
	if err := req.Check(false); err != nil {
		return backends.Grant{}, err
	}
	if err := c.store.Check(req.TTL, req.Hold); err != nil {
		return backends.Grant{}, err
	}
	p, d := c.place(req.Namespace, req.Lease), digest(req.Namespace, req.Lease, req.Handle)
	h := c.newHand(d, req)
	a := attempt{c: c, req: req, place: p, digest: d, hand: &h}
	defer func() { c.knows(d, h) }()
	if p, ok := c.store.(Peeker); ok && h.session.ID == "" {
		return a.ahead(ctx, p)
	}
	if h.session.ID != "" {
		var view View
		var readErr, sessionErr error
		together(
			func() { view, readErr = c.store.Read(ctx, p.lease()) },
			func() { sessionErr = a.sessions(ctx) },
		)
		if err := first(readErr, sessionErr); err != nil {
			return backends.Grant{}, err
		}
		return a.run(ctx, view)
	}
	view, err := c.store.Read(ctx, p.lease())
	if err != nil {
		return backends.Grant{}, err
	}
	return a.run(ctx, view)
}

// first returns the first error.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// attempt is one call of Acquire.
type attempt struct {
	c      *Client
	req    backends.Request
	place  place
	digest string
	hand   *hand // of this call alone
	ready  bool  // the sessions were begun or kept by this call
}

// sessions begins the sessions of the handle, or keeps them.
func (a *attempt) sessions(ctx context.Context) error {
	var err, holdErr error
	one := func() { err = a.session(ctx, &a.hand.session, grantSeed(a.digest), a.req.TTL) }
	if a.req.Hold > 0 {
		together(one, func() { holdErr = a.session(ctx, &a.hand.hold, holdSeed(a.digest), a.req.Hold) })
	} else {
		one()
	}
	a.ready = err == nil && holdErr == nil
	return first(err, holdErr)
}

func (a *attempt) session(ctx context.Context, s *Session, seed string, ttl time.Duration) error {
	if s.ID != "" {
		err := a.c.store.Keep(ctx, s.ID)
		if !errors.Is(err, ErrGone) {
			return err
		}
	}
	made, err := a.c.store.Begin(ctx, seed, ttl)
	if err != nil {
		return err
	}
	*s = made
	return nil
}

// ahead asks for the sessions, looks, and takes a slot by sessions that may still be on their way: what a server is sent first it handles
// before what it is sent after the answer to something else, as a rule. Where it did not, there is no such session, nothing is written,
// and the slot is taken when they are there. The transaction compares, so that the look may be old; what is busy by an old look is
// looked at again. Sessions that would stay for long are asked for when a slot looks free: a run that finds the lease busy leaves them behind.
func (a *attempt) ahead(ctx context.Context, p Peeker) (backends.Grant, error) {
	begun := make(chan error, 1)
	begin := func() { go func() { begun <- a.sessions(ctx) }() }
	long := max(a.req.TTL, a.req.Hold) > longSession
	if !long {
		begin()
	}
	slot := -1
	var got backends.Grant
	var taken bool
	var l *lease
	view, err := p.Peek(ctx, a.place.lease())
	if err == nil {
		l, err = a.c.parse(a.place, view)
	}
	if err == nil {
		if _, again := l.carrying(a.digest); again == nil {
			slot = l.free(0, a.req.Slots)
		}
	}
	if long && slot < 0 {
		begun <- nil // none was
	} else if long {
		begin()
	}
	if slot >= 0 {
		session := Session{ID: a.c.store.Name(grantSeed(a.digest)), TTL: a.req.TTL}
		hold := Session{ID: a.c.store.Name(holdSeed(a.digest)), TTL: a.req.Hold}
		got, taken, err = a.take(ctx, l, slot, session, hold)
		a.hand.loose = err != nil && !errors.Is(err, ErrGone)
	}
	sessionErr := <-begun
	if errors.Is(err, ErrGone) && sessionErr == nil {
		got, taken, err = a.take(ctx, l, slot, a.hand.session, a.hand.hold)
		if errors.Is(err, ErrGone) {
			err = nil
			a.hand.session, a.hand.hold, a.ready = Session{}, Session{}, false
		}
	}
	if err := first(err, sessionErr); err != nil {
		return backends.Grant{}, err
	}
	if taken {
		got.TTL = min(got.TTL, a.hand.session.TTL)
		return got, nil
	}
	if view, err = a.c.store.Read(ctx, a.place.lease()); err != nil {
		return backends.Grant{}, err
	}
	return a.run(ctx, view)
}

func (a *attempt) run(ctx context.Context, view View) (backends.Grant, error) {
	for range mostRounds {
		l, err := a.c.parse(a.place, view)
		if err != nil {
			return backends.Grant{}, err
		}
		if slot, g := l.carrying(a.digest); g != nil {
			got, err := a.again(ctx, l, slot, g)
			if !errors.Is(err, ErrGone) {
				return got, err
			}
		} else {
			slot := l.free(0, a.req.Slots)
			if slot < 0 {
				err := a.busy(ctx, l)
				a.leave(ctx)
				return backends.Grant{}, err
			}
			if !a.ready {
				if err := a.sessions(ctx); err != nil {
					return backends.Grant{}, err
				}
			}
			got, ok, err := a.take(ctx, l, slot, a.hand.session, a.hand.hold)
			switch {
			case errors.Is(err, ErrGone):
				// It ended between two requests of this call; whatever took so long, a new one is as good.
				a.hand.session, a.hand.hold, a.ready = Session{}, Session{}, false
			case ok || err != nil:
				return got, err
			}
		}
		if view, err = a.c.store.Read(ctx, a.place.lease()); err != nil {
			return backends.Grant{}, err
		}
	}
	return backends.Grant{}, a.c.contended(a.place)
}

// again is a slot that carries the handle already: an earlier attempt took it, and its answer was lost.
func (a *attempt) again(ctx context.Context, l *lease, slot int, g *grant) (backends.Grant, error) {
	if l.asks[slot].breaks() {
		return backends.Grant{}, broken(l.asks[slot])
	}
	if !a.ready || a.hand.session.ID != g.pair.Session {
		if err := a.c.store.Keep(ctx, g.pair.Session); err != nil {
			return backends.Grant{}, err
		}
		a.hand.session = Session{ID: g.pair.Session, TTL: duration(g.TTL)}
	}
	a.hand.lease, a.hand.slot = l, slot
	a.c.leaveQueue(a.digest)
	got := l.granted(slot, g)
	got.Handle = a.req.Handle
	return got, nil
}

// granted is a grant as the store shows it, but for its handle.
func (l *lease) granted(slot int, g *grant) backends.Grant {
	return backends.Grant{
		Namespace: l.place.namespace, Lease: l.place.name, Holder: g.Holder, Slot: slot, Term: g.Term, TTL: duration(g.TTL),
		Previous: l.doc.entry(slot).Last.end(), Ask: l.asks[slot].ask(),
	}
}

// take takes a free slot. Without an error and ok somebody was faster. [ErrGone] says that a session is not there.
func (a *attempt) take(ctx context.Context, l *lease, slot int, session, held Session) (_ backends.Grant, ok bool, _ error) {
	now := a.c.millis()
	var t Txn
	term, err := a.c.next(l, now, &t)
	if err != nil {
		return backends.Grant{}, false, err
	}
	t.check(a.place.grant(slot), 0)
	t.check(a.place.hold(slot), 0)
	d := l.doc.clone()
	l.settle(d, &t)
	d.Term = term
	previous := d.entry(slot).Last
	d.set(slotDoc{Slot: slot, Holder: a.req.Holder, Term: term, Since: now, Open: true, Last: previous})
	ttl := min(a.req.TTL, session.TTL)
	g := &grant{Digest: a.digest, Holder: a.req.Holder, Term: term, Since: now, TTL: ttl.Milliseconds()}
	t.put(a.place.doc(), stored(d), "")
	t.put(a.place.grant(slot), stored(g), session.ID)
	if a.req.Hold > 0 {
		t.put(a.place.hold(slot), stored(hold{Holder: a.req.Holder, Term: term, Since: now, Length: a.req.Hold.Milliseconds()}), held.ID)
	}
	if ticket := a.c.ticketOf(a.digest); ticket != "" {
		t.delete(ticket)
	}
	version, ok, err := a.c.store.Commit(ctx, t)
	if err == nil && !ok {
		err = a.c.again(ctx, l)
	}
	if !ok || err != nil {
		return backends.Grant{}, false, err
	}
	g.pair = Pair{Key: a.place.grant(slot), Version: version, Session: session.ID}
	l.doc, l.version, l.grants[slot] = *d, version, g
	delete(l.asks, slot)
	if a.req.Hold > 0 {
		l.holds[slot] = &hold{pair: Pair{Key: a.place.hold(slot), Version: version, Session: held.ID}}
	}
	a.hand.lease, a.hand.slot = l, slot
	a.c.leaveQueue(a.digest)
	got := l.granted(slot, g)
	got.Handle = a.req.Handle
	return got, true, nil
}

// leave ends sessions that nothing hangs on and that would stay for long: somebody took the slot that was free when they were begun.
func (a *attempt) leave(ctx context.Context) {
	for _, s := range []*Session{&a.hand.session, &a.hand.hold} {
		if s.ID != "" && s.TTL > longSession && a.c.store.End(ctx, s.ID) == nil {
			*s, a.ready = Session{}, false
		}
	}
}

// mostAsked bounds of how many sessions one call asks what is left.
const mostAsked = 16

// busy tells who has the slot that will be free first.
func (a *attempt) busy(ctx context.Context, l *lease) error {
	b := &backends.BusyError{Namespace: a.req.Namespace, Lease: a.req.Lease, Left: backends.Forever}
	n := min(a.req.Slots, mostAsked)
	left := a.c.left(ctx, l, n)
	for i := range n {
		if b.Left <= left[i] {
			continue
		}
		b.Slot, b.Left = i, left[i]
		if g := l.grants[i]; g != nil {
			b.Holder, b.Term, b.Since, b.Kept = g.Holder, g.Term, time.UnixMilli(g.Since), false
		} else if h := l.holds[i]; h != nil {
			b.Holder, b.Term, b.Since, b.Kept = h.Holder, h.Term, time.UnixMilli(h.Since), true
		}
	}
	return b
}

// shortestLeft is the least that is said to be left of what is taken. Stores end sessions late.
const shortestLeft = 500 * time.Millisecond

// left returns how long each of the first n slots stays taken unless renewed.
func (c *Client) left(ctx context.Context, l *lease, n int) []time.Duration {
	left := make([]time.Duration, n)
	holds := make([]time.Duration, n)
	fs := []func(){func() {}}
	ask := func(into *time.Duration, session string, stated time.Duration) {
		fs = append(fs, func() {
			got, err := c.store.Left(ctx, session, stated)
			if err != nil {
				got = stated
			}
			// Nothing is as good as free before the store says so: who is told less would ask again and again.
			*into = max(got, shortestLeft)
		})
	}
	for i := range n {
		if g := l.grants[i]; g != nil {
			ask(&left[i], g.pair.Session, duration(g.TTL))
		}
		if h := l.holds[i]; h != nil {
			ask(&holds[i], h.pair.Session, min(duration(h.Since+h.Length-c.millis()), duration(h.Length)))
		}
	}
	together(fs...)
	for i := range n {
		left[i] = max(left[i], holds[i])
	}
	return left
}

func broken(a *ask) error { return backends.Lost(nil, "broken by an operator: %s", a.Reason) }

// Renew implements [backends.Backend].
func (c *Client) Renew(ctx context.Context, g backends.Grant) (backends.Grant, error) {
	g, err := c.renew(ctx, g)
	if a, ok := c.store.(Adviser); ok && errors.Is(err, backends.ErrLost) {
		if advice := a.Advice(ctx); advice != "" {
			err = backends.WithHint(err, "%s", advice)
		}
	}
	return g, err
}

func (c *Client) renew(ctx context.Context, g backends.Grant) (backends.Grant, error) {
	p, d := c.place(g.Namespace, g.Lease), digest(g.Namespace, g.Lease, g.Handle)
	session := c.store.Name(grantSeed(d))
	if h, _ := c.hand(d); h.session.ID != "" {
		session = h.session.ID
	}
	var view View
	var readErr, keepErr error
	read := func() { view, readErr = c.store.Read(ctx, p.slot(g.Slot)) }
	if session != "" {
		together(read, func() { keepErr = c.store.Keep(ctx, session) })
	} else {
		read()
	}
	if readErr != nil {
		if errors.Is(keepErr, ErrGone) {
			return backends.Grant{}, backends.Lost(nil, "it has expired")
		}
		return backends.Grant{}, readErr
	}
	l, err := c.parse(p, view)
	if err != nil {
		return backends.Grant{}, err
	}
	there, err := l.of(g)
	if err != nil {
		return backends.Grant{}, err
	}
	if session == "" {
		session, keepErr = there.pair.Session, c.store.Keep(ctx, there.pair.Session)
	}
	switch {
	case errors.Is(keepErr, ErrGone):
		return backends.Grant{}, backends.Lost(nil, "it has expired")
	case keepErr != nil:
		return backends.Grant{}, keepErr
	case there.pair.Session != session:
		return backends.Grant{}, backends.Lost(nil, "its key was taken out of its session")
	case l.asks[g.Slot].breaks():
		return backends.Grant{}, broken(l.asks[g.Slot])
	}
	g.Ask = l.asks[g.Slot].ask()
	return g, nil
}

// of returns the key of a grant that is in force, or [backends.ErrLost].
func (l *lease) of(g backends.Grant) (*grant, error) {
	there := l.grants[g.Slot]
	switch {
	case there == nil:
		return nil, backends.Lost(nil, "its slot is free")
	case there.Digest != digest(g.Namespace, g.Lease, g.Handle) || there.Term != g.Term:
		return nil, backends.Lost(nil, "another holder has it")
	}
	return there, nil
}

// longSession is what ends by itself soon enough: a session without keys is not worth a request.
const longSession = 2 * time.Minute

// Release implements [backends.Backend].
func (c *Client) Release(ctx context.Context, g backends.Grant, e backends.End) error {
	for _, p := range e.Puts {
		if err := p.Check(); err != nil {
			return err
		}
	}
	d := digest(g.Namespace, g.Lease, g.Handle)
	abandon := g.Term == 0
	if abandon && e.Outcome == "" {
		e.Outcome = backends.OutcomeNotStarted
	}
	if e.Outcome == "" {
		e.Outcome = backends.OutcomeUnknown
	}
	h, _ := c.hand(d)
	if abandon {
		return c.abandon(ctx, g, d, e)
	}
	var l *lease
	if h.slot == g.Slot {
		l = h.lease
	}
	if err := c.finish(ctx, g, l, e); err != nil {
		return err
	}
	c.forget(d)
	if h.session.ID != "" && h.session.TTL > longSession {
		_ = c.store.End(ctx, h.session.ID) // the lease is free, and the session ends by itself
	}
	return nil
}

// abandon frees whatever carries the handle. What is still on its way finds no session or, where it was sent together with the session,
// another version of the doc than it compares with.
func (c *Client) abandon(ctx context.Context, g backends.Grant, d string, e backends.End) error {
	if err := c.giveUp(ctx, d); err != nil {
		return err
	}
	p := c.place(g.Namespace, g.Lease)
	h, known := c.hand(d)
	var sessions []string
	if known {
		sessions = append(sessions, cmp.Or(h.session.ID, c.store.Name(grantSeed(d))))
		if h.holds {
			sessions = append(sessions, cmp.Or(h.hold.ID, c.store.Name(holdSeed(d))))
		}
	}
	var taken *grant
	slot := 0
	for range mostRounds {
		view, err := c.store.Read(ctx, p.lease())
		if err != nil {
			return err
		}
		l, err := c.parse(p, view)
		if err != nil {
			return err
		}
		if i, there := l.carrying(d); there != nil {
			taken, slot = there, i
			sessions = append(sessions, there.pair.Session)
			if h := l.holds[i]; h != nil && h.Term == there.Term {
				sessions = append(sessions, h.pair.Session)
			}
		}
		slices.Sort(sessions)
		for _, id := range slices.Compact(sessions) {
			if id == "" {
				continue
			}
			if err := c.store.End(ctx, id); err != nil {
				return err
			}
		}
		if taken != nil || !h.loose {
			break
		}
		var t Txn
		d := l.doc.clone()
		if d.Term, err = c.next(l, c.millis(), &t); err != nil {
			return err
		}
		t.put(p.doc(), stored(d), "")
		if _, ok, err := c.store.Commit(ctx, t); err != nil {
			return err
		} else if ok {
			break
		}
		if err := c.again(ctx, l); err != nil {
			return err
		}
	}
	c.forget(d)
	if taken == nil {
		return nil
	}
	return c.close(ctx, p, slot, taken.Term, stood(e))
}

func stood(e backends.End) end {
	return end{Outcome: e.Outcome, ExitCode: e.ExitCode, Took: e.Took.Milliseconds()}
}

// finish frees the slot of a grant and writes how it ended. L is the lease as it was last seen, or nil.
func (c *Client) finish(ctx context.Context, g backends.Grant, l *lease, e backends.End) error {
	p := c.place(g.Namespace, g.Lease)
	for range mostRounds {
		if l == nil {
			view, err := c.store.Read(ctx, p.lease())
			if err != nil {
				return err
			}
			if l, err = c.parse(p, view); err != nil {
				return err
			}
		}
		there, err := l.of(g)
		if err != nil {
			if e.Outcome == backends.OutcomeNotStarted { // and its hold has not
				return c.close(ctx, p, g.Slot, g.Term, stood(e))
			}
			return nil // it has ended
		}
		var t Txn
		t.check(p.doc(), l.version)
		t.same(there.pair)
		t.delete(there.pair.Key)
		t.delete(p.ask(g.Slot))
		if e.Outcome == backends.OutcomeNotStarted && l.holds[g.Slot] != nil {
			t.delete(p.hold(g.Slot))
		}
		written := l.doc.clone()
		s := slotDoc{Slot: g.Slot, Holder: there.Holder, Term: there.Term, Since: there.Since}
		written.Term = l.last()
		written.finish(p, &t, s, stood(e))
		t.put(p.doc(), stored(written), "")
		for _, put := range e.Puts {
			c.put(&t, p, put)
		}
		_, ok, err := c.store.Commit(ctx, t)
		if err != nil || ok {
			return err
		}
		if len(e.Puts) > 0 {
			if err := c.conflict(ctx, p, e.Puts); err != nil {
				if _, lost := c.inForce(ctx, p, g); errors.Is(lost, backends.ErrLost) {
					return nil // it has ended, and its records are nobody's
				}
				return err
			}
		}
		l = nil
	}
	return c.contended(p)
}

// close frees a slot and its hold, whoever has it, and writes how its holder ended. With a term it is that holder's alone.
func (c *Client) close(ctx context.Context, p place, slot int, term backends.Term, e end) error {
	for range mostRounds {
		view, err := c.store.Read(ctx, p.lease())
		if err != nil {
			return err
		}
		l, err := c.parse(p, view)
		if err != nil {
			return err
		}
		var t Txn
		t.check(p.doc(), l.version)
		if g := l.grants[slot]; g != nil && (term == 0 || g.Term == term) {
			t.same(g.pair)
			t.delete(g.pair.Key)
			t.delete(p.ask(slot))
		}
		if h := l.holds[slot]; h != nil && (term == 0 || h.Term == term) {
			t.same(h.pair)
			t.delete(h.pair.Key)
		}
		if s := l.doc.entry(slot); s.Open && (term == 0 || s.Term == term) {
			d := l.doc.clone()
			d.finish(p, &t, s, e)
			t.put(p.doc(), stored(d), "")
		}
		if len(t.Writes) == 0 {
			return nil
		}
		if _, ok, err := c.store.Commit(ctx, t); err != nil || ok {
			return err
		}
	}
	return c.contended(p)
}

// Ask implements [backends.Backend].
func (c *Client) Ask(ctx context.Context, namespace, name string, slot int, a backends.Ask) error {
	if err := backends.CheckNames(namespace, name); err != nil {
		return err
	}
	p := c.place(namespace, name)
	for range mostRounds {
		view, err := c.store.Read(ctx, p.slot(slot))
		if err != nil {
			return err
		}
		l, err := c.parse(p, view)
		if err != nil {
			return err
		}
		g, before := l.grants[slot], l.asks[slot]
		if g == nil || before.breaks() {
			return nil
		}
		var t Txn
		t.same(g.pair)
		t.put(p.ask(slot), stored(ask{Kind: string(a.Kind), Reason: a.Reason, By: a.By}), g.pair.Session)
		if before != nil {
			t.same(before.pair)
		} else {
			t.check(p.ask(slot), 0)
		}
		_, ok, err := c.store.Commit(ctx, t)
		if errors.Is(err, ErrGone) {
			return nil // the holder's session has ended, and he with it
		}
		if err != nil || ok {
			return err
		}
	}
	return c.contended(p)
}

// Break implements [backends.Backend].
func (c *Client) Break(ctx context.Context, namespace, name string, slot int, reason string, now bool) error {
	if !now {
		return c.Ask(ctx, namespace, name, slot, backends.Ask{Kind: backends.AskBreak, Reason: reason})
	}
	if err := backends.CheckNames(namespace, name); err != nil {
		return err
	}
	return c.close(ctx, c.place(namespace, name), slot, 0, unknown)
}
