//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/internal/needed"
	"github.com/underlease/underlease/signals"
)

// The keys of a terminal that send signals.
const (
	ctrlC         = "\x03" // INT
	ctrlZ         = "\x1a" // TSTP
	ctrlBackslash = "\x1c" // QUIT
	ctrlD         = "\x04" // the end of the input
)

// prompt is what the shells print when they want a command: it ends with the status of the one before.
var prompt = regexp.MustCompile(`status (\d+)> `)

// shell is an interactive bash with job control, on a terminal of its own, as a person in front of it has it.
//
// Nothing here waits for time to pass: a key is pressed when what it is meant for has been seen, on the screen or in /proc.
type shell struct {
	t    *testing.T
	dir  string // its home, and $D
	with bool   // $R is underlease, else nothing
	ours string // what underlease and its guardians execute
	cmd  *exec.Cmd
	over chan struct{} // closed when bash has ended

	keys  *os.File // our side of the terminal
	mu    sync.Mutex
	text  []byte // all that was seen
	at    int    // up to where it was waited for
	line  int    // where the last line was entered
	more  chan struct{}
	ended chan struct{} // closed when nothing more can be seen
}

// startShell starts bash. In it $R stands for what a command is run with: nothing, or underlease with the given flags.
func startShell(t *testing.T, with bool, flags ...string) *shell {
	t.Helper()
	needed.Require(t, "bash", program("bash")())
	s := &shell{
		t: t, dir: t.TempDir(), with: with,
		over: make(chan struct{}), more: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	underlease, err := exec.LookPath("underlease")
	if err != nil {
		t.Fatal(err)
	}
	if s.ours, err = filepath.EvalSymlinks(underlease); err != nil {
		t.Fatal(err)
	}
	var slave *os.File
	s.keys, slave = newTerminal(t)
	t.Cleanup(func() { s.keys.Close() })
	s.resize(50, 400)
	s.cmd = exec.CommandContext(context.WithoutCancel(t.Context()), "bash", "--norc", "--noprofile", "-i")
	s.cmd.Env = append(nothingOfOurs(),
		"HOME="+s.dir, "D="+s.dir, "TERM=dumb", "INPUTRC=/dev/null", "LC_ALL=C", "PS1=status $?> ", "LESS=", "PAGER=",
		"UNDERLEASE_BACKEND=file://"+s.dir+"/state", "GORACE=atexit_sleep_ms=0")
	if with {
		s.cmd.Env = append(s.cmd.Env, "R="+strings.Join(append(append([]string{"underlease", "run"}, flags...), "x", "--"), " "), "R2=underlease run y --")
	}
	s.cmd.Dir = s.dir
	s.cmd.Stdin, s.cmd.Stdout, s.cmd.Stderr = slave, slave, slave
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close()
	go s.watch()
	go func() {
		defer close(s.over)
		_ = s.cmd.Wait() // its status is what the scenario asks for, if it does
	}()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("on the screen:\n%s", s.screen())
		}
		s.clear()
	})
	s.prompt(0)
	s.run("ulimit -c 0", 0)
	return s
}

// newTerminal makes a pair of pseudo-terminals.
func newTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		needed.Require(t, "terminal", err)
	}
	control(t, master, func(fd int) error { return unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0) })
	control(t, master, func(fd int) error {
		n, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		if e != 0 {
			return e
		}
		slave = os.NewFile(n, "terminal")
		return nil
	})
	return master, slave
}

func control(t *testing.T, f *os.File, do func(fd int) error) {
	t.Helper()
	raw, err := f.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil || failed != nil {
		t.Fatalf("terminal: %v, %v", err, failed)
	}
}

func (s *shell) watch() {
	defer close(s.ended)
	var b [4096]byte
	for {
		n, err := s.keys.Read(b[:])
		s.mu.Lock()
		s.text = append(s.text, b[:n]...)
		s.mu.Unlock()
		select {
		case s.more <- struct{}{}:
		default:
		}
		if err != nil { // EIO once nobody has the other side open
			return
		}
	}
}

func (s *shell) screen() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.text)
}

// find waits until a match is seen behind the last one, and returns it with its groups.
func (s *shell) find(re *regexp.Regexp) []string {
	s.t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for {
		s.mu.Lock()
		if m := re.FindSubmatchIndex(s.text[s.at:]); m != nil {
			var groups []string
			for i := 0; i < len(m); i += 2 {
				groups = append(groups, string(s.text[s.at+m[i]:s.at+m[i+1]]))
			}
			s.at += m[1]
			s.mu.Unlock()
			return groups
		}
		s.mu.Unlock()
		select {
		case <-s.more:
		case <-limit.C:
			s.t.Fatalf("no %v on the screen after %v", re, patience)
		}
	}
}

// sees waits for a text that a command prints, at the end of a line. The echo of a key may come just before that end: the kernel writes
// the two in two steps.
func (s *shell) sees(text string) {
	s.t.Helper()
	s.find(regexp.MustCompile(regexp.QuoteMeta(text) + `(?:` + echoes.String() + `)?\r\n`))
}

// twice waits for a line as it was typed, and as a command has copied it.
func (s *shell) twice(text string) {
	s.t.Helper()
	s.sees(text)
	s.sees(text)
}

