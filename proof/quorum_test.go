//go:build linux

package proof

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/stamps"
)

// quorum is a store that keeps leases by sessions.
type quorum struct {
	*network
	end      func() // ends the holder's session
	lose     func() // everything, by a restart
	leader   func() *servers.Process
	requests func() int    // that the server has got; at Consul those that came through the proxy
	counting func() string // the URL by which requests are counted
}

// key is the one of the holder of the lease l.
const key = "ul/lease/_/l/slot/0/grant"

// sessions is what all stores have in common that keep leases by sessions.
func sessions(t *testing.T, addr string, url func(string) string) *quorum {
	n := &network{
		t: t, dir: t.TempDir(), proxy: proxy.New(t, addr), addr: addr, url: url, all: url(addr),
		tells: true, finds: true,
		tickets: 1, stale: 21 * time.Second, // a ticket lives for 10 s, at Consul for up to twice that
		soon: time.Second, contests: 500,
		back: 5 * time.Second, anew: 2 * ttl, // a new leader counts every lease anew
	}
	q := &quorum{network: n}
	n.gone = []deed{{"delete", func() { q.remove() }}, {"session", func() { q.end() }}}
	return q
}

func onEtcd(t *testing.T, nodes int, o servers.EtcdOptions) *quorum {
	t.Helper()
	c := servers.StartEtcd(t, nodes, o)
	n := c.Nodes[0]
	q := sessions(t, n.Addr(), func(addr string) string { return "etcd://" + addr })
	q.all, q.acquires = q.url(strings.Join(c.Addrs(), ",")), `{"h":"`
	q.free, q.held = ttl+time.Second, 11*time.Second
	q.lose, q.restart, q.server = c.Lose, c.Restart, n
	q.leader = func() *servers.Process { l, _ := c.Leader(); return l.Process }
	q.requests, q.counting = n.Requests, q.straight // it counts by itself
	q.holder = func() string { return n.Get(key)[key] }
	q.queued = func() int { return len(n.Get("ul/queue/_/l/")) }
	q.remove, q.end = func() { n.Delete("ul/") }, func() { n.Revoke(key) }
	q.edit = func() {
		n.Put(key, q.holder(), true)
		n.Put("ul/lease/_/l/note", "somebody else's", false)
	}
	return q
}

func onConsul(t *testing.T, nodes int, o servers.ConsulOptions) *quorum {
	t.Helper()
	c := servers.StartConsul(t, nodes, o)
	n := c.Nodes[0]
	if nodes > 1 { // the agent of a host is no server that leads, as a rule
		_, others := c.Leader()
		n = others[0]
	}
	q := sessions(t, n.Addr(), func(addr string) string { return "consul://" + addr + "?session-ttl-min=1s" })
	q.acquires = `"Verb":"lock"`
	q.free, q.held = 2*ttl+time.Second, 22*time.Second // a session of D lasts for D to 2 D, at least 10 s where session_ttl_min was not lowered
	q.lose, q.restart, q.server = c.Lose, c.Restart, n
	q.leader = func() *servers.Process { l, _ := c.Leader(); return l.Process }
	trips := 0
	q.requests, q.counting = func() int { trips += q.proxy.Trips(); return trips }, q.through
	q.holder = func() string { return n.Get(key) }
	q.queued = func() int { return len(n.Keys("ul/queue/_/l/")) }
	q.remove, q.end = func() { n.Delete("ul/") }, func() { n.Destroy(key) }
	q.edit = func() {
		n.Do("PUT", "/v1/kv/"+key+"?flags=42", []byte(q.holder()))
		n.Do("PUT", "/v1/kv/ul/lease/_/l/note", []byte("somebody else's"))
	}
	return q
}

// quorums are the stores that keep leases by sessions, on so many servers.
func quorums(nodes int) []start[*quorum] {
	return []start[*quorum]{
		{"etcd", func(t *testing.T) *quorum { return onEtcd(t, nodes, servers.EtcdOptions{}) }},
		{"consul", func(t *testing.T) *quorum { return onConsul(t, nodes, servers.ConsulOptions{}) }},
	}
}

