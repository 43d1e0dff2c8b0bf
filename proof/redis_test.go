//go:build linux

package proof

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
	"github.com/underlease/underlease/proof/stamps"
)

// The deadline of the runs here, unless a case says otherwise. A machine may stand still for two seconds: that costs no lease, as there is
// more between a renewal and the stop, and no tree its time, as there is more between the kill and the end of the lease.
const (
	ttl    = 8 * time.Second
	grace  = 500 * time.Millisecond
	margin = ttl / 4 // the most that is allowed
	every  = ttl / 6
	often  = 500 * time.Millisecond // in place of every, where there are many renewals
)

// busy is what a machine that does other things, or nothing for a while, may add to an instant that we do not promise to the millisecond.
const busy = 2500 * time.Millisecond

// anAcquire is what only the first request of a connection has that asks for a lease. A run that holds one sends nothing but
// renewals.
const anAcquire = "-- ARGV: name, handle, holder, slots"

// field is a store on its servers, a proxy in front of one of them, and where commands leave their stamps.
type field struct {
	t     *testing.T
	dir   string
	proxy *proxy.Proxy

	addr   string                   // of the server behind the proxy
	url    func(addr string) string // of the store there
	holder func() string            // what tells who has the lease l; empty: nobody
	queued func() int               // how many wait for it

	redis *servers.Redis
}

func newField(t *testing.T, o servers.RedisOptions) *field {
	t.Helper()
	r := servers.StartRedis(t, o)
	f := onRedis(t, r)
	f.proxy = proxy.New(t, r.Addr())
	return f
}

func onRedis(t *testing.T, r *servers.Redis) *field {
	t.Helper()
	f := &field{t: t, dir: t.TempDir(), redis: r, addr: r.Addr(), url: func(addr string) string { return "redis://" + addr }}
	f.holder = func() string { return holderOf(f.slot()) }
	f.queued = func() int { return strings.Count(r.Do("HGET", "ul:{_/l}", "q"), "\n") }
	return f
}

func (f *field) straight() string { return f.url(f.addr) }
func (f *field) through() string  { return f.url(f.proxy.Addr()) }

// job is a command that stamps for so long.
func (f *field) job(lasts time.Duration, words ...string) []string {
	return append([]string{bin.job, f.dir, lasts.String()}, words...)
}

// live is a run that is under way.
type live struct {
	t      *testing.T
	cmd    *exec.Cmd
	stderr bytes.Buffer
	report string
	first  chan string   // the command's first line
	over   chan struct{} // closed at the end of the wrapper
	end    int64         // its instant
}

// run starts a run of the lease l on a store, with flags, and ends it with the test.
func (f *field) run(store string, flags []string, command []string) *live {
	f.t.Helper()
	return f.prepare(store, flags, command).start()
}

func (f *field) prepare(store string, flags []string, command []string) *live {
	l := &live{t: f.t, report: filepath.Join(f.t.TempDir(), "report"), first: make(chan string, 1), over: make(chan struct{})}
	args := []string{
		"--backend", store, "--ttl", ttl.String(), "--grace", grace.String(), "--margin", margin.String(),
		"--log-level", "error", "--report", l.report,
	}
	args = append(append(append(args, flags...), "l", "--"), command...)
	l.cmd = underlease(args...)
	l.cmd.Stderr = &l.stderr
	return l
}

func (l *live) start() *live {
	l.t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		l.t.Fatal(err)
	}
	l.cmd.Stdout = in
	if err := l.cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	in.Close()
	go func() {
		defer out.Close()
		r := bufio.NewReader(out)
		line, _ := r.ReadString('\n') // empty where no command began
		l.first <- strings.TrimSpace(line)
		io.Copy(io.Discard, r)
	}()
	go func() {
		l.cmd.Wait() // how it ended is in its state
		l.end = stamps.Now()
		close(l.over)
	}()
	l.t.Cleanup(func() {
		l.cmd.Process.Signal(syscall.SIGCONT)
		l.cmd.Process.Kill() // its guardian kills the tree
		<-l.over
	})
	return l
}

// begins waits until the command runs, and returns its term.
func (l *live) begins() int64 {
	l.t.Helper()
	select {
	case line := <-l.first:
		term, err := strconv.ParseInt(line, 10, 64)
		if err != nil {
			<-l.over
			l.t.Fatalf("got %q, code %d and %q, want a command that begins", line, code(l.cmd), &l.stderr)
		}
		return term
	case <-time.After(60 * time.Second):
		l.t.Fatal("no command has begun within 60s")
		return 0
	}
}

