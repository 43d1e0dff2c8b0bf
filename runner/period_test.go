package runner

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
)

const sweepHold = 30 * time.Second

// sweep lets two to five hosts start one job each at every offset from 0 to 2 s and every length of the job from 0 to 1 s, and returns how
// often it ran in each case (C65).
func sweep(t *testing.T, ask func(*Spec)) (ran map[string]int, cases map[string][3]time.Duration) {
	ran, cases = map[string]int{}, map[string][3]time.Duration{}
	const step = 100 * time.Millisecond
	assemble(t, func(f *fleet) {
		var all sync.WaitGroup
		for offset := time.Duration(0); offset <= 2*time.Second; offset += step {
			for lasts := time.Duration(0); lasts <= time.Second; lasts += step {
				for hosts := 2; hosts <= 5; hosts++ {
					name := fmt.Sprintf("offset %v, length %v, %d hosts", offset, lasts, hosts)
					cases[name] = [3]time.Duration{offset, lasts, time.Duration(hosts)}
					for i := range hosts {
						h := f.host(fmt.Sprint("host", i), "")
						h.spec.Lease, h.job.lasts = strings.ReplaceAll(name, ",", ""), max(lasts, time.Nanosecond)
						ask(&h.spec)
						all.Go(func() {
							time.Sleep(offset * time.Duration(i) / time.Duration(hosts-1))
							if r := h.run(); r.ExitCode != 0 && r.ExitCode != ExitBusy {
								t.Errorf("%s, %s: got %q with %d (%s)", name, h.name, r.Outcome, r.ExitCode, r.Reason)
							}
						})
					}
				}
			}
		}
		all.Wait()
		for name := range cases {
			ran[name] = len(f.ran(strings.ReplaceAll(name, ",", "")))
		}
	})
	if len(ran) != 21*11*4 {
		t.Fatalf("got %d cases, want all", len(ran))
	}
	return ran, cases
}

func TestOneTickIsOneExecutionWhateverTheSkew(t *testing.T) { // C65
	for name, ask := range map[string]func(*Spec){
		"--min-hold 30s":    func(s *Spec) { s.MinHold = sweepHold },
		"--once-per 1m":     func(s *Spec) { s.Once.Per = time.Minute },
		"--min-interval 1m": func(s *Spec) { s.Once.Interval = time.Minute },
		"gate":              func(s *Spec) { s.Once.Ever = true },
	} {
		t.Run(name, func(t *testing.T) {
			ran, _ := sweep(t, ask)
			for _, c := range slices.Sorted(maps.Keys(ran)) {
				if ran[c] != 1 {
					t.Errorf("%s: the job ran %d times, want once", c, ran[c])
				}
			}
		})
	}
}

// Without any of them a lease excludes only what runs at the same time.
func TestWithoutThemATickOfTwoHostsMayRunTwice(t *testing.T) {
	ran, cases := sweep(t, func(*Spec) {})
	for name, c := range cases {
		if c[2] != 2 || c[0] == c[1] {
			continue
		}
		want := 1
		if c[0] > c[1] {
			want = 2
		}
		if ran[name] != want {
			t.Errorf("%s: the job ran %d times, want %d", name, ran[name], want)
		}
	}
}

func TestSlotsAreThoseOfTheUTCClock(t *testing.T) {
	berlin := time.FixedZone("summer", 2*60*60)
	kathmandu := time.FixedZone("far", 5*60*60+45*60)
	for _, c := range []struct {
		at   string
		per  time.Duration
		want string
	}{
		{"2026-11-30T00:00:00Z", 24 * time.Hour, "2026-11-30T00:00:00Z"},
		{"2026-11-30T23:59:59.999Z", 24 * time.Hour, "2026-11-30T00:00:00Z"},
		{"2026-03-29T00:59:59Z", time.Hour, "2026-03-29T00:00:00Z"}, // Europe goes to summer time a second later
		{"2026-03-29T01:00:00Z", time.Hour, "2026-03-29T01:00:00Z"},
		{"2026-10-25T00:30:00Z", time.Hour, "2026-10-25T00:00:00Z"}, // 02:30 for the first time, in Berlin
		{"2026-10-25T01:30:00Z", time.Hour, "2026-10-25T01:00:00Z"}, // and for the second
		{"2024-02-29T12:34:56Z", 15 * time.Minute, "2024-02-29T12:30:00Z"},
		{"1969-12-31T23:59:59Z", time.Hour, "1969-12-31T23:00:00Z"},
		{"2016-12-31T23:59:59Z", time.Second, "2016-12-31T23:59:59Z"},
	} {
		at, err := time.Parse(time.RFC3339, c.at)
		if err != nil {
			t.Fatal(err)
		}
		for _, zone := range []*time.Location{time.UTC, berlin, kathmandu} {
			if got := slotOf(at.In(zone), c.per).Format(time.RFC3339); got != c.want {
				t.Errorf("%s in slots of %v, seen from %v: got %s, want %s", c.at, c.per, zone, got, c.want)
			}
		}
	}
}

