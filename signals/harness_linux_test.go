package signals_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/internal/needed"
	"github.com/underlease/underlease/signals"
)

// The test binary is also the wrapper, and what runs under it. As it contains the guardian, the wrapper's guardian is a process of
// this binary too. Everything is judged from outside, by stamps of CLOCK_BOOTTIME which the processes leave in files.
func TestMain(m *testing.M) {
	switch os.Getenv("UL_TEST_MODE") {
	case "":
		os.Exit(m.Run())
	case "wrapper":
		wrapper()
	case "large":
		occupy(os.Args[2])
		fallthrough
	case "beat":
		beat(os.Args[1], len(os.Args) > 2)
	case "count":
		count(os.Args[1])
	case "hop":
		hop(os.Args[1])
	case "spin": // as beat, but without a pause
		spin(os.Args[1])
	case "eat":
		eat(os.Args[1])
	case "client":
		client(os.Args[1], len(os.Args) > 2)
	case "ask":
		uid, _ := strconv.Atoi(os.Getenv("UL_TEST_UID"))
		if err := syscall.Setuid(uid); err != nil {
			panic(err)
		}
		s, err := signals.Ask(os.Getenv("UL_TEST_SOCKET"))
		fmt.Println(int(s.Stage), err)
		os.Exit(0)
	case "root":
		if err := syscall.Setresuid(0, 0, 0); err != nil { // as sudo does
			panic(err)
		}
		beat(os.Args[1], true)
	}
	os.Exit(99)
}

// plan is what a wrapper does; durations count from the start of the command, negative ones are never.
type plan struct {
	Args                 []string
	StopIn, KillIn       time.Duration
	RunStopIn, RunKillIn time.Duration
	DrainKillIn          time.Duration
	Grace                time.Duration
	Leftovers            signals.Leftovers
	StopSignal           syscall.Signal
	Isolate              signals.Isolation
	Log                  string         // where it writes what happens
	Diligent             bool           // it orders the kill by itself when it is due, as a runner does
	Listens              bool           // it passes signals on
	KillOn               syscall.Signal // it orders the kill when it gets this signal
	Renew                time.Duration
	Threads              int    // it makes and ends as many threads
	Pin                  string // a file whose lock it hands over
	Breaks               bool   // it writes to broken pipes, a network connection's and descriptor 2
	OwnGroup             bool
	Wait                 time.Duration // between launch and start
	Socket               string        // where the guardian answers checks
	Told                 bool          // its instants count from when the test says so, see due; there are none before that
}

const never = time.Duration(-1)

func endless(args ...string) plan {
	return plan{
		Args: args, StopIn: never, KillIn: never, RunStopIn: never, RunKillIn: never, DrainKillIn: never,
		Grace: 300 * time.Millisecond, Leftovers: signals.LeftoversKill, StopSignal: syscall.SIGTERM,
	}
}

// entry is a line of a wrapper's log.
type entry struct {
	What string
	At   signals.Instant
	Pid  int
	Due  signals.Deadlines // as the wrapper set them when it was told
	Err  string
	Ev   signals.Event
}

const (
	rcSystem  = 71
	rcNoTime  = 69
	rcCannot  = 126
	rcMissing = 127
	rcIsolate = 78
)