// ends waits for the end of the wrapper and returns its exit code.
func (l *live) ends() int {
	l.t.Helper()
	select {
	case <-l.over:
		return code(l.cmd)
	case <-time.After(2 * time.Minute):
		l.t.Fatal("the run has not ended within two minutes")
		return 0
	}
}

func (l *live) signal(sig syscall.Signal) int64 {
	l.t.Helper()
	if err := l.cmd.Process.Signal(sig); err != nil {
		l.t.Fatal(err)
	}
	return stamps.Now()
}

// report is what a test reads of --report.
type runReport struct {
	Outcome  string
	Reason   string
	ExitCode int   `json:"exit_code"`
	Term     int64 // zero: none
	Started  bool
	Renewals int
	Released bool
	Busy     *struct {
		Holder string
		Since  time.Time
		LeftMs *int64 `json:"left_ms"`
	}
}

func (l *live) reported() (r runReport) {
	l.t.Helper()
	b, err := os.ReadFile(l.report)
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		l.t.Errorf("report: %v (%q)", err, &l.stderr)
	}
	return r
}

// wants checks code and outcome of a run that has ended, and that words and report agree.
func (l *live) wants(exit int, outcome string, words string) {
	l.t.Helper()
	got := l.ends()
	r := l.reported()
	if got != exit || r.Outcome != outcome || r.ExitCode != exit {
		l.t.Errorf("got the code %d and the outcome %q (code %d, %q), want %d and %q", got, r.Outcome, r.ExitCode, r.Reason, exit, outcome)
	}
	if text := l.stderr.String(); !strings.Contains(text, words) || words == "" && text != "" {
		l.t.Errorf("words: got %q, want %q", text, words)
	}
}

// span returns the first and the last instant of a term.
func (f *field) span(term int64) (first, last int64) {
	f.t.Helper()
	lives, err := stamps.Read(f.dir)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, l := range lives {
		if l.Term != term {
			continue
		}
		if first == 0 || l.At[0] < first {
			first = l.At[0]
		}
		last = max(last, l.At[len(l.At)-1])
	}
	if first == 0 {
		f.t.Fatalf("term %d has left no stamps", term)
	}
	return first, last
}

// deadBy fails the test if anything of a term was alive so long after an instant.
func (f *field) deadBy(term, instant int64, limit time.Duration, what string) {
	f.t.Helper()
	_, last := f.span(term)
	if late := time.Duration(last - instant); late > limit {
		f.t.Errorf("%s: the last stamp came %v later, want at most %v", what, late, limit)
	} else {
		f.t.Logf("%s: the last stamp came %v later (limit %v)", what, late, limit)
	}
}

// slot returns the first slot as the store has it.
func (f *field) slot() string { return f.redis.Do("HGET", "ul:{_/l}", "s0") }

// renewed waits for a renewal that begins after the call.
func (f *field) renewed() {
	f.t.Helper()
	before := f.slot()
	servers.Within(f.t, 30*time.Second, "a renewal", func() error {
		if f.slot() == before {
			return errors.New("none yet")
		}
		return nil
	})
}

// wait waits until so many stand in the queue.
func (f *field) waiters(n int) {
	f.t.Helper()
	servers.Within(f.t, time.Minute, "waiters stand in the queue", func() error {
		if got := f.queued(); got != n {
			return fmt.Errorf("got %d, want %d", got, n)
		}
		return nil
	})
}

// C01, C10, C15, C22: a lease that is gone stops the whole tree at the next renewal, and is not brought back.
func TestRedisALeaseThatIsGoneStopsItsCommand(t *testing.T) {
	t.Parallel()
	for _, how := range [][]string{{"DEL", "ul:{_/l}"}, {"FLUSHALL"}, {"HDEL", "ul:{_/l}", "s0"}} {
		f := newField(t, servers.RedisOptions{})
		a := f.run(f.straight(), nil, f.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		gone := stamps.Now()
		f.redis.Do(how...)
		a.wants(74, "lost-taken", `lost: "l" is no longer ours`)
		f.deadBy(term, gone, every*11/10+busy, how[0])
		if got := f.slot(); got != "" {
			t.Errorf("%s: got the slot %q after the loss, want none", how[0], got)
		}
		b := f.run(f.straight(), nil, f.job(10*time.Millisecond))
		if next := b.begins(); next <= term {
			t.Errorf("%s: term: got %d, want more than %d", how[0], next, term)
		}
		b.wants(0, "ok", "")
		judge(t, f.dir)
	}
}

// C01, C12: an unrelated change is no loss; a new holder in the record is, and his grant stays untouched.
func TestRedisANewHolderInTheRecordIsALoss(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), nil, f.job(time.Minute, "tree", "stubborn"))
	term := a.begins()
	f.redis.Do("HSET", "ul:{_/l}", "note", "somebody else's")
	f.renewed()
	f.renewed()
	f.redis.Do("DEL", "ul:{_/l}")
	b := f.run(f.straight(), []string{"--wait", "10s"}, f.job(5*time.Second))
	next := b.begins()
	a.wants(74, "lost-taken", "is no longer ours")
	b.wants(0, "ok", "")
	if r := b.reported(); !r.Released || r.Renewals == 0 {
		t.Errorf("the new holder: got %+v, want renewals and a release", r)
	}
	first, _ := f.span(next)
	f.deadBy(term, first, every*11/10+busy, "both ran after the record was deleted by hand")
}

