package signals

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/underlease/underlease/signals/guard"
)

// Possible says why an isolation that was asked for cannot be had here, by trying it; nil for one that can, and for those that
// take what there is. Nothing is left of the attempt.
func (i Isolation) Possible() error {
	switch i {
	case IsolateCgroup:
		b, err := newBox(i, look())
		if err != nil {
			return err
		}
		defer b.remove()
		if e := b.Startable(); e != 0 {
			return cannot(i, e)
		}
	case IsolatePidns:
		// The kernel ends what Enter starts when the thread ends that started it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		pid, sock, e := guard.Enter()
		if e != 0 {
			return cannot(i, e)
		}
		r, _, e := guard.NextReport(sock)
		syscall.Close(sock)
		guard.WaitEnded(pid)
		guard.Reap(pid)
		switch {
		case e != 0:
			return cannot(i, e)
		case r.Kind != guard.Ready:
			return fmt.Errorf("/proc cannot be mounted in a PID namespace: %w", r.Errno)
		}
	case IsolateAuto, IsolateTree, "":
	}
	return nil
}

// cannot says what it means that the kernel refuses a process in an isolation.
func cannot(i Isolation, e syscall.Errno) error {
	if i != IsolatePidns {
		return fmt.Errorf("no process can be started in a control group of ours: %w", e)
	}
	switch e {
	case syscall.ENOSPC, syscall.EUSERS:
		return fmt.Errorf("the limit of namespaces is reached (user.max_user_namespaces, user.max_pid_namespaces): %w", e)
	case syscall.EPIPE:
		return errors.New("the first process of the PID namespace was killed")
	default:
		return fmt.Errorf("no PID namespace can be made here, nor a user namespace for it: %w", e)
	}
}

// isolate prepares what holds the tree together, and returns the descriptors that go to the guardian with the command.
func (g *Guardian) isolate(c Command, sealed *guard.Command) ([]int, error) {
	switch c.Isolate {
	case IsolatePidns:
		g.inside = true
		sealed.Isolation = guard.IsolatePidns
		return nil, nil
	case IsolateCgroup:
		sealed.Isolation = guard.IsolateCgroup
	case IsolateAuto, "":
		if c.Leftovers == LeftoversIgnore {
			return nil, nil // what is left alone would stay in a group of ours
		}
		sealed.Isolation = guard.IsolateAnyway
	case IsolateTree:
		return nil, nil
	}
	b, err := newBox(c.Isolate, g.looked())
	switch {
	case err == nil:
		g.mu.Lock()
		g.box = b
		g.mu.Unlock()
		return []int{int(b.Cgroup)}, nil
	case c.Isolate == IsolateCgroup:
		return nil, err
	default:
		sealed.Isolation = guard.IsolateTree
		return nil, nil
	}
}

// unbox removes the control group, if there is one. What is still in it is alive on purpose (--leftovers ignore), and keeps it.
func (g *Guardian) unbox() {
	g.mu.Lock()
	b := g.box
	g.box = nil
	g.mu.Unlock()
	if b != nil {
		b.remove()
	}
}

// boxed counts the processes in the control group.
func (g *Guardian) boxed() (n int, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.box == nil {
		return 0, false
	}
	g.box.Processes(func(int) { n++ })
	return n, true
}

// killBox kills what is in the control group, and says whether anything was.
func (g *Guardian) killBox() (populated bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.box == nil || !g.box.Populated() {
		return false
	}
	g.box.Kill()
	return true
}

// sweep removes what earlier runs had to leave beside our own control group: of wrappers and guardians that were killed together.
func (g *Guardian) sweep() {
	g.mu.Lock()
	b := g.box
	g.mu.Unlock()
	if b != nil {
		sweep(b.parent)
	}
}

// boxPrefix begins the names of our control groups; the wrapper's pid and a random number follow.
const boxPrefix = "underlease-"

// box is a control group of a run's own, below the one that this process is in. As long as somebody holds it open it is locked, so
// that no other run takes it for one that was left over; pids would not do, since they differ between containers.
type box struct {
	guard.Cgroup
	parent string
}

// newBox makes a control group. With IsolateCgroup it takes whatever the kernel allows, with IsolateAuto only what was meant for us.
func newBox(i Isolation, w where) (*box, error) {
	if w.err != nil {
		return nil, w.err
	}
	if i != IsolateCgroup && !w.delegated {
		return nil, errors.New("it was not delegated to us")
	}
	dir := w.dir
	for attempt := 0; ; attempt++ {
		name := dir + "/" + boxPrefix + strconv.Itoa(os.Getpid()) + "-" + strconv.FormatUint(uint64(rand.Uint32()), 36)
		err := syscall.Mkdir(name, 0o755)
		switch {
		case errors.Is(err, syscall.EEXIST) && attempt < 3:
			continue
		case errors.Is(err, syscall.EROFS):
			return nil, fmt.Errorf("%s is mounted read-only", dir)
		case err != nil:
			return nil, fmt.Errorf("no control group can be made in %s: %w", dir, err)
		}
		fd, err := syscall.Open(name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err == nil {
			if err = syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
				b := &box{guard.Cgroup(fd), dir}
				if b.Killable() {
					return b, nil
				}
				err = errors.New("control groups cannot be killed as a whole before Linux 5.14")
			}
			syscall.Close(fd)
		}
		_ = syscall.Rmdir(name)
		if attempt >= 3 { // else swept away before it was locked, perhaps
			return nil, fmt.Errorf("%s cannot be used: %w", dir, err)
		}
	}
}

