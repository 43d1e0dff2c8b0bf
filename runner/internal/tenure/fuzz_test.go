package tenure

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// model is a second, dumb tenure, written from the package comment alone: it keeps what happened and asks of every
// instant what the comment says of it. It does not decide when to renew, but judges whether it was allowed.
type model struct {
	c   Config
	now int64

	until  int64 // valid until; Never on an endless store
	margin int64

	lost, confirmed    bool // confirmed: by the store, or by a look that failed
	stopped, killed    bool
	gone, released     bool
	draining           bool
	stoppedAt          int64
	lossKill           int64
	runStop, drainKill int64

	attempt int // the newest
	open    bool
	sent    int64
	settled int64 // when the newest attempt was answered or abandoned
	again   bool  // a look has to be repeated
	want    Orders
}

func newModel(c Config, sent, ttl, now int64) *model {
	o := &model{c: c, now: min(max(now, sent), Never-1), margin: int64(c.Margin), stoppedAt: Never, lossKill: Never, runStop: Never, drainKill: Never, settled: sent}
	o.until = o.validity(sent, ttl)
	return o
}

// validity is sent + ttl*(1 - drift) - 10ms, with the smaller ttl, in exact arithmetic and rounded down.
func (o *model) validity(sent, ttl int64) int64 {
	if o.c.TTL == 0 {
		return Never
	}
	r := new(big.Rat).SetFloat64(1 - o.c.Drift)
	r.Mul(r, new(big.Rat).SetInt64(min(ttl, int64(o.c.TTL))))
	whole := new(big.Int).Div(r.Num(), r.Denom()) // Euclidean, and so down
	return plus(sent, whole.Int64()-10*int64(time.Millisecond))
}

// plus adds; what is beyond the range has no end. No length in here is below -10ms.
func plus(a, b int64) int64 {
	switch {
	case a == Never, b == Never, b > 0 && a > Never-b:
		return Never
	}
	return a + b
}

// leaseKill is the instant of the lease by which the kill is ordered.
func (o *model) leaseKill() int64 {
	switch {
	case o.confirmed:
		return o.lossKill
	case o.until == Never:
		return Never
	}
	return o.until - o.margin
}

func (o *model) leaseStop() int64 {
	switch {
	case o.confirmed:
		return o.until
	case o.until == Never:
		return Never
	}
	return o.until - o.margin - int64(o.c.Grace)
}

func (o *model) graceOver() int64 { return plus(o.stoppedAt, int64(o.c.Grace)) }

func (o *model) killBy() int64 {
	return min(o.leaseKill(), o.graceOver(), plus(o.runStop, int64(o.c.Grace)), o.drainKill)
}

func (o *model) stopBy() int64 { return min(o.leaseStop(), o.runStop) }

// pass lets time go on to now.
func (o *model) pass(now int64) {
	o.now = min(max(o.now, now), Never-1)
	if o.gone {
		return
	}
	if limit := plus(o.sent, int64(o.c.CallLimit)); o.open && o.now >= limit {
		o.open, o.settled = false, o.now
		if o.c.TTL == 0 {
			if o.now-limit > int64(o.c.CallLimit)/4 {
				o.again = true
			} else {
				o.lose()
			}
		}
	}
	o.due()
}

// due notes what has to be ordered at this instant.
func (o *model) due() {
	if !o.lost && o.now >= o.leaseKill() {
		o.lost = true
	}
	switch {
	case o.killed:
	case o.now >= o.killBy():
		o.killed = true
		o.want |= Kill
	case !o.stopped && o.now >= o.stopBy():
		o.stopped, o.stoppedAt = true, o.now
		o.want |= Stop
	}
}

// lose is a confirmed loss: valid until is now, and the kill too, unless a grace was asked for.
func (o *model) lose() {
	without := o.killBy()
	o.lost, o.confirmed, o.open = true, true, false
	o.until = min(o.until, o.now)
	o.lossKill = o.now
	if o.c.LossGrace {
		o.lossKill = min(without, plus(o.now, int64(o.c.Grace)), Never-1)
	}
	o.due()
}

func (o *model) counts(attempt int) bool {
	return o.open && attempt == o.attempt && !o.lost && !o.gone
}

func (o *model) renewed(attempt int, ttl, now int64) {
	o.pass(now)
	if o.counts(attempt) {
		o.open, o.settled = false, o.now
		o.until = o.validity(o.sent, ttl)
		o.due()
	}
}

