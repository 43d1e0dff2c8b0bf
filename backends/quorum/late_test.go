package quorum

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
)

// shelf is a store in memory, which names sessions. A transaction can be held back: its sender hears nothing, and it comes later.
type shelf struct {
	sync.Mutex
	keys     map[string]Pair
	sessions map[string]bool
	version  int64

	hold bool // the next transaction is held back
	late *Txn // it

	before func() // the next transaction
}

func (s *shelf) Address() string                    { return "shelf:" }
func (s *shelf) Check(_, _ time.Duration) error     { return nil }
func (s *shelf) Name(seed string) string            { return seed }
func (s *shelf) Keep(context.Context, string) error { return nil }
func (s *shelf) Close() error                       { return nil }

func (s *shelf) Read(_ context.Context, prefix string) (v View, _ error) {
	s.Lock()
	defer s.Unlock()
	v.Version = s.version
	for _, key := range slices.Sorted(maps.Keys(s.keys)) {
		if strings.HasPrefix(key, prefix) {
			v.Pairs = append(v.Pairs, s.keys[key])
		}
	}
	return v, nil
}

func (s *shelf) Peek(ctx context.Context, prefix string) (View, error) { return s.Read(ctx, prefix) }

func (s *shelf) Begin(_ context.Context, seed string, ttl time.Duration) (Session, error) {
	s.Lock()
	defer s.Unlock()
	s.sessions[seed] = true
	return Session{ID: seed, TTL: ttl}, nil
}

func (s *shelf) End(_ context.Context, id string) error {
	s.Lock()
	defer s.Unlock()
	delete(s.sessions, id)
	for key, pair := range s.keys {
		if pair.Session == id {
			delete(s.keys, key)
		}
	}
	return nil
}

func (s *shelf) Left(_ context.Context, _ string, stated time.Duration) (time.Duration, error) {
	return stated, nil
}

func (s *shelf) Await(ctx context.Context, _ string, _ int64) error {
	<-ctx.Done()
	return ctx.Err()
}

func (s *shelf) Commit(_ context.Context, t Txn) (int64, bool, error) {
	s.Lock()
	before := s.before
	s.before = nil
	s.Unlock()
	if before != nil {
		before()
	}
	s.Lock()
	defer s.Unlock()
	if s.hold {
		s.hold, s.late = false, &t
		return 0, false, backends.Unavailable(nil, "shelf: no answer")
	}
	return s.commit(t)
}

func (s *shelf) commit(t Txn) (int64, bool, error) {
	for _, c := range t.Checks {
		if there := s.keys[c.Key]; there.Version != c.Version || c.Session != "" && there.Session != c.Session {
			return 0, false, nil
		}
	}
	for _, w := range t.Writes {
		if w.Session != "" && !s.sessions[w.Session] {
			return 0, false, ErrGone
		}
	}
	s.version++
	for _, w := range t.Writes {
		if w.Delete {
			delete(s.keys, w.Key)
			continue
		}
		s.keys[w.Key] = Pair{Key: w.Key, Value: w.Value, Session: w.Session, Version: s.version, Created: s.version}
	}
	return s.version, true, nil
}

