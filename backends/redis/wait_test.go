//go:build linux

package redis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// queueOf returns the tickets of those that wait, in order.
func queueOf(r *servers.Redis, lease string) (tickets []string) {
	for line := range strings.Lines(r.Do("HGET", keyOf("", lease), "q")) {
		if f := strings.Fields(line); len(f) == 4 {
			tickets = append(tickets, f[3])
		}
	}
	return tickets
}

// waiter waits for a lease as the runner does, and returns its grant.
func waiter(ctx context.Context, s *backends.Store, req backends.Request) (backends.Grant, error) {
	for {
		g, err := s.Acquire(ctx, req)
		if err == nil || !errors.Is(err, backends.ErrBusy) {
			return g, err
		}
		if err := s.Backend.(backends.Waiter).WaitFree(ctx, req); err != nil {
			return backends.Grant{}, err
		}
	}
}

func commands(t *testing.T, r *servers.Redis) int {
	t.Helper()
	n, err := strconv.Atoi(r.Info("total_commands_processed"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A waiter whose connection broke, or whose call ended while it confirmed its place, enters anew.
func TestAWaiterThatEntersAgainHasItsPlace(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	first, second := opened(t, "redis://"+r.Addr()), opened(t, "redis://"+r.Addr())
	granted(t, first, request("again"))
	var want []string
	enter := func(s *backends.Store, req backends.Request) {
		t.Helper()
		// Long enough to enter on a busy machine, and too short to confirm the place.
		ctx, cancel := context.WithTimeout(t.Context(), ticketAgain-500*time.Millisecond)
		defer cancel()
		if err := s.Backend.(backends.Waiter).WaitFree(ctx, req); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("WaitFree: got %v, want the end of its time", err)
		}
	}
	early, late := request("again"), request("again")
	for _, w := range []struct {
		s   *backends.Store
		req backends.Request
	}{{first, early}, {second, late}} {
		enter(w.s, w.req)
		want = append(want, ticket(w.req.Handle))
	}
	first.Backend.(*Client).stopWaiting(early.Handle)
	enter(first, early)
	if got := queueOf(r, "again"); !slices.Equal(got, want) {
		t.Errorf("the queue: got %q, want %q", got, want)
	}
	state, err := second.Inspect(t.Context(), "", "again")
	if err != nil || state.Waiters == nil || *state.Waiters != 2 {
		t.Errorf("Inspect: got the waiters %v and %v, want 2", state.Waiters, err)
	}
}

// C49: a handover wakes one, in the order in which they came, and costs the same however many wait.
func TestWaitersAreServedInOrderAndOneAtATime(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	cost := map[int]float64{}
	for _, many := range []int{8, 60} {
		lease := fmt.Sprintf("queue-%d", many)
		first := opened(t, "redis://"+r.Addr())
		g := granted(t, first, request(lease))
		var (
			mu     sync.Mutex
			served []int
			wg     sync.WaitGroup
		)
		begun := make(chan time.Time, 1)
		for i := range many {
			s, req := opened(t, "redis://"+r.Addr()), request(lease)
			wg.Go(func() {
				g, err := waiter(t.Context(), s, req)
				if err != nil {
					t.Errorf("waiter %d: %v", i, err)
					return
				}
				mu.Lock()
				served = append(served, i)
				mu.Unlock()
				if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
					t.Errorf("waiter %d: Release: %v", i, err)
				}
			})
			servers.Within(t, 10*time.Second, "it waits", func() error {
				if q := queueOf(r, lease); !slices.Contains(q, ticket(req.Handle)) {
					return fmt.Errorf("queue: %d", len(q))
				}
				return nil
			})
		}
		before := commands(t, r)
		begun <- time.Now()
		if err := first.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		took := time.Since(<-begun)
		// The commands inside of scripts count too.
		cost[many] = float64(commands(t, r)-before) / float64(many)
		if !slices.IsSorted(served) || len(served) != many {
			t.Errorf("%d waiters: served in the order %v, want that in which they came", many, served)
		}
		if limit := 1500*time.Millisecond + time.Second*time.Duration(many)/8; took > limit {
			t.Errorf("%d waiters: served in %v, want at most %v", many, took, limit)
		}
		t.Logf("%d waiters: %v, %.2f ms and %.1f commands each", many, took, took.Seconds()*1000/float64(many), cost[many])
		if q := queueOf(r, lease); len(q) != 0 {
			t.Errorf("%d waiters: %d left in the queue, want none", many, len(q))
		}
	}
	if cost[60] > cost[8]*2 { // who waits confirms his place now and then, and the more often the slower the machine is
		t.Errorf("commands for a handover: got %.1f with 60 waiters and %.1f with 8, want no more", cost[60], cost[8])
	}
}

// C47: a waiter that is gone, in whatever way, holds up nobody.
func TestAWaiterThatIsGoneIsPassedOver(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	holder := opened(t, "redis://"+r.Addr())
	g := granted(t, holder, request("l"))
	enters := func(ctx context.Context, slots int) (*backends.Store, backends.Request, chan error) {
		t.Helper()
		s, req := opened(t, "redis://"+r.Addr()), request("l")
		req.Slots = slots
		done := make(chan error, 1)
		go func() { done <- s.Backend.(backends.Waiter).WaitFree(ctx, req) }()
		servers.Within(t, 10*time.Second, "it waits", func() error {
			if !slices.Contains(queueOf(r, "l"), ticket(req.Handle)) {
				return errors.New("not in the queue")
			}
			return nil
		})
		return s, req, done
	}
	gone, _, ended := enters(t.Context(), 1)
	_ = gone.Close() // its connections are gone, its ticket is not
	if err := <-ended; err == nil {
		t.Error("WaitFree of a closed client: got nil, want an error")
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, _, ended = enters(ctx, 1)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("WaitFree: got %v, want the context's error", err)
	}
	givesUp, req, ended := enters(t.Context(), 1)
	if err := givesUp.Release(t.Context(), backends.Grant{Lease: "l", Handle: req.Handle}, backends.End{}); err != nil {
		t.Errorf("Release of a waiter: got %v, want nil", err)
	}
	<-ended
	if slices.Contains(queueOf(r, "l"), ticket(req.Handle)) {
		t.Error("a waiter that gave up is still in the queue")
	}
	_, _, last := enters(t.Context(), 1)
	if err := holder.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	select {
	case err := <-last:
		if err != nil {
			t.Errorf("WaitFree: got %v, want nil", err)
		}
		t.Logf("woken after %v", time.Since(begun))
	case <-time.After(ticketAgain - 500*time.Millisecond): // then he looks by himself
		t.Error("the last waiter was not woken: those before it are gone")
	}
}

// A slot that a waiter may not take is no news to him.
func TestARaisedNumberOfSlotsWakesWhoMayTakeThem(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	s := opened(t, "redis://"+r.Addr())
	one, two := request("l"), request("l")
	granted(t, s, one)
	two.Slots = 2
	second := granted(t, s, two)
	waits := func(slots int) chan error {
		s, req := opened(t, "redis://"+r.Addr()), request("l")
		req.Slots = slots
		done := make(chan error, 1)
		go func() { done <- s.Backend.(backends.Waiter).WaitFree(t.Context(), req) }()
		servers.Within(t, 10*time.Second, "it waits", func() error {
			if !slices.Contains(queueOf(r, "l"), ticket(req.Handle)) {
				return errors.New("not in the queue")
			}
			return nil
		})
		return done
	}
	narrow := waits(1)
	wide := waits(2)
	if err := s.Release(t.Context(), second, backends.End{Outcome: "ok"}); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-wide:
		if err != nil {
			t.Errorf("WaitFree for two slots: got %v, want nil", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the waiter for two slots was not woken")
	}
	select {
	case err := <-narrow:
		t.Errorf("WaitFree for one slot: got %v, want it to wait on", err)
	case <-time.After(50 * time.Millisecond):
	}
}

// What was told while nobody listened is heard by the next call: a waiter calls again and again.
func TestAWakeBetweenTwoCallsIsNotMissed(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	holder, s := opened(t, "redis://"+r.Addr()), opened(t, "redis://"+r.Addr())
	g := granted(t, holder, request("l"))
	req := request("l")
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := s.Backend.(backends.Waiter).WaitFree(ctx, req); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("WaitFree: got %v, want the context's error", err)
		}
		cancel()
	}
	if err := holder.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if err := s.Backend.(backends.Waiter).WaitFree(t.Context(), req); err != nil || time.Since(begun) > ticketAgain-time.Second { // when he would look by himself
		t.Errorf("WaitFree after the release: got %v after %v, want nil at once", err, time.Since(begun))
	}
}

