//go:build linux

package proof

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/stamps"
)

// C01, C10, C15, C22: a lease that is gone stops the whole tree, at once where the store tells the holder, else at its next renewal. It is not
// brought back.
func TestNetworkALeaseThatIsGoneStopsItsCommand(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		var flags []string
		limit := every*11/10 + busy
		if n.tells {
			flags, limit = []string{"--ttl", "30s"}, busy // the next renewal would come five seconds later
		}
		last := int64(0)
		for _, how := range n.gone {
			a := n.run(n.straight(), flags, n.job(time.Minute, "tree", "stubborn"))
			term := a.begins()
			if term <= last {
				t.Errorf("%s: term: got %d, want more than %d", how.name, term, last)
			}
			gone := stamps.Now()
			how.do()
			a.wants(74, "lost-taken", `lost: "l" is no longer ours`)
			n.deadBy(term, gone, limit, how.name)
			if got := n.holder(); got != "" {
				t.Errorf("%s: got the holder %q after the loss, want none", how.name, got)
			}
			b := n.run(n.straight(), nil, n.job(10*time.Millisecond))
			if last = b.begins(); last <= term {
				t.Errorf("%s: term: got %d, want more than %d", how.name, last, term)
			}
			b.wants(0, "ok", "")
		}
		judge(t, n.dir)
	})
}

// C01, C12: an unrelated change is no loss; a new holder in the record is, and his grant stays untouched.
func TestNetworkANewHolderInTheRecordIsALoss(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), []string{"--renew-every", often.String()}, n.job(time.Minute))
		a.begins()
		for range 3 {
			n.edit()
			n.renewed(2)
		}
		a.stops(1)
		a = n.run(n.straight(), nil, n.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		n.remove()
		b := n.run(n.straight(), []string{"--wait", "10s"}, n.job(5*time.Second))
		next := b.begins()
		a.wants(74, "lost-taken", "is no longer ours")
		b.wants(0, "ok", "")
		if r := b.reported(); !r.Released || r.Renewals == 0 {
			t.Errorf("the new holder: got %+v, want renewals and a release", r)
		}
		first, _ := n.span(next)
		n.deadBy(term, first, every*11/10+busy, "both ran after the record was deleted by hand")
	})
}

// C02, C09, C20: what guards the tree is not the process that is stopped, and nothing of the store waits for it.
func TestNetworkAStoppedWrapperLosesItsLeaseInTime(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), nil, n.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		stopped := a.signal(syscall.SIGSTOP)
		b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(6*time.Second))
		b.begins()
		n.deadBy(term, stopped, ttl, "wrapper stopped")
		before := n.holder()
		a.signal(syscall.SIGCONT)
		a.wants(74, "lost-expired", "ran out while this process did not run")
		if after := n.holder(); after != before || after == "" {
			t.Errorf("holder after the continued run has ended: got %q, want the new one, %q", after, before)
		}
		b.wants(0, "ok", "")
		judge(t, n.dir)
	})
}

// C03: a server that does not answer, and is the only one.
func TestNetworkAFrozenServerDoesNotKeepTheCommandAlive(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), nil, n.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		frozen := stamps.Now()
		n.server.Freeze()
		a.wants(74, "lost-unreachable", "could not be renewed in time")
		if r := a.reported(); r.Released {
			t.Errorf("report: got %+v, want no release", r)
		}
		n.deadBy(term, frozen, ttl, "server frozen")
		b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
		for stamps.Now() < frozen+int64(2*ttl) && !t.Failed() {
			time.Sleep(50 * time.Millisecond) // the length of the fault
		}
		n.server.Resume()
		b.begins()
		b.wants(0, "ok", "")
		judge(t, n.dir)
	})
}

// C03, C13: a server that does not answer, also while nobody reads the log.
func TestNetworkNobodyReadsTheLog(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a, term := n.unread()
		frozen := stamps.Now()
		n.server.Freeze()
		if got := a.ends(); got != 74 {
			t.Errorf("code: got %d, want 74", got)
		}
		if r := a.reported(); r.Outcome != "lost-unreachable" || r.Released {
			t.Errorf("report: got %+v, want lost-unreachable and no release", r)
		}
		n.deadBy(term, frozen, ttl, "server frozen")
	})
}

