package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner/internal/tenure"
	"github.com/underlease/underlease/signals"
)

// hintEvery is the shortest time between two looks that a store's hints cause.
const hintEvery = 50 * time.Millisecond

// bugKill is how long a tree may take to be gone after a fault of ours.
const bugKill = 10 * time.Second

// watchAfter is how old a run is before its store is asked for hints: until then the looks are enough. A short command would
// pay for a watch that never told it anything; to close one of inotify alone takes the kernel 5 to 25 ms, a grace period of SRCU.
const watchAfter = 250 * time.Millisecond

// dismissWithin is how long a guardian may take to end that has started nothing, or said that nothing is left: for longer than it takes
// package signals to end one that does not.
const dismissWithin = time.Second

// keeper keeps one grant while a command runs under it. Its fields belong to the goroutine that calls keep, but for the
// channels and what is atomic.
type keeper struct {
	*run
	grant   backends.Grant
	sent    signals.Instant // of the acquisition
	machine *tenure.Machine
	tree    Tree
	leased  bool // false: the command runs without a lease
	answers chan answer
	counts  chan int
	hints   chan struct{}
	bugs    chan *Bug
	started signals.Instant

	seen    atomic.Pointer[backends.Grant] // grant as the newest answer showed it, for the watch
	unsure  bool                           // the guardian was lost in the start: the command may have begun
	exited  *signals.Status                // how the command itself ended
	lastErr error                          // of the newest attempt that failed
	failed  int                            // attempts to renew since the last one that was confirmed
}

// answer is what came of one attempt to renew.
type answer struct {
	attempt int
	grant   backends.Grant
	err     error
	took    time.Duration
}

func newKeeper(r *run, got held) *keeper {
	k := &keeper{
		run:     r,
		grant:   got.Grant,
		sent:    got.sent,
		leased:  got.Term != 0,
		answers: make(chan answer, 8),
		counts:  make(chan int, 1),
		hints:   make(chan struct{}, 1),
		bugs:    make(chan *Bug, 1),
	}
	k.seen.Store(&got.Grant)
	c := r.spec.tenure()
	c.Seed = rand.Uint64()
	if !k.leased {
		c.TTL, c.RenewEvery = 0, tenure.NoLimit
	}
	k.machine = tenure.New(c, got.sent, got.TTL, r.Now())
	return k
}

// dismiss ends a guardian that has started nothing, and waits for its end: it may hold copies of the lock.
func (k *keeper) dismiss() {
	if k.tree != nil {
		k.tree.Close()
		drain(k.tree, dismissWithin)
	}
}

// drain waits until nothing is left of a tree, for at most limit.
func drain(t Tree, limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case _, open := <-t.Events():
			if !open {
				return
			}
		case <-timer.C:
			return
		}
	}
}

// errNoGuardian says that the guardian was lost before it was told to start anything.
var errNoGuardian = errors.New("the guardian was lost")

// start runs the command. Without an error it runs, or may run: only the guardian's refusal proves that it does not.
func (k *keeper) start(env []string, socket string) error {
	tree, err := k.Launch()
	if err != nil {
		return err
	}
	k.tree = tree
	if p, ok := k.store.Backend.(backends.Pinner); ok && k.leased {
		fds, err := p.Pins(k.grant)
		if err != nil {
			return err
		}
		if err := tree.Pin(fds); err != nil {
			return fmt.Errorf("%w before the start: %w", errNoGuardian, err)
		}
	}
	if !k.machine.Startable(k.Now()) {
		return &signals.StartError{Path: k.spec.Path, TooLate: true}
	}
	pid, err := tree.Start(signals.Command{
		Path:       k.spec.Path,
		Args:       k.spec.Args,
		Env:        env,
		StopSignal: k.spec.StopSignal,
		Grace:      k.spec.Grace,
		Leftovers:  k.spec.Leftovers,
		Isolate:    k.spec.Isolate,
		Socket:     socket,
		Term:       k.term(),
	}, k.deadlines())
	if _, refused := errors.AsType[*signals.StartError](err); refused {
		return err
	}
	k.started, k.unsure = k.Now(), err != nil
	if k.unsure {
		k.Log.Info("child may have started", "program", k.spec.Args[0], "err", err)
		return nil
	}
	k.Log.Info("child started", "pid", pid, "program", k.spec.Args[0])
	return nil
}

