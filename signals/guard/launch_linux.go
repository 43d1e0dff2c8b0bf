package guard

import (
	"errors"
	"os"
	"slices"
	"syscall"
)

// Launched is a guardian as its wrapper has it.
type Launched struct {
	Pid    int
	Sock   int // the control socket
	Page   *Page
	Shared bool // the command is to be in the caller's process group
}

// Discard ends a guardian that is not needed after all: without its wrapper's end of the socket it has nothing to do.
func (l Launched) Discard() {
	syscall.Close(l.Sock)
	l.Page.Unmap()
	WaitEnded(l.Pid)
	Reap(l.Pid)
}

// LaunchError says which step of a launch failed.
type LaunchError struct {
	Step string
	Err  error
}

func (e *LaunchError) Error() string { return "cannot " + e.Step + ": " + e.Err.Error() }

func (e *LaunchError) Unwrap() error { return e.Err }

// Launch starts a guardian. It does not wait until the guardian listens.
func Launch(shared bool) (l Launched, err error) {
	if e := Subreaper(); e != 0 {
		return l, &LaunchError{"become the parent of orphans", e}
	}
	l.Shared = shared
	page, pageFd, e := NewPage()
	if e != 0 {
		return l, &LaunchError{"share memory with the guardian", e}
	}
	defer syscall.Close(pageFd)
	l.Page = page
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		page.Unmap()
		return l, &LaunchError{"make the guardian's socket", err}
	}
	defer syscall.Close(pair[1])
	l.Sock = pair[0]
	hello := Order{Op: OpHello}
	if shared {
		hello.Arg = 1
	}
	step := "write to the guardian's socket"
	if e := Send(l.Sock, hello, pageFd); e != 0 {
		err = e
	} else {
		step = "start the guardian"
		l.Pid, err = fork(Name, pair[1], nil)
	}
	if err != nil {
		syscall.Close(l.Sock)
		page.Unmap()
		return l, &LaunchError{step, err}
	}
	return l, nil
}

// fork executes this binary under another name, with the descriptor as its control socket, under the number that it has here. No other
// descriptor is renumbered: a list with holes keeps what is inherited where it is.
func fork(name string, sock int, sys *syscall.SysProcAttr) (int, error) {
	files := make([]uintptr, sock+1)
	for fd := range files {
		files[fd] = uintptr(fd)
		if fd > 2 && fd != sock && !Inherited(fd) {
			files[fd] = ^uintptr(0)
		}
	}
	attr := &syscall.ProcAttr{Env: []string{}, Files: files, Sys: sys}
	// Not by its own name: a signal to all processes that execute "underlease" is to miss this one.
	pid, err := syscall.ForkExec("/proc/self/exe", []string{name}, attr)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EACCES) {
		var self string
		if self, err = os.Executable(); err != nil {
			return 0, errors.New("our own executable cannot be found: /proc is not mounted here")
		}
		pid, err = syscall.ForkExec(self, []string{name}, attr)
	}
	return pid, err
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

// Wanted says whether a command line, without the program's name, will want a guardian.
func Wanted(args []string) bool {
	return len(args) > 2 && args[0] == "run" && slices.Contains(args, "--")
}

// early delivers the guardian that [launchEarly] starts, with no pid if that failed. It is nil where none was started, or it was taken.
var early chan Launched

// launchEarly starts a guardian beside the initialisation of the packages that come after this one, if the command line wants one: its
// start takes as long as theirs. What goes wrong is left to the launch proper, which tries again and has words for it.
func launchEarly() {
	if !Wanted(os.Args[1:]) || !Childless() { // with other children the caller has to tell them from the tree
		return
	}
	c := make(chan Launched, 1)
	early = c
	go func() {
		l, err := Launch(Terminal())
		if err != nil {
			l.Pid = 0
		}
		c <- l
	}()
}

// Early returns the guardian that was started while the packages were initialised, once. It is shared if there is a terminal.
func Early() (l Launched, ok bool) {
	if early == nil {
		return l, false
	}
	l = <-early
	early = nil
	return l, l.Pid != 0
}
