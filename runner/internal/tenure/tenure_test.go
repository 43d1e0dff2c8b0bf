package tenure

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"
)

const (
	ms = int64(time.Millisecond)
	s  = int64(time.Second)
	t0 = int64(1_000_000) * int64(time.Second) // a boot time of eleven days: nothing may depend on starting at zero
)

// usual returns the configuration that the defaults make of a ttl.
func usual(ttl time.Duration) Config {
	renew := ttl / 6
	return Config{
		TTL:        ttl,
		Drift:      0.01,
		Grace:      min(ttl/4, 10*time.Second),
		Margin:     min(250*time.Millisecond, ttl/4),
		RenewEvery: renew,
		CallLimit:  min(max(renew/3, 200*time.Millisecond), 3*time.Second),
		Drain:      NoLimit,
		Seed:       1,
	}
}

// endless returns the configuration of a grant that never expires, as the embedded store has it.
func endless() Config {
	return Config{
		Grace:      10 * time.Second,
		Margin:     250 * time.Millisecond,
		RenewEvery: 2 * time.Second,
		CallLimit:  time.Second,
		Drain:      NoLimit,
		Seed:       1,
	}
}

func with(c Config, f func(*Config)) Config {
	f(&c)
	return c
}

// held returns a tenure whose command was started at the instant at which the grant was asked for.
func held(c Config) *Machine {
	m := New(c, t0, c.TTL, t0)
	m.Started(t0)
	return m
}

// step is one event and what it has to order. Publish is not compared.
type step struct {
	at   int64 // after t0, in nanoseconds
	do   func(m *Machine, now Instant) Orders
	want Orders
}

func tick(m *Machine, now Instant) Orders  { return m.Tick(now) }
func drain(m *Machine, now Instant) Orders { return m.Drain(now) }
func hurry(m *Machine, now Instant) Orders { return m.Hurry(now) }
func lost(m *Machine, now Instant) Orders  { return m.Lost(m.Attempt(), now) }
func failed(m *Machine, now Instant) Orders {
	return m.RenewFailed(m.Attempt(), now)
}

func renewed(m *Machine, now Instant) Orders {
	return m.Renewed(m.Attempt(), time.Duration(math.MaxInt64), now)
}

func gone(m *Machine, now Instant) Orders { return m.TreeGone(true, now, now) }

func play(t *testing.T, m *Machine, steps []step) {
	t.Helper()
	for i, p := range steps {
		if got := p.do(m, t0+p.at) &^ Publish; got != p.want {
			t.Fatalf("step %d at %v: orders %v, want %v", i, time.Duration(p.at), names(got), names(p.want))
		}
	}
}

func names(o Orders) []string {
	var all []string
	for i, n := range []string{"publish", "kill", "stop", "renew", "release", "end"} {
		if o&(1<<i) != 0 {
			all = append(all, n)
		}
	}
	return all
}

func check[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// instant compares instants as durations after t0, which people can read.
func instant(t *testing.T, what string, got, want Instant) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got t0%+v, want t0%+v", what, time.Duration(got-t0), time.Duration(want-t0))
	}
}

func TestDeadlinesFollowFromTheDefaultsOfATTL(t *testing.T) {
	tests := []struct {
		ttl                        time.Duration
		grace, renew, call         time.Duration
		stopAt, killAt, validUntil time.Duration
		fits                       bool
	}{
		{
			2 * time.Second, 500 * time.Millisecond, 333333333, 200 * time.Millisecond,
			1220 * time.Millisecond, 1720 * time.Millisecond, 1970 * time.Millisecond, true,
		},
		{
			3 * time.Second, 750 * time.Millisecond, 500 * time.Millisecond, 200 * time.Millisecond,
			1960 * time.Millisecond, 2710 * time.Millisecond, 2960 * time.Millisecond, true,
		},
		{
			10 * time.Second, 2500 * time.Millisecond, 1666666666, 555555555,
			7140 * time.Millisecond, 9640 * time.Millisecond, 9890 * time.Millisecond, true,
		},
		{
			30 * time.Second, 7500 * time.Millisecond, 5 * time.Second, 1666666666,
			21940 * time.Millisecond, 29440 * time.Millisecond, 29690 * time.Millisecond, true,
		},
		{
			60 * time.Second, 10 * time.Second, 10 * time.Second, 3 * time.Second,
			49140 * time.Millisecond, 59140 * time.Millisecond, 59390 * time.Millisecond, true,
		},
		{
			time.Hour, 10 * time.Second, 10 * time.Minute, 3 * time.Second,
			time.Hour - 36*time.Second - 10260*time.Millisecond, time.Hour - 36*time.Second - 260*time.Millisecond, time.Hour - 36*time.Second - 10*time.Millisecond, true,
		},
	}
	for _, p := range tests {
		t.Run(p.ttl.String(), func(t *testing.T) {
			c := usual(p.ttl)
			check(t, "grace", c.Grace, p.grace)
			check(t, "renew-every", c.RenewEvery, p.renew)
			check(t, "call limit", c.CallLimit, p.call)
			m := held(c)
			d := m.Deadlines()
			instant(t, "stop at", d.StopAt, t0+int64(p.stopAt))
			instant(t, "kill at", d.KillAt, t0+int64(p.killAt))
			instant(t, "valid until", m.ValidUntil(), t0+int64(p.validUntil))
			check(t, "deadlines of --max-run and --drain that were not asked for",
				[3]Instant{d.RunStopAt, d.RunKillAt, d.DrainKillAt}, [3]Instant{Never, Never, Never})
			budget, need, ok := c.Fits()
			check(t, "budget", budget, p.stopAt)
			check(t, "need", need, p.renew+2*p.call)
			check(t, "fits", ok, p.fits)
		})
	}
}

func TestTTLThatLeavesNoRoomForTwoCallsDoesNotFit(t *testing.T) {
	tests := []struct {
		name string
		c    Config
		ok   bool
	}{
		{"exactly enough", Config{TTL: 10*time.Second + Slop, Grace: time.Second, Margin: time.Second, RenewEvery: 6 * time.Second, CallLimit: time.Second}, true},
		{"a nanosecond too much", Config{TTL: 10*time.Second + Slop, Grace: time.Second, Margin: time.Second, RenewEvery: 6*time.Second + 1, CallLimit: time.Second}, false},
		{"grace larger than the ttl", Config{TTL: 10 * time.Second, Grace: time.Minute, RenewEvery: time.Second, CallLimit: time.Second}, false},
		{"renew-every without end", Config{TTL: time.Minute, RenewEvery: math.MaxInt64, CallLimit: 3 * time.Second}, false},
		{"call limit without end", Config{TTL: time.Minute, RenewEvery: time.Second, CallLimit: math.MaxInt64}, false},
		{"grace and margin without end", Config{TTL: time.Second, Grace: math.MaxInt64, Margin: math.MaxInt64}, false},
		{"no ttl", Config{Grace: math.MaxInt64, Margin: math.MaxInt64, RenewEvery: math.MaxInt64, CallLimit: time.Second}, true},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			budget, need, ok := p.c.Fits()
			if ok != p.ok {
				t.Errorf("fits: got %v (budget %v, need %v), want %v", ok, budget, need, p.ok)
			}
		})
	}
}