func (o *model) failed(attempt int, now int64) {
	o.pass(now)
	if o.counts(attempt) {
		o.open, o.settled = false, o.now
		if o.c.TTL == 0 {
			o.lose()
		}
	}
}

func (o *model) lostBy(attempt int, now int64) {
	o.pass(now)
	if o.counts(attempt) {
		o.lose()
	}
}

func (o *model) drain(now int64) {
	o.now = min(max(o.now, now), Never-1)
	if !o.draining && !o.stopped && !o.killed && !o.gone {
		o.draining = true
		o.drainKill = plus(o.now, int64(o.c.Drain))
	}
	o.pass(now)
}

func (o *model) started(now int64) {
	o.now = min(max(o.now, now), Never-1)
	if o.c.MaxRun > 0 {
		o.runStop = plus(o.now, int64(o.c.MaxRun))
	}
	o.pass(now)
}

func (o *model) grow(margin, now int64) {
	o.now = min(max(o.now, now), Never-1)
	if o.c.TTL > 0 {
		o.margin = max(o.margin, min(margin, int64(o.c.TTL)/4))
	}
	o.pass(now)
}

func (o *model) guardianStopped(at int64) {
	if !o.stopped && !o.killed && !o.gone {
		o.stopped, o.stoppedAt = true, at
	}
}

func (o *model) guardianKilled(c Cause, at int64) {
	if o.killed || o.gone {
		return
	}
	o.killed = true
	o.want |= Kill
	endOfGrace := o.stopped && at >= o.graceOver() && at < o.leaseKill() // after a stop, and not the lease's own
	if c == Expired && !endOfGrace {
		o.lost, o.open = true, false
	}
}

func (o *model) guardianGone(now int64) {
	if !o.gone && !o.killed {
		o.killed = true
		o.want |= Kill
	}
	o.pass(now)
}

func (o *model) treeGone(clean bool, at, now int64) {
	if o.gone {
		return
	}
	if at > o.now {
		o.pass(at)
	}
	o.now = min(max(o.now, now), Never-1)
	o.gone, o.open = true, false
	if o.lost || !clean {
		o.want |= End
	} else {
		o.want |= Release
	}
}

// phase is the one that follows from what has happened.
func (o *model) phase() Phase {
	switch {
	case o.gone:
		return Gone
	case o.killed:
		return Killing
	case o.stopped:
		return Stopping
	case o.draining:
		return Draining
	}
	return Holding
}

// history runs both tenures through one history and compares them after every event.
type history struct {
	m         *Machine
	o         *model
	published Deadlines
	log       strings.Builder
}

// judge compares the orders of one event with what the model wants. Saw says that the event let time pass.
func (h *history) judge(got Orders, saw bool) error {
	m, o := h.m, h.o
	if got&Renew != 0 { // invariant 4
		switch {
		case o.lost:
			return fmt.Errorf("renew after a loss")
		case o.gone:
			return fmt.Errorf("renew after the end")
		case o.open:
			return fmt.Errorf("renew with attempt %d in flight since %d", o.attempt, o.sent)
		}
		o.attempt++
		o.open, o.sent, o.again = true, o.now, false
	}
	if m.Attempt() != o.attempt && !o.gone {
		return fmt.Errorf("attempt %d, want %d", m.Attempt(), o.attempt)
	}
	if o.again && !o.lost && !o.gone {
		return fmt.Errorf("a look that the caller could not finish was not repeated")
	}
	const acts = Kill | Stop | Release | End
	if got&acts != o.want&acts { // invariants 1 and 3
		return fmt.Errorf("orders %v, want %v", names(got), names(o.want))
	}
	if got&Release != 0 {
		if o.released {
			return fmt.Errorf("a second release")
		}
		o.released = true
	}
	o.want = 0
	if m.Phase() != o.phase() { // invariant 2, because what has happened only grows
		return fmt.Errorf("phase %d, want %d", m.Phase(), o.phase())
	}
	if m.IsLost() != o.lost {
		return fmt.Errorf("lost %v, want %v", m.IsLost(), o.lost)
	}
	if m.ValidUntil() != o.until { // invariant 5
		return fmt.Errorf("valid until %d, want %d", m.ValidUntil(), o.until)
	}
	if int64(m.Margin()) != o.margin {
		return fmt.Errorf("margin %d, want %d", m.Margin(), o.margin)
	}
	if got&Publish != 0 {
		h.published = m.Deadlines()
	}
	if o.gone {
		if m.Wake() != Never {
			return fmt.Errorf("wakes at %d after the end", m.Wake())
		}
		return nil
	}
	want := Deadlines{
		StopAt: o.leaseStop(), KillAt: min(o.leaseKill(), o.graceOver()),
		RunStopAt: o.runStop, RunKillAt: plus(o.runStop, int64(o.c.Grace)), DrainKillAt: o.drainKill,
	}
	if h.published != want {
		return fmt.Errorf("the guardian was told %+v, want %+v", h.published, want)
	}
	return h.judgeWake(saw)
}

