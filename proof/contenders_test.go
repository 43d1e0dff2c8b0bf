//go:build linux

package proof

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// attack is what is done to a run, once. Wrapper and guardian of one run are never both attacked: that is the documented hole.
type attack int

const (
	none attack = iota
	killWrapper
	killGuardian
	stopWrapper // and continue it later
	attacks
)

func (a attack) String() string {
	return [...]string{"none", "wrapper killed", "guardian killed", "wrapper stopped"}[a]
}

// run is a plan of one contender's run.
type plan struct {
	attack  attack
	started bool          // attacked a moment after the command began, else after the wrapper was started
	after   time.Duration // that moment
	paused  time.Duration // of a stopped wrapper
	job     []string
}

func draw(r *rand.Rand) plan {
	p := plan{
		attack:  attack(r.IntN(int(attacks))),
		started: r.IntN(3) > 0,
		after:   time.Duration(r.Int64N(int64(30 * time.Millisecond))),
		paused:  time.Duration(r.Int64N(int64(60 * time.Millisecond))),
	}
	p.job = []string{(2*time.Millisecond + time.Duration(r.Int64N(int64(28*time.Millisecond)))).String()}
	if r.IntN(4) == 0 {
		p.job = append(p.job, "tree")
	}
	if r.IntN(4) == 0 {
		p.job = append(p.job, "stubborn")
	}
	return p
}

