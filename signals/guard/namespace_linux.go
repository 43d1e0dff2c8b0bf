package guard

import (
	"errors"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

// InitName is the whole command line of the first process of a namespace, and the name that process lists show.
const InitName = "ul-init"

// A PID namespace dies with its first process, in the kernel: that is what makes it stronger than a guardian. The guardian's child is
// then not the command but this first process, which executes our binary again, is killed by the kernel when the guardian
// ends, whatever ended it (PR_SET_PDEATHSIG), and does three things: it mounts a /proc of its namespace, starts the command,
// which thereby is not process 1 with its own rules for signals, and collects what ends. How the command ended it tells the
// guardian in a message. It passes nothing on: the guardian has a pidfd of the command.

// Enter executes this binary as the first process of a new PID namespace, with a mount namespace of its own. Without the right to make these,
// it makes a user namespace first, in which the caller's user and group are what they were. The first process sets the namespace up and answers
// [Ready] or [Refused] on the returned socket, and ends when that is closed.
func Enter() (pid, sock int, e syscall.Errno) {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		e, _ = err.(syscall.Errno)
		return 0, -1, e
	}
	defer syscall.Close(pair[1])
	if e = Send(pair[0], Order{Op: OpHello}); e == 0 {
		attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
		err = syscall.EPERM
		uid, gid := syscall.Geteuid(), syscall.Getegid()
		if uid == 0 {
			pid, err = fork(InitName, pair[1], attr)
		}
		if errors.Is(err, syscall.EPERM) {
			attr.Cloneflags |= syscall.CLONE_NEWUSER
			attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
			attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
			if uid != 0 {
				attr.AmbientCaps = []uintptr{capSysAdmin} // an exec would lose it, and /proc is mounted after that
			}
			pid, err = fork(InitName, pair[1], attr)
		}
		if no, ok := err.(syscall.Errno); ok {
			e = no
		} else if err != nil {
			e = syscall.EINVAL
		}
	}
	if e != 0 {
		syscall.Close(pair[0])
		return 0, -1, e
	}
	return pid, pair[0], 0
}

const capSysAdmin = 21 // include/uapi/linux/capability.h

// NextReport waits for the next report of a namespace's first process. EPIPE: it has ended.
func NextReport(sock int) (r Report, fds []int, e syscall.Errno) {
	for {
		fds := []pollfd{{fd: int32(sock), events: pollIn}}
		poll(fds, -1)
		if fds[0].revents == 0 {
			continue
		}
		var b [ReportSize]byte
		n, got, e := receive(sock, b[:])
		if e == syscall.EAGAIN {
			continue
		}
		r, ok := ParseReport(b[:n])
		if e == 0 && (n == 0 || !ok) {
			e = syscall.EPIPE
		}
		return r, got, e
	}
}

// initial is the state of a namespace's first process.
type initial struct {
	sock, signals int
	ignored       uint64 // at the guardian's start, as far as the runtime has kept that
	pid           int    // of the command; 0 before it, -1 after it
}

// runInit is the life of a namespace's first process. Its end is the end of everything in the namespace.
func runInit() int {
	runtime.LockOSThread() // PR_SET_PDEATHSIG of the command is about this thread
	setName(InitName)
	g := guardian{wrapper: syscall.Getppid()} // 0: outside of the namespace
	hello, _, ok, _ := g.find()
	if syscall.Getpid() != 1 || !ok || hello.Op != OpHello {
		say("underlease: " + InitName + " is started by underlease itself, not by people\n")
		return exitRefused
	}
	n := &initial{sock: g.sock}
	var e syscall.Errno
	if n.signals, e = Capture(); e == 0 {
		n.ignored = ignoredNow()
		g.capture()
		heedNoFault()
		e = mountProc()
	}
	dropAmbient()
	// Again, now that no change of rights can clear it any more; an end of the guardian before this one shows at the socket.
	syscall.RawSyscall6(syscall.SYS_PRCTL, prSetPdeathsig, uintptr(syscall.SIGKILL), 0, 0, 0, 0)
	if e != 0 {
		n.tell(&Report{Kind: Refused, Errno: e})
		return exitRefused
	}
	n.tell(&Report{Kind: Ready})
	for n.obey() && n.collect() {
		fds := []pollfd{{fd: int32(n.signals), events: pollIn}, {fd: int32(n.sock), events: pollIn}}
		poll(fds, -1)
		if fds[0].revents != 0 {
			var b [64 * CapturedSize]byte
			syscall.Read(n.signals, b[:]) // SIGCHLD has done its duty by waking us
		}
	}
	return 0
}

