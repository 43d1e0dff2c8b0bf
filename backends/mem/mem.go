// Package mem keeps leases in memory, for tests alone: it is the reference that says what every store has to do, and a
// store that can be told to fail.
//
// A [Server] is shared by any number of clients and lives as long as it is referred to. Its clock is that of the
// process, so that inside a bubble of testing/synctest it runs on the bubble's time; such a server has to be made inside
// the bubble. It supports the whole contract, the optional interfaces included.
//
// # Faults
//
// A client that was opened by a URL may have faults, one parameter each:
//
//	mem:?fault=renew:2:hang&fault=renew:3+:unavailable
//
// names the operation (acquire, renew, release, inspect, list, ask, break, put or any), which of this client's calls of
// it (2, 2-4, or 3+ for the third and all later ones, counted from 1), and what happens:
//
//	hang           no answer ever, and the context is ignored, until [Server.Free]
//	delay=900ms    the answer is late; the work is done at once, and the context is kept
//	delay!=900ms   the same, and the context is ignored
//	lose           the work is done and the answer is lost: unavailable
//	reset-after    another word for lose
//	reset-before   nothing is done: unavailable
//	unavailable    another word for reset-before
//	lost denied broken busy   nothing is done, and this is the answer
//	wipe           the lease is deleted from the server, and then the call goes on
//	stop break     its holders are asked for that, and then the call goes on
//
// Several faults of one call apply in the order of the URL. The parameter trace=/path appends one line to that file
// when a call begins and one when it ends: the operation, its number, the first 8 digits of the SHA-256 of the handle
// (or -), and "begin" or the result.
package mem

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/underlease/underlease/backends"
)

// Options are properties of a [Server].
type Options struct {
	Endless bool // a grant without a ttl lasts until it is released or its client is closed
}

// Server is the store that clients share.
type Server struct {
	options Options

	freed chan struct{} // closed by Free
	free  sync.Once

	mu     sync.Mutex
	leases map[id]*lease
	change chan struct{} // closed and made anew with every change
}

type id struct{ namespace, name string }

type lease struct {
	last    backends.Term
	version int64
	slots   map[int]*slot
	past    []backends.Past
	values  map[string]value
}

type slot struct {
	number  int
	term    backends.Term
	since   time.Time
	handle  string
	holder  string
	client  *Client
	ttl     time.Duration
	expires time.Time // zero: never
	kept    time.Time
	expired string // the handle of the holder whose end this was
	ask     *backends.Ask
	end     backends.End
}

type value struct {
	version int64
	written time.Time
	bytes   []byte
}

// NewServer returns an empty server.
func NewServer(o Options) *Server {
	return &Server{options: o, freed: make(chan struct{}), leases: map[id]*lease{}, change: make(chan struct{})}
}

// Free ends every call that hangs, with an error that the caller has long stopped waiting for.
func (s *Server) Free() { s.free.Do(func() { close(s.freed) }) }

// Wipe deletes a lease with everything that belongs to it, as an operator does.
func (s *Server) Wipe(namespace, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, id{namespace, name})
	s.changed()
}

// Open returns a new client without faults.
func (s *Server) Open() *backends.Store {
	return s.store(&Client{server: s, calls: map[string]int{}})
}

func (s *Server) store(c *Client) *backends.Store {
	return &backends.Store{Backend: c, Scheme: "mem", Address: "mem:", Identity: fmt.Sprintf("mem:%p", s), Endless: s.options.Endless}
}

// Scheme returns how `mem:` URLs are opened: as clients of s.
func Scheme(s *Server) backends.Scheme {
	return backends.Scheme{
		Endless: s.options.Endless,
		Open: func(_ context.Context, u *url.URL) (*backends.Store, error) {
			c := &Client{server: s, calls: map[string]int{}}
			if err := c.configure(u); err != nil {
				return nil, err
			}
			return s.store(c), nil
		},
	}
}

// changed wakes everybody who waits. The caller holds mu.
func (s *Server) changed() {
	close(s.change)
	s.change = make(chan struct{})
}