// C04: a partition that is shorter than the budget costs nothing, a longer one the command, and only in time.
func TestNetworkAPartition(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.through(), n.paced(), n.job(8*time.Second, "tree"))
		a.begins()
		n.renewed(1)
		n.proxy.BlackHole(proxy.Requests | proxy.Answers)
		time.Sleep(ttl / 3) // the length of the fault
		n.proxy.Heal()
		if got := a.ends(); got != 0 {
			t.Errorf("after a partition of %v: got the code %d and %q, want 0", ttl/3, got, &a.stderr)
		}
		for _, d := range []proxy.Direction{proxy.Requests, proxy.Answers, proxy.Requests | proxy.Answers} {
			a := n.run(n.through(), nil, n.job(time.Minute, "tree", "stubborn"))
			term := a.begins()
			cut := stamps.Now()
			n.proxy.BlackHole(d)
			b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
			a.wants(74, "lost-unreachable", "could not be renewed in time")
			n.deadBy(term, cut, ttl, "partition") // requests may get through, and the store counts anew: we do not
			b.begins()
			b.wants(0, "ok", "")
			n.proxy.Heal()
			judge(t, n.dir)
		}
	})
}

// C05, C06: single lost answers, cut connections and, of one server, a restart are not the command's business. What a cluster does without its
// leader has a case of its own.
func TestNetworkABlipDoesNotStopTheCommand(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		flags := []string{"--renew-every", often.String()}
		if n.slow {
			flags = append(flags, "--ttl", "20s")
		}
		a := n.run(n.through(), flags, n.job(2*time.Minute))
		a.begins()
		for _, kind := range []proxy.Kind{proxy.Lose, proxy.ResetBefore, proxy.ResetAfter} {
			n.proxy.Inject(proxy.Fault{Kind: kind, Match: n.renews})
			servers.Within(t, 10*time.Second, "the fault", func() error {
				if n.proxy.Done(kind) == 0 {
					return errors.New("not yet")
				}
				return nil
			})
			n.renewed(1)
		}
		if n.slow {
			for range 10 {
				n.proxy.Cut()
				n.renewed(1)
			}
		} else {
			n.proxy.CutEvery(100 * time.Millisecond)
			time.Sleep(4 * time.Second) // the length of the fault
			n.proxy.Heal()
			n.renewed(1)
		}
		if n.restart == nil {
			n.server.Kill()
			time.Sleep(time.Second) // the length of the fault
			n.server.Restart()
		}
		n.renewed(10)
		a.stops(10)
		t.Logf("%d connections were cut, %d made", n.proxy.Cuts(), n.proxy.Made())
	})
}

// C06: thirty reconnects in one run, one for each renewal: where those are seen.
func TestNetworkThirtyReconnects(t *testing.T) {
	onEach(t, singles(), func(t *testing.T, n *network) {
		a := n.run(n.through(), []string{"--renew-every", "100ms"}, n.job(time.Minute))
		a.begins()
		for n.proxy.Cuts() < 30 { // one that was given up for its late answer is no longer there to be cut
			n.proxy.Cut()
			n.renewed(1)
		}
		if n.proxy.Cuts() < 30 || n.proxy.Made() < 31 {
			t.Errorf("got %d cuts and %d connections, want 30 and one more", n.proxy.Cuts(), n.proxy.Made())
		}
		a.stops(1) // of one that was cut off it does not know
	})
}

