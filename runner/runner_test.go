package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/signals"
)

func want(t *testing.T, r Result, o Outcome, code int) {
	t.Helper()
	if r.Outcome != o || r.ExitCode != code {
		t.Errorf("got outcome %q with code %d (%s), want %q with %d", r.Outcome, r.ExitCode, r.Reason, o, code)
	}
}

func TestACommandThatEndsReleasesItsLease(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: 5 * time.Second, code: 3}
		r := s.run()
		want(t, r, OutcomeFailed, 3)
		if !r.Released || len(s.store.released) != 1 || s.store.released[0].Outcome != "failed" || s.store.released[0].ExitCode != 3 || s.store.released[0].Took != 5*time.Second {
			t.Errorf("released %v with %+v, want once, failed, 3, 5s", r.Released, s.store.released)
		}
	})
}

func TestADayOfHoldingStopsNobody(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: 24 * time.Hour}
		r := s.run()
		want(t, r, OutcomeOK, 0)
		if r.Renewals < 8640 || r.Renewals > 9700 {
			t.Errorf("got %d renewals in a day, want one each 9 to 10 seconds", r.Renewals)
		}
		if len(s.tree().stops) != 0 || s.tree().killed != 0 {
			t.Error("a healthy command was stopped")
		}
		gap := time.Duration(0)
		for i := 1; i < len(s.store.renewals); i++ {
			gap = max(gap, time.Duration(s.store.renewals[i]-s.store.renewals[i-1]))
		}
		if gap > 10*time.Second {
			t.Errorf("the longest time between two renewals was %v, want at most 10s", gap)
		}
	})
}

func TestADayOfHoldingAnEndlessLeaseOnlyLooks(t *testing.T) {
	play(t, 0, func(s *scene) {
		s.job = job{lasts: 24 * time.Hour}
		want(t, s.run(), OutcomeOK, 0)
		if n := len(s.store.renewals); n < 43200 || n > 48000 {
			t.Errorf("got %d looks in a day, want one each 1.8 to 2 seconds", n)
		}
		if d := s.tree().deadlines; d.StopAt != signals.Never || d.KillAt != signals.Never {
			t.Errorf("got deadlines %+v, want none", d)
		}
	})
}

// A backend that hangs for ever and ignores its context delays neither the stop nor the kill: Q01, Q09, C03.
func TestABackendThatHangsForEverDelaysNoKill(t *testing.T) {
	for _, ttl := range []time.Duration{2 * time.Second, 3 * time.Second, 60 * time.Second, 10 * time.Minute} {
		t.Run(ttl.String(), func(t *testing.T) {
			play(t, ttl, func(s *scene) {
				ctx, cancel := context.WithCancel(s.t.Context())
				defer cancel()
				s.job = job{onStop: -1, dies: 5 * time.Millisecond}
				s.store.renew = func(context.Context, int, backends.Grant) (backends.Grant, error) {
					<-ctx.Done()
					return backends.Grant{}, ctx.Err()
				}
				r := s.run()
				want(t, r, OutcomeLostUnreachable, ExitLost)
				validity := ttl - ttl/100 - 10*time.Millisecond
				killAt := validity - s.spec.Margin
				if got := s.killedAfter(); got > killAt || got < killAt-time.Millisecond {
					t.Errorf("killed %v after the start, want %v", got, killAt)
				}
				if stops := s.tree().stops; len(stops) != 1 || time.Duration(stops[0]-s.tree().begun) != killAt-s.spec.Grace {
					t.Errorf("stop signals at %v, want one, %v before the kill", stops, s.spec.Grace)
				}
				if len(s.store.released) != 0 {
					t.Errorf("released after the loss: %+v", s.store.released)
				}
			})
		})
	}
}

// One answer at 0.99 of its limit is taken, one beyond it is dropped; the deadline counts from the order: Q17, C05.
func TestALateAnswerDoesNotExtendTheDeadline(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: -1}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			time.Sleep(s.spec.CallLimit() + time.Millisecond) // answers although it was abandoned
			return g, nil
		}
		r := s.run()
		want(t, r, OutcomeLostUnreachable, ExitLost)
		if r.Renewals != 0 {
			t.Errorf("%d late answers counted", r.Renewals)
		}
		if got := s.killedAfter(); got > 60*time.Second-s.spec.Margin {
			t.Errorf("killed %v after the grant was asked for: too late", got)
		}
	})
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: 10 * time.Minute}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			time.Sleep(s.spec.CallLimit() * 99 / 100)
			return g, nil
		}
		want(t, s.run(), OutcomeOK, 0)
	})
}

func TestTheDeadlineCountsFromBeforeTheRequest(t *testing.T) {
	play(t, 10*time.Second, func(s *scene) {
		s.job = job{onStop: -1}
		delay := 700 * time.Millisecond
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			if n > 1 {
				return backends.Grant{}, backends.Unavailable(nil, "down")
			}
			time.Sleep(min(delay, s.spec.CallLimit()*9/10))
			return g, nil
		}
		r := s.run()
		want(t, r, OutcomeLostUnreachable, ExitLost)
		sent := s.store.renewals[0]
		if got, most := s.tree().killed, sent+int64(10*time.Second); got > most-int64(s.spec.Margin) {
			t.Errorf("killed %v after the renewal was ordered, want at most ttl less margin", time.Duration(got-sent))
		}
	})
}

