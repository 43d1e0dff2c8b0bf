//go:build linux

package proof

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
	"github.com/underlease/underlease/proof/stamps"
)

// database is a store that keeps leases in the rows of a table.
type database struct {
	*field
	server interface {
		Do(sql string) string
		Freeze()
		Resume()
		Kill()
		Stop()
		Restart()
	}
	acquires string // bytes that only the request has that takes a slot
	renews   string // and the one that renews
	row      string // the condition of the row of the lease l
}

// statement runs SQL where it can, and returns nothing where there is no table yet.
func (d *database) statement(sql string) string {
	d.t.Helper()
	if d.server.Do("SELECT count(*) FROM information_schema.tables WHERE table_name = 'underlease'") == "0" {
		return ""
	}
	return d.server.Do(sql)
}

func (d *database) revision() string {
	d.t.Helper()
	return d.server.Do("SELECT revision FROM underlease WHERE " + d.row)
}

// renewed waits for a renewal that begins after the call.
func (d *database) renewed() {
	d.t.Helper()
	before := d.revision()
	servers.Within(d.t, 30*time.Second, "a renewal", func() error {
		if d.revision() == before {
			return errors.New("none yet")
		}
		return nil
	})
}

func onPostgres(t *testing.T, o servers.PostgresOptions) *database {
	t.Helper()
	p := servers.StartPostgres(t, o)
	d := &database{
		field:  &field{t: t, dir: t.TempDir(), proxy: proxy.New(t, p.Addr()), addr: p.Addr()},
		server: p, acquires: "SET (revision, term, gone, slots", renews: "RETURNING u.slots->$3", row: `lease = '\x6c'`,
	}
	d.url = func(addr string) string { return "postgres://lease@" + addr + "/lease?sslmode=disable" }
	d.holder = func() string {
		return d.statement("SELECT slots->0->>'h' || (slots->0->>'t') FROM underlease WHERE slots->0->>'h' <> '' AND " + d.row)
	}
	d.queued = func() int {
		n, _ := strconv.Atoi(p.Do("SELECT count(*) - 1 FROM pg_stat_activity WHERE usename = 'lease' AND state = 'idle'"))
		return n
	}
	return d
}

func onMariaDB(t *testing.T, o servers.MariaDBOptions) *database {
	t.Helper()
	m := servers.StartMariaDB(t, o)
	d := &database{
		field:  &field{t: t, dir: t.TempDir(), proxy: proxy.New(t, m.Addr()), addr: m.Addr()},
		server: m, acquires: "own = 0, choice = CASE", renews: "LAST_INSERT_ID", row: "lease = 'l'",
	}
	d.url = func(addr string) string { return "mysql://lease@" + addr + "/lease" }
	d.holder = func() string {
		return d.statement("SELECT CONCAT(JSON_VALUE(slots, '$[0].h'), JSON_VALUE(slots, '$[0].t')) FROM underlease WHERE JSON_VALUE(slots, '$[0].h') <> '' AND " + d.row)
	}
	d.queued = func() int {
		n, _ := strconv.Atoi(m.Do("SELECT count(*) - 1 FROM information_schema.processlist WHERE user = 'lease' AND command = 'Sleep'"))
		return n
	}
	return d
}

// databases runs a case on PostgreSQL and on MariaDB, which keep what they have said.
func databases(t *testing.T, f func(*testing.T, *database)) {
	t.Helper()
	t.Parallel()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		f(t, onPostgres(t, servers.PostgresOptions{Durable: true}))
	})
	t.Run("mariadb", func(t *testing.T) {
		t.Parallel()
		f(t, onMariaDB(t, servers.MariaDBOptions{Args: []string{"--innodb-flush-log-at-trx-commit=1"}}))
	})
}

// C01, C10, C15, C22: a lease that is gone stops the whole tree at the next renewal, and is not brought back.
func TestDatabaseALeaseThatIsGoneStopsItsCommand(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		last := int64(0)
		for _, how := range []string{"DELETE FROM underlease", "DROP TABLE underlease", "UPDATE underlease SET slots = '[]'"} {
			a := d.run(d.straight(), nil, d.job(time.Minute, "tree", "stubborn"))
			term := a.begins()
			if term <= last {
				t.Errorf("%s: term: got %d, want more than %d", how, term, last)
			}
			last = term
			gone := stamps.Now()
			d.server.Do(how)
			a.wants(74, "lost-taken", `lost: "l" is no longer ours`)
			d.deadBy(term, gone, every*11/10+busy, how)
			if got := d.holder(); got != "" {
				t.Errorf("%s: got the holder %q after the loss, want none", how, got)
			}
		}
		b := d.run(d.straight(), nil, d.job(10*time.Millisecond))
		if next := b.begins(); next <= last {
			t.Errorf("term: got %d, want more than %d", next, last)
		}
		b.wants(0, "ok", "")
		judge(t, d.dir)
	})
}

