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
	chaosTTL        = 2 * time.Second
	// A store that is back is used again after the lease of a holder that could not give it back, and some looks.
	chaosResume = chaosTTL + 5*time.Second
)

// extent is what a run has to reach, or it shows nothing.
type extent struct{ handovers, ofEach int }

var (
	whole = extent{200, 10}
	brief = extent{60, 3} // of the stores beside the one that has the whole by default; UNDERLEASE_TEST_CHAOS makes it the whole
)

// server is what chaos does to a store: the kit's processes have it.
type server interface {
	Freeze()
	Resume()
	Kill()
	Stop()
	Restart()
}

// chaos is a run under way.
type chaos struct {
	t       *testing.T
	dir     string
	seed    uint64
	url     func(addr string) string
	server  server
	members []*member
	begun   atomic.Int64  // commands
	over    chan struct{} // closed when the contenders are to stop

	mu       sync.Mutex
	faults   map[string]int
	outcomes map[string]int
	resumed  []time.Duration
}

// member is one contender, with its own way to the store.
type member struct {
	proxy *proxy.Proxy

	mu      sync.Mutex
	wrapper int // descriptor of the process under way, or -1
	pid     int
}

// TestRedisChaos is C60 and C64 with everything that may go wrong: a server that keeps what it has acknowledged.
func TestRedisChaos(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{Durable: true})
	runChaos(t, whole, r, r.Addr(), func(addr string) string { return "redis://" + addr })
}

func TestPostgresChaos(t *testing.T) {
	d := onPostgres(t, servers.PostgresOptions{Durable: true})
	runChaos(t, brief, d.server.(server), d.addr, d.url)
}

func TestMariaDBChaos(t *testing.T) {
	d := onMariaDB(t, servers.MariaDBOptions{Args: []string{"--innodb-flush-log-at-trx-commit=1"}})
	runChaos(t, brief, d.server.(server), d.addr, d.url)
}

// runChaos runs as long as it takes to have enough of everything, or for UNDERLEASE_TEST_CHAOS.
func runChaos(t *testing.T, e extent, s server, addr string, url func(addr string) string) {
	t.Helper()
	least := time.Duration(0)
	if testing.Short() {
		e = extent{40, 2}
	}
	if text := os.Getenv("UNDERLEASE_TEST_CHAOS"); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil {
			t.Fatalf("UNDERLEASE_TEST_CHAOS: %v; it is how long a chaos run lasts at least, as 10m", err)
		}
		e, least = whole, d
	}
	c := &chaos{
		t: t, dir: t.TempDir(), seed: *seed, url: url, server: s, over: make(chan struct{}),
		faults: map[string]int{}, outcomes: map[string]int{},
	}
	t.Logf("seed %d", c.seed)
	var contenders, troubles sync.WaitGroup
	for i := range chaosContenders {
		m := &member{proxy: proxy.New(t, addr), wrapper: -1}
		c.members = append(c.members, m)
		contenders.Go(func() { c.contend(m, rand.New(rand.NewPCG(c.seed, uint64(i)))) })
	}
	begun := time.Now()
	for i, trouble := range []map[string]func(*rand.Rand){c.ofServer(), c.ofNetwork(), c.ofProcesses()} {
		r := rand.New(rand.NewPCG(c.seed, 100+uint64(i)))
		troubles.Go(func() { c.make(trouble, r, e.ofEach, begun.Add(least)) })
	}
	troubles.Wait()
	for _, m := range c.members {
		m.proxy.Heal()
	}
	want := int64(e.handovers)
	if !within(time.Minute, func() bool { return c.begun.Load() >= want || t.Failed() }) {
		t.Errorf("got %d handovers, want at least %d", c.begun.Load(), want)
	}
	close(c.over)
	contenders.Wait()
	var left []int
	if !within(chaosResume, func() bool { left = c.left(); return len(left) == 0 }) {
		t.Errorf("processes of runs are left: %v", left)
	}
	report := judge(t, c.dir)
	slices.Sort(c.resumed)
	t.Logf("%d runs, %d processes, %d stamps in %v, %d overlaps; faults %v; outcomes %v; after a trouble of the server the next command began within %v (median %v)",
		report.Runs, report.Processes, report.Stamps, time.Since(begun).Round(time.Second), len(report.Overlaps),
		c.faults, c.outcomes, c.resumed[len(c.resumed)-1], quantile(c.resumed, 0.5))
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

// ofServer are the troubles of the server. After each of them somebody has to run again in time.
func (c *chaos) ofServer() map[string]func(*rand.Rand) {
	short := func(r *rand.Rand) { c.pause(r, 50*time.Millisecond, 3*time.Second) } // within a ttl, and beyond
	return map[string]func(*rand.Rand){
		"server frozen":    func(r *rand.Rand) { c.server.Freeze(); short(r); c.server.Resume(); c.resumes("frozen") },
		"server killed":    func(r *rand.Rand) { c.server.Kill(); short(r); c.server.Restart(); c.resumes("killed") },
		"server restarted": func(*rand.Rand) { c.server.Stop(); c.server.Restart(); c.resumes("restarted") },
	}
}

// resumes waits for the next command.
func (c *chaos) resumes(what string) {
	before, at := c.begun.Load(), time.Now()
	if !within(chaosResume, func() bool { return c.begun.Load() > before || c.t.Failed() }) {
		c.t.Errorf("after the server was %s no command began within %v", what, chaosResume)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resumed = append(c.resumed, time.Since(at))
}

// ofNetwork are the troubles between one contender and the server.
func (c *chaos) ofNetwork() map[string]func(*rand.Rand) {
	hole := func(d proxy.Direction) func(*rand.Rand) {
		return func(r *rand.Rand) {
			p := c.one(r).proxy
			p.BlackHole(d)
			c.pause(r, 50*time.Millisecond, 3*time.Second)
			if r.IntN(2) == 0 {
				p.Cut() // what was held back is lost, else it arrives late
			}
			p.Heal()
		}
	}
	return map[string]func(*rand.Rand){
		"partition":       hole(proxy.Requests | proxy.Answers),
		"requests held":   hole(proxy.Requests),
		"answers held":    hole(proxy.Answers),
		"connections cut": func(r *rand.Rand) { c.one(r).proxy.Cut() },
		"answers lost":    func(r *rand.Rand) { c.one(r).proxy.Inject(proxy.Fault{Kind: proxy.Lose, Count: 2}) },
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
		if busy {
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
	w := underlease(append([]string{
		"--backend", c.url(m.proxy.Addr()), "--ttl", chaosTTL.String(), "--grace", "100ms", "--wait", "1m", "--log-level", "error", "chaos", "--",
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