// C15: the servers are started without what they knew, under a holder.
func TestQuorumALostStoreStopsTheHolder(t *testing.T) {
	onEach(t, quorums(3), func(t *testing.T, q *quorum) {
		a := q.run(q.all, []string{"--ttl", "20s"}, q.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		q.lose()
		if got := a.ends(); got != 74 {
			t.Errorf("code: got %d and %q, want 74", got, &a.stderr)
		}
		b := q.run(q.all, []string{"--wait", "60s"}, q.job(10*time.Millisecond))
		if next := b.begins(); next <= term {
			t.Errorf("term: got %d, want more than %d", next, term)
		}
		b.wants(0, "ok", "")
		judge(t, q.dir)
	})
}

// C03, C14: the leader of three is frozen, or killed: with a ttl that outlasts the election the command lives on, and the lease
// is nobody else's; a ttl that does not is too short, and the command is dead in time.
func TestQuorumALeaderThatIsGone(t *testing.T) {
	for _, how := range []string{"freeze", "kill"} {
		t.Run(how, func(t *testing.T) {
			onEach(t, quorums(3), func(t *testing.T, q *quorum) {
				long := q.run(q.all, []string{"--ttl", "20s"}, q.job(15*time.Second))
				term := long.begins()
				leader := q.leader()
				if how == "freeze" {
					leader.Freeze()
				} else {
					leader.Kill()
				}
				gone := stamps.Now()
				b := q.run(q.all, []string{"--ttl", "20s", "--wait", "60s"}, q.job(10*time.Millisecond))
				long.wants(0, "ok", "")
				if r := long.reported(); r.Renewals == 0 || !r.Released {
					t.Errorf("report: got %+v, want renewals and a release", r)
				}
				b.begins()
				b.wants(0, "ok", "")
				t.Logf("term %d; the next run had ended %v after the leader was gone", term, time.Duration(b.end-gone))
				if how == "freeze" {
					leader.Resume()
				}
				judge(t, q.dir)
			})
		})
	}
}

// What a handover costs does not grow with those that wait. The limits are far above what a quiet machine shows: what is counted decides.
// An agent of Consul takes 200 connections of one host: a hundred that wait at one are within that.
func TestQuorumAHandoverCostsTheSameWithManyWaiters(t *testing.T) {
	// Consul takes nearly the bar where nothing else runs, and more with a hundred.
	const many = 100 * time.Millisecond
	for _, c := range []struct {
		name   string
		start  func(t *testing.T) *quorum
		many   []int
		median []time.Duration
		most   float64 // requests for each handover
	}{
		{"etcd", func(t *testing.T) *quorum { return onEtcd(t, 1, servers.EtcdOptions{}) }, []int{8, 100}, []time.Duration{longestHandover, longestHandover}, 12},
		{"consul", func(t *testing.T) *quorum { return onConsul(t, 1, servers.ConsulOptions{}) }, []int{8, 100}, []time.Duration{2 * longestHandover, many}, 16},
	} {
		var each []float64
		for i, waiters := range c.many {
			fewest := math.Inf(1) // of several measurements, as the median is
			name := fmt.Sprintf("%s, %d waiters", c.name, waiters)
			handover(t, name, c.median[i], func() (median time.Duration) {
				counts := false
				t.Run(name, func(t *testing.T) {
					q := c.start(t)
					counts = q.counting() == q.straight()
					var requests float64
					requests, median = handoversOf(t, c.name, q, q.counting(), waiters)
					fewest = min(fewest, requests)
				})
				if !counts { // a proxy takes its time
					t.Run(name+", straight", func(t *testing.T) {
						q := c.start(t)
						_, median = handoversOf(t, c.name, q, q.straight(), waiters)
					})
				}
				return median
			})
			each = append(each, fewest)
		}
		if each[0] > c.most || each[1] > c.most || each[1] > 1.5*each[0]+1 {
			t.Errorf("%s: got %.1f requests for each handover with %d waiters, %.1f with %d, want at most %v, and hardly more", c.name, each[0], c.many[0], each[1], c.many[1], c.most)
		}
	}
}

// handoversOf hands a lease on from one waiter to the next, and returns what each handover takes.
func handoversOf(t *testing.T, name string, q *quorum, url string, waiters int) (requests float64, median time.Duration) {
	t.Helper()
	a := q.run(q.straight(), nil, q.job(time.Minute, "obedient")) // a handover after a clean end
	a.begins()
	all := q.queue(url, waiters, "--ttl", "60s", "--wait", "120s")
	// Each of those that wait keeps its place and looks now and then, however long it waits: that is no part of a handover.
	before, from := q.requests(), stamps.Now()
	time.Sleep(4 * time.Second) // the time in which that is counted
	waiting := float64(q.requests()-before) / time.Duration(stamps.Now()-from).Seconds() / float64(waiters)
	before = q.requests()
	begun, last := q.handOn(a, all)
	waited := 0.0
	for _, b := range all {
		waited += time.Duration(b.end - begun).Seconds()
	}
	requests = (float64(q.requests()-before) - waiting*waited) / float64(waiters)
	judge(t, q.dir)
	median, p99 := q.handovers()
	t.Logf("%s, %d waiters in %v: %.1f requests and a median of %v for each handover, p99 %v; %.1f requests a second for each that waits",
		name, waiters, time.Duration(last-begun), requests, median, p99, waiting)
	return requests, median
}
