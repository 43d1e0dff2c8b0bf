package signals

import (
	"bytes"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"github.com/underlease/underlease/signals/guard"
)

// haltAfter is how long the command has to stay stopped before this process is stopped with it. Where both were stopped and go on together, the
// word of the stop is read first when it is over.
const haltAfter = 10 * time.Millisecond

// follow stops this process by the signal that has stopped the command: a shell that waits for this process has to see it, not before the
// command is stopped, and not at all if that does not heed ^Z. When this process goes on, so does the command. The stops are counted: of two
// that are read together the first is over.
func (g *Guardian) follow(sig syscall.Signal, stop int32) {
	g.halt.Lock()
	defer g.halt.Unlock()
	command := int(g.command.Load())
	if !stopped(command) {
		return
	}
	time.Sleep(haltAfter)
	if !stopped(command) || !g.runs() || g.halts.Load() != stop {
		return
	}
	guard.StopBy(sig)
	g.tell(guard.Order{Op: guard.OpResume, Arg: stop})
}

// stopped says whether a process is stopped.
func stopped(pid int) bool { return stateOf(pid) == 'T' }

// stateOf returns the letter of proc(5) for the state of a process, or zero when there is none.
func stateOf(pid int) byte {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	end := bytes.LastIndexByte(b, ')') // the name may contain anything
	if err != nil || end < 0 || end+2 >= len(b) {
		return 0
	}
	return b[end+2]
}

// runs says that the command was ordered to begin, and that neither a refusal nor its end is known.
func (g *Guardian) runs() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.started.Load() != 0 && !g.exited
}

// commanding says that there is a command that job control is about.
func commanding() bool {
	family.Lock()
	defer family.Unlock()
	for _, g := range family.guardians {
		if g.runs() {
			return true
		}
	}
	return false
}

// modes are the settings of the terminal as they were when the command was started. A command that we end has no chance to put back
// what it has changed, and a shell that sees an exit code of ours takes what it finds for what was wanted: it puts its own settings back
// only where a signal ended the job.
//
// Source: bash, jobs.c, wait_for: set_tty_state after WIFSIGNALED or WIFSTOPPED, else get_tty_state.
type modes struct{ was *syscall.Termios }

// save takes the settings down, if this process is in the foreground: in the background they are somebody else's.
func (m *modes) save() {
	m.was = nil
	onTerminal(func(fd int) {
		var t syscall.Termios
		if terminalGroup(fd) == syscall.Getpgrp() && ioctl(fd, syscall.TCGETS, unsafe.Pointer(&t)) == 0 {
			m.was = &t
		}
	})
}

// restore puts the settings back, if this process has the terminal, or nobody has: a command that led a process group of its own,
// as an interactive shell does, had it, and is gone.
func (m *modes) restore() {
	if m.was == nil {
		return
	}
	onTerminal(func(fd int) {
		group := terminalGroup(fd)
		if group != syscall.Getpgrp() && (group <= 1 || syscall.Kill(-group, 0) != syscall.ESRCH) {
			return
		}
		// Where nobody has the terminal, we are not in the foreground either: the kernel would stop us, unless the signal is blocked.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		const sigBlock, sigSetmask = 0, 2
		set, old := uint64(1)<<(syscall.SIGTTOU-1), uint64(0)
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigBlock, uintptr(unsafe.Pointer(&set)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
		_ = ioctl(fd, syscall.TCSETS, unsafe.Pointer(m.was)) // a terminal that is gone needs no settings
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&old)), 0, 8, 0, 0)
	})
}

// onTerminal calls f with our controlling terminal, if there is one. It is not kept open: the other side is to see the end when the
// command has closed it.
func onTerminal(f func(fd int)) {
	fd, err := syscall.Open("/dev/tty", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer syscall.Close(fd)
	f(fd)
}

// terminalGroup returns the process group that has the terminal, or zero where it is not known.
func terminalGroup(fd int) int {
	var group int32
	if ioctl(fd, syscall.TIOCGPGRP, unsafe.Pointer(&group)) != 0 {
		return 0
	}
	return int(group)
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) syscall.Errno {
	_, _, e := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	return e
}
