package guard

import (
	"slices"
	"strconv"
	"syscall"
	"unsafe"
)

// Walk looks at the descendants of one process, and signals them. Guardian and wrapper share it.
//
// The kernel's list of children is exact only for a tree that stands still; therefore a kill repeats the walk until nothing is left.
//
// A guardian inside the tree belongs to a run inside the command. It may hold that run's lock, which must not be free before
// its own tree is dead: therefore it is killed after everything below it.
type Walk struct {
	Root   int                // its descendants are meant, not itself
	Except func(pid int) bool // children of Root that are not meant, with everything below them; may be nil
	Beat   func()             // called for every process; may be nil

	until      func() bool   // asked before every process: true ends the walk; nil for all
	scanAlways bool          // for tests: as if the kernel had no lists of children
	scan       map[int][]int // children by parent, where it has none (CONFIG_PROC_CHILDREN)
	seen       map[int]known
	inner      []innerGuardian
	buf        []byte
}

// known is what a walk has proved of a process.
type known struct {
	start uint64
	below int // index of the guardian that it is below of, or -1
}

// chases is how often one walk looks for processes that have come below Root since its beginning.
const chases = 16

// Survey is what one walk saw.
type Survey struct {
	Count  int           // living processes
	Pids   []int         // at most MaxPids of them
	States []byte        // the state letter of each of Pids, as /proc has it
	Denied syscall.Errno // why one of them could not be signalled, or zero
	Blind  bool          // there is no usable /proc: nothing is known
}

// Count walks without signalling.
func (w *Walk) Count() Survey { return w.walk(0) }

// CountUntil is a Count that ends early when there is something better to do; the survey is of what was seen by then.
func (w *Walk) CountUntil(f func() bool) Survey {
	w.until = f
	defer func() { w.until = nil }()
	return w.walk(0)
}

// Kill walks and sends SIGKILL to every process it sees.
func (w *Walk) Kill() Survey { return w.walk(syscall.SIGKILL) }

// Send walks and sends a signal to every process it sees.
func (w *Walk) Send(sig syscall.Signal) Survey { return w.walk(sig) }

func (w *Walk) walk(sig syscall.Signal) (s Survey) {
	if !w.begin() {
		return Survey{Blind: true}
	}
	w.inner = w.inner[:0]
	queue := []int{w.Root}
	for chased, before := 0, 0; ; {
		if len(queue) == 0 {
			// What ran away while the others were visited is below Root by now, and is caught before it does so again: in a large tree
			// that is much sooner than in the next walk.
			if sig != syscall.SIGKILL || w.scan != nil || len(w.seen) == before || chased == chases {
				break
			}
			chased, before = chased+1, len(w.seen)
			queue = append(queue, w.Root)
		}
		parent := queue[0]
		queue = queue[1:]
		for _, pid := range w.children(parent) {
			if _, again := w.seen[pid]; again || pid == w.Root || w.excepted(parent, pid) {
				continue
			}
			if w.until != nil && w.until() {
				return s
			}
			if w.Beat != nil {
				w.Beat()
			}
			state, alive, e := w.visit(parent, pid, sig)
			queue = append(queue, pid)
			if alive {
				s.add(pid, state, e)
			}
		}
	}
	// From the innermost outwards: one that is killed now lives until the next walk for the one around it.
	for i := range slices.Backward(w.inner) {
		g := &w.inner[i] // what is inside it has marked it by now
		if !g.busy {
			if alive, e := w.strike(g.pid, sig); !alive {
				continue
			} else if e != 0 {
				s.Denied = e
			}
		}
		w.occupy(g.around)
	}
	return s
}

func (s *Survey) add(pid int, state byte, e syscall.Errno) {
	s.Count++
	if len(s.Pids) < MaxPids {
		s.Pids = append(s.Pids, pid)
		s.States = append(s.States, state)
	}
	if e != 0 {
		s.Denied = e
	}
}

// innerGuardian is a guardian that a walk has met below Root.
type innerGuardian struct {
	pid    int
	around int  // index of the one that it is in itself, or -1
	busy   bool // something below it is alive
}

// occupy notes that something lives below a guardian.
func (w *Walk) occupy(i int) {
	if i >= 0 {
		w.inner[i].busy = true
	}
}

func (w *Walk) excepted(parent, pid int) bool {
	return parent == w.Root && w.Except != nil && w.Except(pid)
}

