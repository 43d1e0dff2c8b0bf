package signals

import (
	"fmt"
	"os"
	"sync"

	"github.com/underlease/underlease/signals/guard"
)

// Now reads CLOCK_BOOTTIME.
func Now() Instant { return guard.Now() }

// Alarm wakes its reader up at an instant of CLOCK_BOOTTIME, which Go's own timers do not know: they stand still while the machine is
// suspended. It may wake too early, never too late; what is due follows from [Now].
type Alarm struct {
	fd int
	f  *os.File
	c  chan struct{}
	mu sync.Mutex
}

// NewAlarm makes an alarm that is not set.
func NewAlarm() (*Alarm, error) {
	fd, e := guard.NewTimer()
	if e != 0 {
		return nil, fmt.Errorf("cannot make a timer of CLOCK_BOOTTIME: %w", e)
	}
	a := &Alarm{fd: fd, f: os.NewFile(uintptr(fd), "alarm"), c: make(chan struct{}, 1)}
	go a.run(a.f)
	return a, nil
}

func (a *Alarm) run(f *os.File) {
	var b [8]byte
	for {
		if _, err := f.Read(b[:]); err != nil {
			return
		}
		select {
		case a.c <- struct{}{}:
		default:
		}
	}
}

// Set replaces the instant. [Never] disarms; the past fires at once.
func (a *Alarm) Set(at Instant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.f == nil {
		return
	}
	select { // what fired before belongs to the instant before
	case <-a.c:
	default:
	}
	_ = guard.SetTimer(a.fd, at) // a timer of ours cannot be refused
}

// C delivers one value for each time the alarm fires, unless the last one has not been read.
func (a *Alarm) C() <-chan struct{} { return a.c }

// Close ends the alarm.
func (a *Alarm) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.f != nil {
		a.f.Close()
		a.f = nil
	}
}