// C02, C09, C20: what guards the tree is not the process that is stopped.
func TestRedisAStoppedWrapperLosesItsLeaseInTime(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), nil, f.job(time.Minute, "tree", "stubborn"))
	term := a.begins()
	stopped := a.signal(syscall.SIGSTOP)
	b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(6*time.Second))
	b.begins()
	f.deadBy(term, stopped, ttl, "wrapper stopped")
	before := f.slot()
	a.signal(syscall.SIGCONT)
	a.wants(74, "lost-expired", "ran out while this process did not run")
	if after := f.slot(); holderOf(after) != holderOf(before) {
		t.Errorf("slot after the continued run has ended: got %q, want that of the new holder, %q", after, before)
	}
	b.wants(0, "ok", "")
	judge(t, f.dir)
}

func holderOf(slot string) string {
	var s struct{ H, W, T string }
	_ = json.Unmarshal([]byte(slot), &s) // what cannot be read is the same as nothing
	return s.H + s.W + s.T
}

// unread starts a stubborn run that logs everything to a pipe that is full and that nobody reads, and returns it with its term.
func (f *field) unread() (*live, int64) {
	f.t.Helper()
	a := f.prepare(f.straight(), []string{"--log-level", "debug"}, f.job(time.Minute, "tree", "stubborn"))
	full, in, err := os.Pipe()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { full.Close() })
	raw, err := in.SyscallConn()
	if err != nil {
		f.t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 4096)
		for {
			if _, err := unix.Write(int(fd), make([]byte, 4096)); err != nil {
				break // full
			}
		}
		unix.SetNonblock(int(fd), false) // as a command finds it
	})
	a.cmd.Stderr = in
	term := a.start().begins()
	in.Close()
	return a, term
}

// C03, C13: a server that does not answer, also while nobody reads the log.
func TestRedisAFrozenServerDoesNotKeepTheCommandAlive(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a, term := f.unread()
	frozen := stamps.Now()
	f.redis.Freeze()
	if got := a.ends(); got != 74 {
		t.Errorf("code: got %d, want 74", got)
	}
	if r := a.reported(); r.Outcome != "lost-unreachable" || r.Released {
		t.Errorf("report: got %+v, want lost-unreachable and no release", r)
	}
	f.deadBy(term, frozen, ttl, "server frozen")
	b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	for stamps.Now() < frozen+int64(2*ttl) && !t.Failed() {
		time.Sleep(50 * time.Millisecond) // the length of the fault
	}
	f.redis.Resume()
	b.begins()
	b.wants(0, "ok", "")
	judge(t, f.dir)
}

// C04: a partition that is shorter than the budget costs nothing, a longer one the command, and only in time.
func TestRedisAPartition(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.through(), nil, f.job(8*time.Second, "tree"))
	a.begins()
	f.renewed()
	f.proxy.BlackHole(proxy.Requests | proxy.Answers)
	time.Sleep(ttl / 3) // the length of the fault
	f.proxy.Heal()
	if got := a.ends(); got != 0 {
		t.Errorf("after a partition of %v: got the code %d and %q, want 0", ttl/3, got, &a.stderr)
	}
	for _, d := range []proxy.Direction{proxy.Requests, proxy.Answers, proxy.Requests | proxy.Answers} {
		a := f.run(f.through(), nil, f.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		cut := stamps.Now()
		f.proxy.BlackHole(d)
		b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
		a.wants(74, "lost-unreachable", "could not be renewed in time")
		f.deadBy(term, cut, ttl, "partition") // requests may get through, and the store counts anew: we do not
		b.begins()
		b.wants(0, "ok", "")
		f.proxy.Heal()
		judge(t, f.dir)
	}
}

