package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/mem"
	"github.com/underlease/underlease/signals"
)

// fleet is hosts with one store, in a bubble. What ran is judged by the stamps that the commands leave, and by nothing that a run says.
type fleet struct {
	t      *testing.T
	server *mem.Server

	mu     sync.Mutex
	stamps []stamp
}

type stamp struct {
	lease, host, term, runID string
	at                       time.Time
}

// assemble runs f in a bubble, whose clock begins at midnight UTC of the first of January 2000.
func assemble(t *testing.T, f func(f *fleet)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f(&fleet{t: t, server: mem.NewServer(mem.Options{})})
		time.Sleep(2 * time.Minute) // calls that were left behind end before the bubble does
	})
}

// host is one of a fleet: a clock of its own, which has nothing to do with that of any other, and its own connection.
type host struct {
	*fleet
	name    string
	clock   *clock
	store   *backends.Store
	spec    Spec
	job     job
	applied func(context.Context) (bool, error)
	signals chan syscall.Signal
	said    []string
	starts  int
}

// host returns a host. Query is what goes wrong with its connection: see package mem.
func (f *fleet) host(name, query string) *host {
	f.t.Helper()
	u, err := url.Parse("mem:?" + query)
	if err != nil {
		f.t.Fatal(err)
	}
	store, err := mem.Scheme(f.server).Open(f.t.Context(), u)
	if err != nil {
		f.t.Fatal(err)
	}
	return &host{
		fleet: f, name: name, clock: newClock(), store: store, job: job{lasts: 100 * time.Millisecond}, signals: make(chan syscall.Signal, 4),
		spec: Spec{
			Lease: "nightly", Holder: name, Slots: 1, TTL: time.Minute, Drain: Forever,
			Grace: Auto, Margin: Auto, RenewEvery: Auto, ClockDrift: 0.01,
			IfUnavailable: UnavailableFail, OnLost: LostKill, StopSignal: syscall.SIGTERM, Leftovers: signals.LeftoversKill,
			Path: "/bin/job", Args: []string{"job"},
		},
	}
}

func (f *fleet) gate(name, query string) *host {
	h := f.host(name, query)
	h.spec.Once.Ever = true
	return h
}

// witnessed is a tree whose command leaves a stamp when it is started.
type witnessed struct {
	*tree
	host *host
}

func (w witnessed) Start(c signals.Command, d signals.Deadlines) (int, error) {
	s := stamp{lease: w.host.spec.Lease, host: w.host.name, at: time.Now()}
	for _, entry := range c.Env {
		if v, ok := strings.CutPrefix(entry, factRunID+"="); ok {
			s.runID = v
		}
		if v, ok := strings.CutPrefix(entry, factTerm+"="); ok {
			s.term = v
		}
	}
	w.host.mu.Lock()
	w.host.stamps = append(w.host.stamps, s)
	w.host.starts++
	w.host.mu.Unlock()
	return w.tree.Start(c, d)
}

func (h *host) run() Result {
	spec := h.spec
	if err := spec.Settle(false); err != nil {
		h.t.Errorf("settle: %v", err)
		return Result{}
	}
	return Run(h.t.Context(), spec, h.store, Platform{
		Launch: func() (Tree, error) { return witnessed{newTree(h.clock, h.job), h}, nil },
		Now:    h.clock.now, Alarm: h.clock, Signals: h.signals, Applied: h.applied,
		Log: slog.New(slog.DiscardHandler),
		Say: func(line, _ string) { h.said = append(h.said, line) },
	})
}

// ran returns the stamps of a lease.
func (f *fleet) ran(lease string) (all []stamp) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.stamps {
		if s.lease == lease {
			all = append(all, s)
		}
	}
	return all
}

func (f *fleet) wantRuns(n int) {
	f.t.Helper()
	if got := len(f.ran("nightly")); got != n {
		f.t.Errorf("the command ran %d times, want %d", got, n)
	}
}

func (f *fleet) marker() (Marker, bool) {
	f.t.Helper()
	m, err := (Markers{f.server.Open(), time.Second}).Get(f.t.Context(), "", "nightly")
	if err != nil && !errors.Is(err, backends.ErrNoRecord) {
		f.t.Fatal(err)
	}
	return m.Marker, err == nil
}

