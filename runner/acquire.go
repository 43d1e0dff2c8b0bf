package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/signals"
)

// The waits between two looks at a busy lease. Where the store can notify, polling is only the safety net.
const (
	firstPoll   = 100 * time.Millisecond
	longestPoll = time.Second

	// longestHint is how long a wait lasts for a store that tells when the lease may be free. It looks by itself in between, with less than an
	// acquisition costs.
	longestHint = 30 * time.Second

	// How long after a notification the lease may still be busy: the kernel tells of a close just before it unlocks.
	afterHint = time.Millisecond
)

// acquire asks for the lease until it is granted, the time to wait is over, or there is no sense in asking.
func (r *run) acquire(ctx context.Context, handle string) (held, *Result) {
	ctx, stop := r.interruptible(ctx)
	defer stop()
	if r.Waiting != nil {
		defer func() { r.Waiting(Waiting{Lease: r.display(), Done: true}) }()
	}

	var (
		req      = r.spec.request(handle)
		poll     = firstPoll
		hinted   = false // the last wait ended with a notification
		unknown  = false // an attempt was left without an answer: it may be granted yet
		failures = 0
	)
	for {
		sent := r.Now()
		limit := r.attemptLimit(failures)
		g, err := call(ctx, r.store.Address, limit, func(ctx context.Context) (backends.Grant, error) { return r.store.Acquire(ctx, req) })
		if err == nil {
			stop() // from here on signals are the command's
		}
		if cause := context.Cause(ctx); cause != nil {
			r.abandon(handle)
			return held{}, r.interrupted(cause)
		}
		if err == nil {
			return held{g, sent}, nil
		}
		var busy *backends.BusyError
		switch {
		case errors.As(err, &busy):
			failures = 0
		case errors.Is(err, backends.ErrDenied), errors.Is(err, backends.ErrBroken):
			if unknown {
				r.abandon(handle)
			}
			if errors.Is(err, backends.ErrDenied) {
				return held{}, r.failure(OutcomeDenied, ExitDenied, err)
			}
			return held{}, r.failure(OutcomeBroken, ExitBroken, err)
		case isConfig(err): // what only the store could see, such as a database that it does not have
			if unknown {
				r.abandon(handle)
			}
			return held{}, r.failure(OutcomeInvalid, ExitSettings, err)
		default:
			failures++
			unknown = unknown || !errors.Is(err, backends.ErrUnreached)
			r.Log.Info("acquire failed", "attempt", failures, "err", err)
		}
		left := r.left()
		if left <= 0 && (busy != nil || failures > 1) {
			settled := !unknown || r.abandon(handle)
			if busy != nil {
				r.leave(req)
				return held{}, r.busy(busy)
			}
			res := r.failure(OutcomeUnavailable, ExitUnavailable, err)
			if !settled && res.Hint == "" && r.spec.TTL > 0 {
				res.Hint = fmt.Sprintf("if the store has granted the lease without our knowing, it is free after %s", Short(max(r.spec.TTL, r.spec.MinHold)))
			}
			return held{}, res
		}
		if busy != nil && busy.Kept && r.spec.Once.asked() { // its holder has ended: it may be done
			if known := r.whileBusy(ctx); known != nil && context.Cause(ctx) == nil {
				return held{}, known
			}
		}
		if r.Waiting != nil && r.spec.Wait > 0 {
			r.Waiting(Waiting{Lease: r.display(), Busy: busy, Err: err, Waited: r.since(r.begun), Left: left})
		}
		switch {
		case busy == nil:
			// The second attempt of a run that does not wait comes at once.
			if wait := jitter(min(firstPoll<<min(failures-1, 4), longestPoll)); left > 0 {
				r.pause(ctx, min(wait, left))
			}
		case hinted:
			hinted = false
			r.pause(ctx, min(afterHint, left))
		default:
			hinted = r.waitFree(ctx, req, busy, poll)
			poll = min(2*poll, longestPoll)
		}
		if cause := context.Cause(ctx); cause != nil {
			r.abandon(handle)
			return held{}, r.interrupted(cause)
		}
	}
}

func isConfig(err error) bool {
	_, ok := errors.AsType[*backends.ConfigError](err)
	return ok
}

// attemptLimit returns the limit of the next attempt. One that waits must not hang for much longer than the wait.
func (r *run) attemptLimit(failures int) time.Duration {
	limit := r.spec.acquireLimit()
	if r.spec.Wait == 0 {
		return limit
	}
	least := time.Second
	if failures > 0 {
		least = shortestCall
	}
	return min(limit, max(r.left(), least))
}