// notStarted says what it means that the command could not be started. Again says that another attempt may succeed.
func (k *keeper) notStarted(err error) (res Result, again bool) {
	res = Result{Outcome: OutcomeNotStarted, Grant: k.grant, ExitCode: ExitSystem, Reason: err.Error()}
	var start *signals.StartError
	switch {
	case errors.As(err, &start) && start.TooLate:
		res.ExitCode, again = ExitUnavailable, true
		res.Hint = "the store answers slowly, or this machine is short of time: a longer --ttl helps"
	case errors.Is(err, backends.ErrLost):
		res.ExitCode, again = ExitUnavailable, true
	case errors.Is(err, errNoGuardian):
		again = true
	case start == nil: // no guardian could be launched
	case start.Isolate != nil: // it could be had when the settings were read
		res.ExitCode = ExitSettings
		res.Reason = fmt.Sprintf("--isolate %s: %v", k.spec.Isolate, start.Isolate)
	case start.Fork:
		res.Hint = "look at the limits of processes (ulimit -u, pids.max) and of memory"
	case start.Errno == syscall.ENOENT, start.Errno == syscall.ENOTDIR:
		res.ExitCode = ExitNotFound
	default:
		res.ExitCode = ExitCannotRun
	}
	return res, again
}

// term is what the guardian tells those who ask; empty without a lease.
func (k *keeper) term() string {
	if !k.leased {
		return ""
	}
	return k.grant.Term.String()
}

// keep owns the decision from the start of the command to the release of the lease.
func (k *keeper) keep(ctx context.Context) Result {
	defer func() {
		if bug := bugOf(recover()); bug != nil {
			k.tree.Kill()
			drain(k.tree, bugKill)
			panic(bug)
		}
	}()
	attempts, cancel := context.WithCancel(ctx)
	defer cancel()
	orders := k.machine.Started(k.started)
	if k.unsure {
		orders |= k.machine.GuardianGone(k.Now(), k.Now())
	} else {
		if w, ok := k.store.Backend.(backends.Watcher); ok && k.leased {
			k.beside(func() { k.watch(attempts, w) })
		}
		k.count(attempts)
		if k.grant.Ask != nil {
			orders |= k.asked()
		}
	}
	k.obey(attempts, orders)
	done := ctx.Done()
	for {
		k.Alarm.Set(k.machine.Wake())
		var (
			ev     signals.Event
			open   = true
			orders tenure.Orders
		)
		select {
		case ev, open = <-k.tree.Events():
		default:
			// What the guardian saw comes first: it happened before we woke up.
			select {
			case ev, open = <-k.tree.Events():
			case <-k.Alarm.C():
			case a := <-k.answers:
				orders = k.answered(a)
			case n := <-k.counts:
				orders = k.machine.Grow(time.Duration(n)*marginPerProcess, k.Now())
			case <-k.hints:
				orders = k.machine.Hurry(k.Now())
			case bug := <-k.bugs:
				panic(bug)
			case sig := <-k.Signals:
				orders = k.forward(sig)
			case <-done:
				done = nil
				orders = k.drain()
			}
		}
		if !open { // never without Gone; but a loop without an end would be worse than a wrong word
			ev = signals.Event{Kind: signals.Gone, At: k.Now()}
		}
		if ev.Kind != 0 {
			orders |= k.happened(ev)
		} else {
			orders |= k.machine.Tick(k.Now())
		}
		k.obey(attempts, orders)
		if orders&(tenure.Release|tenure.End) != 0 {
			cancel()
			return k.end(ctx, orders&tenure.Release != 0, ev.At)
		}
	}
}

// obey does what the machine ordered, without blocking.
func (k *keeper) obey(ctx context.Context, orders tenure.Orders) {
	if orders&tenure.Publish != 0 {
		k.tree.Publish(k.deadlines())
	}
	if orders&tenure.Kill != 0 {
		k.tree.Kill()
		k.Log.Info("signal sent", "signal", "KILL", "why", k.why())
	}
	if orders&tenure.Stop != 0 {
		k.tree.Stop()
		k.Log.Info("signal sent", "signal", signals.Name(k.spec.StopSignal), "why", k.why())
	}
	if orders&tenure.Renew != 0 {
		k.renew(ctx, k.machine.Attempt())
	}
}

// beside runs f beside the decision. A panic in it is the owner's.
func (k *keeper) beside(f func()) {
	go func() {
		defer func() {
			if bug := bugOf(recover()); bug != nil {
				select {
				case k.bugs <- bug:
				default: // one is enough
				}
			}
		}()
		f()
	}()
}

// renew makes one attempt beside the decision.
func (k *keeper) renew(ctx context.Context, attempt int) {
	g, limit := k.grant, k.spec.CallLimit()
	begun := k.Now()
	k.beside(func() {
		got, err := call(ctx, k.store.Address, limit, func(ctx context.Context) (backends.Grant, error) { return k.store.Renew(ctx, g) })
		select {
		case k.answers <- answer{attempt, got, err, time.Duration(k.Now() - begun)}:
		case <-ctx.Done():
		}
	})
	k.count(ctx)
}

