package runner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/signals"
)

// Once says that a command is not to run again where it has succeeded. The zero value asks for nothing, and then no record is read or
// written.
//
// A success is an exit with 0 that no signal from outside has come before: many commands also exit with 0 when they were asked to stop in
// the middle. It is written down while the lease is held, before the release: whoever gets the lease next sees it.
type Once struct {
	Ever     bool          // once for all: a marker, or [Platform.Applied]
	Per      time.Duration // once per slot of this length of the UTC clock of the store; zero: not asked for
	Interval time.Duration // not before so long after the last success has begun, by the store's clock; zero: not asked for
}

func (o Once) asked() bool { return o != Once{} }

// Done is the success that makes a run needless.
type Done struct {
	Ran
	By   string        // who set the marker by hand; empty with Ran's zero value too where a check of the user has said so
	Ago  time.Duration // since it began, by the store's clock
	Left time.Duration // until it may run again; [Forever] for what is applied
	Next time.Time     // the end of its slot, by the store's clock; zero where it is not a slot that counts
}

// CheckError says that the check of --applied-if gave no answer: it is neither known that its condition holds, nor that it does not.
type CheckError struct{ Text string }

func (e *CheckError) Error() string { return e.Text }

// recordFor is how long the writing of a success is retried on a store whose grants have no ttl. Elsewhere it is the ttl.
const recordFor = time.Minute

// lookup is what is known of earlier successes.
type lookup struct {
	done    *Done
	version int64  // of the record; zero without one
	runs    []Ran  // in the record
	ahead   []byte // the record, where it was written by a clock that was set back since
}

// look asks for earlier successes once, within a limit. Now is the store's clock, or zero where it is not known exactly: then only what is certain counts.
func (r *run) look(ctx context.Context, now time.Time, limit time.Duration) (lookup, error) {
	once := r.spec.Once
	if once.Ever && r.Applied != nil {
		applied, err := r.Applied(ctx)
		if err != nil || !applied {
			return lookup{}, err
		}
		return lookup{done: &Done{Left: Forever}}, nil
	}
	key := successKey
	if once.Ever {
		key = markerKey
	}
	rec, err := call(ctx, r.store.Address, limit, func(ctx context.Context) (backends.Record, error) {
		return r.store.Records().Get(ctx, r.spec.Namespace, r.spec.Lease, key)
	})
	if errors.Is(err, backends.ErrNoRecord) {
		return lookup{}, nil
	}
	if err != nil {
		return lookup{}, err
	}
	found := lookup{version: rec.Version}
	if once.Ever {
		m, err := decodeMarker(rec)
		if err == nil {
			found.done = &Done{Ran: m.Ran, By: m.By, Ago: m.ago(max(0, rec.Age)), Left: Forever}
		}
		return found, err
	}
	if found.runs, err = decodeSuccess(rec); err != nil {
		return lookup{}, err
	}
	if rec.Age < 0 {
		if now.IsZero() {
			return found, nil // how long ago it was is not known: whoever has the lease decides
		}
		rec.Age, found.ahead = 0, rec.Value
	}
	found.done = once.due(found.runs, rec.Age, now, r.spec)
	return found, nil
}

// restamp makes a record count from now whose clock was set back: a step back delays the next run by one interval, and not until the clock
// has caught up.
func (r *run) restamp(ctx context.Context, g backends.Grant, found lookup) {
	_, err := call(ctx, r.store.Address, r.spec.CallLimit(), func(ctx context.Context) (int64, error) {
		return r.store.Records().Put(ctx, g.Namespace, g.Lease, backends.Put{Key: successKey, Version: found.version, Value: found.ahead}, &g)
	})
	if err != nil {
		r.Log.Info("success not dated anew", "err", err)
	}
}

// due returns the run that makes another one needless, or nil. Age is that of the record that the newest run wrote.
func (o Once) due(runs []Ran, age time.Duration, now time.Time, s Spec) *Done {
	if len(runs) == 0 {
		return nil
	}
	last := runs[0]
	var done *Done
	if ago := last.ago(age); o.Interval > 0 && ago < o.Interval {
		done = &Done{Ran: last, Ago: ago, Left: o.Interval - ago}
	}
	if o.Per <= 0 {
		return done
	}
	if now.IsZero() {
		// As late as it can be: the holder's clock may have been slow, and the write took until its limit.
		late := time.Duration(float64(last.Until)*s.ClockDrift) + s.CallLimit()
		if last.At.IsZero() || !slotOf(last.At, o.Per).Equal(slotOf(last.At.Add(last.ago(age)+late), o.Per)) {
			return done
		}
		now = last.At.Add(last.ago(age))
	}
	for _, one := range runs {
		if one.At.IsZero() || !slotOf(one.At, o.Per).Equal(slotOf(now, o.Per)) {
			continue
		}
		next := slotOf(now, o.Per).Add(o.Per)
		if left := next.Sub(now); done == nil || left > done.Left {
			done = &Done{Ran: one, Ago: max(0, now.Sub(one.At)), Left: left, Next: next}
		}
	}
	return done
}

