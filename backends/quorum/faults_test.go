//go:build linux

package quorum_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/consul"
	"github.com/underlease/underlease/backends/etcd"
)

// stand is a store on real servers.
type stand struct {
	t        *testing.T
	addr     string                     // of one server
	all      string                     // of all that a URL may name
	url      func(addr string) string   // of the store there
	open     map[string]backends.Scheme // how
	put      func(key, value string)
	delete   func(prefix string)                   // keys
	lose     func()                                // everything
	leader   func() (*servers.Process, int)        // who leads, and how many there are
	asked    func(*proxy.Proxy) int                // requests that the server has got
	acquires string                                // bytes that only the request has that takes a slot
	ends     func(ttl time.Duration) time.Duration // when a session that nobody keeps has ended at the latest
}

func etcds(t *testing.T, nodes int) *stand {
	t.Helper()
	c := servers.StartEtcd(t, nodes, servers.EtcdOptions{})
	return &stand{
		t: t, addr: c.Nodes[0].Addr(), all: strings.Join(c.Addrs(), ","), open: etcd.Schemes(), lose: c.Lose,
		url:      func(addr string) string { return "etcd://" + addr },
		put:      func(key, value string) { c.Nodes[0].Put(key, value, false) },
		delete:   func(prefix string) { c.Nodes[0].Delete(prefix) },
		leader:   func() (*servers.Process, int) { l, others := c.Leader(); return l.Process, len(others) + 1 },
		asked:    func(*proxy.Proxy) int { return c.Nodes[0].Requests() },
		acquires: `{"h":"`,
		ends:     func(ttl time.Duration) time.Duration { return 2*ttl + 4*time.Second },
	}
}

func consuls(t *testing.T, nodes int) *stand {
	t.Helper()
	c := servers.StartConsul(t, nodes, servers.ConsulOptions{})
	addr, asked := c.Nodes[0].Addr(), 0
	if nodes > 1 {
		_, others := c.Leader()
		addr = others[0].Addr() // the agent of this host, as a rule, is no server that leads
	}
	return &stand{
		t: t, addr: addr, all: addr, open: consul.Schemes(), lose: c.Lose,
		url:      func(addr string) string { return "consul://" + addr + "?session-ttl-min=1s" },
		put:      func(key, value string) { c.Nodes[0].Do("PUT", "/v1/kv/"+key, []byte(value)) },
		delete:   func(prefix string) { c.Nodes[0].Delete(prefix) },
		leader:   func() (*servers.Process, int) { l, others := c.Leader(); return l.Process, len(others) + 1 },
		asked:    func(p *proxy.Proxy) int { asked += p.Trips(); return asked },
		acquires: `"Verb":"lock"`,
		ends:     func(ttl time.Duration) time.Duration { return 3*ttl + 8*time.Second },
	}
}

// each runs a test on every kind of store with so many servers.
func each(t *testing.T, nodes int, f func(*testing.T, *stand)) {
	t.Helper()
	t.Run("etcd", func(t *testing.T) { f(t, etcds(t, nodes)) })
	t.Run("consul", func(t *testing.T) { f(t, consuls(t, nodes)) })
}

func (s *stand) client(addr string) *backends.Store {
	s.t.Helper()
	return backendtest.Open(s.t, s.open, s.url(addr))
}

// limits of the calls of a run.
var limits = faults.Limits{Acquire: time.Second, Renew: 500 * time.Millisecond, Calm: 10 * time.Second, Armed: 4 * time.Second}

var (
	request  = faults.Request
	acquire  = limits.TryAcquire
	answered = limits.Answered
	granted  = limits.Granted
	renew    = limits.TryRenew
	renewed  = limits.Renewed
	released = limits.Released
)

func release(t *testing.T, s *backends.Store, g backends.Grant) error {
	t.Helper()
	return faults.Release(t, time.Second, s, g)
}