// C05, C06: single lost answers, cut connections and a restart are not the command's business.
func TestRedisABlipDoesNotStopTheCommand(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{Durable: true})
	a := f.run(f.through(), []string{"--renew-every", often.String()}, f.job(20*time.Second))
	a.begins()
	for _, kind := range []proxy.Kind{proxy.Lose, proxy.ResetBefore, proxy.ResetAfter} {
		f.proxy.Inject(proxy.Fault{Kind: kind})
		servers.Within(t, 10*time.Second, "the fault", func() error {
			if f.proxy.Done(kind) == 0 {
				return errors.New("not yet")
			}
			return nil
		})
		f.renewed()
	}
	before := f.proxy.Made()
	f.proxy.CutEvery(100 * time.Millisecond)
	time.Sleep(4 * time.Second) // the length of the fault
	f.proxy.Heal()
	f.renewed()
	f.redis.Kill()
	time.Sleep(time.Second) // the length of the fault
	f.redis.Restart()
	f.renewed()
	a.wants(0, "ok", "")
	t.Logf("%d connections were cut, %d made", f.proxy.Cuts(), before+f.proxy.Made())
	if r := a.reported(); r.Renewals < 10 || !r.Released {
		t.Errorf("report: got %+v, want renewals and a release", r)
	}
}

// C06: thirty reconnects in one run, one for each renewal.
func TestRedisThirtyReconnects(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.through(), []string{"--renew-every", "100ms"}, f.job(time.Minute))
	a.begins()
	for f.proxy.Cuts() < 30 { // one that was given up for its late answer is no longer there to be cut
		f.proxy.Cut()
		f.renewed()
	}
	if f.proxy.Cuts() < 30 || f.proxy.Made() < 31 {
		t.Errorf("got %d cuts and %d connections, want 30 and one more", f.proxy.Cuts(), f.proxy.Made())
	}
	a.signal(syscall.SIGTERM)
	if got := a.ends(); got != 128+int(syscall.SIGTERM) || a.reported().Outcome != "stopped" {
		t.Errorf("got the code %d and %+v, want the end by TERM that we sent", got, a.reported())
	}
}

// roomy leaves much of a lease whose grant came late, so that it suffices.
var roomy = []string{"--margin", "300ms"}

// givenBack wants that a run without a command has given back what it may have been granted: another need not wait for the ttl. It returns 1
// where the run says that it could not: a machine may have no time for that within the limit of a call.
func (f *field) givenBack(b *live) (kept int) {
	f.t.Helper()
	wait := "1s"
	if strings.Contains(b.stderr.String(), "without our knowing") {
		wait, kept = "60s", 1
	}
	next := f.run(f.straight(), []string{"--wait", wait}, f.job(10*time.Millisecond))
	next.begins()
	next.wants(0, "ok", "")
	return kept
}

// C07, C08: nothing starts on an outcome that is not known, nor on too little of a lease; the handle settles it.
func TestRedisAnUnknownGrantIsSettled(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
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
		c.Match = anAcquire
		before := f.proxy.Done(c.Kind)
		f.proxy.Inject(c)
		a := f.run(f.through(), roomy, f.job(10*time.Millisecond))
		a.begins()
		a.wants(0, "ok", "")
		if got := f.proxy.Done(c.Kind) - before; got != 1 {
			t.Errorf("%+v: it happened %d times, want once", c, got)
		}

		if c.Delay == ttl*45/100 {
			continue // every attempt would be in time
		}
		c.Count = 100
		f.proxy.Inject(c)
		b := f.run(f.through(), roomy, f.job(10*time.Millisecond))
		b.wants(69, "unavailable", f.proxy.Addr())
		if r := b.reported(); r.Started || r.Term != 0 {
			t.Errorf("%+v every time: got %+v, want nothing started", c, r)
		}
		f.proxy.Heal()
		if f.proxy.Done(c.Kind)-before != 3 {
			t.Errorf("%+v every time: %d attempts, want 2", c, f.proxy.Done(c.Kind)-before-1)
		}
		kept += f.givenBack(b)
	}
	if kept > 2 {
		t.Errorf("%d grants were not given back, want 2 of 6 at most on a busy machine", kept)
	}
	judge(t, f.dir)
}

// C11: a waiter that was stopped while its turn came and went queues again.
func TestRedisAStoppedWaiterQueuesAgain(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), nil, f.job(time.Minute))
	a.begins()
	b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	f.waiters(1)
	b.signal(syscall.SIGSTOP)
	a.signal(syscall.SIGTERM)
	a.ends()
	c := f.run(f.straight(), []string{"--wait", "30s"}, f.job(6*time.Second))
	c.begins()
	time.Sleep(5 * time.Second) // the length of the fault
	b.signal(syscall.SIGCONT)
	b.begins()
	b.wants(0, "ok", "")
	c.wants(0, "ok", "")
	judge(t, f.dir)
}

