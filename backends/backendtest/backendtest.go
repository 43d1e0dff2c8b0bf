// Package backendtest is the suite that holds every store to the contract of package backends, on its real server.
//
// A store's test hands [Run] a [Harness]: how to open one more client, the shortest ttl, and how late an expiry may be
// seen. Every clause of the contract is one named case, which fails alone. What a store cannot do it says with a reason,
// and the case is skipped by that reason; a name that is no case fails, so that no reason outlives its case.
//
// Cases use leases of their own in a namespace of their own, so that one server serves all of them, also at the same
// time and over many runs.
package backendtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/underlease/underlease/backends"
)

// Harness is what the suite has to know about a store.
type Harness struct {
	// Place returns a place for one case: a new store, or the one that all cases share. Inside a bubble it is called in
	// the bubble.
	Place func(t *testing.T) Place

	// TTL is the shortest ttl that the store grants as it is asked for.
	TTL time.Duration
	// Slack is how much later than promised an expiry or the end of a hold may be seen.
	Slack time.Duration
	// Wake is how soon a waiter has to be told, where the store can notify. Zero is 2.5 s: more than a machine stands still for, and less
	// than the 3 s after which a waiter of a network store that nobody tells looks by itself. One that looks sooner needs a test of its own.
	Wake time.Duration
	// Ticks says that the server ends grants by a tick of its own, which comes late where the server stood still. A look there changes
	// nothing.
	Ticks bool
	// Bubble runs each case inside a bubble of testing/synctest, where waiting takes no time.
	Bubble bool
	// Cannot names the cases that the store cannot pass, and why.
	Cannot map[string]string
}

// Place is a store as one case sees it.
type Place struct {
	// Open returns one more client. The suite closes it.
	Open func() *backends.Store
	// Wipe deletes a lease with everything that belongs to it, behind the back of the clients. Nil where that cannot be done.
	Wipe func(namespace, lease string)
}

// Run runs every case as a subtest of its own.
func Run(t *testing.T, h Harness) {
	t.Helper()
	known := map[string]bool{}
	for _, c := range cases {
		known[c.name] = true
		t.Run(c.name, func(t *testing.T) {
			if why := h.Cannot[c.name]; why != "" {
				t.Skip(why)
			}
			if !h.Bubble {
				h.run(t, c)
				return
			}
			synctest.Test(t, func(t *testing.T) { h.run(t, c) })
		})
	}
	for name := range h.Cannot {
		if !known[name] {
			t.Errorf("Cannot names %q, and there is no such case", name)
		}
	}
}

func (h Harness) run(t *testing.T, c clause) {
	e := &env{T: t, h: h, place: h.Place(t), namespace: "test-" + backends.NewHandle()[:12]}
	c.check(e)
}

// clause is one clause of the contract.
type clause struct {
	name  string
	check func(*env)
}

// env is a case that runs.
type env struct {
	*testing.T
	h         Harness
	place     Place
	namespace string
}

// hiccup is for how long a busy machine may stand still, and a little more: what has to be kept meanwhile gets so much time, and what comes
// late for that reason alone is no fault of the store.
const hiccup = 3 * time.Second

// client is a client with the words of the contract, cut short.
type client struct {
	e *env
	*backends.Store
	briefly []backends.Grant // what it acquired with the shortest ttl
}

func (e *env) client() *client {
	e.Helper()
	s := e.place.Open()
	if s == nil {
		e.Fatal("Open returned nothing")
	}
	e.Cleanup(func() { _ = s.Close() })
	return &client{e: e, Store: s}
}

// request is a request for one slot, with a ttl that does not end within a case, or none where grants do not end by time.
func (c *client) request(lease string) backends.Request {
	r := backends.Request{
		Namespace: c.e.namespace, Lease: lease, Holder: "somebody (pid 4711)", Handle: backends.NewHandle(), Slots: 1,
		TTL: max(c.e.h.TTL, time.Minute),
	}
	if c.Endless {
		r.TTL = 0
	}
	return r
}

// brief is a request with the shortest ttl, for what has to end by itself.
func (c *client) brief(lease string) backends.Request {
	r := c.request(lease)
	if !c.Endless {
		r.TTL = c.e.h.TTL
	}
	return r
}

// acquire acquires or ends the case.
func (c *client) acquire(r backends.Request) backends.Grant {
	c.e.Helper()
	g, err := c.try(r)
	if err != nil {
		c.e.Fatalf("Acquire %q: got %v, want a grant", r.Lease, err)
	}
	if r.TTL == c.e.h.TTL {
		c.briefly = append(c.briefly, g)
	}
	return g
}

func (c *client) try(r backends.Request) (backends.Grant, error) {
	return c.Acquire(c.e.Context(), r)
}

// eventually acquires as soon as the lease is free and ends the case when that takes longer than limit: it is asked after it, and says busy.
func (c *client) eventually(r backends.Request, limit time.Duration) backends.Grant {
	c.e.Helper()
	if c.e.h.Ticks {
		limit += hiccup
	}
	for begun := time.Now(); ; {
		asked := time.Since(begun)
		g, err := c.try(r)
		if err == nil {
			return g
		}
		if !errors.Is(err, backends.ErrBusy) {
			c.e.Fatalf("Acquire %q: got %v, want a grant or busy", r.Lease, err)
		}
		if asked > limit {
			c.e.Fatalf("Acquire %q: still %v after %v, want a grant", r.Lease, err, limit)
		}
		time.Sleep(20 * time.Millisecond) // the pace of the polling; the wait is for the store
	}
}

