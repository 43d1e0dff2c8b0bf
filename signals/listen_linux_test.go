package signals_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/underlease/underlease/internal/needed"
	"github.com/underlease/underlease/signals"
)

// counting runs a command that counts its signals, under a wrapper that passes them on.
func counting(t *testing.T) *run {
	t.Helper()
	p := endless("sh", "-c", `UL_TEST_MODE=count exec "$EXE" "$D/got"`)
	p.Listens = true
	r := launch(t, p)
	eventually(t, "counter", func() bool { return r.read("got") == "ready\n" })
	r.entry("started")
	return r
}

// got waits until the command has got so many signals, and a moment in which it could get more, and returns how many of each.
func (r *run) got(n int) map[syscall.Signal]int {
	r.t.Helper()
	lines := func() []string { return strings.Fields(r.read("got"))[1:] }
	eventually(r.t, fmt.Sprintf("%d signals", n), func() bool { return len(lines()) >= n })
	<-time.After(30 * time.Millisecond)
	m := map[syscall.Signal]int{}
	for _, l := range lines() {
		var n int
		fmt.Sscan(l, &n)
		m[syscall.Signal(n)]++
	}
	return m
}

// once sends a signal to several processes, of which the command is one, and wants that the command gets it once more, and nothing else. That
// the command has got it is known from the others that got it at the same moment. A moment has an end (holdSignal and sameSignal in package
// guard): where the machine stood still in it, the signal may be passed on all the same.
func (r *run) once(sig syscall.Signal, send func()) {
	r.t.Helper()
	total := func(m map[syscall.Signal]int) (n int) {
		for _, times := range m {
			n += times
		}
		return n
	}
	before := r.got(0)
	r.stall.forget()
	begun := signals.Now()
	send()
	moment := max(time.Duration(signals.Now()-begun), r.stall.most())
	after, most := r.got(total(before)+1), 1
	if moment = max(moment, r.stall.most()); moment > 5*time.Millisecond {
		<-time.After(100 * time.Millisecond) // a second one comes later too
		after, most = r.got(0), 2
	}
	times := after[sig] - before[sig]
	if times < 1 || times > most || total(after)-total(before) != times {
		r.t.Fatalf("after signal %d the command has got %v, want what it had before, %v, and this one once more; the machine stalled for %v", sig, after, before, moment)
	}
}

func (r *run) finish() {
	r.t.Helper()
	for _, pid := range r.survivors() {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	r.wantSignal(syscall.SIGKILL)
}

// Q20, Q22, C25
func TestEverySignalFromOutsideReachesTheCommandOnce(t *testing.T) {
	noTerminal(t)
	r := counting(t)
	n := 0
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		switch sig {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF, 32, 33, 34,
			syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGSYS:
			continue // documented at the table
		}
		r.cmd.Process.Signal(sig)
		n++
		if got := r.got(n); got[sig] != 1 || len(got) != n {
			t.Fatalf("after signal %d the command has got %v", sig, got)
		}
	}
	r.finish()
}

// C25
func TestASignalToTheWrappersGroupReachesTheCommandOnce(t *testing.T) {
	noTerminal(t)
	p := endless("sh", "-c", `UL_TEST_MODE=count exec "$EXE" "$D/got"`)
	p.Listens = true
	r := prepare(t, p)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	r.start()
	eventually(t, "counter", func() bool { return r.read("got") == "ready\n" })
	r.entry("started")
	for i, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGUSR1} {
		syscall.Kill(-r.cmd.Process.Pid, sig)
		if got := r.got(i + 1); got[sig] != 1 || len(got) != i+1 {
			t.Fatalf("after signal %d to the group the command has got %v", sig, got)
		}
	}
	r.finish()
}