// C14: a replica that missed the grant is promoted. The old holder is told by its next renewal.
func TestRedisAFailoverThatForgetsTheGrantIsNoticedAtTheNextRenewal(t *testing.T) {
	t.Parallel()
	set := servers.StartSentinel(t, servers.RedisOptions{Durable: true})
	f := onRedis(t, set.Primary)
	store := "redis+sentinel://" + strings.Join(set.Addrs(), ",") + "/" + set.Name
	const long, pace = 30 * time.Second, 2 * time.Second // rides out the failover, also one that needs a second try
	flags := []string{"--ttl", long.String(), "--renew-every", pace.String(), "--wait", "60s"}
	set.Replica.Kill()
	a := f.run(store, flags, f.job(time.Minute, "tree", "stubborn"))
	term := a.begins()
	b := f.run(store, flags, f.job(10*time.Millisecond))
	f.waiters(1)
	set.Primary.Kill()
	set.Replica.Restart()
	next := b.begins()
	a.wants(74, "lost-taken", "is no longer ours")
	b.wants(0, "ok", "")
	first, _ := f.span(next)
	f.deadBy(term, first, pace*11/10+busy, "both ran after the failover")
	if next <= term {
		t.Errorf("term: got %d, want more than %d", next, term)
	}
}

// C20: whoever of us is killed, the tree goes, and another run comes.
func TestRedisAKilledWrapperOrGuardianTakesTheTreeAlong(t *testing.T) {
	t.Parallel()
	for _, victim := range []string{"wrapper", "guardian"} {
		f := newField(t, servers.RedisOptions{})
		a := f.run(f.straight(), nil, f.job(time.Minute, "tree", "stubborn"))
		term := a.begins()
		b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
		f.waiters(1)
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
		f.deadBy(term, killed, limit+busy, victim+" killed")
		if late := time.Duration(b.end - killed); late > ttl+time.Second+busy {
			t.Errorf("%s killed: another run had ended %v later, want at most %v", victim, late, ttl+time.Second)
		}
		judge(t, f.dir)
	}
}

// C21: TERM starts no timer; the lease is renewed until the tree is gone, and given back then.
func TestRedisADrainKeepsTheLease(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), nil, f.job(ttl+5*time.Second, "stubborn"))
	term := a.begins()
	b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	f.waiters(1)
	a.signal(syscall.SIGTERM)
	next := b.begins()
	a.wants(0, "stopped", "")
	b.wants(0, "ok", "")
	if r := a.reported(); !r.Released || r.Renewals < int(ttl/every) {
		t.Errorf("report: got %+v, want a release and a renewal every %v", r, every)
	}
	_, last := f.span(term)
	first, _ := f.span(next)
	if gap := time.Duration(first - last); gap > busy {
		t.Errorf("handover: got %v, want at most %v", gap, busy)
	}
	judge(t, f.dir)
}

// C42, C45: busy for as long as was asked for, and by whom.
func TestRedisBusyIsSaidOnceAndInTime(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), []string{"--holder", "db1/4711/0a1b2c3d"}, f.job(time.Minute))
	a.begins()
	for wait, most := range map[string]time.Duration{"0": 0, "2s": 2 * time.Second} {
		begun := stamps.Now()
		b := f.run(f.straight(), []string{"--wait", wait}, f.job(10*time.Millisecond))
		b.wants(75, "busy", `busy: "l" is held by db1 (pid 4711) since `)
		if took := time.Duration(b.end - begun); took < most || took > most+300*time.Millisecond+busy {
			t.Errorf("--wait %s: took %v, want %v to 300ms more", wait, took, most)
		}
		if n := strings.Count(b.stderr.String(), "\n"); n != 1 || !strings.Contains(b.stderr.String(), "s left") {
			t.Errorf("words: got %q, want one line with what is left", &b.stderr)
		}
		r := b.reported()
		if r.Started || r.Busy == nil || r.Busy.Holder != "db1/4711/0a1b2c3d" || r.Busy.LeftMs == nil || *r.Busy.LeftMs <= 0 || *r.Busy.LeftMs > ttl.Milliseconds() || time.Since(r.Busy.Since) > time.Minute {
			t.Errorf("report: got %+v, busy %+v, want the holder, since when and what is left", r, r.Busy)
		}
	}
}

