package guard

import (
	"os"
	"strconv"
	"syscall"
	"unsafe"
)

const (
	atRemoveDir = 0x200
	pollPri     = 0x2
)

// Cgroup is a control group of version 2 that holds the tree and nothing else: a descriptor of its directory. Wrapper and guardian
// share it; neither of them is in it.
type Cgroup int

// NoCgroup is none.
const NoCgroup Cgroup = -1

// Killable says that the kernel can kill the group as a whole: since 5.14.
func (c Cgroup) Killable() bool {
	fd, err := c.open("cgroup.kill", syscall.O_WRONLY)
	if err == nil {
		syscall.Close(fd)
	}
	return err == nil
}

// Kill sends SIGKILL to all processes in the group and in those below it, at once: a fork that is under way is killed too, and nobody is asked
// whether the sender may signal whom. Source: Documentation/admin-guide/cgroup-v2.rst, cgroup.kill.
func (c Cgroup) Kill() {
	if fd, err := c.open("cgroup.kill", syscall.O_WRONLY); err == nil {
		syscall.Write(fd, []byte("1"))
		syscall.Close(fd)
	}
}

// Populated says that there is a living process in the group or below it.
func (c Cgroup) Populated() bool {
	if c == NoCgroup {
		return false
	}
	fd, err := c.open("cgroup.events", syscall.O_RDONLY)
	if err != nil {
		e, _ := err.(syscall.Errno)
		return e != syscall.ENOENT && e != syscall.ENODEV // removed, therefore empty; else not known to be
	}
	defer syscall.Close(fd)
	return populated(fd)
}

// populated reads from the beginning of an open cgroup.events.
func populated(fd int) bool {
	var b [256]byte
	n, _ := syscall.Pread(fd, b[:], 0)
	const field = "populated "
	for i := 0; i+len(field) < n; i++ {
		if string(b[i:i+len(field)]) == field {
			return b[i+len(field)] == '1'
		}
	}
	return false
}

// Processes calls f for the pid of every living process in the group and below it. One of another PID namespace is 0.
func (c Cgroup) Processes(f func(pid int)) {
	if fd, err := c.open("cgroup.procs", syscall.O_RDONLY); err == nil {
		var b [4096]byte
		pid := 0
		for {
			n, err := syscall.Read(fd, b[:])
			if err != nil || n <= 0 {
				break
			}
			for _, d := range b[:n] {
				if d == '\n' {
					f(pid)
					pid = 0
				} else {
					pid = pid*10 + int(d-'0')
				}
			}
		}
		syscall.Close(fd)
	}
	c.below(func(_ string, sub Cgroup) { sub.Processes(f) })
}

// addBoxed completes a survey with the processes of the group that the walk has not seen: what runs away from a walk does not leave the group.
func (g *guardian) addBoxed(s *Survey) {
	if g.box == NoCgroup {
		return
	}
	g.box.Processes(func(pid int) {
		if _, counted := g.walk.seen[pid]; counted || pid == 0 {
			return
		}
		s.Count++
		if len(s.Pids) < MaxPids {
			state := byte('?')
			if st, ok := g.walk.stat(pid); ok {
				state = st.state
			}
			s.Pids, s.States = append(s.Pids, pid), append(s.States, state)
		}
	})
}

// Remove removes the group, with those that the command made below it. It stays where a process is left in it.
func (c Cgroup) Remove() {
	c.removeBelow()
	var b [4096]byte
	n, err := syscall.Readlink("/proc/self/fd/"+strconv.Itoa(int(c)), b[:])
	if err == nil && n < len(b) {
		_ = syscall.Rmdir(string(b[:n])) // EBUSY where a process is left
	}
}

func (c Cgroup) removeBelow() {
	c.below(func(name string, sub Cgroup) {
		sub.removeBelow()
		if p, err := syscall.BytePtrFromString(name); err == nil {
			_, _, _ = syscall.Syscall(syscall.SYS_UNLINKAT, uintptr(c), uintptr(unsafe.Pointer(p)), atRemoveDir)
		}
	})
}

// below calls f for every group directly below.
func (c Cgroup) below(f func(name string, sub Cgroup)) {
	const directory = syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NOFOLLOW
	fd, err := c.open(".", directory)
	if err != nil {
		return
	}
	d := os.NewFile(uintptr(fd), "cgroup")
	entries, _ := d.ReadDir(-1) // what could be read
	d.Close()
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if fd, err := c.open(e.Name(), directory); err == nil {
			f(e.Name(), Cgroup(fd))
			syscall.Close(fd)
		}
	}
}

func (c Cgroup) open(name string, flags int) (int, error) {
	for {
		fd, err := syscall.Openat(int(c), name, flags|syscall.O_CLOEXEC, 0)
		if err != syscall.EINTR {
			return fd, err
		}
	}
}

// Startable tries whether a process can be started in the group: one is, and its exec fails as it must, for it has no name.
func (c Cgroup) Startable() syscall.Errno {
	_, err := syscall.ForkExec("", []string{""}, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(c)}})
	if e, ok := err.(syscall.Errno); ok && e != syscall.ENOENT {
		return e
	}
	return 0
}