// C01, C12: an unrelated change is no loss; a new holder in the row is, and his grant stays untouched.
func TestDatabaseANewHolderInTheRowIsALoss(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		d.server.Do("UPDATE underlease SET gone = gone + 1, revision = revision + 100")
		d.server.Do("ALTER TABLE underlease ADD COLUMN note text")
		d.renewed()
		d.renewed()
		d.server.Do("DELETE FROM underlease")
		b := d.run(d.straight(), []string{"--wait", "10s"}, d.job(5*time.Second))
		next := b.begins()
		a.wants(74, "lost-taken", "is no longer ours")
		b.wants(0, "ok", "")
		if r := b.reported(); !r.Released || r.Renewals == 0 {
			t.Errorf("the new holder: got %+v, want renewals and a release", r)
		}
		first, _ := d.span(next)
		d.deadBy(term, first, every*11/10+busy, "both ran after the row was deleted by hand")
	})
}

// C02, C09, C20: what guards the tree is not the process that is stopped, and no lock of the database waits for it.
func TestDatabaseAStoppedWrapperLosesItsLeaseInTime(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		stopped := a.signal(syscall.SIGSTOP)
		b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(6*time.Second))
		b.begins()
		d.deadBy(term, stopped, ttl, "wrapper stopped")
		before := d.holder()
		a.signal(syscall.SIGCONT)
		a.wants(74, "lost-expired", "ran out while this process did not run")
		if after := d.holder(); after != before || after == "" {
			t.Errorf("holder after the continued run has ended: got %q, want the new one, %q", after, before)
		}
		b.wants(0, "ok", "")
		judge(t, d.dir)
	})
}

// C03: a server that does not answer.
func TestDatabaseAFrozenServerDoesNotKeepTheCommandAlive(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		frozen := stamps.Now()
		d.server.Freeze()
		a.wants(74, "lost-unreachable", "could not be renewed in time")
		d.deadBy(term, frozen, ttl, "server frozen")
		b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
		for stamps.Now() < frozen+int64(2*ttl) && !t.Failed() {
			time.Sleep(50 * time.Millisecond) // the length of the fault
		}
		d.server.Resume()
		b.begins()
		b.wants(0, "ok", "")
		judge(t, d.dir)
	})
}

// C03, C13: a server that does not answer, also while nobody reads the log.
func TestDatabaseNobodyReadsTheLog(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a, term := d.unread()
		frozen := stamps.Now()
		d.server.Freeze()
		if got := a.ends(); got != 74 {
			t.Errorf("code: got %d, want 74", got)
		}
		if r := a.reported(); r.Outcome != "lost-unreachable" || r.Released {
			t.Errorf("report: got %+v, want lost-unreachable and no release", r)
		}
		d.deadBy(term, frozen, ttl, "server frozen")
	})
}

// C04: a partition that is shorter than the budget costs nothing, a longer one the command, and only in time.
func TestDatabaseAPartition(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.through(), nil, d.job(8*time.Second, "tree"))
		a.begins()
		d.renewed()
		d.proxy.BlackHole(proxy.Requests | proxy.Answers)
		time.Sleep(ttl / 3) // the length of the fault
		d.proxy.Heal()
		if got := a.ends(); got != 0 {
			t.Errorf("after a partition of %v: got the code %d and %q, want 0", ttl/3, got, &a.stderr)
		}
		for _, way := range []proxy.Direction{proxy.Requests, proxy.Answers, proxy.Requests | proxy.Answers} {
			a := d.run(d.through(), nil, d.job(time.Minute, "tree", "stubborn"))
			term := a.begins()
			cut := stamps.Now()
			d.proxy.BlackHole(way)
			b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
			a.wants(74, "lost-unreachable", "could not be renewed in time")
			d.deadBy(term, cut, ttl, "partition")
			b.begins()
			b.wants(0, "ok", "")
			d.proxy.Heal()
			judge(t, d.dir)
		}
	})
}

