package signals_test

import (
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/internal/needed"
	"github.com/underlease/underlease/signals"
)

// holdCanary keeps the guardian from collecting its canary, as a debugger does that looks at it: its end is told to the debugger first, and to
// its parent not before the debugger lets go. It returns what lets go.
func (r *run) holdCanary() (release func()) {
	r.t.Helper()
	g, canary := r.guardian(), 0
	eventually(r.t, "canary", func() bool {
		for _, pid := range children(g) {
			if cmdline(pid) == "ul-guard" {
				canary = pid
			}
		}
		return canary != 0
	})
	held, let := make(chan syscall.Errno), make(chan struct{})
	go func() {
		runtime.LockOSThread() // the kernel's debugger is the thread
		defer runtime.UnlockOSThread()
		const seize = 0x4206
		_, _, e := syscall.RawSyscall6(syscall.SYS_PTRACE, seize, uintptr(canary), 0, 0, 0, 0)
		held <- e
		<-let
		if e == 0 {
			// The debugger takes its end in first; then it is the parent's. (To end the thread would do the same, but the
			// runtime does not end the first one.)
			const all = 0x40000000
			_, _ = syscall.Wait4(canary, nil, all, nil)
		}
	}()
	if e := <-held; e != 0 {
		close(let)
		needed.Require(r.t, "ptrace", e)
	}
	release = sync.OnceFunc(func() { close(let) })
	r.t.Cleanup(release)
	return release
}

func TestAKillWaitsForNoOtherProcess(t *testing.T) {
	p := endless(tree(true)...)
	p.StopIn, p.KillIn, p.Told = 300*time.Millisecond, 500*time.Millisecond, true
	r := prepare(t, p)
	terminal(t, r)
	r.start()
	r.beats(treeNames...)
	release := r.holdCanary()
	kill := r.due().KillAt
	eventually(t, "the kill", func() bool { _, ok := r.event(signals.Exited); return ok })
	eventually(t, "its end", func() bool { return len(r.survivors()) == 0 })
	r.wantSilent(kill, slack, treeNames...)
	if _, gone := r.event(signals.Gone); gone {
		t.Error("the tree counts as gone while the guardian has a child that it cannot collect")
	}
	release()
	r.wantSignal(syscall.SIGKILL)
}

func TestTheEndOfTheCommandWaitsForNoOtherProcess(t *testing.T) {
	r := prepare(t, endless("sh", "-c", `UL_TEST_MODE=beat setsid "$EXE" "$D/session" stubborn & read x < "$D/fifo"; exit 5`))
	if err := syscall.Mkfifo(r.dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	terminal(t, r)
	r.start()
	r.beats("session")
	release := r.holdCanary()
	if err := os.WriteFile(r.dir+"/fifo", []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kill of what was left", func() bool { _, ok := r.event(signals.Killing); return ok })
	kill, _ := r.event(signals.Killing)
	eventually(t, "its end", func() bool { return len(r.survivors()) == 0 })
	r.wantSilent(kill.At, slack, "session")
	if ev, ok := r.event(signals.Leftover); !ok || ev.Count != 1 {
		t.Errorf("leftovers: %+v, want one: the canary is none", ev)
	}
	release()
	r.wantCode(5)
}

func TestACanaryThatIsNotCollectedYetIsNoLeftover(t *testing.T) {
	for _, left := range []signals.Leftovers{signals.LeftoversKill, signals.LeftoversWait, signals.LeftoversIgnore} {
		p := endless("sh", "-c", `read x < "$D/fifo"; exit 6`)
		p.Leftovers = left
		r := prepare(t, p)
		if err := syscall.Mkfifo(r.dir+"/fifo", 0o600); err != nil {
			t.Fatal(err)
		}
		terminal(t, r)
		r.start()
		r.entry("started")
		release := r.holdCanary()
		if err := os.WriteFile(r.dir+"/fifo", []byte("\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the end of the command", func() bool { _, ok := r.event(signals.Exited); return ok })
		release()
		r.wantCode(6)
		if got, want := r.kinds(), []signals.EventKind{signals.Exited, signals.Gone}; !slices.Equal(got, want) {
			t.Errorf("leftovers %s: events %v, want %v", left, got, want)
		}
	}
}
