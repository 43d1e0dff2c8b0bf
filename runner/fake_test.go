package runner

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/signals"
)

// clock is the bubble's clock, which can jump ahead as CLOCK_BOOTTIME does over a suspend: timers have not counted the
// jump, and the alarm fires when the machine is back.
type clock struct {
	mu    sync.Mutex
	begun time.Time
	ahead time.Duration
	at    signals.Instant
	timer *time.Timer
	c     chan struct{}
}

func newClock() *clock {
	return &clock{begun: time.Now().Add(-time.Hour), at: signals.Never, c: make(chan struct{}, 1)}
}

func (c *clock) now() signals.Instant {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.read()
}

func (c *clock) read() signals.Instant { return int64(time.Since(c.begun) + c.ahead) }

func (c *clock) Set(at signals.Instant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = at
	c.arm()
}

func (c *clock) arm() {
	if c.timer != nil {
		c.timer.Stop()
	}
	if c.at == signals.Never {
		return
	}
	c.timer = time.AfterFunc(time.Duration(max(0, c.at-c.read())), func() {
		select {
		case c.c <- struct{}{}:
		default:
		}
	})
}

func (c *clock) C() <-chan struct{} { return c.c }
func (c *clock) Close()             {}

// jump is a suspend of d.
func (c *clock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += d
	c.arm()
}

// job is the command of a fake tree. It heeds signals as its fields say.
type job struct {
	lasts    time.Duration // until it exits by itself; zero: it never does
	code     int
	onStop   time.Duration // from a signal that asks it to stop to its exit; negative: it ignores them
	dies     time.Duration // from SIGKILL to the end of the tree
	children int
	cannot   error // why its isolation cannot be had after all
}

// tree is a fake process tree, in the bubble's time. It has no guardian that acts by itself: what it sees was ordered.
type tree struct {
	clock *clock
	job   job
	late  int // so many starts come too late

	unsure bool // the guardian is lost in the start, and the command may have begun

	mu        sync.Mutex
	command   signals.Command
	deadlines signals.Deadlines
	begun     signals.Instant
	killed    signals.Instant
	stops     []signals.Instant
	forwarded []syscall.Signal
	gone      signals.Instant
	pinned    []int
	closed    bool
	over      bool
	events    chan signals.Event
}

func newTree(c *clock, j job) *tree {
	return &tree{clock: c, job: j, events: make(chan signals.Event, 16)}
}

func (t *tree) Pin(fds []int) error { t.pinned = fds; return nil }

func (t *tree) Start(c signals.Command, d signals.Deadlines) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.late > 0 {
		t.late--
		return 0, &signals.StartError{Path: c.Path, TooLate: true}
	}
	if t.job.cannot != nil {
		return 0, &signals.StartError{Path: c.Path, Isolate: t.job.cannot}
	}
	t.command, t.deadlines, t.begun = c, d, t.clock.now()
	if t.unsure {
		return 0, errors.New("the guardian has ended")
	}
	if t.job.lasts > 0 {
		time.AfterFunc(t.job.lasts, func() { t.exit(t.job.code, 0) })
	}
	return 4711, nil
}

func (t *tree) Publish(d signals.Deadlines) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.deadlines = d
}

func (t *tree) Tend() {}

func (t *tree) Forward(sig syscall.Signal) {
	t.mu.Lock()
	t.forwarded = append(t.forwarded, sig)
	t.mu.Unlock()
	t.heed(sig)
}

func (t *tree) Stop() {
	t.mu.Lock()
	t.stops = append(t.stops, t.clock.now())
	t.mu.Unlock()
	t.heed(syscall.SIGTERM)
}

func (t *tree) heed(sig syscall.Signal) {
	if t.job.onStop >= 0 {
		time.AfterFunc(t.job.onStop, func() { t.exit(0, sig) })
	}
}

func (t *tree) Kill() {
	t.mu.Lock()
	if t.killed == 0 {
		t.killed = t.clock.now()
	}
	t.mu.Unlock()
	time.AfterFunc(t.job.dies, func() { t.exit(0, syscall.SIGKILL) })
}

func (t *tree) exit(code int, sig syscall.Signal) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return
	}
	t.over, t.gone = true, t.clock.now()
	if sig != 0 {
		code = 128 + int(sig)
	}
	t.events <- signals.Event{Kind: signals.Exited, At: t.gone, Status: signals.Status{Code: code, Signal: sig}}
	t.events <- signals.Event{Kind: signals.Gone, At: t.gone}
	close(t.events)
}

func (t *tree) Descendants() int             { return 1 + t.job.children }
func (t *tree) Events() <-chan signals.Event { return t.events }

// Close ends a guardian that has started nothing, a moment later.
func (t *tree) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	time.AfterFunc(5*time.Millisecond, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if !t.over {
			t.over, t.gone = true, t.clock.now()
			close(t.events)
		}
	})
}

// store is a backend that each test scripts. What is not scripted grants, renews and releases.
type store struct {
	acquire func(ctx context.Context, n int, req backends.Request) (backends.Grant, error)
	renew   func(ctx context.Context, n int, g backends.Grant) (backends.Grant, error)
	release func(ctx context.Context, n int, g backends.Grant, end backends.End) error
	inspect func() (backends.State, error)

	mu       sync.Mutex
	acquires []signals.Instant
	renewals []signals.Instant
	released []backends.End
	gaveBack []backends.Grant
	left     []string // handles of those who gave up a place in the queue
	clock    *clock
}

