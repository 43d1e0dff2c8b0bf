package guard

import (
	"syscall"
	"unsafe"
)

const (
	sysPidfdSendSignal = 424 // the same number on every architecture, as all since 5.0
	sysPidfdOpen       = 434

	clockBoottime    = 7
	tfdTimerAbstime  = 1
	prSetPdeathsig   = 1
	prSetName        = 15
	prSetSubreaper   = 36
	mclOnFault       = 4 // pages are locked once they are used, and none is read for it
	pAll             = 0
	pPid             = 1
	wStopped         = 0x2
	wExited          = 0x4
	wContinued       = 0x8
	cldContinued     = 6
	wNowait          = 0x01000000
	wAll             = 0x40000000
	fAddSeals        = 1033
	sealAll          = 0x1 | 0x2 | 0x4 | 0x8 // SEAL, SHRINK, GROW, WRITE
	sealSize         = 0x1 | 0x2 | 0x4
	mfdCloexec       = 0x1
	mfdAllowSealing  = 0x2
	mfdNoexecSeal    = 0x8
	soPeercred       = 17
	soType           = 3
	pollIn, pollOut  = 0x1, 0x4
	pollErr, pollHup = 0x8, 0x10
	maxTimerSeconds  = 1 << 30 // fits the timespec of 32-bit machines
	nanosecondsInOne = 1_000_000_000
	msgCmsgCloexec   = syscall.MSG_CMSG_CLOEXEC
	msgDontwait      = syscall.MSG_DONTWAIT
	msgNosignal      = syscall.MSG_NOSIGNAL
)

// Now reads CLOCK_BOOTTIME in nanoseconds. It cannot fail on a kernel that this program runs on (2.6.39).
func Now() int64 {
	var ts syscall.Timespec
	syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockBoottime, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

func retry(f func() syscall.Errno) syscall.Errno {
	for {
		if e := f(); e != syscall.EINTR {
			return e
		}
	}
}

// NewTimer opens a timer of CLOCK_BOOTTIME; a descriptor that is readable once it has fired.
func NewTimer() (int, syscall.Errno) {
	fd, _, e := syscall.RawSyscall(syscall.SYS_TIMERFD_CREATE, clockBoottime, syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	return int(fd), e
}

// SetTimer arms a timer of [NewTimer] for an instant; the past fires at once, and the largest one never.
func SetTimer(fd int, at int64) syscall.Errno {
	var spec struct{ interval, value syscall.Timespec }
	switch {
	case at/nanosecondsInOne > maxTimerSeconds: // disarmed
	case at <= 0:
		spec.value = syscall.NsecToTimespec(1)
	default:
		spec.value = syscall.NsecToTimespec(at)
	}
	_, _, e := syscall.RawSyscall6(syscall.SYS_TIMERFD_SETTIME, uintptr(fd), tfdTimerAbstime, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
	return e
}

// Subreaper makes the calling process inherit the orphans among its descendants.
func Subreaper() syscall.Errno {
	_, _, e := syscall.RawSyscall6(syscall.SYS_PRCTL, prSetSubreaper, 1, 0, 0, 0, 0)
	return e
}

func setName(name string) {
	b := [16]byte{}
	copy(b[:15], name)
	syscall.RawSyscall6(syscall.SYS_PRCTL, prSetName, uintptr(unsafe.Pointer(&b)), 0, 0, 0, 0)
}

// PidfdOpen opens a process, close-on-exec.
func PidfdOpen(pid int) (int, syscall.Errno) {
	fd, _, e := syscall.RawSyscall(sysPidfdOpen, uintptr(pid), 0, 0)
	return int(fd), e
}

// PidfdSignal signals the process that was opened, and no other that got its number later.
func PidfdSignal(fd int, sig syscall.Signal) syscall.Errno {
	_, _, e := syscall.RawSyscall6(sysPidfdSendSignal, uintptr(fd), uintptr(sig), 0, 0, 0, 0)
	return e
}

// memfd makes anonymous memory with a descriptor. Machines may refuse memory that could be executed (vm.memfd_noexec), old
// kernels the flag that says it will not be.
func memfd(name string) (int, syscall.Errno) {
	p, _ := syscall.BytePtrFromString(name)
	fd, _, e := syscall.RawSyscall(sysMemfdCreate, uintptr(unsafe.Pointer(p)), mfdCloexec|mfdNoexecSeal|mfdAllowSealing, 0)
	if e == syscall.EINVAL {
		fd, _, e = syscall.RawSyscall(sysMemfdCreate, uintptr(unsafe.Pointer(p)), mfdCloexec|mfdAllowSealing, 0)
	}
	return int(fd), e
}

func seal(fd int, seals uintptr) syscall.Errno { return fcntl(fd, fAddSeals, seals) }

func fcntl(fd int, cmd, arg uintptr) syscall.Errno {
	_, _, e := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), cmd, arg)
	return e
}

// cloexec returns the descriptor's flags: whether it is open, and whether it closes at exec.
func cloexec(fd int) (open, set bool) {
	r, _, e := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
	return e == 0, e == 0 && r&syscall.FD_CLOEXEC != 0
}

// Inherited says that a descriptor is open and does not close at exec. The Go runtime and its packages open nothing of the kind, so
// in our processes it means: inherited.
func Inherited(fd int) bool {
	open, set := cloexec(fd)
	return open && !set
}

// CloseInherited lets go of the command's descriptors, so that a reader of its output sees the end of file when the command closes it,
// and a lock that it holds is free when the command lets go of it: 0 and 1 become /dev/null, and what is inherited above 2
// is closed. Descriptor 2 stays: we have words to people.
func CloseInherited() {
	if null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0); err == nil {
		for fd := range uintptr(2) {
			syscall.RawSyscall(syscall.SYS_DUP3, uintptr(null), fd, 0)
		}
		syscall.Close(null)
	} else {
		syscall.Close(0)
		syscall.Close(1)
	}
	var fds []int
	if !eachNumber("/proc/self/fd", func(n int) { fds = append(fds, n) }) {
		for fd := 3; fd < openLimit(); fd++ {
			fds = append(fds, fd)
		}
	}
	for _, fd := range fds {
		if fd > 2 && Inherited(fd) {
			syscall.Close(fd)
		}
	}
}

