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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
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

// network is a store that is reached over the network: its servers, a proxy in front of one of them, and where the commands of the runs
// on it leave their stamps. What differs from store to store is here, and is said where the store is made; the cases are the same for all
// (network_cases_test.go), and what only one kind of store has stands with it.
type network struct {
	t      *testing.T
	dir    string
	proxy  *proxy.Proxy
	server server                   // behind the proxy
	addr   string                   // its own
	url    func(addr string) string // of the store there
	all    string                   // the URL on all servers

	holder   func() string // what tells who has the lease l; empty: nobody
	queued   func() int    // how many wait for it
	revision func() string // what each renewal changes; nil: it changes nothing that is seen
	remove   func()        // everything that the store has of leases
	gone     []deed        // what takes the lease from its holder, one by one
	edit     func()        // changes the record of the lease, and what is beside it, in nothing that matters
	restart  func()        // all servers of a cluster, with all they know; nil: there is one server
	acquires string        // bytes that only the request has that takes a slot
	renews   string        // and the one that renews; empty: a run that holds sends nothing else

	tells    bool          // a holder is told of its loss at once, and not by its next renewal
	finds    bool          // a second attempt looks first, and finds what the first one has done
	slow     bool          // to be back after a restart, and to make a connection
	tickets  int           // what a waiter leaves that is killed
	stale    time.Duration // for how long that may hold up others
	soon     time.Duration // for eight waiters whose jobs take no time
	free     time.Duration // when the lease of a holder that is dead can be had, at the latest
	held     time.Duration // for how long a hold of ten seconds lasts, at the most
	back     time.Duration // when a waiter runs after a restart, at the latest
	anew     time.Duration // how much later where the holder could not give back: its lease has to end by itself
	contests int           // rounds of eight that contend
}

// server is one, or what is one to a test.
type server interface {
	Freeze()
	Resume()
	Kill()
	Stop()
	Restart()
}

// deed is something that is done to a store.
type deed struct {
	name string
	do   func()
}

// start makes a store, N, that is empty.
type start[N any] struct {
	name string
	on   func(*testing.T) N
}

// onEach runs a case on each of some stores.
func onEach[N any](t *testing.T, stores []start[N], f func(*testing.T, N)) {
	t.Helper()
	t.Parallel()
	for _, s := range stores {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			f(t, s.on(t))
		})
	}
}

// singles are the stores on one server, which keeps what it has said. Each renewal changes their record.
func singles() []start[*network] {
	all := []start[*network]{{"redis", func(t *testing.T) *network {
		return onRedis(t, servers.StartRedis(t, servers.RedisOptions{Durable: true}))
	}}}
	for _, d := range databases {
		all = append(all, start[*network]{d.name, func(t *testing.T) *network { return d.on(t).network }})
	}
	return all
}

// networks are all stores that are reached over the network, those of them that are a cluster on so many servers.
func networks(nodes int) []start[*network] {
	all := singles()
	for _, q := range quorums(nodes) {
		all = append(all, start[*network]{q.name, func(t *testing.T) *network { return q.on(t).network }})
	}
	return all
}

func (n *network) straight() string { return n.url(n.addr) }
func (n *network) through() string  { return n.url(n.proxy.Addr()) }

// paced are the flags of a run whose renewals are awaited: where none can be seen there are to be many.
func (n *network) paced() []string {
	if n.revision == nil {
		return []string{"--renew-every", often.String()}
	}
	return nil
}

// renewed waits for so many renewals that begin after the call. Where none can be seen it waits for as long as they take a run that is paced, and
// two more.
func (n *network) renewed(times int) {
	n.t.Helper()
	if n.revision == nil {
		time.Sleep(time.Duration(times+2) * often) // the pace of the renewals
		return
	}
	for range times {
		before := n.revision()
		servers.Within(n.t, 30*time.Second, "a renewal", func() error {
			if n.revision() == before {
				return errors.New("none yet")
			}
			return nil
		})
	}
}

// waiters waits until so many stand in the queue.
func (n *network) waiters(many int) {
	n.t.Helper()
	servers.Within(n.t, time.Minute, "waiters stand in the queue", func() error {
		if got := n.queued(); got != many {
			return fmt.Errorf("got %d, want %d", got, many)
		}
		return nil
	})
}