func (f *fleet) wantMarker(want bool) {
	f.t.Helper()
	if _, got := f.marker(); got != want {
		f.t.Errorf("the marker is set: %t, want %t", got, want)
	}
}

func TestThreeGatesAtOnceRunTheirCommandOnce(t *testing.T) {
	for _, lasts := range []time.Duration{time.Nanosecond, time.Second, 5 * time.Minute} { // up to 5 ttl
		t.Run(lasts.String(), func(t *testing.T) {
			assemble(t, func(f *fleet) {
				var all sync.WaitGroup
				outcomes := make(chan Outcome, 3)
				for i := range 3 {
					h := f.gate(fmt.Sprint("host", i), "")
					h.spec.Wait, h.job.lasts = 10*time.Minute, lasts
					all.Go(func() {
						r := h.run()
						outcomes <- r.Outcome
						if r.ExitCode != 0 {
							f.t.Errorf("%s: got %d (%s), want 0", h.name, r.ExitCode, r.Reason)
						}
					})
				}
				all.Wait()
				close(outcomes)
				var got []string
				for o := range outcomes {
					got = append(got, string(o))
				}
				slices.Sort(got)
				if want := []string{"already-applied", "already-applied", "migrated"}; !slices.Equal(got, want) {
					t.Errorf("got %q, want %q", got, want)
				}
				f.wantRuns(1)
				m, _ := f.marker()
				s := f.ran("nightly")[0]
				if m.Term.String() != s.term || m.Holder != s.host || m.RunID != s.runID || m.At.Sub(s.at).Abs() > time.Second || (m.Took-lasts).Abs() > time.Millisecond {
					t.Errorf("got the marker %+v, want what %+v has left, and %v", m, s, lasts)
				}
			})
		})
	}
}

func TestAGateAsksThreeTimes(t *testing.T) {
	t.Run("before: the lease is not asked for", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			want(t, f.gate("a", "").run(), OutcomeMigrated, 0)
			trace := filepath.Join(t.TempDir(), "trace")
			r := f.gate("b", "trace="+trace).run()
			want(t, r, OutcomeApplied, 0)
			if r.Done == nil || r.Done.Holder != "a" {
				t.Errorf("got %+v, want that a has done it", r.Done)
			}
			data, err := os.ReadFile(trace)
			if err != nil || strings.Contains(string(data), "acquire") || strings.Count(string(data), "begin") != 1 {
				t.Errorf("got %v and the calls\n%s want one look", err, data)
			}
			f.wantRuns(1)
		})
	})
	t.Run("inside: nothing runs, and the lease is given back", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			a, b := f.gate("a", ""), f.gate("b", "")
			b.spec.Wait, b.spec.MinHold = time.Minute, time.Hour
			var all sync.WaitGroup
			all.Go(func() { want(t, a.run(), OutcomeMigrated, 0) })
			time.Sleep(time.Millisecond)
			all.Go(func() {
				r := b.run()
				want(t, r, OutcomeApplied, 0)
				if r.Started || !r.Released || r.Grant.Term == 0 {
					t.Errorf("got %+v, want a lease that was given back, and no command", r)
				}
			})
			all.Wait()
			f.wantRuns(1)
			h := f.host("c", "")
			want(t, h.run(), OutcomeOK, 0) // nor is there a hold
		})
	})
	t.Run("after a refusal: applied is told from skipped", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			a, b := f.gate("a", ""), f.gate("b", "")
			a.job.lasts = 10 * time.Second
			done := make(chan Result, 1)
			go func() { done <- a.run() }()
			time.Sleep(time.Second)
			r := b.run()
			want(t, r, OutcomeSkipped, ExitBusy)
			if r.Busy == nil || r.Busy.Holder != "a" {
				t.Errorf("got %+v, want that a holds it", r.Busy)
			}
			want(t, <-done, OutcomeMigrated, 0)
			f.wantRuns(1)
		})
		assemble(t, func(f *fleet) {
			a := f.gate("a", "")
			a.job.lasts = 2 * time.Second
			b := f.gate("b", "") // refused while a is at it; the answer comes when a is done
			b.store.Backend = slowRefusal{b.store.Backend, 3 * time.Second}
			done := make(chan Result, 1)
			go func() { done <- a.run() }()
			time.Sleep(time.Second)
			want(t, b.run(), OutcomeApplied, 0)
			want(t, <-done, OutcomeMigrated, 0)
			f.wantRuns(1)
		})
		assemble(t, func(f *fleet) { // the last look fails: skipped would say that it is not applied
			f.holdFor(time.Minute)
			r := f.gate("b", "fault=get:2%2B:unavailable").run()
			want(t, r, OutcomeUnavailable, ExitUnavailable)
			f.wantRuns(0)
		})
	})
}

