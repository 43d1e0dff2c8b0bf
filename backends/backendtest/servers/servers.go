//go:build linux

// Package servers gives tests real servers that they may freeze, kill and start again.
//
// # Promise
//
// A server runs on loopback, on ports of its own and in a directory of the test, and the test talks to the process that it
// started and to no other: [Start] returns only when that process itself owns its ports. Nothing survives: a server is
// killed when its test ends and, by the kernel, when the test's process dies in whatever way.
//
// # How
//
// A kind of server is a file of this package: it says which programs it needs ([Programs]), writes a configuration, and
// hands a [Command] to [Start]. What is missing is said; the test is then skipped, or fails where UNDERLEASE_TEST_REQUIRE
// names the need or is "all", so that a green run cannot mean that nothing ran.
//
// # Limits
//
// Linux alone: who owns a port is read from /proc.
package servers

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/internal/needed"
)

// patience is how long a server may take to be ready or to end, on a machine that is busy with other things.
const patience = time.Minute

// pace is the time between two looks at something that has to happen.
const pace = 5 * time.Millisecond

// Require is [needed.Require], for those that have it from here.
func Require(t testing.TB, need string, missing error) {
	t.Helper()
	needed.Require(t, need, missing)
}

// Programs finds the programs of a need, or ends the test as [Require] says. Each is looked for in PATH and then in the
// directories of where. Install says how to get what is missing.
func Programs(t testing.TB, need, install string, where []string, names ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	var missing []string
	for _, name := range names {
		if path := find(name, where); path != "" {
			found[name] = path
		} else {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		Require(t, need, fmt.Errorf("no program %s: %s", strings.Join(missing, ", "), install))
	}
	return found
}

func find(name string, where []string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, dir := range where {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	return ""
}

// Command is how a server is started.
type Command struct {
	Name string // of the server, for messages
	Path string
	Args []string // without the program's name
	Env  []string // added to PATH, HOME and the C locale
	Dir  string   // its working directory

	// User is whom the server runs as; nil is the user of the test.
	User *syscall.Credential
	// Ports are those on loopback that the process or a descendant of it has to own before it counts as ready.
	Ports []int
	// Sockets are paths that have to be there.
	Sockets []string
	// Ready returns nil when the server answers. It is called again and again.
	Ready func(context.Context) error
	// Log is the file that takes its output, and that failures quote. Empty is one in Dir.
	Log string
}

// Process is a server under control of a test. Its methods end the test on failure.
type Process struct {
	t       testing.TB
	command Command

	mu    sync.Mutex
	cmd   *exec.Cmd
	asked *exec.Cmd     // to end
	ended chan struct{} // closed when the process has been waited for
}

// Start starts a server and returns when it is ready. The server is killed at the end of the test.
func Start(t testing.TB, c Command) *Process {
	t.Helper()
	if c.Log == "" {
		c.Log = filepath.Join(c.Dir, c.Name+".log")
	}
	p := &Process{t: t, command: c}
	t.Cleanup(func() { p.end(syscall.SIGKILL) })
	p.Restart()
	return p
}

// Restart starts the server again, with the same command, ports and directory, after it was killed or stopped, and returns
// when it is ready.
func (p *Process) Restart() {
	p.t.Helper()
	if err := p.restart(); err != nil {
		p.t.Fatalf("start %s: %v\n%s", p.command.Name, err, p.tail())
	}
}

func (p *Process) restart() error {
	if err := p.launch(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		err := p.ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done():
			return fmt.Errorf("it ended (%v) before it was ready: %w", p.state(), err)
		case <-ctx.Done():
			return fmt.Errorf("not ready after %v: %w", patience, err)
		case <-time.After(pace):
		}
	}
}

// Launch starts the server again without waiting until it is ready.
func (p *Process) Launch() {
	p.t.Helper()
	if err := p.launch(); err != nil {
		p.t.Fatalf("start %s: %v", p.command.Name, err)
	}
}

func (p *Process) launch() error {
	c := p.command
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, log, log
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.Dir, "LC_ALL=C"}, c.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true, Credential: c.User}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		select {
		case <-p.ended:
		default:
			return fmt.Errorf("pid %d still runs", p.cmd.Process.Pid)
		}
	}
	if err := onStarter(cmd.Start); err != nil {
		return err
	}
	ended := make(chan struct{})
	p.cmd, p.ended = cmd, ended
	go func() {
		_ = cmd.Wait() // how it ended is in its state
		close(ended)
	}()
	return nil
}

// starts takes what the starter has to do.
var starts = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		// The death signal follows the thread that forked, not the process: this one never ends.
		// Source: prctl(2), PR_SET_PDEATHSIG.
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

func onStarter(f func() error) error {
	done := make(chan error)
	starts() <- func() { done <- f() }
	return <-done
}

func (p *Process) ready(ctx context.Context) error {
	tree := append(descendants(p.Pid()), p.Pid())
	for _, port := range p.command.Ports {
		if err := owns(tree, port); err != nil {
			return err
		}
	}
	for _, path := range p.command.Sockets {
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	if p.command.Ready == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return p.command.Ready(ctx)
}

// Pid returns the number of the process that was started last.
func (p *Process) Pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

func (p *Process) done() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func (p *Process) state() *os.ProcessState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.ProcessState
}