// C08: session and transaction of an acquisition that was abandoned arrive when everything is over, both of them. The lease stays free,
// whether somebody had it before or not.
func TestWhatComesAfterItWasAbandonedTakesNothing(t *testing.T) {
	for _, used := range []bool{false, true} {
		s := &shelf{keys: map[string]Pair{}, sessions: map[string]bool{}}
		c := New(s, Options{Root: "ul"})
		req := backends.Request{Lease: "l", Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: time.Minute}
		last := backends.Term(0)
		if used {
			g, err := c.Acquire(t.Context(), req)
			if err == nil {
				err = c.Release(t.Context(), g, backends.End{Outcome: "ok"})
			}
			if err != nil {
				t.Fatal(err)
			}
			last, req.Handle = g.Term, backends.NewHandle()
		}
		s.hold = true
		if _, err := c.Acquire(t.Context(), req); !errors.Is(err, backends.ErrUnavailable) {
			t.Fatalf("Acquire: got %v, want unavailable", err)
		}
		if err := c.Release(t.Context(), backends.Grant{Lease: "l", Handle: req.Handle}, backends.End{}); err != nil {
			t.Fatalf("abandon: got %v, want nil", err)
		}
		s.sessions[s.Name(grantSeed(digest("", "l", req.Handle)))] = true // the request that makes it comes late, too
		if _, ok, err := s.commit(*s.late); ok || err != nil {
			t.Errorf("used %t: the late transaction: got %t, %v, want that it compares with what is there no more", used, ok, err)
		}
		list, err := c.List(t.Context(), "")
		if want := map[bool]int{false: 0, true: 1}[used]; err != nil || len(list) != want {
			t.Errorf("used %t: List: got %+v, %v, want %d", used, list, err, want)
		}
		req.Handle = backends.NewHandle()
		if g, err := c.Acquire(t.Context(), req); err != nil || g.Term <= last {
			t.Errorf("used %t: Acquire: got the term %d, %v, want the lease and more than %d", used, g.Term, err, last)
		}
	}
}

// A session that comes after the transaction that needs it costs another try, and nothing else.
func TestATransactionMayOvertakeItsSession(t *testing.T) {
	s := &slow{shelf: shelf{keys: map[string]Pair{}, sessions: map[string]bool{}}, gone: make(chan struct{})}
	c := New(s, Options{Root: "ul"})
	req := backends.Request{Lease: "l", Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: time.Minute}
	g, err := c.Acquire(t.Context(), req)
	if err != nil || s.tries != 2 {
		t.Fatalf("Acquire: got %v after %d transactions, want a grant after two", err, s.tries)
	}
	if _, err := c.Renew(t.Context(), g); err != nil {
		t.Errorf("Renew: got %v, want the grant", err)
	}
	other := req
	other.Handle = backends.NewHandle()
	if _, err := c.Acquire(t.Context(), other); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire: got %v, want busy", err)
	}
}

// slow is a shelf that makes the first session when a transaction has not found it.
type slow struct {
	shelf
	gone  chan struct{}
	tries int
}

func (s *slow) Begin(ctx context.Context, seed string, ttl time.Duration) (Session, error) {
	<-s.gone
	return s.shelf.Begin(ctx, seed, ttl)
}

func (s *slow) Commit(ctx context.Context, t Txn) (int64, bool, error) {
	s.tries++
	version, ok, err := s.shelf.Commit(ctx, t)
	if s.tries == 1 {
		close(s.gone)
	}
	return version, ok, err
}

// Clocks that are wrong in both directions: a list by a host that is ahead forgets a lease early, and who acquires next is behind. Terms
// grow all the same, also of a client that had seen the lease before.
func TestTermsGrowOverAListByAHostThatIsAhead(t *testing.T) {
	s := &shelf{keys: map[string]Pair{}, sessions: map[string]bool{}}
	at := func(ahead time.Duration) *Client {
		return New(s, Options{Root: "ul", Now: func() time.Time { return time.Now().Add(ahead) }})
	}
	behind, ahead := at(-time.Hour), at(8*24*time.Hour)
	req := backends.Request{Namespace: "ns", Lease: "l", Holder: "somebody", Slots: 1, TTL: time.Minute}
	last := backends.Term(0)
	run := func(c *Client, lease string) {
		t.Helper()
		req.Lease, req.Handle = lease, backends.NewHandle()
		g, err := c.Acquire(t.Context(), req)
		if err == nil {
			err = c.Release(t.Context(), g, backends.End{Outcome: "ok"})
		}
		if err != nil || g.Term <= last {
			t.Fatalf("a run: got the term %d, %v, want more than %d", g.Term, err, last)
		}
		last = g.Term
	}
	forgets := func() {
		t.Helper()
		if list, err := ahead.List(t.Context(), "ns"); err != nil || len(list) != 0 {
			t.Fatalf("List by the host that is ahead: got %+v, %v, want that nothing is left", list, err)
		}
	}
	run(at(0), "l")
	for range 3 {
		forgets()
		run(behind, "l")
	}
	forgets()
	run(at(-2*time.Hour), "l")
	// An acquisition that was abandoned goes on from there, too.
	forgets()
	s.hold = true
	req.Handle = backends.NewHandle()
	if _, err := behind.Acquire(t.Context(), req); !errors.Is(err, backends.ErrUnavailable) {
		t.Fatalf("Acquire: got %v, want unavailable", err)
	}
	if err := behind.Release(t.Context(), backends.Grant{Namespace: "ns", Lease: "l", Handle: req.Handle}, backends.End{}); err != nil {
		t.Fatalf("abandon: got %v, want nil", err)
	}
	run(at(-3*time.Hour), "l")
}

