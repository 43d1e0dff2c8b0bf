package file

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// The files here are opened by plain system calls: an os.File would register each with the runtime's poller, and the
// lock's descriptor has to stay the number that [Client.Pins] hands out. Every descriptor is close-on-exec.

// inode names a file for as long as somebody has it open: its number is not given to another before that.
type inode struct{ device, number uint64 }

// again calls f until no signal interrupts it.
func again(f func() error) error {
	for {
		if err := f(); err != unix.EINTR { //nolint:errorlint // plain numbers from system calls
			return err
		}
	}
}

// open opens a regular file of ours. Links are not followed and a FIFO does not block: what is not a regular file was
// not put there by us.
func open(path string, flags int) (fd int, id inode, err error) {
	err = again(func() error {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, 0o600)
		return err
	})
	if err != nil {
		return -1, inode{}, fault("open", path, err)
	}
	var st unix.Stat_t
	if err := again(func() error { return unix.Fstat(fd, &st) }); err != nil {
		shut(fd)
		return -1, inode{}, fault("fstat", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		shut(fd)
		return -1, inode{}, foreign(nil, path)
	}
	return fd, identity(&st), nil
}

// at returns what stands at path, or the zero inode when nothing does.
func at(path string) (inode, error) {
	var st unix.Stat_t
	err := again(func() error { return unix.Lstat(path, &st) })
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return inode{}, nil
	}
	return identity(&st), fault("stat", path, err)
}

func identity(st *unix.Stat_t) inode {
	return inode{uint64(st.Dev), st.Ino} //nolint:unconvert // the type of Dev is not the same on every architecture
}

// shut closes a descriptor. For a lock this is the only way to give it up: LOCK_UN on one copy of a descriptor would
// free the lock of all copies, and the guardian holds one.
//
// Source: close(2), "Dealing with error returns from close()": the descriptor is gone whatever it returns.
func shut(fd int) { _ = unix.Close(fd) }

// lock tries to lock the file and reports whether another has it.
func lock(fd int, path string) (busy bool, err error) {
	err = again(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if err == unix.EWOULDBLOCK { //nolint:errorlint // plain numbers from system calls
		return true, nil
	}
	return false, fault("flock", path, err)
}

// readAll returns what is in the file, at most limit bytes.
func readAll(fd int, path string, limit int) ([]byte, error) {
	b := make([]byte, 0, 4096)
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		var n int
		err := again(func() (err error) {
			n, err = unix.Read(fd, b[len(b):cap(b)])
			return err
		})
		if err != nil {
			return nil, fault("read", path, err)
		}
		if n == 0 {
			return b, nil
		}
		if b = b[:len(b)+n]; len(b) > limit {
			return nil, unreadable(path, damage("is larger than any record"))
		}
	}
}

// readSmall reads a file of the kernel.
func readSmall(path string) ([]byte, error) {
	var fd int
	err := again(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fault("open", path, err)
	}
	defer shut(fd)
	return readAll(fd, path, 16<<20)
}

func writeAll(fd int, path string, b []byte) error {
	for len(b) > 0 {
		var n int
		err := again(func() (err error) {
			n, err = unix.Write(fd, b)
			return err
		})
		if err != nil {
			return fault("write", path, err)
		}
		b = b[n:]
	}
	return nil
}

// A process is named so that it cannot be taken for another: a pid alone comes again.
type process struct {
	boot  string // of the kernel that it ran on
	space int64  // inode of its pid namespace
	pid   int
	start int64 // clock ticks since the boot
}

// self is this process, or the zero process where /proc does not tell.
var self = sync.OnceValue(func() process {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil || bootID() == "" {
		return process{}
	}
	pid := os.Getpid()
	start, _, ok := stat(pid)
	if !ok {
		return process{}
	}
	return process{boot: bootID(), space: int64(st.Ino), pid: pid, start: start}
})

// stat returns when a process was started and its state letter.
//
// Source: proc_pid_stat(5): the fields after the name in brackets are state (3) ... starttime (22).
func stat(pid int) (start int64, state byte, ok bool) {
	b, err := readSmall("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, false
	}
	after := bytes.LastIndexByte(b, ')')
	if after < 0 {
		return 0, 0, false
	}
	fields := strings.Fields(string(b[after+1:]))
	if len(fields) < 20 {
		return 0, 0, false
	}
	start, err = strconv.ParseInt(fields[19], 10, 64)
	return start, fields[0][0], err == nil
}

// locker returns the pid of the process that locked the file, as far as /proc/locks shows it, or zero.
//
// Source: proc_locks(5): ordinal, FLOCK, ADVISORY, WRITE, pid, major:minor:inode (the numbers of the device in hexadecimal).
func locker(id inode) int {
	b, err := readSmall("/proc/locks")
	if err != nil {
		return 0
	}
	number := ":" + strconv.FormatUint(id.number, 10)
	device := strconv.FormatUint(uint64(unix.Major(id.device)), 16)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 6 || f[1] != "FLOCK" || !strings.HasSuffix(f[5], number) {
			continue
		}
		major, _, _ := strings.Cut(f[5], ":")
		if strings.TrimLeft(major, "0") != strings.TrimLeft(device, "0") {
			continue
		}
		pid, err := strconv.Atoi(f[4])
		if err != nil || pid < 0 {
			return 0
		}
		return pid
	}
	return 0
}
