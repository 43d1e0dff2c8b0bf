//go:build linux

package proof

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// aRelease is what only a request has that gives a lease of the Redis store back.
const aRelease = "-- ARGV: name, handle, slot, term (both empty"

// leaves is for how long a wrapper that has given its lease back waits for its guardian.
const leaves = time.Second

// glance is for how long it is looked whether something happens that must not.
const glance = 200 * time.Millisecond

// witness passes bytes on between a client and a server, and calls met before the server has the first request that contains certain bytes.
func witness(t *testing.T, target, match string, met func()) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var (
		once sync.Once
		all  sync.WaitGroup
	)
	pass := func(from, to net.Conn, look bool) {
		defer to.Close()
		var tail []byte
		for b := make([]byte, 64<<10); ; {
			n, err := from.Read(b)
			if look {
				tail = append(tail, b[:n]...)
				if bytes.Contains(tail, []byte(match)) {
					once.Do(met)
				}
				tail = tail[max(0, len(tail)-len(match)):] // a match may come in two pieces
			}
			if _, wrong := to.Write(b[:n]); err != nil || wrong != nil {
				return
			}
		}
	}
	all.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp4", target)
			if err != nil {
				client.Close()
				continue
			}
			all.Go(func() { pass(client, server, true) })
			all.Go(func() { pass(server, client, false) })
		}
	})
	t.Cleanup(func() { l.Close(); all.Wait() })
	return l.Addr().String()
}

// birth returns the start time of a process that is there, dead or alive: with its number nobody else has it.
func birth(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(b), ") ")
	if f := strings.Fields(rest); len(f) > 19 {
		return f[19]
	}
	return ""
}

// holdEnd traces a process whose first thread ends it, and holds it where it asks the kernel to end it, until it is
// killed: its descriptors are open by then, and it does nothing any more. It returns when the process is traced; ending is closed when it is
// held.
func holdEnd(t *testing.T, pid int) (ending <-chan struct{}) {
	t.Helper()
	traced, held := make(chan error, 1), make(chan struct{})
	go func() { // a tracer is a thread
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if _, _, e := syscall.RawSyscall6(syscall.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, unix.PTRACE_O_TRACESYSGOOD, 0, 0); e != 0 {
			traced <- e
			return
		}
		traced <- unix.PtraceInterrupt(pid)
		for {
			var ws syscall.WaitStatus
			_, err := syscall.Wait4(pid, &ws, syscall.WALL, nil)
			switch {
			case err == syscall.EINTR:
				continue
			case err != nil || !ws.Stopped():
				return // it was killed
			}
			sig := int(ws.StopSignal())
			switch {
			case sig == int(syscall.SIGTRAP)|0x80: // at a system call
				if asks(pid) == unix.SYS_EXIT_GROUP {
					close(held)
					continue
				}
			case uint32(ws)>>16 == 0: // a signal that was sent
				_ = syscall.PtraceSyscall(pid, sig)
				continue
			}
			_ = syscall.PtraceSyscall(pid, 0) // or it was killed meanwhile
		}
	}()
	if err := <-traced; errors.Is(err, syscall.EPERM) {
		servers.Require(t, "ptrace", errors.New("no process may be traced here"))
	} else if err != nil {
		t.Fatalf("ptrace: %v", err)
	}
	return held
}

// asks returns the number of the system call that a traced process is about to make, or -1.
//
// Source: ptrace(2), PTRACE_GET_SYSCALL_INFO, Linux 5.3.
func asks(pid int) int {
	var info [88]byte
	n, _, e := syscall.RawSyscall6(syscall.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(pid), uintptr(len(info)), uintptr(unsafe.Pointer(&info)), 0, 0)
	if e != 0 || n < 32 || info[0] != unix.PTRACE_SYSCALL_INFO_ENTRY {
		return -1
	}
	return int(binary.NativeEndian.Uint64(info[24:]))
}