// A service manager signals every process of a control group.
func TestASignalToEveryProcessReachesTheCommandOnce(t *testing.T) {
	noTerminal(t)
	r := counting(t)
	c := r.entry("started").Pid
	g := r.guardian()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1} {
		r.once(sig, func() {
			for _, pid := range []int{r.cmd.Process.Pid, g, c} {
				syscall.Kill(pid, sig)
			}
		})
	}
	r.once(syscall.SIGUSR2, func() { r.cmd.Process.Signal(syscall.SIGUSR2) }) // and the next one to the wrapper alone is passed on as ever
	r.finish()
}

// C25
func TestOurOwnBrokenPipeIsNoSignalFromOutside(t *testing.T) {
	noTerminal(t)
	p := endless("sh", "-c", `UL_TEST_MODE=count exec "$EXE" "$D/got"`)
	p.Listens, p.Breaks = true, true
	r := launch(t, p)
	eventually(t, "counter", func() bool { return r.read("got") == "ready\n" })
	r.entry("broken")
	r.cmd.Process.Signal(syscall.SIGUSR1)
	if got := r.got(1); got[syscall.SIGUSR1] != 1 || len(got) != 1 {
		t.Errorf("the command has got %v, want USR1 alone", got)
	}
	r.cmd.Process.Signal(syscall.SIGPIPE)
	if got := r.got(2); got[syscall.SIGPIPE] != 1 {
		t.Errorf("the command has got %v, want PIPE", got)
	}
	r.finish()
}

func TestAnIgnoredSignalIsNotPassedOn(t *testing.T) {
	noTerminal(t)
	p := endless("sh", "-c", `UL_TEST_MODE=count exec "$EXE" "$D/got"`)
	p.Listens = true
	r := prepare(t, p)
	r.cmd.Path, r.cmd.Args = "/usr/bin/nohup", []string{"nohup", exe}
	r.start()
	eventually(t, "counter", func() bool { return r.read("got") == "ready\n" })
	r.entry("started")
	r.cmd.Process.Signal(syscall.SIGHUP)
	r.cmd.Process.Signal(syscall.SIGUSR1)
	if got := r.got(1); got[syscall.SIGHUP] != 0 || got[syscall.SIGUSR1] != 1 {
		t.Errorf("the command has got %v, want USR1 alone", got)
	}
	r.finish()
}

func TestNoSignalOfAJobEndsOrStopsTheGuardian(t *testing.T) {
	r := launch(t, endless("sleep", "60"))
	r.entry("started")
	g := r.guardian()
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		switch sig {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE,
			syscall.SIGSEGV, syscall.SIGSYS:
			continue
		}
		syscall.Kill(g, sig)
	}
	for _, pid := range r.survivors() {
		syscall.Kill(pid, syscall.SIGUSR1)
	}
	r.wantSignal(syscall.SIGUSR1) // the guardian was there to tell it
}

// noTerminal skips where the tests have a terminal: the command would share our process group.
func noTerminal(t *testing.T) {
	t.Helper()
	if signals.Terminal() {
		t.Skip("has a controlling terminal")
	}
}

// terminal gives a run a terminal of its own, and returns the other side.
func terminal(t *testing.T, r *run) *os.File {
	t.Helper()
	m, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		needed.Require(t, "terminal", err)
	}
	t.Cleanup(func() { m.Close() })
	var n, unlock int32
	raw, _ := m.SyscallConn()
	raw.Control(func(fd uintptr) {
		syscall.Syscall(syscall.SYS_IOCTL, fd, syscall.TIOCSPTLCK, uintptr(unsafe.Pointer(&unlock)))
		syscall.Syscall(syscall.SYS_IOCTL, fd, syscall.TIOCGPTN, uintptr(unsafe.Pointer(&n)))
	})
	s, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	r.cmd.Stdin, r.cmd.Stdout = s, s
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	return m
}

