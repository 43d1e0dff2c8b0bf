//go:build linux

package postgres

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/table"
	. "github.com/underlease/underlease/backends/table/tabletest"
)

// waiter is a client that waits, and what is known of its place.
type waiter struct {
	d     *database
	store *backends.Store
}

// newWaiter opens a client, whose turn is so long.
func newWaiter(t *testing.T, raw string, turn time.Duration) *waiter {
	t.Helper()
	u, err := backends.ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	d, err := newDatabase(u)
	if err != nil {
		t.Fatal(err)
	}
	d.turn = turn
	s := &backends.Store{Backend: table.New(d), Scheme: u.Scheme, Address: d.address}
	t.Cleanup(func() { _ = s.Close() })
	return &waiter{d, s}
}

// until waits for the lease until the context ends, and returns what WaitFree does.
func (w *waiter) until(ctx context.Context, r backends.Request) error {
	return w.store.Backend.(backends.Waiter).WaitFree(ctx, r)
}

// leaves lets the client begin to wait and stop again, when the server says that so many sessions wait, and have looked by a statement
// like this last. It keeps its connection, and so its place: a question that is under way would cost it.
func (w *waiter) leaves(t *testing.T, p *servers.Postgres, r backends.Request, waiting int, statement string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.until(ctx, r) }()
	looked(t, p, waiting, statement)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("WaitFree: got %v, want the context's error", err)
	}
}

// before is how many came before it, by its last look.
func (w *waiter) before(t *testing.T) int {
	t.Helper()
	before := -1
	if err := w.d.pool.Do(t.Context(), func(c *conn) error {
		before = c.before
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return before
}

// What the sessions of those that wait have asked last, for LIKE.
const (
	sees  = "%pg_stat_get_activity%"
	plain = "%slots FROM %"
)

// wait waits until so many sessions wait.
func wait(t *testing.T, p *servers.Postgres, waiting int) {
	t.Helper()
	sessions(t, p, waiting, "true")
}

// looked waits until so many sessions wait and have looked by a statement like this, and nothing since.
func looked(t *testing.T, p *servers.Postgres, waiting int, statement string) {
	t.Helper()
	other := ""
	if statement != sees {
		other = " AND query NOT LIKE '" + sees + "'"
	}
	sessions(t, p, waiting, "state = 'idle' AND query LIKE '"+statement+"'"+other)
	wait(t, p, waiting)
}

func sessions(t *testing.T, p *servers.Postgres, waiting int, condition string) {
	t.Helper()
	servers.Within(t, 20*time.Second, strconv.Itoa(waiting)+" wait and "+condition, func() error {
		if got := p.Do("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '" + waits + "%' AND " + condition); got != strconv.Itoa(waiting) {
			return errors.New(got + " do")
		}
		return nil
	})
}

// Of those who wait one asks for what was released, the one that came first; the others send nothing then. A turn of an hour: whoever does
// not go by his place is never served.
func TestWaitersAreServedInTheOrderInWhichTheyCame(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	p.Do("CREATE ROLE other LOGIN")
	holder := opened(t, direct(p))
	g := Granted(t, holder, Request("l"))
	p.Do("GRANT SELECT, INSERT, UPDATE, DELETE ON underlease TO other; GRANT SELECT, DELETE ON underlease_marks TO other")
	type grant struct {
		i int
		g backends.Grant
	}
	served := make(chan grant)
	var all []*waiter
	for i := range 8 {
		url := direct(p)
		if i%2 == 1 {
			url = "postgres://other@" + p.Addr() + "/lease" // what others may not see of a session is not its name
		}
		w := newWaiter(t, url, time.Hour)
		all = append(all, w)
		go func() {
			for {
				if err := w.until(t.Context(), Request("l")); err != nil {
					t.Errorf("waiter %d: %v", i, err)
					return
				}
				g, err := w.store.Acquire(t.Context(), Request("l"))
				if errors.Is(err, backends.ErrBusy) {
					t.Errorf("waiter %d asked, and it was not its turn", i)
					continue
				}
				if err != nil {
					t.Errorf("waiter %d: %v", i, err)
					return
				}
				served <- grant{i, g}
				return
			}
		}()
		wait(t, p, i+1)
	}
	looked(t, p, 8, sees)
	var order []int
	giveBack(t, holder, g)
	for range 8 {
		select {
		case got := <-served:
			order = append(order, got.i)
			wait(t, p, 8-len(order)) // who has the lease waits no more
			giveBack(t, all[got.i].store, got.g)
		case <-time.After(30 * time.Second):
			t.Fatalf("nobody is next; served so far: %v", order)
		}
	}
	if want := []int{0, 1, 2, 3, 4, 5, 6, 7}; !slices.Equal(order, want) {
		t.Errorf("served %v, want %v", order, want)
	}
	if got := p.Do("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'underlease'"); got != "9" {
		t.Errorf("%s sessions have the name of their own again, want 9", got)
	}
}

// A waiter that is frozen or busy keeps the others for a turn each, and not for good. Neither does who may not see the others' sessions.
func TestAWaiterThatDoesNotGoIsPassed(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	holder := opened(t, direct(p))
	for _, blind := range []bool{false, true} {
		statement := sees
		if blind {
			statement = plain
			p.Do("REVOKE EXECUTE ON FUNCTION pg_stat_get_activity FROM PUBLIC")
		}
		name := "blind " + strconv.FormatBool(blind)
		g := Granted(t, holder, Request(name))
		var first []*waiter
		for i := range 3 {
			w := newWaiter(t, direct(p), turn)
			w.leaves(t, p, Request(name), i+1, statement)
			first = append(first, w)
		}
		last := newWaiter(t, direct(p), turn)
		last.leaves(t, p, Request(name), 4, statement)
		want := 3
		if blind {
			want = 0
		}
		if got := last.before(t); got != want {
			t.Errorf("%s: %d came before it, want %d", name, got, want)
		}
		done := make(chan error, 1)
		go func() { done <- last.until(t.Context(), Request(name)) }()
		giveBack(t, holder, g)
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s: WaitFree: got %v, want nil", name, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: the last one was not told", name)
		}
		Granted(t, last.store, Request(name))
		for _, w := range append(first, last) {
			_ = w.store.Close()
		}
		wait(t, p, 0)
	}
}

