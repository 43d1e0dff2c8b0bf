// Package tenure is the deadline of one grant as arithmetic: events in, orders out. It reads no clock, does no I/O and
// starts no goroutine, so that every order of events can be tried.
//
// # Promise
//
// Whatever the store answers, and however late, the command's whole tree has been ordered dead before the grant can
// belong to anybody else.
//
//	sent                            stop at         kill at      valid until
//	 |---------- holding --------------|--- grace ----|-- margin --|
//	             renew, renew ...                                   = sent + ttl*(1 - drift) - 10ms
//
//	valid until = sent + ttl*(1 - drift) - 10ms, of the newest attempt that succeeded
//	stop at     = valid until - margin - grace
//	kill at     = min(stopped + grace, valid until - margin)
//
// Sent is the instant at which the request was ordered: before it was handed to any library, and so before the store
// can have begun to count.
//
// # What happens when
//
//	one answer is late or lost       the attempt is abandoned at its call limit; the next one recognises our own write
//	no answer until stop at          stop signal; renewing goes on, but the signal is not taken back
//	no answer until kill at          SIGKILL to the tree; the grant is lost for good, a late answer does not revive it
//	the store says "lost"            valid until is now: SIGKILL at once, or the stop signal first where that was asked for
//	a look at an endless store fails the same: the kernel's lock needs no deadline, but what cannot be seen does not count
//	the caller was stopped or frozen the first Tick after it finds the instants passed and orders what is due
//	--max-run is over                stop signal, SIGKILL after the grace; renewed all the while
//	a signal from outside            forwarded by the caller; SIGKILL when the drain is over; renewed all the while
//	the tree is gone                 release, unless the grant was lost
//
// What the guardian saw carries the instant at which it saw it. A caller that did not run reports that first, in its order,
// and what it finds else (answers, the time) after it: a tree that ended in time has ended in time, however late we learn of it.
//
// # Invariants
//
//  1. With a caller that ticks when asked, the kill has been ordered by valid until - margin, unless the tree is gone. (The
//     one exception is asked for: after a confirmed loss with [Config.LossGrace] the command has the grace, but never longer
//     than it had without the loss.)
//  2. Phases never move back.
//  3. Release is ordered at most once, only after the tree is gone, never after a loss.
//  4. No renewal after a loss or after the end; at most one attempt within its call limit; answers of abandoned attempts are
//     dropped.
//  5. Valid until changes only by a renewal that is the newest attempt, or by a loss.
package tenure

import (
	"math"
	"math/rand/v2"
	"time"
)

// Instant is a reading of a clock that never goes back, in nanoseconds.
type Instant = int64

// Never is the instant of what does not happen.
const Never Instant = math.MaxInt64

// Slop is taken off every validity besides the drift: for the granularity of clocks.
const Slop = 10 * time.Millisecond

// The waits before an attempt that follows a failed one: doubled from the first to the longest, at most a quarter of what
// is left until stop at but no less than the shortest, each within half and one and a half of it by chance. So a store that
// is back in time is asked in time.
const (
	shortestBackoff = 20 * time.Millisecond
	firstBackoff    = 100 * time.Millisecond
	longestBackoff  = time.Second
)

// Config is what stays the same for one grant. All durations are at least zero.
type Config struct {
	TTL        time.Duration // asked for; zero: the grant never expires, and a failed look is a loss
	Drift      float64       // by which the store's clock may run faster than ours: 0.01 is one per cent; 0 to 0.5
	Grace      time.Duration // from a stop signal that we decide to SIGKILL
	Margin     time.Duration // from SIGKILL to valid until
	RenewEvery time.Duration // from sent to the next attempt, less up to a tenth by chance
	CallLimit  time.Duration // after which an attempt is abandoned
	MaxRun     time.Duration // zero: no limit
	Drain      time.Duration // [NoLimit]: no limit
	LossGrace  bool          // a confirmed loss gets the stop signal and the grace
	Seed       uint64        // of the chance in RenewEvery and in the waits after failures
}

// NoLimit is the drain that has no end.
const NoLimit time.Duration = math.MaxInt64

