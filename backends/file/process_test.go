//go:build linux

package file

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/internal/needed"
)

var background = context.Background()

// stay is what one holder wrote down, by CLOCK_BOOTTIME.
type stay struct {
	term       backends.Term
	slot       int
	begin, end int64
}

func stays(t *testing.T, text string) (all []stay) {
	t.Helper()
	for line := range strings.Lines(text) {
		var s stay
		if _, err := fmt.Sscan(line, &s.term, &s.slot, &s.begin, &s.end); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		all = append(all, s)
	}
	return all
}

// TestEightProcessesNeverOverlap is C64: what the holders wrote down tells, not what the store says.
func TestEightProcessesNeverOverlap(t *testing.T) {
	for _, slots := range []int{1, 3} {
		t.Run(strconv.Itoa(slots), func(t *testing.T) {
			const processes, rounds = 8, 125
			dir := memory(t)
			var actors []*actor
			for range processes {
				actors = append(actors, start(t, "contend", dir, "l", strconv.Itoa(slots), strconv.Itoa(rounds)))
			}
			var all []stay
			for _, a := range actors {
				all = append(all, stays(t, a.finish(t))...)
			}
			if len(all) != processes*rounds {
				t.Fatalf("stays: got %d, want %d", len(all), processes*rounds)
			}
			slices.SortFunc(all, func(a, b stay) int { return int(a.begin - b.begin) })
			ends := map[int]stay{}
			for i, s := range all {
				if before, ok := ends[s.slot]; ok && (s.begin < before.end || s.term <= before.term) {
					t.Errorf("slot %d: %+v comes after %+v, want it later and with a larger term", s.slot, s, before)
				}
				if slots == 1 && i > 0 && s.term <= all[i-1].term {
					t.Errorf("term %d comes after %d", s.term, all[i-1].term)
				}
				if s.slot >= slots {
					t.Errorf("slot: got %d, want one below %d", s.slot, slots)
				}
				ends[s.slot] = s
			}
			terms := map[backends.Term]bool{}
			for _, s := range all {
				if terms[s.term] {
					t.Errorf("term %d was given twice", s.term)
				}
				terms[s.term] = true
			}
		})
	}
}

// TestAKilledHolderFreesAtOnce is C20's part of the store, and C65: the hold outlives the holder.
func TestAKilledHolderFreesAtOnce(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	holder := start(t, "hold", dir, "l", "0s")
	term := holder.line(t)
	req := backends.Request{Lease: "l", Handle: backends.NewHandle(), Slots: 1}
	var busy *backends.BusyError
	if _, err := c.Acquire(t.Context(), req); !errors.As(err, &busy) || busy.Term.String() != term || busy.Left != backends.Forever ||
		busy.Holder != "pid "+strconv.Itoa(holder.Process.Pid) {
		t.Fatalf("Acquire while it is held: got %v, want a busy error with term %s", err, term)
	}
	woken := make(chan error, 1)
	go func() { woken <- c.WaitFree(t.Context(), req) }()
	killed := time.Now()
	holder.kill()
	if err := <-woken; err != nil {
		t.Fatalf("WaitFree: got %v, want nil", err)
	}
	g, err := c.Acquire(t.Context(), req)
	if err != nil {
		t.Fatalf("Acquire after the kill: got %v, want a grant", err)
	}
	if took := time.Since(killed); took > 5*time.Second { // on a busy machine
		t.Errorf("takeover took %v, want it at once", took)
	}
	if g.Previous.Outcome != backends.OutcomeUnknown {
		t.Errorf("previous end: got %q, want unknown", g.Previous.Outcome)
	}

	const length = 4 * time.Second // so that it is looked at before its end
	begun := time.Now()
	holder = start(t, "hold", dir, "kept", length.String())
	holder.line(t)
	holder.kill()
	req.Lease = "kept"
	if _, err := c.Acquire(t.Context(), req); !errors.As(err, &busy) || !busy.Kept || busy.Left <= 0 || busy.Left > length {
		t.Errorf("Acquire after the kill: got %v, want a slot that is kept for at most %v", err, length)
	}
	for {
		if err := c.WaitFree(t.Context(), req); err != nil {
			t.Fatalf("WaitFree: got %v, want nil", err)
		}
		if _, err := c.Acquire(t.Context(), req); err == nil {
			break
		} else if !errors.Is(err, backends.ErrBusy) {
			t.Fatalf("Acquire: got %v, want a grant or busy", err)
		}
	}
	if took := time.Since(begun); took < length {
		t.Errorf("free %v after the start, want not before the hold of %v", took, length)
	}
}

