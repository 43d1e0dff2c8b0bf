//go:build linux

package proof

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
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
)

// A chaos run: contenders on one lease while the store's server, the ways to it, wrappers and guardians are frozen, killed and
// cut off, each at random moments and several at once. What the commands stamped is the history, and decides: no two of them at
// once, terms that grow, and after each trouble of the store somebody runs again in time.
const (
	chaosContenders = 8
	chaosHandovers  = 200 // at least, or the run shows nothing
	chaosOfEach     = 10  // faults of each kind, at least
	chaosBrief      = 2   // of each, in a run that is not to be long
	chaosTTL        = 2 * time.Second
	chaosRoom       = 15 * time.Second // for a slow machine that stands still for a while, and for the troubles that others have meanwhile
)

// site is a store as a chaos run sees it.
type site struct {
	ways     func(contender int) []string // addresses of the servers that it uses
	url      func(addrs []string) string
	troubles map[string]func(during func()) // of servers: each calls during while it lasts, and returns when it is over
	// resume is how soon after a trouble of servers the next command has to begin: when the lease of a holder that could not give it back
	// has ended, and after some looks.
	resume time.Duration
	brief  bool // many servers, long sessions: the whole run is made where UNDERLEASE_TEST_CHAOS asks for it
}

// one is a site on one server.
func one(p server, addr string, url func(addr string) string) site {
	return site{
		ways: func(int) []string { return []string{addr} }, url: func(addrs []string) string { return url(addrs[0]) },
		resume: chaosTTL + chaosRoom,
		troubles: map[string]func(func()){
			"server frozen":    func(during func()) { p.Freeze(); during(); p.Resume() },
			"server killed":    func(during func()) { p.Kill(); during(); p.Restart() },
			"server restarted": func(func()) { p.Stop(); p.Restart() },
		},
	}
}

// troublesOf are those of a cluster. Pick returns the server that leads, and another.
func troublesOf(pick func() (leader, follower *servers.Process), restart func()) map[string]func(func()) {
	freeze := func(p *servers.Process, during func()) { p.Freeze(); during(); p.Resume() }
	kill := func(p *servers.Process, during func()) { p.Kill(); during(); p.Restart() }
	return map[string]func(func()){
		"leader frozen":    func(during func()) { p, _ := pick(); freeze(p, during) },
		"leader killed":    func(during func()) { p, _ := pick(); kill(p, during) },
		"follower frozen":  func(during func()) { _, p := pick(); freeze(p, during) },
		"follower killed":  func(during func()) { _, p := pick(); kill(p, during) },
		"all were started": func(func()) { restart() },
	}
}

// chaos is a run under way.
type chaos struct {
	t       *testing.T
	dir     string
	seed    uint64
	site    site
	members []*member
	begun   atomic.Int64  // commands
	over    chan struct{} // closed when the contenders are to stop

	mu       sync.Mutex
	faults   map[string]int
	outcomes map[string]int
	resumed  []time.Duration
}

// member is one contender, with its own ways to the store.
type member struct {
	proxies []*proxy.Proxy // one for each server

	mu      sync.Mutex
	wrapper int // descriptor of the process under way, or -1
	pid     int
}

// TestRedisChaos is C60 and C64 with everything that may go wrong: a server that keeps what it has acknowledged.
func TestRedisChaos(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{Durable: true})
	runChaos(t, one(r, r.Addr(), func(addr string) string { return "redis://" + addr }))
}

// TestEtcdChaos: three servers, all of which every contender knows.
func TestEtcdChaos(t *testing.T) {
	c := servers.StartEtcd(t, 3, servers.EtcdOptions{})
	addrs := c.Addrs()
	runChaos(t, site{
		ways: func(int) []string { return addrs }, url: func(addrs []string) string { return "etcd://" + strings.Join(addrs, ",") },
		troubles: troublesOf(func() (leader, follower *servers.Process) {
			l, others := c.Leader()
			return l.Process, others[0].Process
		}, c.Restart),
		resume: 2*chaosTTL + chaosRoom, // a new leader counts every lease anew
		brief:  true,
	})
}

