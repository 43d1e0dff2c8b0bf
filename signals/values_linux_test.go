package signals_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/signals"
)

func TestNamesOfSignals(t *testing.T) {
	for s, want := range map[string]syscall.Signal{
		"TERM": 15, "SIGTERM": 15, "term": 15, "15": 15, "HUP": 1, "SYS": 31, "RTMIN": 34, "RTMIN+3": 37, "SIGRTMAX": 64, "RTMAX-1": 63,
		"POLL": syscall.SIGIO, "KILL": 9,
	} {
		if got, err := signals.Parse(s); err != nil || got != want {
			t.Errorf("Parse(%q) is %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "SIG", "0", "65", "-1", "TERMINATE", "RTMIN+31", "RTMIN-1", "RTMAX+1", "RTMIN+", "1.5", "RTMIN+x"} {
		if got, err := signals.Parse(s); err == nil {
			t.Errorf("Parse(%q) is %d, want an error", s, got)
		}
	}
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if got, err := signals.Parse(signals.Name(sig)); err != nil || got != sig {
			t.Errorf("Parse(Name(%d)) is %d, %v", sig, got, err)
		}
	}
}

// C46, Q41
func TestResolveSearchesAsExecvpDoes(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, d := range []string{"a", "b", "c", "b/tool-dir"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for f, mode := range map[string]os.FileMode{"a/tool": 0o644, "b/tool": 0o755, "a/plain": 0o644, "here": 0o755, "c/here": 0o755} {
		if err := os.WriteFile(f, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, path, want string
		errno            syscall.Errno
		notFound         bool
	}{
		{name: "tool", path: "a:b", want: "b/tool"},
		{name: "tool", path: filepath.Join(dir, "b"), want: filepath.Join(dir, "b/tool")},
		{name: "tool", path: "nowhere:b/", want: "b/tool"},
		{name: "here", path: "c:.", want: "c/here"},
		{name: "here", path: ":c", want: "./here"},
		{name: "here", path: "a:", want: "./here"},
		{name: "./here", path: "c", want: "./here"},
		{name: "plain", path: "a:b", errno: syscall.EACCES},
		{name: "a/plain", errno: syscall.EACCES},
		{name: "tool-dir", path: "b", errno: syscall.EISDIR},
		{name: "./a", errno: syscall.EISDIR},
		{name: "missing", path: "a:b", errno: syscall.ENOENT, notFound: true},
		{name: "a/tool/x", errno: syscall.ENOTDIR, notFound: true},
		{name: "", path: "a:b", errno: syscall.ENOENT, notFound: true},
	} {
		got, err := signals.Resolve(c.name, []string{"OTHER=1", "PATH=" + c.path, "PATH=ignored"})
		if c.errno == 0 {
			if err != nil || got != c.want {
				t.Errorf("%q in %q: %q, %v; want %q", c.name, c.path, got, err, c.want)
			}
			continue
		}
		var r *signals.ResolveError
		if !errors.As(err, &r) || r.Errno != c.errno || r.NotFound() != c.notFound {
			t.Errorf("%q in %q: %q, %v; want %v, not found %v", c.name, c.path, got, err, c.errno, c.notFound)
		}
	}
	if got, err := signals.Resolve("sh", nil); err != nil || got != "/bin/sh" {
		t.Errorf("without PATH sh is %q, %v; want /bin/sh", got, err)
	}
}

func TestTheAlarmFiresAtItsInstantAndNotBefore(t *testing.T) {
	a, err := signals.NewAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	at := signals.Now() + int64(30*time.Millisecond)
	a.Set(at)
	<-a.C()
	if now := signals.Now(); now < at {
		t.Errorf("fired %v early", time.Duration(at-now))
	}
	a.Set(0) // the past
	<-a.C()
	at = signals.Now() + int64(20*time.Millisecond)
	a.Set(at)
	a.Set(signals.Never)
	disarmed := signals.Now()
	select {
	case <-a.C():
		if disarmed < at { // else it may have been on its way
			t.Error("fired although it was disarmed")
		}
	case <-time.After(60 * time.Millisecond):
	}
	a.Set(signals.Now() + int64(time.Hour))
	a.Set(signals.Now() + int64(10*time.Millisecond))
	<-a.C()
}