func TestValidityIsOfTheSmallerTTLLessDriftAndSlop(t *testing.T) {
	tests := []struct {
		asked, granted time.Duration
		drift          float64
		want           time.Duration
	}{
		{time.Minute, time.Minute, 0, time.Minute - Slop},
		{time.Minute, 59 * time.Second, 0, 59*time.Second - Slop},
		{time.Minute, time.Hour, 0, time.Minute - Slop},
		{time.Minute, time.Minute, 0.5, 30*time.Second - Slop},
		{3, 3, 0.5, 1 - Slop}, // half a nanosecond is rounded against us
		{time.Minute, 0, 0.01, -Slop},
		{0, 0, 0.01, NoLimit},
		{0, time.Minute, 0.01, NoLimit},
	}
	for _, p := range tests {
		got := Config{TTL: p.asked, Drift: p.drift}.Validity(p.granted)
		check(t, fmt.Sprintf("asked %v, granted %v, drift %v", p.asked, p.granted, p.drift), got, p.want)
	}
}

func TestValidUntilCountsFromSentAndNotFromTheAnswer(t *testing.T) {
	m := New(usual(time.Minute), t0, time.Minute, t0+30*s)
	instant(t, "valid until after an acquire that took 30 s", m.ValidUntil(), t0+59390*ms)
	m = held(usual(time.Minute))
	play(t, m, []step{{10 * s, tick, Renew}, {12900 * ms, renewed, 0}})
	instant(t, "valid until after a renewal that took 2.9 s", m.ValidUntil(), t0+69390*ms)
	check(t, "renewals", m.Renewals(), 1)
}

func TestGrantThatLeavesLessThanGraceAndMarginStartsNothing(t *testing.T) { // C07, Q12
	tests := []struct {
		name     string
		answered int64
		want     bool
	}{
		{"at once", 0, true},
		{"after 0.5 ttl", 30 * s, true},
		{"just before stop at", 49140*ms - 1, true},
		{"at stop at", 49140 * ms, false},
		{"after 0.9 ttl", 54 * s, false},
		{"after 0.99 ttl", 59400 * ms, false},
		{"after 1.1 ttl", 66 * s, false},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			m := New(usual(time.Minute), t0, time.Minute, t0+p.answered)
			check(t, "startable", m.Startable(t0+p.answered), p.want)
			check(t, "startable by a clock that went back", m.Startable(t0), p.want)
		})
	}
	t.Run("granted for less than asked", func(t *testing.T) {
		m := New(usual(time.Minute), t0, 10*time.Second, t0)
		check(t, "startable", m.Startable(t0), false)
	})
	t.Run("after a stop was ordered, even if renewed", func(t *testing.T) {
		m := New(usual(time.Minute), t0, time.Minute, t0)
		play(t, m, []step{{49140 * ms, tick, Stop | Renew}, {49150 * ms, renewed, 0}})
		check(t, "startable", m.Startable(t0+49150*ms), false)
	})
}

func TestRenewalIsAskedForWithinATenthBeforeRenewEvery(t *testing.T) {
	lowest, highest := int64(math.MaxInt64), int64(0)
	for seed := range uint64(2000) {
		m := held(with(usual(time.Minute), func(c *Config) { c.Seed = seed }))
		at := m.Wake() - t0
		lowest, highest = min(lowest, at), max(highest, at)
		if at < 9*s || at > 10*s {
			t.Fatalf("seed %d: next attempt after %v, want 9 s to 10 s", seed, time.Duration(at))
		}
		if got := m.Tick(t0 + at - 1); got != 0 {
			t.Fatalf("seed %d: orders %v before the attempt is due, want none", seed, names(got))
		}
		if got := m.Tick(t0 + at); got != Renew {
			t.Fatalf("seed %d: orders %v when the attempt is due, want renew", seed, names(got))
		}
	}
	if lowest > 9050*ms || highest < 9950*ms {
		t.Errorf("attempts between %v and %v, want them spread over 9 s to 10 s", time.Duration(lowest), time.Duration(highest))
	}
}

func TestWaitsAfterFailuresDoubleFrom100msToASecond(t *testing.T) {
	for n, nominal := range []int64{100, 200, 400, 800, 1000, 1000, 1000} {
		shortest, longest := int64(math.MaxInt64), int64(0)
		for seed := range uint64(500) {
			m := held(with(usual(time.Minute), func(c *Config) { c.Seed = seed }))
			at := int64(0)
			for range n + 1 {
				at = m.Wake() - t0
				play(t, m, []step{{at, tick, Renew}, {at, failed, 0}})
			}
			wait := m.Wake() - t0 - at
			shortest, longest = min(shortest, wait), max(longest, wait)
		}
		if shortest < nominal*ms/2 || longest > nominal*ms*3/2 || longest-shortest < nominal*ms*8/10 {
			t.Errorf("after failure %d: waits from %v to %v, want them spread over half to one and a half of %d ms",
				n+1, time.Duration(shortest), time.Duration(longest), nominal)
		}
	}
}

func TestWaitsStartAgainAfterASuccess(t *testing.T) {
	m := held(usual(time.Minute))
	for range 5 {
		at := m.Wake() - t0
		play(t, m, []step{{at, tick, Renew}, {at, failed, 0}})
	}
	at := m.Wake() - t0
	play(t, m, []step{{at, tick, Renew}, {at, renewed, 0}})
	at = m.Wake() - t0
	play(t, m, []step{{at, tick, Renew}, {at, failed, 0}})
	if wait := m.Wake() - t0 - at; wait < 50*ms || wait > 150*ms {
		t.Errorf("wait after the first failure since a success: %v, want 50 ms to 150 ms", time.Duration(wait))
	}
}