// shoot signals a process by a descriptor, so that no other can be hit that got its number. It returns false if there is none.
func shoot(pid int, sig syscall.Signal, still func() bool) bool {
	if pid <= 0 {
		return false
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return still() && unix.PidfdSendSignal(fd, sig, nil, 0) == nil
}

// C64, C20: whatever is killed, at most one of them runs, and the next one does.
func TestContendersOnOneFileLease(t *testing.T) {
	const contenders = 8
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	t.Logf("seed %d", *seed)
	nothingLeft(t, patience)
	dir, where := t.TempDir(), store(t)
	var (
		handovers atomic.Int64
		begun     = time.Now()
		mu        sync.Mutex
		outcomes  = map[string]int{}
		wg        sync.WaitGroup
	)
	for i := range contenders {
		r := rand.New(rand.NewPCG(*seed, uint64(i)))
		wg.Go(func() {
			for handovers.Load() < int64(rounds) && !t.Failed() {
				p := draw(r)
				hit, began, code, stderr := contend(t, where, dir, p)
				if began {
					handovers.Add(1)
				}
				what := "missed"
				if hit {
					what = p.attack.String()
				}
				mu.Lock()
				outcomes[fmt.Sprintf("%s: %d", what, code)]++
				mu.Unlock()
				if !allowed(p.attack, hit, code) {
					t.Errorf("%v (after %v, of the command: %v; hit: %v), job %q: got the exit code %d and %q", p.attack, p.after, p.started, hit, p.job, code, stderr)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begun)
	// Of the last run the wrapper may have been killed: the guardian has a grace of 30 ms and then a kill.
	nothingLeft(t, patience)
	report := judge(t, dir)
	free(t, where, "contended")
	nothingLeft(t, patience)
	if report.Runs < rounds {
		t.Errorf("got %d runs by their stamps, want %d", report.Runs, rounds)
	}
	names := make([]string, 0, len(outcomes))
	for o, n := range outcomes {
		names = append(names, fmt.Sprintf("%s x%d", o, n))
	}
	slices.Sort(names)
	t.Logf("%d runs, %d processes, %d stamps (longest gap %v) in %v, %d overlaps; outcomes %q",
		report.Runs, report.Processes, report.Stamps, report.LongestGap, took.Round(time.Millisecond), len(report.Overlaps), names)
	if limit := 4 * time.Minute; took > limit {
		t.Errorf("%d rounds took %v, want at most %v", rounds, took, limit)
	}
}

// allowed says whether a run may end so.
func allowed(a attack, hit bool, code int) bool {
	switch {
	case !hit || a == stopWrapper:
		return code == 0
	case a == killWrapper:
		return code == 128+int(syscall.SIGKILL) || code == 0
	default:
		// 74: the command ran. 71: it had not begun. 0: it had ended.
		return code == 74 || code == 71 || code == 0
	}
}

// contend runs one run by its plan. Began says that a command began.
func contend(t *testing.T, where, dir string, p plan) (hit, began bool, exit int, stderr string) {
	args := append([]string{"--backend", where, "--wait", "2m", "--grace", "30ms", "contended", "--", bin.job, dir}, p.job...)
	c := underlease(args...)
	var words bytes.Buffer
	c.Stderr = &words
	c.WaitDelay = 10 * time.Second
	out, err := c.StdoutPipe()
	if err != nil {
		t.Error(err)
		return false, false, -1, ""
	}
	if err := c.Start(); err != nil {
		t.Error(err)
		return false, false, -1, ""
	}
	if p.attack != none && !p.started {
		hit = strike(c, p)
	}
	line, _ := bufio.NewReader(out).ReadString('\n') // of the command: its term; at its end without one: empty
	if _, err := strconv.ParseInt(string(bytes.TrimSpace([]byte(line))), 10, 64); err == nil {
		began = true
		if p.attack != none && p.started {
			hit = strike(c, p)
		}
	}
	if err := c.Wait(); err != nil && c.ProcessState == nil {
		t.Error(err)
		return hit, began, -1, words.String()
	}
	return hit, began, code(c), words.String()
}

// strike attacks a run that nobody has waited for yet. It returns whether it hit.
func strike(c *exec.Cmd, p plan) bool {
	time.Sleep(p.after)
	wrapper := c.Process.Pid // ours until Wait
	always := func() bool { return true }
	switch p.attack {
	case killWrapper:
		return shoot(wrapper, syscall.SIGKILL, always)
	case killGuardian:
		g := guardian(wrapper)
		return shoot(g, syscall.SIGKILL, func() bool { return guardian(wrapper) == g })
	case stopWrapper:
		if !shoot(wrapper, syscall.SIGSTOP, always) {
			return false
		}
		time.Sleep(p.paused)
		return shoot(wrapper, syscall.SIGCONT, always)
	default:
		return false
	}
}

// C24: TERM at any moment ends the run, all of it, and leaves the lease free.
func TestATermAtAnyMomentLeavesNothing(t *testing.T) {
	rounds := 500
	if testing.Short() {
		rounds = 50
	}
	t.Logf("seed %d", *seed)
	nothingLeft(t, patience)
	r := rand.New(rand.NewPCG(*seed, 24))
	dir, where := t.TempDir(), store(t)
	slowest := time.Duration(0)
	for round := range rounds {
		after := time.Duration(r.Int64N(int64(50 * time.Millisecond)))
		var stderr bytes.Buffer
		c := underlease("--backend", where, "term", "--", bin.job, dir, "1m", "tree")
		c.Stderr = &stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(after)
		sent := time.Now()
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		c.Wait()
		slowest = max(slowest, time.Since(sent))
		if got, want := code(c), 128+int(syscall.SIGTERM); got != want {
			t.Errorf("round %d, TERM after %v: got the exit code %d and %q, want %d", round, after, got, &stderr, want)
		}
		// The wrapper returns when the tree is gone; only a guardian that never had a command may be on its way out.
		for _, s := range survivors() {
			if !bytes.HasSuffix([]byte(s), []byte(" ul-guard")) && !bytes.HasSuffix([]byte(s), []byte(" exe")) {
				t.Errorf("round %d, TERM after %v: got the survivor %q", round, after, s)
			}
		}
		free(t, where, "term")
		nothingLeft(t, patience)
		if t.Failed() {
			break
		}
	}
	report := judge(t, dir)
	t.Logf("%d rounds, %d commands ran, slowest end %v", rounds, report.Runs, slowest)
	if report.Runs == 0 || report.Runs == rounds {
		t.Errorf("got %d commands in %d rounds, want some before and some after the start of one", report.Runs, rounds)
	}
}

// Q04: a wrapper that is killed while it starts leaves neither a command nor a guardian.
func TestAKillDuringTheStartLeavesNothing(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 50
	}
	t.Logf("seed %d", *seed)
	nothingLeft(t, patience)
	r := rand.New(rand.NewPCG(*seed, 4))
	dir, where := t.TempDir(), store(t)
	var gone []time.Duration
	for round := range rounds {
		after := time.Duration(r.Int64N(int64(8 * time.Millisecond)))
		c := underlease("--backend", where, "--grace", "30ms", "killed", "--", bin.job, dir, "1m", "tree", "stubborn")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(after)
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		killed := time.Now()
		c.Wait()
		nothingLeft(t, patience)
		gone = append(gone, time.Since(killed))
		free(t, where, "killed")
		if t.Failed() {
			t.Fatalf("round %d: the wrapper was killed after %v", round, after)
		}
	}
	report := judge(t, dir)
	t.Logf("%d rounds, %d commands had begun; everything gone after %v (median), %v (p99)", rounds, report.Runs, quantile(gone, 0.5), quantile(gone, 0.99))
	if median := quantile(gone, 0.5); median > time.Second {
		t.Errorf("with a grace of 30ms everything was gone after %v in the middle, want at most a second", median)
	}
}
