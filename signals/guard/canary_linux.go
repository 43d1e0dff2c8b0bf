package guard

import (
	"syscall"
	"unsafe"
)

const sysCloseRange = 436

// The canary is a child of the guardian that stays in the caller's process group when the command is in it too. It does nothing but
// tell the guardian which signals it gets: those were sent to the whole group, so the command has them already, and the
// wrapper's copy must not be passed on. No field of a signal says so.
//
// It is a plain fork without exec: all signals are blocked before it, and the child runs nothing but raw system calls, on
// pages that it shares with the guardian.

// hatch forks the canary and returns its pid and the pipe that it writes to.
func hatch() (pid, pipe int, e syscall.Errno) {
	var p [2]int32
	if _, _, e = syscall.RawSyscall(syscall.SYS_PIPE2, uintptr(unsafe.Pointer(&p)), syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0); e != 0 {
		return 0, -1, e
	}
	pid, e = forkCanary(uintptr(p[1]), uintptr(syscall.Getpid()))
	syscall.Close(int(p[1]))
	if e != 0 {
		syscall.Close(int(p[0]))
		return 0, -1, e
	}
	return pid, int(p[0]), 0
}

//go:noinline
//go:norace
func forkCanary(pipe, parent uintptr) (int, syscall.Errno) {
	all, old := ^uint64(0), uint64(0)
	const setMask = 2
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&all)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	pid, _, e := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && pid == 0 {
		canary(pipe, parent)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&old)), 0, 8, 0, 0)
	return int(pid), e
}

// canary is the life of the child. It must not need a larger stack, allocate, or enter the scheduler.
//
//go:nosplit
//go:norace
func canary(pipe, parent uintptr) {
	syscall.RawSyscall6(syscall.SYS_PRCTL, prSetPdeathsig, uintptr(syscall.SIGKILL), 0, 0, 0, 0)
	if pid, _, _ := syscall.RawSyscall(syscall.SYS_GETPPID, 0, 0, 0); pid != parent {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
	// It holds nothing open: neither the command's descriptors nor the wrapper's socket nor a lock.
	if pipe != 3 {
		syscall.RawSyscall(syscall.SYS_DUP3, pipe, 3, 0)
	}
	for fd := range uintptr(3) {
		syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
	}
	if _, _, e := syscall.RawSyscall(sysCloseRange, 4, ^uintptr(0)>>1&0x7fffffff, 0); e != 0 { // before 5.9
		for fd := uintptr(4); fd < 4096; fd++ {
			syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
		}
	}
	all := ^uint64(0)
	var info [128]byte
	for {
		if _, _, e := syscall.RawSyscall6(syscall.SYS_RT_SIGTIMEDWAIT, uintptr(unsafe.Pointer(&all)), uintptr(unsafe.Pointer(&info)), 0, 8, 0, 0); e == 0 {
			syscall.RawSyscall(syscall.SYS_WRITE, 3, uintptr(unsafe.Pointer(&info)), CapturedSize)
		}
	}
}

// dismiss ends the canary. It waits for nothing: what is due does not depend on a process that the kernel, or a debugger, may hold for a
// while. Until [guardian.collect] has taken it in, it is a child that does not count.
func (g *guardian) dismiss() {
	if g.canary != 0 {
		syscall.Kill(g.canary, syscall.SIGKILL) // ours, and not collected: the number is its own
	}
}

func (g *guardian) canaryGone() {
	syscall.Close(g.song)
	g.canary, g.song = 0, -1
	g.page.canary.Store(0)
}
