package backendtest

import (
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
)

// Clocks is C63 for a store that shows no clock of its own: hosts whose clocks are an hour apart exclude each other for as long as the
// store says, and terms grow whoever is granted the lease. OpenAt opens a client on a host with some clock.
func Clocks(t *testing.T, h Harness, openAt func(now func() time.Time) *backends.Store) {
	t.Helper()
	e := &env{T: t, h: h, namespace: "test-" + backends.NewHandle()[:12]}
	var hosts []*client
	for _, ahead := range []time.Duration{0, time.Hour, -time.Hour} {
		s := openAt(func() time.Time { return time.Now().Add(ahead) })
		t.Cleanup(func() { _ = s.Close() })
		hosts = append(hosts, &client{e: e, Store: s})
	}
	var last backends.Term
	grows := func(g backends.Grant) backends.Grant {
		t.Helper()
		if g.Term <= last {
			t.Errorf("term: got %d after %d, want it to grow", g.Term, last)
		}
		last = g.Term
		return g
	}
	ttl := max(h.TTL, hiccup) // so that a renewal that comes late is in time
	for i, holder := range hosts {
		r := holder.request("l")
		r.TTL = ttl
		g := grows(holder.acquire(r))
		// Held for longer than its ttl: nobody thinks that it has run out.
		for begun := time.Now(); time.Since(begun) < ttl*3/2; time.Sleep(ttl / 8) { // the pace of the renewals
			holder.renew(g)
			for _, other := range hosts {
				if busy := other.busy(other.request("l")); busy.Left <= 0 || busy.Left > ttl+time.Second {
					t.Errorf("left: got %v, want at most the ttl of %v", busy.Left, ttl)
				}
			}
		}
		renewed := time.Now()
		holder.renew(g)
		next := hosts[(i+1)%len(hosts)]
		then := grows(next.eventually(next.request("l"), ttl+h.Slack))
		if took := time.Since(renewed); took < ttl {
			t.Errorf("free %v after the last renewal, want the ttl of %v", took, ttl)
		}
		holder.lost(g)
		next.release(then, "ok")
	}
	// A hold, too, is counted by the store.
	for i, holder := range hosts {
		r := holder.brief("held")
		r.Hold = 2 * h.TTL
		begun := time.Now()
		holder.release(holder.acquire(r), "ok")
		next := hosts[(i+1)%len(hosts)]
		next.release(next.eventually(next.request("held"), r.Hold+2*h.Slack), "ok")
		if took := time.Since(begun); took < r.Hold {
			t.Errorf("free %v after the acquisition, want the hold of %v", took, r.Hold)
		}
	}
}