func (k *keeper) answered(a answer) tenure.Orders {
	now := k.Now()
	switch {
	case a.err == nil:
		before := k.machine.Renewals()
		orders := k.machine.Renewed(a.attempt, a.grant.TTL, now)
		if k.machine.Renewals() == before {
			return orders // it came too late to count
		}
		first := a.grant.Ask != nil && k.grant.Ask == nil
		k.grant.TTL, k.grant.Ask = a.grant.TTL, a.grant.Ask
		seen := k.grant
		k.seen.Store(&seen)
		if k.failed > 0 {
			k.Log.Warn("lease renewed again", "grant", k.grant, "failed", k.failed, "valid_for", k.validFor())
		}
		k.lastErr, k.failed = nil, 0
		k.tree.Tend()
		k.Log.Debug("lease renewed", "grant", k.grant, "attempt", a.attempt, "took", a.took, "valid_for", k.validFor())
		if first {
			orders |= k.asked()
		}
		return orders
	case errors.Is(a.err, backends.ErrLost):
		k.lastErr = a.err
		k.Log.Info("lease lost", "grant", k.grant, "err", a.err) // the outcome says it in words
		return k.machine.Lost(a.attempt, now)
	default:
		level := slog.LevelWarn
		if k.failed > 0 && k.lastErr != nil && k.lastErr.Error() == a.err.Error() {
			level = slog.LevelInfo // it was said: what ends it is said next
		}
		k.lastErr = a.err
		k.failed++
		k.Log.Log(context.Background(), level, "renewal failed", "grant", k.grant, "attempt", a.attempt, "err", a.err, "valid_for", k.validFor())
		return k.machine.RenewFailed(a.attempt, now)
	}
}

// count counts the processes of the tree beside the decision: a large tree takes longer to kill.
func (k *keeper) count(ctx context.Context) {
	if !k.spec.growMargin {
		return
	}
	k.beside(func() {
		n := k.tree.Descendants()
		select {
		case k.counts <- n:
		case <-ctx.Done():
		}
	})
}

// watch turns the store's hints into looks.
func (k *keeper) watch(ctx context.Context, w backends.Watcher) {
	if !k.pause(ctx, watchAfter) {
		return
	}
	for {
		err := w.WaitChange(ctx, *k.seen.Load())
		if ctx.Err() != nil {
			return
		}
		wait := hintEvery
		if err != nil {
			wait = time.Second // a hint that cannot be had is only a hint
		} else {
			select {
			case k.hints <- struct{}{}:
			default:
			}
		}
		if !k.pause(ctx, wait) {
			return
		}
	}
}

// forward passes a signal from outside on to the command. One that asks it to finish starts the drain.
func (k *keeper) forward(sig syscall.Signal) tenure.Orders {
	k.tree.Forward(sig)
	k.Log.Info("signal forwarded", "signal", signals.Name(sig))
	if !signals.Ends(sig) && sig != k.spec.StopSignal {
		return 0
	}
	return k.machine.Drain(k.Now())
}

// asked says that somebody asks this holder to finish: the command drains as after a signal from outside.
func (k *keeper) asked() tenure.Orders {
	k.Log.Warn("asked to stop", "grant", k.grant, "by", k.grant.Ask.By, "reason", k.grant.Ask.Reason)
	return k.drain()
}

// drain asks the command to finish, as a signal from outside would.
func (k *keeper) drain() tenure.Orders {
	k.tree.Forward(k.spec.StopSignal)
	return k.machine.Drain(k.Now())
}

// happened takes in what the guardian saw.
func (k *keeper) happened(ev signals.Event) tenure.Orders {
	now := k.Now()
	switch ev.Kind {
	case signals.Exited: // what is due by now is left to the next event: the tree may have been gone before
		k.exited = &ev.Status
		k.Log.Info("child exited", "exit_code", ev.Status.Code, "signal", int(ev.Status.Signal))
		return 0
	case signals.Leftover:
		k.sayLeftovers(ev)
		return 0
	case signals.Stopping:
		if ev.Why == signals.WhyLease || ev.Why == signals.WhyMaxRun {
			return k.machine.GuardianStopped(ev.Why == signals.WhyMaxRun, ev.At, now)
		}
	case signals.Killing:
		switch ev.Why {
		case signals.WhyLease:
			return k.machine.GuardianKilled(tenure.Expired, ev.At, now)
		case signals.WhyMaxRun:
			return k.machine.GuardianKilled(tenure.MaxRun, ev.At, now)
		case signals.WhyDrain:
			return k.machine.GuardianKilled(tenure.DrainedOut, ev.At, now)
		default: // it did what we ordered, or what --leftovers asks for
		}
	case signals.Stuck:
		k.sayStuck(ev)
		return 0
	case signals.GuardianLost:
		return k.machine.GuardianGone(ev.At, now)
	case signals.Gone:
		return k.machine.TreeGone(true, ev.At, now)
	}
	return k.machine.Tick(now)
}