// C05, C08: whatever becomes of an answer, the next attempt of the same handle goes on from what the store did.
func TestALostAnswerIsSettledByTheHandle(t *testing.T) {
	each(t, 1, func(t *testing.T, st *stand) {
		for _, kind := range []proxy.Kind{proxy.ResetBefore, proxy.ResetAfter, proxy.Lose} {
			p := proxy.New(t, st.addr)
			s, other := st.client(p.Addr()), st.client(st.addr)
			lease := fmt.Sprintf("settled-%d", kind)
			req := request(lease)

			p.Inject(proxy.Fault{Kind: kind, Match: st.acquires})
			losing := func(ctx context.Context) (backends.Grant, error) { return s.Acquire(ctx, req) }
			if _, err := faults.Try(t, limits.Armed, losing); !errors.Is(err, backends.ErrUnavailable) {
				t.Fatalf("fault %d: Acquire: got %v, want unavailable", kind, err)
			}
			state, err := other.Inspect(t.Context(), "", lease)
			if err != nil {
				t.Fatal(err)
			}
			// Where several requests share a connection, an answer to another of them may be the one that it is reset in the place of: then the
			// server may not have come to this one.
			shared := kind == proxy.ResetAfter && strings.HasPrefix(s.Scheme, "etcd")
			if held := len(state.Slots) == 1 && state.Slots[0].Held; held != (kind != proxy.ResetBefore) && !shared {
				t.Errorf("fault %d: held after the lost answer: got %v", kind, held)
			}
			g := granted(t, s, req)
			if len(state.Slots) == 1 && state.Slots[0].Held && g.Term != state.Slots[0].Term {
				t.Errorf("fault %d: term: got %d, want the one of the attempt whose answer was lost, %d", kind, g.Term, state.Slots[0].Term)
			}
			again := func(what string, f, next func() error) {
				t.Helper()
				p.Inject(proxy.Fault{Kind: kind})
				// A client may ask again by itself what only reads.
				if err := f(); err != nil && !errors.Is(err, backends.ErrUnavailable) || err == nil && what != "Renew" {
					t.Errorf("fault %d: %s: got %v, want unavailable", kind, what, err)
				}
				if err := next(); err != nil {
					t.Errorf("fault %d: the next %s: got %v, want nil", kind, what, err)
				}
			}
			again("Renew", func() error {
				_, err := faults.Try(t, limits.Armed, func(ctx context.Context) (backends.Grant, error) { return s.Renew(ctx, g) })
				return err
			}, func() error { return renewed(t, s, g) })
			again("Release", func() error { return faults.Release(t, limits.Armed, s, g) }, func() error { return released(t, s, g) })
			state, err = other.Inspect(t.Context(), "", lease)
			if err != nil || len(state.History) != 1 || state.History[0].End.Outcome != "ok" {
				t.Errorf("fault %d: history: got %+v, %v, want one end", kind, state.History, err)
			}
			if got := p.Done(kind); got != 3 {
				t.Errorf("the fault happened %d times, want 3", got)
			}

			// An answer that never came, and nobody who tries again: the handle gives it back.
			req = request(lease)
			p.Inject(proxy.Fault{Kind: kind, Match: st.acquires})
			if _, err := faults.Try(t, limits.Armed, losing); err == nil {
				t.Errorf("fault %d: Acquire: got a grant", kind)
			}
			if err := s.Release(t.Context(), backends.Grant{Lease: lease, Handle: req.Handle}, backends.End{}); err != nil {
				t.Errorf("fault %d: abandon: got %v, want nil", kind, err)
			}
			granted(t, other, request(lease))
		}
	})
}

// After a black hole connections are made anew, and no call lasts longer than its limit.
func TestABlackHoleCostsEachCallItsLimitAndNoMore(t *testing.T) {
	each(t, 1, func(t *testing.T, st *stand) {
		p := proxy.New(t, st.addr)
		s := st.client(p.Addr())
		g := granted(t, s, request("l"))
		heals := func(when string) {
			t.Helper()
			begun := time.Now()
			servers.Within(t, 15*time.Second, "a renewal after "+when, func() error { return renew(t, s, g) })
			t.Logf("after %s: renewed %v later", when, time.Since(begun))
		}
		server, _ := st.leader()
		limits.Silence(t, p, server, s, g, heals)
		for range 10 {
			p.Cut()
			heals("a cut")
		}
	})
}