// heedNoFault restores the default actions of the signals that tell a process of its own faults. Sent by a process of the namespace they are
// then nothing to its first process, as the kernel protects that; a fault of our own still ends it.
func heedNoFault() {
	for _, sig := range [...]syscall.Signal{
		syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGSYS,
	} {
		_ = Default(sig) // none of them can be refused
	}
}

// mountProc gives the namespace a /proc of its own. Mounts from outside go on to appear here; ours appear nowhere else.
func mountProc() syscall.Errno {
	err := syscall.Mount("", "/", "", syscall.MS_SLAVE|syscall.MS_REC, "")
	if err == nil {
		err = syscall.Mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, "")
	}
	e, _ := err.(syscall.Errno)
	return e
}

// dropAmbient gives back the right that Enter has let through the exec, for this process and thereby for the command.
func dropAmbient() {
	if syscall.Geteuid() == 0 {
		return // nothing was let through
	}
	const (
		prCapAmbient = 47
		clearAll     = 4
		version3     = 0x20080522
	)
	syscall.RawSyscall6(syscall.SYS_PRCTL, prCapAmbient, clearAll, 0, 0, 0, 0)
	header := struct {
		version uint32
		pid     int32
	}{version: version3}
	var none [2]struct{ effective, permitted, inheritable uint32 }
	syscall.RawSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none)), 0)
}

func (n *initial) tell(r *Report, fds ...int) {
	_ = send(n.sock, r.bytes(), fds...) // a guardian that is gone shows at the socket
}

// obey starts the command when it is told to; false when the guardian is gone.
func (n *initial) obey() bool {
	for {
		var b [orderSize]byte
		size, fds, e := receive(n.sock, b[:])
		if e == syscall.EAGAIN {
			return true
		}
		o, ok := parseOrder(b[:size])
		if e != 0 || !ok || o.Op != OpStart || n.pid != 0 || len(fds) != 1 {
			return false
		}
		if !n.start(fds[0], o.Arg == 1) {
			return false
		}
	}
}

func (n *initial) start(sealed int, shared bool) bool {
	c, mapped, ok := unseal(sealed)
	syscall.Close(sealed)
	if !ok {
		n.tell(&Report{Kind: Refused, Errno: syscall.ENOMEM})
		return false
	}
	pid, e := execute(&c, n.ignored, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: !shared})
	syscall.Munmap(mapped)
	fd := -1
	if e == 0 {
		fd, e = PidfdOpen(pid)
	}
	if e != 0 {
		n.tell(&Report{Kind: Refused, Errno: e})
		return false // a command without a descriptor dies with us
	}
	n.pid = pid
	leave(shared) // what the terminal says is for the command
	n.tell(&Report{Kind: Started}, fd)
	syscall.Close(fd)
	CloseInherited()
	_ = syscall.Dup3(0, 2, syscall.O_CLOEXEC) // it has no words for people
	if syscall.Geteuid() == 0 {
		protect()
	}
	// Once the command is collected nobody can say any more which pid it has outside.
	fds := []pollfd{{fd: int32(n.sock), events: pollIn}}
	for fds[0].revents == 0 {
		poll(fds, -1)
	}
	var b [orderSize]byte
	size, _, e := receive(n.sock, b[:])
	return e == 0 && size > 0
}

// collect takes in what has ended, tells of stops of the command, and says whether anything is left to wait for.
func (n *initial) collect() bool {
	for n.pid > 0 {
		sig, news := halt(n.pid)
		if !news {
			break
		}
		r := &Report{Kind: Halted, At: Now()}
		if sig != 0 {
			r.Status = stoppedBy(sig)
		}
		n.tell(r)
	}
	for {
		pid, e := peek()
		if e == syscall.ECHILD && n.pid != 0 {
			return false
		}
		if e != 0 || pid == 0 {
			return true
		}
		ws, _ := Reap(pid)
		if pid == n.pid {
			n.pid = -1
			alone := uint32(0)
			if Childless() {
				alone = 1
			}
			n.tell(&Report{Kind: Exited, Status: ws, At: Now(), Note: alone})
		}
	}
}