// judgeWake asks for a wake that is early enough for whatever comes next, and later than now.
func (h *history) judgeWake(saw bool) error {
	m, o := h.m, h.o
	wake := m.Wake()
	if !o.killed && wake > o.killBy() { // invariant 1 for a caller that ticks when asked
		return fmt.Errorf("wakes at %d, after the kill at %d", wake, o.killBy())
	}
	if !o.killed && !o.stopped && wake > o.stopBy() {
		return fmt.Errorf("wakes at %d, after the stop at %d", wake, o.stopBy())
	}
	if !o.lost {
		if wake > o.leaseKill() {
			return fmt.Errorf("wakes at %d, after the lease at %d", wake, o.leaseKill())
		}
		last := max(plus(o.sent, int64(max(o.c.RenewEvery, o.c.CallLimit))), plus(o.settled, int64(max(o.c.RenewEvery, 1500*time.Millisecond))))
		if wake > last {
			return fmt.Errorf("wakes at %d, and so does not renew by %d", wake, last)
		}
	}
	if saw && wake <= o.now && (o.c.CallLimit > 0 || !o.open) {
		return fmt.Errorf("wakes at %d, which is not after now", wake)
	}
	return nil
}

// source gives the choices of a history: from the fuzzer's bytes, or from a generator.
type source interface {
	more() bool
	pick(n int) int // 0 to n-1
}

type fromBytes struct{ b []byte }

func (f *fromBytes) more() bool { return len(f.b) > 0 }

func (f *fromBytes) pick(n int) int {
	if len(f.b) == 0 {
		return 0
	}
	v := int(f.b[0])
	f.b = f.b[1:]
	return v % n
}

type fromChance struct {
	r    *rand.Rand
	left int
}

func (f *fromChance) more() bool     { f.left--; return f.left >= 0 }
func (f *fromChance) pick(n int) int { return f.r.IntN(n) }

// lengths are the durations and steps that histories are made of: each power of ten, and some beside it.
func length(s source) time.Duration {
	units := [...]time.Duration{
		1, 100, time.Microsecond, time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, time.Second, 10 * time.Second, time.Minute, time.Hour,
	}
	return units[s.pick(len(units))] * time.Duration(s.pick(16))
}

func config(s source) Config {
	c := Config{
		TTL:        length(s),
		Drift:      float64(s.pick(9)) / 16, // exact in both arithmetics
		Grace:      length(s),
		Margin:     length(s),
		RenewEvery: length(s),
		CallLimit:  length(s),
		Drain:      NoLimit,
		LossGrace:  s.pick(2) == 1,
		Seed:       uint64(s.pick(256)),
	}
	switch s.pick(4) {
	case 0:
		c.TTL = 0
	case 1, 2: // what a sane caller has
		c.TTL = max(c.TTL, 2*time.Second)
		c.Drift = 1.0 / 64
		c.Grace = min(c.TTL/4, 10*time.Second)
		c.Margin = min(250*time.Millisecond, c.TTL/4)
		c.RenewEvery = c.TTL / 6
		c.CallLimit = min(max(c.RenewEvery/3, 200*time.Millisecond), 3*time.Second)
	}
	if s.pick(3) == 0 {
		c.MaxRun = length(s)
	}
	if s.pick(3) == 0 {
		c.Drain = length(s)
	}
	return c
}