// wrapper is a plain runner: no lease, only the tree.
func wrapper() {
	var p plan
	if err := json.Unmarshal([]byte(os.Getenv("UL_TEST_PLAN")), &p); err != nil {
		panic(err)
	}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	note := func(e entry) {
		e.At = signals.Now()
		b, _ := json.Marshal(e)
		log.Write(append(b, '\n'))
	}
	var got <-chan syscall.Signal
	if p.Listens {
		got, _ = signals.Listen()
	}
	note(entry{What: "begun"})
	g, err := signals.Launch(signals.Options{DropInherited: true, OwnGroup: p.OwnGroup})
	if err != nil {
		note(entry{What: "refused", Err: err.Error()})
		os.Exit(rcSystem)
	}
	if p.Pin != "" {
		f, err := os.OpenFile(p.Pin, os.O_CREATE|os.O_RDWR, 0o600)
		if err == nil {
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		}
		if err == nil {
			err = g.Pin([]int{int(f.Fd())})
		}
		if err != nil {
			note(entry{What: "refused", Err: err.Error()})
			os.Exit(75)
		}
		defer runtime.KeepAlive(f)
	}
	if p.Wait > 0 {
		<-time.After(p.Wait)
	}
	var env []string
	for _, kv := range os.Environ() {
		if kv != "UL_TEST_MODE=wrapper" && !strings.HasPrefix(kv, "UL_TEST_PLAN=") {
			env = append(env, kv)
		}
	}
	path, err := signals.Resolve(p.Args[0], env)
	if err != nil {
		note(entry{What: "refused", Err: err.Error()})
		g.Close()
		var r *signals.ResolveError
		if errors.As(err, &r) && r.NotFound() {
			os.Exit(rcMissing)
		}
		os.Exit(rcCannot)
	}
	from := func(begun signals.Instant) signals.Deadlines {
		in := func(d time.Duration) signals.Instant {
			if d < 0 {
				return signals.Never
			}
			return begun + signals.Instant(d)
		}
		return signals.Deadlines{
			StopAt: in(p.StopIn), KillAt: in(p.KillIn), RunStopAt: in(p.RunStopIn), RunKillAt: in(p.RunKillIn),
			DrainKillAt: in(p.DrainKillIn),
		}
	}
	d := eternity
	if !p.Told {
		d = from(signals.Now())
	}
	pid, err := g.Start(signals.Command{
		Path: path, Args: p.Args, Env: env, StopSignal: p.StopSignal, Grace: p.Grace,
		Leftovers: p.Leftovers, Isolate: p.Isolate, Socket: p.Socket, Term: "42",
	}, d)
	if err != nil {
		note(entry{What: "refused", Err: err.Error()})
		g.Close()
		var s *signals.StartError
		switch {
		case !errors.As(err, &s) || s.Fork:
			os.Exit(rcSystem)
		case s.Isolate != nil:
			os.Exit(rcIsolate)
		case s.TooLate:
			os.Exit(rcNoTime)
		case s.Errno == syscall.ENOENT:
			os.Exit(rcMissing)
		}
		os.Exit(rcCannot)
	}
	note(entry{What: "started", Pid: pid})
	for range p.Threads {
		go func() { runtime.LockOSThread() }() // the thread ends with it
	}
	if p.Breaks {
		read, write, _ := os.Pipe()
		read.Close()
		write.Write([]byte("x"))
		syscall.Dup3(int(write.Fd()), 2, 0)
		os.Stderr.Write([]byte("x"))
		note(entry{What: "broken"})
	}
	alarm, err := signals.NewAlarm()
	if err != nil {
		panic(err)
	}
	var renew <-chan time.Time
	begin := func() {
		if p.Renew > 0 {
			renew = time.Tick(p.Renew)
		}
		if p.Diligent {
			alarm.Set(d.KillAt)
		}
	}
	var told chan struct{}
	if p.Told {
		told = make(chan struct{})
		go func() {
			defer close(told)
			file := filepath.Join(os.Getenv("D"), "told")
			for _, err := os.Stat(file); err != nil; _, err = os.Stat(file) {
				<-time.After(time.Millisecond)
			}
		}()
	} else {
		begin()
	}
	var end signals.Status
	for {
		select {
		case sig := <-got:
			if sig == p.KillOn {
				g.Kill()
				continue
			}
			g.Forward(sig)
			note(entry{What: "forwarded", Pid: int(sig)})
		case <-told:
			told, d = nil, from(signals.Now())
			g.Publish(d)
			begin()
			note(entry{What: "due", Due: d})
		case <-renew:
			now := signals.Now()
			d.StopAt, d.KillAt = now+int64(p.StopIn), now+int64(p.KillIn)
			g.Publish(d)
		case <-alarm.C():
			if signals.Now() >= d.KillAt {
				g.Kill()
			}
		case ev, ok := <-g.Events():
			if !ok {
				if end.Signal != 0 {
					signals.DieBy(end.Signal)
				}
				os.Exit(end.Code)
			}
			if ev.Kind == signals.Exited {
				end = ev.Status
			}
			err := ""
			if ev.Err != nil {
				err = ev.Err.Error()
				ev.Err = nil
			}
			note(entry{What: "event", Ev: ev, Err: err})
		}
	}
}

