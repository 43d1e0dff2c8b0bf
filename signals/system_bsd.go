//go:build darwin || freebsd

package signals

import (
	"fmt"
	"os"
	ossignal "os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Guardian is the wrapper's view of the process that is the parent of the command. It implements runner.Tree.
type Guardian = portableGuardian

const portableSuffix = ""

// Possible says why an isolation that was asked for cannot be had here; nil for those that take what there is.
func (i Isolation) Possible() error { return possiblePortable(i) }

// Launch starts a guardian. It takes a few milliseconds until it listens, which pass beside whatever the caller does next.
func Launch(opt Options) (*Guardian, error) { return launchPortable(opt) }

// Wanted says whether a command line, without the program's name, will want a guardian.
func Wanted(args []string) bool {
	return len(args) > 2 && args[0] == "run" && slices.Contains(args, "--")
}

// Terminal says whether this process has a controlling terminal. With one, the command stays in the caller's process group, so that job control
// works as without us; without one it gets a group of its own, which can be killed as a whole.
func Terminal() bool {
	fd, err := syscall.Open("/dev/tty", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err == nil {
		syscall.Close(fd)
	}
	return err == nil
}

// portCaught is what a guardian must not be ended or stopped by.
var portCaught = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGPIPE, syscall.SIGALRM, syscall.SIGTERM, syscall.SIGTSTP, syscall.SIGTTIN,
	syscall.SIGTTOU, syscall.SIGIO, syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGVTALRM, syscall.SIGUSR1, syscall.SIGUSR2,
}

// Now reads CLOCK_MONOTONIC. On macOS it goes on while the machine sleeps (clock_gettime(3)); on FreeBSD no clock does that but the wall
// clock, which anybody may set (the commit message of FreeBSD's 108de784513d says so): a suspend is noticed when the next
// renewal is refused.
func Now() Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(fmt.Sprintf("there is no CLOCK_MONOTONIC: %v", err))
	}
	return ts.Nano()
}

// Alarm wakes its reader up at an instant of [Now]. It may wake too early, never more than a second too late after a sleep of the machine;
// what is due follows from Now.
type Alarm struct {
	c    chan struct{}
	set  chan Instant
	done chan struct{}
	once sync.Once
}

// NewAlarm makes an alarm that is not set. The error is always nil.
func NewAlarm() (*Alarm, error) {
	a := &Alarm{c: make(chan struct{}, 1), set: make(chan Instant), done: make(chan struct{})}
	go a.run()
	return a, nil
}

func (a *Alarm) run() {
	at := Never
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		select {
		case at = <-a.set:
		case <-t.C:
		case <-a.done:
			return
		}
		now := Now()
		sleep := time.Hour
		switch {
		case now >= at:
			at = Never
			select {
			case a.c <- struct{}{}:
			default:
			}
		case at != Never: // Go's own timers stand still while the machine sleeps
			sleep = min(time.Duration(at-now), longestSleep)
		}
		t.Reset(sleep)
	}
}

// Set replaces the instant. [Never] disarms; the past fires at once.
func (a *Alarm) Set(at Instant) {
	select {
	case a.set <- at:
	case <-a.done:
	}
}

// C delivers one value for each time the alarm fires, unless the last one has not been read.
func (a *Alarm) C() <-chan struct{} { return a.c }

// Close ends the alarm.
func (a *Alarm) Close() { a.once.Do(func() { close(a.done) }) }

// Listen begins to catch the signals that are passed on to the command, and returns them as they come. Those that were ignored when this
// process was started are left ignored, as far as the Go runtime has kept that. Stop restores what was.
func Listen() (got <-chan syscall.Signal, stop func()) {
	caught := []syscall.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGALRM, syscall.SIGTERM, syscall.SIGIO, syscall.SIGXCPU, syscall.SIGXFSZ,
		syscall.SIGVTALRM, syscall.SIGUSR1, syscall.SIGUSR2,
	}
	if !Terminal() { // else job control is the shell's business with both of us
		caught = append(caught, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGCONT, syscall.SIGWINCH)
	}
	in := make(chan os.Signal, 64)
	for _, sig := range caught {
		if !ossignal.Ignored(sig) {
			ossignal.Notify(in, sig)
		}
	}
	pipe := make(chan os.Signal, 1) // a write to a broken pipe is not to end us
	ossignal.Notify(pipe, syscall.SIGPIPE)
	out, done := make(chan syscall.Signal, 64), make(chan struct{})
	go func() {
		for {
			select {
			case s := <-in:
				select {
				case out <- s.(syscall.Signal):
				case <-done:
					return
				}
			case <-done:
				return
			}
		}
	}()
	return out, sync.OnceFunc(func() { ossignal.Stop(in); ossignal.Stop(pipe); close(done) })
}

// DieBy ends this process by a signal, so that whoever waits for it sees what became of the command. Where the Go runtime would write a
// report instead, and where the signal ends nobody, it exits with 128+n.
func DieBy(sig syscall.Signal) {
	switch sig {
	case syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL, syscall.SIGPIPE, syscall.SIGALRM, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGVTALRM:
		unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) // the command left its own
		ossignal.Reset(sig)
		if os.Getpid() != 1 && syscall.Kill(os.Getpid(), sig) == nil {
			time.Sleep(time.Second) // it is delivered before that
		}
	default:
	}
	os.Exit(128 + int(sig))
}

// NewSocket returns a word that leads nowhere: on this system a guardian answers no checks, and [Ask] says so.
func NewSocket() string { return "none" }

// Ask always fails: on this system a guardian answers no checks.
func Ask(string) (Standing, error) { return Standing{}, &AskError{"answers no checks on this system"} }

// Exact says no: on this system the command gets the signals that Go leaves.
func Exact() bool { return false }