// On a store where the guardian keeps nothing, the lease is given back while the guardian ends: not before the last process of the tree is
// gone, and the wrapper ends after both.
func TestAReleaseIsAfterTheTreeAndTheWrappersEndAfterTheGuardians(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	f := onRedis(t, r)

	var (
		mu    sync.Mutex
		tree  = map[int]string{} // the births
		alive []int              // when the lease was given back
		given time.Time          // a moment before
	)
	released := make(chan struct{})
	addr := witness(t, r.Addr(), aRelease, func() {
		mu.Lock()
		defer mu.Unlock()
		given = time.Now()
		for pid, b := range tree {
			if birth(pid) == b {
				alive = append(alive, pid)
			}
		}
		close(released)
	})

	// A command that ends when its input does, and leaves a process in a session of its own that ends when it is told to.
	fifo := filepath.Join(f.dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	word, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer word.Close()
	input, end, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	said, says, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer said.Close()
	script := `setsid sh -c 'echo up; read x' <"$1" >"$2" & read up <"$2"; echo $PPID $$ $!; read x; exit 0`
	up := filepath.Join(f.dir, "up")
	if err := syscall.Mkfifo(up, 0o600); err != nil {
		t.Fatal(err)
	}
	l := f.prepare(f.url(addr), []string{"--leftovers", "wait"}, []string{"sh", "-c", script, "sh", fifo, up})
	l.cmd.Stdin, l.cmd.Stderr = input, says
	l.start()
	input.Close()
	says.Close()
	lines := make(chan string, 16)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(said); s.Scan(); {
			lines <- s.Text()
		}
	}()

	var pids []int
	select {
	case line := <-l.first:
		for word := range strings.FieldsSeq(line) {
			pid, _ := strconv.Atoi(word)
			pids = append(pids, pid)
		}
		if len(pids) != 3 || name(pids[0]) != "ul-guard" {
			t.Fatalf("got %q, want the pids of the guardian, the command and the process that it leaves", line)
		}
	case <-time.After(time.Minute):
		t.Fatal("no command has begun within a minute")
	}
	keeper, born := pids[0], birth(pids[0])
	mu.Lock()
	for _, pid := range append(descendants(keeper), pids[1:]...) {
		if tree[pid] = birth(pid); tree[pid] == "" {
			t.Errorf("process %d has gone before it was asked to", pid)
		}
	}
	mu.Unlock()
	ending := holdEnd(t, keeper)

	end.Close() // the command's input, which ends it
	select {
	case line := <-lines:
		if !strings.Contains(line, "kept the lease for 1 background process") {
			t.Fatalf("got %q, want the word about what the command left", line)
		}
	case <-time.After(time.Minute):
		t.Fatal("no word within a minute about what the command left")
	}
	select {
	case <-released:
		t.Error("the lease was given back while a process was alive that the command left")
	case <-time.After(glance):
	}
	if _, err := word.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]<-chan struct{}{"the guardian has not begun to end": ending, "the lease was not given back while the guardian ended": released} {
		select {
		case <-c:
		case <-time.After(time.Minute):
			t.Fatalf("%s, within a minute after the last process of the tree", what)
		}
	}
	mu.Lock()
	slices.Sort(alive)
	if len(alive) > 0 {
		t.Errorf("when the lease was given back: got the processes %v of the tree, want none", alive)
	}
	mu.Unlock()

	// The guardian is held, and is ended when it has taken too long: it has nothing more to see to. The wrapper waits for that.
	select {
	case <-l.over:
	case <-time.After(time.Minute):
		t.Error("the wrapper waits for a guardian that does not end")
	}
	if got := l.ends(); got != 0 {
		t.Errorf("got the code %d, want 0", got)
	}
	// It would be there, dead or alive: nobody else collects it. On a machine that stands still the wrapper does not wait for as long as it
	// takes; then the guardian comes to us.
	servers.Within(t, time.Minute, "the guardian has ended", func() error {
		if took := time.Since(given); birth(keeper) == born {
			if took < leaves {
				t.Errorf("the wrapper has ended %v after the release, and its guardian is still there", took)
			}
			return errors.New("it is there")
		}
		return nil
	})
	if got := l.reported(); got.Outcome != "ok" || !got.Released {
		t.Errorf("got the outcome %q and released %v, want ok and true", got.Outcome, got.Released)
	}
	for line := range lines {
		t.Errorf("got the line %q, want no more", line)
	}
}