func TestOneLostAnswerIsAbandonedAndTheNextAttemptRenews(t *testing.T) { // C05
	m := held(usual(time.Minute))
	play(t, m, []step{{10 * s, tick, Renew}, {13*s - 1, tick, 0}, {13 * s, tick, 0}})
	instant(t, "valid until", m.ValidUntil(), t0+59390*ms)
	next := m.Wake() - t0
	if next < 13050*ms || next > 13150*ms {
		t.Fatalf("next attempt after %v, want 13.05 s to 13.15 s", time.Duration(next))
	}
	play(t, m, []step{{next, tick, Renew}, {next + 5*ms, renewed, 0}})
	check(t, "attempt", m.Attempt(), 2)
	check(t, "phase", m.Phase(), Holding)
	instant(t, "valid until", m.ValidUntil(), t0+next+59390*ms)
}

func TestAnswerOfAnAbandonedAttemptIsDropped(t *testing.T) {
	answers := map[string]func(*Machine, int, Instant) Orders{
		"renewed": func(m *Machine, n int, now Instant) Orders { return m.Renewed(n, time.Minute, now) },
		"failed":  func(m *Machine, n int, now Instant) Orders { return m.RenewFailed(n, now) },
		"lost":    func(m *Machine, n int, now Instant) Orders { return m.Lost(n, now) },
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			m := held(usual(time.Minute))
			play(t, m, []step{{10 * s, tick, Renew}})
			if got := answer(m, 1, t0+13*s); got != 0 {
				t.Errorf("at its call limit: orders %v, want none", names(got))
			}
			next := m.Wake() - t0
			play(t, m, []step{{next, tick, Renew}})
			for _, n := range []int{1, 0, 3, -1} {
				if got := answer(m, n, t0+next+1); got != 0 {
					t.Errorf("as attempt %d while 2 is in flight: orders %v, want none", n, names(got))
				}
			}
			instant(t, "valid until", m.ValidUntil(), t0+59390*ms)
			play(t, m, []step{{next + 2, renewed, 0}})
			instant(t, "valid until after the answer that counts", m.ValidUntil(), t0+next+59390*ms)
			if got := answer(m, 2, t0+next+3); got != 0 {
				t.Errorf("a second time: orders %v, want none", names(got))
			}
			instant(t, "valid until after a second answer", m.ValidUntil(), t0+next+59390*ms)
		})
	}
}

func TestSlowAnswerDoesNotExtendTheTenure(t *testing.T) { // Q17: every answer takes all but a nanosecond of a call limit of 0.3 ttl
	c := with(usual(10*time.Second), func(c *Config) { c.CallLimit = 3 * time.Second })
	m := held(c)
	sent := m.Wake() - t0
	play(t, m, []step{{sent, tick, Renew}})
	for range 100 {
		answered := sent + 3*s - 1
		play(t, m, []step{{answered, renewed, Renew}}) // the next one was due long before
		instant(t, "valid until", m.ValidUntil(), t0+sent+9890*ms)
		sent = answered
	}
	check(t, "phase", m.Phase(), Holding)
	check(t, "renewals", m.Renewals(), 100)
}

func TestAnswerAt099TTLDoesNotSaveTheCommand(t *testing.T) { // Q17
	c := with(usual(time.Minute), func(c *Config) { c.CallLimit, c.RenewEvery = time.Hour, time.Nanosecond })
	m := held(c)
	play(t, m, []step{
		{1, tick, Renew},
		{49140 * ms, tick, Stop},
		{59140 * ms, tick, Kill},
		{59400 * ms, renewed, 0},
		{59401 * ms, gone, End},
	})
	instant(t, "valid until", m.ValidUntil(), t0+59390*ms)
}

func TestNoAnswerUntilStopAtStopsAndNoAnswerUntilKillAtKills(t *testing.T) { // Q01, C13
	for seed := range uint64(200) {
		m := held(with(usual(time.Minute), func(c *Config) { c.Seed = seed }))
		var stopped, killed Instant
		attempts := 0
		for i := 0; killed == 0; i++ {
			if i > 1000 {
				t.Fatal("no kill after 1000 ticks")
			}
			now := m.Wake()
			o := m.Tick(now)
			if o&Renew != 0 {
				attempts++
			}
			if o&Stop != 0 {
				stopped = now
			}
			if o&Kill != 0 {
				killed = now
			}
		}
		instant(t, "stopped", stopped, t0+49140*ms)
		instant(t, "killed", killed, t0+59140*ms)
		check(t, "cause", m.Cause(), Unreachable)
		check(t, "lost", m.IsLost(), true)
		instant(t, "wake", m.Wake(), Never)
		if attempts < 12 {
			t.Errorf("%d attempts, want at least 12, also between stop and kill", attempts)
		}
		check(t, "orders when the tree is gone", m.TreeGone(true, killed+1, killed+1), End)
	}
}

func TestRenewalAfterStopAtDoesNotTakeTheStopBack(t *testing.T) {
	m := held(usual(time.Minute))
	play(t, m, []step{{49140 * ms, tick, Stop | Renew}, {50 * s, renewed, 0}})
	instant(t, "valid until", m.ValidUntil(), t0+(49140+59390)*ms)
	check(t, "phase", m.Phase(), Stopping)
	instant(t, "kill at", m.Deadlines().KillAt, t0+59140*ms) // stopped + grace
	play(t, m, []step{{59140*ms - 1, renewOnce, 0}, {59140 * ms, tick, Kill}})
	check(t, "lost", m.IsLost(), false)
	play(t, m, []step{{59150 * ms, gone, Release}})
	check(t, "cause", m.Cause(), Expired) // nothing was asked before stop at
}

// renewOnce ticks, and confirms the attempt that this orders or that is in flight.
func renewOnce(m *Machine, now Instant) Orders {
	o := m.Tick(now)
	return (o | m.Renewed(m.Attempt(), time.Hour, now)) &^ Renew
}

func TestRenewalAfterKillAtIsDropped(t *testing.T) { // Q19, C09
	for _, at := range []int64{59140 * ms, 59140*ms + 1, 60 * s, 3600 * s} {
		m := held(with(usual(time.Minute), func(c *Config) { c.CallLimit = 20 * time.Second }))
		play(t, m, []step{{45 * s, tick, Renew}, {49140 * ms, tick, Stop}, {at, renewed, Kill}})
		instant(t, "valid until", m.ValidUntil(), t0+59390*ms)
		check(t, "lost", m.IsLost(), true)
		check(t, "renewals", m.Renewals(), 0)
		play(t, m, []step{{at + s, renewed, 0}, {at + 100*s, tick, 0}, {at + 100*s, hurry, 0}, {at + 101*s, gone, End}})
	}
}

