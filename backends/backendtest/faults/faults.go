//go:build linux

// Package faults is what stores on a network have to bear alike, beside the suite of package backendtest: answers that are lost, a network
// that is silent, a server that stands still, and calls that are cancelled.
package faults

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/proxy"
)

// Limits are for how long calls are waited for, as the runner does, and its methods are the calls.
type Limits struct {
	Acquire, Renew time.Duration
	Calm           time.Duration // of a call that is answered: a machine, or its disk, that stands still for a moment is no fault of the store
	Armed          time.Duration // of a call whose answer is lost: before its end the server must have had its request
}

// Freezer is a server that can be stopped for a while.
type Freezer interface {
	Freeze()
	Resume()
}

// Request is a request for a lease that nobody lets expire.
func Request(lease string) backends.Request {
	return backends.Request{Lease: lease, Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: time.Minute}
}

// Try makes one attempt within a limit.
func Try[T any](t *testing.T, limit time.Duration, f func(context.Context) (T, error)) (T, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	begun := time.Now()
	got, err := f(ctx)
	if took := time.Since(begun); took > limit+2*time.Second { // on a busy machine
		t.Errorf("a call with a limit of %v took %v", limit, took)
	}
	return got, err
}

// TryAcquire makes one attempt.
func (l Limits) TryAcquire(t *testing.T, s *backends.Store, r backends.Request) (backends.Grant, error) {
	t.Helper()
	return acquire(t, l.Acquire, s, r)
}

// Answered makes one attempt to acquire where an answer has to come, whatever it says.
func (l Limits) Answered(t *testing.T, s *backends.Store, r backends.Request) (backends.Grant, error) {
	t.Helper()
	return acquire(t, l.Calm, s, r)
}

// Granted makes one attempt to acquire, which has to succeed.
func (l Limits) Granted(t *testing.T, s *backends.Store, r backends.Request) backends.Grant {
	t.Helper()
	g, err := l.Answered(t, s, r)
	if err != nil {
		t.Fatalf("Acquire: got %v, want a grant", err)
	}
	return g
}

// TryRenew makes one attempt.
func (l Limits) TryRenew(t *testing.T, s *backends.Store, g backends.Grant) error {
	t.Helper()
	return renew(t, l.Renew, s, g)
}

// Renewed makes one attempt to renew where an answer has to come, whatever it says.
func (l Limits) Renewed(t *testing.T, s *backends.Store, g backends.Grant) error {
	t.Helper()
	return renew(t, l.Calm, s, g)
}

// Released makes one attempt to release where an answer has to come, whatever it says.
func (l Limits) Released(t *testing.T, s *backends.Store, g backends.Grant) error {
	t.Helper()
	return Release(t, l.Calm, s, g)
}

func acquire(t *testing.T, limit time.Duration, s *backends.Store, r backends.Request) (backends.Grant, error) {
	t.Helper()
	return Try(t, limit, func(ctx context.Context) (backends.Grant, error) { return s.Acquire(ctx, r) })
}

func renew(t *testing.T, limit time.Duration, s *backends.Store, g backends.Grant) error {
	t.Helper()
	_, err := Try(t, limit, func(ctx context.Context) (backends.Grant, error) { return s.Renew(ctx, g) })
	return err
}

// Release makes one attempt within a limit.
func Release(t *testing.T, limit time.Duration, s *backends.Store, g backends.Grant) error {
	t.Helper()
	_, err := Try(t, limit, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.Release(ctx, g, backends.End{Outcome: "ok"})
	})
	return err
}

// Words are such that the request of one operation alone has them.
type Words struct{ OfAcquire, OfRenew, OfRelease string }

