//go:build linux

// Package tabletest has what every store in a database has to bear beside the suite of package backendtest: lost answers, lost
// tables, clocks that are set, and others who make the same tables at the same time. A store's test hands [Run] a [Harness].
package tabletest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// Server is a database server under control of a test.
type Server interface {
	Addr() string
	Do(sql string) string
	TryDo(ctx context.Context, sql string) (string, error)
	SetClock(ahead time.Duration)
	Freeze()
	Resume()
	Kill()
	Restart()
}

// Options are what makes a server special.
type Options struct {
	Clock bool   // its wall clock can be set
	Zone  string // its time zone
}

// Harness is what has to be known about a kind of database.
type Harness struct {
	Start func(t *testing.T, o Options) Server
	URL   func(addr string) string
	Open  func(t testing.TB, url string) *backends.Store

	Words faults.Words

	Greeting int                                    // round trips until a connection stands
	Busy     int                                    // round trips to be told that a lease is busy
	Columns  string                                 // term and documents of all leases, in SQL
	Where    func(namespace, lease string) string   // the condition of a lease's row
	Stuff    func(namespace string, n int) []string // SQL that makes n rows of free leases, row-000000 and so on
	Mark     string                                 // SQL that writes a marker: for lease, term and namespace
	Sleeping string                                 // SQL that sleeps for a second
	Waiting  string                                 // SQL that counts those who wait for a row
	Collide  map[string]string                      // SQL that makes two of three writes fail because of others, by what that is called
	Rest     string                                 // SQL that undoes it
}

// Run runs every case as a subtest of its own.
func Run(t *testing.T, h Harness) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Harness)
	}{
		{"StatementsAreCounted", counted},
		{"ALostAnswerIsSettledByTheHandle", lostAnswers},
		{"ABlackHoleCostsEachCallItsLimitAndNoMore", blackHole},
		{"ACancelledCallReturnsAtOnce", cancelled},
		{"SixteenMakeTheTablesAtOnce", sixteen},
		{"TermsGrowOverALostStore", lostStore},
		{"WhatIsNotOursIsNotTouched", foreign},
		{"AServerAnHourAwayKeepsLeasesAsLong", hourAway},
		{"AServersClockIsSetWhileALeaseIsHeld", clockSet},
		{"ManyRowsAreBoundedAndFound", manyRows},
		{"ZonesDoNotMatter", zones},
		{"AThousandSlots", thousand},
		{"WhatChangesNothingIsNoLoss", unchanged},
		{"CollisionsAreTriedAgain", collisions},
		{"AMarkerOfAJobIsThereWithItsWork", marks},
		{"WhatOnlyReadsMakesNothing", readsOnly},
		{"WhatWasGivenBackIsNotGrantedLate", givenBack},
		{"AnAcquisitionThatWaitsInTheServerIsAbandoned", waitsForRow},
		{"WhatCannotBeShownHidesNothing", damaged},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // each has its own server, and most wait most of the time
			c.test(t, h)
		})
	}
}

// limits of the calls of a run.
var limits = faults.Limits{Acquire: 2 * time.Second, Renew: time.Second, Calm: 20 * time.Second, Armed: 4 * time.Second}

// The calls within these limits: see [faults.Limits].
var (
	Request  = faults.Request
	Acquire  = limits.TryAcquire
	Granted  = limits.Granted
	Answered = limits.Answered
	Renew    = limits.TryRenew
	Renewed  = limits.Renewed
	release  = limits.Released
)