func TestStopGetsItsGraceButNeverPastTheMargin(t *testing.T) {
	tests := []struct {
		name     string
		stopped  int64 // when the tick came
		renewed  bool
		killedAt int64
	}{
		{"in time", 49140 * ms, false, 59140 * ms},
		{"late by 4 s", 53140 * ms, false, 59140 * ms},
		{"late by 4 s, then renewed", 53140 * ms, true, 63140 * ms},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			m := held(usual(time.Minute))
			play(t, m, []step{{p.stopped, tick, Stop | Renew}})
			if p.renewed {
				play(t, m, []step{{p.stopped + 1, renewed, 0}})
			}
			instant(t, "kill at", m.Deadlines().KillAt, t0+p.killedAt)
			play(t, m, []step{{p.killedAt - 1, renewOnceIf(p.renewed), 0}, {p.killedAt, tick, Kill}})
		})
	}
}

func renewOnceIf(ok bool) func(*Machine, Instant) Orders {
	if ok {
		return renewOnce
	}
	return func(m *Machine, now Instant) Orders { return m.Tick(now) &^ Renew }
}

// blip runs a tenure against a store that is away from begin for as long as said, and reports whether the command was
// stopped within two minutes. Refuses: the store refuses at once while it is away; else attempts hang, and are answered
// when it is back if it then remembers them.
func blip(c Config, begin, away int64, refuses, remembers bool) (stopped bool) {
	m := held(c)
	hanging := Never // the answer to the attempt in flight
	hangs := 0
	for now := t0; now < t0+120*s; {
		now = min(m.Wake(), hanging)
		var o Orders
		if now == hanging {
			hanging = Never
			o = m.Renewed(hangs, time.Minute, now)
		} else {
			o = m.Tick(now)
		}
		if o&Stop != 0 {
			return true
		}
		for o&Renew != 0 {
			o, hanging = 0, Never
			back := t0 + begin + away
			switch isAway := now >= t0+begin && now < back; {
			case !isAway:
				hangs, hanging = m.Attempt(), now+5*ms
			case refuses:
				o = m.RenewFailed(m.Attempt(), now)
			case remembers:
				hangs, hanging = m.Attempt(), back+5*ms
			}
		}
	}
	return false
}

func TestBlipShorterThanTheBudgetDoesNotStopAHealthyCommand(t *testing.T) { // C06
	tests := []struct {
		name               string
		away               int64
		refuses, remembers bool
	}{
		{"connections refused for 39 s", 39 * s, true, false},
		{"server frozen for 39 s, answers when it goes on", 39 * s, false, true},
		{"packets lost for 36 s: one call limit less, for the attempt that the end of the blip catches", 36 * s, false, false},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			for seed := range uint64(400) {
				c := with(usual(time.Minute), func(c *Config) { c.Seed = seed })
				first := held(c).Wake() - t0
				// Just before an attempt is the worst moment, just after one the best.
				for _, begin := range []int64{first - 1, first, first + 6*ms, first + 3*s, 5 * s} {
					if blip(c, begin, p.away, p.refuses, p.remembers) {
						t.Errorf("seed %d: a blip from %v on stopped the command", seed, time.Duration(begin))
					}
				}
			}
		})
	}
}

func TestBlipLongerThanTheBudgetStopsTheCommand(t *testing.T) {
	for seed := range uint64(100) {
		c := with(usual(time.Minute), func(c *Config) { c.Seed = seed })
		if !blip(c, held(c).Wake()-t0-1, 40200*ms, true, false) { // 49.14 s less 9 s, the earliest attempt
			t.Errorf("seed %d: a blip of 40.2 s did not stop the command", seed)
		}
	}
}

func TestStoreThatTakesAThirdOfTheTTLToRestartIsRiddenOut(t *testing.T) { // C06
	for _, ttl := range []time.Duration{2 * time.Second, 3 * time.Second, 10 * time.Second, time.Minute} {
		for seed := range uint64(200) {
			c := with(usual(ttl), func(c *Config) { c.Seed = seed })
			if blip(c, held(c).Wake()-t0, int64(ttl)/3, true, false) {
				t.Errorf("ttl %v, seed %d: a blip of a third of it stopped the command", ttl, seed)
			}
		}
	}
}

func TestConfirmedLossKillsAtOnce(t *testing.T) {
	m := held(usual(time.Minute))
	play(t, m, []step{{10 * s, tick, Renew}, {10*s + 1, lost, Kill}})
	instant(t, "valid until", m.ValidUntil(), t0+10*s+1)
	instant(t, "kill at", m.Deadlines().KillAt, t0+10*s+1)
	instant(t, "stop at", m.Deadlines().StopAt, t0+10*s+1)
	check(t, "cause", m.Cause(), Taken)
	instant(t, "wake", m.Wake(), Never)
	play(t, m, []step{{11 * s, hurry, 0}, {12 * s, renewed, 0}, {3600 * s, tick, 0}, {3601 * s, gone, End}})
}

func TestConfirmedLossWithLossGraceStopsFirst(t *testing.T) {
	graceful := func(c *Config) { c.LossGrace = true }
	tests := []struct {
		name   string
		c      Config
		before []step
		at     int64
		want   Orders // at the loss
		killAt int64
	}{
		{
			"while holding: the grace", with(usual(time.Minute), graceful),
			[]step{{10 * s, tick, Renew}},
			11 * s, Stop, 21 * s,
		},
		{
			"late: never longer than without the loss", with(usual(time.Minute), graceful),
			[]step{{49140*ms - 1, tick, Renew}},
			49140*ms - 1, Stop, 59140*ms - 1,
		},
		{
			"while stopping: no second stop, no new grace", with(usual(time.Minute), graceful),
			[]step{{49140 * ms, tick, Stop | Renew}},
			50 * s, 0, 59140 * ms,
		},
		{
			"while draining: no longer than the drain", with(usual(time.Minute), func(c *Config) { c.LossGrace, c.Drain = true, 5*time.Second }),
			[]step{{10 * s, tick, Renew}, {10 * s, drain, 0}},
			11 * s, Stop, 15 * s,
		},
		{
			"while draining without limit: the grace", with(usual(time.Minute), graceful),
			[]step{{10 * s, tick, Renew}, {10 * s, drain, 0}},
			11 * s, Stop, 21 * s,
		},
		{
			"endless: the grace", with(endless(), graceful),
			[]step{{2 * s, tick, Renew}},
			2 * s, Stop, 12 * s,
		},
		{
			"without a grace: at once", with(usual(time.Minute), func(c *Config) { c.LossGrace, c.Grace = true, 0 }),
			[]step{{10 * s, tick, Renew}},
			11 * s, Kill, 11 * s,
		},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			m := held(p.c)
			play(t, m, p.before)
			play(t, m, []step{{p.at, lost, p.want}})
			instant(t, "valid until", m.ValidUntil(), t0+p.at)
			instant(t, "kill at", m.Deadlines().KillAt, t0+p.killAt)
			check(t, "cause", m.Cause(), Taken)
			if p.want&Kill == 0 {
				instant(t, "wake", m.Wake(), t0+p.killAt)
				play(t, m, []step{{p.killAt - 1, tick, 0}, {p.killAt, tick, Kill}})
			}
			play(t, m, []step{{p.killAt + s, gone, End}})
		})
	}
}

