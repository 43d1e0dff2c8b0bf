// Package signals is the process tree as the wrapper sees it, and signals as data.
//
// The command is not a child of the wrapper: a guardian (package guard, the same binary re-executed) is its parent, kills
// the whole tree at the deadline by itself, and is watched by the wrapper as it watches the wrapper.
package signals

import (
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Instant is a reading of CLOCK_BOOTTIME in nanoseconds: it goes on during a suspend, and nobody sets it.
type Instant = int64

// Never is the instant of what does not happen.
const Never Instant = math.MaxInt64

// Deadlines are the instants at which the guardian acts by itself, through one memory page that it shares with the
// wrapper. Every field may be [Never].
type Deadlines struct {
	StopAt, KillAt       Instant // of the lease: stop signal to the command, SIGKILL to the tree
	RunStopAt, RunKillAt Instant // of --max-run
	DrainKillAt          Instant // of --drain; there is no signal before it: it came from outside
}

// Leftovers says what becomes of background processes when the command itself has ended.
type Leftovers string

// The values of --leftovers.
const (
	LeftoversKill   Leftovers = "kill"   // SIGKILL at once
	LeftoversWait   Leftovers = "wait"   // the tree counts as running until they have ended
	LeftoversIgnore Leftovers = "ignore" // they are let go
)

// Isolation says what holds the tree together, beside the guardian.
type Isolation string

// The values of --isolate.
const (
	IsolateAuto   Isolation = "auto"   // cgroup where one has been delegated to us, else tree; the zero value too
	IsolateTree   Isolation = "tree"   // the guardian alone: it inherits every orphan of the tree
	IsolateCgroup Isolation = "cgroup" // a control group (v2) of its own: killed as a whole, whoever its processes have become
	IsolatePidns  Isolation = "pidns"  // a PID namespace of its own: dies with the guardian, whatever kills that
)

// Command is what the guardian runs. Working directory, limits, open descriptors and the rest of the process state are
// those that the wrapper itself was started with.
type Command struct {
	Path       string   // from [Resolve]
	Args       []string // with the name as Args[0]
	Env        []string
	StopSignal syscall.Signal
	Grace      time.Duration // from a stop that the guardian decides alone to SIGKILL
	Leftovers  Leftovers
	Isolate    Isolation
	Socket     string // from [NewSocket]: where the guardian answers [Ask] while the command runs; empty: nowhere
	Term       string // that it tells whoever asks
}

// Status is how the command itself ended.
type Status struct {
	Code   int            // 0 to 255; 128+n where Signal is n
	Signal syscall.Signal // zero unless a signal ended it
	Core   bool           // it left a core dump
}

// EventKind says what happened.
type EventKind int

// What happens to a tree after its start. Exited comes at most once; Gone comes exactly once and last.
const (
	Exited       EventKind = iota + 1 // the command itself has ended: Status
	Leftover                          // background processes were found after Exited: Count, Pids, Killed
	Stopping                          // the guardian sent the stop signal by itself, because of Why
	Killing                           // the tree is being killed, because of Why
	Stuck                             // processes are still alive a second after SIGKILL: Count, Pids, Err
	GuardianLost                      // the guardian was lost: the wrapper kills the tree
	Gone                              // no process of the tree is left (with LeftoversIgnore: none that we wait for)
)

// Why says for which reason the guardian acted.
type Why int

// The reasons, in the order of Deadlines.
const (
	WhyNone     Why = iota
	WhyLease        // StopAt or KillAt
	WhyMaxRun       // RunStopAt or RunKillAt
	WhyDrain        // DrainKillAt
	WhyOrder        // the wrapper ordered it
	WhyOrphan       // the wrapper was gone
	WhyLeftover     // the command had ended and left processes
)

// Event is something that happened to the tree, with the instant at which the guardian saw it.
type Event struct {
	Kind   EventKind
	At     Instant
	Status Status
	Why    Why
	Count  int    // how many processes
	Pids   []int  // at most 16 of them
	States string // the state letter of each of Pids, as in proc_pid_stat(5): D for one that the kernel cannot interrupt
	Killed bool   // whether the leftovers were killed
	Err    error  // Stuck: why one of them could not be signalled: EPERM, say; nil where all were, and have not ended yet
}

// Known says in words what is known of the processes of a [Stuck] event: how many, which, in what state, and what forbids to end them.
func (e Event) Known() string {
	if e.Count == 0 {
		return "processes that /proc does not show"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d", e.Count)
	for i, pid := range e.Pids {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&b, "%spid %d", sep, pid)
		if i < len(e.States) {
			b.WriteString(" (" + stateName(e.States[i]) + ")")
		}
	}
	if e.Count > len(e.Pids) {
		b.WriteString(", ...")
	}
	if e.Err != nil {
		fmt.Fprintf(&b, "; SIGKILL: %v", e.Err)
	}
	return b.String()
}

// stateName returns the words for a state that a process which was sent SIGKILL can be seen in.
//
// Source: proc_pid_stat(5), state.
func stateName(letter byte) string {
	switch letter {
	case 'D':
		return "D, waits in the kernel for a device or a file system"
	case 'Z':
		return "Z, a thread of it has not ended"
	case 't':
		return "t, held by a debugger"
	case 'T':
		return "T, stopped"
	default:
		return string(rune(letter))
	}
}

// StartError says why no command runs. Exactly one of its fields says more.
type StartError struct {
	Path    string
	Errno   syscall.Errno // of fork or exec
	Fork    bool          // the system refused a process, not the file: EAGAIN or ENOMEM at fork
	TooLate bool          // the stop instant had passed when the guardian was about to fork
	Isolate error         // the isolation that was asked for cannot be had
}

func (e *StartError) Error() string {
	switch {
	case e.Isolate != nil:
		return e.Isolate.Error()
	case e.TooLate:
		return "too little of the lease was left to start the command"
	case e.Fork:
		return fmt.Sprintf("cannot start a process for %s: %v", e.Path, e.Errno)
	case e.Errno == syscall.ENOENT && interpreter(e.Path) != "":
		return fmt.Sprintf("cannot run %s: the interpreter %s of its first line was not found", e.Path, interpreter(e.Path))
	default:
		return fmt.Sprintf("cannot run %s: %v", e.Path, e.Errno)
	}
}

// interpreter is what the first line of a script names, as it would be written in a program, so that the end of a line that is another
// system's can be seen; or empty. Where it is not there, the kernel says of the script that there is no such file.
func interpreter(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	var b [256]byte // Source: Linux, BINPRM_BUF_SIZE
	n, _ := io.ReadFull(f, b[:])
	line, _, _ := strings.Cut(string(b[:n]), "\n")
	line, script := strings.CutPrefix(line, "#!")
	name, _, _ := strings.Cut(strings.Trim(line, " \t"), " ")
	if !script || name == "" {
		return ""
	}
	return strconv.Quote(name)
}

func (e *StartError) Unwrap() error {
	switch {
	case e.Isolate != nil:
		return e.Isolate
	case e.Errno == 0:
		return nil
	}
	return e.Errno
}
