package guard

import (
	"slices"
	"strconv"
	"syscall"
)

// What a process is started with, and the Go runtime changes before the first line of Go runs: it installs handlers for signals that
// were ignored (all but HUP, INT and those of job control), unblocks signals, opens /dev/null in place of closed standard
// descriptors and raises the limit of open files. The command is to get all of it as it was.
//
// An executable that is linked with -ldflags "-E ulentry" starts in a routine of ours, before the runtime, that takes it down. Without
// it (go install), or on an architecture that has no such routine, nothing is recorded, and the command gets what Go leaves.

// Entry is how a process was started.
type Entry struct {
	Ignored uint64 // signals, from bit 0 for signal 1
	Blocked uint64
	Files   [2]uint64 // RLIMIT_NOFILE, soft and hard
	Closed  uint32    // of descriptors 0 to 2, by bit
	Known   uint32    // 1 where it was recorded
	Pid     int32     // its number, recorded or not
}

func (e *Entry) ignored(sig syscall.Signal) bool { return e.Ignored>>(uint(sig)-1)&1 != 0 }

// AtEntry returns how this process was started.
func AtEntry() Entry {
	e := entry()
	e.Pid = int32(syscall.Getpid())
	return e
}

// Exact says that this executable records how it was started.
func Exact() bool { e := entry(); return e.Known != 0 }

// ignoreAgain ignores what was ignored at entry, so that a signal that the command is not to heed does not end its wrapper either. Left
// out is what the runtime needs for itself, and CHLD: a process that ignores it cannot wait for its children.
//
// Between the start of the runtime and here, less than a millisecond, such a signal still ends this process, as Go has it.
func ignoreAgain() {
	e := entry()
	if e.Ignored == 0 {
		return
	}
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if !e.ignored(sig) {
			continue
		}
		switch sig {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGPROF,
			syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGSYS:
		default:
			_ = rtSigaction(sig, &sigaction{handler: sigIgn}, nil)
		}
	}
}

// forkExec is [syscall.ForkExec] for a child that starts as the wrapper was started. What it does not know how to do, ForkExec does, and
// the child gets what Go leaves of signals and descriptors: ignored is what our caller was started with, as far as Go has kept that.
func forkExec(e *Entry, ignored uint64, path string, args []string, attr *syscall.ProcAttr) (int, syscall.Errno) {
	s := attr.Sys
	plain := syscall.SysProcAttr{Pdeathsig: s.Pdeathsig, Setpgid: s.Setpgid, UseCgroupFD: s.UseCgroupFD, CgroupFD: s.CgroupFD}
	if e.Known == 0 || !samePlain(s, &plain) {
		defer letIgnore(ignored)()
		pid, err := syscall.ForkExec(path, args, attr)
		if err == nil {
			return pid, 0
		}
		errno, ok := err.(syscall.Errno)
		if !ok {
			errno = syscall.EINVAL
		}
		return 0, errno
	}
	c := child{entry: e, env: attr.Env, setpgid: s.Setpgid, deathsig: s.Pdeathsig, cgroup: -1}
	if s.UseCgroupFD {
		c.cgroup = s.CgroupFD
	}
	// sd_listen_fds(3), sd_watchdog_enabled(3): who is not the process of that number does not heed what it was given. The id of a pidfd
	// says the same once more; it is only heeded where it is set, and the command's is not known before it runs.
	c.pidNames, c.oldPid = []string{"LISTEN_PID=", "WATCHDOG_PID="}, strconv.Itoa(int(e.Pid))
	if slices.Contains(c.env, "LISTEN_PID="+c.oldPid) {
		c.env = slices.DeleteFunc(slices.Clone(c.env), func(kv string) bool { return len(kv) > 14 && kv[:15] == "LISTEN_PIDFDID=" })
	}
	return c.spawn(path, args)
}

// ignoredNow returns the signals that this process ignores: HUP and INT among them, if they were ignored at its start.
func ignoredNow() (set uint64) {
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if Ignored(sig) {
			set |= 1 << (sig - 1)
		}
	}
	return set
}

// letIgnore ignores signals that are captured, so that a child inherits that, until the function that it returns is called.
func letIgnore(set uint64) (captureAgain func()) {
	each(set, func(sig syscall.Signal) { _ = rtSigaction(sig, &sigaction{handler: sigIgn}, nil) })
	return func() {
		each(set, func(sig syscall.Signal) { _ = captureSignal(sig, new(sigaction)) })
	}
}

func each(set uint64, f func(syscall.Signal)) {
	for sig := syscall.Signal(1); set != 0 && sig <= 64; sig++ {
		if set>>(sig-1)&1 != 0 {
			f(sig)
		}
	}
}

// samePlain says that nothing but what plain has is asked for.
func samePlain(s, plain *syscall.SysProcAttr) bool {
	return s.Chroot == "" && s.Credential == nil && !s.Ptrace && !s.Setsid && s.Pgid == 0 && !s.Setctty && !s.Noctty && !s.Foreground &&
		s.Cloneflags == 0 && s.Unshareflags == 0 && s.UidMappings == nil && s.GidMappings == nil && len(s.AmbientCaps) == 0 &&
		s.PidFD == nil && plain.Setpgid == s.Setpgid
}