// TestSixteenProcessesMakeTheDirectoryAtOnce is C68's like.
func TestSixteenProcessesMakeTheDirectoryAtOnce(t *testing.T) {
	dir := memory(t) + "/not/there/yet"
	var actors []*actor
	for i := range 16 {
		actors = append(actors, start(t, "contend", dir, "l"+strconv.Itoa(i%3), "1", "3"))
	}
	n := 0
	for _, a := range actors {
		n += len(stays(t, a.finish(t)))
	}
	if n != 16*3 {
		t.Errorf("stays: got %d, want %d", n, 16*3)
	}
}

func TestACopyOfTheDescriptorKeepsTheLease(t *testing.T) {
	dir := t.TempDir()
	a, b := openAt(t, dir), openAt(t, dir)
	g := acquire(t, a, "l", 1)
	fds, err := a.Pins(g)
	if err != nil || len(fds) != 1 {
		t.Fatalf("Pins: got %v, %v, want one descriptor", fds, err)
	}
	flags, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0)
	if err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("descriptor %d: got flags %#x, %v, want close-on-exec", fds[0], flags, err)
	}
	copied, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	req := backends.Request{Lease: "l", Handle: backends.NewHandle(), Slots: 1}
	if _, err := b.Acquire(t.Context(), req); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire while a copy is open: got %v, want busy", err)
	}
	shut(copied)
	if _, err := b.Acquire(t.Context(), req); err != nil {
		t.Errorf("Acquire after the last copy was closed: got %v, want a grant", err)
	}
}

// TestNothingIsInherited looks at what a started process has open: a lock that a command inherits would outlive us.
func TestNothingIsInherited(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	acquire(t, c, "l", 1)
	child := start(t, "hold", t.TempDir(), "other", "0s")
	child.line(t)
	open, err := os.ReadDir("/proc/" + strconv.Itoa(child.Process.Pid) + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range open {
		if to, err := os.Readlink("/proc/" + strconv.Itoa(child.Process.Pid) + "/fd/" + e.Name()); err == nil && strings.HasPrefix(to, dir) {
			t.Errorf("the child has %s open", to)
		}
	}
}

// TestAHolderSeesWhatIsTakenAway is C10 and C15 under a holder.
func TestAHolderSeesWhatIsTakenAway(t *testing.T) {
	for name, take := range map[string]func(c *Client, dir string) error{
		"record deleted":    func(_ *Client, dir string) error { return os.Remove(dir + "/rec") },
		"record emptied":    func(_ *Client, dir string) error { return os.Truncate(dir+"/rec", 0) },
		"record written to": func(_ *Client, dir string) error { return os.WriteFile(dir+"/rec", []byte("x"), 0o600) },
		"foreign record": func(_ *Client, dir string) error {
			return replace(dir+"/rec", (&record{lease: "another", last: 5}).encode())
		},
		"empty record":      func(_ *Client, dir string) error { return replace(dir+"/rec", nil) },
		"record of another": func(_ *Client, dir string) error { return replace(dir+"/rec", (&record{lease: "l", last: 5}).encode()) },
		"slot deleted":      func(_ *Client, dir string) error { return os.Remove(dir + "/slot.0") },
		"slot replaced":     func(_ *Client, dir string) error { return replace(dir+"/slot.0", nil) },
		"slot renamed":      func(_ *Client, dir string) error { return os.Rename(dir+"/slot.0", dir+"/x") },
		"lease deleted":     func(_ *Client, dir string) error { return os.RemoveAll(dir) },
		"lease renamed":     func(_ *Client, dir string) error { return os.Rename(dir, dir+".x") },
		"store deleted":     func(c *Client, _ string) error { return os.RemoveAll(c.dir) },
	} {
		t.Run(name, func(t *testing.T) {
			c := openAt(t, t.TempDir()+"/store")
			g := acquire(t, c, "l", 1)
			dir := c.lease("", "l")
			woken := make(chan error, 1)
			go func() { woken <- c.WaitChange(t.Context(), g) }()
			if err := take(c, dir); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-woken:
				if err != nil {
					t.Errorf("WaitChange: got %v, want nil", err)
				}
			case <-time.After(20 * time.Second):
				t.Error("WaitChange did not notice it")
			}
			for range 2 {
				if _, err := c.Renew(t.Context(), g); !errors.Is(err, backends.ErrLost) || errors.Is(err, backends.ErrBroken) {
					t.Errorf("Renew: got %v, want ErrLost alone", err)
				}
			}
		})
	}
}