// C07, C08: nothing starts on an outcome that is not known, nor on too little of a lease; the handle settles it.
func TestNetworkAnUnknownGrantIsSettled(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		n.run(n.straight(), nil, n.job(0)).wants(0, "ok", "") // what a store makes once is there
		kept := 0
		for _, c := range []proxy.Fault{
			{Kind: proxy.Late, Delay: ttl * 45 / 100}, // within the attempt's limit of ttl/2: what is left suffices
			{Kind: proxy.Late, Delay: ttl * 6 / 10},
			{Kind: proxy.Late, Delay: ttl * 9 / 10},
			{Kind: proxy.Late, Delay: ttl * 11 / 10},
			{Kind: proxy.Lose},
			{Kind: proxy.ResetBefore},
			{Kind: proxy.ResetAfter},
		} {
			c.Match = n.acquires
			before := n.proxy.Done(c.Kind)
			n.proxy.Inject(c)
			a := n.run(n.through(), roomy, n.job(10*time.Millisecond))
			a.begins()
			a.wants(0, "ok", "")
			if got := n.proxy.Done(c.Kind) - before; got != 1 {
				t.Errorf("%+v: it happened %d times, want once", c, got)
			}
			if c.Delay == ttl*45/100 {
				continue // every attempt would be in time
			}
			c.Count = 100
			n.proxy.Inject(c)
			b := n.run(n.through(), roomy, n.job(10*time.Millisecond))
			if n.finds && b.ends() == 0 {
				b.wants(0, "ok", "") // what the second attempt has found is a lease of ours
			} else {
				b.wants(69, "unavailable", n.proxy.Addr())
				if r := b.reported(); r.Started || r.Term != 0 {
					t.Errorf("%+v every time: got %+v, want nothing started", c, r)
				}
				if got := n.proxy.Done(c.Kind) - before - 1; got != 2 && !n.finds {
					t.Errorf("%+v every time: %d attempts, want 2", c, got)
				}
			}
			n.proxy.Heal()
			kept += n.givenBack(b)
		}
		if kept > 2 {
			t.Errorf("%d grants were not given back, want 2 of 6 at most on a busy machine", kept)
		}
		judge(t, n.dir)
	})
}

// C11: a waiter that was stopped while its turn came and went waits again.
func TestNetworkAStoppedWaiterWaitsAgain(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), nil, n.job(time.Minute))
		a.begins()
		b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
		n.waiters(1)
		b.signal(syscall.SIGSTOP)
		a.signal(syscall.SIGTERM)
		a.ends()
		c := n.run(n.straight(), []string{"--wait", "30s"}, n.job(6*time.Second))
		c.begins()
		time.Sleep(5 * time.Second) // the length of the fault
		b.signal(syscall.SIGCONT)
		b.begins()
		b.wants(0, "ok", "")
		c.wants(0, "ok", "")
		judge(t, n.dir)
	})
}

// failover wants a holder to be told by its next renewal that a server was promoted which has missed its grant. What it does makes a server
// miss what comes, and then makes it the one that answers.
func (n *network) failover(store string, miss, promote func()) {
	t := n.t
	t.Helper()
	const long, pace = 30 * time.Second, 2 * time.Second // rides out the failover, also one that needs a second try
	flags := []string{"--ttl", long.String(), "--renew-every", pace.String(), "--wait", "60s"}
	miss()
	a := n.run(store, flags, n.job(time.Minute, "tree", "stubborn"))
	term := a.begins()
	b := n.run(store, flags, n.job(10*time.Millisecond))
	n.waiters(1)
	promote()
	next := b.begins()
	a.wants(74, "lost-taken", "is no longer ours")
	b.wants(0, "ok", "")
	first, _ := n.span(next)
	n.deadBy(term, first, pace*11/10+busy, "both ran after the failover")
	if next <= term {
		t.Errorf("term: got %d, want more than %d", next, term)
	}
}

// C20: whoever of us is killed, the tree goes, and another run comes.
func TestNetworkAKilledWrapperOrGuardianTakesTheTreeAlong(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		for _, victim := range []string{"wrapper", "guardian"} {
			a := n.run(n.straight(), nil, n.job(time.Minute, "tree", "stubborn"))
			term := a.begins()
			b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
			n.waiters(1)
			limit := grace + 100*time.Millisecond
			var killed int64
			if victim == "wrapper" {
				killed = a.signal(syscall.SIGKILL)
			} else {
				limit = 100 * time.Millisecond
				g := guardian(a.cmd.Process.Pid)
				if !shoot(g, syscall.SIGKILL, func() bool { return guardian(a.cmd.Process.Pid) == g }) {
					t.Fatal("the guardian was not hit")
				}
				killed = stamps.Now()
				a.wants(74, "guardian-lost", "the guardian of")
			}
			b.begins()
			b.wants(0, "ok", "")
			n.deadBy(term, killed, limit+busy, victim+" killed")
			late := time.Duration(b.end - killed)
			t.Logf("%s killed: another run had ended %v later", victim, late)
			if late > n.free+busy {
				t.Errorf("%s killed: another run had ended %v later, want at most %v", victim, late, n.free)
			}
			judge(t, n.dir)
		}
	})
}

