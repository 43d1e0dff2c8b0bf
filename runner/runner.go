// Package runner runs one command under one lease.
//
// # Promise
//
// The command runs only while the lease is ours by the store's own count, and the lease is given back only when the last
// process of the command's tree is gone. Where the lease can no longer be proved, the tree is dead before anybody else
// can have it.
//
// # How
//
//	acquire     one attempt at a time, each with a limit; all of them carry one handle, so that an answer that was lost is
//	            settled by the next attempt, or abandoned when we give up
//	start       only if what is left of the grant covers grace and margin; the guardian looks again right before the fork
//	keep        one goroutine owns the decision: package tenure tells it what is due, and it obeys. It calls neither the
//	            store nor anything else that can block: attempts to renew run beside it and are left behind when late
//	release     after the tree is gone, and not after a loss
//
// # Limits
//
// The guardian kills by itself what this process cannot: when it is stopped, frozen or killed. Both killed in the same
// instant leave grandchildren to the system. What a command has sent elsewhere before its end cannot be taken back: for
// that there is the term.
package runner

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/signals"
)

// Run acquires the lease, runs the command under it, and releases it when the tree is gone. The spec must have been
// settled by [Spec.Settle]. When ctx ends, a run that waits gives up, and a command gets the stop signal and its drain.
func Run(ctx context.Context, s Spec, store *backends.Store, p Platform) Result {
	r := &run{spec: s, store: store, Platform: p, begun: p.Now()}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends attempts, hints and whatever else runs beside the decision
	res := r.concluded(ctx, r.run(ctx))
	if res.Started {
		r.Log.Info("run ended", "outcome", string(res.Outcome), "exit_code", res.ExitCode, "term", int64(res.Grant.Term), "held_for", res.Held)
	}
	return res
}

// run is the state of one run.
type run struct {
	Platform
	spec  Spec
	store *backends.Store
	begun signals.Instant

	// Of a run that is not to be repeated: see [Once].
	found    lookup          // while the lease was held
	acquired signals.Instant // when the acquisition was asked for
	since0   time.Time       // when the store granted it, by its own clock
	period   string          // the slot of the clock, with --once-per
}

// held is a grant, and the instant at which the attempt that brought it was ordered.
type held struct {
	backends.Grant
	sent signals.Instant
}

func (r *run) run(ctx context.Context) Result {
	if refused := r.refuseNested(ctx); refused != nil {
		return *refused
	}
	if r.spec.Once.asked() {
		if failure := r.before(ctx); failure != nil {
			return r.without(ctx, *failure)
		}
	}
	handle := backends.NewHandle()
	for tries := 1; ; tries++ {
		got, failure := r.acquire(ctx, handle)
		if failure != nil && failure.Outcome == OutcomeBusy && r.spec.Once.asked() {
			failure = r.refused(ctx, failure)
		}
		if failure != nil {
			return r.without(ctx, *failure)
		}
		waited := r.since(r.begun)
		r.Log.Info("lease acquired", "grant", got.Grant, "waited_for", waited)
		res, again := r.hold(ctx, got)
		res.Waited = waited
		if !again || tries > 1 && r.over() {
			return res
		}
		handle = backends.NewHandle() // the grant before was given back
	}
}

// without ends a run that has no lease, or goes on without one where --if-unavailable asks for that.
func (r *run) without(ctx context.Context, failure Result) Result {
	if failure.Outcome != OutcomeUnavailable || r.spec.IfUnavailable == UnavailableFail {
		return failure
	}
	if r.spec.IfUnavailable == UnavailableSkip {
		failure.ExitCode = ExitBusy
		return failure
	}
	return r.runWithout(ctx, failure)
}

// refuseNested refuses a run of a lease inside itself: waiting for it would never end, and skipping it would hide a mistake.
func (r *run) refuseNested(ctx context.Context) *Result {
	terms := heldTerms(r.spec.Env, r.store.Identity, r.spec.Namespace, r.spec.Lease)
	if len(terms) == 0 {
		return nil
	}
	ctx, stop := r.interruptible(ctx)
	defer stop()
	st, err := call(ctx, r.store.Address, r.spec.acquireLimit(), func(ctx context.Context) (backends.State, error) {
		return r.store.Inspect(ctx, r.spec.Namespace, r.spec.Lease)
	})
	stop()
	if cause := context.Cause(ctx); cause != nil {
		return r.interrupted(cause)
	}
	if err != nil {
		return nil // acquiring meets the same store and says so
	}
	for _, slot := range st.Slots {
		for _, term := range terms {
			if slot.Held && slot.Term == term {
				return &Result{
					Outcome:  OutcomeNested,
					ExitCode: ExitSettings,
					Reason:   fmt.Sprintf("%q is already held around this command, with term %d", r.display(), term),
					Hint:     "leave the inner underlease out, or give it another name",
				}
			}
		}
	}
	return nil
}

// hold starts the command under a grant, keeps the grant and gives it back. Again says that no command was started, for a
// reason that another attempt may not meet.
func (r *run) hold(ctx context.Context, got held) (res Result, again bool) {
	r.acquired = got.sent
	if r.spec.Once.asked() {
		var ended *Result
		if got, ended, again = r.inside(ctx, got); ended != nil {
			ended.Grant = got.Grant
			end := backends.End{Outcome: backends.OutcomeNotStarted, ExitCode: ended.ExitCode}
			ended.Released = r.release(context.WithoutCancel(ctx), got.Grant, end, newKeeper(r, got).machine.ValidUntil())
			return *ended, again
		}
	}
	k := newKeeper(r, got)
	socket := signals.NewSocket()
	env := withRunID(environ(r.spec.Env, got.Grant, r.store.Identity, socket), r.runID(got.Grant))
	if err := k.start(env, socket); err != nil {
		res, again = k.notStarted(err)
		k.dismiss() // first: the guardian may hold copies of the lock
		end := backends.End{Outcome: backends.OutcomeNotStarted, ExitCode: res.ExitCode}
		res.Released = r.release(context.WithoutCancel(ctx), got.Grant, end, k.machine.ValidUntil())
		return res, again
	}
	return k.keep(ctx), false
}