// replace puts a new file in the place of another.
func replace(path string, b []byte) error {
	if err := os.WriteFile(path+".x", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".x", path)
}

// TestADeletedLockIsNoLock is C15: whoever comes after a deletion does not wait for the holder of nothing, gets a larger
// term, and is not harmed by that holder's release.
func TestADeletedLockIsNoLock(t *testing.T) {
	dir := t.TempDir()
	a, b := openAt(t, dir), openAt(t, dir)
	for _, what := range []string{"slot.0", "rec", "mu", ""} {
		old := acquire(t, a, "l", 1)
		if err := os.RemoveAll(filepath.Join(a.lease("", "l"), what)); err != nil {
			t.Fatal(err)
		}
		if what == "rec" || what == "mu" {
			// The lock itself still stands.
			_, err := b.Acquire(t.Context(), backends.Request{Lease: "l", Handle: backends.NewHandle(), Slots: 1})
			if !errors.Is(err, backends.ErrBusy) {
				t.Errorf("Acquire without %s: got %v, want busy", what, err)
			}
			if err := a.Release(t.Context(), old, backends.End{Outcome: "ok"}); err != nil {
				t.Errorf("Release without %s: got %v, want nil", what, err)
			}
			next := acquire(t, b, "l", 1)
			if next.Term <= old.Term {
				t.Errorf("term without %s: got %d, want more than %d", what, next.Term, old.Term)
			}
			release(t, b, next)
			continue
		}
		next := acquire(t, b, "l", 1)
		if next.Term <= old.Term {
			t.Errorf("term after the deletion of %q: got %d, want more than %d", what, next.Term, old.Term)
		}
		release(t, a, old)
		if _, err := b.Renew(t.Context(), next); err != nil {
			t.Errorf("Renew after the release of the old grant: got %v, want the grant", err)
		}
		release(t, b, next)
	}
}

func TestAnUnknownLockerIsNamed(t *testing.T) {
	c := openAt(t, t.TempDir())
	release(t, c, acquire(t, c, "l", 1))
	path := slotPath(c.lease("", "l"), 0)
	fd, _, err := open(path, unix.O_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	defer shut(fd)
	if busy, err := lock(fd, path); busy || err != nil {
		t.Fatalf("lock: got %v, %v", busy, err)
	}
	pid := "pid " + strconv.Itoa(os.Getpid())
	var busy *backends.BusyError
	if _, err := c.Acquire(t.Context(), backends.Request{Lease: "l", Handle: "h", Slots: 1}); !errors.As(err, &busy) || !strings.Contains(busy.Holder, pid) {
		t.Errorf("Acquire: got %v, want busy with %s", err, pid)
	}
	if s, err := c.Inspect(t.Context(), "", "l"); err != nil || !s.Slots[0].Held || !strings.Contains(s.Slots[0].Holder, pid) {
		t.Errorf("Inspect: got %+v, %v, want a slot held by %s", s, err, pid)
	}
}

func TestALockedRecordIsWaitedForAndThenNamesTheProcess(t *testing.T) {
	c := openAt(t, t.TempDir())
	release(t, c, acquire(t, c, "l", 1))
	path := c.lease("", "l") + "/mu"
	fd, _, err := open(path, unix.O_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	if busy, err := lock(fd, path); busy || err != nil {
		t.Fatalf("lock: got %v, %v", busy, err)
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = c.Acquire(ctx, backends.Request{Lease: "l", Handle: "h", Slots: 1})
	if pid := "process " + strconv.Itoa(os.Getpid()); !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), pid) || !strings.Contains(err.Error(), path) {
		t.Errorf("Acquire: got %v, want ErrUnavailable that names %s and %s", err, path, pid)
	}
	if took := time.Since(begun); took < 200*time.Millisecond || took > 5*time.Second {
		t.Errorf("Acquire took %v, want the 200ms of its context", took)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c.Acquire(t.Context(), backends.Request{Lease: "l", Handle: "h", Slots: 1})
		done <- err
	}()
	shut(fd)
	if err := <-done; err != nil {
		t.Errorf("Acquire after the lock was given up: got %v, want a grant", err)
	}
}

func TestAnotherUserIsDenied(t *testing.T) {
	if os.Geteuid() != 0 {
		needed.Require(t, "root", unix.EPERM)
	}
	dir := memory(t) + "/store"
	c := openAt(t, dir)
	g := acquire(t, c, "l", 1)
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []os.FileMode{0o700, 0o755} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		got := startAs(t, nobody, "once", dir, "l").finish(t)
		if !strings.HasPrefix(got, "denied ") || !strings.Contains(got, dir) || !strings.Contains(got, "hint: run as the owner") {
			t.Errorf("another user at a directory of mode %v: got %q, want denied, the file and a hint", mode, got)
		}
	}
	got := startAs(t, nobody, "once", filepath.Dir(dir)+"/new", "l").finish(t)
	if !strings.HasPrefix(got, "denied ") || !strings.Contains(got, filepath.Dir(dir)) {
		t.Errorf("another user who would have to make the directory: got %q, want denied", got)
	}
	if _, err := c.Renew(t.Context(), g); err != nil {
		t.Errorf("Renew afterwards: got %v, want the grant", err)
	}
}