// job is a command that stamps for so long.
func (n *network) job(lasts time.Duration, words ...string) []string {
	return append([]string{bin.job, n.dir, lasts.String()}, words...)
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
func (n *network) run(store string, flags []string, command []string) *live {
	n.t.Helper()
	return n.prepare(store, flags, command).start()
}

func (n *network) prepare(store string, flags []string, command []string) *live {
	l := &live{t: n.t, report: filepath.Join(n.t.TempDir(), "report"), first: make(chan string, 1), over: make(chan struct{})}
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

// said is all that it has said: its words and its report.
func (l *live) said() string {
	l.t.Helper()
	report, err := os.ReadFile(l.report)
	if err != nil {
		l.t.Fatal(err)
	}
	return l.stderr.String() + "\n" + string(report)
}

// stops ends a run that goes on by TERM, and wants it to have renewed its lease at least so often, and to have given it back.
func (l *live) stops(renewals int) {
	l.t.Helper()
	l.signal(syscall.SIGTERM)
	l.wants(128+int(syscall.SIGTERM), "stopped", "")
	if r := l.reported(); !r.Released || r.Renewals < renewals {
		l.t.Errorf("report: got %+v, want a release and %d renewals or more", r, renewals)
	}
}

// span returns the first and the last instant of a term.
func (n *network) span(term int64) (first, last int64) {
	n.t.Helper()
	lives, err := stamps.Read(n.dir)
	if err != nil {
		n.t.Fatal(err)
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
		n.t.Fatalf("term %d has left no stamps", term)
	}
	return first, last
}

// deadBy fails the test if anything of a term was alive so long after an instant.
func (n *network) deadBy(term, instant int64, limit time.Duration, what string) {
	n.t.Helper()
	_, last := n.span(term)
	if late := time.Duration(last - instant); late > limit {
		n.t.Errorf("%s: the last stamp came %v later, want at most %v", what, late, limit)
	} else {
		n.t.Logf("%s: the last stamp came %v later (limit %v)", what, late, limit)
	}
}

// contained starts a run whose holder's name is given, as the first process on a host of that name.
func (n *network) contained(name string, flags ...string) *live {
	n.t.Helper()
	path, err := exec.LookPath("unshare")
	if err == nil {
		err = exec.Command(path, "--fork", "--pid", "--uts", "true").Run()
	}
	servers.Require(n.t, "unshare", err)
	l := n.prepare(n.straight(), append(flags, "--holder", name), n.job(300*time.Millisecond))
	c := exec.Command(path, append([]string{"--fork", "--pid", "--uts", "sh", "-c", `hostname "$0"; exec "$@"`, name}, l.cmd.Args...)...)
	c.Env, c.Stderr = l.cmd.Env, l.cmd.Stderr
	l.cmd = c
	return l.start()
}

// unread starts a stubborn run that logs everything to a pipe that is full and that nobody reads, and returns it with its term.
func (n *network) unread() (*live, int64) {
	n.t.Helper()
	a := n.prepare(n.straight(), []string{"--log-level", "debug"}, n.job(time.Minute, "tree", "stubborn"))
	full, in, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { full.Close() })
	raw, err := in.SyscallConn()
	if err != nil {
		n.t.Fatal(err)
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

// queue starts so many runs that wait.
func (n *network) queue(url string, many int, flags ...string) (all []*live) {
	n.t.Helper()
	for i := range many {
		all = append(all, n.run(url, flags, n.job(0)))
		if i < 8 || i%10 == 9 { // in the order in which they were started, and not all at once
			n.waiters(i + 1)
		}
	}
	n.waiters(many)
	return all
}

// handOn ends the holder by TERM, waits until all that wait have run, and returns both instants.
func (n *network) handOn(holder *live, all []*live) (begun, last int64) {
	n.t.Helper()
	begun = holder.signal(syscall.SIGTERM)
	for _, l := range all {
		l.wants(0, "ok", "")
		last = max(last, l.end)
	}
	return begun, last
}

// handovers returns the times from the last stamp of one command to the first of the next.
func (n *network) handovers() (median, p99 time.Duration) {
	n.t.Helper()
	lives, err := stamps.Read(n.dir)
	if err != nil {
		n.t.Fatal(err)
	}
	slices.SortFunc(lives, func(a, b stamps.Life) int { return int(max(-1, min(1, a.At[0]-b.At[0]))) })
	var gaps []time.Duration
	for i := 1; i < len(lives); i++ {
		gaps = append(gaps, time.Duration(lives[i].At[0]-lives[i-1].At[len(lives[i-1].At)-1]))
	}
	return quantile(gaps, 0.5), quantile(gaps, 0.99)
}

// roomy leaves much of a lease whose grant came late, so that it suffices.
var roomy = []string{"--margin", "300ms"}

// givenBack wants that a run without a command has given back what it may have been granted: another need not wait for the ttl. It returns 1
// where the run says that it could not: a machine may have no time for that within the limit of a call.
func (n *network) givenBack(b *live) (kept int) {
	n.t.Helper()
	wait := "1s"
	if strings.Contains(b.stderr.String(), "without our knowing") {
		wait, kept = "60s", 1
	}
	next := n.run(n.straight(), []string{"--wait", wait}, n.job(10*time.Millisecond))
	next.begins()
	next.wants(0, "ok", "")
	return kept
}