func (k *keeper) sayLeftovers(ev signals.Event) {
	did := "kept the lease for"
	switch {
	case ev.Killed:
		did = "killed"
	case k.spec.Leftovers == signals.LeftoversIgnore:
		did = "left alone"
	}
	k.Say(fmt.Sprintf("%s %d background %s that %s left: pids %v", did, ev.Count, plural(ev.Count, "process", "processes"), k.spec.Args[0], ev.Pids), "")
}

func (k *keeper) sayStuck(ev signals.Event) {
	hint := "the lease is kept until the last of them has ended"
	if k.machine.IsLost() {
		hint = "the lease is lost: another run may begin beside them"
	}
	k.Say("still alive after SIGKILL: "+ev.Known(), hint)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// end gives the lease back, where it is still ours, and says how the run ended. Gone is when the tree was gone.
func (k *keeper) end(ctx context.Context, release bool, gone signals.Instant) Result {
	res := k.verdict()
	res.Ran = max(0, time.Duration(gone-k.started)) // a short command may be gone before we hear that it has begun
	if k.leased && release {
		validUntil := k.record(ctx, &res)
		end := backends.End{Outcome: string(res.Outcome), ExitCode: res.ExitCode, Took: res.Ran}
		res.Released = k.release(context.WithoutCancel(ctx), k.grant, end, validUntil)
	}
	if k.leased {
		res.Held = k.since(k.acquired)
	}
	drain(k.tree, dismissWithin) // the guardian, where that ended beside the release
	return res
}

// verdict says how the run ended.
func (k *keeper) verdict() Result {
	res := Result{Started: true, Grant: k.grant, Renewals: k.machine.Renewals(), period: k.period}
	if k.exited != nil {
		res.ExitCode, res.Signal = k.exited.Code, k.exited.Signal
	}
	name := k.display()
	switch k.machine.Cause() {
	case tenure.NoCause:
		res.Outcome = OutcomeOK
		if res.ExitCode != 0 {
			res.Outcome = OutcomeFailed
		}
	case tenure.Drained:
		res.Outcome = OutcomeStopped
	case tenure.DrainedOut:
		res.Outcome = OutcomeDrainedOut
		res.Reason = fmt.Sprintf("killed: %q did not end within --drain %s", name, Short(k.spec.Drain))
	case tenure.MaxRun:
		res = k.overruled(res, OutcomeMaxRun, fmt.Sprintf("stopped: %q ran for --max-run %s", name, Short(k.spec.MaxRun)))
		res.ExitCode = ExitMaxRun
	case tenure.Unreachable:
		res = k.overruled(res, OutcomeLostUnreachable, fmt.Sprintf("lost: %q could not be renewed in time, and the command was stopped%s", name, k.because()))
	case tenure.Expired:
		res = k.overruled(res, OutcomeLostExpired, fmt.Sprintf("lost: %q ran out while this process did not run, and the command was stopped", name))
		res.Hint = "the wrapper was stopped, frozen or suspended for longer than the ttl allows"
	case tenure.Taken:
		res = k.overruled(res, OutcomeLostTaken, fmt.Sprintf("lost: %q is no longer ours, and the command was stopped%s", name, k.because()))
	case tenure.GuardianLost:
		res = k.overruled(res, OutcomeGuardianLost, fmt.Sprintf("the guardian of %q was killed, and the command was stopped", name))
	}
	return res
}

// overruled is the verdict of a run that we stopped: the command's own status does not count.
func (k *keeper) overruled(res Result, o Outcome, reason string) Result {
	res.Outcome, res.Reason, res.ExitCode, res.Signal = o, reason, ExitLost, 0
	res.Hint = backends.Hint(k.lastErr)
	return res
}

func (k *keeper) because() string {
	if k.lastErr == nil {
		return ""
	}
	return ": " + k.lastErr.Error()
}

func (k *keeper) why() string {
	switch k.machine.Cause() {
	case tenure.NoCause:
		return "none"
	case tenure.Drained, tenure.DrainedOut:
		return "drain"
	case tenure.MaxRun:
		return "max-run"
	case tenure.Unreachable:
		return "unreachable"
	case tenure.Expired:
		return "expired"
	case tenure.Taken:
		return "taken"
	case tenure.GuardianLost:
		return "guardian lost"
	}
	return ""
}

func (k *keeper) validFor() time.Duration {
	if k.machine.ValidUntil() == tenure.Never {
		return Forever
	}
	return time.Duration(k.machine.ValidUntil() - k.Now())
}

func (k *keeper) deadlines() signals.Deadlines {
	d := k.machine.Deadlines()
	return signals.Deadlines{
		StopAt: d.StopAt, KillAt: d.KillAt,
		RunStopAt: d.RunStopAt, RunKillAt: d.RunKillAt,
		DrainKillAt: d.DrainKillAt,
	}
}