func (b *box) remove() {
	b.Remove()
	syscall.Close(int(b.Cgroup))
}

// sweep removes control groups of runs of which no process is left: nobody holds them, and no process is in them.
func sweep(parent string) {
	d, err := os.Open(parent)
	if err != nil {
		return
	}
	names, _ := d.Readdirnames(-1) // what could be read
	d.Close()
	for _, name := range names {
		if !strings.HasPrefix(name, boxPrefix) {
			continue
		}
		fd, err := syscall.Open(parent+"/"+name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		if syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			if c := guard.Cgroup(fd); !c.Populated() {
				c.Remove()
			}
		}
		syscall.Close(fd)
	}
}

// where is the control group that this process is in.
type where struct {
	dir       string
	delegated bool
	err       error // why there is none
}

func look() (w where) {
	var own string
	if w.dir, own, w.err = ownCgroup(); w.err == nil {
		w.delegated = delegated(w.dir, own)
	}
	return w
}

// looked looks once: it takes a tenth of a millisecond, which [Guardian.Pin] has to spare and [Guardian.Start] has not.
func (g *Guardian) looked() where {
	if g.where == nil {
		w := look()
		g.where = &w
	}
	return *g.where
}

// ownCgroup returns the directory of the control group (v2) that this process is in, and its name in the hierarchy as this process sees it.
func ownCgroup() (dir, own string, err error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", "", err
	}
	if own = unifiedGroup(string(groups)); own == "" {
		return "", "", errors.New("this system has no control groups of version 2")
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", "", err
	}
	dir, err = unifiedDir(string(mounts), own)
	return dir, own, err
}

// unifiedGroup takes the name of the group of version 2 from /proc/self/cgroup, or nothing.
func unifiedGroup(groups string) string {
	for l := range strings.Lines(groups) {
		if own, ok := strings.CutPrefix(l, "0::"); ok {
			return strings.TrimSuffix(own, "\n")
		}
	}
	return ""
}

// unifiedDir finds the directory of a group of version 2 among mounts, which are in the form of /proc/self/mountinfo.
func unifiedDir(mounts, own string) (string, error) {
	where := ""
	readOnly := ""
	for l := range strings.Lines(mounts) {
		if !strings.Contains(l, " - cgroup2 ") {
			continue
		}
		before, after, _ := strings.Cut(l, " - ")
		f, super := strings.Fields(before), strings.Fields(after)
		if len(f) < 6 || len(super) < 3 {
			continue
		}
		root, at := unescape(f[3]), unescape(f[4])
		where = at
		rest, below := own, true
		if root != "/" {
			rest, below = strings.CutPrefix(own, root)
			below = below && (rest == "" || rest[0] == '/')
		}
		if !below || strings.HasPrefix(own, "/..") {
			continue
		}
		if option(f[5], "ro") || option(super[2], "ro") {
			readOnly = at
			continue
		}
		return strings.TrimSuffix(at+rest, "/"), nil
	}
	switch {
	case readOnly != "":
		return "", fmt.Errorf("%s is mounted read-only", readOnly)
	case where != "":
		return "", fmt.Errorf("our control group %s is not below what is mounted at %s", own, where)
	default:
		return "", errors.New("no control groups of version 2 are mounted")
	}
}

func option(options, want string) bool {
	for o := range strings.SplitSeq(options, ",") {
		if o == want {
			return true
		}
	}
	return false
}

// unescape reads the octal escapes of /proc/self/mountinfo: of blank, tab, newline and backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// delegated says that the control group we are in is ours to divide. What systemd manages is not, though root could: it wants to be the
// only writer, and marks what it has given away. Nor is the root of the whole hierarchy: whatever leaves it competes for the
// processor in another way. Ours are those that belong to our user, and what a container sees as the root.
//
// Source: https://systemd.io/CGROUP_DELEGATION.
func delegated(dir, own string) bool {
	var st syscall.Stat_t
	if syscall.Access(dir+"/cgroup.type", 0) != nil || syscall.Stat(dir, &st) != nil {
		return false // the root has no type
	}
	if user := os.Geteuid(); user != 0 && int(st.Uid) == user || own == "/" {
		return true
	}
	for _, mark := range []string{"user.delegate", "trusted.delegate"} {
		var v [2]byte
		if n, err := syscall.Getxattr(dir, mark, v[:]); err == nil && string(v[:n]) == "1" {
			return true
		}
	}
	return false
}