// counted: what each operation costs, once the tables are there; nobody looks whether they are.
func counted(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	first := h.Open(t, h.URL(server.Addr()))
	if err := release(t, first, Granted(t, first, Request("l"))); err != nil {
		t.Fatal(err)
	}
	p := proxy.New(t, server.Addr())
	s := h.Open(t, h.URL(p.Addr()))
	if got := p.Made(); got != 0 {
		t.Errorf("%d connections by opening, want none", got)
	}
	g := Granted(t, s, Request("l"))
	if got := p.Trips(); got != h.Greeting+1 {
		t.Errorf("%d round trips to the grant, want %d", got, h.Greeting+1)
	}
	if _, err := Answered(t, s, Request("l")); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire: got %v, want busy", err)
	}
	if got := p.Trips(); got != h.Busy {
		t.Errorf("%d round trips to be busy, want %d", got, h.Busy)
	}
	if err := Renewed(t, s, g); err != nil {
		t.Errorf("Renew: %v", err)
	}
	if got := p.Trips(); got != 1 {
		t.Errorf("%d round trips for a renewal, want 1", got)
	}
	if err := release(t, s, g); err != nil {
		t.Errorf("Release: %v", err)
	}
	if got := p.Trips(); got != 1 {
		t.Errorf("%d round trips for a release, want 1", got)
	}
	if got := p.Made(); got != 0 { // those of the grant were counted by the first look
		t.Logf("%d connections", got)
	}
}

// C05, C08.
func lostAnswers(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	open := func(addr string) *backends.Store { return h.Open(t, h.URL(addr)) }
	first := open(server.Addr())
	if err := release(t, first, Granted(t, first, Request("warm"))); err != nil { // the tables are there
		t.Fatal(err)
	}
	limits.LostAnswers(t, server.Addr(), open, h.Words)
}

// givenBack: a statement of an acquisition that comes after its handle was given back.
func givenBack(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s, other := h.Open(t, h.URL(server.Addr())), h.Open(t, h.URL(server.Addr()))
	for _, slots := range []int{1, 2} {
		for _, what := range []string{"abandoned", "released", "never granted"} {
			lease := fmt.Sprintf("%s of %d", what, slots)
			req := Request(strings.ReplaceAll(lease, " ", "-"))
			req.Slots, req.Hold = slots, time.Hour
			back := backends.Grant{Lease: req.Lease, Handle: req.Handle}
			switch what {
			case "abandoned":
				Granted(t, s, req)
			case "released":
				req.Hold = 0
				back = Granted(t, s, req)
			}
			for range 2 { // the answer to the first may be lost, too
				if err := s.Release(t.Context(), back, backends.End{}); err != nil {
					t.Fatalf("%s: Release: got %v, want nil", lease, err)
				}
			}
			if g, err := Answered(t, other, req); !errors.Is(err, backends.ErrLost) {
				t.Errorf("%s: got %+v and %v for a handle that was given back, want lost", lease, g, err)
			}
			Granted(t, other, Request(req.Lease))
			state, err := other.Inspect(t.Context(), "", req.Lease)
			want := 1
			if what == "never granted" {
				want = 0
			}
			if err != nil || len(state.History) != want {
				t.Errorf("%s: history: got %+v and %v, want %d ends", lease, state.History, err, want)
			}
		}
	}
	// Those that nothing was granted to take no room from the history.
	for range backends.HistoryLength {
		if err := release(t, s, Granted(t, s, Request("long"))); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 {
		if err := s.Release(t.Context(), backends.Grant{Lease: "long", Handle: backends.NewHandle()}, backends.End{}); err != nil {
			t.Fatal(err)
		}
	}
	if state, err := s.Inspect(t.Context(), "", "long"); err != nil || len(state.History) != backends.HistoryLength {
		t.Errorf("history: got %d ends and %v, want %d", len(state.History), err, backends.HistoryLength)
	}
}

// waitsForRow: somebody locks the row, and the sender of an acquisition has gone when it comes to its turn.
func waitsForRow(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	p := proxy.New(t, server.Addr())
	s, other := h.Open(t, h.URL(p.Addr())), h.Open(t, h.URL(server.Addr()))
	if err := release(t, s, Granted(t, s, Request("l"))); err != nil {
		t.Fatal(err)
	}
	locked := func() bool {
		_, err := server.TryDo(t.Context(), "SELECT term FROM underlease FOR UPDATE NOWAIT")
		return err != nil
	}
	eventually := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not %s after 20 s", what)
			}
		}
	}
	waiting := func() bool { return server.Do(h.Waiting) != "0" }

	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		lock := "BEGIN; SELECT term FROM underlease FOR UPDATE; " + strings.Repeat(h.Sleeping+"; ", 8) + "ROLLBACK"
		if _, err := server.TryDo(t.Context(), lock); err != nil {
			t.Errorf("the lock: %v", err)
		}
	})
	eventually("locked", locked)
	req := Request("l")
	req.Hold = time.Hour
	wg.Go(func() {
		if _, err := s.Acquire(t.Context(), req); !errors.Is(err, backends.ErrUnavailable) {
			t.Errorf("Acquire: got %v, want unavailable", err)
		}
	})
	eventually("waiting", waiting)
	p.BlackHole(proxy.Requests | proxy.Answers) // nothing that would cancel it comes through
	p.Cut()

	abandon := func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return other.Release(ctx, backends.Grant{Lease: "l", Handle: req.Handle}, backends.End{})
	}
	if err := abandon(300 * time.Millisecond); err == nil && locked() {
		t.Error("abandon: got nil while the row was locked, want an error")
	}
	if err := abandon(30 * time.Second); err != nil {
		t.Errorf("abandon: got %v, want nil", err)
	}
	eventually("served", func() bool { return !waiting() })
	state, err := other.Inspect(t.Context(), "", "l")
	if err != nil || len(state.Slots) != 1 || state.Slots[0].Taken() {
		t.Errorf("state: got %+v and %v, want a free slot", state.Slots, err)
	}
	Granted(t, other, Request("l"))
}

