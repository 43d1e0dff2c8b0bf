//go:build darwin || freebsd

package file

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootClock goes on while the machine sleeps on macOS, and stands still on FreeBSD.
const bootClock = unix.CLOCK_MONOTONIC

func shortSleep(d int64) { time.Sleep(time.Duration(d)) }

// endIfStopped does nothing: a process cannot be proven to be the one that was recorded.
func (p process) endIfStopped() {}