// begin prepares a walk; false without a /proc that shows us as ourselves.
func (w *Walk) begin() bool {
	w.seen = make(map[int]known)
	w.scan = nil
	self := syscall.Getpid()
	var b [20]byte
	n, err := syscall.Readlink("/proc/self", b[:])
	if err != nil || string(b[:n]) != strconv.Itoa(self) { // none, or that of another PID namespace
		return false
	}
	if w.scanAlways || syscall.Access(string(procPath(self, "/task/", self, "/children")), 4) != nil {
		w.scan = make(map[int][]int)
		eachNumber("/proc", func(pid int) {
			if st, ok := w.stat(pid); ok {
				w.scan[st.parent] = append(w.scan[st.parent], pid)
			}
		})
	}
	return true
}

// children lists the children of all threads of a process.
func (w *Walk) children(pid int) (all []int) {
	if w.scan != nil {
		return w.scan[pid]
	}
	eachNumber(string(procPath(pid, "/task")), func(tid int) {
		all = append(all, w.childrenOf(pid, tid)...)
	})
	return all
}

func (w *Walk) childrenOf(pid, tid int) (all []int) {
	n := 0
	for _, c := range w.read(procPath(pid, "/task/", tid, "/children")) {
		switch {
		case c >= '0' && c <= '9':
			n = n*10 + int(c-'0')
		case n > 0:
			all = append(all, n)
			n = 0
		}
	}
	return all
}

// visit signals one process that parent's list named, if it is, for certain, a descendant of Root. The order makes it
// certain: the process is opened, then its ancestry is read, then it is signalled through the descriptor. Had its number
// passed to a stranger in between, the descriptor would be of one that has ended, or the ancestry that of the stranger.
func (w *Walk) visit(parent, pid int, sig syscall.Signal) (state byte, alive bool, e syscall.Errno) {
	t := aim(pid, sig)
	defer t.close()
	st, ok := w.stat(pid)
	if !ok || !w.descends(st) {
		return 0, false, 0
	}
	below := -1
	if p, ok := w.seen[parent]; ok {
		below = p.below
	}
	inner := sig == syscall.SIGKILL && st.guardian && !st.dead() && ours(pid)
	if inner {
		w.inner = append(w.inner, innerGuardian{pid: pid, around: below})
		below = len(w.inner) - 1
	}
	w.seen[pid] = known{st.start, below}
	if st.dead() {
		return 0, false, 0
	}
	if inner {
		return st.state, true, 0 // later
	}
	if alive, e = t.signal(sig); alive {
		w.occupy(below)
	}
	return st.state, alive, e
}

// strike signals a process that this walk has met before.
func (w *Walk) strike(pid int, sig syscall.Signal) (alive bool, e syscall.Errno) {
	t := aim(pid, sig)
	defer t.close()
	if st, ok := w.stat(pid); !ok || !w.descends(st) || st.dead() {
		return false, 0
	}
	return t.signal(sig)
}

// target is a process that is about to be signalled.
type target struct {
	pid, fd int
	opened  syscall.Errno
}

// aim opens a process; with no signal to send there is no need to.
func aim(pid int, sig syscall.Signal) target {
	t := target{pid: pid, fd: -1}
	if sig != 0 {
		if fd, e := PidfdOpen(pid); e == 0 {
			t.fd = fd
		} else {
			t.opened = e
		}
	}
	return t
}

func (t target) close() {
	if t.fd >= 0 {
		syscall.Close(t.fd)
	}
}

func (t target) signal(sig syscall.Signal) (alive bool, e syscall.Errno) {
	switch {
	case sig == 0:
	case t.opened == syscall.ESRCH:
		return false, 0
	case t.fd >= 0:
		e = PidfdSignal(t.fd, sig)
	default:
		// No descriptor can be had (kernel before 5.3, or too many open): the number has to do, a moment after it was
		// checked. To leave it alive would be worse.
		err := syscall.Kill(t.pid, sig)
		e, _ = err.(syscall.Errno)
	}
	if e == syscall.ESRCH {
		return false, 0
	}
	return true, e
}

// ours says whether a process executes the same file as this one. The name alone proves nothing: anybody can take it.
func ours(pid int) bool {
	var self, other syscall.Stat_t
	return syscall.Stat("/proc/self/exe", &self) == nil && syscall.Stat(string(procPath(pid, "/exe")), &other) == nil &&
		self.Dev == other.Dev && self.Ino == other.Ino
}

