package guard

import (
	"runtime"
	"syscall"
	"unsafe"
)

// capturePipe is the descriptor that onSignal writes to. It is non-blocking: a full pipe drops records, never a thread.
var capturePipe int32 = -1

func onSignal()

func onSignalPC() uintptr

// Captured is one signal as the kernel described it.
type Captured struct {
	Signal syscall.Signal
	Code   int32 // si_code: 0 from kill(2), 0x80 from the kernel
	Pid    int   // of the sender, where Code is 0
}

// FromKernel says that no process sent the signal: a terminal did, say.
func (c Captured) FromKernel() bool { return c.Code == 0x80 }

// CapturedSize is how many bytes of a signal's description arrive in the pipe, always in one piece.
const CapturedSize = 32

// ParseCaptured reads one record of the pipe.
func ParseCaptured(b []byte) Captured {
	at := func(o int) int32 { return *(*int32)(unsafe.Pointer(&b[o])) }
	return Captured{Signal: syscall.Signal(at(0)), Code: at(8), Pid: int(at(infoPid))}
}

type sigaction struct {
	handler  uintptr
	flags    uintptr
	restorer uintptr
	mask     uint64
}

const (
	sigDfl    = 0
	sigIgn    = 1
	saSiginfo = 0x4
	saOnStack = 0x08000000
	saRestart = 0x10000000
)

func rtSigaction(sig syscall.Signal, act, old *sigaction) syscall.Errno {
	_, _, e := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(act)),
		uintptr(unsafe.Pointer(old)), 8, 0, 0)
	return e
}

// Ignored says whether the process ignores the signal, as the kernel sees it. The Go runtime respects what was inherited
// for SIGHUP, SIGINT and the job control signals only; for others the answer is always no.
func Ignored(sig syscall.Signal) bool {
	var old sigaction
	return rtSigaction(sig, nil, &old) == 0 && old.handler == sigIgn
}

// Default restores the default action of a signal.
func Default(sig syscall.Signal) syscall.Errno {
	return rtSigaction(sig, &sigaction{handler: sigDfl}, nil)
}

// StopBy stops this process by the default action of a signal of job control, and returns when it goes on. A group that no shell
// cares for is not stopped by the kernel, except by SIGSTOP.
func StopBy(sig syscall.Signal) {
	runtime.LockOSThread() // the signal is for this thread, so that it has acted when the call has returned
	defer runtime.UnlockOSThread()
	var old sigaction
	if sig != syscall.SIGSTOP && rtSigaction(sig, &sigaction{handler: sigDfl}, &old) == 0 {
		defer func() { _ = rtSigaction(sig, &old, nil) }() // it was so before
	}
	syscall.RawSyscall(syscall.SYS_TGKILL, uintptr(syscall.Getpid()), uintptr(syscall.Gettid()), uintptr(sig))
}

// Capture opens the pipe into which the kernel's description of signals goes, once for the process, and returns the end to
// read from, non-blocking. os/signal hides who sent a signal; here it decides whether the command has got it already.
func Capture() (int, syscall.Errno) {
	var p [2]int32
	_, _, e := syscall.RawSyscall(syscall.SYS_PIPE2, uintptr(unsafe.Pointer(&p)), syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if e != 0 {
		return -1, e
	}
	capturePipe = p[1]
	return int(p[0]), 0
}

// CaptureSignal directs a signal into the pipe of [Capture] and returns how to undo it. Dispositions return to what they were
// when the command is executed: a caught signal becomes a default one.
func CaptureSignal(sig syscall.Signal) (undo func(), e syscall.Errno) {
	var old sigaction
	if e = captureSignal(sig, &old); e != 0 {
		return nil, e
	}
	return func() { _ = rtSigaction(sig, &old, nil) }, 0
}

func captureSignal(sig syscall.Signal, old *sigaction) syscall.Errno {
	pc, flag := restorer()
	return rtSigaction(sig, &sigaction{
		handler: onSignalPC(), flags: saSiginfo | saOnStack | saRestart | flag, restorer: pc,
		mask: ^uint64(0),
	}, old)
}