// runWithout runs the command without a lease, as --if-unavailable run asks for.
func (r *run) runWithout(ctx context.Context, failure Result) Result {
	r.Say(fmt.Sprintf("running %q without a lease: %s", r.display(), failure.Reason), "")
	k := newKeeper(r, held{Grant: backends.Grant{Namespace: r.spec.Namespace, Lease: r.spec.Lease, Holder: r.spec.Holder}, sent: r.Now()})
	var res Result
	if err := k.start(environ(r.spec.Env, k.grant, r.store.Identity, ""), ""); err != nil {
		res, _ = k.notStarted(err)
		k.dismiss()
	} else {
		res = k.keep(ctx)
	}
	res.Waited = failure.Waited
	res.Unleased = failure.Reason
	return res
}

// release gives a grant back. It tries once at least, and a few times more while the grant would not end by itself.
func (r *run) release(ctx context.Context, g backends.Grant, end backends.End, validUntil signals.Instant) bool {
	const attempts = 3
	limit := min(r.spec.CallLimit(), longestAcquire)
	patient, stop := r.interruptible(ctx) // a signal from outside ends it with the attempt under way
	defer stop()
	var err error
	for i := range attempts {
		if i > 0 && !r.pause(patient, 100*time.Millisecond<<i) {
			break
		}
		if i > 0 && r.Now() >= validUntil {
			break
		}
		_, err = call(ctx, r.store.Address, limit, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, r.store.Release(ctx, g, end)
		})
		if err == nil {
			r.Log.Info("lease released", "grant", g)
			return true
		}
	}
	r.Log.Info("lease not released", "grant", g, "err", err) // in words below
	text := fmt.Sprintf("%q was not released: %v", r.display(), err)
	if g.TTL > 0 {
		text += fmt.Sprintf("; it is free %s after its last renewal", Short(g.TTL))
		if r.spec.MinHold > g.TTL {
			text += fmt.Sprintf(", or %s after it was acquired", Short(r.spec.MinHold))
		}
	} else {
		text += "; it ends with this process"
	}
	r.Say(text, backends.Hint(err))
	return false
}

// pause waits for d, or until ctx ends.
func (r *run) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *run) display() string { return backends.Display(r.spec.Namespace, r.spec.Lease) }

func (r *run) since(i signals.Instant) time.Duration { return time.Duration(r.Now() - i) }

// over reports whether the time to wait is over.
func (r *run) over() bool { return r.left() <= 0 }

// left returns what is left of the time to wait.
func (r *run) left() time.Duration {
	if r.spec.Wait == Forever {
		return Forever
	}
	return r.spec.Wait - r.since(r.begun)
}

// noAnswer says that a call was left behind at its limit. It is [backends.ErrUnavailable].
type noAnswer struct {
	address string
	limit   time.Duration
}

func (e *noAnswer) Error() string {
	return fmt.Sprintf("no answer from %s within %s", e.address, Short(e.limit))
}

func isNoAnswer(err error) bool {
	_, ok := errors.AsType[*noAnswer](err)
	return ok
}

func (e *noAnswer) Is(target error) bool { return target == backends.ErrUnavailable }

// Bug is a panic, with the stack on which it arose. It travels from the goroutine of the fault to the one that owns the
// decision, which ends the tree before it passes it on.
type Bug struct {
	Value any
	Stack []byte
}

func (b *Bug) Error() string { return fmt.Sprint(b.Value) }

// bugOf turns what recover returned into a [*Bug]; nil stays nil. It has to be called where the panic is recovered.
func bugOf(recovered any) *Bug {
	switch b := recovered.(type) {
	case nil:
		return nil
	case *Bug:
		return b
	default:
		return &Bug{Value: recovered, Stack: debug.Stack()}
	}
}

// answerAfter is how long a call may take to answer once its context has ended.
const answerAfter = 20 * time.Millisecond

// call runs f for at most limit, and leaves it behind where it does not heed its context. A panic in f is one here.
func call[T any](ctx context.Context, address string, limit time.Duration, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	type answer struct {
		value T
		err   error
		bug   *Bug
	}
	answers := make(chan answer, 1)
	go func() {
		var a answer
		defer cancel()
		defer func() {
			a.bug = bugOf(recover())
			answers <- a
		}()
		a.value, a.err = f(ctx)
	}()
	take := func(a answer) (T, error) {
		if a.bug != nil {
			panic(a.bug)
		}
		return a.value, a.err
	}
	var none T
	select {
	case a := <-answers:
		return take(a)
	case <-ctx.Done():
	}
	// A call that heeds its context answers now, and knows better than we do what it waited for.
	patience := time.NewTimer(answerAfter)
	defer patience.Stop()
	select {
	case a := <-answers:
		return take(a)
	case <-patience.C:
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return none, &noAnswer{address, limit}
	}
	return none, ctx.Err()
}

// ends reports whether a signal from outside ends a process that has no command yet, as it would end any other.
func ends(sig syscall.Signal) bool {
	switch sig {
	case syscall.SIGCONT, syscall.SIGWINCH, syscall.SIGURG, syscall.SIGCHLD,
		syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGPIPE:
		return false
	default:
		return true
	}
}