// prompt waits for the next prompt, which has to show this status.
func (s *shell) prompt(status int) {
	s.t.Helper()
	if got := s.find(prompt)[1]; got != strconv.Itoa(status) {
		s.t.Errorf("the shell shows the status %s, want %d", got, status)
	}
}

func (s *shell) types(text string) {
	s.t.Helper()
	if _, err := s.keys.WriteString(text); err != nil {
		s.t.Fatal(err)
	}
}

// enters types a line.
func (s *shell) enters(line string) {
	s.t.Helper()
	s.mu.Lock()
	s.line = s.at
	s.mu.Unlock()
	s.types(line + "\r")
}

// told waits until bash has said something about a job since the last line was entered. It says so when it shows a prompt.
func (s *shell) told(what string) {
	s.t.Helper()
	from := s.line
	s.until("told "+what, func() bool {
		s.mu.Lock()
		found := bytes.Contains(s.text[from:s.at], []byte(what))
		s.mu.Unlock()
		if !found {
			s.types("\r")
			s.find(prompt)
		}
		return found
	})
}

// run types a line and waits until it is done.
func (s *shell) run(line string, status int) {
	s.t.Helper()
	s.enters(line)
	s.prompt(status)
}

// background types a line that ends with &, and returns the pid of its job.
func (s *shell) background(line string) int {
	s.t.Helper()
	s.enters(line)
	pid, err := strconv.Atoi(s.find(regexp.MustCompile(`\[\d+\] (\d+)\r\n`))[1])
	if err != nil {
		s.t.Fatal(err)
	}
	return pid
}

// foreground returns the process group that has the terminal: the pid of the process that bash has started.
func (s *shell) foreground() (group int) {
	s.t.Helper()
	control(s.t, s.keys, func(fd int) (err error) {
		group, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return err
	})
	return group
}

// modes returns the settings of the terminal.
func (s *shell) modes() (m unix.Termios) {
	s.t.Helper()
	control(s.t, s.keys, func(fd int) error {
		got, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			m = *got
		}
		return err
	})
	return m
}

func (s *shell) resize(rows, columns uint16) {
	s.t.Helper()
	control(s.t, s.keys, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
	})
}

func (s *shell) signal(pid int, sig syscall.Signal) {
	s.t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		s.t.Fatalf("signal %d to %d: %v", sig, pid, err)
	}
}

func (s *shell) until(what string, f func() bool) {
	s.t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("not %s after %v", what, patience)
		}
	}
}

// gone waits until a process has been collected by its parent.
func (s *shell) gone(pid int) {
	s.t.Helper()
	s.until(fmt.Sprintf("gone: %d", pid), func() bool { return syscall.Kill(pid, 0) != nil })
}

// stopped waits until a process is stopped.
func (s *shell) stopped(pid int) {
	s.t.Helper()
	s.until(fmt.Sprintf("stopped: %d", pid), func() bool { return strings.HasPrefix(statusOf(pid, "State"), "T") })
}

// has waits for the contents of a file below $D.
func (s *shell) has(name, want string) {
	s.t.Helper()
	s.until(fmt.Sprintf("%q in %s", want, name), func() bool {
		b, err := os.ReadFile(filepath.Join(s.dir, name))
		return err == nil && string(b) == want
	})
}

// number waits for a pid that a command wrote into a file below $D.
func (s *shell) number(name string) (n int) {
	s.t.Helper()
	s.until("a pid in "+name, func() bool {
		b, err := os.ReadFile(filepath.Join(s.dir, name))
		if err != nil || !bytes.HasSuffix(b, []byte("\n")) {
			return false
		}
		n, err = strconv.Atoi(string(bytes.TrimSpace(b)))
		return err == nil
	})
	return n
}

// fg continues a stopped job in the foreground, and waits until keys reach it: bash says so before it is done.
func (s *shell) fg(job int, words string) {
	s.t.Helper()
	s.enters("fg")
	s.sees(words)
	s.until("in the foreground", func() bool {
		return s.foreground() == job && !strings.HasPrefix(statusOf(job, "State"), "T")
	})
}

// leaves ends the shell as a person does.
func (s *shell) leaves() {
	s.t.Helper()
	s.enters("exit")
	s.ends()
}

// ends waits until bash has ended.
func (s *shell) ends() {
	s.t.Helper()
	select {
	case <-s.over:
	case <-time.After(patience):
		s.t.Fatalf("bash has not ended after %v", patience)
	}
}

// nothing waits until no process of this shell is left, and no guardian.
func (s *shell) nothing() {
	s.t.Helper()
	s.until("empty", func() bool { return len(s.left()) == 0 })
}

// left are the living processes that have $D in their environment, and the guardians.
func (s *shell) left() (all []int) {
	mark := []byte("\x00D=" + s.dir + "\x00")
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || !running(pid) {
			continue
		}
		env, _ := os.ReadFile(dir + "/environ")
		name, _ := os.ReadFile(dir + "/comm")
		exe, _ := os.Readlink(dir + "/exe")
		if bytes.Contains(env, mark) || string(name) == "ul-guard\n" && exe == s.ours {
			all = append(all, pid)
		}
	}
	return all
}