func TestFailedLookAtAnEndlessStoreIsALoss(t *testing.T) {
	tests := []struct {
		name  string
		steps []step
		cause Cause
	}{
		{"failed", []step{{2 * s, tick, Renew}, {2500 * ms, failed, Kill}}, Unreachable},
		{"no answer within the call limit", []step{{2 * s, tick, Renew}, {3*s - 1, tick, 0}, {3 * s, tick, Kill}}, Unreachable},
		{"answer at the call limit", []step{{2 * s, tick, Renew}, {3 * s, renewed, Kill}}, Unreachable},
		{"tick late by no more than a quarter of the limit", []step{{2 * s, tick, Renew}, {3250 * ms, tick, Kill}}, Unreachable},
		{"taken", []step{{2 * s, tick, Renew}, {2500 * ms, lost, Kill}}, Taken},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			m := held(endless())
			instant(t, "valid until", m.ValidUntil(), Never)
			d := m.Deadlines()
			check(t, "lease deadlines", [2]Instant{d.StopAt, d.KillAt}, [2]Instant{Never, Never})
			play(t, m, p.steps)
			check(t, "cause", m.Cause(), p.cause)
			check(t, "lost", m.IsLost(), true)
			instant(t, "valid until", m.ValidUntil(), t0+p.steps[len(p.steps)-1].at)
			play(t, m, []step{{4 * s, gone, End}})
		})
	}
}

func TestLookThatACallerCouldNotFinishBecauseItDidNotRunIsRepeated(t *testing.T) {
	for _, late := range []int64{250*ms + 1, s, 2 * s, 86400 * s} {
		for name, event := range map[string]func(*Machine, Instant) Orders{"tick": tick, "answer": renewed, "failure": failed, "loss": lost} {
			m := held(endless())
			play(t, m, []step{{2 * s, tick, Renew}, {3*s + late, event, Renew}})
			if m.IsLost() || m.Attempt() != 2 {
				t.Errorf("%s late by %v: lost %v, attempt %d; want a second look", name, time.Duration(late), m.IsLost(), m.Attempt())
			}
			play(t, m, []step{{4*s + late - 1, renewed, 0}})
			check(t, "renewals", m.Renewals(), 1)
			instant(t, "valid until", m.ValidUntil(), Never)
		}
	}
}

func TestEndlessTenureHoldsForADayOnLooksEveryTwoSeconds(t *testing.T) {
	m := held(endless())
	looks := 0
	for now := t0; now < t0+86400*s; {
		now = m.Wake()
		o := m.Tick(now)
		if o != Renew {
			t.Fatalf("after %v: orders %v, want a look", time.Duration(now-t0), names(o))
		}
		looks++
		if o = m.Renewed(m.Attempt(), 0, now); o != 0 {
			t.Fatalf("after %v: orders %v for a good look, want none", time.Duration(now-t0), names(o))
		}
	}
	if looks < 43200 || looks > 48000 {
		t.Errorf("%d looks in a day, want one every 1.8 s to 2 s", looks)
	}
}

func TestHintBringsTheNextAttemptForward(t *testing.T) {
	m := held(endless())
	play(t, m, []step{
		{1, hurry, Renew}, {2, hurry, 0}, {3, hurry, 0}, // one in flight at a time, and one more after it however many hints
		{4, renewed, Renew}, {5, renewed, 0},
	})
	check(t, "attempts", m.Attempt(), 2)
	m = held(usual(time.Minute))
	play(t, m, []step{{1, hurry, Renew}, {2, hurry, 0}, {3, failed, Renew}, {4, failed, 0}})
	if at := m.Wake() - t0; at < 100*ms || at > 300*ms {
		t.Errorf("attempt after two failures due at %v, want the wait that they ask for", time.Duration(at))
	}
}

func TestMaxRunStopsThenKillsAndIsRenewedAllTheWhile(t *testing.T) {
	m := New(with(usual(time.Minute), func(c *Config) { c.MaxRun = 5 * time.Second }), t0-30*s, time.Minute, t0)
	check(t, "run stop at before the start", m.Deadlines().RunStopAt, Never)
	if got := m.Started(t0); got&Publish == 0 {
		t.Errorf("orders at the start: %v, want publish", names(got))
	}
	d := m.Deadlines()
	instant(t, "run stop at", d.RunStopAt, t0+5*s)
	instant(t, "run kill at", d.RunKillAt, t0+15*s)
	play(t, m, []step{{1, renewOnce, 0}, {5*s - 1, renewOnce, 0}, {5 * s, tick, Stop}})
	check(t, "phase", m.Phase(), Stopping)
	at := m.Wake() - t0
	if at < 9*s || at > 10*s {
		t.Fatalf("next attempt due at %v, want a tenth before 10 s", time.Duration(at))
	}
	play(t, m, []step{{at, tick, Renew}, {at + 1, renewed, 0}, {15*s - 1, tick, 0}, {15 * s, tick, Kill}})
	check(t, "cause", m.Cause(), MaxRun)
	at = m.Wake() - t0
	play(t, m, []step{{at, tick, Renew}, {at + 1, renewed, 0}, {at + s, gone, Release}})
}

func TestMaxRunIsOverWhileDraining(t *testing.T) {
	m := held(with(usual(time.Minute), func(c *Config) { c.MaxRun = 5 * time.Second }))
	play(t, m, []step{{s, drain, 0}, {5 * s, tick, Stop}, {15 * s, tick, Kill | Renew}})
	check(t, "cause", m.Cause(), MaxRun)
}