// lease returns the lease and makes it where there is none.
func (s *Server) lease(namespace, name string) *lease {
	l := s.leases[id{namespace, name}]
	if l == nil {
		l = &lease{slots: map[int]*slot{}, values: map[string]value{}}
		s.leases[id{namespace, name}] = l
	}
	return l
}

// held reports whether a grant is in force.
func (s *slot) held(now time.Time) bool {
	return s.handle != "" && (s.expires.IsZero() || now.Before(s.expires))
}

// left returns how long a slot stays taken unless renewed, or zero when it is free.
func (s *slot) left(now time.Time) time.Duration {
	kept := max(0, s.kept.Sub(now))
	switch {
	case !s.held(now):
		return kept
	case s.expires.IsZero():
		return backends.Forever
	default:
		return max(kept, s.expires.Sub(now))
	}
}

func (l *lease) carrying(handle string) *slot {
	for _, s := range l.slots {
		if handle != "" && s.handle == handle {
			return s
		}
	}
	return nil
}

func (l *lease) finish(s *slot, end backends.End) {
	end.Puts = nil
	if end.Outcome == "" {
		end.Outcome = backends.OutcomeUnknown
	}
	l.past = slices.Insert(l.past, 0, backends.Past{Slot: s.number, Term: s.term, Holder: s.holder, Since: s.since, End: end})
	l.past = l.past[:min(len(l.past), backends.HistoryLength)]
	s.end, s.handle, s.ask, s.client = end, "", nil, nil
}

// settle writes the ends of those that never said how they ended.
func (l *lease) settle(now time.Time) {
	for _, number := range l.numbers() {
		if s := l.slots[number]; s.handle != "" && !s.held(now) {
			s.expired = s.handle
			l.finish(s, backends.End{Outcome: backends.OutcomeUnknown})
		}
	}
}

func (l *lease) numbers() []int {
	var all []int
	for number := range l.slots {
		all = append(all, number)
	}
	slices.Sort(all)
	return all
}

func (l *lease) put(p backends.Put, now time.Time) (int64, error) {
	var there int64
	if v, ok := l.values[p.Key]; ok {
		there = v.version
	}
	if p.Version != backends.AnyVersion && p.Version != there {
		return 0, fmt.Errorf("%w: %q", backends.ErrConflict, p.Key)
	}
	l.version = max(l.version+1, now.UnixMilli())
	l.values[p.Key] = value{version: l.version, written: now, bytes: slices.Clone(p.Value)}
	return l.version, nil
}

// Client is a client of a [Server].
type Client struct {
	server *Server
	faults []fault
	trace  string

	mu    sync.Mutex
	calls map[string]int
}

var (
	_ backends.Backend = (*Client)(nil)
	_ backends.Waiter  = (*Client)(nil)
	_ backends.Watcher = (*Client)(nil)
)

// Acquire implements [backends.Backend].
func (c *Client) Acquire(ctx context.Context, req backends.Request) (g backends.Grant, err error) {
	if err := req.Check(c.server.options.Endless); err != nil {
		return g, err
	}
	err = c.call(ctx, "acquire", id{req.Namespace, req.Lease}, req.Handle, func() (err error) {
		g, err = c.acquire(req)
		return err
	})
	return orZero(g, err), err
}

func orZero(g backends.Grant, err error) backends.Grant {
	if err != nil {
		return backends.Grant{}
	}
	return g
}

