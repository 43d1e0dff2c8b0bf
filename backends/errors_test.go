package backends

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
)

func TestEveryErrorIsOfExactlyOneKind(t *testing.T) {
	kinds := []error{ErrBusy, ErrLost, ErrUnavailable, ErrDenied, ErrBroken, ErrNoRecord, ErrConflict}
	for _, c := range []struct {
		err, kind error
		text      string
	}{
		{&BusyError{Lease: "n", Holder: "db1"}, ErrBusy, `"n" is held by db1`},
		{&BusyError{Namespace: "ns", Lease: "n", Holder: "db1"}, ErrBusy, `"ns/n" is held by db1`},
		{Lost(nil, "slot %d was deleted", 3), ErrLost, "slot 3 was deleted"},
		{Unavailable(io.ErrUnexpectedEOF, "redis://h"), ErrUnavailable, "redis://h: unexpected EOF"},
		{Denied(io.EOF, ""), ErrDenied, "EOF"},
		{Broken(nil, "torn"), ErrBroken, "torn"},
	} {
		for _, wrapped := range []error{c.err, fmt.Errorf("acquire: %w", c.err), WithHint(c.err, "look")} {
			for _, kind := range kinds {
				if got, want := errors.Is(wrapped, kind), errors.Is(c.kind, kind); got != want {
					t.Errorf("%v is %v: got %v, want %v", wrapped, kind, got, want)
				}
			}
		}
		if got := c.err.Error(); got != c.text {
			t.Errorf("text: got %q, want %q", got, c.text)
		}
	}
}

func TestTheCauseStaysReachable(t *testing.T) {
	if err := Unavailable(io.ErrUnexpectedEOF, "read"); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v does not carry its cause", err)
	}
	var busy *BusyError
	if err := fmt.Errorf("x: %w", &BusyError{Slot: 2}); !errors.As(err, &busy) || busy.Slot != 2 {
		t.Errorf("the busy error is not found in %v", err)
	}
}

func TestAHintIsFoundThroughWrapping(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{nil, ""},
		{io.EOF, ""},
		{WithHint(io.EOF, "try %s", "this"), "try this"},
		{fmt.Errorf("x: %w", WithHint(Broken(nil, "torn"), "move it")), "move it"},
		{WithHint(WithHint(io.EOF, "inner"), "outer"), "outer"},
		{Configf("write file:///dir", "bad %d", 1), "write file:///dir"},
		{fmt.Errorf("x: %w", Configf("h", "bad")), "h"},
	} {
		if got := Hint(c.err); got != c.want {
			t.Errorf("Hint(%v): got %q, want %q", c.err, got, c.want)
		}
	}
	if got := WithHint(io.EOF, "h").Error(); got != "EOF" {
		t.Errorf("the hint changed the text: got %q, want EOF", got)
	}
}

func TestTermsGrowAndEndBeforeTheyWrap(t *testing.T) {
	for _, c := range []struct {
		last, want Term
		now        int64
	}{
		{0, 1000, 1000},
		{999, 1000, 1000},
		{1000, 1001, 1000},
		{5000, 5001, 1000}, // the clock was set back
		{0, 1, -5},
		{MaxTerm - 1, MaxTerm, 1000},
		{0, MaxTerm, int64(MaxTerm)},
	} {
		if got, err := c.last.Next(c.now); got != c.want || err != nil {
			t.Errorf("Term(%d).Next(%d): got %d, %v, want %d", c.last, c.now, got, err, c.want)
		}
	}
	for _, c := range []struct {
		last Term
		now  int64
	}{{MaxTerm, 0}, {0, int64(MaxTerm) + 1}} {
		if got, err := c.last.Next(c.now); !errors.Is(err, ErrBroken) {
			t.Errorf("Term(%d).Next(%d): got %d, %v, want ErrBroken", c.last, c.now, got, err)
		}
	}
}

func TestAGrantIsLoggedWithoutItsHandle(t *testing.T) {
	var out strings.Builder
	log := slog.New(slog.NewTextHandler(&out, nil))
	log.Info("x", "grant", Grant{Namespace: "ns", Lease: "n", Handle: "secret", Slot: 2, Term: 77})
	if got := out.String(); strings.Contains(got, "secret") || !strings.Contains(got, "grant.lease=ns/n grant.slot=2 grant.term=77") {
		t.Errorf("log line: got %q, want lease, slot and term without the handle", got)
	}
}