func blackHole(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	p := proxy.New(t, server.Addr())
	s := h.Open(t, h.URL(p.Addr()))
	g := limits.BlackHole(t, p, server, s)
	// C67: a connection that the server has closed while nobody used it is seen before it is used.
	time.Sleep(1100 * time.Millisecond) // for so long none is looked at
	p.Cut()
	if err := Renewed(t, s, g); err != nil {
		t.Errorf("Renew after a cut that is long ago: got %v, want the grant", err)
	}
}

func cancelled(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	limits.Cancelled(t, server, h.Open(t, h.URL(server.Addr())), 5*time.Second)
}

// C68: the tables are made by whoever comes first, and once.
func sixteen(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	for round := range 3 {
		if round > 0 {
			server.Do("DROP TABLE underlease; DROP TABLE underlease_fences; DROP TABLE underlease_schema")
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		grants := 0
		for i := range 16 {
			s := h.Open(t, h.URL(server.Addr()))
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, err := s.Acquire(ctx, Request("l"))
				if err != nil && !errors.Is(err, backends.ErrBusy) {
					t.Errorf("round %d, client %d: Acquire: got %v, want a grant or busy", round, i, err)
				}
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					grants++
				}
			})
		}
		wg.Wait()
		if grants != 1 {
			t.Errorf("round %d: got %d grants, want 1", round, grants)
		}
		if got := server.Do("SELECT count(*), max(version) FROM underlease_schema"); got != "1|1" && got != "1\t1" {
			t.Errorf("round %d: got %q rows and version, want 1 and 1", round, got)
		}
	}
}