// C05, C06: single lost answers, cut connections and a restart are not the command's business.
func TestDatabaseABlipDoesNotStopTheCommand(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		const long = 20 * time.Second // a database needs longer to be back than other stores
		a := d.run(d.through(), []string{"--ttl", long.String(), "--renew-every", often.String()}, d.job(35*time.Second))
		a.begins()
		for _, kind := range []proxy.Kind{proxy.Lose, proxy.ResetBefore, proxy.ResetAfter} {
			d.proxy.Inject(proxy.Fault{Kind: kind, Match: d.renews})
			servers.Within(t, 10*time.Second, "the fault", func() error {
				if d.proxy.Done(kind) == 0 {
					return errors.New("not yet")
				}
				return nil
			})
			d.renewed()
		}
		for range 10 {
			d.proxy.Cut()
			d.renewed()
		}
		d.server.Kill()
		d.server.Restart()
		d.renewed()
		a.wants(0, "ok", "")
		t.Logf("%d connections were cut", d.proxy.Cuts())
		if r := a.reported(); r.Renewals < 10 || !r.Released {
			t.Errorf("report: got %+v, want renewals and a release", r)
		}
	})
}

// C06: thirty reconnects in one run.
func TestDatabaseThirtyReconnects(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.through(), []string{"--renew-every", "100ms"}, d.job(time.Minute))
		a.begins()
		for d.proxy.Cuts() < 30 { // one that was given up for its late answer is no longer there to be cut
			d.proxy.Cut()
			d.renewed()
		}
		if d.proxy.Cuts() < 30 || d.proxy.Made() < 31 {
			t.Errorf("got %d cuts and %d connections, want 30 and one more", d.proxy.Cuts(), d.proxy.Made())
		}
		a.signal(syscall.SIGTERM)
		if got := a.ends(); got != 128+int(syscall.SIGTERM) || a.reported().Outcome != "stopped" {
			t.Errorf("got the code %d and %+v, want the end by TERM that we sent", got, a.reported())
		}
	})
}

// C07, C08: nothing starts on an outcome that is not known, nor on too little of a lease; the handle settles it.
func TestDatabaseAnUnknownGrantIsSettled(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		d.run(d.straight(), nil, d.job(0)).wants(0, "ok", "") // the tables are there
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
			c.Match = d.acquires
			before := d.proxy.Done(c.Kind)
			d.proxy.Inject(c)
			a := d.run(d.through(), roomy, d.job(10*time.Millisecond))
			a.begins()
			a.wants(0, "ok", "")
			if got := d.proxy.Done(c.Kind) - before; got != 1 {
				t.Errorf("%+v: it happened %d times, want once", c, got)
			}
			if c.Delay == ttl*45/100 {
				continue // every attempt would be in time
			}
			c.Count = 100
			d.proxy.Inject(c)
			b := d.run(d.through(), roomy, d.job(10*time.Millisecond))
			b.wants(69, "unavailable", d.proxy.Addr())
			if r := b.reported(); r.Started || r.Term != 0 {
				t.Errorf("%+v every time: got %+v, want nothing started", c, r)
			}
			d.proxy.Heal()
			if got := d.proxy.Done(c.Kind) - before - 1; got != 2 {
				t.Errorf("%+v every time: %d attempts, want 2", c, got)
			}
			kept += d.givenBack(b)
		}
		if kept > 2 {
			t.Errorf("%d grants were not given back, want 2 of 6 at most on a busy machine", kept)
		}
		judge(t, d.dir)
	})
}

// C11: a waiter that was stopped while its turn came and went waits again.
func TestDatabaseAStoppedWaiterWaitsAgain(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute))
		a.begins()
		b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
		d.waiters(1)
		b.signal(syscall.SIGSTOP)
		a.signal(syscall.SIGTERM)
		a.ends()
		c := d.run(d.straight(), []string{"--wait", "30s"}, d.job(6*time.Second))
		c.begins()
		time.Sleep(5 * time.Second) // the length of the fault
		b.signal(syscall.SIGCONT)
		b.begins()
		b.wants(0, "ok", "")
		c.wants(0, "ok", "")
		judge(t, d.dir)
	})
}