// waitFree waits until the lease may be free: for at most one poll, or for as long as the store promises to tell. It reports whether it did.
func (r *run) waitFree(ctx context.Context, req backends.Request, busy *backends.BusyError, poll time.Duration) bool {
	// A hold and a store's own expiry end by themselves, at an instant that is known.
	limit := longestHint
	if r.spec.Once.asked() {
		limit = longestPoll // a success is written down before the lease is free, and is enough
	}
	if busy.Left > 0 && busy.Left < limit {
		limit = busy.Left + afterHint
		poll = min(poll, limit)
	}
	w, ok := r.store.Backend.(backends.Waiter)
	if !ok {
		r.pause(ctx, min(jitter(poll), r.left()))
		return false
	}
	err := r.telling(busy, func() error {
		_, err := call(ctx, r.store.Address, min(limit, max(r.left(), afterHint)), func(ctx context.Context) (struct{}, error) {
			return struct{}{}, w.WaitFree(ctx, req)
		})
		return err
	})
	if err != nil && ctx.Err() == nil && !isNoAnswer(err) && !errors.Is(err, context.DeadlineExceeded) {
		r.pause(ctx, min(jitter(poll), r.left())) // a hint that fails at once must not make us spin
	}
	return err == nil
}

// telling runs a wait, and says meanwhile how long it has lasted.
func (r *run) telling(busy *backends.BusyError, wait func() error) error {
	if r.Waiting == nil || r.spec.Wait == 0 {
		return wait()
	}
	type answer struct {
		err error
		bug *Bug
	}
	answers := make(chan answer, 1)
	go func() {
		var a answer
		defer func() {
			a.bug = bugOf(recover())
			answers <- a
		}()
		a.err = wait()
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case a := <-answers:
			if a.bug != nil {
				panic(a.bug)
			}
			return a.err
		case <-tick.C:
			r.Waiting(Waiting{Lease: r.display(), Busy: busy, Waited: r.since(r.begun), Left: r.left()})
		}
	}
}

// abandon gives back whatever carries our handle, in case an attempt was granted without our knowing. It reports whether
// the store confirmed that.
func (r *run) abandon(handle string) bool {
	g := backends.Grant{Namespace: r.spec.Namespace, Lease: r.spec.Lease, Handle: handle}
	_, err := call(context.Background(), r.store.Address, min(r.spec.CallLimit(), time.Second), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, r.store.Release(ctx, g, backends.End{Outcome: backends.OutcomeNotStarted})
	})
	if err != nil {
		r.Log.Info("lease not abandoned", "err", err)
	}
	return err == nil
}

// leave gives up a place in the store's queue: those who look at it would count it, and who comes next might be passed over for it.
func (r *run) leave(req backends.Request) {
	l, ok := r.store.Backend.(backends.Leaver)
	if !ok || r.spec.Wait == 0 {
		return
	}
	_, err := call(context.Background(), r.store.Address, min(r.spec.CallLimit(), time.Second), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, l.Leave(ctx, req)
	})
	if err != nil {
		r.Log.Info("place in the queue not given up", "err", err)
	}
}

// interruption is the signal that ends a wait.
type interruption struct{ sig syscall.Signal }

func (i interruption) Error() string { return "ended by SIG" + signals.Name(i.sig) }

// interruptible returns a context that ends when a signal comes that would end any other process. The function that it
// returns stops listening: afterwards signals are left for the command, and the context's cause tells whether one was taken.
func (r *run) interruptible(ctx context.Context) (interrupted context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case sig := <-r.Signals:
				if ends(sig) {
					cancel(interruption{sig})
					return
				}
			case <-done:
				return
			}
		}
	}()
	return ctx, sync.OnceFunc(func() {
		close(done)
		<-stopped
	})
}

func (r *run) interrupted(cause error) *Result {
	res := &Result{Outcome: OutcomeInterrupted, Waited: r.since(r.begun), Reason: "given up: " + cause.Error()}
	if i, ok := errors.AsType[interruption](cause); ok {
		res.Signal = i.sig
		res.ExitCode = 128 + int(i.sig)
	} else {
		res.Signal = syscall.SIGTERM
		res.ExitCode = 128 + int(syscall.SIGTERM)
	}
	return res
}

func (r *run) failure(o Outcome, code int, err error) *Result {
	return &Result{Outcome: o, ExitCode: code, Reason: err.Error(), Hint: backends.Hint(err), Waited: r.since(r.begun)}
}

func (r *run) busy(b *backends.BusyError) *Result {
	return &Result{Outcome: OutcomeBusy, ExitCode: ExitBusy, Reason: b.Error(), Busy: b, Waited: r.since(r.begun)}
}

// jitter returns d, less or more up to a fifth by chance, so that contenders do not march in step.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
}
