//go:build unix

package signals

import (
	"syscall"
	"time"
)

// Options say how the wrapper behaves beside its guardian. The zero value is right for a process that has other things to do as well.
type Options struct {
	// DropInherited lets go of the wrapper's own copies of the command's descriptors once the command runs: 0 and 1
	// become /dev/null and what was inherited above 2 is closed. A reader of the command's output then sees the end of file
	// when the command closes it. For a process that is nothing but a wrapper.
	DropInherited bool
	// OwnGroup puts the command into a process group of its own although there is a terminal: for a command that is not to use it.
	OwnGroup bool
}

const (
	answerWithin  = 10 * time.Second       // an answer of the guardian to Pin and Start; a machine under load is slow to start it
	confirmWithin = 50 * time.Millisecond  // from the order to kill to the guardian's kill
	aliveWithin   = 500 * time.Millisecond // between two signs of life of a guardian that kills
	passEvery     = 2 * time.Millisecond   // between two walks of the wrapper's own kill
	passSlowest   = 100 * time.Millisecond
	stuckAfter    = time.Second
	stuckEvery    = 10 * time.Second
)

// refused says whether an error of fork and exec is about the system's resources, not about the file.
func refused(e syscall.Errno) bool {
	switch e {
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		return true
	default:
		return false
	}
}
