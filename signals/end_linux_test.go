package signals_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/signals"
)

// ours returns the guardian that this process has just launched.
func ours(t *testing.T) (pid int) {
	t.Helper()
	eventually(t, "guardian", func() bool {
		for _, p := range children(os.Getpid()) {
			if cmdline(p) == "ul-guard" {
				pid = p
			}
		}
		return pid != 0
	})
	return pid
}

// marked are the living processes that carry a marker in their environment.
func marked(marker string) []int { return (&run{marker: marker, cmd: new(exec.Cmd)}).survivors() }

// Whoever has a lease must not give it up because Start returned an error: what was started may live. The end of Events says that it does not.
func TestAfterAStartThatFailedTheEventsEndWithTheTree(t *testing.T) {
	rounds := 200
	if brief() {
		rounds = 40
	}
	failed, ran := map[string]int{}, map[string]int{}
	for i := range rounds {
		how := []string{"killed by its command", "killed when it forked", "stopped when it forked"}[i%3]
		if how == "stopped when it forked" && i%5 != 0 {
			how = "killed by its command" // a stopped one is waited for
		}
		g, err := signals.Launch(signals.Options{OwnGroup: true})
		if err != nil {
			t.Fatal(err)
		}
		pid, ready := ours(t), filepath.Join(t.TempDir(), "ready")
		marker := "UL_TEST_MARKER=" + ready
		script := fmt.Sprintf(`setsid sh -c 'echo > %q; trap "" TERM; sleep 60; :' & sleep 60; :`, ready)
		if how == "killed by its command" {
			script = `setsid sleep 60 & kill -9 $PPID; ` + script
		}
		d := eternity
		if how == "stopped when it forked" {
			d.StopAt = signals.Now() + int64(300*time.Millisecond)
			d.KillAt = signals.Now() + int64(time.Minute)
		}
		seen := make(chan bool)
		go func() {
			defer close(seen)
			for how != "killed by its command" && alive(pid) {
				// Its first thread forks; the look has to be quick to come before the answer.
				if b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)); len(b) == 0 {
					continue
				}
				if how == "killed when it forked" {
					syscall.Kill(pid, syscall.SIGKILL)
				} else {
					syscall.Kill(pid, syscall.SIGSTOP)
				}
				return
			}
		}()
		_, err = g.Start(signals.Command{
			Path: "/bin/sh", Args: []string{"sh", "-c", script}, Env: append(os.Environ(), marker),
			StopSignal: syscall.SIGTERM, Grace: time.Second,
		}, d)
		s, refused := errors.AsType[*signals.StartError](err)
		if refused && s.TooLate && how == "stopped when it forked" { // the machine stood still until then, and there is nothing to stop
			g.Close()
			<-seen
			for ev := range g.Events() {
				t.Errorf("round %d: event %+v of a command that was not started", i, ev)
			}
			if left := marked(marker); len(left) > 0 || alive(pid) {
				t.Fatalf("round %d: got %v, and left are %v", i, err, left)
			}
			continue
		}
		<-seen
		if err != nil {
			failed[how]++
			if refused {
				t.Fatalf("%s: got %v, want an error that is none of the command's", how, err)
			}
			if _, err := os.Stat(ready); err == nil {
				ran[how]++ // and there is a process that left its session
			}
		} else if how == "stopped when it forked" {
			syscall.Kill(pid, syscall.SIGKILL) // the start was told before it was stopped
		}
		var kinds []signals.EventKind
		var left []int
		for ev := range g.Events() {
			kinds = append(kinds, ev.Kind)
			if ev.Kind == signals.Gone {
				left = marked(marker)
			}
		}
		if len(kinds) == 0 || kinds[len(kinds)-1] != signals.Gone {
			t.Errorf("round %d, %s: Start returned %v, events %v, want Gone at their end", i, how, err, kinds)
		}
		if left = append(left, marked(marker)...); len(left) > 0 {
			t.Fatalf("round %d, %s: Start returned %v, alive when the events ended: %v", i, how, err, left)
		}
		if alive(pid) {
			t.Fatalf("round %d, %s: the guardian is alive when the events ended", i, how)
		}
	}
	t.Logf("starts that failed: %v; of those, commands that ran: %v", failed, ran)
	if !brief() && (failed["killed when it forked"] == 0 || ran["stopped when it forked"] == 0) {
		t.Errorf("failed %v, ran %v: want some of each kind", failed, ran)
	}
}

// A lock that was pinned is free when the events of a guardian without a command have ended.
func TestAClosedGuardianHoldsNothing(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		for range 20 {
			g, err := signals.Launch(signals.Options{OwnGroup: true})
			if err != nil {
				t.Fatal(err)
			}
			pid, path := ours(t), filepath.Join(t.TempDir(), "lock")
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			fd := int(f.Fd())
			if err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
				t.Fatal(err)
			}
			if err := g.Pin([]int{fd}); err != nil {
				t.Fatal(err)
			}
			f.Close()
			again, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			if err := syscall.Flock(int(again.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); !errors.Is(err, syscall.EWOULDBLOCK) {
				t.Fatalf("the lock while it is pinned: got %v, want EWOULDBLOCK", err)
			}
			if stopped {
				syscall.Kill(pid, syscall.SIGSTOP)
			}
			g.Close()
			for ev := range g.Events() {
				t.Errorf("event %+v, want none", ev)
			}
			if err := syscall.Flock(int(again.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
				t.Errorf("the lock when the events have ended: got %v, want it", err)
			}
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil && strings.HasPrefix(cmdline(pid), "ul-guard") {
				t.Errorf("the guardian %d is there when the events have ended", pid)
			}
			if stopped {
				break // it takes half a second
			}
		}
	}
}