func TestABlipShorterThanTheBudgetStopsNobody(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: 10 * time.Minute}
		var from signals.Instant
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			if n == 1 {
				from = s.clock.now()
				return g, nil
			}
			if time.Duration(s.clock.now()-from) < 39*time.Second {
				return backends.Grant{}, backends.Unavailable(nil, "down")
			}
			return g, nil
		}
		want(t, s.run(), OutcomeOK, 0)
		if len(s.tree().stops) > 0 {
			t.Error("a blip of 39s stopped a command with a ttl of 60s")
		}
	})
}

// A confirmed loss kills at once, also where the command would return 0: C01, C10.
func TestAConfirmedLossKillsAtOnce(t *testing.T) {
	for _, ttl := range []time.Duration{0, 60 * time.Second} {
		play(t, ttl, func(s *scene) {
			s.job = job{lasts: time.Hour, onStop: -1}
			s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
				if n < 3 {
					return g, nil
				}
				return backends.Grant{}, backends.Lost(nil, "the row is gone")
			}
			r := s.run()
			want(t, r, OutcomeLostTaken, ExitLost)
			if s.tree().killed != s.store.renewals[2] {
				t.Errorf("killed at %d, want at once, at %d", s.tree().killed, s.store.renewals[2])
			}
			if len(s.store.released) != 0 || len(s.store.renewals) != 3 {
				t.Errorf("%d releases and %d renewals, want none after the loss", len(s.store.released), len(s.store.renewals))
			}
			if !strings.Contains(r.Reason, "the row is gone") {
				t.Errorf("reason %q does not say how it was noticed", r.Reason)
			}
		})
	}
}

func TestOnLostTermGivesTheGrace(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.spec.OnLost = LostTerm
		s.job = job{lasts: time.Hour, onStop: time.Second}
		s.store.renew = func(context.Context, int, backends.Grant) (backends.Grant, error) {
			return backends.Grant{}, backends.Lost(nil, "gone")
		}
		want(t, s.run(), OutcomeLostTaken, ExitLost)
		if s.tree().killed != 0 || len(s.tree().stops) != 1 {
			t.Errorf("killed at %d after %d stop signals, want the stop signal alone", s.tree().killed, len(s.tree().stops))
		}
	})
}

// The first thing after a suspend is the check: Q13's arithmetic.
func TestAfterASuspendBeyondTheDeadlineTheTreeIsKilledAtOnce(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: time.Hour, onStop: -1}
		done := s.begin()
		time.Sleep(35 * time.Second)
		before := s.clock.now()
		renewed := len(s.store.renewals)
		s.clock.jump(2 * time.Minute)
		r := <-done
		want(t, r, OutcomeLostExpired, ExitLost)
		if got := time.Duration(s.tree().killed - before); got != 2*time.Minute {
			t.Errorf("killed %v after the suspend began, want at once after it", got)
		}
		if len(s.store.renewals) > renewed+1 {
			t.Error("renewed after the deadline had passed")
		}
	})
}

func TestAShortSuspendOnlyRenews(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: 3 * time.Minute}
		done := s.begin()
		time.Sleep(35 * time.Second)
		s.clock.jump(25 * time.Second)
		want(t, <-done, OutcomeOK, 0)
	})
}

func TestASuspendDoesNotCostAnEndlessLease(t *testing.T) {
	play(t, 0, func(s *scene) {
		s.job = job{lasts: 3 * time.Minute}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			if n == 3 {
				s.clock.jump(time.Hour) // while the look is under way
			}
			return g, nil
		}
		want(t, s.run(), OutcomeOK, 0)
	})
}

func TestAFailedLookAtAnEndlessStoreIsALoss(t *testing.T) {
	play(t, 0, func(s *scene) {
		s.job = job{lasts: time.Hour, onStop: -1}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			return backends.Grant{}, backends.Unavailable(syscall.EIO, "cannot read the record")
		}
		r := s.run()
		want(t, r, OutcomeLostUnreachable, ExitLost)
		if got := s.killedAfter(); got > 2*time.Second {
			t.Errorf("killed after %v, want at the first look", got)
		}
	})
}

// A renewal that succeeds after the stop does not take the stop back: the command is stopped, and the lease given back.
func TestARenewalAfterTheStopDoesNotTakeItBack(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: time.Hour, onStop: 5 * time.Second}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			if len(s.tree().stops) == 0 {
				return backends.Grant{}, backends.Unavailable(nil, "down")
			}
			return g, nil
		}
		r := s.run()
		want(t, r, OutcomeLostUnreachable, ExitLost)
		if s.tree().killed != 0 || !r.Released {
			t.Errorf("killed at %d, released %v: want the stop signal alone, and a release", s.tree().killed, r.Released)
		}
	})
}