func (c *Client) acquire(req backends.Request) (backends.Grant, error) {
	now, l := time.Now(), c.server.lease(req.Namespace, req.Lease)
	if s := l.carrying(req.Handle); s != nil && s.held(now) {
		return s.renew(now, backends.Grant{Namespace: req.Namespace, Lease: req.Lease, Holder: s.holder, Handle: req.Handle, Term: s.term, Slot: s.number, TTL: req.TTL})
	}
	l.settle(now)
	for _, s := range l.slots {
		if s.expired == req.Handle { // granted too late for its own run
			s.kept, s.expired = time.Time{}, ""
		}
	}
	busy := backends.BusyError{Namespace: req.Namespace, Lease: req.Lease}
	for number := range req.Slots {
		s := l.slots[number]
		if s == nil {
			s = &slot{number: number, end: backends.End{Outcome: backends.OutcomeNone}}
		}
		if left := s.left(now); left > 0 {
			if busy.Left == 0 || left < busy.Left {
				busy.Holder, busy.Slot, busy.Term, busy.Since = s.holder, number, s.term, s.since
				busy.Left, busy.Kept = left, !s.held(now)
			}
			continue
		}
		term, err := l.last.Next(now.UnixMilli())
		if err != nil {
			return backends.Grant{}, err
		}
		*s = slot{number: number, term: term, since: now, handle: req.Handle, holder: req.Holder, client: c, ttl: req.TTL, end: s.end}
		if req.TTL > 0 {
			s.expires = now.Add(req.TTL)
		}
		if req.Hold > 0 {
			s.kept = now.Add(req.Hold)
		}
		l.last, l.slots[number] = term, s
		c.server.changed()
		return backends.Grant{
			Namespace: req.Namespace, Lease: req.Lease, Holder: req.Holder, Handle: req.Handle,
			Slot: number, Term: term, TTL: req.TTL, Previous: s.end,
		}, nil
	}
	return backends.Grant{}, &busy
}

// renew counts the ttl anew and returns the grant as it stands now.
func (s *slot) renew(now time.Time, g backends.Grant) (backends.Grant, error) {
	switch {
	case s.handle == "" || s.handle != g.Handle || s.term != g.Term:
		return g, backends.Lost(nil, "slot %d names this holder no more", s.number)
	case !s.held(now):
		return g, backends.Lost(nil, "the grant has expired")
	case s.ask != nil && s.ask.Kind == backends.AskBreak:
		return g, backends.Lost(nil, "broken by an operator: %s", s.ask.Reason)
	}
	if s.ttl > 0 {
		s.expires = now.Add(s.ttl)
	}
	g.TTL, g.Previous, g.Ask = s.ttl, s.end, nil
	if s.ask != nil {
		ask := *s.ask
		g.Ask = &ask
	}
	return g, nil
}

// Renew implements [backends.Backend].
func (c *Client) Renew(ctx context.Context, g backends.Grant) (renewed backends.Grant, err error) {
	err = c.call(ctx, "renew", id{g.Namespace, g.Lease}, g.Handle, func() (err error) {
		s := c.server.lookup(g)
		if s == nil {
			return backends.Lost(nil, "there is no such grant")
		}
		renewed, err = s.renew(time.Now(), g)
		return err
	})
	return orZero(renewed, err), err
}

// lookup returns the slot of a grant without making anything.
func (s *Server) lookup(g backends.Grant) *slot {
	if l := s.leases[id{g.Namespace, g.Lease}]; l != nil {
		return l.slots[g.Slot]
	}
	return nil
}

// Release implements [backends.Backend].
func (c *Client) Release(ctx context.Context, g backends.Grant, end backends.End) error {
	for _, p := range end.Puts {
		if err := p.Check(); err != nil {
			return err
		}
	}
	return c.call(ctx, "release", id{g.Namespace, g.Lease}, g.Handle, func() error {
		now, l := time.Now(), c.server.leases[id{g.Namespace, g.Lease}]
		if l == nil {
			return nil
		}
		abandon := g.Term == 0
		nothing := abandon || end.Outcome == backends.OutcomeNotStarted
		s := l.carrying(g.Handle)
		if s == nil || !abandon && (s.term != g.Term || s.number != g.Slot) || !s.held(now) && !nothing {
			for _, s := range l.slots {
				if nothing && s.expired == g.Handle {
					s.kept, s.expired = time.Time{}, ""
					c.server.changed()
				}
			}
			return nil
		}
		next := lease{version: l.version, values: maps.Clone(l.values)}
		for _, p := range end.Puts {
			if _, err := next.put(p, now); err != nil {
				return err // and nothing is written
			}
		}
		l.version, l.values = next.version, next.values
		if abandon && end.Outcome == "" {
			end.Outcome = backends.OutcomeNotStarted
		}
		l.finish(s, end)
		if nothing {
			s.kept = time.Time{}
		}
		c.server.changed()
		return nil
	})
}