// slowRefusal is a store whose answers to an acquisition are late.
type slowRefusal struct {
	backends.Backend
	by time.Duration
}

func (s slowRefusal) Acquire(ctx context.Context, req backends.Request) (backends.Grant, error) {
	g, err := s.Backend.Acquire(ctx, req)
	time.Sleep(s.by)
	return g, err
}

// holdFor takes the lease for some other purpose.
func (f *fleet) holdFor(ttl time.Duration) {
	f.t.Helper()
	if _, err := f.server.Open().Acquire(f.t.Context(), backends.Request{Lease: "nightly", Holder: "other", Handle: "h", Slots: 1, TTL: ttl}); err != nil {
		f.t.Fatal(err)
	}
}

func TestAWaiterDoesNotWaitForTheHoldOfWhatIsApplied(t *testing.T) {
	assemble(t, func(f *fleet) {
		a, b := f.gate("a", ""), f.gate("b", "")
		a.spec.MinHold, a.job.lasts = time.Hour, 10*time.Second
		b.spec.Wait = 2 * time.Hour
		done := make(chan Result, 1)
		go func() { done <- a.run() }()
		time.Sleep(time.Second)
		r := b.run()
		want(t, r, OutcomeApplied, 0)
		if r.Waited > 12*time.Second {
			t.Errorf("waited %v, want until a was done after 9s", r.Waited)
		}
		want(t, <-done, OutcomeMigrated, 0)
	})
}

func TestACommandThatFailsLeavesNoMarker(t *testing.T) {
	assemble(t, func(f *fleet) {
		h := f.gate("a", "")
		h.job.code = 3
		r := h.run()
		want(t, r, OutcomeFailed, 3)
		if r.Reason != `failed: "nightly" is not applied: the command exited with 3` {
			t.Errorf("got %q, want what became of it", r.Reason)
		}
		f.wantMarker(false)
		h = f.gate("a", "")
		h.job = job{onStop: time.Millisecond}
		h.spec.MaxRun = time.Second
		want(t, h.run(), OutcomeMaxRun, ExitMaxRun)
		f.wantMarker(false)
		want(t, f.gate("b", "").run(), OutcomeMigrated, 0)
		f.wantMarker(true)
	})
}

// Who was asked to stop and exits with 0 may have finished, or given up in good order.
func TestACommandThatEndsInItsDrainIsNotRecorded(t *testing.T) {
	for name, applied := range map[string]bool{"marker": false, "check": true} {
		t.Run(name, func(t *testing.T) {
			assemble(t, func(f *fleet) {
				h := f.gate("a", "")
				hint := "it will run again unless the marker is set in mem: with: underlease marker set nightly"
				if applied {
					h.applied = func(context.Context) (bool, error) { return false, nil }
					hint = "the next start asks the check of --applied-if"
				}
				h.job = job{lasts: 5 * time.Second, onStop: -1}
				done := make(chan Result, 1)
				go func() { done <- h.run() }()
				time.Sleep(time.Second)
				h.signals <- syscall.SIGTERM
				r := <-done
				want(t, r, OutcomeUnrecorded, ExitLost)
				if r.Hint != hint || !strings.Contains(r.Reason, "after a signal to stop") {
					t.Errorf("got %q and the hint %q, want %q", r.Reason, r.Hint, hint)
				}
				f.wantMarker(false)
			})
		})
	}
}