// TestConsulChaos: three servers, each the agent of some contenders.
func TestConsulChaos(t *testing.T) {
	c := servers.StartConsul(t, 3, servers.ConsulOptions{})
	runChaos(t, site{
		ways: func(contender int) []string { return []string{c.Nodes[contender%len(c.Nodes)].Addr()} },
		url:  func(addrs []string) string { return "consul://" + addrs[0] + "?session-ttl-min=1s" },
		troubles: troublesOf(func() (leader, follower *servers.Process) {
			l, others := c.Leader()
			return l.Process, others[0].Process
		}, c.Restart),
		resume: 2*chaosTTL + 2*chaosRoom, // a session lasts for up to twice its ttl, and a new leader counts it anew
		brief:  true,
	})
}

// runChaos runs as long as it takes to have enough of everything, or for UNDERLEASE_TEST_CHAOS.
func runChaos(t *testing.T, s site) {
	t.Helper()
	of, least := chaosOfEach, time.Duration(0)
	if testing.Short() || s.brief && os.Getenv("UNDERLEASE_TEST_CHAOS") == "" {
		of = chaosBrief
	}
	if text := os.Getenv("UNDERLEASE_TEST_CHAOS"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("UNDERLEASE_TEST_CHAOS: %v; it is how long a chaos run lasts at least, as 10m", err)
		}
		least = d
	}
	c := &chaos{
		t: t, dir: t.TempDir(), seed: *seed, site: s, over: make(chan struct{}),
		faults: map[string]int{}, outcomes: map[string]int{},
	}
	t.Logf("seed %d", c.seed)
	var contenders, troubles sync.WaitGroup
	for i := range chaosContenders {
		m := &member{wrapper: -1}
		for _, addr := range s.ways(i) {
			m.proxies = append(m.proxies, proxy.New(t, addr))
		}
		c.members = append(c.members, m)
		contenders.Go(func() { c.contend(m, rand.New(rand.NewPCG(c.seed, uint64(i)))) })
	}
	begun := time.Now()
	for i, trouble := range []map[string]func(*rand.Rand){c.ofServer(), c.ofNetwork(), c.ofProcesses()} {
		r := rand.New(rand.NewPCG(c.seed, 100+uint64(i)))
		troubles.Go(func() { c.make(trouble, r, of, begun.Add(least)) })
	}
	troubles.Wait()
	for _, m := range c.members {
		m.heal()
	}
	want := int64(chaosHandovers)
	if of < chaosOfEach {
		want /= 5
	}
	if !within(3*time.Minute, func() bool { return c.begun.Load() >= want || t.Failed() }) {
		t.Errorf("got %d handovers, want at least %d", c.begun.Load(), want)
	}
	close(c.over)
	contenders.Wait()
	var left []int
	if !within(s.resume, func() bool { left = c.left(); return len(left) == 0 }) {
		t.Errorf("processes of runs are left: %v", left)
	}
	report := judge(t, c.dir)
	t.Logf("%d runs, %d processes, %d stamps in %v, %d overlaps; faults %v; outcomes %v; after a trouble of the server the next command began within %v (median %v)",
		report.Runs, report.Processes, report.Stamps, time.Since(begun).Round(time.Second), len(report.Overlaps),
		c.faults, c.outcomes, quantile(c.resumed, 1), quantile(c.resumed, 0.5))
	if report.Runs < int(want) {
		t.Errorf("got %d runs by their stamps, want at least %d", report.Runs, want)
	}
}

// make does every kind of trouble so often, one after another in random order, and goes on until an instant.
func (c *chaos) make(kinds map[string]func(*rand.Rand), r *rand.Rand, of int, until time.Time) {
	names := make([]string, 0, len(kinds))
	for n := range kinds {
		names = append(names, n)
	}
	slices.Sort(names) // so that the seed decides
	var todo []string
	for range of {
		todo = append(todo, names...)
	}
	r.Shuffle(len(todo), func(i, j int) { todo[i], todo[j] = todo[j], todo[i] })
	for i := 0; (i < len(todo) || time.Now().Before(until)) && !c.t.Failed(); i++ {
		n := todo[i%len(todo)]
		kinds[n](r)
		c.mu.Lock()
		c.faults[n]++
		c.mu.Unlock()
		c.pause(r, 100*time.Millisecond, 900*time.Millisecond)
	}
}

