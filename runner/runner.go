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
	res := r.run(ctx)
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
	var (
		handle = backends.NewHandle()
		left   = 0 // starts that came too late
	)
	for {
		got, failure := r.acquire(ctx, handle)
		if failure != nil {
			if failure.Outcome != OutcomeUnavailable || r.spec.IfUnavailable == UnavailableFail {
				return *failure
			}
			if r.spec.IfUnavailable == UnavailableSkip {
				failure.ExitCode = ExitBusy
				return *failure
			}
			return r.runWithout(ctx, *failure)
		}
		waited := r.since(r.begun)
		r.Log.Info("lease acquired", "grant", got.Grant, "waited", waited)
		res, late := r.hold(ctx, got)
		res.Waited = waited
		if !late {
			return res
		}
		// What was left of the grant did not cover the end of a command. It is released already.
		left++
		if left > 1 && r.over() {
			return res
		}
		handle = backends.NewHandle()
	}
}

// refuseNested refuses a run of a lease inside itself: waiting for it would never end, and skipping it would hide a mistake.
func (r *run) refuseNested(ctx context.Context) *Result {
	terms := heldTerms(r.spec.Env, r.store.Identity, r.spec.Namespace, r.spec.Lease)
	if len(terms) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.spec.acquireLimit())
	defer cancel()
	st, err := r.store.Inspect(ctx, r.spec.Namespace, r.spec.Lease)
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

// hold starts the command under a grant, keeps the grant and gives it back. Late says that the command was not started
// because too little of the grant was left.
func (r *run) hold(ctx context.Context, got held) (res Result, late bool) {
	k := newKeeper(r, got)
	defer k.close()
	err := k.start(environ(r.spec.Env, got.Grant, r.store.Identity))
	if err == nil {
		return k.keep(ctx), false
	}
	res = k.notStarted(err)
	res.Released = r.release(context.WithoutCancel(ctx), got.Grant, backends.End{Outcome: backends.OutcomeNotStarted, ExitCode: res.ExitCode}, k.machine.ValidUntil())
	var start *signals.StartError
	return res, errors.As(err, &start) && start.TooLate
}

// runWithout runs the command without a lease, as --if-unavailable run asks for.
func (r *run) runWithout(ctx context.Context, failure Result) Result {
	r.Say(fmt.Sprintf("running %q without a lease: %s", r.display(), failure.Reason), "")
	k := newKeeper(r, held{Grant: backends.Grant{Namespace: r.spec.Namespace, Lease: r.spec.Lease, Holder: r.spec.Holder}, sent: r.Now()})
	defer k.close()
	var res Result
	if err := k.start(environ(r.spec.Env, k.grant, r.store.Identity)); err != nil {
		res = k.notStarted(err)
	} else {
		res = k.keep(ctx)
	}
	res.Waited = failure.Waited
	if res.Reason == "" {
		res.Reason = "without a lease: " + failure.Reason
	}
	return res
}

// release gives a grant back, with as many attempts as fit before it runs out by itself.
func (r *run) release(ctx context.Context, g backends.Grant, end backends.End, validUntil signals.Instant) bool {
	const attempts = 3
	limit := min(r.spec.CallLimit(), longestAcquire)
	var err error
	for i := range attempts {
		if i > 0 && !r.pause(ctx, 100*time.Millisecond<<i) {
			break
		}
		if r.Now() >= validUntil {
			err = errors.New("the grant ran out before")
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
		text += fmt.Sprintf("; it is free %v after its last renewal", g.TTL)
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
	return fmt.Sprintf("no answer from %s within %v", e.address, e.limit)
}

func isNoAnswer(err error) bool {
	_, ok := errors.AsType[*noAnswer](err)
	return ok
}

func (e *noAnswer) Is(target error) bool { return target == backends.ErrUnavailable }

// call runs f for at most limit, and leaves it behind where it does not heed its context.
func call[T any](ctx context.Context, address string, limit time.Duration, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		defer cancel()
		v, err := f(ctx)
		answers <- answer{v, err}
	}()
	var none T
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
	}
	// An answer that came together with the end of the limit counts.
	select {
	case a := <-answers:
		return a.value, a.err
	default:
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