// C21: a signal from outside is forwarded, starts no timer but the drain, and the lease is renewed meanwhile.
func TestASignalFromOutsideIsForwardedAndTheLeaseKept(t *testing.T) {
	play(t, 3*time.Second, func(s *scene) {
		s.job = job{onStop: 10 * time.Minute}
		done := s.begin()
		time.Sleep(time.Second)
		s.signals <- syscall.SIGTERM
		r := <-done
		want(t, r, OutcomeStopped, 128+15)
		if !slices.Equal(s.tree().forwarded, []syscall.Signal{syscall.SIGTERM}) || len(s.tree().stops) != 0 || s.tree().killed != 0 {
			t.Errorf("forwarded %v, %d stops, killed %d: want TERM alone", s.tree().forwarded, len(s.tree().stops), s.tree().killed)
		}
		if r.Signal != syscall.SIGTERM || !r.Released {
			t.Errorf("signal %v, released %v", r.Signal, r.Released)
		}
	})
}

func TestTheDrainEndsWithAKillAndTheCommandsOwnStatus(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Drain = 30 * time.Second
		s.job = job{onStop: -1}
		done := s.begin()
		s.signals <- syscall.SIGUSR1 // asks for nothing to end
		time.Sleep(time.Minute)
		s.signals <- syscall.SIGTERM
		synctest.Wait()
		asked := s.clock.now()
		r := <-done
		want(t, r, OutcomeDrainedOut, 137)
		if got := time.Duration(s.tree().killed - asked); got != 30*time.Second {
			t.Errorf("killed %v after the signal, want 30s", got)
		}
		if !r.Released {
			t.Error("not released")
		}
	})
}

func TestMaxRunStopsWithTheGraceAnd124(t *testing.T) {
	for _, ttl := range []time.Duration{0, 60 * time.Second} {
		play(t, ttl, func(s *scene) {
			s.spec.MaxRun, s.spec.Grace = time.Second, 500*time.Millisecond
			s.job = job{onStop: -1}
			r := s.run()
			want(t, r, OutcomeMaxRun, ExitMaxRun)
			if got := s.killedAfter(); got != 1500*time.Millisecond || !r.Released {
				t.Errorf("killed after %v and released %v, want 1.5s and true", got, r.Released)
			}
		})
	}
}

// C07, Q12: an answer to acquire that took too much of the ttl starts nothing, is given back, and is tried again.
func TestAGrantThatComesTooLateStartsNothing(t *testing.T) {
	play(t, 3*time.Second, func(s *scene) {
		s.spec.Grace, s.spec.Margin = 500*time.Millisecond, 300*time.Millisecond
		s.job = job{lasts: time.Second}
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			g := grantOf(req)
			if n == 1 {
				s.clock.jump(2800 * time.Millisecond) // the waiter was paused: C11
			}
			return g, nil
		}
		r := s.run()
		want(t, r, OutcomeOK, 0)
		if len(s.store.acquires) != 2 || len(s.store.released) != 2 || s.store.released[0].Outcome != backends.OutcomeNotStarted {
			t.Errorf("%d attempts, releases %+v: want a second attempt after a release", len(s.store.acquires), s.store.released)
		}
		if s.store.gaveBack[0].Handle == s.store.gaveBack[1].Handle {
			t.Error("two acquisitions with one handle")
		}
	})
	play(t, 3*time.Second, func(s *scene) {
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			s.clock.jump(2800 * time.Millisecond)
			return grantOf(req), nil
		}
		r := s.run()
		want(t, r, OutcomeNotStarted, ExitUnavailable)
		if r.Started || len(s.store.acquires) != 2 {
			t.Errorf("started %v after %d attempts, want none after two", r.Started, len(s.store.acquires))
		}
	})
}

func TestAStartThatTheGuardianRefusesIsTriedOnceMore(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.late, s.job = 1, job{lasts: time.Second}
		want(t, s.run(), OutcomeOK, 0)
		if len(s.trees) != 2 || !s.trees[0].closed {
			t.Fatalf("%d trees, want two and the first one closed", len(s.trees))
		}
		if gone := s.trees[0].gone; gone == 0 || gone > s.store.acquires[1] {
			t.Errorf("the second attempt came at %d, the first guardian ended at %d: it may hold the lock", s.store.acquires[1], gone)
		}
	})
}

// C08: the child never starts on an unknown outcome; the handle settles it.
func TestALostAnswerToAcquireIsSettledByTheHandle(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: time.Second}
		var handles []string
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			handles = append(handles, req.Handle)
			if n == 1 {
				return backends.Grant{}, backends.Unavailable(syscall.ECONNRESET, "connection lost")
			}
			return grantOf(req), nil
		}
		want(t, s.run(), OutcomeOK, 0)
		if len(handles) != 2 || handles[0] != handles[1] {
			t.Errorf("handles %v, want the same one twice", len(handles))
		}
	})
	play(t, 60*time.Second, func(s *scene) {
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			return backends.Grant{}, backends.Unavailable(syscall.ECONNRESET, "connection lost")
		}
		r := s.run()
		want(t, r, OutcomeUnavailable, ExitUnavailable)
		if len(s.store.acquires) != 2 || len(s.store.gaveBack) != 1 || s.store.gaveBack[0].Term != 0 || s.store.gaveBack[0].Handle == "" {
			t.Errorf("%d attempts, given back %d: want two, and one abandoned by its handle", len(s.store.acquires), len(s.store.gaveBack))
		}
		if r.Started || len(s.trees) != 0 {
			t.Error("something was started")
		}
	})
}