// C14: a replica that missed the grant is promoted. The old holder is told by its next renewal.
func TestPostgresAFailoverThatForgetsTheGrantIsNoticedAtTheNextRenewal(t *testing.T) {
	t.Parallel()
	d := onPostgres(t, servers.PostgresOptions{Durable: true})
	p := d.server.(*servers.Postgres)
	d.run(d.straight(), nil, d.job(0)).wants(0, "ok", "") // the tables are there
	r := p.Replica()
	store := "postgres://lease@" + p.Addr() + "," + r.Addr() + "/lease?sslmode=disable"
	const long, pace = 30 * time.Second, 2 * time.Second // rides out the failover
	flags := []string{"--ttl", long.String(), "--renew-every", pace.String(), "--wait", "60s"}
	r.Kill()
	a := d.run(store, flags, d.job(time.Minute, "tree", "stubborn"))
	term := a.begins()
	b := d.run(store, flags, d.job(10*time.Millisecond))
	d.waiters(1)
	p.Kill()
	r.Restart()
	r.Promote()
	next := b.begins()
	a.wants(74, "lost-taken", "is no longer ours")
	b.wants(0, "ok", "")
	first, _ := d.span(next)
	d.deadBy(term, first, pace*11/10+busy, "both ran after the failover")
	if next <= term {
		t.Errorf("term: got %d, want more than %d", next, term)
	}
}

// C42, C45: busy for as long as was asked for, and by whom.
func TestDatabaseBusyIsSaidOnceAndInTime(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), []string{"--holder", "db1/4711/0a1b2c3d"}, d.job(time.Minute))
		a.begins()
		for wait, most := range map[string]time.Duration{"0": 0, "2s": 2 * time.Second} {
			begun := stamps.Now()
			b := d.run(d.straight(), []string{"--wait", wait}, d.job(10*time.Millisecond))
			b.wants(75, "busy", `busy: "l" is held by db1 (pid 4711) since `)
			if took := time.Duration(b.end - begun); took < most || took > most+300*time.Millisecond+busy {
				t.Errorf("--wait %s: took %v, want %v to 300ms more", wait, took, most)
			}
			r := b.reported()
			if r.Started || r.Busy == nil || r.Busy.Holder != "db1/4711/0a1b2c3d" || r.Busy.LeftMs == nil || *r.Busy.LeftMs <= 0 || *r.Busy.LeftMs > ttl.Milliseconds() || time.Since(r.Busy.Since) > time.Minute {
				t.Errorf("report: got %+v, busy %+v, want the holder, since when and what is left", r, r.Busy)
			}
		}
	})
}

// C43: a store that is not there is never busy.
func TestDatabaseADeadAddressIsUnavailable(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		d.proxy.BlackHole(proxy.Requests | proxy.Answers)
		closed := fmt.Sprintf("127.0.0.1:%d", servers.FreePort(t, 0))
		for _, c := range []struct {
			addr, wait  string
			least, most time.Duration
		}{
			{closed, "0", 0, busy},
			{closed, "1s", 900 * time.Millisecond, 1200*time.Millisecond + busy},
			{d.proxy.Addr(), "0", ttl - 100*time.Millisecond, ttl + 1200*time.Millisecond + busy}, // two attempts of ttl/2, and the try to abandon
			{d.proxy.Addr(), "1s", 900 * time.Millisecond, 2500*time.Millisecond + busy},
		} {
			begun := stamps.Now()
			a := d.run(d.url(c.addr), []string{"--wait", c.wait}, d.job(10*time.Millisecond))
			a.wants(69, "unavailable", c.addr)
			if took := time.Duration(a.end - begun); took < c.least || took > c.most {
				t.Errorf("%s, --wait %s: took %v, want %v to %v", c.addr, c.wait, took, c.least, c.most)
			}
		}
	})
}

// C47: a waiter that is killed, or gives up, leaves nothing.
func TestDatabaseAKilledWaiterLeavesNothing(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute))
		a.begins()
		before := d.holder()
		killed := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
		d.waiters(1)
		gives := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
		d.waiters(2)
		killed.signal(syscall.SIGKILL)
		gives.signal(syscall.SIGTERM)
		killed.ends()
		if got := gives.ends(); got != 128+int(syscall.SIGTERM) {
			t.Errorf("a waiter that got TERM: got the code %d, want the signal", got)
		}
		if got := d.holder(); got != before || got == "" {
			t.Errorf("the holder: got %q, want %q as before", got, before)
		}
		d.waiters(0)
		b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
		d.waiters(1)
		ended := a.signal(syscall.SIGTERM)
		b.begins()
		b.wants(0, "ok", "")
		if took := time.Duration(b.end - ended); took > time.Second+busy {
			t.Errorf("the next run had ended %v after the holder, want at most 1s", took)
		}
	})
}