// C21: TERM starts no timer; the lease is renewed until the tree is gone, and given back then.
func TestNetworkADrainKeepsTheLease(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), nil, n.job(n.free+ttl/2, "stubborn")) // by far longer than a lease outlives its holder
		term := a.begins()
		b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
		n.waiters(1)
		a.signal(syscall.SIGTERM)
		next := b.begins()
		a.wants(0, "stopped", "")
		b.wants(0, "ok", "")
		if r := a.reported(); !r.Released || r.Renewals < int(ttl/every) {
			t.Errorf("report: got %+v, want a release and a renewal every %v", r, every)
		}
		_, last := n.span(term)
		first, _ := n.span(next)
		if gap := time.Duration(first - last); gap > busy {
			t.Errorf("handover: got %v, want at most %v", gap, busy)
		}
		judge(t, n.dir)
	})
}

// C42, C45: busy for as long as was asked for, and by whom.
func TestNetworkBusyIsSaidOnceAndInTime(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), []string{"--holder", "db1/4711/0a1b2c3d"}, n.job(time.Minute))
		a.begins()
		for wait, most := range map[string]time.Duration{"0": 0, "2s": 2 * time.Second} {
			begun := stamps.Now()
			b := n.run(n.straight(), []string{"--wait", wait}, n.job(10*time.Millisecond))
			b.wants(75, "busy", `busy: "l" is held by db1 (pid 4711) since `)
			if took := time.Duration(b.end - begun); took < most || took > most+300*time.Millisecond+busy {
				t.Errorf("--wait %s: took %v, want %v to 300ms more", wait, took, most)
			}
			if lines := strings.Count(b.stderr.String(), "\n"); lines != 1 || !strings.Contains(b.stderr.String(), "s left") {
				t.Errorf("words: got %q, want one line with what is left", &b.stderr)
			}
			r := b.reported()
			if r.Started || r.Busy == nil || r.Busy.Holder != "db1/4711/0a1b2c3d" || r.Busy.LeftMs == nil || *r.Busy.LeftMs <= 0 || *r.Busy.LeftMs > ttl.Milliseconds() || time.Since(r.Busy.Since) > time.Minute {
				t.Errorf("report: got %+v, busy %+v, want the holder, since when and what is left", r, r.Busy)
			}
		}
	})
}

// C43: a store that is not there is never busy. Nothing is started for it but what was asked for.
func TestNetworkADeadAddressIsUnavailable(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		n.proxy.BlackHole(proxy.Requests | proxy.Answers)
		closed := fmt.Sprintf("127.0.0.1:%d", servers.FreePort(t, 0))
		for _, c := range []struct {
			addr, wait  string
			least, most time.Duration
		}{
			{closed, "0", 0, busy},
			{closed, "1s", 900 * time.Millisecond, 1200*time.Millisecond + busy},
			{n.proxy.Addr(), "0", ttl - 100*time.Millisecond, ttl + 1200*time.Millisecond + busy}, // two attempts of ttl/2, and the try to abandon
			{n.proxy.Addr(), "1s", 900 * time.Millisecond, 2500*time.Millisecond + busy},
		} {
			begun := stamps.Now()
			a := n.run(n.url(c.addr), []string{"--wait", c.wait}, n.job(10*time.Millisecond))
			a.wants(69, "unavailable", c.addr)
			if took := time.Duration(a.end - begun); took < c.least || took > c.most {
				t.Errorf("%s, --wait %s: took %v, want %v to %v", c.addr, c.wait, took, c.least, c.most)
			}
		}
		for flag, exit := range map[string]int{"skip": 75, "run": 0} {
			a := n.run(n.url(closed), []string{"--if-unavailable", flag}, []string{"sh", "-c", "echo ${UNDERLEASE_TERM:-none}"})
			if got := a.ends(); got != exit {
				t.Errorf("--if-unavailable %s: got the code %d and %q, want %d", flag, got, &a.stderr, exit)
			}
			if line := <-a.first; exit == 0 && line != "none" {
				t.Errorf("--if-unavailable run: got the term %q, want none", line)
			}
		}
	})
}

