package mem

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
)

func conformance(t *testing.T, o Options, bubble bool) {
	backendtest.Run(t, backendtest.Harness{
		Place: func(*testing.T) backendtest.Place {
			s := NewServer(o)
			return backendtest.Place{Open: s.Open, Wipe: s.Wipe}
		},
		TTL:    400 * time.Millisecond,
		Slack:  100 * time.Millisecond,
		Bubble: bubble,
	})
}

func TestConformance(t *testing.T)                     { conformance(t, Options{}, true) }
func TestConformanceWithoutABubble(t *testing.T)       { conformance(t, Options{}, false) }
func TestConformanceOfGrantsThatDoNotEnd(t *testing.T) { conformance(t, Options{Endless: true}, true) }

func open(t *testing.T, s *Server, query string) *backends.Store {
	t.Helper()
	u, err := url.Parse("mem:?" + query)
	if err != nil {
		t.Fatal(err)
	}
	store, err := Scheme(s).Open(t.Context(), u)
	if err != nil {
		t.Fatalf("open %s: %v", u, err)
	}
	return store
}

func request() backends.Request {
	return backends.Request{Lease: "l", Holder: "h", Handle: backends.NewHandle(), Slots: 1, TTL: time.Minute}
}

func TestFaultsComeAtTheirCalls(t *testing.T) {
	for _, c := range []struct {
		what   string
		kind   error
		landed bool // whether the server did the work
	}{
		{"reset-before", backends.ErrUnavailable, false},
		{"unavailable", backends.ErrUnavailable, false},
		{"reset-after", backends.ErrUnavailable, true},
		{"lose", backends.ErrUnavailable, true},
		{"denied", backends.ErrDenied, false},
		{"broken", backends.ErrBroken, false},
		{"lost", backends.ErrLost, false},
		{"busy", backends.ErrBusy, false},
	} {
		s := NewServer(Options{})
		faulty := open(t, s, "fault=acquire:2:"+c.what)
		if _, err := faulty.Acquire(t.Context(), backends.Request{Lease: "other", Handle: "h", Slots: 1, TTL: time.Minute}); err != nil {
			t.Errorf("%s: first call: got %v, want a grant", c.what, err)
		}
		r := request()
		if _, err := faulty.Acquire(t.Context(), r); !errors.Is(err, c.kind) {
			t.Errorf("%s: second call: got %v, want %v", c.what, err, c.kind)
		}
		state, err := s.Open().Inspect(t.Context(), "", "l")
		if landed := len(state.Slots) == 1 && state.Slots[0].Held; err != nil || landed != c.landed {
			t.Errorf("%s: work done: got %v, %v, want %v", c.what, landed, err, c.landed)
		}
		if _, err := faulty.Acquire(t.Context(), r); err != nil {
			t.Errorf("%s: third call: got %v, want a grant", c.what, err)
		}
	}
}

func TestAHangIgnoresItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Options{})
		c := open(t, s, "fault=renew:1:hang")
		g, err := c.Acquire(t.Context(), request())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		done := make(chan error, 1)
		go func() { _, err := c.Renew(ctx, g); done <- err }()
		time.Sleep(time.Hour)
		select {
		case err := <-done:
			t.Errorf("Renew came back with %v, want it to hang", err)
		default:
		}
		s.Free()
		if err := <-done; !errors.Is(err, backends.ErrUnavailable) {
			t.Errorf("Renew after Free: got %v, want ErrUnavailable", err)
		}
	})
}

func TestALateAnswerIsLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Options{})
		c := open(t, s, "fault=acquire:1:delay=900ms&fault=renew:1:delay!=5s&fault=renew:2%2B:delay=5s")
		begun := time.Now()
		g, err := c.Acquire(t.Context(), request())
		if took := time.Since(begun); err != nil || took != 900*time.Millisecond {
			t.Errorf("Acquire: got %v after %v, want a grant after 900ms", err, took)
		}
		for _, want := range []struct {
			took time.Duration
			err  error
		}{{5 * time.Second, nil}, {time.Second, context.DeadlineExceeded}} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			begun := time.Now()
			_, err := c.Renew(ctx, g)
			cancel()
			if took := time.Since(begun); took != want.took || !errors.Is(err, want.err) {
				t.Errorf("Renew: got %v after %v, want %v after %v", err, took, want.err, want.took)
			}
		}
	})
}

func TestAWipeTakesTheLeaseAway(t *testing.T) {
	c := open(t, NewServer(Options{}), "fault=renew:2:wipe")
	g, err := c.Acquire(t.Context(), request())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Renew(t.Context(), g); err != nil {
		t.Errorf("first Renew: got %v, want the grant", err)
	}
	if _, err := c.Renew(t.Context(), g); !errors.Is(err, backends.ErrLost) {
		t.Errorf("second Renew: got %v, want ErrLost", err)
	}
}

func TestAHolderIsAskedAtACall(t *testing.T) {
	c := open(t, NewServer(Options{}), "fault=renew:2:stop&fault=renew:3:break")
	g, err := c.Acquire(t.Context(), request())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := c.Renew(t.Context(), g); err != nil || got.Ask != nil {
		t.Errorf("first Renew: got %+v, %v, want no ask", got.Ask, err)
	}
	if got, err := c.Renew(t.Context(), g); err != nil || got.Ask == nil || got.Ask.Kind != backends.AskStop {
		t.Errorf("second Renew: got %+v, %v, want to be asked to stop", got.Ask, err)
	}
	if _, err := c.Renew(t.Context(), g); !errors.Is(err, backends.ErrLost) {
		t.Errorf("third Renew: got %v, want ErrLost", err)
	}
}

func TestTheTraceTellsEveryCallAndNoHandle(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace")
	c := open(t, NewServer(Options{}), "fault=renew:1:lost&trace="+url.QueryEscape(path))
	r := request()
	g, err := c.Acquire(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Renew(t.Context(), g)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var words []string
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 4 || len(f[2]) != 8 || strings.HasPrefix(r.Handle, f[2]) {
			t.Fatalf("line of the trace: got %q, want operation, number, hash and result", line)
		}
		words = append(words, f[0]+" "+f[1]+" "+f[3])
	}
	if got, want := strings.Join(words, ", "), "acquire 1 begin, acquire 1 ok, renew 1 begin, renew 1 lost"; got != want {
		t.Errorf("trace: got %s, want %s", got, want)
	}
}

func TestAFaultThatMeansNothingIsRefused(t *testing.T) {
	for _, query := range []string{
		"fault=renew", "fault=renew:1", "fault=renew:0:hang", "fault=renew:x:hang", "fault=dance:1:hang", "fault=renew:1:dance",
		"fault=renew:1:delay", "fault=renew:1:delay=soon", "fault=renew:3-2:hang", "fault=renew:1:hang=1s", "other=1",
	} {
		u := &url.URL{Scheme: "mem", RawQuery: query}
		var config *backends.ConfigError
		if _, err := Scheme(NewServer(Options{})).Open(t.Context(), u); !errors.As(err, &config) {
			t.Errorf("mem:?%s: got %v, want a *ConfigError", query, err)
		}
	}
}
