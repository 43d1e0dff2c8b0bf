//go:build linux && (amd64 || arm64)

package guard

import (
	"syscall"
	"unsafe"
)

// Written by ulentry, before anything else of this process has run.
var (
	entryIgnored  uint64
	entryBlocked  uint64
	entryFiles    [2]uint64
	entryClosed   uint32
	entryKnown    uint32
	entryNoteRoom [4]uint64 //nolint:unused // assembly writes to it: for what one system call returns
)

func entry() Entry {
	return Entry{Ignored: entryIgnored, Blocked: entryBlocked, Files: entryFiles, Closed: entryClosed, Known: entryKnown}
}

// rawVfork makes a clone(2) or clone3(2) that shares our memory and stack. It keeps its return address in a register: the child goes
// on first, and writes over the stack.
func rawVfork(trap, a1, a2 uintptr) (r1, err uintptr)

const (
	cloneVM        = 0x100
	cloneVfork     = 0x4000
	cloneIntoCgrp  = 0x200000000
	sysClone3      = 435
	sizeofClone3   = 88
	longestPidText = 10
)

// child is one process to be made. Everything is ready before the fork; from there on nothing is allocated and no stack grows.
type child struct {
	entry    *Entry
	env      []string
	pidNames []string // variables, with their =, that name the process which is to heed them
	oldPid   string   // where they have this value they get the child's
	setpgid  bool
	deathsig syscall.Signal
	cgroup   int // descriptor, or -1

	path       *byte
	argv, envv []*byte
	pids       [2]*[longestPidText + 1]byte // where the child writes its number
	clone3     struct {
		flags, pidfd, childTid, parentTid, exitSignal, stack, stackSize, tls, setTid, setTidSize, cgroup uint64
	}
	errno syscall.Errno // of the child, through the memory that it shares
}

// spawn forks and executes. The child is collected where it could not.
func (c *child) spawn(path string, args []string) (int, syscall.Errno) {
	var err error
	if c.path, err = syscall.BytePtrFromString(path); err != nil {
		return 0, syscall.EINVAL
	}
	if c.argv, err = syscall.SlicePtrFromStrings(args); err != nil {
		return 0, syscall.EINVAL
	}
	if c.envv, err = syscall.SlicePtrFromStrings(c.env); err != nil {
		return 0, syscall.EINVAL
	}
	n := 0
	for i, entry := range c.env {
		for _, name := range c.pidNames {
			if n < len(c.pids) && entry == name+c.oldPid {
				b := append([]byte(name), make([]byte, longestPidText+1)...)
				c.envv[i] = &b[0]
				c.pids[n] = (*[longestPidText + 1]byte)(unsafe.Pointer(&b[len(name)]))
				n++
			}
		}
	}
	pid, e := c.fork(uintptr(syscall.Getpid()))
	if e == 0 && c.errno != 0 {
		e = c.errno
		var ws syscall.WaitStatus
		_ = retry(func() syscall.Errno {
			_, err := syscall.Wait4(pid, &ws, wAll, nil)
			e, _ := err.(syscall.Errno)
			return e
		})
	}
	if e != 0 {
		return 0, e
	}
	return pid, 0
}

// fork is both sides of the fork. The parent sleeps until the child has executed, or has ended.
//
//go:noinline
//go:norace
//go:nosplit
func (c *child) fork(parent uintptr) (int, syscall.Errno) {
	all, old := ^uint64(0), uint64(0)
	const setMask = 2
	// No signal may run a handler of ours in the child: it would do so in our memory.
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&all)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	var pid, e uintptr
	if c.cgroup < 0 {
		pid, e = rawVfork(syscall.SYS_CLONE, cloneVM|cloneVfork|uintptr(syscall.SIGCHLD), 0)
	} else {
		c.clone3.flags, c.clone3.exitSignal, c.clone3.cgroup = cloneVM|cloneVfork|cloneIntoCgrp, uint64(syscall.SIGCHLD), uint64(c.cgroup)
		pid, e = rawVfork(sysClone3, uintptr(unsafe.Pointer(&c.clone3)), sizeofClone3)
	}
	if e == 0 && pid == 0 {
		c.become(parent)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&old)), 0, 8, 0, 0)
	return int(pid), syscall.Errno(e)
}

// become turns the child into the command. It returns never.
//
//go:noinline
//go:norace
//go:nosplit
func (c *child) become(parent uintptr) {
	// Handlers would return to their defaults at exec; but the mask is lifted before it.
	var act sigaction
	for sig := uintptr(1); sig <= 64; sig++ {
		act.handler = uintptr(c.entry.Ignored >> (sig - 1) & 1) // SIG_IGN is 1, SIG_DFL 0
		syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0)
	}
	var e syscall.Errno
	if c.setpgid {
		_, _, e = syscall.RawSyscall(syscall.SYS_SETPGID, 0, 0, 0)
	}
	if e == 0 && c.deathsig != 0 {
		_, _, e = syscall.RawSyscall6(syscall.SYS_PRCTL, prSetPdeathsig, uintptr(c.deathsig), 0, 0, 0, 0)
		if ppid, _, _ := syscall.RawSyscall(syscall.SYS_GETPPID, 0, 0, 0); ppid != parent {
			e = syscall.ESRCH // it died before it could be heard of
		}
	}
	for fd := range uintptr(3) {
		if c.entry.Closed>>fd&1 != 0 {
			syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
		}
	}
	syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&c.entry.Files)), 0, 0, 0)
	pid, _, _ := syscall.RawSyscall(syscall.SYS_GETPID, 0, 0, 0)
	for _, room := range &c.pids {
		if room != nil {
			writeNumber(room, pid)
		}
	}
	if e == 0 {
		const setMask = 2
		syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&c.entry.Blocked)), 0, 8, 0, 0)
		_, _, e = syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(c.path)),
			uintptr(unsafe.Pointer(&c.argv[0])), uintptr(unsafe.Pointer(&c.envv[0])))
	}
	c.errno = e
	for { // an emulator that made a plain fork of it loses the number: the code is what execvp's callers use
		code := uintptr(126)
		if e == syscall.ENOENT {
			code = 127
		}
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, code, 0, 0)
	}
}

// writeNumber writes n in decimal, and zero bytes behind it.
//
//go:norace
//go:nosplit
func writeNumber(room *[longestPidText + 1]byte, n uintptr) {
	digits := 0
	for m := n; ; m /= 10 {
		digits++
		if m < 10 {
			break
		}
	}
	for i := len(room) - 1; i >= 0; i-- {
		if i >= digits {
			room[i] = 0
			continue
		}
		room[i] = byte('0' + n%10)
		n /= 10
	}
}