// pause waits for a random time: it is not for anything to happen, but so that things happen at random moments.
func (c *chaos) pause(r *rand.Rand, least, most time.Duration) {
	time.Sleep(least + time.Duration(r.Int64N(int64(most-least)))) // the length of a fault, or of the time between two
}

// ofServer are the troubles of the servers. After each of them somebody has to run again in time.
func (c *chaos) ofServer() map[string]func(*rand.Rand) {
	all := map[string]func(*rand.Rand){}
	for what, trouble := range c.site.troubles {
		all[what] = func(r *rand.Rand) {
			trouble(func() { c.pause(r, 50*time.Millisecond, 3*time.Second) }) // within a ttl, and beyond
			c.resumes(what)
		}
	}
	return all
}

// resumes waits for the next command.
func (c *chaos) resumes(what string) {
	before, at := c.begun.Load(), time.Now()
	if !within(c.site.resume, func() bool { return c.begun.Load() > before || c.t.Failed() }) {
		c.t.Errorf("after %q no command began within %v", what, c.site.resume)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resumed = append(c.resumed, time.Since(at))
}

func (m *member) heal() {
	for _, p := range m.proxies {
		p.Heal()
	}
}

func (m *member) cut() {
	for _, p := range m.proxies {
		p.Cut()
	}
}

// ofNetwork are the troubles between one contender and all servers that it knows.
func (c *chaos) ofNetwork() map[string]func(*rand.Rand) {
	hole := func(d proxy.Direction) func(*rand.Rand) {
		return func(r *rand.Rand) {
			m := c.one(r)
			for _, p := range m.proxies {
				p.BlackHole(d)
			}
			c.pause(r, 50*time.Millisecond, 3*time.Second)
			if r.IntN(2) == 0 {
				m.cut() // what was held back is lost, else it arrives late
			}
			m.heal()
		}
	}
	return map[string]func(*rand.Rand){
		"partition":       hole(proxy.Requests | proxy.Answers),
		"requests held":   hole(proxy.Requests),
		"answers held":    hole(proxy.Answers),
		"connections cut": func(r *rand.Rand) { c.one(r).cut() },
		"answers lost": func(r *rand.Rand) {
			for _, p := range c.one(r).proxies {
				p.Inject(proxy.Fault{Kind: proxy.Lose, Count: 2})
			}
		},
	}
}

// ofProcesses are the troubles of one contender's processes. Wrapper and guardian of one run are not killed both.
func (c *chaos) ofProcesses() map[string]func(*rand.Rand) {
	return map[string]func(*rand.Rand){
		"wrapper killed": func(r *rand.Rand) {
			m := c.busy(r)
			m.mu.Lock()
			defer m.mu.Unlock()
			_ = unix.PidfdSendSignal(m.wrapper, syscall.SIGKILL, nil, 0) // it may have ended
		},
		"guardian killed": func(r *rand.Rand) {
			m := c.busy(r)
			m.mu.Lock()
			defer m.mu.Unlock()
			wrapper := m.pid
			g := guardian(wrapper)
			shoot(g, syscall.SIGKILL, func() bool { return guardian(wrapper) == g })
		},
		"wrapper stopped": func(r *rand.Rand) {
			m := c.busy(r)
			m.mu.Lock()
			fd, err := unix.FcntlInt(uintptr(m.wrapper), unix.F_DUPFD_CLOEXEC, 0)
			m.mu.Unlock()
			if err != nil {
				return // it has ended
			}
			defer unix.Close(fd)
			_ = unix.PidfdSendSignal(fd, syscall.SIGSTOP, nil, 0)
			c.pause(r, 50*time.Millisecond, 3*time.Second)
			_ = unix.PidfdSendSignal(fd, syscall.SIGCONT, nil, 0)
		},
		"guardian stopped": func(r *rand.Rand) {
			m := c.busy(r)
			m.mu.Lock()
			g := guardian(m.pid)
			m.mu.Unlock()
			fd, err := unix.PidfdOpen(g, 0)
			if g == 0 || err != nil {
				return
			}
			defer unix.Close(fd)
			_ = unix.PidfdSendSignal(fd, syscall.SIGSTOP, nil, 0)
			c.pause(r, 50*time.Millisecond, 3*time.Second)
			_ = unix.PidfdSendSignal(fd, syscall.SIGCONT, nil, 0)
		},
	}
}

func (c *chaos) one(r *rand.Rand) *member { return c.members[r.IntN(len(c.members))] }

// busy returns a contender with a run under way.
func (c *chaos) busy(r *rand.Rand) *member {
	for {
		m := c.one(r)
		m.mu.Lock()
		busy := m.wrapper >= 0
		m.mu.Unlock()
		if busy || c.t.Failed() { // then nobody runs any more
			return m
		}
		time.Sleep(time.Millisecond) // the pace of the looks
	}
}

// contend runs one command after another until the chaos is over.
func (c *chaos) contend(m *member, r *rand.Rand) {
	for {
		select {
		case <-c.over:
			return
		default:
		}
		if c.t.Failed() {
			return
		}
		job := []string{bin.job, c.dir, (2*time.Millisecond + time.Duration(r.Int64N(int64(28*time.Millisecond)))).String()}
		if r.IntN(10) == 0 {
			job[2] = (time.Second + time.Duration(r.Int64N(int64(3*time.Second)))).String() // that has to renew
		}
		for _, word := range []string{"tree", "stubborn"} {
			if r.IntN(4) == 0 {
				job = append(job, word)
			}
		}
		exit, words, err := c.run(m, job)
		if err != nil {
			c.t.Error(err)
			return
		}
		c.mu.Lock()
		c.outcomes[strconv.Itoa(exit)]++
		c.mu.Unlock()
		// 0, or killed by us; 69: the store was not there for too long; 71: the guardian was killed before the command began;
		// 74: the lease was lost, or the guardian.
		if !slices.Contains([]int{0, 128 + int(syscall.SIGKILL), 69, 71, 74}, exit) {
			c.t.Errorf("job %q: got the exit code %d and %q", job, exit, words)
		}
	}
}

// run is one run from its start to its end.
func (c *chaos) run(m *member, job []string) (exit int, words string, err error) {
	var addrs []string
	for _, p := range m.proxies {
		addrs = append(addrs, p.Addr())
	}
	w := underlease(append([]string{
		"--backend", c.site.url(addrs), "--ttl", chaosTTL.String(), "--grace", "100ms", "--margin", (chaosTTL / 4).String(), "--wait", "10m", "--log-level", "error", "chaos", "--",
	}, job...)...)
	var stderr bytes.Buffer
	w.Stderr = &stderr
	w.WaitDelay = 10 * time.Second
	fd := -1
	w.SysProcAttr = &syscall.SysProcAttr{PidFD: &fd}
	out, err := w.StdoutPipe()
	if err != nil {
		return 0, "", err
	}
	if err := w.Start(); err != nil {
		return 0, "", err
	}
	m.mu.Lock()
	m.wrapper, m.pid = fd, w.Process.Pid
	m.mu.Unlock()
	lines := bufio.NewReader(out)
	line, _ := lines.ReadString('\n') // of the command: its term; at its end without one: empty
	if _, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64); err == nil {
		c.begun.Add(1)
	}
	_, _ = io.Copy(io.Discard, lines)
	err = ended(w, m)
	if w.ProcessState == nil {
		return 0, "", fmt.Errorf("wait: %w", err)
	}
	return code(w), stderr.String(), nil
}

// ended waits for a wrapper. It is not signalled by its number from then on.
func ended(w *exec.Cmd, m *member) error {
	m.mu.Lock()
	fd := m.wrapper
	m.mu.Unlock()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(fds, -1); err != unix.EINTR {
			break
		}
	}
	m.mu.Lock()
	m.wrapper, m.pid = -1, 0
	m.mu.Unlock()
	err := w.Wait()
	unix.Close(fd)
	return err
}

// left returns the processes of runs that are alive.
func (c *chaos) left() (all []int) {
	for _, pid := range descendants(os.Getpid()) {
		n := name(pid)
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		dead := bytes.Contains(b, []byte(") Z ")) // one that came to this process, which collects none while a server may be among them
		if !dead && (n == "job" || n == "ul-guard" || n == "underlease") {
			all = append(all, pid)
		}
	}
	return all
}
