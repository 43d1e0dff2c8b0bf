//go:build linux

// Package proof looks at the released binary from outside: what its promises are worth while its processes are killed, under a
// real cron, and on the clock. Nothing here imports what is proved; the commands' own stamps are the witness (package stamps).
package proof

import (
	"bytes"
	"context"
	"flag"
	"fmt"
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

	"github.com/underlease/underlease/proof/stamps"
)

// seed makes the random choices of a run repeatable, as far as the scheduler lets it.
var seed = flag.Uint64("seed", 0, "of the random choices; 0: from the clock")

var bin struct{ underlease, job string }

// patience is how long something may take that happens by itself and at once, on a slow machine that may stand still for a while.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "underlease-proof-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	bin.underlease, bin.job = filepath.Join(dir, "underlease"), filepath.Join(dir, "job")
	for out, pkg := range map[string]string{bin.underlease: "..", bin.job: "./job"} {
		c := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := c.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "go build %s: %v\n%s", pkg, err, text)
			return 1
		}
	}
	// Whatever outlives its parents comes to this process, so that nothing can hide from [survivors].
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "prctl:", err)
		return 1
	}
	return m.Run()
}

// store makes an empty file store.
func store(t *testing.T) string {
	t.Helper()
	return "file://" + filepath.Join(t.TempDir(), "store")
}

// environ is what a run inherits: nothing of ours.
func environ() []string { return []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent"} }

// underlease prepares `underlease run`.
func underlease(args ...string) *exec.Cmd {
	c := exec.Command(bin.underlease, append([]string{"run"}, args...)...)
	c.Env = environ()
	return c
}

// code returns how a command ended: its exit code, or 128 + n for signal n.
func code(c *exec.Cmd) int {
	ws := c.ProcessState.Sys().(syscall.WaitStatus)
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// within polls until f is true, and returns false if it is not in time.
func within(d time.Duration, f func() bool) bool {
	for end := time.Now().Add(d); ; time.Sleep(time.Millisecond) {
		if f() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// survivors returns the living descendants of this process, as "pid name", after it has collected the dead. It may only be
// called while no command is under way that somebody waits for.
func survivors() []string {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.ECHILD {
			return nil
		}
		if err != nil && err != syscall.EINTR || pid == 0 {
			break
		}
	}
	var all []string
	for _, pid := range descendants(os.Getpid()) {
		if n := name(pid); n != "" { // else it has gone since the look
			all = append(all, fmt.Sprintf("%d %s", pid, n))
		}
	}
	return all
}

// nothingLeft fails the test if a process is alive that a test started, or the test of another before it.
func nothingLeft(t *testing.T, wait time.Duration) {
	t.Helper()
	var left []string
	if !within(wait, func() bool { left = survivors(); return len(left) == 0 }) {
		t.Errorf("got the survivors %q, want none within %v", left, wait)
	}
}

func name(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(b))
}

// children lists the children of all threads of a process.
func children(pid int) (all []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range tasks {
		b, _ := os.ReadFile(path)
		for f := range bytes.FieldsSeq(b) {
			if n, err := strconv.Atoi(string(f)); err == nil {
				all = append(all, n)
			}
		}
	}
	return all
}

func descendants(pid int) (all []int) {
	for _, c := range children(pid) {
		all = append(append(all, c), descendants(c)...)
	}
	return all
}

// guardian returns the pid of a wrapper's guardian, or 0.
func guardian(wrapper int) int {
	for _, c := range children(wrapper) {
		if name(c) == "ul-guard" {
			return c
		}
	}
	return 0
}

// judge reads what the commands wrote, fails the test for what may not be, and returns the report.
func judge(t *testing.T, dir string) stamps.Report {
	t.Helper()
	lives, err := stamps.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	r := stamps.Check(lives, stamps.Limits{})
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	return r
}

// free fails the test if a lease cannot be had at once.
func free(t *testing.T, store, lease string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, bin.underlease, "run", "--backend", store, "--wait", "0", lease, "--", "true")
	c.Env = environ()
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("got %v and %q from a run without a wait, want the lease free", err, out)
	}
}

// quantile returns the q-th quantile of values, which it sorts.
func quantile(values []time.Duration, q float64) time.Duration {
	slices.Sort(values)
	if len(values) == 0 {
		return 0
	}
	return values[min(len(values)-1, int(q*float64(len(values))))]
}
