package file

import "golang.org/x/sys/unix"

// bootClock goes on during a suspend.
const bootClock = unix.CLOCK_BOOTTIME

func shortSleep(d int64) {
	t := unix.NsecToTimespec(d)
	_ = unix.Nanosleep(&t, nil) // a signal only makes it shorter
}

// endIfStopped ends a process that is stopped and cannot see that its grant was broken; its guardian then ends the tree.
// It does nothing unless p is proven to be the process that was recorded: same kernel, same pid namespace, same pid and
// start, compared while a descriptor keeps the pid from being given to another.
func (p process) endIfStopped() {
	me := self()
	if p == (process{}) || p == me || p.boot != me.boot || p.space != me.space {
		return
	}
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return
	}
	defer shut(fd)
	if start, state, ok := stat(p.pid); ok && start == p.start && (state == 'T' || state == 't') {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}