// clear ends what a scenario that failed has left. Guardians end by themselves.
func (s *shell) clear() {
	mark := []byte("\x00D=" + s.dir + "\x00")
	for _, pid := range s.left() {
		if env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); bytes.Contains(env, mark) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	<-s.over
}

// free fails the test unless the lease can be had at once.
func (s *shell) free() {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), "underlease", "run", "x", "--", "true")
	cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+s.dir+"/state")
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Errorf("got %v and %q, want the lease free", err, out)
	}
}

// idle waits until the lease can be had again: where the wrapper was killed, it is its guardian that ends the run, and the shell does not
// wait for that.
func (s *shell) idle() {
	s.t.Helper()
	if !s.with {
		return
	}
	s.until("free", func() bool {
		cmd := exec.CommandContext(s.t.Context(), "underlease", "status", "-q", "x")
		cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+s.dir+"/state")
		return cmd.Run() == nil
	})
}

// statusOf returns a line of /proc/PID/status.
func statusOf(pid int, name string) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if n, value, _ := strings.Cut(line, ":"); n == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// What differs on every screen: the pid of a background job; and how often Enter was pressed until bash knew what had become of it.
var (
	jobPid      = regexp.MustCompile(`(?m)^(\[\d+\]) \d+`)
	nothings    = regexp.MustCompile(`(?m)^status \d+> \r\n`)
	interrupted = regexp.MustCompile(`\^C[\r\n]+`) // bash adds a line, or not, by which process of a pipeline it saw end last
	// The kernel sends a key's signal before it echoes the key (isig() in n_tty_receive_signal_char), so that what the command says to the
	// signal may stand on either side of the echo, or around it.
	echoes = regexp.MustCompile(`\^[CZ\\]`)
)

// killed is what nobody says without us: the guardian does, whose wrapper was killed with the command.
const killed = "underlease: the wrapper was killed: stopping the command and everything it started\r\n"

// asWithoutUs plays a scenario on two terminals, in whose shells commands run without us and with us, and compares all that was to be seen.
func asWithoutUs(t *testing.T, scenario func(s *shell)) {
	t.Helper()
	var screens []string
	for _, with := range []bool{false, true} {
		ok := t.Run(map[bool]string{false: "without us", true: "with us"}[with], func(t *testing.T) {
			s := startShell(t, with)
			scenario(s)
			select {
			case <-s.over:
			default:
				s.leaves()
			}
			s.nothing()
			<-s.ended // so that nothing more can come
			if with {
				s.free()
			}
			screen := strings.ReplaceAll(s.screen(), killed, "")
			screen = interrupted.ReplaceAllString(screen, "^C\r\n")
			screen = nothings.ReplaceAllString(jobPid.ReplaceAllString(screen, "$1 PID"), "")
			keys := echoes.FindAllString(screen, -1)
			screens = append(screens, echoes.ReplaceAllString(screen, "")+"keys pressed: "+strings.Join(keys, " "))
		})
		if !ok {
			return
		}
	}
	if screens[0] != screens[1] {
		t.Errorf("got on the screen\n%s\nwant, as without us,\n%s", screens[1], screens[0])
	}
}

// heard says which signals it gets, and ends with 3 when it gets ALRM. Its USR1 shows that all that was sent before has arrived: signals are
// passed on in their order.
func heard() {
	got := make(chan os.Signal, 64)
	signal.Notify(got, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH, unix.SIGALRM)
	fmt.Println("ready")
	for s := range got {
		if s == unix.SIGALRM {
			os.Exit(3)
		}
		fmt.Println("got", signals.Name(s.(syscall.Signal)))
	}
}

// settles waits until a listening command has got all that was sent to it.
func (s *shell) settles(job int) {
	s.t.Helper()
	s.signal(job, syscall.SIGUSR1)
	s.sees("got USR1")
}

// Q23
func TestTerminalInterruptEndsTheCommandAndTheLoopAroundIt(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`for i in 1 2 3; do $R sh -c 'echo ready; exec sleep 60'; done; echo over`)
		s.sees("ready")
		s.types(ctrlC)
		s.prompt(130)
		s.enters(`for i in 1 2 3; do $R sh -c 'echo ready; exec sleep 60'; done; echo over`)
		s.sees("ready")
		s.types(ctrlBackslash) // bash goes on after that
		s.sees("ready")
		s.types(ctrlBackslash)
		s.sees("ready")
		s.types(ctrlBackslash)
		s.sees("over")
		s.prompt(0)
		s.enters(`$R sh -c 'echo ready; exec sleep 60'`)
		s.sees("ready")
		s.types(ctrlBackslash)
		s.prompt(131)
	})
}