// LostAnswers is C05 and C08: whatever becomes of an answer, the next attempt of the same handle goes on from what the store did. Open opens
// a client of the server with some address.
func (l Limits) LostAnswers(t *testing.T, addr string, open func(addr string) *backends.Store, w Words) {
	t.Helper()
	for _, kind := range []proxy.Kind{proxy.ResetBefore, proxy.ResetAfter, proxy.Lose} {
		p := proxy.New(t, addr)
		s, other := open(p.Addr()), open(addr)
		lease := fmt.Sprintf("settled-%d", kind)
		req := Request(lease)
		held := func() (bool, backends.SlotState) {
			t.Helper()
			state, err := other.Inspect(t.Context(), "", lease)
			if err != nil {
				t.Fatal(err)
			}
			if len(state.Slots) == 0 {
				return false, backends.SlotState{}
			}
			return state.Slots[0].Held, state.Slots[0]
		}

		p.Inject(proxy.Fault{Kind: kind, Match: w.OfAcquire})
		if _, err := acquire(t, l.Armed, s, req); !errors.Is(err, backends.ErrUnavailable) {
			t.Fatalf("fault %d: Acquire: got %v, want unavailable", kind, err)
		}
		is, state := held() // where a new lease takes another request, too, it may be free
		if is && kind == proxy.ResetBefore {
			t.Errorf("fault %d: held after a request that did not come through", kind)
		}
		g := l.Granted(t, s, req)
		if is && g.Term != state.Term {
			t.Errorf("fault %d: term: got %d, want the one of the attempt whose answer was lost, %d", kind, g.Term, state.Term)
		}

		p.Inject(proxy.Fault{Kind: kind, Match: w.OfRenew})
		if err := renew(t, l.Armed, s, g); !errors.Is(err, backends.ErrUnavailable) {
			t.Errorf("fault %d: Renew: got %v, want unavailable", kind, err)
		}
		if err := l.Renewed(t, s, g); err != nil {
			t.Errorf("fault %d: the next Renew: got %v, want the grant", kind, err)
		}

		p.Inject(proxy.Fault{Kind: kind, Match: w.OfRelease})
		if err := Release(t, l.Armed, s, g); !errors.Is(err, backends.ErrUnavailable) {
			t.Errorf("fault %d: Release: got %v, want unavailable", kind, err)
		}
		if is, _ := held(); is != (kind == proxy.ResetBefore) {
			t.Errorf("fault %d: held after the lost answer to the release: got %v", kind, is)
		}
		if err := l.Released(t, s, g); err != nil {
			t.Errorf("fault %d: the next Release: got %v, want nil", kind, err)
		}
		past, err := other.Inspect(t.Context(), "", lease)
		if err != nil || len(past.History) != 1 || past.History[0].End.Outcome != "ok" {
			t.Errorf("fault %d: history: got %+v, %v, want one end", kind, past.History, err)
		}
		if got := p.Done(kind); got != 3 {
			t.Errorf("the fault happened %d times, want 3", got)
		}

		// An answer that never came, and nobody who tries again: the handle gives it back.
		req = Request(lease)
		p.Inject(proxy.Fault{Kind: kind, Match: w.OfAcquire})
		if _, err := acquire(t, l.Armed, s, req); err == nil {
			t.Errorf("fault %d: Acquire: got a grant", kind)
		}
		if is, _ := held(); is != (kind != proxy.ResetBefore) {
			t.Errorf("fault %d: held after the lost answer to an acquisition: got %v", kind, is)
		}
		if err := s.Release(t.Context(), backends.Grant{Lease: lease, Handle: req.Handle}, backends.End{}); err != nil {
			t.Errorf("fault %d: abandon: got %v, want nil", kind, err)
		}
		l.Granted(t, other, Request(lease))
	}
}

// Silence is a network that swallows requests, answers or both, a server that stands still, and connections that are cut. No call lasts
// longer than its limit, and each time heals is called, which has to see a renewal. S is a client behind p.
func (l Limits) Silence(t *testing.T, p *proxy.Proxy, server Freezer, s *backends.Store, g backends.Grant, heals func(after string)) {
	t.Helper()
	for _, d := range []proxy.Direction{proxy.Requests, proxy.Answers, proxy.Requests | proxy.Answers} {
		p.BlackHole(d)
		for range 3 {
			if err := l.TryRenew(t, s, g); !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), p.Addr()) {
				t.Errorf("Renew in a black hole: got %v, want unavailable with the address", err)
			}
		}
		p.Heal()
		heals("a black hole")
	}
	server.Freeze()
	if err := l.TryRenew(t, s, g); !errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("Renew of a frozen server: got %v, want unavailable", err)
	}
	server.Resume()
	heals("a frozen server")
}

// BlackHole is [Limits.Silence] and a cut for a store that makes a new connection for the first call after it. It returns the client and its
// grant.
func (l Limits) BlackHole(t *testing.T, p *proxy.Proxy, server Freezer, s *backends.Store) backends.Grant {
	t.Helper()
	g := l.Granted(t, s, Request("l"))
	heals := func(after string) {
		t.Helper()
		if err := l.Renewed(t, s, g); err != nil {
			t.Errorf("Renew after %s: got %v, want the grant", after, err)
		}
	}
	l.Silence(t, p, server, s, g, heals)
	p.Cut()
	if err := l.TryRenew(t, s, g); err != nil && !errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("Renew after a cut: got %v, want the grant or unavailable", err)
	}
	heals("a cut")
	return g
}

// Cancelled is a call whose context ends while the server is silent: it returns, well before the store's own limit of a call.
func (l Limits) Cancelled(t *testing.T, server Freezer, s *backends.Store, before time.Duration) {
	t.Helper()
	g := l.Granted(t, s, Request("l"))
	server.Freeze()
	defer server.Resume()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := s.Renew(ctx, g)
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("Renew of a frozen server: got %v before anything happened", err)
	case <-time.After(100 * time.Millisecond):
	}
	cancel()
	select {
	case err := <-done:
		if err == nil || errors.Is(err, backends.ErrLost) {
			t.Errorf("Renew: got %v, want an error that is no answer", err)
		}
	case <-time.After(before):
		t.Errorf("Renew: not back %v after its context ended", before)
	}
}