func TestAnAcquireThatHangsIsLeftBehind(t *testing.T) {
	for _, wait := range []time.Duration{0, time.Second, 20 * time.Second} {
		t.Run(wait.String(), func(t *testing.T) {
			play(t, 60*time.Second, func(s *scene) {
				ctx, cancel := context.WithCancel(s.t.Context())
				defer cancel()
				s.spec.Wait = wait
				s.store.acquire = func(context.Context, int, backends.Request) (backends.Grant, error) {
					<-ctx.Done()
					return backends.Grant{}, ctx.Err()
				}
				begun := s.clock.now()
				r := s.run()
				want(t, r, OutcomeUnavailable, ExitUnavailable)
				took := time.Duration(s.clock.now() - begun)
				most := wait + time.Second
				if wait == 0 {
					most = 11 * time.Second // two attempts of 5s
				}
				if took > most || !strings.Contains(r.Reason, "fake:") {
					t.Errorf("gave up after %v with %q: want at most %v and the address", took, r.Reason, most)
				}
			})
		})
	}
}

// C42, C43: busy is busy, and no answer is no answer, whichever came last.
func TestWaitEndsAsBusyOrUnavailableByTheLastAnswer(t *testing.T) {
	busy := func(s *scene) error {
		return &backends.BusyError{Lease: "nightly", Holder: "other", Left: 40 * time.Second}
	}
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = 2 * time.Second
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			return backends.Grant{}, busy(s)
		}
		begun := s.clock.now()
		r := s.run()
		want(t, r, OutcomeBusy, ExitBusy)
		if took := time.Duration(s.clock.now() - begun); took < 2*time.Second || took > 2300*time.Millisecond {
			t.Errorf("waited %v, want 2.0 to 2.3s", took)
		}
		if n := len(s.store.acquires); n > 8 {
			t.Errorf("%d polls in 2s, want at most 8", n)
		}
		if len(s.store.released) != 0 {
			t.Error("a busy lease was abandoned: nothing was there to give back")
		}
	})
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = 5 * time.Second
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			if n < 3 {
				return backends.Grant{}, busy(s)
			}
			return backends.Grant{}, backends.Unavailable(nil, "down")
		}
		want(t, s.run(), OutcomeUnavailable, ExitUnavailable)
	})
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = 5 * time.Second
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			if n < 3 {
				return backends.Grant{}, backends.Unavailable(nil, "down")
			}
			return backends.Grant{}, busy(s)
		}
		want(t, s.run(), OutcomeBusy, ExitBusy)
	})
	play(t, 60*time.Second, func(s *scene) {
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			return backends.Grant{}, busy(s)
		}
		r := s.run()
		want(t, r, OutcomeBusy, ExitBusy)
		if len(s.store.acquires) != 1 || r.Busy == nil || r.Busy.Holder != "other" {
			t.Errorf("%d attempts, busy %+v", len(s.store.acquires), r.Busy)
		}
	})
}

func TestDeniedAndBrokenAreNotTriedAgain(t *testing.T) {
	for _, c := range []struct {
		err  error
		o    Outcome
		code int
	}{
		{backends.Denied(syscall.EACCES, "/x"), OutcomeDenied, ExitDenied},
		{backends.Broken(nil, "/x"), OutcomeBroken, ExitBroken},
		{backends.Configf("", "no such database"), OutcomeInvalid, ExitSettings},
	} {
		play(t, 60*time.Second, func(s *scene) {
			s.spec.Wait, s.spec.IfUnavailable = Forever, UnavailableRun
			s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
				return backends.Grant{}, backends.WithHint(c.err, "do something")
			}
			r := s.run()
			want(t, r, c.o, c.code)
			if len(s.store.acquires) != 1 || r.Hint != "do something" {
				t.Errorf("%d attempts, hint %q", len(s.store.acquires), r.Hint)
			}
		})
	}
}

func TestIfUnavailable(t *testing.T) {
	down := func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
		return backends.Grant{}, backends.Unavailable(nil, "down")
	}
	play(t, 60*time.Second, func(s *scene) {
		s.spec.IfUnavailable, s.store.acquire = UnavailableSkip, down
		want(t, s.run(), OutcomeUnavailable, ExitBusy)
	})
	play(t, 60*time.Second, func(s *scene) {
		s.spec.IfUnavailable, s.store.acquire = UnavailableRun, down
		s.spec.Env = []string{"UNDERLEASE_TERM=5", "A=b"}
		s.job = job{lasts: time.Hour, code: 4}
		r := s.run()
		want(t, r, OutcomeFailed, 4)
		if len(s.store.renewals) != 0 || len(s.said) != 1 {
			t.Errorf("%d renewals, said %q: want none, and one line", len(s.store.renewals), s.said)
		}
		for _, e := range s.tree().command.Env {
			if strings.HasPrefix(e, "UNDERLEASE_TERM=") || strings.HasPrefix(e, "UNDERLEASE_HELD=") {
				t.Errorf("a run without a lease was told %s", e)
			}
		}
	})
	play(t, 60*time.Second, func(s *scene) {
		s.spec.IfUnavailable = UnavailableRun
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			return backends.Grant{}, &backends.BusyError{Lease: "nightly", Holder: "other"}
		}
		want(t, s.run(), OutcomeBusy, ExitBusy)
	})
}

