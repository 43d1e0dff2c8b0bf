package all

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends"
)

// schemes has the real ones, and one that needs a server and opens anything.
func schemes() map[string]backends.Scheme {
	s := Schemes()
	s["redis"] = backends.Scheme{Open: func(_ context.Context, u *url.URL) (*backends.Store, error) {
		return &backends.Store{Scheme: "redis", Address: u.Redacted()}, nil
	}}
	return s
}

func TestAURLOpensItsStore(t *testing.T) {
	for raw, want := range map[string]string{
		"file://" + t.TempDir(): "file",
		"FILE://" + t.TempDir(): "file",
		"redis://:pw@host/0":    "redis",
	} {
		s, err := Open(t.Context(), raw, schemes())
		if err != nil || s.Scheme != want {
			t.Errorf("Open(%q): got %v, want a store of the scheme %q", raw, err, want)
			continue
		}
		if want == "file" && !s.Endless {
			t.Errorf("Open(%q): got a store whose grants end, want an endless one", raw)
		}
	}
	if !Schemes()["file"].Endless {
		t.Error("file is not marked as endless")
	}
}

func TestABadURLIsRefusedWithTheRightForm(t *testing.T) {
	for _, c := range []struct{ raw, text, hint string }{
		{"", "is empty", "file:"},
		{" \t", "is empty", "file:"},
		{"file", "no scheme", "write file:"},
		{"/var/lib/x", "no scheme", "file://"},
		{"./x", "no scheme", "etcds:, file:, mariadb:"},
		{"://x", "no scheme", ""},
		{"1file:", "no scheme", ""},
		{"fiel:x", `"fiel"`, "did you mean file:?"},
		{"flie:///x", `"flie"`, "did you mean file:?"},
		{"rediz://h", `"rediz"`, "did you mean redis:?"},
		{"nats://h", `"nats"`, "known are consul:, consuls:, etcd:, etcds:, file:, mariadb:"},
		{"x:", `"x"`, "known are"},
		{"redis://h:port", "cannot be read", "%40"},
		{"redis://h/%zz", "cannot be read", "%40"},
		{"file:relative", "not absolute", "file:///dir"},
	} {
		_, err := Open(t.Context(), c.raw, schemes())
		var config *backends.ConfigError
		if !errors.As(err, &config) || !strings.Contains(config.Text, c.text) || !strings.Contains(config.Hint, c.hint) {
			t.Errorf("Open(%q): got %v (hint %q), want a *ConfigError with %q and %q", c.raw, err, backends.Hint(err), c.text, c.hint)
		}
		if strings.HasPrefix(c.raw, "nats") && strings.Contains(backends.Hint(err), "did you mean") {
			t.Errorf("Open(%q): got the hint %q for a word that is far from all", c.raw, backends.Hint(err))
		}
	}
}

func TestAPasswordIsNeverShown(t *testing.T) {
	const secret = "s3cr3t"
	for _, raw := range []string{
		"redis://user:" + secret + "@host:port/0",
		"redis://user:" + secret + "%zz@host",
		"redis://user:" + secret + " @host",
		"redis://user:" + secret + "\x7f@host",
		"redis//user:" + secret + "@host",
		"rediz://user:" + secret + "@host",
		"user:" + secret + "@host",
		secret + "@host",
		"file://user:" + secret + "@/dir",
		"file://" + secret + ":port/dir",
		"redis://[" + secret,
		"host/db?password=" + secret,
		"/dir?password=" + secret,
		secret + "-my-secret-password-token:foo",
		secret,
	} {
		s, err := Open(t.Context(), raw, schemes())
		text := fmt.Sprint(err, backends.Hint(err))
		if err == nil {
			text = s.Address
		}
		_, err = Check(raw, schemes())
		text += fmt.Sprint(err, backends.Hint(err))
		if strings.Contains(text, secret) {
			t.Errorf("Open(%q) shows the password: %s", raw, text)
		}
	}
}

// FuzzOpen looks for a URL whose password is shown.
func FuzzOpen(f *testing.F) {
	f.Add("redis://u:", "@h")
	f.Add("file://u:", "@/dir")
	f.Add("", "")
	f.Add("redis://h/?p=", "%")
	f.Fuzz(func(t *testing.T, before, after string) {
		const secret = "qzx7qzx7qzx7"
		_, err := Open(t.Context(), before+secret+after, schemes())
		// Before a colon it would be the scheme, and a parameter or a host of a file URL is shown by its name.
		if err != nil && strings.Contains(err.Error(), secret) && strings.Contains(before, "://") && !strings.HasPrefix(strings.ToLower(before), "file:") {
			t.Errorf("the error %q shows a part of the URL", err)
		}
	})
}

func TestCheckTellsTheScheme(t *testing.T) {
	for raw, want := range map[string]string{"file:": "file", "FILE:///x": "file", "redis://h/0": "redis", "file:relative": "file"} {
		if got, err := Check(raw, schemes()); got != want || err != nil {
			t.Errorf("Check(%q): got %q and %v, want %q", raw, got, err, want)
		}
	}
}

func TestTheNearestNameIsFoundAndNoOther(t *testing.T) {
	names := []string{"ttl", "wait", "backend", "backend-file", "busy-exit", "grace"}
	for in, want := range map[string]string{"tll": "ttl", "wiat": "wait", "backned": "backend", "busyexit": "busy-exit", "metrics": "", "x": "", strings.Repeat("t", 1000): ""} {
		if got := Nearest(in, names); got != want {
			t.Errorf("%.20s: got %q, want %q", in, got, want)
		}
	}
}