func TestDrainStartsNoTimerButItsOwn(t *testing.T) {
	t.Run("without a limit", func(t *testing.T) {
		m := held(usual(time.Minute))
		play(t, m, []step{{s, drain, 0}, {2 * s, drain, 0}})
		check(t, "phase", m.Phase(), Draining)
		check(t, "drain kill at", m.Deadlines().DrainKillAt, Never)
		for now := t0 + 2*s; now < t0+3600*s; now = m.Wake() {
			o := m.Tick(now)
			if o&(Stop|Kill) != 0 {
				t.Fatalf("after %v: orders %v for a drain without limit", time.Duration(now-t0), names(o))
			}
			if o&Renew != 0 {
				m.Renewed(m.Attempt(), time.Minute, now)
			}
		}
		play(t, m, []step{{3600 * s, gone, Release}})
		check(t, "cause", m.Cause(), Drained)
	})
	t.Run("with a limit", func(t *testing.T) {
		m := held(with(usual(time.Minute), func(c *Config) { c.Drain = 30 * time.Second }))
		if got := m.Drain(t0 + s); got&Publish == 0 {
			t.Errorf("orders %v, want publish", names(got))
		}
		instant(t, "drain kill at", m.Deadlines().DrainKillAt, t0+31*s)
		m.Drain(t0 + 20*s) // a second signal does not start it again
		instant(t, "drain kill at after a second signal", m.Deadlines().DrainKillAt, t0+31*s)
		play(t, m, []step{{31*s - 1, renewOnce, 0}, {31 * s, tick, Kill}})
		check(t, "cause", m.Cause(), DrainedOut)
		check(t, "lost", m.IsLost(), false)
		play(t, m, []step{{31*s + 1, gone, Release}})
	})
	t.Run("of zero", func(t *testing.T) {
		m := held(with(usual(time.Minute), func(c *Config) { c.Drain = 0 }))
		play(t, m, []step{{s, drain, Kill}})
	})
	t.Run("with the store away", func(t *testing.T) {
		m := held(usual(time.Minute))
		play(t, m, []step{{s, drain, 0}, {49140 * ms, tick, Stop | Renew}, {59140 * ms, tick, Kill}})
		check(t, "lost", m.IsLost(), true)
	})
}

func TestFirstTickAfterAFreezeOrdersWhatIsDue(t *testing.T) { // Q09, Q13
	tests := []struct {
		name  string
		woken int64
		want  Orders
		cause Cause
		lost  bool
	}{
		{"before the first renewal", 8 * s, 0, NoCause, false},
		{"after it", 40 * s, Renew, NoCause, false},
		{"at stop at", 49140 * ms, Stop | Renew, Expired, false},
		{"between stop at and kill at", 55 * s, Stop | Renew, Expired, false},
		{"just before kill at", 59140*ms - 1, Stop | Renew, Expired, false},
		{"at kill at: no stop signal any more", 59140 * ms, Kill, Expired, true},
		{"after valid until", 60 * s, Kill, Expired, true},
		{"a year later", 31536000 * s, Kill, Expired, true},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			m := held(usual(time.Minute))
			play(t, m, []step{{p.woken, tick, p.want}})
			check(t, "cause", m.Cause(), p.cause)
			check(t, "lost", m.IsLost(), p.lost)
		})
		t.Run(p.name+", with an attempt in flight", func(t *testing.T) {
			m := held(with(usual(time.Minute), func(c *Config) { c.RenewEvery = time.Second }))
			play(t, m, []step{{s, tick, Renew}, {p.woken, renewed, p.want &^ Renew}}) // the answer came while nobody read it
			check(t, "lost", m.IsLost(), p.lost)
			check(t, "renewals", m.Renewals(), 0)
			instant(t, "valid until", m.ValidUntil(), t0+59390*ms)
		})
	}
}

func TestMarginGrowsWithTheTreeUpToAQuarterOfTheTTL(t *testing.T) {
	m := held(usual(time.Minute))
	if got := m.Grow(300*time.Millisecond, t0+1); got != Publish {
		t.Errorf("orders %v, want publish", names(got))
	}
	instant(t, "kill at", m.Deadlines().KillAt, t0+59090*ms)
	instant(t, "stop at", m.Deadlines().StopAt, t0+49090*ms)
	instant(t, "valid until", m.ValidUntil(), t0+59390*ms)
	if got := m.Grow(250*time.Millisecond, t0+2); got != 0 {
		t.Errorf("orders %v for a smaller margin, want none", names(got))
	}
	check(t, "margin after a smaller one", m.Margin(), 300*time.Millisecond)
	m.Grow(time.Hour, t0+3)
	check(t, "margin after an hour", m.Margin(), 15*time.Second)
	instant(t, "kill at", m.Deadlines().KillAt, t0+44390*ms)
	play(t, m, []step{{34390*ms - 1, tick, Renew}, {34390 * ms, tick, Stop}})

	m = held(usual(time.Minute))
	m.Tick(t0 + 46*s)
	if got := m.Grow(time.Hour, t0+46*s); got&Kill == 0 {
		t.Errorf("margin that reaches back before now: orders %v, want kill", names(got))
	}

	m = held(endless())
	check(t, "orders on an endless store", m.Grow(time.Hour, t0+1), 0)
	check(t, "margin on an endless store", m.Margin(), 250*time.Millisecond)
}