// settle refuses what cannot be kept together with it.
func (o Once) settle(s *Spec) error {
	switch {
	case o.Ever && s.Slots > 1:
		return relationf("leave --slots out, or give --slots 1", "--slots %d would let several run at once what is to run once", s.Slots)
	case o.Ever && s.IfUnavailable == UnavailableRun:
		return relationf("give --if-unavailable fail or skip", "--if-unavailable run would run again what is applied: only the store knows")
	case o.Ever && (o.Per > 0 || o.Interval > 0):
		return relationf("use underlease run for that", "a gate runs its command once for all: --once-per and --min-interval have no meaning for it")
	case o.Per > 0 && s.Slots > 1:
		return relationf("leave one of them out", "--slots %d would let several run at once in one slot of --once-per %s", s.Slots, Short(o.Per))
	}
	return nil
}

// slotOf returns the beginning of the slot of the UTC clock that t is in. Slots of a length that divides a day begin at midnight.
func slotOf(t time.Time, per time.Duration) time.Time {
	// In milliseconds since 1970: every day has as many of them, whatever the zone says.
	ms := per.Milliseconds()
	at := t.UnixMilli()
	rest := at % ms
	if rest < 0 {
		rest += ms
	}
	return time.UnixMilli(at - rest).UTC()
}

// before is the look before the lease is asked for. It is retried as an acquisition is.
func (r *run) before(ctx context.Context) *Result {
	ctx, stop := r.interruptible(ctx)
	defer stop()
	for failures := 0; ; {
		found, err := r.look(ctx, time.Time{}, r.attemptLimit(failures))
		if err == nil {
			stop() // from here on signals are somebody else's
		}
		switch stopped := context.Cause(ctx); {
		case stopped != nil:
			return r.interrupted(stopped)
		case err == nil && found.done == nil:
			return nil
		case err == nil:
			return r.needless(found.done)
		}
		failures++
		if !retriable(err) || r.over() && failures > 1 {
			return r.unknown(err)
		}
		r.Log.Info("look for a success failed", "attempt", failures, "err", err)
		if r.spec.Wait > 0 {
			r.pause(ctx, min(jitter(min(firstPoll<<min(failures-1, 4), longestPoll)), max(r.left(), 0)))
		}
	}
}

// refused is the last look of a run whose lease was refused. What it finds takes the place of busy.
func (r *run) refused(ctx context.Context, busy *Result) *Result {
	ctx, stop := r.interruptible(ctx)
	known := r.whileBusy(ctx)
	stop()
	switch stopped := context.Cause(ctx); {
	case stopped != nil:
		return r.interrupted(stopped)
	case known != nil:
		return known
	}
	return busy
}

// whileBusy is the look after the lease was refused: whoever has it, or had it, may be done. Without a success it returns nil.
func (r *run) whileBusy(ctx context.Context) *Result {
	found, err := r.look(ctx, time.Time{}, r.spec.acquireLimit())
	switch {
	case err == nil && found.done != nil:
		return r.needless(found.done)
	case err != nil && r.spec.Once.Ever && ctx.Err() == nil:
		return r.unknown(err) // skipped would say that it is not applied
	}
	return nil
}

// inside is the look while the lease is held, which decides. Without a result the command is to be started, under the grant as it was
// last renewed. Again says that another attempt may succeed.
func (r *run) inside(ctx context.Context, got held) (_ held, res *Result, again bool) {
	ctx, stop := r.interruptible(ctx)
	defer stop()
	before := got.Previous
	got, err := r.renewing(ctx, got, func(ctx context.Context) error {
		since, previous, err := r.acquiredAt(ctx, got.Grant)
		if err != nil {
			return err
		}
		before = previous
		found, err := r.look(ctx, since, r.spec.acquireLimit())
		if err != nil {
			return err
		}
		if found.done != nil {
			if found.ahead != nil {
				r.restamp(ctx, got.Grant, found)
			}
			res = r.needless(found.done)
			return nil
		}
		r.found, r.since0 = found, since
		if per := r.spec.Once.Per; per > 0 {
			r.period = slotOf(since, per).Format(time.RFC3339)
		}
		return nil
	})
	stop() // from here on signals are the command's
	got.Previous = before
	switch stopped := context.Cause(ctx); {
	case stopped != nil:
		res = r.interrupted(stopped)
	case errors.Is(err, backends.ErrLost):
		res, again = r.failure(OutcomeUnavailable, ExitUnavailable, err), true
	case err != nil:
		res, again = r.unknown(err), retriable(err)
	}
	return got, res, again
}

