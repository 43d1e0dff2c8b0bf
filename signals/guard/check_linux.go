package guard

import (
	"syscall"
	"unsafe"
)

// The guardian answers whoever asks how much time is left: each connection to its abstract socket gets one packet and is closed.
// Nothing is read from it, so that a client has no way to be slow, and none is remembered. One turn of the loop answers at
// most as many as the queue of the socket holds, and every turn decides first: no number of clients delays a kill.

// checksAtOnce is the length of the queue, and the most that one turn answers.
const checksAtOnce = 8

// State says how far a run is on its way to its end.
type State uint32

// The states. Only in the first one is there time left to count on.
const (
	Holding  State = iota + 1
	Draining       // a signal from outside asked the command to finish
	Ending         // we sent the stop signal, or it is due
	Dying          // the kill has begun
)

// MaxTerm is how many bytes of a term an answer carries.
const MaxTerm = 200

// Answer is what a client gets.
type Answer struct {
	magic  uint64
	Left   int64 // nanoseconds until the stop signal; [Never]
	State  State
	length uint32
	term   [MaxTerm]byte
}

const answerSize = int(unsafe.Sizeof(Answer{}))

// Term is the fencing number, or a list of them; empty without a lease.
func (a *Answer) Term() string { return string(a.term[:min(a.length, MaxTerm)]) }

// hear opens the socket under the name that the command gets in its environment. Without it the command runs all the same: who asks is told
// that nobody answers.
func (g *guardian) hear(name string) {
	if name == "" {
		return
	}
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return
	}
	if syscall.Bind(fd, &syscall.SockaddrUnix{Name: name}) != nil || syscall.Listen(fd, checksAtOnce) != nil {
		syscall.Close(fd)
		return
	}
	g.checks = fd
}

// deafen ends the socket: from now on there is nobody who could answer.
func (g *guardian) deafen() {
	if g.checks >= 0 {
		syscall.Close(g.checks)
		g.checks = -1
	}
}

// answer serves those who wait.
func (g *guardian) answer() {
	for range checksAtOnce {
		fd, _, err := syscall.Accept4(g.checks, syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK)
		if err != nil {
			return // none waits any more, or no descriptor is left; the next turn sees
		}
		if Trusted(fd) {
			a := g.standing()
			_ = send(fd, unsafe.Slice((*byte)(unsafe.Pointer(&a)), answerSize))
		}
		syscall.Close(fd)
	}
}

// standing is how things are at this moment.
func (g *guardian) standing() Answer {
	now, d := Now(), g.page.Read()
	a := Answer{magic: magic, Left: Never, State: Holding}
	a.length = uint32(copy(a.term[:], g.command.Term))
	at, _ := stopAt(d)
	if kill, _ := g.killAt(d); kill < at {
		at = kill
	}
	if at != Never {
		a.Left = max(0, at-now)
	}
	switch {
	case g.killing || g.page.ordered.Load() != 0:
		a.State = Dying
	case g.stopped || g.decided || a.Left == 0:
		a.State = Ending
	case g.page.draining.Load() != 0:
		a.State = Draining
	}
	return a
}

// Trusted says that the other end of a connection is a process of the same user, of root, of our own descendants or of our ancestors.
// The last two are for a command that became another user.
func Trusted(fd int) bool {
	var peer syscall.Ucred
	size := uint32(syscall.SizeofUcred)
	_, _, e := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.SOL_SOCKET, soPeercred,
		uintptr(unsafe.Pointer(&peer)), uintptr(unsafe.Pointer(&size)), 0)
	if e != 0 {
		return false
	}
	if peer.Uid == 0 || int(peer.Uid) == syscall.Geteuid() {
		return true
	}
	return related(int(peer.Pid), syscall.Getpid()) || related(syscall.Getpid(), int(peer.Pid))
}

// related says that one process descends from another.
func related(pid, ancestor int) bool {
	w := Walk{Root: ancestor}
	st, ok := w.stat(pid)
	return ok && ancestor > 0 && w.descends(st)
}

// AskErr says why nobody answered.
type AskErr int

// The reasons.
const (
	AskedNobody AskErr = iota + 1 // nothing has this name here
	AskedSlow                     // it did not answer in time
	AskedOther                    // it is not to be trusted, or does not trust us
)

// Ask connects to a guardian's socket and returns its answer. It waits for no longer than a second.
func Ask(name string) (a Answer, why AskErr) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return a, AskedNobody
	}
	defer syscall.Close(fd)
	limit := syscall.Timeval{Sec: 1}
	_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &limit) // of connect too
	_ = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit)
	for {
		err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: name})
		if err != syscall.EINTR {
			break
		}
	}
	switch {
	case err == syscall.EAGAIN:
		return a, AskedSlow
	case err != nil:
		return a, AskedNobody
	case !Trusted(fd):
		return a, AskedOther
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(&a)), answerSize)
	for {
		n, err := syscall.Read(fd, b)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return a, AskedSlow
		case err != nil || n != answerSize || a.magic != magic:
			return a, AskedOther
		}
		return a, 0
	}
}