// beat writes the time into a mapped file until it is killed: the last stamp is the last thing it did.
func beat(file string, stubborn bool) {
	if stubborn {
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		panic(err)
	}
	f.Truncate(16)
	m, err := syscall.Mmap(int(f.Fd()), 0, 16, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	f.Close()
	at := (*atomic.Int64)(unsafe.Pointer(&m[0]))
	(*atomic.Int64)(unsafe.Pointer(&m[8])).Store(int64(os.Getpid()))
	for {
		at.Store(signals.Now())
		ts := syscall.NsecToTimespec(200_000)
		syscall.Nanosleep(&ts, nil)
	}
}

// spin writes the time into a mapped file without a pause. The file is there already.
func spin(file string) {
	m := mapped(file)
	at := (*atomic.Int64)(unsafe.Pointer(&m[0]))
	for {
		at.Store(signals.Now())
	}
}

func mapped(file string) []byte {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	f.Truncate(16)
	m, err := syscall.Mmap(int(f.Fd()), 0, 16, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return m
}

// eat uses up memory once the file is there.
func eat(file string) {
	signal.Ignore(syscall.SIGTERM)
	for _, err := os.Stat(file); err != nil; _, err = os.Stat(file) {
		ts := syscall.NsecToTimespec(1_000_000)
		syscall.Nanosleep(&ts, nil)
	}
	var eaten [][]byte
	for {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		eaten = append(eaten, b)
		runtime.KeepAlive(eaten)
	}
}

// client has a server work for it, and calls that off on TERM if it heeds that.
func client(server string, stubborn bool) {
	conn, err := net.Dial("unix", server)
	if err != nil {
		panic(err)
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	conn.Write([]byte("work"))
	for <-c; stubborn; <-c {
	}
	conn.Write([]byte("stop"))
	conn.Read(make([]byte, 1)) // until it has stopped
	os.Exit(0)
}

// occupy fills so many bytes of memory.
func occupy(bytes string) {
	size, err := strconv.Atoi(bytes)
	if err == nil {
		_, err = syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_POPULATE)
	}
	if err != nil {
		panic(err)
	}
}

// count appends every signal that it gets to a file.
func count(file string) {
	c := make(chan os.Signal, 100)
	signal.Notify(c)
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(f, "ready")
	for s := range c {
		if s != syscall.SIGURG { // the runtime's own
			fmt.Fprintln(f, int(s.(syscall.Signal)))
		}
	}
}

// hop runs away: each process starts the next in a new session and ends.
func hop(file string) {
	signal.Ignore(syscall.SIGTERM)
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	var b [8]byte
	*(*int64)(unsafe.Pointer(&b)) = signals.Now()
	f.WriteAt(b[:], 0)
	attr := &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}}
	if _, err := syscall.ForkExec("/proc/self/exe", os.Args, attr); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// run is a wrapper as its parent sees it.
type run struct {
	t      *testing.T
	cmd    *exec.Cmd
	log    string
	dir    string
	marker string
	done   bool
	stall  *stalls
	many   bool // one of many, which are looked after together
}

// stalls measures how long a process that wanted to run every millisecond could not, on each processor: what no program on this machine can be
// faster than. One of them may be busier than the others, and nobody chooses on which a kill is carried out.
type stalls struct {
	worst atomic.Int64
	last  []*atomic.Int64 // when each processor ran its watch: what has not ended yet counts too
	end   chan struct{}
	over  atomic.Bool
}

func watchStalls(t *testing.T) *stalls {
	s := &stalls{end: make(chan struct{})}
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		t.Fatal(err)
	}
	for cpu := range 1024 {
		if may.IsSet(cpu) {
			last := new(atomic.Int64)
			s.last = append(s.last, last)
			go s.watch(cpu, last)
		}
	}
	t.Cleanup(s.stop)
	return s
}

// stop ends the watch. What was seen until then stays.
func (s *stalls) stop() {
	s.see(int64(s.most()))
	if s.over.CompareAndSwap(false, true) {
		close(s.end)
	}
}

// forget begins anew.
func (s *stalls) forget() { s.worst.Store(0) }

func (s *stalls) see(gap int64) {
	for worst := s.worst.Load(); gap > worst && !s.worst.CompareAndSwap(worst, gap); worst = s.worst.Load() {
	}
}

func (s *stalls) watch(cpu int, seen *atomic.Int64) {
	runtime.LockOSThread() // and never unlocked: the thread ends with this function
	var one unix.CPUSet
	one.Set(cpu)
	unix.SchedSetaffinity(0, &one)
	last := signals.Now()
	for {
		select {
		case <-s.end:
			return
		default:
		}
		ts := syscall.NsecToTimespec(1_000_000)
		syscall.Nanosleep(&ts, nil)
		now := signals.Now()
		s.see(now - last - 1_000_000)
		last = now
		seen.Store(now)
	}
}

