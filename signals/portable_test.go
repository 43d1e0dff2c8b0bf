//go:build linux && portable

package signals

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// One guardian of the portable kind, with a command that is a shell script in a directory of its own.
func portable(t *testing.T, script string, d Deadlines, change func(*Command)) (g *portableGuardian, dir string) {
	t.Helper()
	dir = t.TempDir()
	g, err := launchPortable(Options{OwnGroup: true})
	if err != nil {
		t.Fatal(err)
	}
	c := Command{
		Path: "/bin/sh", Args: []string{"sh", "-c", script}, Env: append(os.Environ(), "D="+dir, "ODD=\xff\xfe"),
		StopSignal: syscall.SIGTERM, Grace: 300 * time.Millisecond, Leftovers: LeftoversKill,
	}
	if change != nil {
		change(&c)
	}
	if _, err := g.Start(c, d); err != nil {
		t.Fatal(err)
	}
	return g, dir
}

func endlessly() Deadlines { return Deadlines{Never, Never, Never, Never, Never} }

func within(d time.Duration) Instant { return Now() + int64(d) }

// drained returns all events.
func drained(t *testing.T, g *portableGuardian) (kinds []EventKind, status Status, all []Event) {
	t.Helper()
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	for {
		select {
		case ev, ok := <-g.Events():
			if !ok {
				return kinds, status, all
			}
			if ev.Kind == Exited {
				status = ev.Status
			}
			kinds, all = append(kinds, ev.Kind), append(all, ev)
		case <-limit.C:
			t.Fatalf("still running after 20s; events %v", all)
		}
	}
}

func contents(t *testing.T, dir, name string) string {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err == nil && strings.HasSuffix(string(b), "\n") {
			return strings.TrimSpace(string(b))
		}
	}
	t.Fatalf("no %s within 10s", name)
	return ""
}

func running(t *testing.T, pid string) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// stalled measures until the end of a test how long a goroutine that wants to run every millisecond could not: nobody here can be faster.
func stalled(t *testing.T) (most func() time.Duration) {
	t.Helper()
	var worst, last atomic.Int64
	last.Store(Now())
	end := make(chan struct{})
	t.Cleanup(func() { close(end) })
	tick := time.NewTicker(time.Millisecond)
	go func() {
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				now := Now()
				worst.Store(max(worst.Load(), now-last.Load()))
				last.Store(now)
			}
		}
	}()
	return func() time.Duration { return time.Duration(max(worst.Load(), Now()-last.Load())) }
}

// household is a shell that does not heed TERM, with a background child, one in its own session, and an orphan.
const household = `trap "" TERM
sleep 99 & echo $! > "$D/back"
setsid sh -c 'echo $$ > "$D/session"; exec sleep 99' &
sh -c 'setsid sh -c "echo \$\$ > \"\$D/orphan\"; exec sleep 99" & sleep 0.8'
echo ready > "$D/ready"
while :; do sleep 0.05; done`

func TestPortableTheTreeIsDeadAtItsKillInstant(t *testing.T) {
	d := endlessly()
	stall := stalled(t)
	g, dir := portable(t, household, d, func(c *Command) { c.Grace = 10 * time.Second })
	contents(t, dir, "ready")
	// So far apart that no hiccup covers both: a guardian that comes too late for the stop kills without it.
	d.StopAt, d.KillAt = within(200*time.Millisecond), within(3*time.Second)
	g.Publish(d)
	kinds, status, all := drained(t, g)
	if want := []EventKind{Stopping, Killing, Exited, Gone}; !slices.Equal(kinds, want) {
		t.Errorf("events %v, want %v", kinds, want)
	}
	if status.Signal != syscall.SIGKILL {
		t.Errorf("the command ended with %+v, want KILL", status)
	}
	if late := time.Duration(all[1].At - d.KillAt); late < 0 || late > 200*time.Millisecond+5*stall() {
		t.Errorf("killed %v after the instant", late)
	}
	for _, name := range []string{"back", "session", "orphan"} {
		if pid := contents(t, dir, name); running(t, pid) {
			t.Errorf("%s (%s) still runs", name, pid)
		}
	}
}

func TestPortableExitCodesBytesAndLeftovers(t *testing.T) {
	g, dir := portable(t, `printf %s "$ODD" > "$D/odd"; sleep 99 & echo $! > "$D/back"; sleep 0.5; exit 7`, endlessly(), nil)
	kinds, status, all := drained(t, g)
	if status.Code != 7 || !slices.Equal(kinds, []EventKind{Exited, Leftover, Gone}) || !all[1].Killed || all[1].Count != 1 {
		t.Errorf("got %+v and %+v, want code 7 and one leftover that was killed", status, all)
	}
	if running(t, contents(t, dir, "back")) {
		t.Error("the leftover still runs")
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "odd")); string(b) != "\xff\xfe" {
		t.Errorf("the command's environment has %q, want the bytes as they were", b)
	}
	begun := time.Now()
	g, _ = portable(t, `sleep 4 & sleep 0.5; exit 0`, endlessly(), func(c *Command) { c.Leftovers = LeftoversWait })
	if kinds, _, _ := drained(t, g); !slices.Equal(kinds, []EventKind{Exited, Leftover, Gone}) || time.Since(begun) < 4*time.Second {
		t.Errorf("events %v after %v, want that the leftover is waited for", kinds, time.Since(begun))
	}
}