// Validity returns for how long after it was sent a grant with this ttl counts. It is negative where nothing is left.
func (c Config) Validity(ttl time.Duration) time.Duration {
	if c.TTL == 0 {
		return NoLimit
	}
	ttl = min(ttl, c.TTL)
	return ttl - time.Duration(math.Ceil(float64(ttl)*c.Drift)) - Slop
}

// Fits reports whether two whole attempts fit between a renewal and its stop at, so that a single lost answer cannot
// stop a healthy command. Budget is the time from sent to stop at, and need is what the attempts take.
func (c Config) Fits() (budget, need time.Duration, ok bool) {
	if c.TTL == 0 {
		return NoLimit, 0, true
	}
	budget = time.Duration(before(before(int64(c.Validity(c.TTL)), c.Margin), c.Grace))
	need = time.Duration(after(after(int64(c.RenewEvery), c.CallLimit), c.CallLimit))
	return budget, need, need <= budget
}

// Phase is how far a tenure has come. Phases never move back.
type Phase int

// The phases.
const (
	Holding  Phase = iota // the command may run
	Draining              // a signal from outside was forwarded
	Stopping              // we ordered the stop signal
	Killing               // we ordered SIGKILL for the tree
	Gone                  // no process of the tree is left
)

// Cause is why a tenure ended before the command did so by itself. Of several the gravest counts.
type Cause int

// The causes, the gravest last.
const (
	NoCause      Cause = iota
	Drained            // a signal from outside was forwarded; the command ended in time
	DrainedOut         // the drain was over
	MaxRun             // --max-run was over
	Unreachable        // the deadline passed although we asked the store
	Expired            // the deadline passed while the caller did not run
	Taken              // the store said so
	GuardianLost       // the parent of the tree was lost
)

// Orders is a set of things to do now, in the order of the constants.
type Orders uint8

// The orders.
const (
	Publish Orders = 1 << iota // tell the guardian the new [Machine.Deadlines]
	Kill                       // SIGKILL to the whole tree until it is empty
	Stop                       // the stop signal to the command
	Renew                      // ask the store, as attempt [Machine.Attempt], for at most the call limit
	Release                    // give the grant back
	End                        // the tree is gone, and the grant is not given back
)

// Deadlines are the instants at which the guardian acts by itself.
type Deadlines struct {
	StopAt, KillAt       Instant // of the lease
	RunStopAt, RunKillAt Instant // of [Config.MaxRun]
	DrainKillAt          Instant // of [Config.Drain]
}

// Machine is one tenure: from a grant to its end. It is not safe for concurrent use.
type Machine struct {
	c      Config
	chance *rand.Rand

	now        Instant // the latest instant seen
	phase      Phase
	due        [GuardianLost + 1]Instant // when each cause was due; Never where it was not
	goneAt     Instant                   // when the tree was gone; Never before
	lost       bool
	validUntil Instant
	margin     time.Duration

	stopped   Instant // when a stop signal was ordered; Never before
	runStopAt Instant
	drainKill Instant
	lossKill  Instant // after a confirmed loss

	attempt  int     // the newest one
	inFlight bool    // it is neither answered nor abandoned
	sent     Instant // of the newest attempt
	next     Instant // when the next one is due
	failures int     // since the last success
	hurry    bool    // look again as soon as the attempt in flight is over
	renewals int

	published Deadlines
}

// New returns the tenure of a grant that was asked for at sent and lasts ttl at the store.
func New(c Config, sent Instant, ttl time.Duration, now Instant) *Machine {
	m := &Machine{
		c:         c,
		chance:    rand.New(rand.NewPCG(c.Seed, 0x756e6465726c6561)),
		now:       min(max(now, sent), Never-1),
		margin:    c.Margin,
		stopped:   Never,
		runStopAt: Never,
		drainKill: Never,
		lossKill:  Never,
	}
	m.goneAt = Never
	for c := range m.due {
		m.due[c] = Never
	}
	m.validUntil = after(sent, c.Validity(ttl))
	m.next = after(sent, m.interval())
	m.published = m.Deadlines()
	return m
}

// Startable reports whether what is left covers grace and margin, and no stop was ordered, so that a command may be
// started now.
func (m *Machine) Startable(now Instant) bool {
	return !m.lost && m.phase < Stopping && max(m.now, now) < m.stopAt()
}