// try runs one history and returns what broke, with the way there.
func try(s source, trace bool) error {
	c := config(s)
	sent := int64(length(s))
	if s.pick(16) == 0 {
		sent = Never - int64(length(s)) - 1
	}
	ttl := int64(c.TTL)
	if s.pick(4) == 0 {
		ttl = int64(length(s))
	}
	now := plus(sent, int64(length(s)))
	h := &history{m: New(c, sent, time.Duration(ttl), now), o: newModel(c, sent, ttl, now)}
	h.published = h.m.Deadlines()
	if trace {
		fmt.Fprintf(&h.log, "%+v\nnew sent %d ttl %d now %d\n", c, sent, ttl, now)
	}
	for s.more() {
		name, got, saw := h.event(s, &now)
		if trace {
			fmt.Fprintf(&h.log, "%d %s: %v\n", now, name, names(got))
		}
		if err := h.judge(got, saw); err != nil {
			return fmt.Errorf("%s: %w\n%s", name, err, h.log.String())
		}
	}
	return nil
}

// event makes the next event happen to both.
func (h *history) event(s source, now *int64) (name string, got Orders, saw bool) {
	m, o := h.m, h.o
	// When: mostly as asked, or between, or late, or by a clock that goes back.
	wake := m.Wake()
	switch kind := s.pick(8); {
	case kind < 4 && wake < Never:
		*now = max(*now, wake)
	case kind == 4:
		*now = max(0, *now-int64(length(s)))
	case kind == 5 && wake < Never && wake > *now: // one nanosecond too early
		*now = max(*now, wake-1)
	default:
		*now = min(plus(*now, int64(length(s))), Never-1)
	}
	at := *now
	if s.pick(2) == 0 {
		at = max(0, at-int64(length(s)))
	}
	attempt := m.Attempt() - max(0, s.pick(6)-4) // the newest, mostly
	switch kind := s.pick(16); kind {
	case 0:
		o.started(*now)
		return "started", m.Started(*now), true
	case 1, 2, 3:
		ttl := int64(o.c.TTL)
		if s.pick(4) == 0 {
			ttl = int64(length(s))
		}
		o.renewed(attempt, ttl, *now)
		return fmt.Sprint("renewed ", attempt, " ", ttl), m.Renewed(attempt, time.Duration(ttl), *now), true
	case 4:
		o.failed(attempt, *now)
		return fmt.Sprint("failed ", attempt), m.RenewFailed(attempt, *now), true
	case 5:
		if s.pick(4) == 0 { // rare, for much cannot be seen after it
			o.lostBy(attempt, *now)
			return fmt.Sprint("lost ", attempt), m.Lost(attempt, *now), true
		}
	case 6:
		o.pass(*now)
		return "hurry", m.Hurry(*now), true
	case 7:
		if s.pick(3) == 0 {
			o.drain(*now)
			return "drain", m.Drain(*now), true
		}
	case 8:
		margin := int64(length(s))
		o.grow(margin, *now)
		return fmt.Sprint("grow ", margin), m.Grow(time.Duration(margin), *now), true
	case 9:
		switch s.pick(8) {
		case 0:
			run := s.pick(2) == 0
			o.guardianStopped(at)
			return fmt.Sprint("guardian stopped ", run, at), m.GuardianStopped(run, at, *now), false
		case 1:
			c := []Cause{Expired, MaxRun, DrainedOut}[s.pick(3)]
			o.guardianKilled(c, at)
			return fmt.Sprint("guardian killed ", c, at), m.GuardianKilled(c, at, *now), false
		case 2:
			o.guardianGone(*now)
			return fmt.Sprint("guardian gone ", at), m.GuardianGone(at, *now), true
		case 3:
			clean := s.pick(4) != 0
			o.treeGone(clean, at, *now)
			return fmt.Sprint("tree gone ", clean, at), m.TreeGone(clean, at, *now), true
		}
	}
	o.pass(*now)
	return "tick", m.Tick(*now), true
}

// FuzzMachine holds every history of events against the five invariants.
func FuzzMachine(f *testing.F) {
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 0))
		b := make([]byte, 60+60*seed)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := try(&fromBytes{b}, false); err != nil {
			t.Error(try(&fromBytes{b}, true))
		}
	})
}

// TestEveryOrderOfEventsKeepsTheInvariants is the fuzzer's loop over histories that depend on nothing but their number.
func TestEveryOrderOfEventsKeepsTheInvariants(t *testing.T) {
	for n := range uint64(200_000) {
		chance := func() source { r := rand.New(rand.NewPCG(n, 1)); return &fromChance{r, 4 + int(n%40)} }
		if try(chance(), false) != nil {
			t.Fatalf("history %d: %v", n, try(chance(), true))
		}
	}
}