func TestWithoutDescriptorsNothingIsTaken(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	release(t, c, acquire(t, c, "l", 1))
	lines := strings.Split(strings.TrimSpace(start(t, "starve", dir, "l").finish(t)), "\n")
	starved := 0
	for i, line := range lines {
		switch {
		case strings.HasPrefix(line, "unavailable ") && strings.Contains(line, "too many open files") && strings.Contains(line, dir):
			starved++
		case i == len(lines)-1 && strings.HasPrefix(line, "ok "):
		default:
			t.Errorf("line %d: got %q, want unavailable until there are enough descriptors", i, line)
		}
	}
	if starved < 3 {
		t.Errorf("starved attempts: got %d of %q, want some", starved, lines)
	}
	s, err := c.Inspect(t.Context(), "", "l")
	if err != nil || s.Slots[0].Taken() {
		t.Errorf("Inspect: got %+v, %v, want a free slot", s, err)
	}
}

// mount mounts a small file system for the test, or skips it.
func mount(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir() + "/small"
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	needed.Require(t, "mount", unix.Mount("tmpfs", dir, "tmpfs", 0, options+",mode=0700"))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

func TestAFullDiskLeavesTheLeaseAsItWas(t *testing.T) {
	dir := mount(t, "size=128k")
	c := openAt(t, dir+"/store")
	if _, err := c.Records().Put(t.Context(), "", "l", backends.Put{Key: "k", Value: make([]byte, 9000)}, nil); err != nil {
		t.Fatal(err)
	}
	release(t, c, acquire(t, c, "l", 1))
	g := acquire(t, c, "held", 1)
	path := c.lease("", "l") + "/rec"
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	fill(t, dir+"/filler")

	req := backends.Request{Lease: "l", Handle: backends.NewHandle(), Slots: 1}
	for call, f := range map[string]func() error{
		"Acquire": func() error { _, err := c.Acquire(t.Context(), req); return err },
		"Put": func() error {
			_, err := c.Records().Put(t.Context(), "", "l", backends.Put{Key: "x", Value: make([]byte, 9000)}, nil)
			return err
		},
		"Acquire of a new lease": func() error {
			_, err := c.Acquire(t.Context(), backends.Request{Lease: "new", Handle: "h", Slots: 1})
			return err
		},
		"Release": func() error { return c.Release(t.Context(), g, backends.End{Outcome: "ok"}) },
	} {
		err := f()
		if !errors.Is(err, backends.ErrUnavailable) || !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), dir) || !strings.Contains(backends.Hint(err), "make room") {
			t.Errorf("%s on a full disk: got %v (hint %q), want ErrUnavailable that names the file", call, err, backends.Hint(err))
		}
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the record was changed by writes that failed: %v", err)
	}
	if _, err := os.Stat(path + ".new"); err == nil {
		t.Errorf("%s.new was left behind", path)
	}
	if _, err := c.Renew(t.Context(), g); err != nil {
		t.Errorf("Renew on a full disk: got %v, want the grant: it writes nothing", err)
	}
	if err := os.Remove(dir + "/filler"); err != nil {
		t.Fatal(err)
	}
	if err := c.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release when there is room again: got %v, want nil", err)
	}
	if _, err := c.Acquire(t.Context(), req); err != nil {
		t.Errorf("Acquire when there is room again: got %v, want a grant", err)
	}
}

func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for _, size := range []int{4096, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("fill %s: got %v, want a full disk", path, err)
		}
	}
}