// Who was granted the lease has left the queue, whichever statement has granted it: whoever comes next must not wait for its turn.
func TestWhoHasTheLeaseWaitsNoMore(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	holder := opened(t, direct(p))
	for name, free := range map[string]func(g backends.Grant, r backends.Request){
		"released":    func(g backends.Grant, r backends.Request) { giveBack(t, holder, g) },
		"it ran out":  func(g backends.Grant, r backends.Request) {},
		"deleted":     func(g backends.Grant, r backends.Request) { p.Do("DELETE FROM underlease " + where("", r.Lease)) },
		"other slots": func(g backends.Grant, r backends.Request) {},
	} {
		r := Request(name)
		short := Request(name)
		short.TTL = 3 * time.Second
		g := Granted(t, holder, short)
		w := newWaiter(t, direct(p)+"?application_name=mine", time.Hour)
		w.leaves(t, p, r, 1, sees)
		free(g, r)
		if name == "other slots" {
			r.Slots = 2
		}
		servers.Within(t, 20*time.Second, name, func() error {
			_, err := Acquire(t, w.store, r)
			return err
		})
		wait(t, p, 0)
		if got := p.Do("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'mine'"); got != "1" {
			t.Errorf("%s: %s sessions have the name that the URL gave them, want 1", name, got)
		}
		_ = w.store.Close()
		servers.Within(t, 20*time.Second, "it has gone", func() error {
			if got := p.Do("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'mine'"); got != "0" {
				return errors.New("not yet")
			}
			return nil
		})
	}
}

func giveBack(t *testing.T, s *backends.Store, g backends.Grant) {
	t.Helper()
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Fatal(err)
	}
}