// C48: a waiter survives a restart of the server, and runs soon after.
func TestDatabaseAWaiterSurvivesARestart(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute))
		a.begins()
		b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(10*time.Millisecond))
		d.waiters(1)
		d.server.Kill()
		a.signal(syscall.SIGTERM) // it ends while the server is away
		time.Sleep(2 * every)     // the length of the fault
		d.server.Restart()
		back := stamps.Now()
		b.begins()
		b.wants(0, "ok", "")
		if took := time.Duration(b.end - back); took > ttl+busy { // the holder could not give back
			t.Errorf("the waiter had run %v after the server was back, want at most %v", took, ttl)
		}
		judge(t, d.dir)
	})
}

// C49: eight waiters, jobs that take no time: within a second where they are told.
func TestDatabaseEightWaitersAreSoonDone(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		a := d.run(d.straight(), nil, d.job(time.Minute, "obedient"))
		a.begins()
		var all []*live
		for i := range 8 {
			all = append(all, d.run(d.straight(), []string{"--wait", "60s"}, d.job(0)))
			d.waiters(i + 1)
		}
		ended := a.signal(syscall.SIGTERM)
		last := int64(0)
		for _, b := range all {
			b.wants(0, "ok", "")
			last = max(last, b.end)
		}
		took := time.Duration(last - ended)
		median, p99 := d.handovers()
		t.Logf("eight waiters: %v; handover: median %v, p99 %v", took, median, p99)
		// A second is the bar where they are told. On a busy machine it takes as long as looking does: the longest wait between two looks, eight times.
		const limit = 8 * 375 * time.Millisecond
		if took > limit+busy {
			t.Errorf("eight waiters took %v, want at most %v", took, limit)
		}
		judge(t, d.dir)
	})
}

// C61: what tells two runs apart is neither a host's name nor a pid.
func TestDatabaseTwoContainersWithOneNameAndOnePid(t *testing.T) {
	databases(t, func(t *testing.T, d *database) { d.twoContainers() })
}

// C64: terms grow in the order in which commands ran, and no two run at once.
func TestDatabaseContendersNeverOverlap(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		rounds := 500
		if testing.Short() {
			rounds = 100
		}
		var begun atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for begun.Add(1) <= int64(rounds) && !t.Failed() {
					c := underlease("--backend", d.straight(), "--wait", "2m", "l", "--", bin.job, d.dir, "0s")
					var words bytes.Buffer
					c.Stderr = &words
					if err := c.Run(); err != nil {
						t.Errorf("got %v and %q, want 0", err, &words)
					}
				}
			})
		}
		wg.Wait()
		if r := judge(t, d.dir); r.Runs != rounds {
			t.Errorf("got %d runs, want %d", r.Runs, rounds)
		}
		median, p99 := d.handovers()
		t.Logf("handover, from the last stamp of one to the first of the next: median %v, p99 %v", median, p99)
	})
}

// C65: one execution in the time of the hold, whatever becomes of the one that ran.
func TestDatabaseAHoldOutlivesItsRun(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		for _, end := range []string{"by itself", "killed"} {
			d.statement("DELETE FROM underlease")
			const hold = 10 * time.Second
			begun := stamps.Now()
			lasts := 100 * time.Millisecond
			if end == "killed" {
				lasts = time.Minute
			}
			a := d.run(d.straight(), append([]string{"--min-hold", hold.String()}, brief...), d.job(lasts))
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
				d.run(d.straight(), nil, d.job(0)).wants(75, "busy", "busy: ")
			}
			b := d.run(d.straight(), []string{"--wait", "60s"}, d.job(0))
			b.begins()
			b.wants(0, "ok", "")
			if took := time.Duration(b.end - begun); took < hold || took > hold+time.Second+busy {
				t.Errorf("%s: the next run had ended after %v, want %v", end, took, hold)
			}
		}
		judge(t, d.dir)
	})
}