// One client serves calls that come at once, as one process may take several leases.
func TestOneClientServesManyCallsAtOnce(t *testing.T) {
	s := &shelf{keys: map[string]Pair{}, sessions: map[string]bool{}}
	c := New(s, Options{Root: "ul"})
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for k := range 50 {
				g, err := c.Acquire(t.Context(), backends.Request{
					Lease: fmt.Sprintf("l%d-%d", i, k), Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: time.Minute, Hold: time.Minute,
				})
				if err == nil {
					_, err = c.Renew(t.Context(), g)
				}
				if err == nil && k%2 == 0 {
					err = c.Release(t.Context(), g, backends.End{Outcome: "ok"})
				}
				if err != nil {
					t.Errorf("a run: got %v, want nil", err)
				}
			}
		})
	}
	all.Wait()
}

// A run that finds the lease busy leaves nothing behind that would stay for long, whether it sees that at once or somebody is faster.
func TestABusyRunLeavesNoLongSessionBehind(t *testing.T) {
	for _, name := range []string{"names", "chooses"} {
		shelf := &shelf{keys: map[string]Pair{}, sessions: map[string]bool{}}
		s := Store(shelf)
		if name == "chooses" {
			s = &chooses{Store: shelf}
		}
		holder, other := New(s, Options{Root: "ul"}), New(s, Options{Root: "ul"})
		req := func() backends.Request {
			return backends.Request{Lease: "l", Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: time.Hour, Hold: 24 * time.Hour}
		}
		first, err := holder.Acquire(t.Context(), req())
		if err != nil {
			t.Fatal(err)
		}
		if n := len(shelf.sessions); n != 2 {
			t.Fatalf("%s: %d sessions of a holder with a hold, want two", name, n)
		}
		busy := func(c *Client, r backends.Request, when string) {
			t.Helper()
			if _, err := c.Acquire(t.Context(), r); !errors.Is(err, backends.ErrBusy) {
				t.Errorf("%s: Acquire %s: got %v, want busy", name, when, err)
			}
			if n := len(shelf.sessions); n != 2 {
				t.Errorf("%s: %d sessions after a busy attempt %s, want the two of the holder", name, n, when)
			}
		}
		again := req()
		for range 3 {
			busy(other, again, "of the same handle")
			busy(other, req(), "of another handle")
		}
		// The lease is free while it is looked at, and taken before the slot is asked for.
		if err := holder.Release(t.Context(), first, backends.End{Outcome: backends.OutcomeNotStarted}); err != nil {
			t.Fatal(err)
		}
		shelf.sessions = map[string]bool{}
		shelf.before = func() {
			if _, err := holder.Acquire(t.Context(), req()); err != nil {
				t.Error(err)
			}
		}
		busy(other, req(), "that somebody was faster than")
		if g, err := other.Acquire(t.Context(), backends.Request{
			Lease: "m", Holder: "somebody", Handle: again.Handle, Slots: 1, TTL: time.Hour, Hold: time.Hour,
		}); err != nil || g.TTL != time.Hour {
			t.Errorf("%s: Acquire of a free one: got %+v, %v, want a grant of an hour", name, g, err)
		}
	}
}

// chooses is a store that names its sessions itself, and shows nothing that is old, as Consul.
type chooses struct {
	Store
	made atomic.Int32
}

func (s *chooses) Name(string) string { return "" }

func (s *chooses) Begin(ctx context.Context, _ string, ttl time.Duration) (Session, error) {
	return s.Store.Begin(ctx, fmt.Sprint("session ", s.made.Add(1)), ttl)
}
