package signals

import (
	"os"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const tracksByLooking = false

// Source: sys/procctl.h, procctl(2). The structures are written to by the kernel and have its sizes.
const (
	pPid            = 0
	procReapAcquire = 2
	procReapStatus  = 4
	procReapGetPids = 5
	procReapKill    = 6
	reapPidValid    = 0x1
	reapPidZombie   = 0x8
)

type reaperStatus struct {
	flags, children, descendants uint32
	reaper, pid                  int32
	_                            [15]uint32
}

type reaperPid struct {
	pid, subtree int32
	flags        uint32
	_            [15]uint32
}

type reaperPids struct {
	count uint32
	_     [15]uint32
	pids  *reaperPid
}

type reaperKill struct {
	sig, flags uint32
	subtree    int32
	killed     uint32
	failed     int32
	_          [15]uint32
}

func procctl(command uintptr, data unsafe.Pointer) syscall.Errno {
	_, _, e := syscall.Syscall6(unix.SYS_PROCCTL, pPid, uintptr(os.Getpid()), command, uintptr(data), 0, 0)
	return e
}

// adoptOrphans makes this process the reaper of its descendants: orphans come to it.
func adoptOrphans() { procctl(procReapAcquire, nil) }

// tracker finds the processes of a tree by asking the kernel for the descendants of this process, which is their reaper. Only the subtree
// of the command counts: a process that was there before belongs to somebody else.
type tracker struct{ roots []int }

func newTracker(root int, _ bool) *tracker { return &tracker{[]int{root}} }

// inherit counts what a child has left to us: the kernel keeps it under that child's number.
func (t *tracker) inherit(child int) { t.roots = append(t.roots, child) }

func (t *tracker) list() (pids []int) {
	var st reaperStatus
	if procctl(procReapStatus, unsafe.Pointer(&st)) != 0 || st.descendants == 0 {
		return nil
	}
	all := make([]reaperPid, st.descendants+64)
	req := reaperPids{count: uint32(len(all)), pids: &all[0]}
	if procctl(procReapGetPids, unsafe.Pointer(&req)) != 0 {
		return nil
	}
	for _, p := range all {
		if p.flags&reapPidValid == 0 {
			break
		}
		if slices.Contains(t.roots, int(p.subtree)) && p.flags&reapPidZombie == 0 {
			pids = append(pids, int(p.pid))
		}
	}
	return pids
}

// kill sends SIGKILL to all of the tree in one call for each subtree, and returns what was there before it.
func (t *tracker) kill() (left []int, denied syscall.Errno) {
	left = t.list()
	if len(left) == 0 {
		return nil, 0
	}
	const subtreeOnly = 2
	for _, root := range t.roots {
		req := reaperKill{sig: uint32(syscall.SIGKILL), flags: subtreeOnly, subtree: int32(root)}
		if e := procctl(procReapKill, unsafe.Pointer(&req)); e != 0 && e != syscall.ESRCH {
			denied = e
		}
	}
	return left, denied
}
