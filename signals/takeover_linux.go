package signals

import (
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/underlease/underlease/signals/guard"
)

// takeOver kills the tree of a guardian that has ended before it. Its processes are descendants of ours now.
//
// Ours, and not of this tree, are what was here before the first guardian, and other guardians with their trees. What a process of the
// former kind leaves to us as an orphan cannot be told apart from the tree and is killed with it; a wrapper that was started by
// anything but an exec in a shell with background jobs has no such children.
func (g *Guardian) takeOver() {
	if !g.shot.Load() {
		g.report(Event{Kind: GuardianLost, At: Now()})
	}
	begun := time.Now()
	w := guard.Walk{Root: os.Getpid(), Except: g.foreign}
	gap, nextStuck := passEvery, stuckAfter
	for quiet := 0; quiet < quietPasses; {
		populated := g.killBox()
		s := w.Kill()
		none := g.collectOrphans()
		if guard.Childless() && !populated {
			break // exact, whatever forks
		}
		// With children that are not of this tree the kernel never says so. What forks and ends leaves us something to
		// collect in every pass; a pass without it, in which nothing lived, is a good sign, and several are enough.
		if none && !populated && g.company() {
			quiet++
		} else {
			quiet = 0
		}
		if past := time.Since(begun); past >= nextStuck {
			nextStuck = past + stuckEvery
			ev := Event{Kind: Stuck, At: Now(), Count: s.Count, Pids: s.Pids, States: string(s.States)}
			if s.Denied != 0 {
				ev.Err = s.Denied
			}
			g.report(ev)
			gap = passSlowest
		}
		time.Sleep(gap)
	}
	if g.inside {
		// It died with its namespace, and only the first process of that could have collected it. A second report is dropped.
		g.report(Event{Kind: Exited, At: Now(), Status: status(syscall.WaitStatus(syscall.SIGKILL))})
	}
}

// quietPasses is how many walks in a row have to find nothing, neither alive nor dead.
const quietPasses = 4

// company says that this process has, or had, children that do not belong to this tree.
func (g *Guardian) company() bool {
	family.Lock()
	defer family.Unlock()
	return len(family.guardians) > 1 || len(g.strangers) > 0
}

// foreign says that a child of this process does not belong to this tree.
func (g *Guardian) foreign(pid int) bool {
	family.Lock()
	defer family.Unlock()
	_, guardian := family.guardians[pid]
	return guardian || g.strangers[pid]
}

// collectOrphans takes in those of the tree that have ended, and says whether there was nobody: neither alive nor ended just
// now. What has ended may have left a child that came to us after we looked.
func (g *Guardian) collectOrphans() (none bool) {
	children, ok := guard.Children(os.Getpid())
	if !ok { // without /proc there is no list: whoever has ended
		for {
			ws, pid := collectAny()
			if pid <= 0 {
				return false
			}
			g.ended(pid, ws)
		}
	}
	none = true
	for _, pid := range children {
		if g.foreign(pid) {
			continue
		}
		none = false
		if ws, ok := guard.Reap(pid); ok {
			g.ended(pid, ws)
		}
	}
	return none
}

func collectAny() (syscall.WaitStatus, int) {
	var ws syscall.WaitStatus
	pid, _ := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
	return ws, pid
}

// ended notes the end of a process that came to us: the command's own is reported.
func (g *Guardian) ended(pid int, ws syscall.WaitStatus) {
	if int64(pid) == g.command.Load() {
		g.report(Event{Kind: Exited, At: Now(), Status: status(ws)})
	}
}

// collecting says that collectStrangers runs: once is enough.
var collecting atomic.Bool

// collectStrangers is the duty of the first process of a container: orphans of others, from a shell that somebody opened in it, say, come
// to it and would stay as zombies. It ends with the last child.
func collectStrangers() {
	if !collecting.CompareAndSwap(false, true) {
		return
	}
	defer collecting.Store(false)
	for {
		pid := guard.WaitAny()
		if pid == 0 {
			return
		}
		family.Lock()
		_, guardian := family.guardians[pid]
		guardians := make([]*Guardian, 0, len(family.guardians))
		for _, g := range family.guardians {
			guardians = append(guardians, g)
		}
		family.Unlock()
		if guardian { // its own goroutine does it, in a moment
			time.Sleep(time.Millisecond)
			continue
		}
		if ws, ok := guard.Reap(pid); ok {
			family.Lock()
			delete(family.strangers, pid) // the number may be an orphan's from now on
			family.Unlock()
			for _, g := range guardians {
				g.ended(pid, ws)
			}
		}
	}
}
