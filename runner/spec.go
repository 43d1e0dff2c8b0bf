package runner

import (
	"context"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/signals"
)

// Forever is the duration of what has no limit: Spec.Wait, Spec.Drain.
const Forever = backends.Forever

// Auto as a duration of a [Spec] asks [Spec.Settle] for the default.
const Auto time.Duration = -1

// MinTTL is the shortest ttl; below WarnTTL a run is warned about.
const (
	MinTTL  = 2 * time.Second
	WarnTTL = 10 * time.Second
)

// IfUnavailable says what to do when the store cannot be reached at acquire.
type IfUnavailable string

// The values of --if-unavailable.
const (
	UnavailableFail IfUnavailable = "fail" // exit 69
	UnavailableSkip IfUnavailable = "skip" // exit as busy
	UnavailableRun  IfUnavailable = "run"  // run without a lease and without a term
)

// OnLost says what becomes of the command when the loss of the lease is confirmed.
type OnLost string

// The values of --on-lost.
const (
	LostKill OnLost = "kill" // SIGKILL at once
	LostTerm OnLost = "term" // stop signal, then SIGKILL after the grace
)

// Spec is one run: what to run, under which lease, and how. Flags, environment and files end here.
type Spec struct {
	Namespace, Lease, Holder string
	Slots                    int

	TTL           time.Duration // zero: none, legal on an endless store alone
	Wait          time.Duration // zero: do not wait; [Forever]
	IfUnavailable IfUnavailable
	MinHold       time.Duration // zero: none
	Once          Once
	MaxRun        time.Duration // zero: no limit
	Drain         time.Duration // [Forever]: no limit
	Grace         time.Duration // [Auto]
	Margin        time.Duration // [Auto]: grows with the number of descendants
	RenewEvery    time.Duration // [Auto]
	ClockDrift    float64       // 0.01 is one per cent
	OnLost        OnLost
	StopSignal    syscall.Signal
	Leftovers     signals.Leftovers
	Isolate       signals.Isolation

	Path string   // from [signals.Resolve]
	Args []string // with the command's name as Args[0]
	Env  []string // as inherited; the runner removes old facts and appends those of this run

	growMargin bool // the margin was not given, and grows with the number of descendants
}

// RelationError says that settings do not fit together, wherever each of them came from. It is exit code 78.
type RelationError struct{ Text, Hint string }

func (e *RelationError) Error() string { return e.Text }

// Outcome is how a run ended, in one word. The words are part of the report's format.
type Outcome string

// The outcomes. Those before OutcomeNotStarted are of runs in which the command ran.
const (
	OutcomeOK              Outcome = "ok"               // the command exited with 0
	OutcomeFailed          Outcome = "failed"           // another code, or a signal that we did not order
	OutcomeStopped         Outcome = "stopped"          // a signal from outside was forwarded and the command ended, whatever its code
	OutcomeDrainedOut      Outcome = "drained-out"      // it did not end within --drain and was killed
	OutcomeMaxRun          Outcome = "max-run"          // stopped by --max-run
	OutcomeLostTaken       Outcome = "lost-taken"       // the store said that the lease is no longer ours
	OutcomeLostExpired     Outcome = "lost-expired"     // the deadline passed while this process did not run: it was stopped, frozen or suspended
	OutcomeLostUnreachable Outcome = "lost-unreachable" // the deadline passed because the store did not confirm a renewal
	OutcomeGuardianLost    Outcome = "guardian-lost"    // the guardian was killed, and the command with it
	OutcomeBug             Outcome = "bug"              // our own fault

	OutcomeMigrated   Outcome = "migrated"        // of a gate: exited with 0, and that is written down
	OutcomeUnrecorded Outcome = "done-unrecorded" // exited with 0, and that could not be written down

	OutcomeApplied Outcome = "already-applied" // of a gate: nothing to do
	OutcomeSkipped Outcome = "skipped"         // of a gate: not applied, and the lease is held by another
	OutcomeNotDue  Outcome = "not-due"         // it has succeeded already: --once-per, --min-interval

	OutcomeNotStarted  Outcome = "not-started" // the command could not be run, or too little of the lease was left
	OutcomeBusy        Outcome = "busy"        // held by another, or the wait ran out
	OutcomeUnavailable Outcome = "unavailable" // the store did not answer
	OutcomeDenied      Outcome = "denied"      // the store refused for lack of a right
	OutcomeBroken      Outcome = "broken"      // the store broke the contract
	OutcomeInterrupted Outcome = "interrupted" // a signal ended us before there was a command
	OutcomeNested      Outcome = "nested"      // a run of this lease inside itself
	OutcomeInvalid     Outcome = "invalid"     // settings that cannot work; found before anything was asked of the store
)