// What a run costs, in requests. Those of one line are under way at the same time, but for Consul's first: it makes a session
// only when the slot is free.
func TestHowOftenTheServerIsAsked(t *testing.T) {
	each(t, 1, func(t *testing.T, st *stand) {
		p := proxy.New(t, st.addr)
		s := st.client(p.Addr())
		if got := p.Made(); got != 0 {
			t.Errorf("%d connections by opening, want none", got)
		}
		before := st.asked(p)
		costs := func(what string, want ...int) {
			t.Helper()
			now := st.asked(p)
			if got := now - before; !slices.Contains(want, got) {
				t.Errorf("%s: %d requests, want one of %d", what, got, want)
			}
			before = now
		}
		// Where session and transaction are under way at the same time, the one may overtake the other, and is sent once more.
		takes := []int{3}
		if strings.HasPrefix(s.Scheme, "etcd") {
			takes = []int{3, 4}
		}
		g := granted(t, s, request("l"))
		costs("Acquire: a session, a look, and a transaction", takes...)
		for range 3 {
			if err := renewed(t, s, g); err != nil {
				t.Errorf("Renew: got %v, want the grant", err)
			}
			costs("Renew: the session and a look", 2)
		}
		if err := released(t, s, g); err != nil {
			t.Errorf("Release: got %v, want nil", err)
		}
		costs("Release: a transaction", 1)
		granted(t, s, request("l"))
		costs("Acquire once more", takes...)
		_, err := answered(t, s, request("l"))
		if !errors.Is(err, backends.ErrBusy) {
			t.Errorf("Acquire: got %v, want busy", err)
		}
		if strings.HasPrefix(s.Scheme, "etcd") { // HTTP/2
			if got := p.Made(); got != 1 {
				t.Errorf("%d connections, want 1", got)
			}
			costs("busy: a session, two looks, and what is left", 4)
		} else {
			costs("busy: a look", 1)
		}
	})
}

// C15: terms grow over the loss of everything, and a holder is told.
func TestTermsGrowOverALostStore(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			each(t, nodes, func(t *testing.T, st *stand) {
				s := st.client(st.all)
				var last backends.Grant
				for i, lose := range []func(){func() {}, func() { st.delete("ul/") }, st.lose} {
					lose()
					if last.Term != 0 {
						servers.Within(t, 40*time.Second, "the holder is told", func() error {
							if err := renew(t, s, last); !errors.Is(err, backends.ErrLost) {
								return fmt.Errorf("Renew: got %w, want lost", err)
							}
							return nil
						})
					}
					req := request("l") // of all attempts: one whose answer came too late may have it
					servers.Within(t, 40*time.Second, "a grant", func() error {
						g, err := acquire(t, s, req)
						if err == nil && g.Term <= last.Term {
							t.Errorf("loss %d: term: got %d, want more than %d", i, g.Term, last.Term)
						}
						if err == nil {
							last = g
						}
						return err
					})
				}
			})
		})
	}
}

// C03, C14: the leader is frozen or killed. The lease goes on, with the same holder, as soon as there is another leader; a dead
// holder's is free in time; nobody else gets it meanwhile.
func TestALeaderThatIsGoneCostsNoLease(t *testing.T) {
	for _, how := range []string{"freeze", "kill"} {
		t.Run(how, func(t *testing.T) {
			each(t, 3, func(t *testing.T, st *stand) {
				s, other := st.client(st.all), st.client(st.all)
				req := request("l")
				req.TTL = 3 * time.Second
				long := request("long")
				long.TTL = time.Minute
				kept := granted(t, s, long)
				asked := time.Now()
				dead := granted(t, s, req)
				leader, _ := st.leader()
				begun := time.Now()
				if how == "freeze" {
					leader.Freeze()
				} else {
					leader.Kill()
				}
				servers.Within(t, 40*time.Second, "a renewal at another leader", func() error { return renew(t, s, kept) })
				t.Logf("renewed %v after the leader was gone", time.Since(begun))
				// A client that knows of nothing begins with the first member, which may be the one that is gone.
				servers.Within(t, 40*time.Second, "a lease that is kept is busy", func() error {
					_, err := acquire(t, other, request("long"))
					switch {
					case errors.Is(err, backends.ErrBusy):
						return nil
					case err == nil:
						t.Fatal("Acquire of a lease that is kept: got a grant, want busy")
					}
					return err
				})
				var next backends.Grant
				after := request("l") // of all attempts
				servers.Within(t, st.ends(req.TTL), "the lease of a dead holder is free", func() (err error) {
					next, err = acquire(t, other, after)
					return err
				})
				took := time.Since(asked)
				t.Logf("the lease of a dead holder was free after %v (ttl %v)", took, req.TTL)
				if took < req.TTL-50*time.Millisecond || next.Term <= dead.Term {
					t.Errorf("next grant: got term %d after %v, want more than %d and not before the ttl", next.Term, took, dead.Term)
				}
				if err := renewed(t, s, dead); !errors.Is(err, backends.ErrLost) {
					t.Errorf("Renew of the dead holder: got %v, want lost", err)
				}
				// The old leader comes back, and knows no better.
				if how == "freeze" {
					leader.Resume()
				} else {
					leader.Launch()
				}
				for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
					for _, g := range []backends.Grant{kept, next} {
						store := s
						if g.Term == next.Term {
							store = other
						}
						if err := renew(t, store, g); errors.Is(err, backends.ErrLost) {
							t.Fatalf("Renew after the old leader came back: got %v", err)
						}
					}
				}
			})
		})
	}
}