// C10, C15: terms grow over the loss of everything, and a holder is told.
func lostStore(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	last := backends.Term(0)
	for i, lose := range []string{"", "DELETE FROM underlease", "DROP TABLE underlease", "UPDATE underlease SET slots = '[]'"} {
		var g backends.Grant
		if lose != "" {
			g = Granted(t, s, Request("l"))
			last = g.Term
			server.Do(lose)
			for range 2 {
				if err := Renewed(t, s, g); !errors.Is(err, backends.ErrLost) {
					t.Errorf("loss %d: Renew: got %v, want ErrLost", i, err)
				}
			}
			if err := release(t, s, g); err != nil {
				t.Errorf("loss %d: Release: got %v, want nil", i, err)
			}
		}
		g = Granted(t, s, Request("l"))
		if g.Term <= last {
			t.Errorf("loss %d: term: got %d, want more than %d", i, g.Term, last)
		}
		last = g.Term
		if err := release(t, s, g); err != nil {
			t.Fatal(err)
		}
	}
	g := Granted(t, s, Request("l"))
	server.Kill()
	if err := Renew(t, s, g); !errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("Renew of a dead server: got %v, want unavailable", err)
	}
	server.Restart()
	servers.Within(t, 30*time.Second, "a renewal", func() error { return Renew(t, s, g) })
}

// A damaged row and a newer one are left as they are.
func foreign(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	for name, c := range map[string]struct{ set, text, hint string }{
		"newer":   {"form = 2", "form 2 of a newer version", "update underlease"},
		"slot":    {`slots = '[{}]'`, "slot 0 cannot be read", "delete it"},
		"slots":   {`slots = '[7]'`, "damaged", "look at"},
		"largest": {"term = 9007199254740991", "no room for a larger one", "look at"},
	} {
		g := Granted(t, s, Request(name))
		if name == "largest" {
			if err := release(t, s, g); err != nil {
				t.Fatal(err)
			}
		}
		server.Do("UPDATE underlease SET " + c.set + " " + h.Where("", name))
		look := "SELECT " + h.Columns + " FROM underlease " + h.Where("", name)
		before := server.Do(look)
		_, err := Answered(t, s, Request(name))
		if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), c.text) || !strings.Contains(backends.Hint(err), c.hint) {
			t.Errorf("%s: Acquire: got %v with the hint %q, want broken with %q and %q", name, err, backends.Hint(err), c.text, c.hint)
		}
		if err := Renewed(t, s, g); name != "largest" && !errors.Is(err, backends.ErrBroken) {
			t.Errorf("%s: Renew: got %v, want broken", name, err)
		}
		if got := server.Do(look); got != before {
			t.Errorf("%s: the row was changed: got %s, want %s", name, got, before)
		}
	}
}

// late is how late a busy machine may be. What is looked for is an hour, or for ever.
const late = 5 * time.Second

// C63.
func hourAway(t *testing.T, h Harness) {
	server := h.Start(t, Options{Clock: true})
	for _, ahead := range []time.Duration{-time.Hour, time.Hour} {
		server.SetClock(ahead)
		s := h.Open(t, h.URL(server.Addr()))
		lease := fmt.Sprint("l", ahead)
		Granted(t, s, Request("warm"+lease))
		req := Request(lease)
		req.TTL = 3 * time.Second // so that it is looked at, and renewed, before its end
		begun := time.Now()
		g := Granted(t, s, req)
		if by := time.UnixMilli(int64(g.Term)).Sub(begun) - ahead; by < -time.Minute || by > time.Minute {
			t.Errorf("%v ahead: term: got %d, want the server's clock", ahead, g.Term)
		}
		_, err := Answered(t, s, Request(lease))
		if busy, ok := errors.AsType[*backends.BusyError](err); !ok || busy.Left <= 0 || busy.Left > req.TTL {
			t.Errorf("%v ahead: Acquire: got %v, want busy for at most %v", ahead, err, req.TTL)
		}
		begun = time.Now()
		if err := Renewed(t, s, g); err != nil {
			t.Errorf("%v ahead: Renew: got %v, want the grant", ahead, err)
		}
		next := Request(lease) // of all attempts: one whose answer came too late may have it
		servers.Within(t, 30*time.Second, "the lease is free", func() error {
			_, err := Acquire(t, s, next)
			return err
		})
		if took := time.Since(begun); took < req.TTL-5*time.Millisecond || took > req.TTL+late {
			t.Errorf("%v ahead: free after %v, want the ttl of %v", ahead, took, req.TTL)
		}
	}
}

