package file

import (
	"context"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// clock is the store's clock: this host's. Terms, versions and ages are counted by the wall clock, as every other
// store does; holds by the clock since the boot, which neither steps nor stands still during a suspend, and by the wall clock
// only over a reboot.
type clock struct {
	wall func() int64  // nanoseconds since 1970
	boot func() int64  // nanoseconds since the boot, suspends included
	id   func() string // of this boot, or empty where it cannot be known
}

func hostClock() clock {
	return clock{
		wall: func() int64 { return time.Now().UnixNano() },
		boot: func() int64 {
			var t unix.Timespec
			// Source: clock_gettime(2): fails only for a clock or an address that does not exist.
			_ = unix.ClockGettime(bootClock, &t)
			return t.Nano()
		},
		id: bootID,
	}
}

var bootID = sync.OnceValue(func() string {
	b, err := readSmall("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
})

// hold returns the end of a hold of that length.
func (c clock) hold(length time.Duration) kept {
	if length <= 0 {
		return kept{}
	}
	return kept{boot: c.id(), at: addClamped(c.boot(), length), wall: addClamped(c.wall(), length)}
}

func addClamped(a int64, d time.Duration) int64 {
	if sum := a + int64(d); sum >= a {
		return sum
	}
	return 1<<63 - 1
}

// left returns how long the slot stays taken by its hold. After a reboot the wall clock decides; it may have been set
// back meanwhile, and so no more is left than the hold's whole length.
func (c clock) left(s *slot) time.Duration {
	if s.kept == (kept{}) {
		return 0
	}
	if id := c.id(); id != "" && id == s.kept.boot {
		return time.Duration(max(0, s.kept.at-c.boot()))
	}
	length := s.kept.wall - s.since
	return time.Duration(max(0, min(s.kept.wall-c.wall(), length)))
}

// pause waits and reports whether the context is still alive. Below a millisecond it blocks the thread, because the
// runtime's own timers round up to that.
func pause(ctx context.Context, d time.Duration) bool {
	if d < time.Millisecond {
		shortSleep(int64(d))
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