func TestGuardianThatActedFirstIsFollowed(t *testing.T) {
	t.Run("stop at", func(t *testing.T) {
		m := held(usual(time.Minute))
		play(t, m, []step{{45 * s, tick, Renew}, {48 * s, tick, 0}})
		m.GuardianStopped(false, t0+49140*ms, t0+49141*ms)
		check(t, "phase", m.Phase(), Stopping)
		check(t, "cause", m.Cause(), Unreachable)
		instant(t, "kill at", m.Deadlines().KillAt, t0+59140*ms)
		play(t, m, []step{{49142 * ms, renewOnce, 0}, {59140*ms - 1, renewOnce, 0}, {59140 * ms, tick, Kill}, {59141 * ms, gone, Release}})
	})
	t.Run("a stop that we had ordered already", func(t *testing.T) {
		m := held(usual(time.Minute))
		play(t, m, []step{{49140 * ms, tick, Stop | Renew}})
		check(t, "orders", m.GuardianStopped(false, t0+49141*ms, t0+49142*ms), 0)
		instant(t, "kill at", m.Deadlines().KillAt, t0+59140*ms)
	})
	t.Run("kill at", func(t *testing.T) {
		m := held(usual(time.Minute))
		play(t, m, []step{{45 * s, tick, Renew}, {48 * s, tick, 0}, {49140 * ms, tick, Stop | Renew}})
		got := m.GuardianKilled(Expired, t0+59140*ms, t0+59141*ms) &^ Publish
		check(t, "orders: we see to it that it is finished", got, Kill)
		check(t, "lost", m.IsLost(), true)
		check(t, "cause", m.Cause(), Unreachable)
		play(t, m, []step{{59142 * ms, renewed, 0}, {59143 * ms, tick, 0}, {59144 * ms, gone, End}})
	})
	t.Run("the drain", func(t *testing.T) {
		m := held(with(usual(time.Minute), func(c *Config) { c.Drain = 5 * time.Second }))
		play(t, m, []step{{s, drain, 0}})
		check(t, "orders", m.GuardianKilled(DrainedOut, t0+6*s, t0+6*s+1), Kill)
		check(t, "cause", m.Cause(), DrainedOut)
		play(t, m, []step{{6*s + 2, gone, Release}})
	})
	t.Run("a kill that we had ordered already", func(t *testing.T) {
		m := held(usual(time.Minute))
		play(t, m, []step{{59140 * ms, tick, Kill}})
		check(t, "orders", m.GuardianKilled(Expired, t0+59140*ms, t0+59141*ms), 0)
		check(t, "orders", m.GuardianStopped(false, t0+59140*ms, t0+59141*ms), 0)
		check(t, "phase", m.Phase(), Killing)
	})
}

func TestEndOfTheGraceAfterMaxRunIsNoLossOfTheLease(t *testing.T) {
	// The kill at that the guardian has for the lease is also the end of the grace after any stop, so that it may name the lease.
	m := held(with(usual(time.Minute), func(c *Config) { c.MaxRun = 5 * time.Second }))
	play(t, m, []step{{5*s + ms, tick, Stop}})
	instant(t, "kill at", m.Deadlines().KillAt, t0+15*s+ms)
	check(t, "orders", m.GuardianKilled(Expired, t0+15*s+ms, t0+15*s+2*ms)&^Publish, Kill)
	check(t, "cause", m.Cause(), MaxRun)
	check(t, "lost", m.IsLost(), false)
	play(t, m, []step{{16 * s, gone, Release}})
}

func TestTreeThatEndedInTimeWhileTheCallerWasStoppedEndedInTime(t *testing.T) { // Q36
	at := func(d int64) Instant { return t0 + d }
	const woken = 3600 * s
	t.Run("by itself", func(t *testing.T) {
		m := held(usual(time.Minute))
		check(t, "orders", m.TreeGone(true, at(30*s), at(woken)), Release)
		check(t, "cause", m.Cause(), NoCause)
	})
	t.Run("stopped for --max-run", func(t *testing.T) {
		m := held(with(usual(time.Minute), func(c *Config) { c.MaxRun = 20 * time.Second }))
		check(t, "orders", m.GuardianStopped(true, at(20*s), at(woken))&^Publish, 0)
		check(t, "orders", m.TreeGone(true, at(21*s), at(woken)), Release)
		check(t, "cause", m.Cause(), MaxRun)
	})
	t.Run("killed for --max-run", func(t *testing.T) {
		m := held(with(usual(time.Minute), func(c *Config) { c.MaxRun = 20 * time.Second }))
		m.GuardianStopped(true, at(20*s), at(woken))
		check(t, "orders", m.GuardianKilled(MaxRun, at(30*s), at(woken))&^Publish, Kill)
		check(t, "orders", m.TreeGone(true, at(30*s+ms), at(woken)), Release)
		check(t, "cause", m.Cause(), MaxRun)
	})
	t.Run("stopped for the lease", func(t *testing.T) {
		m := held(usual(time.Minute))
		m.GuardianStopped(false, at(49140*ms), at(woken))
		check(t, "orders", m.TreeGone(true, at(50*s), at(woken)), Release)
		check(t, "cause", m.Cause(), Expired)
	})
	t.Run("killed for the lease: lost", func(t *testing.T) {
		m := held(usual(time.Minute))
		m.GuardianStopped(false, at(49140*ms), at(woken))
		m.GuardianKilled(Expired, at(59140*ms), at(woken))
		check(t, "orders", m.TreeGone(true, at(59141*ms), at(woken)), End)
		check(t, "cause", m.Cause(), Expired)
	})
	t.Run("after the deadline, and nobody killed it: lost", func(t *testing.T) {
		m := held(usual(time.Minute))
		check(t, "orders", m.TreeGone(true, at(60*s), at(woken))&(Release|End|Renew), End)
		check(t, "cause", m.Cause(), Expired)
	})
	t.Run("still there: the next tick kills", func(t *testing.T) {
		m := held(with(usual(time.Minute), func(c *Config) { c.MaxRun = 20 * time.Second }))
		m.GuardianStopped(true, at(20*s), at(woken))
		if w := m.Wake(); w > at(woken) {
			t.Fatalf("wake at t0%+v, want a tick at once", time.Duration(w-t0))
		}
		play(t, m, []step{{woken, tick, Kill}})
		check(t, "cause", m.Cause(), Expired)
	})
}

func TestGuardianThatIsLostKillsTheTreeAtOnce(t *testing.T) {
	m := held(usual(time.Minute))
	check(t, "orders", m.GuardianGone(t0+s, t0+s), Kill)
	check(t, "cause", m.Cause(), GuardianLost)
	check(t, "orders of a second report", m.GuardianGone(t0+s, t0+s), 0)
	at := m.Wake() - t0
	play(t, m, []step{{at, tick, Renew}, {at + 1, renewed, 0}, {at + 2, gone, Release}}) // the lease is kept until the tree is gone
	check(t, "orders after the end", m.GuardianGone(t0+20*s, t0+20*s), 0)

	m = held(usual(time.Minute))
	m.GuardianGone(t0+s, t0+3*s) // the caller did not run for two seconds
	m.TreeGone(true, t0+2*s, t0+3*s)
	check(t, "cause of an end that was heard of with it", m.Cause(), GuardianLost)

	m = held(usual(time.Minute))
	check(t, "orders while the grace runs", func() Orders { m.Tick(t0 + 50*s); return m.GuardianGone(t0+51*s, t0+51*s) &^ Publish }(), Kill)
}