// C48: a waiter outlives a restart of the servers, and is served after it.
func TestAWaiterOutlivesARestart(t *testing.T) {
	each(t, 3, func(t *testing.T, st *stand) {
		holder, s := st.client(st.all), st.client(st.all)
		g := granted(t, holder, request("l"))
		req := request("l")
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- s.Backend.(backends.Waiter).WaitFree(ctx, req) }()
		leader, _ := st.leader()
		leader.Kill()
		leader.Launch()
		servers.Within(t, 40*time.Second, "a release", func() error { return release(t, holder, g) })
		select {
		case <-done:
		case <-time.After(15 * time.Second):
			t.Error("WaitFree: not back 15s after the lease was free")
		}
		// What the waiter hears may be an error: he asks then. Not before: a waiter who looks just then would find his own grant.
		servers.Within(t, 20*time.Second, "a grant", func() error {
			_, err := acquire(t, s, req)
			return err
		})
	})
}

// What is not ours, damaged or newer is left as it is.
func TestWhatIsNotOursIsNotTouched(t *testing.T) {
	puts := map[string]func(key, value string){}
	e, c := servers.StartEtcd(t, 1, servers.EtcdOptions{}), servers.StartConsul(t, 1, servers.ConsulOptions{})
	puts["etcd://"+e.Nodes[0].Addr()] = func(key, value string) { e.Nodes[0].Put(key, value, false) }
	puts["consul://"+c.Nodes[0].Addr()] = func(key, value string) { c.Nodes[0].Do("PUT", "/v1/kv/"+key, []byte(value)) }
	for url, put := range puts {
		u, err := backends.ParseURL(url)
		if err != nil {
			t.Fatal(err)
		}
		schemes := etcd.Schemes()
		if u.Scheme == "consul" {
			schemes = consul.Schemes()
		}
		s, err := schemes[u.Scheme].Open(t.Context(), u)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for name, c := range map[string]struct{ key, value, text, hint string }{
			"garbage": {"doc", "{", "doc is damaged", "rename or delete"},
			"empty":   {"doc", "{}", "doc is damaged", "rename or delete"},
			"newer":   {"doc", `{"f":2}`, "the form 2 of a newer version", "update underlease"},
			"other":   {"doc", `{"f":1,"ns":"","n":"another"}`, "of another lease", "rename or delete"},
			"grant":   {"slot/0/grant", "{}", "grant is damaged", "rename or delete"},
			"largest": {"doc", `{"f":1,"ns":"","n":"largest","t":9007199254740991}`, "doc is damaged", "rename or delete"},
		} {
			put("ul/lease/_/"+name+"/"+c.key, c.value)
			_, err := answered(t, s, request(name))
			if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), c.text) || !strings.Contains(backends.Hint(err), c.hint) {
				t.Errorf("%s: %s: Acquire: got %v with the hint %q, want broken with %q and %q", url, name, err, backends.Hint(err), c.text, c.hint)
			}
		}
	}
}