// Q24
func TestTerminalEachSignalArrivesOnceWhereverItComesFrom(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`$R heard`)
		s.sees("ready")
		job := s.foreground()
		for range 3 {
			s.types(ctrlC)
			s.sees("got INT")
			s.settles(job)
			s.types(ctrlBackslash)
			s.sees("got QUIT")
			s.settles(job)
		}
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
			s.signal(job, sig)
			s.sees("got " + signals.Name(sig))
			s.settles(job)
			s.signal(-job, sig)
			s.sees("got " + signals.Name(sig))
			s.settles(job)
		}
		s.signal(job, syscall.SIGALRM)
		s.prompt(3)
		// In the background, from the shell.
		job = s.background(`$R heard > got &`)
		s.prompt(0)
		got := "ready\n"
		s.has("got", got)
		for _, sig := range []string{"INT", "TERM"} {
			s.run("kill -"+sig+" %1", 0)
			s.has("got", got+"got "+sig+"\n")
			s.signal(job, syscall.SIGUSR1)
			got += "got " + sig + "\ngot USR1\n"
			s.has("got", got)
		}
		s.run("kill -KILL %1", 0)
		s.told("Killed")
	})
}

func TestTerminalStatusIsWhatTheShellWouldSay(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		for _, status := range []int{0, 1, 7, 125, 126, 127, 128, 130, 255} {
			s.run(fmt.Sprintf(`$R sh -c 'exit %d'`, status), status)
		}
		for _, sig := range []syscall.Signal{
			syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGABRT, syscall.SIGKILL, syscall.SIGUSR1, syscall.SIGSEGV, syscall.SIGPIPE,
			syscall.SIGALRM, syscall.SIGTERM, syscall.SIGXCPU, syscall.SIGVTALRM, syscall.SIGIO, syscall.SIGSYS,
		} {
			s.run(fmt.Sprintf(`$R sh -c 'kill -%d $$'`, sig), 128+int(sig))
		}
		for _, c := range []struct {
			kill, word string
			status     int
		}{{"kill %1", "Terminated", 143}, {"kill -9 %1", "Killed", 137}, {"kill -HUP %1", "Hangup", 129}} {
			s.background(`$R sh -c 'echo > ready; exec sleep 60' &`)
			s.prompt(0)
			s.has("ready", "\n")
			s.run(c.kill, 0)
			s.told(c.word)
			s.idle()
			s.run("rm ready", 0)
			s.background(`$R sh -c 'echo > ready; exec sleep 60' &`)
			s.prompt(0)
			s.has("ready", "\n")
			s.run(c.kill+"; wait %1", c.status)
			s.told(c.word)
			s.idle()
			s.run("rm ready", 0)
		}
	})
}

// C27
func TestTerminalCommandsReadAndWriteIt(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`$R sh -c 'echo ready; read x; echo got $x; exit 4'`)
		s.sees("ready")
		s.enters("hello")
		s.sees("got hello")
		s.prompt(4)
		s.enters(`$R sh -c 'echo ready; exec cat'`)
		s.sees("ready")
		s.types("one\r")
		s.twice("one")
		s.types(ctrlD)
		s.prompt(0)
		s.run(`$R sh -c 'tty > t; echo $?; stty size; ps -o stat= -p $$ | tr -d "\n" | tail -c 1; [ -t 0 ] && [ -t 1 ] && [ -t 2 ]; echo $?'`, 0)
		s.run(`$R stty -echo; stty -a | grep -o " -*echo "; $R stty echo; stty -a | grep -o " -*echo "`, 0)
		// A script has no job control: command and script are one group.
		s.enters(`bash -c '$R sh -c "echo ready; read x; echo got \$x; exit 5"; echo $?'`)
		s.sees("ready")
		s.enters("to a script")
		s.sees("got to a script")
		s.prompt(0)
		s.enters(`bash -c '$R sh -c "echo ready; exec sleep 60"; echo over'`)
		s.sees("ready")
		s.types(ctrlC)
		s.prompt(130)
	})
}

// Q26
func TestTerminalStoppedJobsGoOnInTheForegroundAndInTheBackground(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`$R sh -c 'echo ready; read x; echo got $x; exit 4'`)
		s.sees("ready")
		job := s.foreground()
		s.types(ctrlZ)
		s.prompt(148)
		s.stopped(job)
		s.run("jobs", 0)
		s.enters("fg")
		s.sees("exit 4'") // the job, in the shell's words
		s.enters("hello")
		s.sees("got hello")
		s.prompt(4)
		// Twice, and then on in the background, where there is nothing to read.
		s.enters(`$R sh -c 'echo ready; read x; echo got $x; exit 6'`)
		s.sees("ready")
		job = s.foreground()
		s.types(ctrlZ)
		s.prompt(148)
		s.run("bg", 0)
		s.told("Stopped")
		s.stopped(job)
		s.fg(job, "exit 6'")
		s.types(ctrlZ)
		s.prompt(148)
		s.enters("fg")
		s.sees("exit 6'")
		s.enters("again")
		s.sees("got again")
		s.prompt(6)
		// In the background it runs to its end.
		s.run("mkfifo fifo", 0)
		s.enters(`$R sh -c 'echo ready; read x < fifo; echo $x > got; exit 8'`)
		s.sees("ready")
		s.types(ctrlZ)
		s.prompt(148)
		s.run("bg", 0)
		s.run("jobs", 0)
		s.run("echo word > fifo", 0)
		s.has("got", "word\n")
		s.told("Exit 8")
		// It is interrupted when it goes on.
		s.enters(`$R sh -c 'echo ready; exec sleep 60'`)
		s.sees("ready")
		job = s.foreground()
		s.types(ctrlZ)
		s.prompt(148)
		s.fg(job, "exec sleep 60'")
		s.types(ctrlC)
		s.prompt(130)
	})
}