// What the store does with the record, and what becomes of the run. The ttl is a minute.
func TestTheRecordOfASuccess(t *testing.T) {
	for _, c := range []struct {
		name, faults string
		outcome      Outcome
		code         int
		marker       bool
		from, to     time.Duration // that the lease was held
	}{
		{"lost answers", "fault=put:1-3:lose", OutcomeMigrated, 0, true, 0, 3 * time.Second},
		{"lost requests", "fault=put:1-3:reset-before", OutcomeMigrated, 0, true, 0, 3 * time.Second},
		{"late answers that are given up", "fault=put:1-2:delay!=5s", OutcomeMigrated, 0, true, 3 * time.Second, 12 * time.Second},
		{"a request that hangs", "fault=put:1:hang", OutcomeMigrated, 0, true, 3 * time.Second, 9 * time.Second},
		{"a lost answer, and then the lease is broken", "fault=put:1:lose&fault=put:2:break", OutcomeMigrated, 0, true, 0, 3 * time.Second},
		{"dead for writes", "fault=put:1%2B:unavailable", OutcomeUnrecorded, ExitLost, false, 59 * time.Second, 66 * time.Second},
		{"dead", "fault=put:1%2B:unavailable&fault=renew:1%2B:unavailable", OutcomeUnrecorded, ExitLost, false, 55 * time.Second, 66 * time.Second},
		{"dead, and the answers were lost", "fault=put:1%2B:lose&fault=get:3%2B:unavailable", OutcomeUnrecorded, ExitLost, true, 55 * time.Second, 66 * time.Second},
		{"denied", "fault=put:1%2B:denied", OutcomeUnrecorded, ExitLost, false, 0, time.Second},
		{"broken store", "fault=put:1%2B:broken", OutcomeUnrecorded, ExitLost, false, 0, time.Second},
		{"broken lease", "fault=put:1:break", OutcomeUnrecorded, ExitLost, false, 0, time.Second},
		{"deleted lease", "fault=put:1:wipe", OutcomeUnrecorded, ExitLost, false, 0, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			assemble(t, func(f *fleet) {
				defer f.server.Free()
				h := f.gate("a", c.faults)
				r := h.run()
				want(t, r, c.outcome, c.code)
				f.wantRuns(1)
				f.wantMarker(c.marker)
				if r.Held < c.from || r.Held > c.to {
					t.Errorf("held for %v, want %v to %v", r.Held, c.from, c.to)
				}
				if c.outcome == OutcomeUnrecorded && (r.Hint != "it will run again unless the marker is set in mem: with: underlease marker set nightly" || !strings.HasPrefix(r.Reason, `done, but not recorded: `)) {
					t.Errorf("got %q and the hint %q, want what has to be done", r.Reason, r.Hint)
				}
			})
		})
	}
}

// While the record cannot be written nobody else gets the lease, for a ttl and no longer.
func TestTheLeaseIsKeptWhileTheRecordIsRetried(t *testing.T) {
	assemble(t, func(f *fleet) {
		trace := filepath.Join(t.TempDir(), "trace")
		a := f.gate("a", "fault=put:1-20:unavailable&trace="+trace)
		a.job.lasts = 50 * time.Second // of the ttl of a minute
		done := make(chan Result, 1)
		go func() { done <- a.run() }()
		time.Sleep(65 * time.Second)
		b := f.gate("b", "")
		want(t, b.run(), OutcomeSkipped, ExitBusy)
		want(t, <-done, OutcomeMigrated, 0)
		f.wantRuns(1)
		data, err := os.ReadFile(trace)
		if _, after, ok := strings.Cut(string(data), "put 1 "); err != nil || !ok || strings.Count(after, "renew") < 4 {
			t.Errorf("got %v and the calls\n%s want two renewals after the first attempt to record", err, data)
		}
	})
}