// C62: what was used once goes, 7 days later, when somebody lists; what has records, and what is held, stays.
func TestALeaseThatNobodyUsesIsForgotten(t *testing.T) {
	each(t, 1, func(t *testing.T, st *stand) {
		s := st.client(st.addr)
		week := int64(7 * 24 * time.Hour / time.Millisecond)
		now := time.Now().UnixMilli()
		doc := func(name string, term int64) {
			st.put("ul/lease/_/"+name+"/doc", fmt.Sprintf(`{"f":1,"ns":"","n":%q,"t":%d,"e":1,"s":[{"i":0,"w":"x","t":%d,"b":1,"p":{"o":"ok"}}]}`, name, term, term))
			st.put("ul/end/_/"+name+"/1", fmt.Sprintf(`{"n":1,"i":0,"t":%d,"w":"x","b":1,"p":{"o":"ok"}}`, term))
		}
		doc("old", now-week-1000)
		doc("young", now-week+60_000)
		doc("recorded", now-week-1000)
		doc("held", now-week-1000)
		if _, err := s.Records().Put(t.Context(), "", "recorded", backends.Put{Key: "k"}, nil); err != nil {
			t.Fatal(err)
		}
		g := granted(t, s, request("held"))
		for range 2 {
			list, err := s.List(t.Context(), "")
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, l := range list {
				names = append(names, l.Lease)
			}
			if got := strings.Join(names, " "); got != "held recorded young" {
				t.Errorf("List: got %q, want held, recorded and young", got)
			}
		}
		if state, err := s.Inspect(t.Context(), "", "old"); err != nil || len(state.Slots)+len(state.History) != 0 {
			t.Errorf("what is left of the old one: got %+v, %v, want nothing", state, err)
		}
		if next := granted(t, s, request("old")); int64(next.Term) < now {
			t.Errorf("term after it: got %d, want at least the clock", next.Term)
		}
		if err := renewed(t, s, g); err != nil {
			t.Errorf("Renew: got %v, want the grant", err)
		}
	})
}

// One that cannot be shown is named, and hides no other.
func TestAListShowsWaitersAndNamesWhatItCannotShow(t *testing.T) {
	each(t, 1, func(t *testing.T, st *stand) {
		s := st.client(st.addr)
		granted(t, s, request("held"))
		st.put("ul/lease/_/damaged/doc", "{")
		ctx, stop := context.WithCancel(t.Context())
		var waiters sync.WaitGroup
		for range 2 {
			waiters.Go(func() { _ = s.Backend.(backends.Waiter).WaitFree(ctx, request("held")) })
		}
		defer waiters.Wait()
		defer stop()
		servers.Within(t, 10*time.Second, "two wait", func() error {
			state, err := s.Inspect(t.Context(), "", "held")
			if err != nil || state.Waiters == nil || *state.Waiters != 2 {
				return fmt.Errorf("got %+v, %w", state, err)
			}
			return nil
		})
		list, err := s.List(t.Context(), "")
		if !errors.Is(err, backends.ErrBroken) || !strings.Contains(fmt.Sprint(err), "damaged") || backends.Hint(err) == "" {
			t.Errorf("List: got %v with the hint %q, want the damaged one with what to do", err, backends.Hint(err))
		}
		if len(list) != 1 || list[0].Lease != "held" || list[0].Waiters == nil || *list[0].Waiters != 2 {
			t.Errorf("List: got %+v, want the other one with two that wait", list)
		}
		var names []string
		if err := s.Backend.(backends.Walker).Walk(t.Context(), "", func(s backends.State, err error) bool {
			names = append(names, fmt.Sprintf("%s %t", s.Lease, err == nil))
			return true
		}); err != nil {
			t.Errorf("Walk: got %v, want nil", err)
		}
		if got := strings.Join(names, ", "); got != "damaged false, held true" {
			t.Errorf("Walk: got %q, want both with their names, in order", got)
		}
	})
}

// A store that lost everything counts its versions anew. The lease of before and that of after may then have the same ones, and yet a
// release of the former, from what it knew, does not free the latter.
func TestAReleaseAfterALossSparesWhoeverCameAfterIt(t *testing.T) {
	each(t, 1, func(t *testing.T, st *stand) {
		before, after := st.client(st.all), st.client(st.all)
		// The same requests at both times, so that versions are as equal as they can be.
		last := granted(t, before, request("l"))
		st.lose()
		var next backends.Grant
		req := request("l") // of all attempts: one whose answer came too late may have it
		servers.Within(t, 40*time.Second, "a grant after the loss", func() (err error) {
			next, err = acquire(t, after, req)
			return err
		})
		servers.Within(t, 20*time.Second, "the release of a lease that was lost", func() error { return release(t, before, last) })
		if err := renewed(t, after, next); err != nil {
			t.Errorf("Renew of the later holder: got %v, want the grant", err)
		}
		if g, err := answered(t, before, request("l")); !errors.Is(err, backends.ErrBusy) {
			t.Errorf("Acquire beside the later holder: got the term %d, %v, want busy", g.Term, err)
		}
		state, err := after.Inspect(t.Context(), "", "l")
		if err != nil || len(state.Slots) != 1 || state.Slots[0].Term != next.Term || len(state.History) != 0 {
			t.Errorf("the lease: got %+v, %v, want the term %d and no end", state, err, next.Term)
		}
	})
}