func TestAReadOnlyDirectoryIsDenied(t *testing.T) {
	dir := mount(t, "size=1m")
	c := openAt(t, dir)
	release(t, c, acquire(t, c, "l", 1))
	needed.Require(t, "mount", unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	for _, lease := range []string{"l", "new"} {
		_, err := c.Acquire(t.Context(), backends.Request{Lease: lease, Handle: "h", Slots: 1})
		if !errors.Is(err, backends.ErrDenied) || !errors.Is(err, unix.EROFS) || !strings.Contains(err.Error(), dir) {
			t.Errorf("Acquire of %q on a read-only file system: got %v, want ErrDenied that names the file", lease, err)
		}
	}
}

func TestBreakNowEndsAStoppedHolderAndNobodyElse(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	stopped := start(t, "hold", dir, "stopped", "0s")
	running := start(t, "hold", dir, "running", "0s")
	stopped.line(t)
	running.line(t)
	pause := func(a *actor) {
		t.Helper()
		if err := a.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the process is stopped", func() bool { _, state, ok := stat(a.Process.Pid); return ok && state == 'T' })
	}
	pause(stopped)
	for _, lease := range []string{"stopped", "running"} {
		if err := c.Break(t.Context(), "", lease, 0, "test", true); err != nil {
			t.Fatalf("Break of %s: got %v, want nil", lease, err)
		}
		acquire(t, c, lease, 1)
	}
	waitFor(t, "the stopped holder is dead", func() bool { _, state, ok := stat(stopped.Process.Pid); return !ok || state == 'Z' })
	if _, state, ok := stat(running.Process.Pid); !ok || state == 'Z' {
		t.Error("the running holder was killed, and it could see the break itself")
	}
	// A record whose process cannot be proven to be the one that lives now.
	pause(running)
	start, _, _ := stat(running.Process.Pid)
	me := self()
	right := process{boot: me.boot, space: me.space, pid: running.Process.Pid, start: start}
	for name, wrong := range map[string]process{
		"nobody":            {},
		"ourselves":         me,
		"another boot":      {boot: "x", space: right.space, pid: right.pid, start: right.start},
		"another namespace": {boot: right.boot, space: right.space + 1, pid: right.pid, start: right.start},
		"another start":     {boot: right.boot, space: right.space, pid: right.pid, start: right.start + 1},
		"another pid":       {boot: right.boot, space: right.space, pid: 1 << 30, start: right.start},
	} {
		wrong.endIfStopped()
		if _, state, ok := stat(running.Process.Pid); !ok || state != 'T' {
			t.Fatalf("%s: the process was killed", name)
		}
	}
	right.endIfStopped()
	waitFor(t, "the process is dead", func() bool { _, state, ok := stat(running.Process.Pid); return !ok || state == 'Z' })
}

// waitFor looks again and again until ok.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); {
		if time.Since(begun) > 10*time.Second {
			t.Fatalf("after 10s it is still not so that %s", what)
		}
		time.Sleep(2 * time.Millisecond) // the pace of the looks
	}
}

// A process that is being forked has a copy of every descriptor until it executes its program: the guardian is started beside the
// acquisition. Each lease here is new, because the copy of a lock that was released would make it busy, and rightly.
func TestAForkOfOurOwnDoesNotMakeAFreeLeaseBusy(t *testing.T) {
	c := openAt(t, memory(t))
	stop := make(chan struct{})
	var forks sync.WaitGroup
	forks.Go(func() { // one at a time: between two the runtime lets readers of ForkLock in
		for {
			select {
			case <-stop:
				return
			default:
			}
			if pid, err := syscall.ForkExec("/proc/self/exe", []string{"none", "-test.run=^$"}, &syscall.ProcAttr{Env: []string{}}); err == nil {
				syscall.Kill(pid, syscall.SIGKILL)
				syscall.Wait4(pid, nil, 0, nil)
			}
		}
	})
	defer forks.Wait()
	defer close(stop)
	for i := range 500 {
		req := backends.Request{Lease: "l" + strconv.Itoa(i), Holder: "h", Handle: backends.NewHandle(), Slots: 1}
		// As after a run that has ended: without its file a slot is not looked at.
		if g, err := c.Acquire(background, req); err != nil {
			t.Fatalf("first acquisition of %s: %v", req.Lease, err)
		} else if h := c.holds(c.lease("", g.Lease), g.Handle); os.Remove(slotPath(h.dir, 0)) != nil || os.WriteFile(slotPath(h.dir, 0), nil, 0o600) != nil {
			t.Fatalf("%s: cannot replace the slot's file", req.Lease)
		}
		req.Handle = backends.NewHandle()
		if _, err := c.Acquire(background, req); err != nil {
			t.Fatalf("acquisition of %s: got %v, want it: nobody else is there", req.Lease, err)
		}
	}
}