// Started says that the command was forked.
func (m *Machine) Started(now Instant) Orders {
	m.see(now)
	if m.c.MaxRun > 0 {
		m.runStopAt = after(m.now, m.c.MaxRun)
	}
	return m.decide()
}

// Tick says what time it is.
func (m *Machine) Tick(now Instant) Orders {
	m.see(now)
	return m.decide()
}

// Renewed says that attempt was confirmed with ttl.
func (m *Machine) Renewed(attempt int, ttl time.Duration, now Instant) Orders {
	m.see(now)
	orders := m.decide() // first what was due before the answer: a late one does not save the command
	if !m.answers(attempt) {
		return orders
	}
	m.inFlight, m.failures = false, 0
	m.renewals++
	m.validUntil = after(m.sent, m.c.Validity(ttl))
	m.next = after(m.sent, m.interval())
	m.expedite()
	return orders | m.decide()
}

// RenewFailed says that attempt brought no answer that counts.
func (m *Machine) RenewFailed(attempt int, now Instant) Orders {
	m.see(now)
	orders := m.decide()
	if !m.answers(attempt) {
		return orders
	}
	m.fail()
	return orders | m.decide()
}

// Lost says that attempt was answered with a confirmed loss.
func (m *Machine) Lost(attempt int, now Instant) Orders {
	m.see(now)
	orders := m.decide()
	if !m.answers(attempt) {
		return orders
	}
	m.inFlight = false
	m.lose(Taken)
	return orders | m.decide()
}

// Hurry says that the store hinted at a change: look now.
func (m *Machine) Hurry(now Instant) Orders {
	m.see(now)
	m.hurry = true
	m.expedite()
	return m.decide()
}

// Drain says that a signal from outside was forwarded to the command, or that somebody asked the holder to finish.
func (m *Machine) Drain(now Instant) Orders {
	m.see(now)
	if m.phase < Draining {
		m.phase = Draining
		m.blame(Drained, m.now)
		m.drainKill = after(m.now, m.c.Drain)
	}
	return m.decide()
}

// Grow says how large the margin has to be for as many processes as there are. It never shrinks, and is at most a
// quarter of the ttl.
func (m *Machine) Grow(margin time.Duration, now Instant) Orders {
	m.see(now)
	if m.c.TTL > 0 {
		m.margin = max(m.margin, min(margin, m.c.TTL/4))
	}
	return m.decide()
}

// GuardianStopped says that the guardian, at the instant at, sent the stop signal by itself: run says that it was for
// [Config.MaxRun], else it was for the lease. What else is due by now is left to the next event: the tree may have ended
// before it was.
func (m *Machine) GuardianStopped(run bool, at, now Instant) Orders {
	if at < m.stopped { // a caller that did not run may have seen a later instant before it learns of this one
		m.blame(m.deadlineCause(run, at, now), at)
	}
	if m.phase < Stopping {
		m.phase, m.stopped = Stopping, at
	}
	return m.publish()
}

// GuardianKilled says that the guardian, at the instant at, began to kill the tree by itself, for the cause that it
// names: [MaxRun], [DrainedOut], or [Expired] for the lease. The kill is ordered all the same, because the guardian may be
// stopped before it has finished. What else is due by now is left to the next event.
func (m *Machine) GuardianKilled(c Cause, at, now Instant) Orders {
	if m.phase >= Killing {
		return 0
	}
	switch {
	case c != Expired:
		m.blame(c, at)
	case m.lost:
	case m.stopped != Never && at >= after(m.stopped, m.c.Grace) && at < m.leaseKillAt():
		// The kill at of the lease's deadlines was the end of the grace after a stop, which has its own cause.
	default:
		m.blame(m.deadlineCause(false, at, now), at)
		m.lost, m.inFlight = true, false
	}
	return m.kill() | m.publish()
}

// GuardianGone says that the guardian itself was found lost at the instant at. The tree is killed at once. It may be gone
// by now, because the guardian's end is that of the command: the loss is the cause all the same.
func (m *Machine) GuardianGone(at, now Instant) Orders {
	m.see(now)
	if m.phase == Gone {
		return 0
	}
	m.blame(GuardianLost, min(at, m.now))
	return m.kill() | m.decide()
}