func TestPortableSignalsReachTheCommand(t *testing.T) {
	g, dir := portable(t, `trap 'echo usr1 > "$D/got"' USR1; trap 'exit 9' TERM; echo ready > "$D/ready"; while :; do sleep 0.02; done`, endlessly(), nil)
	contents(t, dir, "ready")
	g.Forward(syscall.SIGUSR1)
	contents(t, dir, "got")
	if n := g.Descendants(); n < 1 {
		t.Errorf("counts %d descendants, want the command at least", n)
	}
	g.Stop()
	if _, status, _ := drained(t, g); status.Code != 9 {
		t.Errorf("got %+v, want code 9", status)
	}
}

func TestPortableWithoutTheGuardianTheWrapperKillsTheTree(t *testing.T) {
	g, dir := portable(t, household, endlessly(), nil)
	contents(t, dir, "ready")
	syscall.Kill(g.pid, syscall.SIGKILL)
	kinds, _, _ := drained(t, g)
	if !slices.Contains(kinds, GuardianLost) || kinds[len(kinds)-1] != Gone {
		t.Errorf("events %v, want that the guardian was lost and the tree is gone", kinds)
	}
	for _, name := range []string{"back", "session", "orphan"} {
		if pid := contents(t, dir, name); running(t, pid) {
			t.Errorf("%s (%s) still runs", name, pid)
		}
	}
}

func TestPortableAStoppedGuardianIsReplaced(t *testing.T) {
	g, dir := portable(t, household, endlessly(), nil)
	contents(t, dir, "ready")
	syscall.Kill(g.pid, syscall.SIGSTOP)
	g.Kill()
	if kinds, _, _ := drained(t, g); kinds[len(kinds)-1] != Gone || slices.Contains(kinds, GuardianLost) {
		t.Errorf("events %v, want the end of the tree by our own order", kinds)
	}
	if pid := contents(t, dir, "back"); running(t, pid) {
		t.Errorf("back (%s) still runs", pid)
	}
}

func TestPortableWithoutTheWrapperTheTreeIsDeadAfterTheGrace(t *testing.T) {
	g, dir := portable(t, household, endlessly(), nil)
	contents(t, dir, "ready")
	g.sock.Close() // as when the wrapper is killed
	for _, name := range []string{"back", "session", "orphan"} {
		pid := contents(t, dir, name)
		for end := time.Now().Add(10 * time.Second); running(t, pid); time.Sleep(2 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s (%s) still runs", name, pid)
			}
		}
	}
	drained(t, g)
}

func TestPortableLocksAreHeldUntilTheTreeIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	g, err := launchPortable(Options{OwnGroup: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Pin([]int{int(f.Fd())}); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := g.Start(Command{
		Path: "/bin/sh", Args: []string{"sh", "-c", "sleep 3"}, Env: os.Environ(), StopSignal: syscall.SIGTERM, Leftovers: LeftoversKill,
	}, endlessly()); err != nil {
		t.Fatal(err)
	}
	other, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		t.Error("the lock is free while the command runs")
	}
	drained(t, g)
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Errorf("the lock is not free after the end: %v", err)
	}
}

func TestPortableNoStartAndNoTrace(t *testing.T) {
	g, err := launchPortable(Options{OwnGroup: true})
	if err != nil {
		t.Fatal(err)
	}
	_, err = g.Start(Command{Path: "/nonexistent", Args: []string{"x"}}, endlessly())
	if e, ok := err.(*StartError); !ok || e.Errno != syscall.ENOENT {
		t.Errorf("got %v, want ENOENT", err)
	}
	for _, i := range []Isolation{IsolateCgroup, IsolatePidns} {
		_, err = g.Start(Command{Path: "/bin/true", Args: []string{"true"}, Isolate: i}, endlessly())
		if e, ok := err.(*StartError); !ok || e.Isolate == nil || !strings.HasSuffix(err.Error(), "of Linux alone") {
			t.Errorf("%s: got %v, want that it is of Linux alone", i, err)
		}
	}
	d := endlessly()
	d.StopAt = Now() - 1
	_, err = g.Start(Command{Path: "/bin/true", Args: []string{"true"}}, d)
	if e, ok := err.(*StartError); !ok || !e.TooLate {
		t.Errorf("got %v, want too late", err)
	}
	g.Close()
	if kinds, _, _ := drained(t, g); len(kinds) != 0 {
		t.Errorf("events %v without a command", kinds)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", g.pid)); err == nil {
		t.Error("the guardian is still there")
	}
}