// A clock that was set back is played by an expiry and a hold that are too far away.
func TestAClockThatWasSetBackDelaysByOneTTLAtMost(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	s := opened(t, "redis://"+r.Addr())
	req := request("l")
	req.TTL, req.Hold = 300*time.Millisecond, 3*time.Second // a hold that has not ended when it is looked at
	g := granted(t, s, req)
	key := keyOf("", "l")
	ahead := func() {
		script := `local s = cjson.decode(redis.call('HGET', KEYS[1], 's0')); s.e = s.e + 3600000; s.k = s.k + 3600000; s.b = s.b + 3600000
redis.call('HSET', KEYS[1], 's0', cjson.encode(s), 't', redis.call('HGET', KEYS[1], 't') + 3600000) return 'OK'`
		r.Do("EVAL", script, "1", key)
	}
	_ = g
	ahead()
	_, err := heard(t, s, request("l"))
	busy, ok := errors.AsType[*backends.BusyError](err)
	if !ok || busy.Left > req.Hold {
		t.Fatalf("Acquire: got %v with %v left, want busy for at most %v", err, busy.Left, req.Hold)
	}
	begun := time.Now()
	var next backends.Grant
	again := request("l") // of all attempts: one whose answer came too late may have it
	servers.Within(t, 20*time.Second, "the lease is free", func() error {
		next, err = acquire(t, s, again)
		return err
	})
	if took := time.Since(begun); took > req.Hold+late {
		t.Errorf("free after %v, want at most the hold of %v", took, req.Hold)
	}
	if want := g.Term + 3600000; next.Term <= want {
		t.Errorf("term: got %d, want more than %d: it does not follow the clock back", next.Term, want)
	}
}