// Freeze stops the server (SIGSTOP): its connections stay, and nobody answers. It returns when every thread has stopped.
func (p *Process) Freeze() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	Within(p.t, patience, p.command.Name+" is stopped", func() error {
		if s := status(p.Pid()); s != 'T' {
			return fmt.Errorf("its state is %c", s)
		}
		return nil
	})
}

// Resume continues a server that was frozen.
func (p *Process) Resume() {
	p.t.Helper()
	p.signal(syscall.SIGCONT)
}

// Kill kills the server (SIGKILL) and returns when it is gone.
func (p *Process) Kill() {
	p.t.Helper()
	p.end(syscall.SIGKILL)
}

// Stop asks the server to end (SIGTERM) and returns when it is gone.
func (p *Process) Stop() {
	p.t.Helper()
	p.end(syscall.SIGTERM)
}

func (p *Process) signal(sig syscall.Signal) {
	p.t.Helper()
	select {
	case <-p.done():
		p.t.Fatalf("%s has ended (%v)\n%s", p.command.Name, p.state(), p.tail())
	default:
	}
	// Not yet waited for, or by a process handle that knows: another cannot have got its number.
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatalf("%v to %s: %v", sig, p.command.Name, err)
	}
}

func (p *Process) end(sig syscall.Signal) {
	p.mu.Lock()
	cmd, ended, asked := p.cmd, p.ended, p.asked
	p.asked = cmd
	p.mu.Unlock()
	if cmd == nil {
		return
	}
	select {
	case <-ended:
		if asked != cmd {
			p.t.Logf("%s had ended by itself (%v)\n%s", p.command.Name, p.state(), p.tail())
		}
	default:
	}
	_ = cmd.Process.Signal(sig) // it may have ended by itself
	_ = cmd.Process.Signal(syscall.SIGCONT)
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
		_ = cmd.Process.Kill()
		p.t.Errorf("%s, pid %d, has not ended %v after %v", p.command.Name, cmd.Process.Pid, patience, sig)
	}
}

// Log returns what the server has written.
func (p *Process) Log() string {
	b, _ := os.ReadFile(p.command.Log) // a server that was never started has none
	return string(b)
}

func (p *Process) tail() string {
	lines := strings.Split(strings.TrimSpace(p.Log()), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// Within waits until f returns nil, and ends the test when that takes longer than limit.
func Within(t testing.TB, limit time.Duration, what string, f func() error) {
	t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(pace) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
	}
}

// The ports lie below those that the kernel gives to outgoing connections, which could otherwise take one in the meantime.
// Source: Linux, ip_local_port_range: 32768 to 60999.
const (
	firstPort = 11000
	lastPort  = 21000
)

// FreePort returns a port on loopback that nobody listens on, so that port + also is free too. Zero asks for the port alone. It is the
// test's until its end, also while no server is there yet, or none any more.
func FreePort(t testing.TB, also int) int {
	t.Helper()
	for range 1000 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		mark, err := reserve(port)
		if err != nil {
			continue // somebody else has it, perhaps in another process
		}
		if bindable(port) && (also == 0 || bindable(port+also)) {
			t.Cleanup(func() { _ = mark.Close() })
			return port
		}
		_ = mark.Close()
	}
	t.Fatal("no port is free")
	return 0
}

// reserve keeps a port for one who has not bound it yet. The mark is in the network namespace, where the port is, and goes with its process.
func reserve(port int) (net.Listener, error) {
	return net.Listen("unix", fmt.Sprintf("@underlease-test-port-%d", port))
}

func bindable(port int) bool {
	l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

// owns returns nil if one of the processes listens on a port, and nobody else does.
func owns(pids []int, port int) error {
	var listening []string // inodes of sockets
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, err := os.ReadFile(table)
		if err != nil {
			continue // without IPv6
		}
		// Source: proc(5), /proc/net/tcp: local_address is the 2nd word, st the 4th (0A: LISTEN), inode the 10th.
		for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
			f := strings.Fields(lines.Text())
			if len(f) > 9 && f[3] == "0A" && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				listening = append(listening, "socket:["+f[9]+"]")
			}
		}
	}
	if len(listening) == 0 {
		return fmt.Errorf("nobody listens on port %d", port)
	}
	for _, pid := range pids {
		links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		for _, link := range links {
			if target, err := os.Readlink(link); err == nil {
				listening = slices.DeleteFunc(listening, func(s string) bool { return s == target })
			}
		}
	}
	if len(listening) > 0 {
		return fmt.Errorf("port %d belongs to another process", port)
	}
	return nil
}

// status returns the letter of a process's state, or 0.
//
// Source: proc_pid_stat(5): the state follows the name in parentheses, which may hold anything.
func status(pid int) byte {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if i := bytes.LastIndexByte(b, ')'); err == nil && i >= 0 && i+2 < len(b) {
		return b[i+2]
	}
	return 0
}

func descendants(pid int) (all []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range tasks {
		b, _ := os.ReadFile(path)
		for f := range bytes.FieldsSeq(b) {
			if n, err := strconv.Atoi(string(f)); err == nil {
				all = append(append(all, n), descendants(n)...)
			}
		}
	}
	return all
}