func TestTreeThatIsGoneIsReleasedUnlessTheGrantWasLost(t *testing.T) {
	tests := []struct {
		name   string
		before []step
		clean  bool
		at     int64
		want   Orders
	}{
		{"while holding", nil, true, 5 * s, Release},
		{"while an attempt is in flight", []step{{10 * s, tick, Renew}}, true, 11 * s, Release},
		{"while draining", []step{{s, drain, 0}}, true, 2 * s, Release},
		{"while stopping", []step{{49140 * ms, tick, Stop | Renew}}, true, 50 * s, Release},
		{"just before kill at", []step{{49140 * ms, tick, Stop | Renew}}, true, 59140*ms - 1, Release},
		{"at kill at", []step{{49140 * ms, tick, Stop | Renew}}, true, 59140 * ms, Kill | End},
		{"after a confirmed loss", []step{{10 * s, tick, Renew}, {10 * s, lost, Kill}}, true, 11 * s, End},
		{"not for certain", nil, false, 5 * s, End},
	}
	for _, p := range tests {
		t.Run(p.name, func(t *testing.T) {
			m := held(usual(time.Minute))
			play(t, m, p.before)
			check(t, "orders", m.TreeGone(p.clean, t0+p.at, t0+p.at)&^Publish, p.want)
			check(t, "phase", m.Phase(), Gone)
			instant(t, "wake", m.Wake(), Never)
			until := m.ValidUntil()
			play(t, m, []step{
				{p.at + 1, renewed, 0},
				{p.at + 1, lost, 0},
				{p.at + 1, failed, 0},
				{p.at + 1, hurry, 0},
				{p.at + 1, drain, 0},
				{p.at + 7200*s, tick, 0},
				{p.at + 7200*s, gone, 0},
			})
			instant(t, "valid until after the end", m.ValidUntil(), until)
			check(t, "phase after the end", m.Phase(), Gone)
		})
	}
}

func TestGravestCauseIsReported(t *testing.T) {
	order := []Cause{NoCause, Drained, DrainedOut, MaxRun, Unreachable, Expired, Taken, GuardianLost}
	if !slices.IsSorted(order) {
		t.Errorf("causes in the order %v, want them to grow", order)
	}
	m := held(with(usual(time.Minute), func(c *Config) { c.MaxRun = 5 * time.Second }))
	play(t, m, []step{{s, drain, 0}})
	check(t, "cause", m.Cause(), Drained)
	play(t, m, []step{{5 * s, tick, Stop}})
	check(t, "cause", m.Cause(), MaxRun)
	play(t, m, []step{{10 * s, tick, Renew}, {11 * s, lost, Kill}})
	check(t, "cause", m.Cause(), Taken)
	m.GuardianKilled(MaxRun, t0+11*s, t0+11*s)
	check(t, "cause", m.Cause(), Taken)
	m.GuardianGone(t0+12*s, t0+12*s)
	check(t, "cause", m.Cause(), GuardianLost)
}

func TestClockThatSeemsToGoBackIsNotBelieved(t *testing.T) { // Q18
	m := held(with(usual(time.Minute), func(c *Config) { c.Drain = 5 * time.Second }))
	play(t, m, []step{
		{10 * s, tick, Renew},
		{-3600 * s, tick, 0},
		{-3600 * s, renewed, 0},
		{30 * s, tick, Renew},
		{0, failed, 0},
	})
	if at := m.Wake() - t0; at < 30*s {
		t.Errorf("next attempt due at %v, want it after the latest instant seen", time.Duration(at))
	}
	m.Drain(t0)
	instant(t, "drain kill at", m.Deadlines().DrainKillAt, t0+35*s)
	play(t, m, []step{{35 * s, tick, Kill | Renew}, {0, tick, 0}, {-3600 * s, gone, Release}})

	m = New(with(usual(time.Minute), func(c *Config) { c.MaxRun = time.Second }), t0, time.Minute, t0-3600*s)
	m.Started(t0 - 3600*s)
	instant(t, "run stop at of a start before sent", m.Deadlines().RunStopAt, t0+s)
}

func TestHugeDurationsAndInstantsDoNotWrapAround(t *testing.T) {
	const huge = time.Duration(math.MaxInt64)
	t.Run("everything without end", func(t *testing.T) {
		m := held(Config{TTL: huge, RenewEvery: huge, CallLimit: huge, MaxRun: huge, Drain: huge, Drift: 0})
		check(t, "orders", m.Drain(t0+s), 0)
		check(t, "orders", m.Tick(t0+int64(huge)/2), 0)
		check(t, "phase", m.Phase(), Draining)
		instant(t, "valid until", m.ValidUntil(), Never)
	})
	t.Run("grace and margin without end stop at once rather than never", func(t *testing.T) {
		m := New(Config{TTL: time.Minute, Grace: huge, Margin: huge, RenewEvery: s10, CallLimit: time.Second}, t0, time.Minute, t0)
		check(t, "startable", m.Startable(t0), false)
		check(t, "orders", m.Tick(t0)&(Kill|Stop), Kill)
	})
	t.Run("grace without end", func(t *testing.T) {
		m := New(Config{TTL: time.Minute, Grace: huge, RenewEvery: s10, CallLimit: time.Second}, t0, time.Minute, t0)
		check(t, "orders", m.Tick(t0)&(Kill|Stop), Stop)
		play(t, m, []step{{59990 * ms, tick, Kill}})
	})
	t.Run("near never", func(t *testing.T) {
		sent := Never - 30*s
		m := New(usual(time.Minute), sent, time.Minute, sent)
		m.Started(sent)
		instant(t, "valid until", m.ValidUntil(), Never)
		for now := sent; now < Never-s; now += s {
			if o := m.Tick(now); o&(Stop|Kill) != 0 {
				t.Fatalf("%v before never: orders %v", time.Duration(Never-now), names(o))
			}
		}
	})
}

const s10 = 10 * time.Second

func TestEveryChangeOfTheDeadlinesIsPublished(t *testing.T) {
	m := held(with(usual(time.Minute), func(c *Config) { c.Drain = time.Hour }))
	seen := m.Deadlines()
	at := m.Wake()
	for i, o := range []func() Orders{
		func() Orders { return m.Tick(at) },
		func() Orders { return m.Renewed(1, time.Minute, at+1) },
		func() Orders { return m.Grow(time.Second, at+2) },
		func() Orders { return m.Drain(at + 3) },
		func() Orders { return m.GuardianStopped(false, at+4, at+5) },
		func() Orders { return m.Hurry(at + 6) },
		func() Orders { return m.Lost(2, at+7) },
	} {
		got := o()&Publish != 0
		if want := m.Deadlines() != seen; got != want {
			t.Errorf("event %d: publish %v, want %v", i, got, want)
		}
		seen = m.Deadlines()
	}
}