// A clock that is set back delays a lease by one ttl; one that is set forward frees it early, and its holder is told.
func clockSet(t *testing.T, h Harness) {
	server := h.Start(t, Options{Clock: true})
	s := h.Open(t, h.URL(server.Addr()))
	Granted(t, s, Request("warm"))
	req := Request("l")
	req.TTL = 3 * time.Second // so that it is renewed before its end
	g := Granted(t, s, req)
	server.SetClock(-time.Hour)
	begun := time.Now()
	for range 3 {
		if err := Renewed(t, s, g); err != nil {
			t.Errorf("Renew after the clock was set back: got %v, want the grant", err)
		}
	}
	var next backends.Grant
	within := func(what string, least, most time.Duration) {
		t.Helper()
		again := Request("l") // of all attempts
		servers.Within(t, 30*time.Second, "the lease is free", func() (err error) {
			next, err = Acquire(t, s, again)
			return err
		})
		if took := time.Since(begun); took < least-5*time.Millisecond || took > most {
			t.Errorf("%s: free after %v, want %v to %v", what, took, least, most)
		}
	}
	within("renewed", req.TTL, req.TTL+late)
	if next.Term <= g.Term {
		t.Errorf("term: got %d, want more than %d", next.Term, g.Term)
	}
	// Set back again, and nobody renews: whoever looks cuts what is too far away.
	if err := release(t, s, next); err != nil {
		t.Fatal(err)
	}
	Granted(t, s, req)
	server.SetClock(-2 * time.Hour)
	begun = time.Now()
	within("not renewed", 0, req.TTL+late)
	server.SetClock(time.Hour)
	last := Granted(t, s, Request("l"))
	if last.Term <= next.Term {
		t.Errorf("term: got %d, want more than %d", last.Term, next.Term)
	}
	if err := Renewed(t, s, next); !errors.Is(err, backends.ErrLost) {
		t.Errorf("Renew of the grant that the clock has ended: got %v, want ErrLost", err)
	}
}

// C62: rows go by themselves, those with records stay.
func manyRows(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	g := Granted(t, s, Request("first"))
	if err := release(t, s, g); err != nil {
		t.Fatal(err)
	}
	const old = 40
	for _, sql := range h.Stuff("old", old) {
		server.Do(sql)
	}
	if _, err := s.Records().Put(t.Context(), "old", "row-000000", backends.Put{Key: "k"}, nil); err != nil {
		t.Fatal(err)
	}
	count := func() string { return server.Do("SELECT count(*) FROM underlease") }
	for i := range old {
		if err := release(t, s, Granted(t, s, Request(fmt.Sprintf("new-%d", i)))); err != nil {
			t.Fatal(err)
		}
	}
	// Every new lease has made room for two; what has a record stays, and so does what was used today.
	if got, want := count(), fmt.Sprint(1+1+old); got != want {
		t.Errorf("rows: got %s, want %s", got, want)
	}
	if err := s.Records().Delete(t.Context(), "old", "row-000000", "k"); err != nil {
		t.Fatal(err)
	}
	if got := server.Do("SELECT gone < 2147483647 FROM underlease " + h.Where("old", "row-000000")); got != "t" && got != "1" {
		t.Errorf("a row without its records: got %q, want one that goes", got)
	}
}