// C67: a pooler in transaction mode, connections that are cut every two seconds, and a server that closes those that nobody used
// for a second: nothing is stranded, and nobody stops.
func TestDatabaseConnectionsThatDoNotLast(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(*testing.T) *database{
		"pooler": func(t *testing.T) *database {
			d := onPostgres(t, servers.PostgresOptions{})
			b := servers.StartPgBouncer(t, d.server.(*servers.Postgres), 2)
			d.addr, d.proxy = b.Addr(), proxy.New(t, b.Addr())
			return d
		},
		"wait_timeout": func(t *testing.T) *database {
			return onMariaDB(t, servers.MariaDBOptions{Args: []string{"--wait-timeout=1"}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := make(t)
			d.proxy.CutEvery(2 * time.Second)
			flags := []string{"--ttl", "12s", "--renew-every", "1500ms", "--wait", "60s"}
			a := d.run(d.through(), flags, d.job(10*time.Second))
			a.begins()
			var all []*live
			for range 3 {
				all = append(all, d.run(d.through(), flags, d.job(500*time.Millisecond)))
			}
			a.wants(0, "ok", "")
			if r := a.reported(); r.Renewals < 4 || !r.Released {
				t.Errorf("report: got %+v, want renewals and a release", r)
			}
			for _, b := range all {
				b.wants(0, "ok", "")
			}
			if d.proxy.Cuts() == 0 {
				t.Error("no connection was cut")
			}
			if r := judge(t, d.dir); r.Runs != 4 {
				t.Errorf("got %d runs, want 4", r.Runs)
			}
		})
	}
}

// C68: sixteen processes make the tables at once, of a database that has none, and again while a lease is held.
func TestDatabaseSixteenMakeTheTables(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		var all []*live
		for range 16 {
			all = append(all, d.run(d.straight(), []string{"--wait", "60s"}, d.job(0)))
		}
		for _, l := range all {
			l.wants(0, "ok", "")
		}
		a := d.run(d.straight(), nil, d.job(time.Minute))
		a.begins()
		before := d.holder()
		d.server.Do("DROP TABLE underlease_fences; DROP TABLE underlease_marks; DROP TABLE underlease_schema")
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				c := exec.Command(bin.underlease, "schema", "apply", "--backend", d.straight())
				c.Env = environ()
				if out, err := c.CombinedOutput(); err != nil {
					t.Errorf("schema apply: got %v and %q, want 0", err, out)
				}
			})
		}
		wg.Wait()
		if after := d.holder(); after != before || after == "" {
			t.Errorf("holder and term: got %q, want %q as before", after, before)
		}
		d.renewed()
		a.signal(syscall.SIGTERM)
		if a.ends(); !a.reported().Released {
			t.Errorf("report: got %+v, want a release", a.reported())
		}
		if r := judge(t, d.dir); r.Runs != 17 {
			t.Errorf("got %d runs, want 17", r.Runs)
		}
	})
}

// Credentials are nowhere: not in words and not in reports.
func TestDatabaseSecretsAreShownNowhere(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t-pass"
	for _, k := range []struct{ scheme, addr string }{
		{"postgres", onPostgres(t, servers.PostgresOptions{Password: secret}).addr},
		{"mysql", onMariaDB(t, servers.MariaDBOptions{Password: secret}).addr},
	} {
		f := &field{t: t, dir: t.TempDir()}
		flags := []string{"--log-level", "debug", "--ttl", "20s"}
		right := k.scheme + "://lease:" + secret + "@" + k.addr + "/lease"
		a := f.run(right, flags, f.job(10*time.Millisecond))
		a.begins()
		if got := a.ends(); got != 0 {
			t.Errorf("%s: got the code %d and %q, want 0", k.scheme, got, &a.stderr)
		}
		b := f.run(strings.Replace(right, secret, secret+"x", 1), flags, f.job(0))
		if got := b.ends(); got != 77 || !strings.Contains(b.stderr.String(), "refused user or password") {
			t.Errorf("%s: got the code %d and %q, want 77", k.scheme, got, &b.stderr)
		}
		away := f.run(strings.Replace(right, k.addr, fmt.Sprintf("127.0.0.1:%d", servers.FreePort(t, 0)), 1), flags, f.job(0))
		if got := away.ends(); got != 69 || !strings.Contains(away.stderr.String(), "connection refused") {
			t.Errorf("%s: got the code %d and %q, want 69", k.scheme, got, &away.stderr)
		}
		for _, l := range []*live{a, b, away} {
			report, err := os.ReadFile(l.report)
			if err != nil {
				t.Fatal(err)
			}
			if all := l.stderr.String() + string(report); strings.Contains(all, secret) {
				t.Errorf("the secret is shown:\n%s", all)
			}
		}
	}
}

