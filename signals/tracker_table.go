//go:build darwin || (linux && portable)

package signals

import (
	"os"
	"sync"
	"syscall"
)

// tracksByLooking: orphans leave the tree on this system, so that it has to be looked at again and again.
const tracksByLooking = true

func adoptOrphans() {}

// tableEntry is a process in the system's table. Start tells it from a later one with its number.
type tableEntry struct {
	pid, parent, group int
	start              int64
	dead               bool
}

// tracker finds the processes of a tree by looking: whoever is in the command's process group, or a child of one that is known, belongs
// to it from then on. One that was forked and left by its parent between two looks, into a session of its own, is lost.
type tracker struct {
	mu    sync.Mutex
	root  int
	group int           // 0: shared with others
	known map[int]int64 // start by pid
}

func newTracker(root int, ownGroup bool) *tracker {
	t := &tracker{root: root, known: map[int]int64{}}
	if ownGroup {
		t.group = root
	}
	t.list()
	return t
}

// inherit has nothing to do: orphans do not come to us.
func (t *tracker) inherit(int) {}

// list returns the living processes of the tree.
func (t *tracker) list() (pids []int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	table := processTable()
	members := map[int]int64{}
	for {
		grown := false
		for _, p := range table {
			if _, is := members[p.pid]; is || p.pid == os.Getpid() || p.pid <= 1 {
				continue
			}
			start, before := t.known[p.pid]
			_, child := members[p.parent]
			first := p.pid == t.root && len(t.known) == 0
			if before && start == p.start || child || first || t.group != 0 && p.group == t.group {
				members[p.pid] = p.start
				grown = true
			}
		}
		if !grown {
			break
		}
	}
	for _, p := range table {
		if _, is := members[p.pid]; is && !p.dead {
			pids = append(pids, p.pid)
		}
	}
	if len(table) > 0 { // else it could not be read: what was known stays known
		t.known = members
	}
	if len(members) == 0 {
		t.group = 0 // its number may be another's from now on
	}
	return pids
}

// kill sends SIGKILL to everything that list finds, and returns that.
func (t *tracker) kill() (left []int, denied syscall.Errno) {
	left = t.list()
	for _, pid := range left {
		if e, ok := syscall.Kill(pid, syscall.SIGKILL).(syscall.Errno); ok && e != syscall.ESRCH {
			denied = e
		}
	}
	return left, denied
}