// The exit codes of the program itself; the command's own codes pass through. See the README for when each is used.
const (
	ExitUsage       = 64
	ExitUnavailable = 69
	ExitBug         = 70
	ExitSystem      = 71
	ExitLost        = 74
	ExitBusy        = 75
	ExitBroken      = 76
	ExitDenied      = 77
	ExitSettings    = 78
	ExitMaxRun      = 124
	ExitCannotRun   = 126
	ExitNotFound    = 127
)

// Result is how a run ended.
type Result struct {
	Outcome Outcome
	Reason  string // one sentence without a full stop, for people; empty when all went well
	Hint    string // what to do, or empty

	// Unleased is why the command ran without a lease, or empty. It was said when the command was started.
	Unleased string

	ExitCode int            // ours; [ExitBusy] stands for --busy-exit, which the caller knows
	Signal   syscall.Signal // not zero: end by this signal
	Started  bool           // whether a command ran

	Done *Done // the success that made this run needless, or nil

	Grant    backends.Grant      // Term is zero without one
	Busy     *backends.BusyError // who was in the way, or nil
	Waited   time.Duration       // until the grant, or until we gave up
	Held     time.Duration       // from the grant to its end
	Ran      time.Duration       // from the start of the command to the end of its tree
	Renewals int                 // that the store confirmed
	Released bool                // the store confirmed the release

	recorded bool   // the success is written down
	period   string // the slot of the clock that the run was for, or empty
}

// RunID returns the idempotency key of the run, lease/term or lease/slot of the clock, or nothing without a grant.
func (r Result) RunID() string {
	if r.Grant.Term == 0 {
		return ""
	}
	if r.period != "" {
		return periodID(r.Grant, r.period)
	}
	return runID(r.Grant)
}

// Tree is the process tree of one run. *signals.Guardian implements it. No method but Pin and Start blocks.
type Tree interface {
	// Pin hands copies of descriptors to the guardian and returns when it has acknowledged them.
	Pin(fds []int) error
	// Start runs the command and returns its pid. *signals.StartError says why there is none.
	Start(c signals.Command, d signals.Deadlines) (pid int, err error)
	// Publish tells the guardian new deadlines.
	Publish(d signals.Deadlines)
	// Forward sends a signal to the command alone.
	Forward(sig syscall.Signal)
	// Stop sends the stop signal to the command alone, at most once, and SIGCONT.
	Stop()
	// Kill sends SIGKILL to the whole tree until it is empty, also where the guardian does not react.
	Kill()
	// Tend looks after a guardian that cannot say that the command has ended. It costs little and may be called often.
	Tend()
	// Descendants counts the living processes of the tree.
	Descendants() int
	// Events delivers what happens after Start. It is closed after [signals.Gone], when the guardian has ended, too.
	Events() <-chan signals.Event
	// Close ends a guardian that has started no command. Events is closed when it has ended.
	Close()
}

// Alarm wakes the loop up. Its clock is the one of [Platform.Now].
type Alarm interface {
	Set(at signals.Instant) // replaces the last one; [signals.Never] disarms; the past fires at once
	C() <-chan struct{}
	Close()
}

// Platform is what a run needs of the system; tests replace it.
type Platform struct {
	// Launch returns a tree in which nothing runs yet. It is called once, and again only where a start came too late.
	Launch  func() (Tree, error)
	Now     func() signals.Instant
	Alarm   Alarm
	Signals <-chan syscall.Signal // from outside, to be forwarded
	Log     *slog.Logger
	Say     func(line, hint string) // one line to people, at once; must not block
	Waiting func(Waiting)           // progress while the lease is busy; may be nil; must not block

	// Applied asks a check of the user, in place of the marker, whether a gate has to do nothing. Nil: there is none. An answer that is
	// neither yes nor no is a [*CheckError]. It returns soon after its context has ended.
	Applied func(context.Context) (bool, error)
}

// Waiting is what is known while a run waits for its lease.
type Waiting struct {
	Lease  string
	Busy   *backends.BusyError // nil while the store does not answer
	Err    error               // the last error, or nil
	Waited time.Duration
	Left   time.Duration // of the wait; [Forever]
	Done   bool          // the wait is over: clear the line
}

func relationf(hint, format string, args ...any) error {
	return &RelationError{Text: fmt.Sprintf(format, args...), Hint: hint}
}
