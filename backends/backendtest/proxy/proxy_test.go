//go:build linux

package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// echo answers every line with the same line, and notes it.
type echo struct {
	net.Listener
	mu    sync.Mutex
	lines []string
}

func newEcho(t *testing.T) *echo {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	e := &echo{Listener: l}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for in := bufio.NewScanner(c); in.Scan(); {
					e.mu.Lock()
					e.lines = append(e.lines, in.Text())
					e.mu.Unlock()
					fmt.Fprintln(c, in.Text())
				}
			}()
		}
	}()
	return e
}

// seen waits until the server has seen exactly these lines.
func (e *echo) seen(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) { // the pace of the looks
		e.mu.Lock()
		got = append([]string(nil), e.lines...)
		e.mu.Unlock()
		if strings.Join(got, ",") == strings.Join(want, ",") {
			return
		}
	}
	t.Errorf("lines that the server saw: got %q, want %q", got, want)
}

type line struct {
	net.Conn
	in *bufio.Reader
}

func dial(t *testing.T, p *Proxy) *line {
	t.Helper()
	c, err := net.Dial("tcp4", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &line{c, bufio.NewReader(c)}
}

func (l *line) say(t *testing.T, s string) {
	t.Helper()
	if _, err := fmt.Fprintln(l, s); err != nil {
		t.Fatal(err)
	}
}

// hear returns the next line, or what went wrong within a time.
func (l *line) hear(within time.Duration) (string, error) {
	_ = l.SetReadDeadline(time.Now().Add(within))
	s, err := l.in.ReadString('\n')
	return strings.TrimSpace(s), err
}

func (l *line) want(t *testing.T, want string) {
	t.Helper()
	if got, err := l.hear(10 * time.Second); got != want || err != nil {
		t.Errorf("answer: got %q, %v, want %q", got, err, want)
	}
}

func (l *line) silent(t *testing.T) {
	t.Helper()
	if got, err := l.hear(100 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("answer: got %q, %v, want silence", got, err)
	}
}

// late wants an answer, and not before a delay has passed since the line was about to be said: whoever looks late sees no silence.
func (l *line) late(t *testing.T, said time.Time, delay time.Duration, want string) {
	t.Helper()
	l.want(t, want)
	if took := time.Since(said); took < delay {
		t.Errorf("answer after %v, want it not before %v", took, delay)
	}
}

// refused dials and wants a reset connection: it may come before the dialer has seen that it is connected.
func refused(t *testing.T, p *Proxy) {
	t.Helper()
	c, err := net.Dial("tcp4", p.Addr())
	if errors.Is(err, syscall.ECONNRESET) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	(&line{c, bufio.NewReader(c)}).reset(t)
}

func (l *line) reset(t *testing.T) {
	t.Helper()
	if got, err := l.hear(10 * time.Second); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("answer: got %q, %v, want a reset connection", got, err)
	}
}

func TestWithoutAFaultEverythingPasses(t *testing.T) {
	e := newEcho(t)
	p := New(t, e.Addr().String())
	l := dial(t, p)
	for _, s := range []string{"a", "b", strings.Repeat("c", 60000)} {
		l.say(t, s)
		l.want(t, s)
	}
	if got := p.Trips(); got != 3 {
		t.Errorf("requests: got %d, want 3", got)
	}
	if got := p.Made(); got != 1 {
		t.Errorf("connections: got %d, want 1", got)
	}
	_ = e.Close()
	p.Cut()
	if p.Cuts() != 1 {
		t.Errorf("cuts: got %d, want 1", p.Cuts())
	}
	l.reset(t)
	refused(t, p) // nobody is there
}

func TestAFaultHappensToItsRequestsAlone(t *testing.T) {
	e := newEcho(t)
	p := New(t, e.Addr().String())
	const delay = 300 * time.Millisecond
	var said time.Time
	for i, c := range []struct {
		kind   Kind
		server bool // sees it
		check  func(*line)
	}{
		{ResetBefore, false, func(l *line) { l.reset(t) }},
		{ResetAfter, true, func(l *line) { l.reset(t) }},
		{Lose, true, func(l *line) { l.silent(t) }},
		{Late, true, func(l *line) { l.late(t, said, delay, "hit") }},
	} {
		e.mu.Lock()
		e.lines = nil
		e.mu.Unlock()
		p.Inject(Fault{Kind: c.kind, Match: "hit", Delay: delay})
		l := dial(t, p)
		l.say(t, "other")
		l.want(t, "other")
		said = time.Now()
		l.say(t, "hit")
		c.check(l)
		if c.server {
			e.seen(t, "other", "hit")
		} else {
			e.seen(t, "other")
		}
		l = dial(t, p)
		l.say(t, "hit")
		l.want(t, "hit")
		if got := p.Done(c.kind); got != 1 {
			t.Errorf("case %d: it happened to %d requests, want 1", i, got)
		}
	}
}

func TestABlackHoleHoldsBackAndLetsGo(t *testing.T) {
	e := newEcho(t)
	p := New(t, e.Addr().String())
	l := dial(t, p)
	p.BlackHole(Requests)
	l.say(t, "a")
	l.silent(t)
	e.seen(t)
	p.Heal()
	l.want(t, "a")
	p.BlackHole(Answers)
	l.say(t, "b")
	e.seen(t, "a", "b")
	l.silent(t)
	late := dial(t, p) // a connection can be made
	late.say(t, "c")
	late.silent(t)
	p.Heal()
	l.want(t, "b")
	late.want(t, "c")
}

func TestConnectionsAreCutAgainAndAgain(t *testing.T) {
	e := newEcho(t)
	p := New(t, e.Addr().String())
	p.CutEvery(20 * time.Millisecond)
	for range 3 {
		refused(t, p)
	}
	if p.Cuts() < 3 {
		t.Errorf("cuts: got %d, want at least 3", p.Cuts())
	}
	p.Heal()
	l := dial(t, p)
	const delay = 150 * time.Millisecond
	p.Delay(delay)
	said := time.Now()
	l.say(t, "a")
	l.late(t, said, delay, "a")
}