// Q23, Q24, C27
func TestAKeyOnTheTerminalReachesTheCommandOnce(t *testing.T) {
	p := endless("sh", "-c", `UL_TEST_MODE=count exec "$EXE" "$D/got"`)
	p.Listens = true
	r := prepare(t, p)
	tty := terminal(t, r)
	r.start()
	eventually(t, "counter", func() bool { return r.read("got") == "ready\n" })
	r.entry("started")
	tty.Write([]byte{3}) // ^C
	if got := r.got(1); got[syscall.SIGINT] != 1 || len(got) != 1 {
		t.Fatalf("after ^C the command has got %v, want INT once", got)
	}
	r.cmd.Process.Signal(syscall.SIGINT) // from elsewhere
	if got := r.got(2); got[syscall.SIGINT] != 2 || len(got) != 1 {
		t.Fatalf("after kill -INT the command has got %v, want INT once more", got)
	}
	tty.Write([]byte{28}) // ^\
	if got := r.got(3); got[syscall.SIGQUIT] != 1 {
		t.Fatalf("after ^\\ the command has got %v, want QUIT once", got)
	}
	// A shell that kills a job, or goes, signals the group.
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGINT} {
		r.once(sig, func() { syscall.Kill(-r.cmd.Process.Pid, sig) })
	}
	r.once(syscall.SIGTERM, func() { r.cmd.Process.Signal(syscall.SIGTERM) })
	r.finish()
}

// Q25, C27
func TestTheCommandReadsTheTerminal(t *testing.T) {
	r := prepare(t, endless("sh", "-c", `read line; echo "$line" > "$D/line"; exit 8`))
	tty := terminal(t, r)
	r.start()
	r.entry("started")
	tty.WriteString("hello\n")
	r.wantCode(8)
	if got := r.read("line"); got != "hello\n" {
		t.Errorf("read %q", got)
	}
}

// Q26, C27
func TestStoppingTheJobStopsWrapperAndCommandButNotTheGuardian(t *testing.T) {
	p := endless(tree(true)...)
	p.StopIn, p.KillIn, p.Listens, p.Told = 3*time.Second, 3200*time.Millisecond, true, true // time for the shell to see the stop
	p.Args[2] = "exec 2>&-\n" + p.Args[2]
	r := prepare(t, p)
	terminal(t, r)
	// The leader of a session is not stopped by its terminal; an ordinary job is.
	r.cmd.Path, r.cmd.Args = "/bin/bash", []string{"bash", "-ic", `set -m; "$EXE"; echo $? > "$D/job"; kill -9 $$`}
	r.cmd.Env = append(r.cmd.Env, "HOME="+t.TempDir())
	r.start()
	r.beats(treeNames...)
	c := r.entry("started").Pid
	group, err := syscall.Getpgid(c)
	if err != nil {
		t.Fatal(err)
	}
	kill := r.due().KillAt
	syscall.Kill(-group, syscall.SIGTSTP)
	eventually(t, "word of the shell", func() bool { return r.read("job") != "" })
	if got := r.read("job"); got != "148\n" {
		t.Errorf("the shell saw %q, want 148", got)
	}
	eventually(t, "end of the tree", func() bool {
		for _, n := range treeNames {
			if r.last(n) > kill {
				return true
			}
		}
		return signals.Now() > kill+int64(300*time.Millisecond)
	})
	for _, n := range treeNames {
		if late := time.Duration(r.last(n) - kill); late > slack+r.room() {
			t.Errorf("%s beat %v after the kill was due", n, late)
		}
	}
	r.wait()
	syscall.Kill(-group, syscall.SIGKILL)
	eventually(t, "end of all", func() bool { return len(r.survivors()) == 0 })
}

func TestStopRestoresWhatWas(t *testing.T) {
	before, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, stop := signals.Listen()
	stop()
	after, _ := os.ReadFile("/proc/self/status")
	line := func(b []byte) string {
		for l := range strings.SplitSeq(string(b), "\n") {
			if strings.HasPrefix(l, "SigCgt") {
				return l
			}
		}
		return ""
	}
	if line(before) != line(after) {
		t.Errorf("caught signals %q, want %q as before", line(after), line(before))
	}
}