// Q26: editors stop their whole group themselves.
func TestTerminalCommandStopsItsGroup(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		for _, sig := range []string{"TSTP", "STOP"} {
			status := 148
			if sig == "STOP" {
				status = 147
			}
			s.enters(`$R sh -c 'echo ready; read x; kill -` + sig + ` 0; echo on; exit 4'`)
			s.sees("ready")
			s.enters("")
			s.prompt(status)
			s.enters("fg")
			s.sees("on")
			s.prompt(4)
		}
	})
}

// Q25
func TestTerminalBackgroundJobsStopWhenTheyUseIt(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		job := s.background(`$R sh -c 'read x; echo got $x; exit 4' &`)
		s.prompt(0)
		s.told("Stopped")
		s.stopped(job)
		s.enters("fg")
		s.sees("exit 4'")
		s.enters("hello")
		s.sees("got hello")
		s.prompt(4)
		s.run("stty tostop", 0)
		job = s.background(`$R sh -c 'echo out; exit 5' &`)
		s.prompt(0)
		s.told("Stopped")
		s.stopped(job)
		s.enters("fg")
		s.sees("out")
		s.prompt(5)
		s.run("stty -tostop", 0)
		// Without tostop it may write.
		s.run("mkfifo fifo", 0)
		s.background(`$R sh -c 'read x < fifo; echo out; exit 6' &`)
		s.prompt(0)
		s.run("echo > fifo; wait %1", 6)
	})
}

// Q28
func TestTerminalPipelinesAreOneJob(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`$R sh -c 'echo ready >&2; exec yes' | sleep 60`)
		s.sees("ready")
		s.types(ctrlC)
		s.prompt(130)
		s.run("echo ${PIPESTATUS[@]}", 0)
		s.enters(`sleep 60 | $R sh -c 'echo ready >&2; exec cat' | cat`)
		s.sees("ready")
		s.types(ctrlC)
		s.prompt(130)
		s.run(`$R yes | head -n 1; echo ${PIPESTATUS[@]}`, 0)
		s.run(`yes | $R head -n 2 | cat; echo ${PIPESTATUS[@]}`, 0)
		s.run(`seq 3 | $R sort -r | ${R/ x / y } cat; echo ${PIPESTATUS[@]}`, 0)
		s.enters(`echo data | $R sh -c 'cat; read x < /dev/tty; echo got $x' | cat`)
		s.sees("data")
		s.enters("keys")
		s.sees("got keys")
		s.prompt(0)
		s.enters(`cat | $R sh -c 'echo ready; exec cat' | cat`)
		s.sees("ready")
		s.types("one\r")
		s.twice("one")
		s.types(ctrlZ)
		s.prompt(148)
		s.enters("fg")
		s.sees("exec cat' | cat")
		s.types("two\r")
		s.twice("two")
		s.types(ctrlD)
		s.prompt(0)
	})
}

// Q28
func TestTerminalShellsInsideHaveJobControl(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.run(`$R bash --norc --noprofile -i`, 0)
		s.enters(`sh -c 'echo ready; exec sleep 60'`)
		s.sees("ready")
		s.types(ctrlC)
		s.prompt(130)
		s.enters(`sh -c 'echo ready; read x; echo got $x; exit 4'`)
		s.sees("ready")
		s.types(ctrlZ)
		s.prompt(148)
		s.run("jobs", 0)
		s.enters("fg")
		s.sees("exit 4'")
		s.enters("hello")
		s.sees("got hello")
		s.prompt(4)
		s.enters("suspend")
		s.prompt(147)
		s.run("jobs", 0)
		s.enters("fg")
		s.prompt(0)
		s.run("exit 6", 6)
		s.enters(`$R sh -c 'echo ready; exec $R2 sh -c "read x; echo got \$x; exit 7"'`)
		s.sees("ready")
		s.enters("hello")
		s.sees("got hello")
		s.prompt(7)
	})
}

// Q27
func TestTerminalThatIsHungUpEndsWhatRunsOnIt(t *testing.T) {
	// No wait of the shell's: bash can miss a signal that comes just before it begins one. And what it has forked is not hung up before it
	// is a program of its own: until then it has the shell's handler.
	for _, c := range []struct{ name, command string }{
		{"in the foreground", `$R bash -c 'trap "echo hup >> hup; exit" HUP; sleep 60 & until [ "$(< /proc/$!/comm)" = sleep ]; do :; done; echo $$ > pid; while :; do sleep 0.02; done'`},
		{"in the background", `$R bash -c 'trap "echo hup >> hup; exit" HUP; sleep 60 & until [ "$(< /proc/$!/comm)" = sleep ]; do :; done; echo $$ > pid; while :; do sleep 0.02; done' &`},
		{"without a handler", `$R sh -c 'echo $$ > pid; exec sleep 60'`},
		{"with a tree", `$R sh -c 'sleep 60 & setsid sh -c "echo \$\$ > session; exec sleep 60" & until [ -s session ]; do sleep 0.01; done; echo $$ > pid; exec sleep 60'`},
		{"stopped", `$R sh -c 'echo $$ > pid; kill -STOP 0; exec sleep 60'`},
		{"a shell", `$R bash --norc --noprofile -i -c 'echo $$ > pid; exec bash --norc --noprofile -i'`},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, with := range []bool{false, true} {
				t.Run(map[bool]string{false: "without us", true: "with us"}[with], func(t *testing.T) {
					s := startShell(t, with)
					s.enters(c.command)
					command := s.number("pid")
					if c.name == "stopped" {
						s.prompt(147)
						s.stopped(command)
					}
					s.keys.Close()
					s.ends()
					s.gone(command)
					if strings.Contains(c.command, "trap") {
						s.until("told of the hang-up", func() bool { return there(filepath.Join(s.dir, "hup")) })
					}
					if strings.Contains(c.command, "session") && !with {
						s.signal(s.number("session"), syscall.SIGKILL) // it runs on
					}
					s.nothing()
					if with {
						s.free()
					}
				})
			}
		})
	}
}