func (s *store) Acquire(ctx context.Context, req backends.Request) (backends.Grant, error) {
	s.mu.Lock()
	s.acquires = append(s.acquires, s.clock.now())
	n := len(s.acquires)
	s.mu.Unlock()
	if s.acquire != nil {
		return s.acquire(ctx, n, req)
	}
	return grantOf(req), nil
}

func grantOf(req backends.Request) backends.Grant {
	return backends.Grant{
		Namespace: req.Namespace, Lease: req.Lease, Holder: req.Holder, Handle: req.Handle,
		Term: 1796000000001, TTL: req.TTL, Previous: backends.End{Outcome: backends.OutcomeNone},
	}
}

func (s *store) Renew(ctx context.Context, g backends.Grant) (backends.Grant, error) {
	s.mu.Lock()
	s.renewals = append(s.renewals, s.clock.now())
	n := len(s.renewals)
	s.mu.Unlock()
	if s.renew != nil {
		return s.renew(ctx, n, g)
	}
	return g, nil
}

func (s *store) Release(ctx context.Context, g backends.Grant, end backends.End) error {
	s.mu.Lock()
	s.released = append(s.released, end)
	s.gaveBack = append(s.gaveBack, g)
	n := len(s.released)
	s.mu.Unlock()
	if s.release != nil {
		return s.release(ctx, n, g, end)
	}
	return nil
}

func (s *store) Inspect(context.Context, string, string) (backends.State, error) {
	if s.inspect != nil {
		return s.inspect()
	}
	return backends.State{}, nil
}

func (s *store) List(context.Context, string) ([]backends.State, error)         { return nil, nil }
func (s *store) Ask(context.Context, string, string, int, backends.Ask) error   { return nil }
func (s *store) Break(context.Context, string, string, int, string, bool) error { return nil }
func (s *store) Records() backends.Records                                      { return nil }
func (s *store) Close() error                                                   { return nil }

// scene is one run in a bubble.
type scene struct {
	t       *testing.T
	spec    Spec
	store   *store
	clock   *clock
	trees   []*tree
	job     job
	late    int
	unsure  bool
	signals chan syscall.Signal
	said    []string
	endless bool
	waiter  func(ctx context.Context) error
	watcher func(ctx context.Context, g backends.Grant) error
}

// play runs f in a bubble with a scene whose lease lasts ttl; zero is an endless store.
func play(t *testing.T, ttl time.Duration, f func(s *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := newClock()
		s := &scene{
			t: t, clock: c, store: &store{clock: c}, endless: ttl == 0,
			signals: make(chan syscall.Signal, 16),
			spec: Spec{
				Lease: "nightly", Holder: "test", Slots: 1, TTL: ttl, Drain: Forever,
				Grace: Auto, Margin: Auto, RenewEvery: Auto, ClockDrift: 0.01,
				IfUnavailable: UnavailableFail, OnLost: LostKill,
				StopSignal: syscall.SIGTERM, Leftovers: signals.LeftoversKill,
				Path: "/bin/job", Args: []string{"job"},
			},
		}
		f(s)
		time.Sleep(time.Minute) // calls that were left behind end before the bubble does
	})
}

func (s *scene) launch() (Tree, error) {
	t := newTree(s.clock, s.job)
	if s.late > 0 {
		s.late--
		t.late = 1
	}
	t.unsure = s.unsure
	s.trees = append(s.trees, t)
	return t, nil
}

// run settles the spec and runs it to its end.
func (s *scene) run() Result {
	s.t.Helper()
	if err := s.spec.Settle(s.endless); err != nil {
		s.t.Fatalf("settle: %v", err)
	}
	st := &backends.Store{Backend: s.store, Scheme: "fake", Address: "fake:", Identity: "fake", Endless: s.endless}
	if s.waiter != nil {
		st.Backend = waiting{s.store, s.waiter}
	}
	if s.watcher != nil {
		st.Backend = watching{s.store, s.watcher}
	}
	return Run(s.t.Context(), s.spec, st, Platform{
		Launch: s.launch, Now: s.clock.now, Alarm: s.clock, Signals: s.signals,
		Log: slog.New(slog.DiscardHandler),
		Say: func(line, hint string) { s.said = append(s.said, line) },
	})
}

// begin runs in the background; the result comes when it has ended.
func (s *scene) begin() <-chan Result {
	c := make(chan Result, 1)
	go func() { c <- s.run() }()
	synctest.Wait()
	return c
}

func (s *scene) tree() *tree {
	s.t.Helper()
	if len(s.trees) == 0 {
		s.t.Fatal("no tree was launched")
	}
	return s.trees[len(s.trees)-1]
}

// killedAfter returns how long after its start the tree was ordered dead.
func (s *scene) killedAfter() time.Duration {
	t := s.tree()
	if t.killed == 0 {
		return math.MaxInt64
	}
	return time.Duration(t.killed - t.begun)
}

type waiting struct {
	*store
	wait func(ctx context.Context) error
}

func (w waiting) WaitFree(ctx context.Context, _ backends.Request) error { return w.wait(ctx) }

func (w waiting) Leave(_ context.Context, r backends.Request) error {
	w.left = append(w.left, r.Handle)
	return nil
}

type watching struct {
	*store
	watch func(ctx context.Context, g backends.Grant) error
}

func (w watching) WaitChange(ctx context.Context, g backends.Grant) error { return w.watch(ctx, g) }