// C47: a waiter that gives up leaves nothing, and one that is killed nothing that holds up others for long.
func TestNetworkAKilledWaiterLeavesNothing(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), nil, n.job(time.Minute))
		a.begins()
		before := n.holder()
		killed := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
		n.waiters(1)
		gives := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
		n.waiters(2)
		gives.signal(syscall.SIGTERM)
		if got := gives.ends(); got != 128+int(syscall.SIGTERM) {
			t.Errorf("a waiter that got TERM: got the code %d, want the signal", got)
		}
		n.waiters(1)
		killed.signal(syscall.SIGKILL)
		killed.ends()
		n.waiters(n.tickets)
		if got := n.holder(); got != before || got == "" {
			t.Errorf("the holder: got %q, want %q as before", got, before)
		}
		b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(10*time.Millisecond))
		n.waiters(n.tickets + 1) // that of the killed one stands first
		ended := a.signal(syscall.SIGTERM)
		b.begins()
		b.wants(0, "ok", "")
		took := time.Duration(b.end - ended)
		t.Logf("the next run had ended %v after the holder", took)
		if took > n.stale+busy {
			t.Errorf("the next run had ended %v after the holder, want at most %v", took, n.stale)
		}
	})
}

// C48: a waiter outlives a restart of the server, or of all, and runs soon after.
func TestNetworkAWaiterSurvivesARestart(t *testing.T) {
	onEach(t, networks(3), func(t *testing.T, n *network) {
		a := n.run(n.all, nil, n.job(time.Minute))
		a.begins()
		b := n.run(n.all, []string{"--wait", "120s"}, n.job(10*time.Millisecond))
		n.waiters(1)
		if n.restart != nil {
			a.signal(syscall.SIGTERM)
			n.restart()
		} else {
			n.server.Kill()
			a.signal(syscall.SIGTERM) // it ends while the server is away
			time.Sleep(2 * every)     // the length of the fault
			n.server.Restart()
		}
		back := stamps.Now()
		b.begins()
		b.wants(0, "ok", "")
		took, limit := time.Duration(b.end-back), n.back
		a.ends()
		released := a.reported().Released
		if !released {
			limit += n.anew
		}
		t.Logf("the waiter had run %v after the server was back; the holder had given back: %t", took, released)
		if took > limit+busy {
			t.Errorf("the waiter had run %v after the server was back, want at most %v", took, limit)
		}
		judge(t, n.dir)
	})
}

// C49: eight waiters, jobs that take no time.
func TestNetworkEightWaitersAreSoonDone(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		a := n.run(n.straight(), nil, n.job(time.Minute, "obedient")) // a handover after a clean end
		a.begins()
		begun, last := n.handOn(a, n.queue(n.straight(), 8, "--wait", "60s"))
		took := time.Duration(last - begun)
		median, p99 := n.handovers()
		t.Logf("eight waiters: %v; handover: median %v, p99 %v", took, median, p99)
		if took > n.soon+busy {
			t.Errorf("eight waiters took %v, want at most %v", took, n.soon)
		}
		judge(t, n.dir)
	})
}

// C61: what tells two runs apart is neither a host's name nor a pid.
func TestNetworkTwoContainersWithOneNameAndOnePid(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		var all []*live
		for range 4 {
			all = append(all, n.contained("same", "--wait", "60s"))
		}
		for _, l := range all {
			l.begins()
			if got := l.ends(); got != 0 {
				t.Errorf("got the code %d and %q, want 0", got, &l.stderr)
			}
		}
		if r := judge(t, n.dir); r.Runs != 4 {
			t.Errorf("got %d runs, want 4", r.Runs)
		}
	})
}

// C64: terms grow in the order in which commands ran, and no two run at once.
func TestNetworkContendersNeverOverlap(t *testing.T) {
	onEach(t, networks(3), func(t *testing.T, n *network) {
		rounds := n.contests
		if testing.Short() {
			rounds = 100
		}
		var begun atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for begun.Add(1) <= int64(rounds) && !t.Failed() {
					c := underlease("--backend", n.all, "--wait", "2m", "l", "--", bin.job, n.dir, "0s")
					var words bytes.Buffer
					c.Stderr = &words
					if err := c.Run(); err != nil {
						t.Errorf("got %v and %q, want 0", err, &words)
					}
				}
			})
		}
		wg.Wait()
		if r := judge(t, n.dir); r.Runs != rounds {
			t.Errorf("got %d runs, want %d", r.Runs, rounds)
		}
		median, p99 := n.handovers()
		t.Logf("handover, from the last stamp of one to the first of the next: median %v, p99 %v", median, p99)
	})
}