// Q27: and what has said that it does not want to know runs on.
func TestTerminalThatIsHungUpLeavesWhatIgnoresIt(t *testing.T) {
	for _, with := range []bool{false, true} {
		t.Run(map[bool]string{false: "without us", true: "with us"}[with], func(t *testing.T) {
			s := startShell(t, with)
			s.run("mkfifo fifo", 0)
			s.background(`nohup $R sh -c 'echo $$ > pid; read x <> fifo; echo $x > got' > out &`)
			command := s.number("pid")
			s.keys.Close()
			s.ends()
			if !running(command) {
				t.Error("got the command ended, want it alive")
			}
			if err := os.WriteFile(filepath.Join(s.dir, "fifo"), []byte("word\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			s.has("got", "word\n")
			s.nothing()
			if with {
				s.free()
			}
		})
	}
}

// Q27: a shell that ends leaves its jobs in the background alone, and ends those that are stopped.
func TestTerminalShellThatEndsLeavesItsJobs(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.run("mkfifo fifo", 0)
		s.background(`$R sh -c 'echo $$ > pid; read x < fifo; echo $x > got' &`)
		s.prompt(0)
		command := s.number("pid")
		s.enters(`${R/ x / y } sh -c 'echo ready; exec sleep 60'`)
		s.sees("ready")
		stopped := s.foreground()
		s.types(ctrlZ)
		s.prompt(148)
		s.enters("exit")
		s.sees("There are stopped jobs.")
		s.prompt(1)
		s.enters("exit")
		s.ends()
		s.gone(stopped)
		if !running(command) {
			s.t.Error("got the job in the background ended, want it alive")
		}
		if err := os.WriteFile(filepath.Join(s.dir, "fifo"), []byte("word\n"), 0o600); err != nil {
			s.t.Fatal(err)
		}
		s.has("got", "word\n")
	})
}

func TestTerminalThatChangesItsSizeTellsTheCommandOnce(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`$R heard`)
		s.sees("ready")
		for i := range uint16(3) {
			s.resize(51+i, 400)
			s.sees("got WINCH")
			s.settles(s.foreground())
		}
		s.signal(s.foreground(), syscall.SIGALRM)
		s.prompt(3)
		s.enters(`$R sh -c 'echo ready; read x; stty size'`)
		s.sees("ready")
		s.resize(60, 401)
		s.enters("")
		s.sees("60 401")
		s.prompt(0)
	})
}

// Q29
func TestTerminalHasItsModesBackAfterAKillOfOurs(t *testing.T) {
	for _, c := range []struct{ name, flags, command string }{
		{"killed", "--max-run 3s --grace 100ms", `sh -c 'stty raw -echo; trap "" TERM; echo > raw; while :; do sleep 60; done'`},
		{"stopped", "--max-run 3s", `sh -c 'stty raw -echo; echo > raw; exec sleep 60'`},
		{"a shell that reads a line", "--max-run 3s --grace 100ms", `bash --norc --noprofile -i`},
		{"the guardian is lost", "", `sh -c 'stty raw -echo; echo > raw; read _ _ _ parent _ < /proc/$$/stat; kill -9 $parent; exec sleep 60'`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := startShell(t, true)
			s.run("mkfifo fifo", 0)
			// A shell without job control, which restores nothing.
			s.enters(`sh -c 'echo begin; read _ < fifo; underlease run ` + c.flags + ` x -- "$@"; echo code $?; read _ < fifo' sh ` + c.command)
			s.sees("begin")
			before := s.modes()
			goOn := func() { write(t, filepath.Join(s.dir, "fifo"), "\n") }
			goOn()
			if strings.HasPrefix(c.command, "bash") {
				s.prompt(0)
			} else {
				s.until("raw", func() bool { return there(filepath.Join(s.dir, "raw")) })
			}
			s.find(regexp.MustCompile(`code (74|124)\r?\n`))
			if got := s.modes(); got != before {
				t.Errorf("got the modes %+v, want %+v as before", got, before)
			}
			goOn()
			s.prompt(0)
			s.leaves()
			s.nothing()
			s.free()
		})
	}
}

