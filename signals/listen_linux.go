package signals

import (
	"os"
	ossignal "os/signal"
	"sync"
	"syscall"

	"github.com/underlease/underlease/signals/guard"
)

// when says under which condition a signal to the wrapper is passed on.
type when int

const (
	always   when = iota + 1
	ownGroup      // only where the command has a process group of its own; else the sender reaches both
)

// forwarded is every signal that is passed on to the command, with the reason for what is special about it. What is missing is not passed
// on: KILL and STOP cannot be caught; CHLD is about our children; URG and PROF are the Go runtime's; 32 to 34 are the C
// libraries'. The faults (ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS) tell the process that gets them about its own bug; they are
// not passed on, and end us as they would end any process; the guardian then stops the command.
var forwarded = []struct {
	sig  syscall.Signal
	when when
}{
	{syscall.SIGHUP, always},
	{syscall.SIGINT, always},  // from a terminal the command gets it by itself: see reached
	{syscall.SIGQUIT, always}, // the same
	{syscall.SIGUSR1, always},
	{syscall.SIGUSR2, always},
	{syscall.SIGPIPE, always}, // from others; our own writes to broken pipes are sorted out
	{syscall.SIGALRM, always},
	{syscall.SIGTERM, always},
	{syscall.SIGSTKFLT, always},
	{syscall.SIGXCPU, always}, // the limits of the wrapper are the command's too
	{syscall.SIGXFSZ, always},
	{syscall.SIGVTALRM, always},
	{syscall.SIGIO, always},
	{syscall.SIGPWR, always},
	{syscall.SIGTSTP, always},   // the wrapper is stopped when the command is: see follow
	{syscall.SIGTTIN, ownGroup}, // with a terminal they are for whoever used it, and for all of the group
	{syscall.SIGTTOU, ownGroup},
	{syscall.SIGCONT, ownGroup},
	{syscall.SIGWINCH, ownGroup}, // a terminal tells its whole foreground group
}

// The first real-time signal that no library claims, and the last one.
const (
	firstRealTime syscall.Signal = 35
	lastRealTime  syscall.Signal = 64
)

// Listen begins to catch the signals that are passed on to the command, and returns them as they come, each delivery once. Those that
// were ignored when this process was started are left ignored, as far as the Go runtime has kept that: HUP, INT and
// job control. From now on a write to a broken pipe does not end this process. Stop restores what was.
//
// Which of them the command has got already, from the same sender, is decided in [Guardian.Forward].
func Listen() (got <-chan syscall.Signal, stop func()) {
	in, e := guard.Capture()
	c := make(chan syscall.Signal, 64)
	if e != 0 { // no descriptor left: without the sender of a signal there are only the signals
		return listenPlainly(c)
	}
	// The runtime ends the process on EPIPE from descriptor 1 or 2, unless somebody asked for the signal.
	pipe := make(chan os.Signal, 1)
	ossignal.Notify(pipe, syscall.SIGPIPE)
	var undo []func()
	each(func(sig syscall.Signal) {
		if u, e := guard.CaptureSignal(sig); e == 0 {
			undo = append(undo, u)
		}
	})
	f := os.NewFile(uintptr(in), "signals")
	done := make(chan struct{})
	go func() {
		self := os.Getpid()
		var b [guard.CapturedSize]byte
		for {
			n, err := f.Read(b[:])
			if err != nil || n != len(b) {
				return
			}
			s := guard.ParseCaptured(b[:])
			if s.Signal == syscall.SIGPIPE && (s.Pid == self || s.FromKernel()) {
				continue // our own write
			}
			if s.Signal == syscall.SIGTSTP && !commanding() {
				guard.StopBy(s.Signal)
				continue
			}
			deliveries.note(s)
			select {
			case c <- s.Signal:
			case <-done:
				return
			}
		}
	}()
	return c, sync.OnceFunc(func() {
		for _, u := range undo {
			u()
		}
		ossignal.Stop(pipe)
		close(done)
		f.Close()
	})
}

// each calls f for the signals that are passed on in this process.
func each(f func(syscall.Signal)) {
	shared := Terminal()
	try := func(sig syscall.Signal) {
		if !guard.Ignored(sig) {
			f(sig)
		}
	}
	for _, s := range forwarded {
		if s.when == always || !shared {
			try(s.sig)
		}
	}
	for sig := firstRealTime; sig <= lastRealTime; sig++ {
		try(sig)
	}
}

func listenPlainly(c chan syscall.Signal) (<-chan syscall.Signal, func()) {
	in := make(chan os.Signal, 64)
	shared := Terminal()
	each(func(sig syscall.Signal) {
		if sig != syscall.SIGPIPE && (!shared || sig != syscall.SIGTSTP) { // that stops us by itself
			ossignal.Notify(in, sig)
		}
	})
	done := make(chan struct{})
	go func() {
		for {
			select {
			case s := <-in:
				select {
				case c <- s.(syscall.Signal):
				case <-done:
					return
				}
			case <-done:
				return
			}
		}
	}()
	return c, sync.OnceFunc(func() { ossignal.Stop(in); close(done) })
}

// deliveries remembers, for signals that were delivered and not yet passed on, whether their sender reached the whole process group.
var deliveries ledger

type ledger struct {
	mu   sync.Mutex
	list []delivery
}

type delivery struct {
	sig   syscall.Signal
	at    Instant
	group bool
}

// note takes a delivery down. The kernel sends INT, QUIT and TSTP from a terminal to its whole foreground group; and HUP when the
// terminal goes, but to the session's leader alone if there is one.
func (l *ledger) note(s guard.Captured) {
	d := delivery{sig: s.Signal, at: Now()}
	if s.FromKernel() {
		switch s.Signal {
		case syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTSTP:
			d.group = true
		case syscall.SIGHUP:
			sid, _, _ := syscall.RawSyscall(syscall.SYS_GETSID, 0, 0, 0)
			d.group = int(sid) != os.Getpid()
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, d)
	if len(l.list) > 256 { // nobody passes anything on
		l.list = l.list[1:]
	}
}

// take forgets the oldest delivery of a signal and returns it.
func (l *ledger) take(sig syscall.Signal) (delivery, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, d := range l.list {
		if d.sig == sig {
			l.list = append(l.list[:i], l.list[i+1:]...)
			return d, true
		}
	}
	return delivery{}, false
}

// reached says that the command, in our process group since the given instant, has got the signal by itself.
func reached(sig syscall.Signal, since Instant) bool {
	d, ok := deliveries.take(sig)
	return ok && d.group && d.at >= since
}