// acquiredAt returns the store's clock at the acquisition of a grant, and how the last holder of its slot ended that had a command:
// those that found nothing to do do not count.
func (r *run) acquiredAt(ctx context.Context, g backends.Grant) (at time.Time, previous backends.End, err error) {
	st, err := call(ctx, r.store.Address, r.spec.acquireLimit(), func(ctx context.Context) (backends.State, error) {
		return r.store.Inspect(ctx, g.Namespace, g.Lease)
	})
	if err != nil {
		return at, previous, err
	}
	previous = g.Previous
	if previous.Outcome == backends.OutcomeNotStarted {
		for _, p := range st.History {
			if p.Slot == g.Slot && p.End.Outcome != backends.OutcomeNotStarted {
				previous = p.End
				break
			}
		}
	}
	for _, s := range st.Slots {
		if s.Slot != g.Slot || s.Term != g.Term || !s.Held {
			continue
		}
		if s.Since.IsZero() {
			// The term is never below the clock of the store, and above it only where that was set back.
			return time.UnixMilli(int64(g.Term)), previous, nil
		}
		return s.Since, previous, nil
	}
	return at, previous, backends.Lost(nil, "%q was lost before its command was started", r.display())
}

// renewing runs f while the grant is kept, before there is a command. Nothing has to be killed in time: a loss ends f, and a grant whose
// rest is too short starts nothing.
func (r *run) renewing(ctx context.Context, got held, f func(context.Context) error) (held, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
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
		a.err = f(ctx)
	}()
	take := func(a answer, err error) (held, error) {
		if a.bug != nil {
			panic(a.bug)
		}
		if err == nil {
			err = a.err
		}
		return got, err
	}
	tick := time.NewTicker(max(r.spec.RenewEvery, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case a := <-answers:
			return take(a, nil)
		case <-tick.C:
		}
		sent := r.Now()
		standing := got.Grant // a call that is left behind goes on reading it
		g, err := call(ctx, r.store.Address, r.spec.CallLimit(), func(ctx context.Context) (backends.Grant, error) {
			return r.store.Renew(ctx, standing)
		})
		switch {
		case err == nil:
			got.TTL, got.Ask, got.sent = g.TTL, g.Ask, sent
		case errors.Is(err, backends.ErrLost):
			cancel()
			return take(<-answers, err)
		case ctx.Err() == nil:
			r.Log.Warn("renewal failed", "grant", got.Grant, "err", err)
		}
	}
}

// retriable reports whether the same question may get an answer later.
func retriable(err error) bool {
	_, check := errors.AsType[*CheckError](err)
	_, config := errors.AsType[*backends.ConfigError](err)
	return !check && !config && !errors.Is(err, backends.ErrDenied) && !errors.Is(err, backends.ErrBroken)
}

// unknown is the result of a look that gave no answer: nothing runs.
func (r *run) unknown(err error) *Result {
	_, check := errors.AsType[*CheckError](err)
	switch {
	case check:
		res := r.failure(OutcomeFailed, ExitUnavailable, err)
		res.Reason = fmt.Sprintf("failed: whether %q is applied is unknown: %v", r.display(), err)
		return res
	case errors.Is(err, backends.ErrDenied):
		return r.failure(OutcomeDenied, ExitDenied, err)
	case errors.Is(err, backends.ErrBroken):
		return r.failure(OutcomeBroken, ExitBroken, err)
	default:
		return r.failure(OutcomeUnavailable, ExitUnavailable, err)
	}
}

// needless is the result of a run whose command has succeeded already.
func (r *run) needless(d *Done) *Result {
	res := &Result{Done: d, Waited: r.since(r.begun)}
	if r.spec.Once.Ever {
		res.Outcome, res.Reason = OutcomeApplied, fmt.Sprintf("already applied: %q", r.display())
		return res
	}
	res.Outcome, res.ExitCode, res.Reason = OutcomeNotDue, ExitBusy, fmt.Sprintf("not due: %q", r.display())
	return res
}