// Zones that the server or the session may have change nothing: neither does the hour that a clock leaves out.
func zones(t *testing.T, h Harness) {
	for _, zone := range []string{"+09:00", "Europe/Berlin"} {
		server := h.Start(t, Options{Clock: true, Zone: zone})
		// The last Sunday of a March, 01:59:58 UTC plus a second: in Berlin there is no time between two and three.
		gap := time.Date(2027, time.March, 28, 0, 59, 58, 0, time.UTC)
		server.SetClock(time.Until(gap))
		s, other := h.Open(t, h.URL(server.Addr())), h.Open(t, h.URL(server.Addr()))
		req := Request("l")
		req.TTL = 10 * time.Second // so that a renewal that comes late is in time
		g := Granted(t, s, req)
		if by := time.UnixMilli(int64(g.Term)).Sub(gap); by < -time.Second || by > time.Minute {
			t.Errorf("%s: term: got %v, want about %v", zone, time.UnixMilli(int64(g.Term)).UTC(), gap)
		}
		for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) { // over the gap
			if err := Renewed(t, s, g); err != nil {
				t.Fatalf("%s: Renew: got %v, want the grant", zone, err)
			}
			if _, err := Answered(t, other, Request("l")); !errors.Is(err, backends.ErrBusy) {
				t.Fatalf("%s: Acquire by another: got %v, want busy", zone, err)
			}
		}
		if err := release(t, s, g); err != nil {
			t.Errorf("%s: Release: got %v, want nil", zone, err)
		}
		Granted(t, other, Request("l"))
	}
}

func thousand(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	for i := range 5 {
		req := Request("l")
		req.Slots = 1000
		begun := time.Now()
		g := Granted(t, s, req)
		t.Logf("slot %d after %v", g.Slot, time.Since(begun))
		if g.Slot != i {
			t.Errorf("slot: got %d, want %d", g.Slot, i)
		}
		if err := Renewed(t, s, g); err != nil {
			t.Errorf("Renew: got %v, want the grant", err)
		}
	}
}