// Inspect implements [backends.Backend].
func (c *Client) Inspect(ctx context.Context, namespace, name string) (state backends.State, err error) {
	if err := backends.CheckNames(namespace, name); err != nil {
		return state, err
	}
	err = c.call(ctx, "inspect", id{namespace, name}, "", func() error {
		state = c.server.state(id{namespace, name})
		return nil
	})
	return state, err
}

func (s *Server) state(of id) backends.State {
	state := backends.State{Namespace: of.namespace, Lease: of.name}
	l, now := s.leases[of], time.Now()
	if l == nil {
		return state
	}
	l.settle(now)
	for _, number := range l.numbers() {
		s := l.slots[number]
		shown := backends.SlotState{Slot: number, Term: s.term, Held: s.held(now), Last: s.end, Left: s.left(now)}
		shown.Kept = !shown.Held && shown.Left > 0
		if shown.Taken() {
			shown.Holder, shown.Since = s.holder, s.since
		}
		if s.ask != nil {
			ask := *s.ask
			shown.Ask = &ask
		}
		state.Slots = append(state.Slots, shown)
	}
	state.History = slices.Clone(l.past)
	return state
}

// List implements [backends.Backend].
func (c *Client) List(ctx context.Context, namespace string) (states []backends.State, err error) {
	if err := backends.CheckNamespace(namespace); err != nil {
		return nil, &backends.ConfigError{Text: err.Error()}
	}
	err = c.call(ctx, "list", id{namespace: namespace}, "", func() error {
		for of := range c.server.leases {
			if of.namespace == namespace {
				state := c.server.state(of)
				state.History = nil
				states = append(states, state)
			}
		}
		slices.SortFunc(states, func(a, b backends.State) int { return strings.Compare(a.Lease, b.Lease) })
		return nil
	})
	return states, err
}

// Ask implements [backends.Backend].
func (c *Client) Ask(ctx context.Context, namespace, name string, number int, a backends.Ask) error {
	return c.call(ctx, "ask", id{namespace, name}, "", func() error {
		c.server.mark(id{namespace, name}, number, a)
		return nil
	})
}

// mark leaves a request for the holder of a slot.
func (s *Server) mark(of id, number int, a backends.Ask) {
	now := time.Now()
	if l := s.leases[of]; l != nil && l.slots[number] != nil && l.slots[number].held(now) {
		slot := l.slots[number]
		if slot.ask != nil && slot.ask.Kind == backends.AskBreak {
			return
		}
		a.At = now
		slot.ask = &a
		s.changed()
	}
}

// ask asks every holder of a lease.
func (s *Server) ask(of id, a backends.Ask) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leases[of]; l != nil {
		for number := range l.slots {
			s.mark(of, number, a)
		}
	}
}

// Break implements [backends.Backend].
func (c *Client) Break(ctx context.Context, namespace, name string, number int, reason string, now bool) error {
	of := id{namespace, name}
	return c.call(ctx, "break", of, "", func() error {
		if !now {
			c.server.mark(of, number, backends.Ask{Kind: backends.AskBreak, Reason: reason})
			return nil
		}
		if l := c.server.leases[of]; l != nil && l.slots[number] != nil {
			s := l.slots[number]
			if s.handle != "" {
				l.finish(s, backends.End{Outcome: backends.OutcomeUnknown})
			}
			s.kept = time.Time{}
			c.server.changed()
		}
		return nil
	})
}

// Close implements [backends.Backend]. On an endless server it ends the grants of this client that have no ttl, as the
// end of a process would.
func (c *Client) Close() error {
	s := c.server
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.options.Endless {
		return nil
	}
	for _, l := range s.leases {
		for _, slot := range l.slots {
			if slot.client == c && slot.handle != "" {
				l.finish(slot, backends.End{Outcome: backends.OutcomeUnknown})
			}
		}
	}
	s.changed()
	return nil
}