// Two hosts whose clocks are an hour apart tick every ten minutes for two days: every hour of the store has one run.
func TestTwoHostsAnHourApartNeitherLoseNorDoubleASlot(t *testing.T) {
	assemble(t, func(f *fleet) {
		begin := time.Now()
		var all sync.WaitGroup
		for i, ahead := range []time.Duration{0, time.Hour} {
			all.Go(func() {
				for tick := range 48 * 6 {
					h := f.host(fmt.Sprint("host", i), "")
					h.clock.begun = h.clock.begun.Add(-ahead)
					h.spec.Once.Per = time.Hour
					time.Sleep(time.Until(begin.Add(time.Duration(tick)*10*time.Minute + 3*time.Second + time.Duration(i)*time.Second)))
					h.run()
				}
			})
		}
		all.Wait()
		bySlot := map[time.Time]int{}
		for _, s := range f.ran("nightly") {
			bySlot[s.at.UTC().Truncate(time.Hour)]++
		}
		for hour := range 48 {
			if n := bySlot[begin.UTC().Add(time.Duration(hour)*time.Hour)]; n != 1 {
				t.Errorf("hour %d has %d runs, want one", hour, n)
			}
		}
		f.wantRuns(48)
	})
}

func TestARunOfASlotIsRetriedUntilItSucceedsUnderOneRunID(t *testing.T) {
	assemble(t, func(f *fleet) {
		once := func(code int) Result {
			h := f.host("a", "")
			h.spec.Once.Per, h.job.code = time.Hour, code
			return h.run()
		}
		want(t, once(1), OutcomeFailed, 1)
		time.Sleep(10 * time.Minute)
		r := once(0)
		want(t, r, OutcomeOK, 0)
		if got := r.RunID(); got != "nightly/2000-01-01T00:00:00Z" {
			t.Errorf("got the run id %q in the report, want the slot", got)
		}
		time.Sleep(49 * time.Minute)
		r = once(0)
		want(t, r, OutcomeNotDue, ExitBusy)
		if d := r.Done; d == nil || d.Ago.Round(time.Second) != 49*time.Minute || d.Left.Round(time.Second) != time.Minute || d.Holder != "a" {
			t.Errorf("got %+v, want that it ran 49 minutes ago, and that the slot ends in a minute", d)
		}
		time.Sleep(time.Minute)
		want(t, once(0), OutcomeOK, 0)
		var ids []string
		for _, s := range f.ran("nightly") {
			ids = append(ids, s.runID)
		}
		if got, want := strings.Join(ids, " "), "nightly/2000-01-01T00:00:00Z nightly/2000-01-01T00:00:00Z nightly/2000-01-01T01:00:00Z"; got != want {
			t.Errorf("the commands learned the run ids %q, want %q", got, want)
		}
	})
}

// A run that takes longer than its slot belongs to the slot in which it began, and the next one is not lost.
func TestARunOverTheEndOfItsSlotLeavesTheNextOneFree(t *testing.T) {
	assemble(t, func(f *fleet) {
		run := func() Result {
			h := f.host("a", "")
			h.spec.Once.Per, h.job.lasts = time.Hour, 30*time.Minute
			return h.run()
		}
		time.Sleep(50 * time.Minute)
		want(t, run(), OutcomeOK, 0) // until 01:20
		want(t, run(), OutcomeOK, 0) // until 01:50
		want(t, run(), OutcomeNotDue, ExitBusy)
	})
}

// Close to the end of a slot only the look inside decides: it knows the clock of the store.
func TestTheLastMomentsOfASlot(t *testing.T) {
	for _, late := range []time.Duration{-5 * time.Second, -2 * time.Second, -time.Millisecond, 0, time.Millisecond, 2 * time.Second} {
		assemble(t, func(f *fleet) {
			run := func() Result {
				h := f.host("a", "")
				h.spec.Once.Per = time.Hour
				return h.run()
			}
			want(t, run(), OutcomeOK, 0)
			time.Sleep(time.Hour + late - 100*time.Millisecond)
			if late < 0 {
				want(t, run(), OutcomeNotDue, ExitBusy)
			} else {
				want(t, run(), OutcomeOK, 0)
			}
		})
	}
}