func TestASignalEndsAWait(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = Forever
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			return backends.Grant{}, &backends.BusyError{Lease: "nightly", Holder: "other"}
		}
		done := s.begin()
		s.signals <- syscall.SIGWINCH
		time.Sleep(time.Minute)
		s.signals <- syscall.SIGTERM
		r := <-done
		want(t, r, OutcomeInterrupted, 143)
		if r.Signal != syscall.SIGTERM || r.Started {
			t.Errorf("signal %v, started %v", r.Signal, r.Started)
		}
	})
}

func TestANotificationSavesThePoll(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = Forever
		s.job = job{lasts: time.Second}
		free := make(chan struct{})
		s.waiter = func(ctx context.Context) error {
			select {
			case <-free:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		var open atomic.Bool
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			if !open.Load() {
				return backends.Grant{}, &backends.BusyError{Lease: "nightly", Holder: "other", Left: backends.Forever}
			}
			return grantOf(req), nil
		}
		done := s.begin()
		time.Sleep(10*time.Second + 123*time.Millisecond)
		freed := s.clock.now()
		open.Store(true)
		close(free)
		r := <-done
		want(t, r, OutcomeOK, 0)
		if late := time.Duration(s.tree().begun - freed); late > 2*time.Millisecond {
			t.Errorf("started %v after the lease was free", late)
		}
	})
}

// Whose time to wait is over gives up its place; who did not wait has none, and who was granted the lease has left.
func TestWhoWaitsNoLongerLeaves(t *testing.T) {
	for wait, want := range map[time.Duration]int{0: 0, time.Minute: 1} {
		play(t, 60*time.Second, func(s *scene) {
			s.spec.Wait = wait
			s.waiter = func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			}
			handle := ""
			s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
				handle = req.Handle
				return backends.Grant{}, &backends.BusyError{Lease: "nightly", Holder: "other", Left: backends.Forever}
			}
			got := s.run()
			if got.Outcome != OutcomeBusy {
				t.Errorf("got %v, want busy", got.Outcome)
			}
			if left := s.store.left; len(left) != want || want > 0 && left[0] != handle {
				t.Errorf("--wait %v: got %d places given up, want %d, of its own handle", wait, len(left), want)
			}
		})
	}
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = time.Minute
		s.job = job{lasts: time.Second}
		s.waiter = func(context.Context) error { return nil }
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			if n < 3 {
				return backends.Grant{}, &backends.BusyError{Lease: "nightly", Holder: "other", Left: backends.Forever}
			}
			return grantOf(req), nil
		}
		want(t, s.run(), OutcomeOK, 0)
		if got := s.store.left; len(got) != 0 {
			t.Errorf("got %d places given up after a grant, want none", len(got))
		}
	})
}

func TestAHintThatFailsDoesNotSpin(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Wait = time.Minute
		s.waiter = func(context.Context) error { return backends.Unavailable(nil, "down") }
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			return backends.Grant{}, &backends.BusyError{Lease: "nightly", Holder: "other", Left: backends.Forever}
		}
		want(t, s.run(), OutcomeBusy, ExitBusy)
		if n := len(s.store.acquires); n > 90 {
			t.Errorf("%d attempts in a minute", n)
		}
	})
}

func TestAnAskDrainsTheCommand(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: 20 * time.Second}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			if n >= 3 {
				g.Ask = &backends.Ask{Kind: backends.AskStop, By: "operator", Reason: "upgrade"}
			}
			return g, nil
		}
		r := s.run()
		want(t, r, OutcomeStopped, 143)
		if !slices.Equal(s.tree().forwarded, []syscall.Signal{syscall.SIGTERM}) || !r.Released {
			t.Errorf("forwarded %v, released %v", s.tree().forwarded, r.Released)
		}
	})
}

func TestTheMarginGrowsWithTheTree(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{children: 3999, onStop: -1}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			if n > 2 {
				return backends.Grant{}, backends.Unavailable(nil, "down")
			}
			return g, nil
		}
		want(t, s.run(), OutcomeLostUnreachable, ExitLost)
		validUntil := s.store.renewals[1] + int64(60*time.Second-600*time.Millisecond-10*time.Millisecond)
		if got := time.Duration(validUntil - s.tree().killed); got < 1200*time.Millisecond {
			t.Errorf("killed %v before valid until, want 0.3 ms for each of 4000 processes", got)
		}
	})
}