// openLimit is above the highest number that a descriptor of this process can have, within reason.
func openLimit() int {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil || r.Cur > 1<<20 {
		return 1 << 20
	}
	return int(r.Cur)
}

// peek looks for a child that has ended and leaves it as it is. No pid: none has; ECHILD: there is no child at all.
func peek() (int, syscall.Errno) {
	var info [128]byte
	e := retry(func() syscall.Errno {
		_, _, e := syscall.RawSyscall6(syscall.SYS_WAITID, pAll, 0, uintptr(unsafe.Pointer(&info)),
			wExited|syscall.WNOHANG|wNowait|wAll, 0, 0)
		return e
	})
	if e != 0 {
		return 0, e
	}
	return int(*(*int32)(unsafe.Pointer(&info[infoPid]))), 0
}

// halt takes in, once for each time, that a child was stopped, or goes on, which is signal 0. It leaves one that has ended as it is.
func halt(pid int) (sig syscall.Signal, news bool) {
	var info [128]byte
	e := retry(func() syscall.Errno {
		_, _, e := syscall.RawSyscall6(syscall.SYS_WAITID, pPid, uintptr(pid), uintptr(unsafe.Pointer(&info)),
			wStopped|wContinued|syscall.WNOHANG|wAll, 0, 0)
		return e
	})
	at := func(o int) int32 { return *(*int32)(unsafe.Pointer(&info[o])) }
	if e != 0 || at(infoPid) == 0 {
		return 0, false
	}
	if at(8) == cldContinued {
		return 0, true
	}
	return syscall.Signal(at(infoPid + 8)), true // si_pid, si_uid, si_status
}

// Childless says that the kernel knows of no child of this process, living or dead.
func Childless() bool {
	_, e := peek()
	return e == syscall.ECHILD
}

// Reap collects one child without waiting for it.
func Reap(pid int) (syscall.WaitStatus, bool) {
	var ws syscall.WaitStatus
	for {
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG|wAll, nil)
		if err == syscall.EINTR {
			continue
		}
		return ws, err == nil && got == pid
	}
}

type pollfd struct {
	fd      int32
	events  int16
	revents int16
}

// poll waits for the descriptors; forever if wait is negative. It enters the kernel as a blocking call, so that the runtime can go on.
func poll(fds []pollfd, wait int64) {
	var ts *syscall.Timespec
	if wait >= 0 {
		t := syscall.NsecToTimespec(wait)
		ts = &t
	}
	_, _, e := syscall.Syscall6(syscall.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)), uintptr(unsafe.Pointer(ts)), 0, 0, 0)
	if e != 0 { // interrupted: nothing is known about the descriptors
		for i := range fds {
			fds[i].revents = 0
		}
	}
}

// send puts one message on a socket without waiting. With a descriptor, the receiver gets a copy of it.
func send(sock int, msg []byte, fds ...int) syscall.Errno {
	var oob []byte
	if len(fds) > 0 {
		oob = syscall.UnixRights(fds...)
	}
	for {
		_, err := syscall.SendmsgN(sock, msg, oob, nil, msgDontwait|msgNosignal)
		if err == nil {
			return 0
		}
		if e, ok := err.(syscall.Errno); ok && e != syscall.EINTR {
			return e
		}
	}
}

// peekMessage looks at the next message and leaves it where it is, with its descriptors.
func peekMessage(sock int, msg []byte) (n int, e syscall.Errno) {
	n, _, err := syscall.Recvfrom(sock, msg, msgDontwait|syscall.MSG_PEEK)
	e, _ = err.(syscall.Errno)
	return max(n, 0), e
}

// receive takes one message off a socket without waiting; n is 0 at the end of the connection. Descriptors close at exec.
func receive(sock int, msg []byte) (n int, fds []int, e syscall.Errno) {
	var oob [256]byte
	for {
		n, on, _, _, err := syscall.Recvmsg(sock, msg, oob[:], msgDontwait|msgCmsgCloexec)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			e, _ := err.(syscall.Errno)
			return 0, nil, e
		}
		if on > 0 {
			if all, err := syscall.ParseSocketControlMessage(oob[:on]); err == nil {
				for i := range all {
					if got, err := syscall.ParseUnixRights(&all[i]); err == nil {
						fds = append(fds, got...)
					}
				}
			}
		}
		return n, fds, 0
	}
}

// WaitEnded waits until a child has ended and leaves it as it is.
func WaitEnded(pid int) { waitid(pPid, pid) }

// WaitAny waits until any child has ended, leaves it as it is and returns its pid; 0 if there is no child.
func WaitAny() int { return waitid(pAll, 0) }

func waitid(kind, pid int) int {
	var info [128]byte
	e := retry(func() syscall.Errno {
		_, _, e := syscall.Syscall6(syscall.SYS_WAITID, uintptr(kind), uintptr(pid), uintptr(unsafe.Pointer(&info)), wExited|wNowait|wAll, 0, 0)
		return e
	})
	if e != 0 {
		return 0
	}
	return int(*(*int32)(unsafe.Pointer(&info[infoPid])))
}