// The bar is 11 ms on a quiet machine, in one run with true(1) and flock(1). A server that starts a process for each connection needs a
// processor beside ours, and what else a machine does is no figure of ours: limited is how much more it is than a run on the file store.
func TestARunOnADatabaseTakesMilliseconds(t *testing.T) {
	const mostToFile = 4.0
	p, m := onPostgres(t, servers.PostgresOptions{Durable: true}), onMariaDB(t, servers.MariaDBOptions{Args: []string{"--innodb-flush-log-at-trx-commit=1"}})
	b := servers.StartPgBouncer(t, p.server.(*servers.Postgres), 2)
	subjects, err := figures.Usual(bin.underlease, t.TempDir())
	servers.Require(t, "flock", err)
	first := len(subjects)
	for _, s := range []struct{ name, url string }{
		{"postgres", p.straight()}, {"sslmode=prefer", "postgres://lease@" + p.addr + "/lease"}, {"pgbouncer", p.url(b.Addr())}, {"mariadb", m.straight()},
	} {
		subjects = append(subjects, figures.Subject{
			Name: s.name, Env: environ(), Args: []string{bin.underlease, "run", "--backend", s.url, "x", "--", subjects[0].Args[0]},
		})
	}
	least(t, mostToFile, func() float64 {
		all, err := figures.Starts(subjects, 120)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			t.Logf("%-14s median %v, p99 %v, fastest tenth %v, least %v", s.Name, s.Median(), s.Quantile(0.99), s.Quantile(0.1), s.Quantile(0))
		}
		// By the fastest tenth: a run is several processes, and slower than its own work wherever the machine has something else to do.
		postgres, file, flock := all[first].Quantile(0.1), all[first-1].Quantile(0.1), all[1].Quantile(0.1)
		t.Logf("%.2f times a run on the file store, %.1f times flock; %v of at most 11ms on a quiet machine", float64(postgres)/float64(file), float64(postgres)/float64(flock), postgres)
		return float64(postgres) / float64(file)
	})
}

// effect is a job that writes one row and the marker of its gate in one transaction, with words of the shell before and after it
// commits. It has the name of its gate from the environment alone.
func (d *database) effect(beforeCommit, afterCommit string) []string {
	host, port, _ := strings.Cut(d.addr, ":")
	client := fmt.Sprintf(`psql -Xq -v ON_ERROR_STOP=1 -v lease="$UNDERLEASE_NAME" -v term="$UNDERLEASE_TERM" -h %s -p %s -U lease -d lease`, host, port)
	begin, mark := "BEGIN", "SELECT underlease_mark(:'lease', :term)"
	if _, ok := d.server.(*servers.MariaDB); ok {
		client = fmt.Sprintf("mariadb --no-defaults -h %s -P %s -u lease lease", host, port)
		begin, mark = "START TRANSACTION", "CALL underlease_mark('$UNDERLEASE_NAME', $UNDERLEASE_TERM, '')"
	}
	return []string{"sh", "-c", fmt.Sprintf(`%s > /dev/null <<END
%s;
INSERT INTO effects VALUES ('$UNDERLEASE_NAME', $UNDERLEASE_TERM);
%s;
\! %s
COMMIT;
\! %s
END
`, client, begin, mark, beforeCommit, afterCommit)}
}