// TreeGone says that the last process of the tree had ended at the instant at. Clean says that this is certain; where
// it is not, the grant is not given back.
func (m *Machine) TreeGone(clean bool, at, now Instant) Orders {
	if m.phase == Gone {
		return 0
	}
	orders := Orders(0)
	if at > m.now { // what was due before the end counts
		m.see(at)
		orders = m.decide() &^ Renew
	}
	m.see(now)
	m.phase, m.inFlight, m.goneAt = Gone, false, at
	if m.lost || !clean {
		return orders | End
	}
	return orders | Release
}

// Wake returns the instant at which the machine wants its next [Machine.Tick].
func (m *Machine) Wake() Instant {
	if m.phase == Gone {
		return Never
	}
	at := m.renewAt()
	if m.phase < Stopping {
		at = min(at, m.stopAt(), m.runStopAt)
	}
	if m.phase < Killing {
		at = min(at, m.killDue())
	}
	if !m.lost {
		at = min(at, m.leaseKillAt())
	}
	return at
}

// Deadlines returns the instants at which the guardian has to act without us.
func (m *Machine) Deadlines() Deadlines {
	d := Deadlines{
		StopAt:      m.stopAt(),
		KillAt:      min(m.leaseKillAt(), m.lossKill),
		RunStopAt:   m.runStopAt,
		RunKillAt:   after(m.runStopAt, m.c.Grace),
		DrainKillAt: m.drainKill,
	}
	if m.stopped != Never {
		d.KillAt = min(d.KillAt, after(m.stopped, m.c.Grace))
	}
	return d
}

// Cause returns why the tenure ended early: the gravest cause that was due before the tree was gone. A caller that did not
// run may have blamed a deadline before it learned that the tree had ended in time.
func (m *Machine) Cause() Cause {
	for c := GuardianLost; c > NoCause; c-- {
		if m.due[c] != Never && m.due[c] <= m.goneAt {
			return c
		}
	}
	return NoCause
}

// IsLost reports whether the grant counts as lost.
func (m *Machine) IsLost() bool { return m.lost }

// ValidUntil returns the local validity deadline.
func (m *Machine) ValidUntil() Instant { return m.validUntil }

// Attempt returns the number of the newest attempt.
func (m *Machine) Attempt() int { return m.attempt }

// Renewals returns how many attempts were confirmed.
func (m *Machine) Renewals() int { return m.renewals }

// see moves the latest instant on; a caller's clock that seems to go back is not believed, and Never does not come.
func (m *Machine) see(now Instant) { m.now = min(max(m.now, now), Never-1) }

// decide returns what is due now. Publish comes with every change of the deadlines, so that the guardian never acts on
// instants that the machine has given up.
func (m *Machine) decide() Orders {
	if m.phase == Gone {
		return 0
	}
	var orders Orders
	if m.inFlight && m.now >= after(m.sent, m.c.CallLimit) {
		m.abandon()
	}
	if !m.lost && m.now >= m.leaseKillAt() {
		m.blame(m.deadlineCause(false, m.leaseKillAt(), m.now), m.leaseKillAt())
		m.lost, m.inFlight = true, false
		orders |= m.kill()
	}
	if m.phase < Killing && m.now >= m.killDue() {
		if m.now >= m.drainKill {
			m.blame(DrainedOut, m.drainKill)
		}
		if m.now >= after(m.runStopAt, m.c.Grace) {
			m.blame(MaxRun, m.runStopAt)
		}
		orders |= m.kill()
	}
	if m.phase < Stopping {
		switch {
		case m.now >= m.stopAt():
			m.blame(m.deadlineCause(false, m.stopAt(), m.now), m.stopAt())
			orders |= m.stop()
		case m.now >= m.runStopAt:
			m.blame(MaxRun, m.runStopAt)
			orders |= m.stop()
		}
	}
	if m.now >= m.renewAt() && !m.inFlight {
		m.attempt++
		m.inFlight, m.hurry, m.sent = true, false, m.now
		orders |= Renew
	}
	return orders | m.publish()
}

func (m *Machine) publish() Orders {
	d := m.Deadlines()
	if m.phase == Gone || d == m.published {
		return 0
	}
	m.published = d
	return Publish
}

func (m *Machine) stop() Orders {
	m.phase, m.stopped = Stopping, m.now
	return Stop
}