func TestAReleaseThatFailsIsTriedAgainAndSaidOnce(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: time.Second}
		s.store.release = func(ctx context.Context, n int, g backends.Grant, end backends.End) error {
			if n < 3 {
				return backends.Unavailable(nil, "down")
			}
			return nil
		}
		if r := s.run(); !r.Released || len(s.said) != 0 {
			t.Errorf("released %v, said %q", r.Released, s.said)
		}
	})
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{lasts: time.Second, code: 9}
		s.store.release = func(ctx context.Context, n int, g backends.Grant, end backends.End) error {
			return backends.Unavailable(nil, "down")
		}
		r := s.run()
		want(t, r, OutcomeFailed, 9)
		if r.Released || len(s.said) != 1 || len(s.store.released) != 3 {
			t.Errorf("released %v, said %q after %d attempts", r.Released, s.said, len(s.store.released))
		}
	})
}

func TestTheGuardiansOwnDeedsCountWhenTheWrapperWasStopped(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: -1}
		done := s.begin()
		time.Sleep(5 * time.Second)
		// The wrapper is stopped: the guardian stops and kills at its own instants, and the wrapper learns it later.
		tr := s.tree()
		at := tr.deadlines
		tr.mu.Lock()
		tr.over = true
		tr.mu.Unlock()
		s.clock.jump(10 * time.Minute)
		tr.events <- signals.Event{Kind: signals.Stopping, Why: signals.WhyLease, At: at.StopAt}
		tr.events <- signals.Event{Kind: signals.Killing, Why: signals.WhyLease, At: at.KillAt}
		tr.events <- signals.Event{Kind: signals.Exited, At: at.KillAt + 1, Status: signals.Status{Code: 137, Signal: syscall.SIGKILL}}
		tr.events <- signals.Event{Kind: signals.Gone, At: at.KillAt + 2}
		close(tr.events)
		r := <-done
		want(t, r, OutcomeLostExpired, ExitLost)
		if len(s.store.released) != 0 {
			t.Error("released after the loss")
		}
	})
}

// A command that ended in time is not called lost because the wrapper looked late.
func TestACommandThatEndedInTimeWhileTheWrapperWasStoppedIsNotLost(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: -1}
		done := s.begin()
		time.Sleep(5 * time.Second)
		tr, ended := s.tree(), s.clock.now()
		tr.mu.Lock()
		tr.over = true
		tr.mu.Unlock()
		tr.events <- signals.Event{Kind: signals.Exited, At: ended, Status: signals.Status{}}
		tr.events <- signals.Event{Kind: signals.Gone, At: ended}
		close(tr.events)
		s.clock.jump(10 * time.Minute)
		want(t, <-done, OutcomeOK, 0)
	})
}

func TestALostGuardianIs74AndReleasesAfterTheTreeIsGone(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: -1, dies: 20 * time.Millisecond}
		done := s.begin()
		s.tree().events <- signals.Event{Kind: signals.GuardianLost, At: s.clock.now()}
		r := <-done
		want(t, r, OutcomeGuardianLost, ExitLost)
		if !r.Released || s.tree().gone == 0 {
			t.Errorf("released %v, gone %d", r.Released, s.tree().gone)
		}
	})
}

func TestARunInsideItselfIsRefused(t *testing.T) {
	held := backends.State{Slots: []backends.SlotState{{Slot: 0, Term: 7, Held: true, Holder: "us"}, {Slot: 1}}}
	chain := "UNDERLEASE_HELD=" + link("other", "", "nightly") + ":9 " + link("fake", "", "nightly") + ":7"
	play(t, 60*time.Second, func(s *scene) {
		s.spec.Env, s.spec.Slots, s.spec.Wait = []string{chain}, 2, Forever
		s.store.inspect = func() (backends.State, error) { return held, nil }
		r := s.run()
		want(t, r, OutcomeNested, ExitSettings)
		if len(s.store.acquires) != 0 || len(s.trees) != 0 || r.Hint == "" {
			t.Errorf("%d attempts, %d trees, hint %q", len(s.store.acquires), len(s.trees), r.Hint)
		}
	})
	// The entry is stale when the store shows another term, or none.
	for _, st := range []backends.State{{}, {Slots: []backends.SlotState{{Term: 7}}}, {Slots: []backends.SlotState{{Term: 8, Held: true}}}} {
		play(t, 60*time.Second, func(s *scene) {
			s.spec.Env, s.job = []string{chain}, job{lasts: time.Second}
			s.store.inspect = func() (backends.State, error) { return st, nil }
			want(t, s.run(), OutcomeOK, 0)
		})
	}
}

func TestWhatTheCommandLearns(t *testing.T) {
	g := backends.Grant{Namespace: "prod", Lease: "nightly", Holder: "db1", Term: 42, Slot: 2, Previous: backends.End{Outcome: "max-run"}}
	in := []string{"PATH=/bin", "UNDERLEASE_TERM=1", "odd", "UNDERLEASE_SOCKET=x", "UNDERLEASE_TTL=5s", "UNDERLEASE_REPORT=/r", "PATH=/usr/bin", "UNDERLEASE_HELD=aa:1"}
	got := environ(in, g, "id", "@s")
	wanted := []string{
		"PATH=/bin", "odd", "UNDERLEASE_TTL=5s", "PATH=/usr/bin",
		"UNDERLEASE_NAME=nightly", "UNDERLEASE_HELD_BY=db1", "UNDERLEASE_TERM=42", "UNDERLEASE_SLOT=2",
		"UNDERLEASE_RUN_ID=prod/nightly/42", "UNDERLEASE_PREVIOUS=failed", "UNDERLEASE_SOCKET=@s",
		"UNDERLEASE_HELD=aa:1 " + link("id", "prod", "nightly") + ":42",
	}
	if !slices.Equal(got, wanted) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(wanted, "\n"))
	}
	for outcome, word := range map[string]string{"none": "none", "ok": "ok", "unknown": "unknown", "": "unknown", "failed": "failed", "lost-taken": "failed"} {
		if got := Previous(backends.End{Outcome: outcome}); got != word {
			t.Errorf("after %q the command learns %q, want %q", outcome, got, word)
		}
	}
}