// C43: a store that is not there is never busy.
func TestRedisADeadAddressIsUnavailable(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	f.proxy.BlackHole(proxy.Requests | proxy.Answers)
	closed := fmt.Sprintf("127.0.0.1:%d", servers.FreePort(t, 0))
	for _, c := range []struct {
		addr, wait  string
		least, most time.Duration
	}{
		{closed, "0", 0, busy},
		{closed, "1s", 900 * time.Millisecond, 1200*time.Millisecond + busy},
		{f.proxy.Addr(), "0", ttl - 100*time.Millisecond, ttl + 1200*time.Millisecond + busy}, // two attempts of ttl/2, and the try to abandon
		{f.proxy.Addr(), "1s", 900 * time.Millisecond, 2500*time.Millisecond + busy},
	} {
		begun := stamps.Now()
		a := f.run("redis://"+c.addr, []string{"--wait", c.wait}, f.job(10*time.Millisecond))
		a.wants(69, "unavailable", c.addr)
		if took := time.Duration(a.end - begun); took < c.least || took > c.most {
			t.Errorf("%s, --wait %s: took %v, want %v to %v", c.addr, c.wait, took, c.least, c.most)
		}
	}
	for flag, exit := range map[string]int{"skip": 75, "run": 0} {
		a := f.run("redis://"+closed, []string{"--if-unavailable", flag}, []string{"sh", "-c", "echo ${UNDERLEASE_TERM:-none}"})
		if got := a.ends(); got != exit {
			t.Errorf("--if-unavailable %s: got the code %d and %q, want %d", flag, got, &a.stderr, exit)
		}
		if line := <-a.first; exit == 0 && line != "none" {
			t.Errorf("--if-unavailable run: got the term %q, want none", line)
		}
	}
}

// C47: a waiter that is killed leaves nothing.
func TestRedisAKilledWaiterLeavesNothing(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), nil, f.job(time.Minute))
	a.begins()
	before := holderOf(f.slot())
	killed := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	f.waiters(1)
	gives := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	f.waiters(2)
	killed.signal(syscall.SIGKILL)
	gives.signal(syscall.SIGTERM)
	killed.ends()
	if got := gives.ends(); got != 128+int(syscall.SIGTERM) {
		t.Errorf("a waiter that got TERM: got the code %d, want the signal", got)
	}
	if got := holderOf(f.slot()); got != before {
		t.Errorf("the holder: got %q, want %q as before", got, before)
	}
	b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	f.waiters(2) // the killed one's ticket stands first
	ended := a.signal(syscall.SIGTERM)
	b.begins()
	b.wants(0, "ok", "")
	if took := time.Duration(b.end - ended); took > 500*time.Millisecond+busy {
		t.Errorf("the next run had ended %v after the holder, want at most 500ms", took)
	}
}

// C48: a waiter survives a restart of the server, and so does the holder's lease where the server keeps it.
func TestRedisAWaiterSurvivesARestart(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{Durable: true})
	a := f.run(f.straight(), nil, f.job(time.Minute))
	a.begins()
	b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(10*time.Millisecond))
	f.waiters(1)
	f.redis.Kill()
	a.signal(syscall.SIGTERM) // it ends while the server is away
	time.Sleep(2 * every)     // the length of the fault
	f.redis.Restart()
	back := stamps.Now()
	b.begins()
	b.wants(0, "ok", "")
	if took := time.Duration(b.end - back); took > ttl+busy { // the holder could not give back
		t.Errorf("the waiter had run %v after the server was back, want at most %v", took, ttl)
	}
	judge(t, f.dir)
}

// C49: eight waiters, jobs that take no time.
func TestRedisEightWaitersAreDoneWithinASecond(t *testing.T) {
	t.Parallel()
	f := newField(t, servers.RedisOptions{})
	a := f.run(f.straight(), nil, f.job(time.Minute))
	a.begins()
	var all []*live
	for i := range 8 {
		all = append(all, f.run(f.straight(), []string{"--wait", "60s"}, f.job(0)))
		f.waiters(i + 1)
	}
	ended := a.signal(syscall.SIGTERM)
	last := int64(0)
	for _, b := range all {
		b.wants(0, "ok", "")
		last = max(last, b.end)
	}
	took := time.Duration(last - ended)
	t.Logf("eight waiters: %v", took)
	if took > time.Second+busy {
		t.Errorf("eight waiters took %v, want at most 1s", took)
	}
	judge(t, f.dir)
}

// longestHandover is the bar for a store that tells who waits, on a quiet machine.
const longestHandover = 15 * time.Millisecond

// slowRoom is how much more than its bar a time may be before a test fails: a handover is the start of several processes, which a slow machine
// that does other things too makes that much longer. A store that is looked at now and then, and does not tell, is far above it.
const slowRoom = 3

// handover wants the median of many handovers to be within its bar. It is measured again, twice at most, where it is above it; the least counts, and
// is said; only what is far above the bar fails.
func handover(t *testing.T, what string, bar time.Duration, measure func() (median time.Duration)) {
	t.Helper()
	best := measure()
	for more := 2; best > bar && more > 0; more-- {
		t.Logf("%s: once more", what)
		best = min(best, measure())
	}
	switch {
	case best > bar*slowRoom:
		t.Errorf("%s: got a median of %v for a handover, want at most %v, and %v on a slow machine", what, best, bar, bar*slowRoom)
	case best > bar:
		t.Logf("%s: %v is above the bar of %v, which is for a quiet machine", what, best, bar)
	}
}