func TestASignalEndsTheRetryOfTheRecord(t *testing.T) {
	assemble(t, func(f *fleet) {
		h := f.gate("a", "fault=put:1%2B:unavailable")
		done := make(chan Result, 1)
		go func() { done <- h.run() }()
		time.Sleep(10 * time.Second)
		h.signals <- syscall.SIGTERM
		r := <-done
		want(t, r, OutcomeUnrecorded, ExitLost)
		if r.Held > 12*time.Second {
			t.Errorf("held for %v after a signal at 10s", r.Held)
		}
	})
}

// Unknown is not unapplied.
func TestALookThatFailsRunsNothing(t *testing.T) {
	for _, c := range []struct {
		name, faults string
		outcome      Outcome
		code         int
	}{
		{"dead", "fault=get:1%2B:unavailable", OutcomeUnavailable, ExitUnavailable},
		{"hangs", "fault=get:1%2B:hang", OutcomeUnavailable, ExitUnavailable},
		{"denied", "fault=get:1%2B:denied", OutcomeDenied, ExitDenied},
		{"broken", "fault=get:1%2B:broken", OutcomeBroken, ExitBroken},
		{"dead inside", "fault=get:2%2B:unavailable", OutcomeUnavailable, ExitUnavailable},
		{"hangs inside", "fault=get:2%2B:hang", OutcomeUnavailable, ExitUnavailable},
		{"denied inside", "fault=get:2%2B:denied", OutcomeDenied, ExitDenied},
		{"no clock inside", "fault=inspect:1%2B:unavailable", OutcomeUnavailable, ExitUnavailable},
		{"lost inside", "fault=inspect:1-2:wipe", OutcomeUnavailable, ExitUnavailable},
	} {
		for kind, once := range map[string]Once{"gate": {Ever: true}, "once-per": {Per: time.Hour}, "min-interval": {Interval: time.Hour}} {
			t.Run(c.name+", "+kind, func(t *testing.T) {
				assemble(t, func(f *fleet) {
					defer f.server.Free()
					h := f.host("a", c.faults)
					h.spec.Once = once
					want(t, h.run(), c.outcome, c.code)
					f.wantRuns(0)
					f.server.Free()
					h = f.host("b", "")
					h.spec.Once, h.spec.Wait = once, 2*time.Minute
					if r := h.run(); !r.Started {
						t.Errorf("got %q (%s), want that the lease is free and nothing is recorded", r.Outcome, r.Reason)
					}
				})
			})
		}
	}
	t.Run("one answer is lost", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			want(t, f.gate("a", "fault=get:1:unavailable&fault=inspect:1:unavailable").run(), OutcomeMigrated, 0)
		})
	})
	t.Run("a record that cannot be read", func(t *testing.T) {
		for _, value := range []string{"", "applied", `{"version":2}`, `{"version":1,"term":"x"}`} {
			assemble(t, func(f *fleet) {
				if _, err := f.server.Open().Records().Put(t.Context(), "", "nightly", backends.Put{Key: markerKey, Value: []byte(value)}, nil); err != nil {
					t.Fatal(err)
				}
				want(t, f.gate("a", "").run(), OutcomeBroken, ExitBroken)
				f.wantRuns(0)
			})
		}
	})
}

func TestIfUnavailableHoldsForALookToo(t *testing.T) {
	assemble(t, func(f *fleet) {
		h := f.gate("a", "fault=get:1%2B:unavailable")
		h.spec.IfUnavailable = UnavailableSkip
		want(t, h.run(), OutcomeUnavailable, ExitBusy)
		f.wantRuns(0)
		h = f.host("b", "fault=any:1%2B:unavailable")
		h.spec.IfUnavailable, h.spec.Once.Per = UnavailableRun, time.Hour
		want(t, h.run(), OutcomeOK, 0)
		f.wantRuns(1)
		if len(h.said) != 1 {
			t.Errorf("said %q, want one line", h.said)
		}
	})
}