// Q29: what a command leaves when nobody has stopped it is what it wanted.
func TestTerminalKeepsTheModesOfACommandThatEndsByItself(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		for _, end := range []string{"exit 3", "kill -TERM $$", "kill -KILL $$"} {
			s.run(`sh -c '$R sh -c "stty -echo -icanon; `+strings.ReplaceAll(end, "$", "\\$")+`"; stty -a | grep -o " -*echo "; stty -a | grep -o " -*icanon "; stty sane'`, 0)
		}
	})
}

// Q29: a terminal that belongs to others by now is left to them.
func TestTerminalOfOthersKeepsItsModes(t *testing.T) {
	s := startShell(t, true, "--max-run", "6s", "--grace", "50ms")
	s.run("mkfifo fifo", 0)
	s.enters(`$R sh -c 'trap "" TERM; stty -echo; echo ready; read x <> fifo'`) // no vfork, whose parent cannot be stopped
	s.sees("ready")
	job := s.foreground()
	s.types(ctrlZ)
	s.prompt(148)
	s.stopped(job)
	// It is killed, and ends, while somebody else has the terminal.
	s.enters(fmt.Sprintf(`sh -c 'stty -echo -icanon; while kill -0 %d 2>&-; do sleep 0.01; done; stty -a | grep -o " -*echo "; stty -a | grep -o " -*icanon "; stty sane'`, job))
	s.sees(" -echo ")
	s.sees(" -icanon ")
	s.prompt(0)
	s.told("Exit 124")
	s.leaves()
	s.nothing()
	s.free()
}

// A command with a process group of its own, as an interactive shell has, is not reached by what its wrapper's group gets.
func TestTerminalSignalsReachACommandThatHasLeftTheGroup(t *testing.T) {
	s := startShell(t, true)
	job := s.background(`$R setsid heard > got &`)
	s.prompt(0)
	got := "ready\n"
	s.has("got", got)
	for _, sig := range []string{"INT", "TERM", "HUP"} {
		s.run("kill -"+sig+" %1", 0)
		got += "got " + sig + "\n"
		s.has("got", got)
		s.signal(job, syscall.SIGUSR1)
		got += "got USR1\n"
		s.has("got", got)
	}
	s.signal(job, syscall.SIGALRM)
	s.told("Exit 3")
	s.leaves()
	s.nothing()
	s.free()
}

// Q26: who does not heed ^Z is not stopped, and who has things to do before is waited for.
func TestTerminalShellSeesAStopWhenTheCommandHasStopped(t *testing.T) {
	asWithoutUs(t, func(s *shell) {
		s.enters(`$R sh -c 'trap "" TSTP; echo ready; read x; echo got $x; exit 4'`)
		s.sees("ready")
		s.types(ctrlZ)
		s.enters("hello")
		s.find(regexp.MustCompile(`got .*hello\r\n`))
		s.prompt(4)
		// As full-screen programs do: clean up, then stop alone.
		s.enters(`$R bash -c 'trap "sleep 0.2; echo clean; kill -STOP \$\$; echo again" TSTP; echo ready; read x; echo got $x; exit 5'`)
		s.sees("ready")
		s.types(ctrlZ)
		s.sees("clean")
		s.prompt(147)
		s.enters("fg")
		s.sees("again")
		s.enters("hello")
		s.sees("got hello")
		s.prompt(5)
	})
}

// Who stops the command alone and lets it go on stops the run alone, and lets it go on.
func TestTerminalCommandThatIsStoppedAloneGoesOnAlone(t *testing.T) {
	s := startShell(t, true)
	job := s.background(`$R sh -c 'echo $$ > pid; exec heard > got' &`)
	s.prompt(0)
	command := s.number("pid")
	s.has("got", "ready\n")
	for range 3 {
		s.signal(command, syscall.SIGSTOP)
		s.stopped(job)
		s.signal(command, syscall.SIGCONT)
		s.until("going on", func() bool { return strings.HasPrefix(statusOf(job, "State"), "S") })
		s.signal(command, syscall.SIGTSTP)
		s.stopped(job)
		s.signal(job, syscall.SIGCONT)
		s.until("going on", func() bool { return strings.HasPrefix(statusOf(command, "State"), "S") })
	}
	// Stopped, and killed.
	s.signal(command, syscall.SIGSTOP)
	s.stopped(job)
	s.signal(command, syscall.SIGKILL)
	s.told("Killed")
	s.leaves()
	s.nothing()
	s.free()
}

// Whoever collects the command, a wrapper that was stopped with it goes on at its end.
func TestTerminalCommandThatIsKilledWhileStoppedEndsTheRunInEveryIsolation(t *testing.T) {
	for _, i := range []signals.Isolation{signals.IsolateTree, signals.IsolateCgroup, signals.IsolatePidns} {
		t.Run(string(i), func(t *testing.T) {
			needed.Require(t, string(i), i.Possible())
			s := startShell(t, true, "--isolate", string(i))
			job := s.background(`$R sh -c 'exec sleep 61' &`)
			s.prompt(0)
			var command int
			s.until("the command", func() bool {
				command = below(job, "sleep")
				return command != 0
			})
			s.signal(command, syscall.SIGSTOP)
			s.stopped(job)
			s.signal(command, syscall.SIGKILL)
			s.told("Killed")
			s.leaves()
			s.nothing()
			s.free()
		})
	}
}