// C65: one execution in the time of the hold, whatever becomes of the one that ran.
func TestNetworkAHoldOutlivesItsRun(t *testing.T) {
	onEach(t, networks(1), func(t *testing.T, n *network) {
		brief := []string{"--ttl", "3s", "--margin", "300ms"} // a lease that ends long before the hold does
		for _, end := range []string{"by itself", "killed"} {
			const hold = 10 * time.Second
			n.remove()
			begun := stamps.Now()
			lasts := 100 * time.Millisecond
			if end == "killed" {
				lasts = time.Minute
			}
			a := n.run(n.straight(), append([]string{"--min-hold", hold.String()}, brief...), n.job(lasts))
			a.begins()
			if end == "killed" {
				a.signal(syscall.SIGKILL)
			}
			a.ends()
			if took := time.Duration(a.end - begun); took > hold/2 {
				t.Errorf("%s: the run took %v, want its command's 100ms and no hold", end, took)
			}
			for _, at := range []time.Duration{200 * time.Millisecond, 900 * time.Millisecond, 2 * time.Second, 4 * time.Second} {
				time.Sleep(time.Duration(begun + int64(at) - stamps.Now())) // the pace of the starts
				n.run(n.straight(), nil, n.job(0)).wants(75, "busy", "busy: ")
			}
			b := n.run(n.straight(), []string{"--wait", "60s"}, n.job(0))
			b.begins()
			b.wants(0, "ok", "")
			took := time.Duration(b.end - begun)
			t.Logf("%s: the next run had ended after %v", end, took)
			if took < hold || took > n.held+busy {
				t.Errorf("%s: the next run had ended after %v, want %v to %v", end, took, hold, n.held)
			}
		}
		judge(t, n.dir)
	})
}

// Credentials are nowhere: not in words and not in reports.
func TestNetworkSecretsAreShownNowhere(t *testing.T) {
	const secret = "s3cr3t-pass"
	user := func(scheme, name, rest string) func(addr string) string {
		return func(addr string) string { return scheme + "://" + name + ":" + secret + "@" + addr + rest }
	}
	on := func(n *network, url func(string) string) *network { n.url = url; return n }
	const refused = "refused user or password"
	for _, s := range []struct {
		start[*network]
		refused string
	}{
		{start[*network]{"redis", func(t *testing.T) *network {
			r := servers.StartRedis(t, servers.RedisOptions{User: "lease", Password: secret})
			return on(onRedis(t, r), user("redis", "lease", ""))
		}}, refused},
		{start[*network]{"etcd", func(t *testing.T) *network {
			return on(onEtcd(t, 1, servers.EtcdOptions{Password: secret}).network, user("etcd", "root", ""))
		}}, refused},
		{start[*network]{"consul", func(t *testing.T) *network {
			return on(onConsul(t, 1, servers.ConsulOptions{Token: secret}).network, user("consul", "", ""))
		}}, "the token"},
		{start[*network]{"postgres", func(t *testing.T) *network {
			return on(onPostgres(t, servers.PostgresOptions{Password: secret}).network, user("postgres", "lease", "/lease"))
		}}, refused},
		{start[*network]{"mariadb", func(t *testing.T) *network {
			return on(onMariaDB(t, servers.MariaDBOptions{Password: secret}).network, user("mysql", "lease", "/lease"))
		}}, refused},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			n := s.on(t)
			flags := []string{"--log-level", "debug", "--ttl", "20s"}
			right := n.run(n.straight(), flags, n.job(10*time.Millisecond))
			right.begins()
			if got := right.ends(); got != 0 {
				t.Errorf("got the code %d and %q, want 0", got, &right.stderr)
			}
			wrong := n.run(strings.Replace(n.straight(), secret, secret+"x", 1), flags, n.job(0))
			wrong.wants(77, "denied", s.refused)
			away := n.run(n.url(fmt.Sprintf("127.0.0.1:%d", servers.FreePort(t, 0))), flags, n.job(0))
			away.wants(69, "unavailable", "connection refused")
			for _, l := range []*live{right, wrong, away} {
				if all := l.said(); strings.Contains(all, secret) {
					t.Errorf("the secret is shown:\n%s", all)
				}
			}
		})
	}
}