// concluded puts the result of a gate in its own words.
func (r *run) concluded(ctx context.Context, res Result) Result {
	if !r.spec.Once.Ever {
		return res
	}
	switch {
	case res.Outcome == OutcomeBusy:
		res.Outcome = OutcomeSkipped
	case !res.Started:
	case res.recorded:
		res.Outcome = OutcomeMigrated
		res.Reason = fmt.Sprintf("migrated: %q in %s", r.display(), Short(max(res.Ran, time.Millisecond)))
	case res.Reason != "":
	case r.appliedAnyway(ctx, res):
		res.Reason = fmt.Sprintf("failed: the command %s, and has written before that %q is applied", ending(res), r.display())
	default:
		res.Reason = fmt.Sprintf("failed: %q is not applied: the command %s", r.display(), ending(res))
	}
	return res
}

func ending(res Result) string {
	if res.Signal != 0 {
		return "was ended by SIG" + signals.Name(res.Signal)
	}
	return fmt.Sprintf("exited with %d", res.ExitCode)
}

// appliedAnyway looks, after a failure, whether the command has written the marker in a transaction of its own. It does so once, and only
// of a store that has just answered.
func (r *run) appliedAnyway(ctx context.Context, res Result) bool {
	if r.Applied != nil || !res.Released || ctx.Err() != nil {
		return false
	}
	found, err := r.look(ctx, time.Time{}, r.spec.acquireLimit())
	return err == nil && found.done != nil && found.done.Term == res.Grant.Term
}

// record writes the success of the command down while the lease is held, and keeps the lease meanwhile. It returns the end of the grant.
//
// A write whose answer was lost is settled by what is there: a later attempt compares versions, and finds its own record.
func (k *keeper) record(ctx context.Context, res *Result) (validUntil signals.Instant) {
	validUntil = k.machine.ValidUntil()
	if res.ExitCode != 0 || res.Signal != 0 || !k.spec.Once.asked() {
		return validUntil
	}
	if res.Outcome == OutcomeStopped {
		k.doubt(res)
		return validUntil
	}
	if k.spec.Once.Ever && k.Applied != nil {
		res.recorded = true // by the command itself, where the check looks
		return validUntil
	}
	ctx, stop := k.interruptible(ctx)
	defer stop()
	w := &recorder{keeper: k, res: res, put: backends.Put{Key: successKey, Version: k.found.version}, validUntil: validUntil, renewed: k.Now()}
	if k.spec.Once.Ever {
		w.put.Key = markerKey
	}
	last := k.Now() + signals.Instant(recordFor)
	if k.spec.TTL > 0 {
		last = k.Now() + signals.Instant(k.spec.TTL)
	}
	for attempt := 0; ; attempt++ {
		err := w.try(ctx)
		if err == nil {
			res.recorded = true
			return w.validUntil
		}
		k.Log.Info("success not recorded", "grant", k.grant, "attempt", attempt+1, "err", err)
		gone := errors.Is(err, backends.ErrLost)
		if gone || !retriable(err) || ctx.Err() != nil || k.Now() >= min(last, w.validUntil) {
			w.give(err)
			return w.validUntil
		}
		k.pause(ctx, jitter(min(firstPoll<<min(attempt, 4), longestPoll)))
		w.renew(ctx)
	}
}

// recorder is one success that is being written down.
type recorder struct {
	*keeper
	res        *Result
	put        backends.Put
	asked      bool // an attempt was left without an answer
	validUntil signals.Instant
	renewed    signals.Instant // when the last renewal was asked for
}

// try writes once. Nil says that the success stands in the store.
func (w *recorder) try(ctx context.Context) error {
	ran := Ran{
		Term: w.grant.Term, Holder: w.grant.Holder, RunID: w.runID(w.grant),
		At: w.since0, Took: w.res.Ran, Until: w.since(w.acquired),
	}
	if w.spec.Once.Ever {
		w.put.Value = Marker{Ran: ran}.encode()
	} else {
		w.put.Value = encodeSuccess(append([]Ran{ran}, w.found.runs...))
	}
	err := w.write(ctx)
	switch {
	case errors.Is(err, backends.ErrConflict), errors.Is(err, backends.ErrLost) && w.asked:
		return w.settle(ctx, err)
	case err != nil && !errors.Is(err, backends.ErrLost) && retriable(err):
		w.asked = true
	}
	return err
}