// Before the lease is asked for, the clock of the store is only estimated: what may be in the next slot already is left to the look inside.
func TestAnEstimateOfTheClockLosesNoSlot(t *testing.T) {
	runs := []Ran{{Term: 1, At: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), Until: 50 * time.Minute}}
	s := Spec{TTL: time.Minute, RenewEvery: 9 * time.Second, ClockDrift: 0.01} // half a minute of 50, and a call of 3s
	for age, done := range map[time.Duration]bool{
		0: true, 9 * time.Minute: true, 9*time.Minute + 26*time.Second: true, 9*time.Minute + 28*time.Second: false, 10 * time.Minute: false, time.Hour: false,
	} {
		if got := (Once{Per: time.Hour}).due(runs, age, time.Time{}, s); (got != nil) != done {
			t.Errorf("%v after a run of 50m that began with its slot: got %+v, want done %t", age, got, done)
		}
	}
}

func TestTheSlotBeforeIsRemembered(t *testing.T) {
	at := func(s string) time.Time {
		v, err := time.Parse(time.RFC3339, s)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	runs := []Ran{{Term: 2, At: at("2026-11-30T10:00:01Z")}, {Term: 1, At: at("2026-11-30T09:00:01Z")}}
	o := Once{Per: time.Hour}
	for now, done := range map[string]bool{"2026-11-30T10:30:00Z": true, "2026-11-30T09:59:59Z": true, "2026-11-30T08:59:59Z": false, "2026-11-30T11:00:00Z": false} {
		if got := o.due(runs, 30*time.Minute, at(now), Spec{}); (got != nil) != done {
			t.Errorf("at %s, after the clock was set: got %+v, want done %t", now, got, done)
		}
	}
	if got := decodeTwice(t, append(runs, Ran{Term: 3})); len(got) != 2 || got[0].Term != 2 || got[1].Term != 1 {
		t.Errorf("got %+v, want the two newest", got)
	}
}

func decodeTwice(t *testing.T, runs []Ran) []Ran {
	t.Helper()
	got, err := decodeSuccess(backends.Record{Key: successKey, Value: encodeSuccess(runs)})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestMinIntervalCountsFromTheBeginOfTheLastSuccess(t *testing.T) {
	assemble(t, func(f *fleet) {
		run := func(code int, lasts time.Duration) Result {
			h := f.host("a", "")
			h.spec.Once.Interval, h.job = 10*time.Minute, job{code: code, lasts: lasts}
			return h.run()
		}
		want(t, run(0, 4*time.Minute), OutcomeOK, 0)
		r := run(0, time.Second)
		want(t, r, OutcomeNotDue, ExitBusy)
		if d := r.Done; d == nil || d.Ago.Round(time.Second) != 4*time.Minute || d.Left.Round(time.Second) != 6*time.Minute {
			t.Errorf("got %+v, want 4 minutes ago and 6 left", d)
		}
		time.Sleep(6 * time.Minute)
		want(t, run(1, time.Second), OutcomeFailed, 1) // counts for nothing
		want(t, run(0, time.Second), OutcomeOK, 0)
		want(t, run(0, time.Second), OutcomeNotDue, ExitBusy)
		// A run without the flag is none of it, and it neither reads nor writes.
		h := f.host("b", "fault=get:1%2B:hang&fault=put:1%2B:hang")
		want(t, h.run(), OutcomeOK, 0)
	})
}

// Several holders at once write one record: none of them loses against another.
func TestSuccessesOfSeveralSlotsAreAllRecorded(t *testing.T) {
	assemble(t, func(f *fleet) {
		var all sync.WaitGroup
		for i := range 3 {
			h := f.host(fmt.Sprint("host", i), "")
			h.spec.Slots, h.spec.Once.Interval = 3, time.Hour
			all.Go(func() { want(t, h.run(), OutcomeOK, 0) })
		}
		all.Wait()
		f.wantRuns(3)
		h := f.host("late", "")
		h.spec.Slots, h.spec.Once.Interval = 3, time.Hour
		want(t, h.run(), OutcomeNotDue, ExitBusy)
	})
}

func TestASuccessThatCannotBeRecordedIs74(t *testing.T) {
	assemble(t, func(f *fleet) {
		h := f.host("a", "fault=put:1%2B:denied")
		h.spec.Once.Per = time.Hour
		r := h.run()
		want(t, r, OutcomeUnrecorded, ExitLost)
		if r.Hint != "it will run again" {
			t.Errorf("got the hint %q", r.Hint)
		}
		h = f.host("b", "")
		h.spec.Once.Per = time.Hour
		r = h.run()
		want(t, r, OutcomeOK, 0)
		if got := Previous(r.Grant.Previous); got != "ok" {
			t.Errorf("the next run learned that the last one was %q, want ok", got)
		}
	})
}

// Those that found nothing to do are no runs: the next command learns how the last command ended.
func TestThePreviousRunIsTheLastOneThatHadACommand(t *testing.T) {
	assemble(t, func(f *fleet) {
		var all sync.WaitGroup
		for i := range 4 {
			h := f.host(fmt.Sprint("host", i), "")
			h.spec.Once.Per, h.spec.Wait = time.Hour, time.Minute
			all.Go(func() { h.run() })
		}
		all.Wait()
		f.wantRuns(1)
		time.Sleep(time.Hour)
		h := f.host("next", "")
		h.spec.Once.Per = time.Hour
		if r := h.run(); Previous(r.Grant.Previous) != "ok" {
			t.Errorf("got %+v, want how the last command ended", r.Grant.Previous)
		}
	})
}

// A rolling deployment: two old instances of a scheduler and two new ones, 30 s beside each other, with fifteen jobs of mixed periods that
// every instance starts at its own slightly wrong time. In every slot every job runs once.
func TestARollingDeploymentNeitherDoublesNorLosesAJob(t *testing.T) {
	periods := []time.Duration{
		time.Minute, time.Minute, time.Minute, 2 * time.Minute, 2 * time.Minute, 3 * time.Minute, 4 * time.Minute, 5 * time.Minute,
		5 * time.Minute, 6 * time.Minute, 10 * time.Minute, 10 * time.Minute, 15 * time.Minute, 20 * time.Minute, 30 * time.Minute,
	}
	for name, ask := range map[string]func(*Spec, time.Duration){
		"--once-per":     func(s *Spec, period time.Duration) { s.Once.Per = period },
		"--min-hold":     func(s *Spec, period time.Duration) { s.MinHold = sweepHold },
		"--min-interval": func(s *Spec, period time.Duration) { s.Once.Interval = period * 9 / 10 },
	} {
		t.Run(name, func(t *testing.T) {
			assemble(t, func(f *fleet) {
				const swap, end, overlap = 30 * time.Minute, time.Hour, 30 * time.Second
				begin := time.Now()
				var all sync.WaitGroup
				for instance := range 4 {
					from, to := time.Duration(0), swap+overlap
					if instance >= 2 {
						from, to = swap, end
					}
					for n, period := range periods {
						rng := rand.New(rand.NewPCG(uint64(instance), uint64(n)))
						all.Go(func() {
							for at := time.Duration(0); at < end; at += period {
								tick := at + 10*time.Second + time.Duration(rng.Int64N(int64(2*time.Second)))
								if tick < from || tick >= to {
									continue
								}
								time.Sleep(time.Until(begin.Add(tick)))
								h := f.host(fmt.Sprint("instance", instance), "")
								h.spec.Lease, h.job.lasts = fmt.Sprint("job", n), time.Duration(rng.Int64N(int64(time.Second)))+1
								ask(&h.spec, period)
								if r := h.run(); r.ExitCode != 0 && r.ExitCode != ExitBusy {
									t.Errorf("job %d at %v: got %q with %d", n, tick, r.Outcome, r.ExitCode)
								}
							}
						})
					}
				}
				all.Wait()
				for n, period := range periods {
					bySlot := map[time.Duration]int{}
					for _, s := range f.ran(fmt.Sprint("job", n)) {
						bySlot[s.at.Sub(begin).Truncate(period)]++
					}
					for at := time.Duration(0); at < end; at += period {
						if bySlot[at] != 1 {
							t.Errorf("job %d, every %v: %d runs in the slot at %v, want one", n, period, bySlot[at], at)
						}
					}
				}
			})
		})
	}
}

func TestWhatCannotBeKeptTogetherIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		once  Once
		slots int
		run   IfUnavailable
	}{
		"a gate with slots":                  {Once{Ever: true}, 2, UnavailableFail},
		"a gate that runs without its store": {Once{Ever: true}, 1, UnavailableRun},
		"a gate with a period":               {Once{Ever: true, Per: time.Hour}, 1, UnavailableFail},
		"a gate with an interval":            {Once{Ever: true, Interval: time.Hour}, 1, UnavailableFail},
		"a period with slots":                {Once{Per: time.Hour}, 2, UnavailableFail},
	} {
		s := Spec{Once: c.once, Slots: c.slots, IfUnavailable: c.run, TTL: time.Minute, Grace: Auto, Margin: Auto, RenewEvery: Auto}
		if err, ok := errors.AsType[*RelationError](s.Settle(false)); !ok || err.Hint == "" {
			t.Errorf("%s: got %v, want a refusal with a hint", name, err)
		}
	}
}