// What a handover costs does not grow with those that wait.
func TestRedisAHandoverCostsTheSameWithAHundredWaiters(t *testing.T) {
	handOn := func(many int) time.Duration {
		f := newField(t, servers.RedisOptions{})
		a := f.run(f.straight(), nil, f.job(time.Minute, "obedient")) // a handover after a clean end
		a.begins()
		var all []*live
		for i := range many {
			all = append(all, f.run(f.straight(), []string{"--ttl", "60s", "--wait", "60s"}, f.job(0)))
			if i%10 == 9 {
				f.waiters(i + 1)
			}
		}
		f.waiters(many)
		before := f.requests()
		a.signal(syscall.SIGTERM)
		for _, b := range all {
			b.wants(0, "ok", "")
		}
		each := float64(f.requests()-before) / float64(many)
		judge(t, f.dir)
		median, p99 := f.handovers()
		t.Logf("%d waiters: %.1f requests and a median of %v for each handover, p99 %v", many, each, median, p99)
		// One to acquire, one to release, and what those who wait ask now and then to be safe.
		if each > 4 {
			t.Errorf("%d waiters: got %.1f requests for each handover, want at most 4", many, each)
		}
		return median
	}
	for _, many := range []int{8, 100} {
		handover(t, fmt.Sprintf("%d waiters", many), longestHandover, func() time.Duration { return handOn(many) })
	}
}

// requests counts the scripts that the server has run.
func (f *field) requests() int {
	f.t.Helper()
	sum := 0
	for line := range strings.SplitSeq(f.redis.Do("INFO", "commandstats"), "\r\n") {
		if stats, ok := strings.CutPrefix(line, "cmdstat_eval"); ok { // and evalsha
			_, after, _ := strings.Cut(stats, "calls=")
			number, _, _ := strings.Cut(after, ",")
			n, err := strconv.Atoi(number)
			if err != nil {
				f.t.Fatal(err)
			}
			sum += n
		}
	}
	return sum
}

// handovers returns the times from the last stamp of one command to the first of the next.
func (f *field) handovers() (median, p99 time.Duration) {
	f.t.Helper()
	lives, err := stamps.Read(f.dir)
	if err != nil {
		f.t.Fatal(err)
	}
	slices.SortFunc(lives, func(a, b stamps.Life) int { return int(max(-1, min(1, a.At[0]-b.At[0]))) })
	var gaps []time.Duration
	for i := 1; i < len(lives); i++ {
		gaps = append(gaps, time.Duration(lives[i].At[0]-lives[i-1].At[len(lives[i-1].At)-1]))
	}
	return quantile(gaps, 0.5), quantile(gaps, 0.99)
}

// C61: what tells two runs apart is neither a host's name nor a pid.
func TestRedisTwoContainersWithOneNameAndOnePid(t *testing.T) {
	t.Parallel()
	newField(t, servers.RedisOptions{}).twoContainers()
}

func (f *field) twoContainers() {
	t := f.t
	t.Helper()
	contain := func(flags ...string) *live {
		l := f.prepare(f.straight(), append(flags, "--holder", "same"), f.job(300*time.Millisecond))
		args := append([]string{"--fork", "--pid", "--uts", "sh", "-c", `hostname same; exec "$@"`, "sh"}, l.cmd.Args...)
		path, err := exec.LookPath("unshare")
		if err == nil {
			err = exec.Command(path, "--fork", "--pid", "--uts", "true").Run()
		}
		servers.Require(t, "unshare", err)
		c := exec.Command(path, args...)
		c.Env, c.Stderr = l.cmd.Env, l.cmd.Stderr
		l.cmd = c
		return l.start()
	}
	var all []*live
	for range 4 {
		all = append(all, contain("--wait", "60s"))
	}
	for _, l := range all {
		l.begins()
		if got := l.ends(); got != 0 {
			t.Errorf("got the code %d and %q, want 0", got, &l.stderr)
		}
	}
	if r := judge(t, f.dir); r.Runs != 4 {
		t.Errorf("got %d runs, want 4", r.Runs)
	}
}

// C64: terms grow in the order in which commands ran, and no two run at once.
func TestRedisContendersNeverOverlap(t *testing.T) {
	t.Parallel()
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	f := newField(t, servers.RedisOptions{})
	var begun atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for begun.Add(1) <= int64(rounds) && !t.Failed() {
				c := underlease("--backend", f.straight(), "--wait", "2m", "l", "--", bin.job, f.dir, "0s")
				var words bytes.Buffer
				c.Stderr = &words
				if err := c.Run(); err != nil {
					t.Errorf("got %v and %q, want 0", err, &words)
				}
			}
		})
	}
	wg.Wait()
	if r := judge(t, f.dir); r.Runs != rounds {
		t.Errorf("got %d runs, want %d", r.Runs, rounds)
	}
	median, p99 := f.handovers()
	t.Logf("handover, from the last stamp of one to the first of the next: median %v, p99 %v", median, p99)
}