func (m *Machine) kill() Orders {
	if m.phase >= Killing {
		return 0
	}
	m.phase = Killing
	return Kill
}

// lose notes a loss that is certain now.
func (m *Machine) lose(c Cause) {
	m.blame(c, m.now)
	killAt := min(m.killDue(), m.leaseKillAt())
	m.lost = true
	m.validUntil = min(m.validUntil, m.now)
	m.lossKill = m.now
	if m.c.LossGrace {
		m.lossKill = min(killAt, after(m.now, m.c.Grace), Never-1)
	}
}

// abandon gives up the attempt in flight, whose call limit is over.
func (m *Machine) abandon() {
	if limit := after(m.sent, m.c.CallLimit); m.c.TTL == 0 && m.now > after(limit, m.c.CallLimit/4) {
		// The caller did not run when the limit ended, so that the limit says nothing about the store: look again.
		m.inFlight, m.next = false, m.now
		return
	}
	m.fail()
}

// fail notes an attempt without an answer.
func (m *Machine) fail() {
	m.inFlight = false
	m.failures++
	if m.c.TTL == 0 {
		m.lose(Unreachable)
		return
	}
	wait := longestBackoff
	if n := m.failures - 1; n < 8 {
		wait = min(firstBackoff<<n, longestBackoff)
	}
	wait = min(wait, max(m.c.RenewEvery, firstBackoff))
	if at := m.stopAt(); m.now < at {
		wait = min(wait, max(time.Duration(at-m.now)/4, shortestBackoff))
	}
	m.next = after(m.now, time.Duration(float64(wait)*(0.5+m.chance.Float64())))
	m.expedite()
}

func (m *Machine) expedite() {
	if m.hurry && !m.inFlight {
		m.next = min(m.next, m.now)
	}
}

func (m *Machine) answers(attempt int) bool {
	return m.inFlight && attempt == m.attempt && !m.lost && m.phase < Gone
}

func (m *Machine) blame(c Cause, due Instant) { m.due[c] = min(m.due[c], due) }

// deadlineCause tells a store that did not answer from a caller that did not run: the latter finds the instant at only
// long after it.
func (m *Machine) deadlineCause(run bool, at, now Instant) Cause {
	switch {
	case run:
		return MaxRun
	case now > after(at, max(m.c.CallLimit, time.Second)) || m.failures == 0 && !m.inFlight:
		return Expired
	default:
		return Unreachable
	}
}

func (m *Machine) interval() time.Duration {
	return m.c.RenewEvery - time.Duration(m.chance.Float64()*float64(m.c.RenewEvery)/10)
}

// renewAt is when an attempt is due, or when the one in flight has to be abandoned.
func (m *Machine) renewAt() Instant {
	switch {
	case m.lost:
		return Never
	case m.inFlight:
		return after(m.sent, m.c.CallLimit)
	default:
		return m.next
	}
}

// stopAt is when the stop signal is due for the lease.
func (m *Machine) stopAt() Instant {
	if m.lost && m.lossKill != Never {
		return m.validUntil
	}
	return before(m.leaseKillAt(), m.c.Grace)
}

// leaseKillAt is the last instant for SIGKILL while the grant is in force.
func (m *Machine) leaseKillAt() Instant {
	if m.lost && m.lossKill != Never {
		return m.lossKill
	}
	return before(m.validUntil, m.margin)
}

// killDue is when SIGKILL is due, whatever for.
func (m *Machine) killDue() Instant {
	at := min(m.leaseKillAt(), m.lossKill, m.drainKill, after(m.runStopAt, m.c.Grace))
	if m.stopped != Never {
		at = min(at, after(m.stopped, m.c.Grace))
	}
	return at
}

// after returns i + d, which is Never where either has no end.
func after(i Instant, d time.Duration) Instant {
	if i == Never || d == NoLimit || d > 0 && i > Never-int64(d) {
		return Never
	}
	return i + int64(d)
}

// before returns i - d, which is the earliest instant there is where d is larger than that.
func before(i Instant, d time.Duration) Instant {
	switch {
	case i == Never:
		return Never
	case d > 0 && i < math.MinInt64+int64(d):
		return math.MinInt64
	default:
		return i - int64(d)
	}
}