// write puts the record while the grant is in force. Its context is not the one that a signal ends: an attempt is cheap, and the last one
// may be the one that is needed.
func (w *recorder) write(ctx context.Context) error {
	g, put := w.grant, w.put // a call that is left behind goes on reading them
	_, err := call(context.WithoutCancel(ctx), w.store.Address, w.spec.CallLimit(), func(ctx context.Context) (int64, error) {
		return w.store.Records().Put(ctx, g.Namespace, g.Lease, put, &g)
	})
	return err
}

// settle looks at what is there instead of the record that was expected, because of cause.
func (w *recorder) settle(ctx context.Context, cause error) error {
	g, key := w.grant, w.put.Key
	found, err := call(context.WithoutCancel(ctx), w.store.Address, w.spec.CallLimit(), func(ctx context.Context) (backends.Record, error) {
		return w.store.Records().Get(ctx, g.Namespace, g.Lease, key)
	})
	switch {
	case errors.Is(err, backends.ErrNoRecord):
		w.put.Version = 0
	case err != nil:
		return err
	case w.spec.Once.Ever:
		m, err := decodeMarker(found)
		if err != nil {
			return err
		}
		if m.Term == w.grant.Term || errors.Is(cause, backends.ErrConflict) {
			return nil // ours, or an operator's, who says the same
		}
	default:
		runs, err := decodeSuccess(found)
		if err != nil {
			return err
		}
		if len(runs) > 0 && runs[0].Term == w.grant.Term {
			return nil
		}
		w.put.Version, w.found.runs = found.Version, runs // another slot's holder was faster
	}
	if errors.Is(cause, backends.ErrLost) {
		return cause
	}
	return backends.Unavailable(cause, "%s", w.store.Address) // once more, with what is there
}

// renew keeps the grant, at its own pace.
func (w *recorder) renew(ctx context.Context) {
	sent := w.Now()
	if w.grant.TTL == 0 || time.Duration(sent-w.renewed) < w.spec.RenewEvery/2 {
		return
	}
	w.renewed = sent
	held := w.grant
	g, err := call(ctx, w.store.Address, w.spec.CallLimit(), func(ctx context.Context) (backends.Grant, error) { return w.store.Renew(ctx, held) })
	switch c := w.spec.tenure(); {
	case err == nil && w.Now() < w.validUntil:
		w.validUntil = max(w.validUntil, sent+signals.Instant(c.Validity(g.TTL)))
	case errors.Is(err, backends.ErrLost):
		w.validUntil = w.Now()
	}
}

// give says that the success could not be written down.
func (w *recorder) give(err error) {
	w.res.Outcome, w.res.ExitCode = OutcomeUnrecorded, ExitLost
	w.res.Reason = fmt.Sprintf("done, but not recorded: the command of %q ended with 0, and its success could not be written down: %v", w.display(), err)
	w.res.Hint = w.again()
}

// doubt leaves the success of a command unrecorded that was asked to stop: it may be that of giving up in good order.
func (k *keeper) doubt(res *Result) {
	res.Outcome, res.ExitCode = OutcomeUnrecorded, ExitLost
	res.Reason = fmt.Sprintf("not recorded: the command of %q ended with 0 after a signal to stop: whether its work is done is not known", k.display())
	res.Hint = k.again()
}

// again says what becomes of work that is done and not recorded.
func (k *keeper) again() string {
	switch {
	case k.spec.Once.Ever && k.Applied != nil:
		return "the next start asks the check of --applied-if"
	case k.spec.Once.Ever:
		words := "underlease marker set "
		if k.spec.Namespace != "" {
			words += "--namespace " + shellWord(k.spec.Namespace) + " "
		}
		return fmt.Sprintf("it will run again unless the marker is set in %s with: %s", k.store.Address, words+shellWord(k.spec.Lease))
	}
	return "it will run again"
}

// shellWord writes a word so that a shell reads it as one.
func shellWord(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@%+=") == "" && !strings.HasPrefix(s, "-") {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// withRunID replaces the idempotency key in an environment of [environ].
func withRunID(env []string, id string) []string {
	for i, entry := range env {
		if strings.HasPrefix(entry, factRunID+"=") {
			env[i] = factRunID + "=" + id
		}
	}
	return env
}

// runID is the idempotency key of a run: with a slot of the clock it is equal over retries.
func (r *run) runID(g backends.Grant) string {
	if r.period == "" {
		return runID(g)
	}
	return periodID(g, r.period)
}

func periodID(g backends.Grant, period string) string {
	return idOf(g) + "/" + period
}