// What a job has written and the marker of its gate are there both, or neither: whatever is killed, and when.
func TestDatabaseAMarkerCommitsWithTheWork(t *testing.T) {
	databases(t, func(t *testing.T, d *database) {
		d.run(d.straight(), nil, d.job(0)).wants(0, "ok", "") // the tables are there
		if _, ok := d.server.(*servers.Postgres); ok {
			d.server.Do("SET ROLE lease; CREATE TABLE effects (name text, term bigint)")
		} else {
			d.server.Do("CREATE TABLE effects (name TEXT, term BIGINT) ENGINE=InnoDB")
		}
		effects := func(id string) string {
			return d.server.Do("SELECT count(*), min(term) FROM effects WHERE name = '" + id + "'")
		}
		for _, victim := range []string{"wrapper", "guardian", "client"} {
			for _, moment := range []string{"before the commit", "after the commit"} {
				t.Run(victim+" "+moment, func(t *testing.T) {
					t.Parallel()
					id := strings.ReplaceAll(victim+"-"+moment, " ", "-")
					there := filepath.Join(t.TempDir(), "there")
					words := []string{"gate", "--ttl", "6s", "--grace", "200ms", "--log-level", "error", "--wait", "1m", id, "--"}
					hang := "echo $UNDERLEASE_TERM > " + there + ".new; mv " + there + ".new " + there + "; sleep 60"
					job := d.effect(hang, "true")
					if moment == "after the commit" {
						job = d.effect("true", hang)
					}
					first := launch(t, d.straight(), 0, append(words, job...)...)
					if !within(time.Minute, func() bool { _, err := os.Stat(there); return err == nil }) {
						t.Fatalf("the job did not get %s: %q", moment, first.errs.String())
					}
					var term int64
					b, err := os.ReadFile(there)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := fmt.Sscan(string(b), &term); err != nil {
						t.Fatalf("%q: %v", b, err)
					}
					pid := first.cmd.Process.Pid
					switch victim {
					case "guardian":
						if pid = guardian(pid); pid == 0 { // and zero would be ourselves
							t.Fatalf("the guardian was not found: %q", first.errs.String())
						}
					case "client":
						all := descendants(pid)
						i := slices.IndexFunc(all, func(pid int) bool { return name(pid) == "psql" || name(pid) == "mariadb" })
						if i < 0 {
							t.Fatal("the client of the database was not found")
						}
						pid = all[i]
					}
					if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
					if exit, _ := first.end(); exit == 0 {
						t.Error("the one that was killed ended with 0")
					}
					committed := moment == "after the commit"
					if said := map[bool]string{true: "has written before that", false: "is not applied"}[committed]; victim == "client" && !strings.Contains(first.errs.String(), said) {
						t.Errorf("got the words %q, want %q", first.errs.String(), said)
					}
					if committed {
						markerIs(t, d.straight(), id, 0)
					} else {
						markerIs(t, d.straight(), id, 1)
						if got := effects(id); !strings.HasPrefix(got, "0") {
							t.Errorf("got the effects %q of a job that did not commit, want none", got)
						}
					}
					exit, outcome := launch(t, d.straight(), 1, append(words, d.effect("true", "true")...)...).end()
					want := map[bool]string{true: "already-applied", false: "migrated"}[committed]
					if exit != 0 || outcome != want {
						t.Errorf("the next one: got %d and %q, want %q", exit, outcome, want)
					}
					got := effects(id)
					if is := strings.HasSuffix(got, strconv.FormatInt(term, 10)); !strings.HasPrefix(got, "1") || is != committed {
						t.Errorf("got the effects %q, want one, of the term %d: %t", got, term, committed)
					}
					markerIs(t, d.straight(), id, 0)
					if exit, outcome := launch(t, d.straight(), 2, append(words, "false")...).end(); exit != 0 || outcome != "already-applied" {
						t.Errorf("the last one: got %d and %q, want already-applied", exit, outcome)
					}
				})
			}
		}
	})
}

// TestDatabaseChaos: servers that keep what they have said, one after the other.
func TestDatabaseChaos(t *testing.T) {
	for name, start := range map[string]func(*testing.T) *database{
		"postgres": func(t *testing.T) *database { return onPostgres(t, servers.PostgresOptions{Durable: true}) },
		"mariadb": func(t *testing.T) *database {
			return onMariaDB(t, servers.MariaDBOptions{Args: []string{"--innodb-flush-log-at-trx-commit=1"}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t)
			runChaos(t, site{
				ways: func(int) []string { return []string{d.addr} }, url: func(addrs []string) string { return d.url(addrs[0]) },
				troubles: map[string]func(func()){
					"server frozen":    func(during func()) { d.server.Freeze(); during(); d.server.Resume() },
					"server killed":    func(during func()) { d.server.Kill(); during(); d.server.Restart() },
					"server restarted": func(func()) { d.server.Stop(); d.server.Restart() },
				},
				resume: chaosTTL + chaosRoom,
				brief:  true,
			})
		})
	}
}