// below returns the descendant of a process that has this name, or 0.
func below(pid int, name string) int {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		b, _ := os.ReadFile(list)
		for f := range strings.FieldsSeq(string(b)) {
			child, _ := strconv.Atoi(f)
			if comm, _ := os.ReadFile("/proc/" + f + "/comm"); strings.TrimSpace(string(comm)) == name {
				return child
			}
			if found := below(child, name); found != 0 {
				return found
			}
		}
	}
	return 0
}

// C27: what happens to the lease while the job is stopped, with a ttl: as nobody renews it, the deadline comes, is kept by the guardian, and
// is told by the shell.
func TestTerminalJobThatIsStoppedForLongerThanTheTTLIsEnded(t *testing.T) {
	for _, c := range []struct {
		name, command string
		beats         []string
		heeds         bool // TERM
	}{
		{"a tree that ignores TERM", `$R tree -stubborn $D/beats`, []string{"beats-main", "beats-back", "beats-session", "beats-double"}, false},
		{"a command that heeds it", `$R beat -slow 10ms $D/beats`, []string{"beats"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			const ttl = 12 * time.Second // so that grace and margin have room for a machine that stands still for a moment
			s := startShell(t, true, "--ttl", ttl.String(), "--grace", "3s", "--margin", "3s", "--log-level", "error")
			s.enters(c.command)
			for _, name := range c.beats {
				s.until("beating: "+name, func() bool {
					info, err := os.Stat(filepath.Join(s.dir, name))
					return err == nil && info.Size() > 0
				})
			}
			job := s.foreground()
			stop := signals.Now() // the last renewal was sent before
			s.types(ctrlZ)
			s.prompt(148)
			s.stopped(job)
			// Nobody presses a key that could wake the job up.
			s.find(regexp.MustCompile(`underlease: lost: "x" .* the command was stopped`))
			s.told("Exit 74")
			for _, f := range c.beats {
				text, err := os.ReadFile(filepath.Join(s.dir, f))
				if err != nil {
					t.Fatal(err)
				}
				words := strings.Fields(string(text)) // of each stamp: what, instant, pid, term
				last, err := strconv.ParseInt(words[len(words)-3], 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				after := time.Duration(last - stop)
				t.Logf("%s: the last beat was %v after ^Z", f, after)
				if after >= ttl {
					t.Errorf("%s: got a beat %v after ^Z, want none after the ttl", f, after)
				}
				if ended := words[len(words)-4] == "end"; ended != c.heeds {
					t.Errorf("%s ended by itself: got %v, want %v", f, ended, c.heeds)
				}
			}
			s.leaves()
			s.nothing()
			s.free()
		})
	}
}

// C27: and without a ttl, as file: has it, the lease is kept.
func TestTerminalJobThatIsStoppedKeepsALeaseWithoutATTL(t *testing.T) {
	s := startShell(t, true)
	s.enters(`$R sh -c 'echo ready; read x; exit 4'`)
	s.sees("ready")
	s.types(ctrlZ)
	s.prompt(148)
	s.run(`$R true`, 75)
	s.enters("fg")
	s.sees("exit 4'")
	s.run("", 4)
	s.run(`$R true`, 0)
	s.leaves()
	s.nothing()
	s.free()
}

// A run that waits for its lease has no command yet: keys are for itself.
func TestTerminalKeysReachARunThatWaits(t *testing.T) {
	s := startShell(t, true, "--wait", "forever")
	s.run("mkfifo fifo", 0)
	s.background(`$R sh -c 'echo > ready; read x < fifo' &`)
	s.prompt(0)
	s.has("ready", "\n")
	shell := s.foreground()
	waiting := func() {
		s.until("waiting", func() bool {
			job := s.foreground()
			caught, err := strconv.ParseUint(statusOf(job, "SigCgt"), 16, 64)
			return err == nil && job != shell && caught&(1<<(syscall.SIGTSTP-1)) != 0
		})
	}
	s.enters(`for i in 1 2 3; do $R true; done; echo over`)
	waiting()
	s.types(ctrlC)
	s.prompt(130)
	s.enters(`$R true`)
	waiting()
	s.types(ctrlBackslash)
	s.prompt(131)
	s.enters(`$R sh -c 'echo has it; exit 5'`)
	waiting()
	job := s.foreground()
	s.types(ctrlZ)
	s.prompt(148)
	s.fg(job, "exit 5'")
	s.types(ctrlZ)
	s.prompt(148)
	s.run("echo > fifo", 0)
	s.enters("fg")
	s.sees("has it")
	s.prompt(5)
	s.leaves()
	s.nothing()
	s.free()
}

// A command in a PID namespace is no child of the guardian, and job control follows it all the same.
func TestTerminalJobOfAPidNamespaceStopsAndGoesOn(t *testing.T) {
	needed.Require(t, "pidns", signals.IsolatePidns.Possible())
	s := startShell(t, true, "--isolate", "pidns")
	s.enters(`$R sh -c 'echo ready; read x; exit 4'`)
	s.sees("ready")
	s.types(ctrlZ)
	s.prompt(148)
	s.enters("fg")
	s.sees("exit 4'")
	s.run("", 4)
	s.leaves()
	s.nothing()
	s.free()
}
