//go:build linux

package file

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/internal/needed"
)

func request(lease string) backends.Request {
	return backends.Request{Lease: lease, Holder: "h", Handle: backends.NewHandle(), Slots: 1}
}

// waiting calls WaitFree and returns where its answer comes.
func waiting(ctx context.Context, c *Client, req backends.Request) <-chan error {
	done := make(chan error, 1)
	go func() { done <- c.WaitFree(ctx, req) }()
	return done
}

// TestALookWakesNobody holds what keeps waiters from waking each other for ever.
func TestALookWakesNobody(t *testing.T) {
	dir := t.TempDir()
	c, other := openAt(t, dir), openAt(t, dir)
	g := acquire(t, c, "l", 1)
	w := c.watch(t.Context())
	if w == nil {
		needed.Require(t, "inotify", unix.ENOSYS)
	}
	defer w.close()
	w.add(slotPath(c.lease("", "l"), 0), 0x8 /* IN_CLOSE_WRITE */)
	for range 20 {
		if _, err := other.Acquire(t.Context(), request("l")); !errors.Is(err, backends.ErrBusy) {
			t.Fatalf("Acquire: got %v, want busy", err)
		}
		if _, err := other.Inspect(t.Context(), "", "l"); err != nil {
			t.Fatal(err)
		}
		other.prune(t.Context(), "")
	}
	if w.wait(t.Context(), 50*time.Millisecond, nil) {
		t.Error("a look at a held slot woke a waiter")
	}
	release(t, c, g)
	if !w.wait(t.Context(), 20*time.Second, nil) {
		t.Error("the release woke no waiter")
	}
}

func TestAWaiterSurvivesThatItsFilesAreMadeAnew(t *testing.T) {
	dir := t.TempDir()
	c, other := openAt(t, dir), openAt(t, dir)
	g := acquire(t, c, "l", 1)
	done := waiting(t.Context(), other, request("l"))
	// Moved away, for the waiter may be making files in it just now.
	if err := os.Rename(c.lease("", "l"), dir+"/aside"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("WaitFree after the deletion: got %v, want nil", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("WaitFree did not notice the deletion")
	}
	release(t, c, g)
	// Again, with a new holder in the way before the waiter looks.
	g = acquire(t, c, "l", 1)
	done = waiting(t.Context(), other, request("l"))
	release(t, c, g)
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("WaitFree after the release: got %v, want nil", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("WaitFree did not notice the release")
	}
	if err := other.WaitFree(t.Context(), request("never-used")); err != nil {
		t.Errorf("WaitFree of a lease that was never used: got %v, want nil at once", err)
	}
}

func TestAWaiterOnlyCaresForItsOwnSlots(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	acquire(t, c, "l", 3)
	second := acquire(t, c, "l", 3)
	acquire(t, c, "l", 3)
	ctx, cancel := context.WithCancel(t.Context())
	one := waiting(ctx, c, request("l"))
	two := request("l")
	two.Slots = 2
	both := waiting(t.Context(), c, two)
	release(t, c, second)
	if err := <-both; err != nil {
		t.Errorf("WaitFree for two slots: got %v, want nil", err)
	}
	cancel()
	if err := <-one; !errors.Is(err, context.Canceled) {
		t.Errorf("WaitFree for one slot: got %v, want the context's error: its slot was never free", err)
	}
}

func TestOtherSlotsDoNotWakeAHolder(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	first := acquire(t, c, "l", 2)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.WaitChange(ctx, first) }()
	for range 10 {
		release(t, c, acquire(t, c, "l", 2))
	}
	if err := <-done; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitChange while others came and went: got %v, want the context's error", err)
	}
}

func TestWithoutNotificationsWaitersPoll(t *testing.T) {
	dir := t.TempDir()
	c := newClient(dir, true, false)
	t.Cleanup(func() { _ = c.Close() })
	g := acquire(t, c, "l", 1)
	done := waiting(t.Context(), c, request("l"))
	release(t, c, g)
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("WaitFree: got %v, want nil", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("WaitFree did not notice the release within its poll")
	}
	g = acquire(t, c, "l", 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.WaitChange(ctx, g); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitChange: got %v, want the context's error", err)
	}
}

func TestAHoldIsCountedByTheBootAndThenByTheWall(t *testing.T) {
	var wall, boot int64
	id := "one"
	c := clock{wall: func() int64 { return wall }, boot: func() int64 { return boot }, id: func() string { return id }}
	const hour = int64(time.Hour)
	wall, boot = 1000*hour, 10*hour
	s := &slot{since: wall, kept: c.hold(4 * time.Hour)}
	for _, step := range []struct {
		what       string
		wall, boot int64
		id         string
		want       time.Duration
	}{
		{"at once", 1000 * hour, 10 * hour, "one", 4 * time.Hour},
		{"an hour later", 1001 * hour, 11 * hour, "one", 3 * time.Hour},
		{"the wall clock is set ahead", 2000 * hour, 11 * hour, "one", 3 * time.Hour},
		{"the wall clock is set back", 0, 13 * hour, "one", time.Hour},
		{"at its end", 1004 * hour, 14 * hour, "one", 0},
		{"after its end", 1004 * hour, 99 * hour, "one", 0},
		{"rebooted", 1001 * hour, 0, "two", 3 * time.Hour},
		{"rebooted, later in the boot than its end", 1001 * hour, 50 * hour, "two", 3 * time.Hour},
		{"rebooted with a clock that was reset", 0, 0, "two", 4 * time.Hour},
		{"rebooted after its end", 1005 * hour, 0, "two", 0},
		{"the boot cannot be known", 1001 * hour, 11 * hour, "", 3 * time.Hour},
	} {
		wall, boot, id = step.wall, step.boot, step.id
		if got := c.left(s); got != step.want {
			t.Errorf("%s: got %v left, want %v", step.what, got, step.want)
		}
	}
	if got := c.left(&slot{since: wall}); got != 0 {
		t.Errorf("without a hold: got %v left, want 0", got)
	}
	id = "one"
	if got := c.left(&slot{since: wall, kept: c.hold(backends.Forever)}); got < 200*365*24*time.Hour {
		t.Errorf("a hold for ever: got %v left", got)
	}
}

func TestAHoldSurvivesAReboot(t *testing.T) {
	c := openAt(t, t.TempDir())
	req := request("l")
	req.Hold = time.Hour
	g, err := c.Acquire(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	release(t, c, g)
	c.clock.id = func() string { return "another boot" }
	c.clock.boot = func() int64 { return 0 }
	var busy *backends.BusyError
	if _, err := c.Acquire(t.Context(), request("l")); !errors.As(err, &busy) || !busy.Kept || busy.Left > time.Hour || busy.Left < 59*time.Minute {
		t.Errorf("Acquire after a reboot: got %v, want a slot that is kept for an hour", err)
	}
	wall := c.clock.wall
	c.clock.wall = func() int64 { return wall() + int64(2*time.Hour) }
	acquire(t, c, "l", 1)
}