// WaitFree implements [backends.Waiter].
func (c *Client) WaitFree(ctx context.Context, req backends.Request) error {
	if err := req.Check(c.server.options.Endless); err != nil {
		return err
	}
	return c.server.wait(ctx, func(now time.Time) time.Duration {
		shortest := backends.Forever
		for number := range req.Slots {
			l := c.server.leases[id{req.Namespace, req.Lease}]
			if l == nil || l.slots[number] == nil {
				return 0
			}
			shortest = min(shortest, l.slots[number].left(now))
		}
		return shortest
	})
}

// WaitChange implements [backends.Watcher].
func (c *Client) WaitChange(ctx context.Context, g backends.Grant) error {
	return c.server.wait(ctx, func(now time.Time) time.Duration {
		s := c.server.lookup(g)
		if s == nil || s.handle != g.Handle || s.term != g.Term || !s.held(now) {
			return 0
		}
		if (s.ask == nil) != (g.Ask == nil) || s.ask != nil && *s.ask != *g.Ask {
			return 0
		}
		return backends.Forever
	})
}

// wait returns when ready says zero. It asks at every change of the server and when the time that ready said is over.
func (s *Server) wait(ctx context.Context, ready func(time.Time) time.Duration) error {
	for {
		s.mu.Lock()
		left, change := ready(time.Now()), s.change
		s.mu.Unlock()
		if err := ctx.Err(); err != nil {
			return err
		}
		if left <= 0 {
			return nil
		}
		var timer <-chan time.Time
		stop := func() bool { return false }
		if left < backends.Forever {
			t := time.NewTimer(left)
			timer, stop = t.C, t.Stop
		}
		select {
		case <-ctx.Done():
		case <-change:
		case <-timer:
		}
		stop()
	}
}

// Records implements [backends.Backend].
func (c *Client) Records() backends.Records { return records{c} }

type records struct{ c *Client }

func (r records) show(of id, key string, v value) backends.Record {
	return backends.Record{
		Namespace: of.namespace, Lease: of.name, Key: key, Value: slices.Clone(v.bytes), Version: v.version,
		Age: time.Since(v.written),
	}
}

// Get implements [backends.Records].
func (r records) Get(ctx context.Context, namespace, name, key string) (record backends.Record, err error) {
	of := id{namespace, name}
	err = r.c.call(ctx, "get", of, "", func() error {
		if l := r.c.server.leases[of]; l != nil {
			if v, ok := l.values[key]; ok {
				record = r.show(of, key, v)
				return nil
			}
		}
		return fmt.Errorf("%w: %q of %q", backends.ErrNoRecord, key, backends.Display(namespace, name))
	})
	return record, err
}

// Put implements [backends.Records].
func (r records) Put(ctx context.Context, namespace, name string, p backends.Put, while *backends.Grant) (version int64, err error) {
	if err := errors.Join(backends.CheckNames(namespace, name), p.Check()); err != nil {
		return 0, err
	}
	err = r.c.call(ctx, "put", id{namespace, name}, "", func() (err error) {
		now, s := time.Now(), r.c.server
		if while != nil {
			slot := s.lookup(backends.Grant{Namespace: namespace, Lease: name, Slot: while.Slot})
			if slot == nil || slot.handle != while.Handle || slot.term != while.Term || !slot.held(now) ||
				slot.ask != nil && slot.ask.Kind == backends.AskBreak {
				return backends.Lost(nil, "the grant is not in force")
			}
		}
		version, err = s.lease(namespace, name).put(p, now)
		return err
	})
	return version, err
}

// List implements [backends.Records].
func (r records) List(ctx context.Context, namespace, name string) (all []backends.Record, err error) {
	of := id{namespace, name}
	err = r.c.call(ctx, "get", of, "", func() error {
		if l := r.c.server.leases[of]; l != nil {
			for key, v := range l.values {
				all = append(all, r.show(of, key, v))
			}
		}
		slices.SortFunc(all, func(a, b backends.Record) int { return strings.Compare(a.Key, b.Key) })
		return nil
	})
	return all, err
}

// Delete implements [backends.Records].
func (r records) Delete(ctx context.Context, namespace, name, key string) error {
	return r.c.call(ctx, "put", id{namespace, name}, "", func() error {
		if l := r.c.server.leases[id{namespace, name}]; l != nil {
			delete(l.values, key)
		}
		return nil
	})
}