func TestTheCheckOfAGate(t *testing.T) {
	no := func(context.Context) (bool, error) { return false, nil }
	bad := &CheckError{Text: "the check exited with 2"}
	t.Run("1 runs the command, and no marker is written", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			h := f.gate("a", "")
			h.applied = no
			want(t, h.run(), OutcomeMigrated, 0)
			f.wantRuns(1)
			f.wantMarker(false)
		})
	})
	t.Run("0 runs nothing", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			h := f.gate("a", "fault=any:1%2B:unavailable")
			h.applied = appliedFrom(1)
			want(t, h.run(), OutcomeApplied, 0)
			f.wantRuns(0)
		})
	})
	t.Run("0 inside runs nothing", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			h := f.gate("a", "")
			h.applied = appliedFrom(2)
			want(t, h.run(), OutcomeApplied, 0)
			f.wantRuns(0)
		})
	})
	t.Run("0 after a refusal", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			f.holdFor(time.Minute)
			h := f.gate("a", "")
			h.applied = appliedFrom(2)
			want(t, h.run(), OutcomeApplied, 0)
			h.applied = no
			want(t, h.run(), OutcomeSkipped, ExitBusy)
			f.wantRuns(0)
		})
	})
	for n := 1; n <= 3; n++ {
		t.Run(fmt.Sprintf("no answer from call %d", n), func(t *testing.T) {
			assemble(t, func(f *fleet) {
				if n == 3 {
					f.holdFor(time.Minute)
				}
				h, calls := f.gate("a", ""), 0
				h.applied = func(context.Context) (bool, error) {
					if calls++; calls == min(n, 2) {
						return false, bad
					}
					return false, nil
				}
				r := h.run()
				want(t, r, OutcomeFailed, ExitUnavailable)
				if r.Started || r.Reason != `failed: whether "nightly" is applied is unknown: the check exited with 2` || calls != min(n, 2) {
					t.Errorf("got %q after %d calls, want what the check did, and no further call", r.Reason, calls)
				}
				f.wantRuns(0)
			})
		})
	}
	t.Run("one that takes two ttl is waited for, and the lease is kept", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			h, calls := f.gate("a", ""), 0
			h.applied = func(context.Context) (bool, error) {
				if calls++; calls == 2 {
					time.Sleep(2 * time.Minute)
				}
				return false, nil
			}
			done := make(chan Result, 1)
			go func() { done <- h.run() }()
			time.Sleep(100 * time.Second)
			want(t, f.gate("b", "").run(), OutcomeSkipped, ExitBusy)
			want(t, <-done, OutcomeMigrated, 0)
			f.wantRuns(1)
			if calls != 2 {
				t.Errorf("the check was asked %d times, want twice: the command was to start under the grant that was kept", calls)
			}
		})
	})
	t.Run("the lease is lost meanwhile", func(t *testing.T) {
		assemble(t, func(f *fleet) {
			h := f.gate("a", "fault=renew:1:wipe")
			h.applied = func(ctx context.Context) (bool, error) {
				t := time.NewTimer(30 * time.Second)
				defer t.Stop()
				select {
				case <-t.C:
				case <-ctx.Done():
				}
				return false, ctx.Err()
			}
			want(t, h.run(), OutcomeMigrated, 0) // by the second attempt, which every run has
			f.wantRuns(1)
		})
	})
	t.Run("a signal ends it", func(t *testing.T) {
		for n := 1; n <= 3; n++ {
			assemble(t, func(f *fleet) {
				if n == 3 {
					f.holdFor(time.Minute)
				}
				h, calls := f.gate("a", ""), 0
				h.applied = func(ctx context.Context) (bool, error) {
					if calls++; calls == min(n, 2) {
						<-ctx.Done()
						return false, ctx.Err()
					}
					return false, nil
				}
				done := make(chan Result, 1)
				go func() { done <- h.run() }()
				time.Sleep(time.Second)
				h.signals <- syscall.SIGTERM
				r := <-done
				want(t, r, OutcomeInterrupted, 143)
				if n == 2 && !r.Released {
					t.Error("the lease was not given back")
				}
				f.wantRuns(0)
			})
		}
	})
}

// appliedFrom is a check that says yes from its nth call on.
func appliedFrom(n int) func(context.Context) (bool, error) {
	calls := 0
	return func(context.Context) (bool, error) {
		calls++
		return calls >= n, nil
	}
}