// descends follows the parents up to Root, or to a process that this walk has proved already.
func (w *Walk) descends(st stat) bool {
	child := st.pid
	for range 1 << 16 {
		parent := st.parent
		if parent == w.Root {
			return !w.excepted(parent, child)
		}
		if parent <= 1 {
			return false
		}
		up, ok := w.stat(parent)
		if !ok {
			return false // it ended just now; its children have a new parent and are seen in the next walk
		}
		if k, proved := w.seen[parent]; proved && k.start == up.start {
			return true
		}
		child, st = parent, up
	}
	return false
}

// stat is what /proc/PID/stat says of a process.
type stat struct {
	pid, parent int
	state       byte
	threads     int
	start       uint64
	guardian    bool // by its name
}

// dead says that only the entry in the process table is left. A process whose first thread has ended shows as a zombie too, but has others.
func (s stat) dead() bool { return s.state == 'X' || s.state == 'Z' && s.threads <= 1 }

func (w *Walk) stat(pid int) (s stat, ok bool) {
	b := w.read(procPath(pid, "/stat"))
	end := len(b) - 1
	for end >= 0 && b[end] != ')' { // the name may contain anything
		end--
	}
	if end < 0 || end+4 > len(b) {
		return s, false
	}
	s.pid = pid
	s.guardian = end >= len(Name) && string(b[end-len(Name):end]) == Name && b[end-len(Name)-1] == '('
	field, n := 2, uint64(0)
	for _, c := range b[end+1:] {
		switch {
		case c == ' ' || c == '\n':
			switch field {
			case 4:
				s.parent = int(n)
			case 20:
				s.threads = int(n)
			case 22:
				s.start = n
				return s, true
			}
			field, n = field+1, 0
		case field == 3:
			s.state = c
		case c >= '0' && c <= '9':
			n = n*10 + uint64(c-'0')
		}
	}
	return s, false
}

// read returns a whole small file of /proc, valid until the next call.
func (w *Walk) read(path []byte) []byte {
	fd := openPath(path)
	if fd < 0 {
		return nil
	}
	defer syscall.Close(fd)
	if w.buf == nil {
		w.buf = make([]byte, 4096)
	}
	n := 0
	for {
		if n == len(w.buf) {
			w.buf = append(w.buf, make([]byte, len(w.buf))...)
		}
		got, err := syscall.Read(fd, w.buf[n:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || got == 0 {
			return w.buf[:n]
		}
		n += got
	}
}

func openPath(path []byte) int {
	path = append(path, 0)
	const atCwd = -100
	at := atCwd
	for {
		fd, _, e := syscall.RawSyscall6(syscall.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(&path[0])),
			syscall.O_RDONLY|syscall.O_CLOEXEC, 0, 0, 0)
		if e == 0 {
			return int(fd)
		}
		if e != syscall.EINTR {
			return -1
		}
	}
}

// procPath builds a path below /proc out of numbers and strings.
func procPath(parts ...any) []byte {
	b := append(make([]byte, 0, 64), "/proc/"...)
	for _, p := range parts {
		switch p := p.(type) {
		case int:
			b = strconv.AppendInt(b, int64(p), 10)
		case string:
			b = append(b, p...)
		}
	}
	return b
}

// eachNumber calls f for every entry of a directory that is a number; false if it cannot be read.
func eachNumber(dir string, f func(n int)) bool {
	fd := openPath([]byte(dir))
	if fd < 0 {
		return false
	}
	var numbers []int
	var buf [4096]byte
	for {
		n, err := syscall.ReadDirent(fd, buf[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		for b := buf[:n]; len(b) > 19; {
			size := int(*(*uint16)(unsafe.Pointer(&b[16]))) // struct linux_dirent64: ino, off, reclen, type, name
			number, ok := 0, false
			for _, c := range b[19:size] {
				if c == 0 {
					break
				}
				if ok = c >= '0' && c <= '9'; !ok {
					break
				}
				number = number*10 + int(c-'0')
			}
			if ok {
				numbers = append(numbers, number)
			}
			b = b[size:]
		}
	}
	syscall.Close(fd)
	for _, n := range numbers {
		f(n)
	}
	return true
}

// Children lists the children of a process, living or dead, as the kernel has them; false if it cannot be known.
func Children(pid int) ([]int, bool) {
	w := Walk{Root: pid}
	if !w.begin() {
		return nil, false
	}
	return w.children(pid), true
}