// inside is the guardian's view of a namespace.
type inside struct {
	pid  int // of its first process; 0 for none
	sock int // -1 for none
}

// enter starts the namespace, and the command in it, if there is time for it.
func (g *guardian) enter(sealed int) (pid int, e syscall.Errno, isolation, late bool) {
	heed := letIgnore(g.ignored) // it is handed down through that process, by those of a runtime that keeps it
	g.in.pid, g.in.sock, e = Enter()
	heed()
	if e != 0 {
		g.in = inside{sock: -1}
		return 0, e, true, false
	}
	r, _, e := NextReport(g.in.sock)
	switch {
	case e != 0:
		isolation = true
	case r.Kind != Ready:
		e, isolation = r.Errno, true
	case g.tooLate():
		late = true
	default:
		o := Order{Op: OpStart}
		if g.shared {
			o.Arg = 1
		}
		if e = Send(g.in.sock, o, sealed); e != 0 {
			break
		}
		var fds []int
		if r, fds, e = NextReport(g.in.sock); e == 0 && r.Kind != Started {
			e = r.Errno
		}
		if e == 0 && len(fds) == 1 {
			g.pidFd = fds[0]
			if pid = pidOf(g.pidFd); pid == 0 {
				e = syscall.ESRCH
			} else {
				e = Send(g.in.sock, Order{Op: OpLook})
			}
		}
	}
	if e != 0 || late {
		g.endInside()
		pid = 0
	}
	return pid, e, isolation, late
}

// endInside ends the namespace and waits for its end.
func (g *guardian) endInside() {
	syscall.Kill(g.in.pid, syscall.SIGKILL)
	WaitEnded(g.in.pid)
	Reap(g.in.pid)
	syscall.Close(g.in.sock)
	g.in = inside{sock: -1}
	if g.pidFd >= 0 {
		syscall.Close(g.pidFd)
		g.pidFd = -1
	}
}

// pidOf returns the pid, in our namespace, of the process that a pidfd is of; 0 where it cannot be known.
func pidOf(fd int) (pid int) {
	var w Walk
	const field = "\nPid:"
	b := w.read([]byte("/proc/self/fdinfo/" + strconv.Itoa(fd)))
	for i := 0; i+len(field) < len(b); i++ {
		if string(b[i:i+len(field)]) != field {
			continue
		}
		for _, c := range b[i+len(field):] {
			switch {
			case c >= '0' && c <= '9':
				pid = pid*10 + int(c-'0')
			case c == '\n' || c == '-':
				return pid
			}
		}
	}
	return pid
}

// listen takes in what the first process of the namespace tells.
func (g *guardian) listen() {
	for g.in.sock >= 0 {
		var b [ReportSize]byte
		n, _, e := receive(g.in.sock, b[:])
		if e == syscall.EAGAIN {
			return
		}
		r, ok := ParseReport(b[:n])
		if e != 0 || !ok {
			syscall.Close(g.in.sock) // it has ended, and is collected as any child
			g.in.sock = -1
			return
		}
		switch {
		case r.Kind == Exited:
			g.commandEndedInside(r.Status, r.Note == 1)
		case r.Kind != Halted || !g.shared || g.exited:
		case r.Status.Stopped():
			g.halts(r.Status.StopSignal())
		default:
			g.halts(0)
		}
	}
}

// commandEndedInside is called when the command has ended and was collected by the first process of its namespace.
func (g *guardian) commandEndedInside(ws syscall.WaitStatus, alone bool) {
	if g.exited {
		return
	}
	now := Now()
	g.dismiss()
	g.wake()
	var left Survey
	if !g.killing && !alone {
		w := Walk{Root: g.in.pid}
		left = w.CountUntil(g.killDue)
	}
	g.told(ws, left, now)
}

// insideEnded is called when the first process of the namespace, and with it everything in the namespace, has ended.
func (g *guardian) insideEnded() {
	g.listen()
	g.commandEndedInside(syscall.WaitStatus(syscall.SIGKILL), true) // unless it was told otherwise
	Reap(g.in.pid)
	g.page.top.Store(0)
	if g.in.sock >= 0 {
		syscall.Close(g.in.sock)
	}
	g.in = inside{sock: -1}
}