// brief is a lease that ends long before a hold does.
var brief = []string{"--ttl", "3s", "--margin", "300ms"}

// C65: one execution in the time of the hold, whatever becomes of the one that ran.
func TestRedisAHoldOutlivesItsRun(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"by itself", "killed"} {
		f := newField(t, servers.RedisOptions{})
		const hold = 10 * time.Second
		begun := stamps.Now()
		lasts := 100 * time.Millisecond
		if end == "killed" {
			lasts = time.Minute
		}
		a := f.run(f.straight(), append([]string{"--min-hold", hold.String()}, brief...), f.job(lasts))
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
			f.run(f.straight(), nil, f.job(0)).wants(75, "busy", "busy: ")
		}
		b := f.run(f.straight(), []string{"--wait", "60s"}, f.job(0))
		b.begins()
		b.wants(0, "ok", "")
		if took := time.Duration(b.end - begun); took < hold || took > hold+time.Second+busy {
			t.Errorf("%s: the next run had ended after %v, want %v", end, took, hold)
		}
		judge(t, f.dir)
	}
}

// Credentials are nowhere: not in words, report, settings or what the guardian shows.
func TestRedisSecretsAreShownNowhere(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t-pass"
	f := newField(t, servers.RedisOptions{User: "lease", Password: secret})
	store := "redis://lease:" + secret + "@" + f.redis.Addr()
	var all strings.Builder
	a := f.prepare(store, []string{"--log-level", "debug"}, f.job(time.Minute))
	for i := range a.cmd.Args { // as a user does who keeps it out of the list of processes
		if a.cmd.Args[i] == "--backend" {
			a.cmd.Args = slices.Delete(a.cmd.Args, i, i+2)
			break
		}
	}
	a.cmd.Env = append(a.cmd.Env, "UNDERLEASE_BACKEND="+store)
	a.start().begins()
	f.renewed()
	for _, pid := range []int{a.cmd.Process.Pid, guardian(a.cmd.Process.Pid)} {
		files := []string{"cmdline"}
		if pid != a.cmd.Process.Pid {
			files = append(files, "environ")
		}
		for _, name := range files {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
		}
	}
	b := f.run(store, []string{"-v"}, f.job(0))
	b.wants(75, "busy", "busy: ")
	f.redis.Do("DEL", "ul:{_/l}")
	a.ends()
	wrong := f.run("redis://lease:"+secret+"x@"+f.redis.Addr(), nil, f.job(0))
	wrong.wants(77, "denied", "refused user or password")
	away := f.run(fmt.Sprintf("redis://lease:%s@127.0.0.1:%d", secret, servers.FreePort(t, 0)), nil, f.job(0))
	away.wants(69, "unavailable", "connection refused")
	for _, l := range []*live{a, b, wrong, away} {
		report, err := os.ReadFile(l.report)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&all, l.stderr.String(), string(report))
	}
	config := exec.Command(bin.underlease, "config")
	config.Env = append(environ(), "HOME="+t.TempDir(), "UNDERLEASE_BACKEND="+store)
	out, err := config.CombinedOutput()
	if err != nil {
		t.Fatalf("config: %v, %q", err, out)
	}
	all.Write(out)
	if strings.Contains(all.String(), secret) {
		t.Errorf("the secret is shown:\n%s", &all)
	}
	if !strings.Contains(all.String(), "redis://"+f.redis.Addr()) {
		t.Errorf("the address is shown nowhere:\n%s", &all)
	}
}

// The bar is 9 ms on a quiet machine, where flock(1) takes 1.8: what is limited is how often flock(1) could have run.
func TestARunOnRedisTakesMilliseconds(t *testing.T) {
	kept := servers.StartRedis(t, servers.RedisOptions{Durable: true})
	subjects, err := figures.Usual(bin.underlease, t.TempDir())
	servers.Require(t, "flock", err)
	subjects = append(subjects, figures.Subject{
		Name: "redis", Env: environ(), Args: []string{bin.underlease, "run", "--backend", "redis://" + kept.Addr(), "x", "--", subjects[0].Args[0]},
	})
	least(t, 5, func() float64 {
		quiet := starts(t, subjects, 120)
		return float64(quiet[len(quiet)-1].Median()) / float64(quiet[1].Median())
	})
}