// busy wants the lease to be held and returns by whom.
func (c *client) busy(r backends.Request) *backends.BusyError {
	c.e.Helper()
	g, err := c.try(r)
	var busy *backends.BusyError
	if !errors.As(err, &busy) || !errors.Is(err, backends.ErrBusy) {
		c.e.Fatalf("Acquire %q: got %v and slot %d, want a *BusyError", r.Lease, err, g.Slot)
	}
	return busy
}

// taken is busy for those who need no more than that.
func (c *client) taken(r backends.Request) {
	c.e.Helper()
	_ = c.busy(r)
}

func (c *client) renew(g backends.Grant) backends.Grant {
	c.e.Helper()
	r, err := c.Renew(c.e.Context(), g)
	if err != nil {
		c.e.Fatalf("Renew: got %v, want the grant", err)
	}
	return r
}

// lost wants the grant to be gone.
func (c *client) lost(g backends.Grant) {
	c.e.Helper()
	if _, err := c.Renew(c.e.Context(), g); !errors.Is(err, backends.ErrLost) {
		c.e.Errorf("Renew of a grant that is gone: got %v, want ErrLost", err)
	}
}

func (c *client) release(g backends.Grant, outcome string) {
	c.e.Helper()
	if err := c.Release(c.e.Context(), g, backends.End{Outcome: outcome}); err != nil {
		c.e.Fatalf("Release: got %v, want nil", err)
	}
}

// abandon releases whatever carries the handle.
func (c *client) abandon(r backends.Request) {
	c.e.Helper()
	g := backends.Grant{Namespace: r.Namespace, Lease: r.Lease, Handle: r.Handle}
	if err := c.Release(c.e.Context(), g, backends.End{Outcome: backends.OutcomeNotStarted}); err != nil {
		c.e.Fatalf("abandon: got %v, want nil", err)
	}
}

func (c *client) inspect(lease string) backends.State {
	c.e.Helper()
	s, err := c.Inspect(c.e.Context(), c.e.namespace, lease)
	if err != nil {
		c.e.Fatalf("Inspect %q: got %v, want its state", lease, err)
	}
	return s
}

// slot returns the state of one slot.
func (c *client) slot(lease string, number int) backends.SlotState {
	c.e.Helper()
	s := c.inspect(lease)
	for _, slot := range s.Slots {
		if slot.Slot == number {
			return slot
		}
	}
	c.e.Fatalf("Inspect %q: got %d slots, none of them number %d", lease, len(s.Slots), number)
	return backends.SlotState{}
}

// expire lets the brief grants of a client end by themselves: their time runs out or, where that does not end them, the
// client is closed as the end of its process would.
func (e *env) expire(c *client) {
	e.Helper()
	if c.Endless {
		if err := c.Close(); err != nil {
			e.Fatalf("Close: got %v, want nil", err)
		}
		return
	}
	time.Sleep(e.h.TTL + e.h.Slack) // the store counts by its own clock, and nothing tells when it has
	if !e.h.Ticks {
		return
	}
	for _, g := range c.briefly {
		if !until(hiccup, func() bool {
			return !slices.ContainsFunc(c.inspect(g.Lease).Slots, func(s backends.SlotState) bool { return s.Held && s.Slot == g.Slot && s.Term == g.Term })
		}) {
			e.Errorf("%q with the ttl %v: still held %v later", g.Lease, e.h.TTL, e.h.TTL+e.h.Slack+hiccup)
		}
	}
}

// wake is how soon a notification has to arrive.
func (e *env) wake() time.Duration {
	if e.h.Wake == 0 {
		return 2500 * time.Millisecond
	}
	return e.h.Wake
}

// within runs f and ends the case when it takes longer than limit.
func (e *env) within(limit time.Duration, what string, f func() error) error {
	e.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
		e.Fatalf("%s: still not back after %v", what, limit)
		return nil
	}
}

// until waits for ok by looking again and again.
func until(limit time.Duration, ok func() bool) bool {
	for begun := time.Now(); !ok(); {
		if time.Since(begun) > limit {
			return false
		}
		time.Sleep(5 * time.Millisecond) // the pace of the looks
	}
	return true
}

// descriptors counts the open files of this process, or returns -1 where that cannot be known.
func descriptors() int {
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(d)
}

// goroutines describes those that run code of the store.
func goroutines() string {
	b := make([]byte, 1<<20)
	var all strings.Builder
	for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
		if strings.Contains(g, "underlease/backends/") && !strings.Contains(g, "/backends/backendtest") && !strings.Contains(g, "testing.(*M).Run") {
			fmt.Fprintln(&all, g)
		}
	}
	return all.String()
}

// cancelled is a context that has ended.
func (e *env) cancelled() context.Context {
	ctx, cancel := context.WithCancel(e.Context())
	cancel()
	return ctx
}

// Open opens a URL by its scheme, or ends the test.
func Open(t testing.TB, schemes map[string]backends.Scheme, raw string) *backends.Store {
	t.Helper()
	u, err := backends.ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	s, err := schemes[u.Scheme].Open(t.Context(), u)
	if err != nil {
		t.Fatalf("open %s: %v", u.Redacted(), err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Refuses checks that each URL is refused with a [*backends.ConfigError] which has the text that it is given with, and shows no secret. What
// cannot be read as a URL is refused before any store sees it.
func Refuses[S any](t *testing.T, parse func(*url.URL) (S, error), secret string, texts map[string]string) {
	t.Helper()
	for raw, text := range texts {
		u, err := backends.ParseURL(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		_, err = parse(u)
		if c, ok := errors.AsType[*backends.ConfigError](err); !ok || !strings.Contains(c.Text, text) {
			t.Errorf("%s: got %v, want a *ConfigError with %q", raw, err, text)
		}
		if shown := fmt.Sprint(err, backends.Hint(err)); strings.Contains(shown, secret) {
			t.Errorf("%s: the error shows the secret: %s", raw, shown)
		}
	}
}