// It could be had when the settings were read, and was gone when the lease had been waited for.
func TestAnIsolationThatCannotBeHadAtTheStartGivesTheLeaseBack(t *testing.T) {
	play(t, 10*time.Second, func(s *scene) {
		s.spec.Isolate = signals.IsolateCgroup
		s.job = job{cannot: errors.New("/sys/fs/cgroup is mounted read-only")}
		r := s.run()
		want(t, r, OutcomeNotStarted, ExitSettings)
		if text := "--isolate cgroup: /sys/fs/cgroup is mounted read-only"; r.Reason != text || r.Started || !r.Released {
			t.Errorf("got %q, started %v, released %v, want %q, a release and no start", r.Reason, r.Started, r.Released, text)
		}
		if len(s.store.released) != 1 || s.store.released[0].Outcome != backends.OutcomeNotStarted {
			t.Errorf("releases %+v, want one that says that nothing was started", s.store.released)
		}
	})
	play(t, 10*time.Second, func(s *scene) {
		s.spec.Isolate = signals.IsolatePidns
		s.job = job{lasts: time.Second}
		want(t, s.run(), OutcomeOK, 0)
		if got := s.tree().command.Isolate; got != signals.IsolatePidns {
			t.Errorf("the tree was asked for %q", got)
		}
	})
}

func TestSettleRefusesWhatCannotWork(t *testing.T) {
	base := Spec{TTL: 60 * time.Second, Grace: Auto, Margin: Auto, RenewEvery: Auto, ClockDrift: 0.01}
	for _, c := range []struct {
		name string
		with func(*Spec)
		says string // empty: accepted
	}{
		{"defaults", func(*Spec) {}, ""},
		{"the shortest ttl", func(s *Spec) { s.TTL = 2 * time.Second }, ""},
		{"the ttl of the cases", func(s *Spec) { s.TTL, s.Grace, s.Margin = 3*time.Second, 500*time.Millisecond, 300*time.Millisecond }, ""},
		{"grace longer than ttl", func(s *Spec) { s.TTL, s.Grace = 30*time.Second, 40*time.Second }, "--grace 40s"},
		{"margin more than a quarter", func(s *Spec) { s.Margin = 16 * time.Second }, "--margin 16s"},
		{"renewals too rare", func(s *Spec) { s.RenewEvery = 50 * time.Second }, "--renew-every 50s"},
		{"drift that takes all", func(s *Spec) { s.ClockDrift, s.Grace = 0.5, 35*time.Second }, "--ttl"},
		{"too short", func(s *Spec) { s.TTL = time.Second }, "--ttl 1s"},
		{"a namespace that outlives its run", func(s *Spec) { s.Isolate, s.Leftovers = signals.IsolatePidns, signals.LeftoversIgnore }, "--isolate pidns"},
		{"a namespace that is waited for", func(s *Spec) { s.Isolate, s.Leftovers = signals.IsolatePidns, signals.LeftoversWait }, ""},
		{"a control group that is let go", func(s *Spec) { s.Isolate, s.Leftovers = signals.IsolateCgroup, signals.LeftoversIgnore }, ""},
		{"none on a store that needs one", func(s *Spec) { s.TTL = 0 }, "--ttl none"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := base
			c.with(&s)
			err := s.Settle(false)
			var relation *RelationError
			switch {
			case c.says == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.says != "" && !errors.As(err, &relation):
				t.Errorf("got %v, want a relation error that names %s", err, c.says)
			case c.says != "" && !strings.Contains(err.Error(), c.says):
				t.Errorf("got %q, want it to name %s", err, c.says)
			}
			if err == nil {
				again := s
				if err := again.Settle(false); err != nil || fmt.Sprint(again) != fmt.Sprint(s) {
					t.Errorf("settling twice changes it: %+v and %+v (%v)", s, again, err)
				}
			}
		})
	}
	s := base
	s.TTL = 0
	if err := s.Settle(true); err != nil || s.Grace != 10*time.Second || s.RenewEvery != 2*time.Second {
		t.Errorf("endless: %v, grace %v, look every %v", err, s.Grace, s.RenewEvery)
	}
}