// Renewals within one millisecond write the expiry that is there already.
func unchanged(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	var wg sync.WaitGroup
	first := h.Open(t, h.URL(server.Addr()))
	g := Granted(t, first, Request("l"))
	for range 4 {
		s := h.Open(t, h.URL(server.Addr()))
		wg.Go(func() {
			for range 100 {
				if _, err := s.Renew(t.Context(), g); err != nil {
					t.Errorf("Renew: got %v, want the grant", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// A marker that a job writes in its own transaction is that of its gate, and is there if and when the transaction commits.
func marks(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	for _, namespace := range []string{"", "a/b"} {
		begin := func() backends.Grant {
			t.Helper()
			r := Request("v3")
			r.Namespace = namespace
			return Granted(t, s, r)
		}
		mark := func(term backends.Term, more, end string) error {
			_, err := server.TryDo(ctx, "BEGIN; "+fmt.Sprintf(h.Mark, "v3", term, namespace)+"; "+more+end)
			return err
		}
		get := func() (backends.Record, error) { return s.Records().Get(ctx, namespace, "v3", "marker") }
		refused := func(what string, err error, text string) {
			t.Helper()
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%q: %s: got %v, want an error with %q", namespace, what, err, text)
			}
		}
		old := begin()
		if err := mark(old.Term, "", "ROLLBACK"); err != nil {
			t.Errorf("%q: a marker that is rolled back: got %v, want nil", namespace, err)
		}
		if rec, err := get(); !errors.Is(err, backends.ErrNoRecord) {
			t.Errorf("%q: after the rollback: got %+v, %v, want no marker", namespace, rec, err)
		}
		refused("a term that was never given", mark(old.Term+1_000_000, "", "ROLLBACK"), "nobody holds")
		if err := s.Break(ctx, namespace, "v3", 0, "", true); err != nil {
			t.Fatal(err)
		}
		refused("a grant that has ended", mark(old.Term, "", "COMMIT"), "nobody holds")

		// Two run, and the transaction of the old one is open: the new one waits for it, and then its work is not done twice.
		old = begin()
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := mark(old.Term, strings.Repeat(h.Sleeping+"; ", 4), "COMMIT"); err != nil { // for so long that it is seen
				t.Errorf("%q: the old one: got %v, want nil", namespace, err)
			}
		})
		servers.Within(t, 30*time.Second, "the old one has written", func() error {
			if got := server.Do(sleepers[h.Sleeping]); got == "0" {
				return errors.New("not yet")
			}
			return nil
		})
		// Within less than what is left of the transaction: a renewal that waits for its end is not back.
		if _, err := faults.Try(t, 2500*time.Millisecond, func(ctx context.Context) (backends.Grant, error) { return s.Renew(ctx, old) }); err != nil {
			t.Errorf("%q: Renew while the transaction is open: got %v, want the grant", namespace, err)
		}
		if err := s.Break(ctx, namespace, "v3", 0, "", true); err != nil {
			t.Fatal(err)
		}
		now := begin()
		refused("the new one", mark(now.Term, "", "COMMIT"), "is applied already")
		wg.Wait()

		first, err := get()
		var form struct { // of package runner
			Version int           `json:"version"`
			Term    backends.Term `json:"term"`
			Holder  string        `json:"holder"`
			RunID   string        `json:"run_id"`
			At      int64         `json:"at_ms"`
			Took    int64         `json:"took_ms"`
			Until   int64         `json:"until_ms"`
		}
		if err := json.Unmarshal(first.Value, &form); err != nil {
			t.Errorf("%q: the marker %s: %v", namespace, first.Value, err)
		}
		if form.Version != 1 || form.Term != old.Term || form.Holder != old.Holder || form.RunID != fmt.Sprintf("%s/%d", backends.Display(namespace, "v3"), old.Term) ||
			form.At <= 0 || form.At > int64(old.Term) || form.Took < 0 || form.Until < form.Took || form.Until > time.Minute.Milliseconds() {
			t.Errorf("%q: got the marker %s, want that of %+v", namespace, first.Value, old)
		}
		if err != nil || first.Version <= 0 || first.Age < 0 || first.Age > time.Minute {
			t.Errorf("%q: the marker: got %+v, %v, want the one of the old one", namespace, first, err)
		}
		if got := server.Do("SELECT count(*) FROM underlease_marks"); got != "0" {
			t.Errorf("%q: got %s marks after somebody has looked, want none: the lease's row has it", namespace, got)
		}
		refused("the new one, now that the row has it", mark(now.Term, "", "COMMIT"), "is applied already")
		if list, err := s.Records().List(ctx, namespace, "v3"); err != nil || len(list) != 1 || list[0].Version != first.Version {
			t.Errorf("%q: List: got %+v, %v, want the marker", namespace, list, err)
		}
		if err := s.Records().Delete(ctx, namespace, "v3", "marker"); err != nil {
			t.Fatal(err)
		}
		if _, err := get(); !errors.Is(err, backends.ErrNoRecord) {
			t.Errorf("%q: after Delete: got %v, want no marker", namespace, err)
		}
		for range 2 { // a job may call it twice
			if err := mark(now.Term, "", "COMMIT"); err != nil {
				t.Errorf("%q: the new one after Delete: got %v, want nil", namespace, err)
			}
		}
		if _, err := s.Records().Put(ctx, namespace, "v3", backends.Put{Key: "marker"}, &now); !errors.Is(err, backends.ErrConflict) {
			t.Errorf("%q: Put where a job has written: got %v, want ErrConflict", namespace, err)
		}
		second, err := get()
		if err != nil || second.Version <= first.Version {
			t.Errorf("%q: the next marker: got %+v, %v, want a version above %d", namespace, second, err, first.Version)
		}
		if version, err := s.Records().Put(ctx, namespace, "v3", backends.Put{Key: "marker", Version: second.Version}, &now); err != nil || version <= second.Version {
			t.Errorf("%q: Put over its version: got %d, %v, want a version above %d", namespace, version, err, second.Version)
		}
	}
}

// sleepers counts who sleeps.
var sleepers = map[string]string{
	"SELECT pg_sleep(1)": "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'",
	"DO SLEEP(1)":        "SELECT count(*) FROM information_schema.processlist WHERE state = 'User sleep'",
}

// Who looks at a database that has no tables finds nothing, and makes none.
func readsOnly(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	ctx := t.Context()
	if list, err := s.List(ctx, ""); err != nil || len(list) != 0 {
		t.Errorf("List: got %+v, %v, want nothing", list, err)
	}
	if state, err := s.Inspect(ctx, "", "l"); err != nil || len(state.Slots) != 0 {
		t.Errorf("Inspect: got %+v, %v, want nothing", state, err)
	}
	if _, err := s.Records().Get(ctx, "", "l", "marker"); !errors.Is(err, backends.ErrNoRecord) {
		t.Errorf("Get: got %v, want no record", err)
	}
	if list, err := s.Records().List(ctx, "", "l"); err != nil || len(list) != 0 {
		t.Errorf("List of records: got %+v, %v, want nothing", list, err)
	}
	for what, err := range map[string]error{
		"Delete": s.Records().Delete(ctx, "", "l", "marker"), "Ask": s.Ask(ctx, "", "l", 0, backends.Ask{Kind: backends.AskStop}),
		"Break": s.Break(ctx, "", "l", 0, "", true),
	} {
		if err != nil {
			t.Errorf("%s: got %v, want nil", what, err)
		}
	}
	if got := server.Do("SELECT count(*) FROM information_schema.tables WHERE table_name LIKE 'underlease%'"); got != "0" {
		t.Errorf("got %s tables, want none", got)
	}
}

// A row that cannot be read is named, and the others are shown; more rows than one statement reads are all shown, and in order.
func damaged(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	Granted(t, s, Request("l"))
	const rows = 1100
	for _, sql := range h.Stuff("n", rows) {
		server.Do(sql)
	}
	server.Do("UPDATE underlease SET form = 2 " + h.Where("n", "row-000007"))
	list, err := s.List(t.Context(), "n")
	if len(list) != rows-1 || list[0].Lease != "row-000000" || list[len(list)-1].Lease != fmt.Sprintf("row-%06d", rows-1) {
		t.Errorf("List: got %d leases, want %d", len(list), rows-1)
	}
	if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), "row-000007") {
		t.Errorf("List: got %v, want the one that cannot be read", err)
	}
	n := 0
	err = s.Backend.(backends.Walker).Walk(t.Context(), "n", func(state backends.State, err error) bool {
		if want := fmt.Sprintf("row-%06d", n); state.Lease != want || (err != nil) != (n == 7) {
			t.Errorf("Walk: got %q, %v, want %q", state.Lease, err, want)
		}
		n++
		return n < 700
	})
	if err != nil || n != 700 {
		t.Errorf("Walk: got %v after %d, want nil after 700", err, n)
	}
}

// What others' transactions make the server give up is tried again at once, and nobody hears of it.
func collisions(t *testing.T, h Harness) {
	server := h.Start(t, Options{})
	s := h.Open(t, h.URL(server.Addr()))
	if err := release(t, s, Granted(t, s, Request("l"))); err != nil {
		t.Fatal(err)
	}
	for name, sql := range h.Collide {
		server.Do(sql)
		for i := range 5 {
			g, err := Answered(t, s, Request("l"))
			if err != nil {
				t.Fatalf("%s: Acquire: got %v, want a grant", name, err)
			}
			if err := Renewed(t, s, g); err != nil {
				t.Errorf("%s: Renew: got %v, want the grant", name, err)
			}
			if _, err := s.Records().Put(t.Context(), "", "l", backends.Put{Key: "k", Version: backends.AnyVersion}, &g); err != nil {
				t.Errorf("%s: Put: got %v, want nil", name, err)
			}
			if err := release(t, s, g); err != nil {
				t.Errorf("%s: Release: got %v, want nil", name, err)
			}
			state, err := s.Inspect(t.Context(), "", "l")
			if err != nil || state.Slots[0].Held || state.Slots[0].Term != g.Term || state.Slots[0].Last.Outcome != "ok" {
				t.Errorf("%s, round %d: got %+v, %v, want the slot free after this grant", name, i, state, err)
			}
		}
		server.Do(h.Rest)
	}
}