func (s *stalls) most() time.Duration {
	worst, now := s.worst.Load(), signals.Now()
	for _, l := range s.last {
		if last := l.Load(); last != 0 && !s.over.Load() {
			worst = max(worst, now-last-1_000_000)
		}
	}
	return time.Duration(worst)
}

var exe = func() string { e, _ := os.Executable(); return e }()

// prepare makes a wrapper that has not been started. All that it starts carries a marker in its environment.
func prepare(t *testing.T, p plan) *run {
	t.Helper()
	dir := t.TempDir()
	r := &run{t: t, dir: dir, log: filepath.Join(dir, "log"), marker: "UL_TEST_MARKER=" + dir, stall: watchStalls(t)}
	p.Log = r.log
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	r.cmd = exec.Command(exe)
	r.cmd.Env = append(os.Environ(), "UL_TEST_MODE=wrapper", "UL_TEST_PLAN="+string(b), r.marker, "GORACE=atexit_sleep_ms=0", "D="+dir, "EXE="+exe)
	// A file, not a pipe: what is left alive on purpose would keep a pipe open.
	f, err := os.Create(filepath.Join(dir, "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	r.cmd.Stderr = f
	t.Cleanup(func() {
		if r.many {
			return
		}
		for _, pid := range r.survivors() {
			t.Errorf("process %d is alive after the run: %s", pid, cmdline(pid))
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return r
}

func launch(t *testing.T, p plan) *run {
	t.Helper()
	r := prepare(t, p)
	r.start()
	return r
}

func (r *run) start() {
	r.t.Helper()
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if !r.done {
			r.cmd.Process.Kill()
			r.cmd.Wait()
		}
	})
}

// wait returns the wrapper's status.
func (r *run) wait() syscall.WaitStatus {
	r.t.Helper()
	timer := time.AfterFunc(30*time.Second, func() {
		r.t.Errorf("the wrapper has not ended after 30s; log:\n%s", r.logged())
		r.cmd.Process.Kill()
	})
	r.cmd.Wait()
	timer.Stop()
	r.done = true
	return r.cmd.ProcessState.Sys().(syscall.WaitStatus)
}

func (r *run) wantCode(code int) {
	r.t.Helper()
	ws := r.wait()
	r.stall.stop() // the tree is over: hundreds of watches in one test would be a load of their own
	if !ws.Exited() || ws.ExitStatus() != code {
		r.t.Errorf("wrapper ended with %v, want exit code %d; stderr %q; log:\n%s", r.cmd.ProcessState, code, r.said(), r.logged())
	}
}

func (r *run) wantSignal(sig syscall.Signal) {
	r.t.Helper()
	ws := r.wait()
	r.stall.stop()
	if !ws.Signaled() || ws.Signal() != sig {
		r.t.Errorf("wrapper ended with %v, want signal %d; stderr %q; log:\n%s", r.cmd.ProcessState, sig, r.said(), r.logged())
	}
}

// said is what the run wrote to descriptor 2.
func (r *run) said() string { return r.read("stderr") }

func (r *run) read(name string) string {
	b, _ := os.ReadFile(filepath.Join(r.dir, name))
	return string(b)
}

func (r *run) logged() string {
	b, _ := os.ReadFile(r.log)
	return string(b)
}

func (r *run) entries() (all []entry) {
	s := bufio.NewScanner(strings.NewReader(r.logged()))
	for s.Scan() {
		var e entry
		if json.Unmarshal(s.Bytes(), &e) == nil {
			all = append(all, e)
		}
	}
	return all
}

// entry waits for a line of the log.
func (r *run) entry(what string) (found entry) {
	r.t.Helper()
	eventually(r.t, what+" in the log", func() bool {
		for _, e := range r.entries() {
			if e.What == what {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

// event returns the first event of a kind.
func (r *run) event(kind signals.EventKind) (signals.Event, bool) {
	for _, e := range r.entries() {
		if e.What == "event" && e.Ev.Kind == kind {
			return e.Ev, true
		}
	}
	return signals.Event{}, false
}

// kinds are the events in their order. A kill that takes a second is told; where the machine stood still for as long, nobody could be faster.
func (r *run) kinds() (all []signals.EventKind) {
	for _, e := range r.entries() {
		if e.What == "event" && (e.Ev.Kind != signals.Stuck || r.stall.most() < 800*time.Millisecond) {
			all = append(all, e.Ev.Kind)
		}
	}
	return all
}

// guardian finds the guardian from outside.
func (r *run) guardian() (pid int) {
	r.t.Helper()
	eventually(r.t, "a guardian", func() bool {
		for _, p := range children(r.cmd.Process.Pid) {
			if cmdline(p) == "ul-guard" {
				pid = p
			}
		}
		return pid != 0
	})
	return pid
}

// survivors are the living processes that carry the marker.
func (r *run) survivors() (all []int) {
	for _, pid := range processes() {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err == nil && bytes.Contains(b, []byte(r.marker)) {
			if r.cmd.Process == nil || pid != r.cmd.Process.Pid {
				all = append(all, pid)
			}
		}
	}
	return all
}

// due tells the wrapper of a plan with Told that its instants count from now on, and returns them.
func (r *run) due() signals.Deadlines {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, "told"), nil, 0o600); err != nil {
		r.t.Fatal(err)
	}
	return r.entry("due").Due
}

// beats is where beating processes leave their stamps.
func (r *run) beats(names ...string) {
	r.t.Helper()
	for _, n := range names {
		eventually(r.t, "a beat of "+n, func() bool { return r.last(n) != 0 })
	}
}

func (r *run) last(name string) signals.Instant {
	b, err := os.ReadFile(filepath.Join(r.dir, name))
	if err != nil || len(b) < 8 {
		return 0
	}
	return *(*int64)(unsafe.Pointer(&b[0]))
}

// wantSilent checks that the named processes did nothing after an instant, and are gone.
func (r *run) wantSilent(after signals.Instant, slack time.Duration, names ...string) {
	r.t.Helper()
	slack += r.room()
	for _, n := range names {
		late := time.Duration(r.last(n) - after)
		r.t.Logf("%s beat for the last time %v after that", n, late)
		if late > slack {
			r.t.Errorf("%s beat for the last time %v after its end was due, want at most %v", n, late, slack)
		}
	}
	if s := r.survivors(); len(s) > 0 {
		r.t.Errorf("alive: %v", s)
	}
}

// room is what the machine was too busy for. The guardian has to be scheduled when the wrapper ends and when its timer fires, and again where
// it is put off in the middle of its walk; then the one that is killed, and this process.
func (r *run) room() time.Duration { return 5 * r.stall.most() }

// treeNames are the processes of tree.
var treeNames = []string{"main", "background", "session", "double"}

// tree is a shell with a background child, one in a session of its own and one that was forked twice, all beating; the shell
// becomes a beating process itself. With an argument they do not heed TERM.
func tree(stubborn bool) []string {
	s := ""
	if stubborn {
		s = " stubborn"
	}
	return []string{"sh", "-c", `export UL_TEST_MODE=beat
"$EXE" "$D/background"` + s + ` &
setsid "$EXE" "$D/session"` + s + ` &
( setsid "$EXE" "$D/double"` + s + ` & )
exec "$EXE" "$D/main"` + s}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if f() {
			return
		}
		<-time.After(time.Millisecond)
	}
	t.Fatalf("no %s within 20s", what)
}

func processes() (all []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, pid)
		}
	}
	return all
}

func children(pid int) (all []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for s := range strings.FieldsSeq(string(b)) {
			n, _ := strconv.Atoi(s)
			all = append(all, n)
		}
	}
	return all
}

func cmdline(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return strings.Join(strings.FieldsFunc(string(b), func(r rune) bool { return r == 0 }), " ")
}

// halt stops a process, and waits until it is stopped.
func halt(t *testing.T, pid int) {
	t.Helper()
	syscall.Kill(pid, syscall.SIGSTOP)
	eventually(t, "stop", func() bool { return stopped(pid) })
}

func stopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && bytes.Contains(b, []byte(") T "))
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	state := b[bytes.LastIndexByte(b, ')')+2]
	return state != 'Z' && state != 'X'
}

// guardians are all living guardians of this test binary.
func guardians() (all []int) {
	for _, pid := range processes() {
		if e, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && e == exe && cmdline(pid) == "ul-guard" && alive(pid) {
			all = append(all, pid)
		}
	}
	return all
}

// needRoot skips a test that has to become another user, or to make namespaces.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		needed.Require(t, "root", syscall.EPERM)
	}
}

// brief says that the long variants are left out: with -short, and under the race detector, in which a process takes fifty times as long
// to start.
func brief() bool { return testing.Short() || raceDetector }