// A guardian that is lost in the start may have started the command: the lease is given back when its tree is gone, and
// the hold counts.
func TestAGuardianLostInTheStartCountsAsARun(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.unsure, s.job = true, job{onStop: -1, dies: 500 * time.Millisecond}
		r := s.run()
		want(t, r, OutcomeGuardianLost, ExitLost)
		if !r.Started || !r.Released || len(s.store.released) != 1 || s.store.released[0].Outcome != string(OutcomeGuardianLost) {
			t.Errorf("started %v, released %v with %+v", r.Started, r.Released, s.store.released)
		}
		if s.tree().killed == 0 || s.tree().gone == 0 {
			t.Error("released before the tree was gone")
		}
	})
}

func TestAnAskIsHeededOnceAndStopsTheHints(t *testing.T) {
	play(t, 0, func(s *scene) {
		s.job = job{onStop: time.Minute}
		hints := 0
		s.watcher = func(ctx context.Context, g backends.Grant) error {
			if g.Ask != nil {
				<-ctx.Done()
				return ctx.Err()
			}
			hints++
			return nil
		}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			g.Ask = &backends.Ask{Kind: backends.AskStop, By: "operator"}
			return g, nil
		}
		want(t, s.run(), OutcomeStopped, 143)
		if len(s.tree().forwarded) != 1 || len(s.store.renewals) > 40 || hints > 3 {
			t.Errorf("forwarded %v, %d looks and %d hints in a minute", s.tree().forwarded, len(s.store.renewals), hints)
		}
	})
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: time.Second}
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			g := grantOf(req)
			g.Ask = &backends.Ask{Kind: backends.AskStop}
			return g, nil
		}
		want(t, s.run(), OutcomeStopped, 143)
	})
}

// A panic beside the decision ends the tree before it ends us.
func TestAPanicBesideTheDecisionKillsTheTreeFirst(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{onStop: -1, dies: 50 * time.Millisecond}
		s.store.renew = func(context.Context, int, backends.Grant) (backends.Grant, error) { panic("a fault of the library") }
		defer func() {
			bug, ok := recover().(*Bug)
			if !ok || bug.Error() != "a fault of the library" || !strings.Contains(string(bug.Stack), "runner_test.go") {
				t.Errorf("got %v, want the library's panic with its stack", bug)
			}
			if s.tree().gone == 0 {
				t.Error("the tree was left alive")
			}
		}()
		s.run()
	})
	play(t, 60*time.Second, func(s *scene) {
		s.store.acquire = func(context.Context, int, backends.Request) (backends.Grant, error) { panic("at acquire") }
		defer func() {
			if bug, ok := recover().(*Bug); !ok || bug.Error() != "at acquire" {
				t.Errorf("got %v", bug)
			}
		}()
		s.run()
	})
}

func TestALookBeforeTheRunNeitherHangsNorIgnoresSignals(t *testing.T) {
	hanging := func(s *scene) {
		ctx, cancel := context.WithCancel(s.t.Context())
		time.AfterFunc(time.Hour, cancel)
		s.spec.Env = []string{"UNDERLEASE_HELD=" + link("fake", "", "nightly") + ":7"}
		s.store.inspect = func() (backends.State, error) {
			<-ctx.Done()
			return backends.State{}, ctx.Err()
		}
		s.job = job{lasts: time.Second}
	}
	play(t, 60*time.Second, func(s *scene) {
		hanging(s)
		want(t, s.run(), OutcomeOK, 0)
		time.Sleep(time.Hour)
	})
	play(t, 60*time.Second, func(s *scene) {
		hanging(s)
		done := s.begin()
		s.signals <- syscall.SIGINT
		want(t, <-done, OutcomeInterrupted, 130)
		time.Sleep(time.Hour)
	})
}

func TestADeniedAnswerAfterALostOneStillAbandons(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.store.acquire = func(ctx context.Context, n int, req backends.Request) (backends.Grant, error) {
			if n == 1 {
				return backends.Grant{}, backends.Unavailable(nil, "down")
			}
			return backends.Grant{}, backends.Denied(nil, "no")
		}
		want(t, s.run(), OutcomeDenied, ExitDenied)
		if len(s.store.gaveBack) != 1 {
			t.Errorf("abandoned %d times, want once", len(s.store.gaveBack))
		}
	})
}

// The margin grows while the store is away, which is when it matters.
func TestTheMarginGrowsWithoutAnAnswer(t *testing.T) {
	play(t, 60*time.Second, func(s *scene) {
		s.job = job{children: 3999, onStop: -1}
		s.store.renew = func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error) {
			return backends.Grant{}, backends.Unavailable(nil, "down")
		}
		want(t, s.run(), OutcomeLostUnreachable, ExitLost)
		if got := s.killedAfter(); got > 60*time.Second-600*time.Millisecond-10*time.Millisecond-1200*time.Millisecond {
			t.Errorf("killed after %v: no margin for 4000 processes", got)
		}
	})
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", time.Hour: "1h", 90 * time.Minute: "1h30m", time.Minute: "1m", 61 * time.Second: "1m1s", 10 * time.Second: "10s",
		1500 * time.Millisecond: "1.5s", 1234567 * time.Microsecond: "1.235s", Forever: "forever", 300 * time.Microsecond: "300µs",
	} {
		if got := Short(d); got != want {
			t.Errorf("%v is written %q, want %q", int64(d), got, want)
		}
	}
}
