package cmd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

// world is the program with a fake store, a fake runner and a fake guardian.
type world struct {
	deps
	t *testing.T

	result   runner.Result // what the fake runner returns
	during   func(runner.Spec, runner.Platform)
	openErr  error
	startErr error    // of every tree
	full     *os.File // standard output, if not nil
	cannot   map[signals.Isolation]error
	specs    []runner.Spec
	opened   []string
	diedBy   syscall.Signal
	launched atomic.Int32
	closed   atomic.Int32
	killed   atomic.Int32
}

func newWorld(t *testing.T) *world {
	t.Helper()
	home := t.TempDir()
	w := &world{t: t, result: runner.Result{Outcome: runner.OutcomeOK, Started: true}}
	w.deps = deps{
		environ:    []string{"HOME=" + home, "PATH=/bin"},
		systemFile: filepath.Join(home, "etc.yaml"),
		schemes: map[string]backends.Scheme{
			"file": {Endless: true},
			"mem":  {},
		},
		launch: func() (runner.Tree, error) {
			w.launched.Add(1)
			return &fakeTree{w: w, events: make(chan signals.Event, 2)}, nil
		},
		listen:  func() <-chan syscall.Signal { return nil },
		alarm:   func() (runner.Alarm, error) { return fakeAlarm{}, nil },
		now:     func() signals.Instant { return 0 },
		wall:    func() time.Time { return time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC) },
		isolate: func(i signals.Isolation) error { return w.cannot[i] },
		resolve: func(name string, _ []string) (string, error) {
			switch name {
			case "nowhere":
				return "", &signals.ResolveError{Name: name, Errno: syscall.ENOENT}
			case "forbidden":
				return "", &signals.ResolveError{Name: name, Errno: syscall.EACCES}
			}
			return "/bin/" + name, nil
		},
		open: func(_ context.Context, raw string) (*backends.Store, error) {
			w.opened = append(w.opened, raw)
			if w.openErr != nil {
				return nil, w.openErr
			}
			return &backends.Store{Backend: fakeBackend{}, Address: mask(raw), Endless: true}, nil
		},
		run: func(_ context.Context, s runner.Spec, _ *backends.Store, p runner.Platform) runner.Result {
			w.specs = append(w.specs, s)
			if w.during != nil {
				w.during(s, p)
			}
			return w.result
		},
		dieBy: func(sig syscall.Signal) { w.diedBy = sig },
	}
	return w
}

type fakeBackend struct{ backends.Backend }

func (fakeBackend) Close() error { return nil }

type fakeAlarm struct{ runner.Alarm }

func (fakeAlarm) Close()              {}
func (fakeAlarm) Set(signals.Instant) {}
func (fakeAlarm) C() <-chan struct{}  { return nil }

// fakeTree runs a command that ends at once with 7.
type fakeTree struct {
	runner.Tree
	w      *world
	events chan signals.Event
}

func (f *fakeTree) Close()                    { f.w.closed.Add(1) }
func (f *fakeTree) Kill()                     { f.w.killed.Add(1) }
func (f *fakeTree) Publish(signals.Deadlines) {}
func (f *fakeTree) Descendants() int          { return 0 }
func (f *fakeTree) Start(signals.Command, signals.Deadlines) (int, error) {
	f.events <- signals.Event{Kind: signals.Exited, Status: signals.Status{Code: 7}}
	f.events <- signals.Event{Kind: signals.Gone}
	close(f.events)
	return 4711, f.w.startErr
}

func (f *fakeTree) Events() <-chan signals.Event {
	if len(f.events) > 0 {
		return f.events
	}
	c := make(chan signals.Event)
	close(c)
	return c
}

// do runs the program and returns its exit code and what it wrote.
func (w *world) do(args ...string) (code int, stdout, stderr string) {
	w.t.Helper()
	dir := w.t.TempDir()
	open := func(name string) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { _ = f.Close() })
		return f
	}
	d := w.deps
	d.args, d.stdout, d.stderr = args, open("stdout"), open("stderr")
	if w.full != nil {
		d.stdout = w.full
		return execute(d), "", read(w.t, d.stderr.Name())
	}
	code = execute(d)
	return code, read(w.t, d.stdout.Name()), read(w.t, d.stderr.Name())
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func (w *world) setenv(entry string) { w.environ = append(w.environ, entry) }

// file writes the host's settings file.
func (w *world) file(text string) {
	w.t.Helper()
	if err := os.WriteFile(w.systemFile, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) untouched() {
	w.t.Helper()
	if len(w.opened) != 0 || len(w.specs) != 0 {
		w.t.Errorf("got stores %q opened and %d runs, want none", w.opened, len(w.specs))
	}
	if l, c := w.launched.Load(), w.closed.Load(); l != c {
		w.t.Errorf("got %d guardians launched and %d sent away, want all", l, c)
	}
}

func (w *world) spec() runner.Spec {
	w.t.Helper()
	if len(w.specs) != 1 {
		w.t.Fatalf("got %d runs, want one", len(w.specs))
	}
	return w.specs[0]
}

// refusals are values that every source refuses in the same words.
var refusals = []struct{ flag, value, words string }{
	{"backend", "", "the URL of the store is empty\nunderlease: hint: write file: for the embedded store, or leave the setting out"},
	{"backend", "/var/lib", "the URL of the store has no scheme\nunderlease: hint: for a directory write file:// and its absolute path"},
	{"backend", "host/db?password=hunter2", "the URL of the store has no scheme\nunderlease: hint: it begins with one of file:, mem:; it is not shown here, since it may hold a password"},
	{"backend", "hunter2-my-secret-password-token:foo", "the URL of the store has no scheme\nunderlease: hint: it begins with one of file:, mem:; it is not shown here, since it may hold a password"},
	{"backend", "smoke:", "no store has the scheme \"smoke\"\nunderlease: hint: known are file:, mem:"},
	{"backend", "flie:", "no store has the scheme \"flie\"\nunderlease: hint: did you mean file:? known are file:, mem:"},
	{"backend", "redis://u:s3cret@h", "no store has the scheme \"redis\"\nunderlease: hint: known are file:, mem:"},
	{"backend", "mem://u:s3cret@h:port", "the URL with the scheme \"mem\" cannot be read\nunderlease: hint: write special characters of a user, a password or a path as %XX (@ is %40, / is %2F, % is %25)"},
	{"backend-file", "", "it is empty: give a file that holds the URL of the store, or leave it out"},
	{"namespace", "a,b", `the namespace "a,b" has a comma, which separates the terms of several leases`},
	{"ttl", "soon", `"soon" is not a duration: give a number with a unit, such as 90s or 1h30m, or none`},
	{"ttl", "", `"" is not a duration: give a number with a unit, such as 90s or 1h30m, or none`},
	{"ttl", "10", `"10" has no unit: give a number with a unit, such as 90s or 1h30m, or none`},
	{"ttl", "-5s", `"-5s" is negative: give at least 2s, or none`},
	{"ttl", "1999ms", `"1999ms" is too short: give at least 2s, or none`},
	{"ttl", "0", `"0" is too short: give at least 2s, or none`},
	{"ttl", "forever", `"forever" is not a duration: give a number with a unit, such as 90s or 1h30m, or none`},
	{"wait", "none", `"none" is not a duration: give a number with a unit, such as 90s or 1h30m, or forever`},
	{"wait", "-1", `"-1" has no unit: give a number with a unit, such as 90s or 1h30m, or forever`},
	{"wait", "99999999999999h", `"99999999999999h" is too long: give at most 87600h, or forever`},
	{"wait", "87601h", `"87601h" is too long: give at most 87600h, or forever`},
	{"on-busy", "replace", `"replace" is none of skip and wait`},
	{"busy-exit", "600", `"600" is out of range: give 0 to 125, but not 64, 69, 70 or 74`},
	{"busy-exit", "126", `"126" is out of range: give 0 to 125, but not 64, 69, 70 or 74`},
	{"busy-exit", "-1", `"-1" is out of range: give 0 to 125, but not 64, 69, 70 or 74`},
	{"busy-exit", "69", `"69" means something else here: give 0 to 125, but not 64, 69, 70 or 74`},
	{"busy-exit", "no", `"no" is not an exit code: give 0 to 125, but not 64, 69, 70 or 74`},
	{"quiet", "maybe", `"maybe" is neither true nor false`},
	{"if-unavailable", "wait", `"wait" is none of fail, skip and run`},
	{"min-hold", "1x", `"1x" is not a duration: give a number with a unit, such as 90s or 1h30m`},
	{"min-interval", "1d", `"1d" is not a duration: give a number with a unit, such as 90s or 1h30m`},
	{"once-per", "7h", `"7h" does not divide a day: give a length that divides a day, such as 1h or 1d`},
	{"once-per", "48h", `"48h" does not divide a day: give a length that divides a day, such as 1h or 1d`},
	{"once-per", "1ms", `"1ms" is too short: give at least 1s`},
	{"once-per", "7d", `"7d" is not a duration: give a number with a unit, such as 90s or 1h30m, or 1d`},
	{"applied-if", "", "it is empty: give a command for sh -c, or leave it out"},
	{"check-timeout", "0", `"0" is too short: give at least 1ms`},
	{"max-run", "forever", `"forever" is not a duration: give a number with a unit, such as 90s or 1h30m`},
	{"drain", "none", `"none" is not a duration: give a number with a unit, such as 90s or 1h30m, or forever`},
	{"grace", "-1ns", `"-1ns" is negative: give at least 0s, or auto`},
	{"margin", "1,5s", `"1,5s" is not a duration: give a number with a unit, such as 90s or 1h30m, or auto`},
	{"renew-every", "0", `"0" is too short: give at least 1ms, or auto`},
	{"clock-drift", "1", `"1" has no per cent sign: give 0% to 50%, such as 1%`},
	{"clock-drift", "51%", `"51%" is out of range: give 0% to 50%, such as 1%`},
	{"clock-drift", "NaN%", `"NaN%" is not a percentage: give 0% to 50%, such as 1%`},
	{"clock-drift", "-1%", `"-1%" is out of range: give 0% to 50%, such as 1%`},
	{"on-lost", "ignore", `"ignore" is none of kill and term`},
	{"stop-signal", "LOUD", `"LOUD" is not a signal: give a name such as TERM, a number or RTMIN+1`},
	{"stop-signal", "KILL", `"KILL" cannot be caught, and comes by itself when --grace is over: give one that a command can end by, such as TERM, INT or QUIT`},
	{"stop-signal", "SIGSTOP", `"SIGSTOP" suspends a command: give one that a command can end by, such as TERM, INT or QUIT`},
	{"stop-signal", "tstp", `"tstp" suspends a command: give one that a command can end by, such as TERM, INT or QUIT`},
	{"stop-signal", "17", `"17" does not end a command: give one that a command can end by, such as TERM, INT or QUIT`},
	{"stop-signal", "CONT", `"CONT" does not end a command: give one that a command can end by, such as TERM, INT or QUIT`},
	{"stop-signal", "33", `"33" belongs to the C library: give one that a command can end by, such as TERM, INT or QUIT`},
	{"leftovers", "keep", `"keep" is none of kill, wait and ignore`},
	{"isolate", "vm", `"vm" is none of auto, tree, cgroup and pidns`},
	{"slots", "0", `"0" is out of range: give 1 to 1000`},
	{"slots", "1001", `"1001" is out of range: give 1 to 1000`},
	{"slots", "two", `"two" is not a number: give 1 to 1000`},
	{"holder", "", "it is empty: give a label, or leave it out for the host name and pid"},
	{"holder", "a\x1b[2Jb", `"a\x1b[2Jb" has control characters or is not UTF-8: give a label for people`},
	{"report", "", "it is empty: give a file for the report, or leave it out"},
	{"verbose", "2", `"2" is neither true nor false`},
	{"log-level", "loud", `"loud" is none of debug, info, warn and error`},
	{"log-format", "xml", `"xml" is none of text and json`},
}

// C44: the same words from all places, 64 from the command line and 78 from anywhere else, and nothing is touched.
func TestABadValueIsRefusedInTheSameWordsWhereverItCameFrom(t *testing.T) {
	covered := map[string]bool{"config": true}
	for _, r := range refusals {
		covered[r.flag] = true
		for _, source := range []string{sourceFlag, sourceEnvironment, sourceFile, sourceSection} {
			t.Run(fmt.Sprintf("%s=%q from %s", r.flag, r.value, source), func(t *testing.T) {
				w := newWorld(t)
				args, want, wantCode := []string{commandOf(r.flag)}, "", runner.ExitSettings
				switch source {
				case sourceFlag:
					args, want, wantCode = append(args, "--"+r.flag+"="+r.value), "--"+r.flag, runner.ExitUsage
				case sourceEnvironment:
					w.setenv(variableOf(r.flag) + "=" + r.value)
					want = variableOf(r.flag)
				case sourceFile:
					w.file(fmt.Sprintf("\n%s: %q\n", r.flag, r.value))
					want = w.systemFile + ": line 2: " + r.flag
				case sourceSection:
					w.file(fmt.Sprintf("leases:\n  n.X:\n    %s: %q\n", r.flag, r.value))
					want = w.systemFile + `: line 3: leases: "n.X": ` + r.flag
				}
				code, out, errs := w.do(append(args, "n.X", "--", "true")...)
				want = "underlease: " + want + ": " + r.words + "\n"
				if code != wantCode || out != "" || errs != want {
					t.Errorf("got %d, %q and\n%s want %d, nothing and\n%s", code, out, errs, wantCode, want)
				}
				w.untouched()
			})
		}
	}
	newFlags(&settings{}, nil).VisitAll(func(f *pflag.Flag) {
		if !covered[f.Name] {
			t.Errorf("--%s has no row", f.Name)
		}
	})
}

// commandOf returns the command that has a flag.
func commandOf(flag string) string {
	if slices.Contains(gateFlags, flag) {
		return "gate"
	}
	return "run"
}

// acceptances are values that every source takes, and what becomes of them.
var acceptances = []struct {
	flag, value string
	want        any
	got         func(*world) any
}{
	{"backend", "mem:x", "mem:x", func(w *world) any { return w.opened[0] }},
	{"namespace", "blue", "blue", func(w *world) any { return w.spec().Namespace }},
	{"ttl", "90s", 90 * time.Second, func(w *world) any { return w.spec().TTL }},
	{"ttl", "none", time.Duration(0), func(w *world) any { return w.spec().TTL }},
	{"wait", "0", time.Duration(0), func(w *world) any { return w.spec().Wait }},
	{"wait", "1h30m", 90 * time.Minute, func(w *world) any { return w.spec().Wait }},
	{"wait", "forever", runner.Forever, func(w *world) any { return w.spec().Wait }},
	{"on-busy", "wait", runner.Forever, func(w *world) any { return w.spec().Wait }},
	{"if-unavailable", "run", runner.UnavailableRun, func(w *world) any { return w.spec().IfUnavailable }},
	{"min-hold", "30s", 30 * time.Second, func(w *world) any { return w.spec().MinHold }},
	{"min-interval", "20h", 20 * time.Hour, func(w *world) any { return w.spec().Once.Interval }},
	{"once-per", "1d", 24 * time.Hour, func(w *world) any { return w.spec().Once.Per }},
	{"once-per", "15m", 15 * time.Minute, func(w *world) any { return w.spec().Once.Per }},
	{"once-per", "0", time.Duration(0), func(w *world) any { return w.spec().Once.Per }},
	{"max-run", "1s", time.Second, func(w *world) any { return w.spec().MaxRun }},
	{"drain", "0", time.Duration(0), func(w *world) any { return w.spec().Drain }},
	{"drain", "forever", runner.Forever, func(w *world) any { return w.spec().Drain }},
	{"grace", "1.5s", 1500 * time.Millisecond, func(w *world) any { return w.spec().Grace }},
	{"margin", "300ms", 300 * time.Millisecond, func(w *world) any { return w.spec().Margin }},
	{"renew-every", "3s", 3 * time.Second, func(w *world) any { return w.spec().RenewEvery }},
	{"clock-drift", "2.5%", 0.025, func(w *world) any { return w.spec().ClockDrift }},
	{"clock-drift", "0", 0.0, func(w *world) any { return w.spec().ClockDrift }},
	{"on-lost", "term", runner.LostTerm, func(w *world) any { return w.spec().OnLost }},
	{"stop-signal", "SIGINT", syscall.SIGINT, func(w *world) any { return w.spec().StopSignal }},
	{"stop-signal", "WINCH", syscall.SIGWINCH, func(w *world) any { return w.spec().StopSignal }},
	{"stop-signal", "RTMIN+3", syscall.Signal(37), func(w *world) any { return w.spec().StopSignal }},
	{"leftovers", "wait", signals.LeftoversWait, func(w *world) any { return w.spec().Leftovers }},
	{"isolate", "cgroup", signals.IsolateCgroup, func(w *world) any { return w.spec().Isolate }},
	{"slots", "3", 3, func(w *world) any { return w.spec().Slots }},
	{"holder", "db 1", "db 1", func(w *world) any { return w.spec().Holder }},
}

// anotherValue is one that a flag takes too, or the same where there is no other.
func anotherValue(flag, value string) string {
	for _, a := range acceptances {
		if a.flag == flag && a.value != value {
			return a.value
		}
	}
	return value
}

// Of two settings that say one thing in two ways the stronger one wins, and what is as strong is a contradiction.
func TestTheStrongerOfTwoSettingsWins(t *testing.T) {
	path := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(path, []byte("mem://of-the-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, file, env string
		args            []string
		store           string // empty: 78
		wait            time.Duration
	}{
		{"flag over environment", "", "UNDERLEASE_BACKEND_FILE=" + path, []string{"--backend=mem://flag"}, "mem://flag", 0},
		{"flag over file", "backend-file: " + path, "", []string{"--backend=mem://flag"}, "mem://flag", 0},
		{"environment over file", "backend: mem://top", "UNDERLEASE_BACKEND_FILE=" + path, nil, "mem://of-the-file", 0},
		{"section over top", "backend-file: " + path + "\nleases: {n: {backend: \"mem://section\"}}", "", nil, "mem://section", 0},
		{"two flags", "", "", []string{"--backend=mem://flag", "--backend-file=" + path}, "", 0},
		{"two keys", "backend-file: " + path + "\nbackend: mem://top", "", nil, "", 0},
		{"a wait over a word", "on-busy: wait", "", []string{"--backend=mem:", "--wait=1s"}, "mem:", time.Second},
		{"a word over a wait", "", "UNDERLEASE_WAIT=1s", []string{"--backend=mem:", "--on-busy=wait"}, "mem:", runner.Forever},
		{"a wait and a word", "", "", []string{"--backend=mem:", "--on-busy=wait", "--wait=1s"}, "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			if c.file != "" {
				w.file(c.file + "\n")
			}
			if c.env != "" {
				w.setenv(c.env)
			}
			code, _, errs := w.do(append(append([]string{"run"}, c.args...), "n", "--", "true")...)
			if c.store == "" {
				if code != runner.ExitSettings {
					t.Errorf("got %d and %q, want 78", code, errs)
				}
				return
			}
			if code != 0 || len(w.opened) != 1 || w.opened[0] != c.store || w.spec().Wait != c.wait {
				t.Errorf("got %d, %q, the stores %q and a wait of %v, want %s and %v", code, errs, w.opened, w.spec().Wait, c.store, c.wait)
			}
		})
	}
}

// The name of a night on which nobody looks is in the file, too.
func TestAValueInAnotherLeasesSectionIsRefused(t *testing.T) {
	w := newWorld(t)
	w.file("leases:\n  other: {max-run: 5}\n")
	if code, _, errs := w.do("run", "n", "--", "true"); code != runner.ExitSettings || !strings.Contains(errs, `line 2: leases: "other": max-run: "5" has no unit`) {
		t.Errorf("got %d and %q, want 78 and the line", code, errs)
	}
}

func TestEveryFlagIsAlsoAVariableAndAKeyOfTheFile(t *testing.T) {
	for _, a := range acceptances {
		for _, source := range []string{sourceFlag, sourceEnvironment, sourceFile, sourceSection} {
			t.Run(a.flag+"="+a.value+" from "+source, func(t *testing.T) {
				w := newWorld(t)
				args := []string{"run", "n"}
				switch source {
				case sourceFlag:
					args = append(args, "--"+a.flag, a.value) // after the name, before --
				case sourceEnvironment:
					w.setenv(variableOf(a.flag) + "=" + a.value)
				case sourceFile:
					w.file(fmt.Sprintf("%s: %s\n", a.flag, a.value))
				case sourceSection:
					w.file(fmt.Sprintf("leases: {n: {%s: %s}, other: {%s: %s}}\n", a.flag, a.value, a.flag, anotherValue(a.flag, a.value)))
				}
				if code, _, errs := w.do(append(args, "--", "true")...); code != 0 || errs != "" {
					t.Fatalf("got %d and %q, want 0 and nothing", code, errs)
				}
				if got := a.got(w); got != a.want {
					t.Errorf("got %v, want %v", got, a.want)
				}
			})
		}
	}
}

func TestAFlagWinsOverTheEnvironmentThatOverTheSectionAndThatOverTheTopLevel(t *testing.T) {
	w := newWorld(t)
	w.file("slots: 2\nleases:\n  n: {slots: 3}\n  N: {slots: 9}\n")
	user := filepath.Join(t.TempDir(), "underlease.yaml")
	if err := os.WriteFile(user, []byte("slots: 4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	step := func(want int, args ...string) {
		t.Helper()
		w.specs = nil
		if code, _, errs := w.do(append(append([]string{"run"}, args...), "--", "true")...); code != 0 {
			t.Fatalf("got %d and %q, want 0", code, errs)
		}
		if got := w.spec().Slots; got != want {
			t.Errorf("%q: got slots %d, want %d", args, got, want)
		}
	}
	step(2, "other")
	step(3, "n")
	step(9, "N") // keys count byte for byte
	w.setenv("XDG_CONFIG_HOME=" + filepath.Dir(user))
	step(4, "other") // the user's file over the host's
	step(3, "n")     // but a section over any top level
	w.setenv("UNDERLEASE_SLOTS=5")
	step(5, "n")
	step(6, "n", "--slots=6")
	step(5, "n", "--config", user) // in place of both
	w.setenv("UNDERLEASE_CONFIG=/nowhere.yaml")
	step(5, "n", "--config", user)
}

func TestWhatIsLeftOutIsTheDefault(t *testing.T) {
	w := newWorld(t)
	if code, _, errs := w.do("run", "n", "--", "echo", "a b", "", "*", "-v", "--ttl=9"); code != 0 || errs != "" {
		t.Fatalf("got %d and %q, want 0 and silence", code, errs)
	}
	s := w.spec()
	if s.TTL != 0 || s.Wait != 0 || s.Slots != 1 || s.Drain != runner.Forever || s.StopSignal != syscall.SIGTERM || s.ClockDrift != 0.01 {
		t.Errorf("got %+v, want the defaults", s)
	}
	if got, want := strings.Join(s.Args, "|"), "echo|a b||*|-v|--ttl=9"; got != want || s.Path != "/bin/echo" { // C40
		t.Errorf("got %s of %s, want %s of /bin/echo", got, s.Path, want)
	}
	if host, _ := os.Hostname(); person(s.Holder) != fmt.Sprintf("%s (pid %d)", host, os.Getpid()) {
		t.Errorf("got holder %q, want this host and pid", s.Holder)
	}
	w.specs = nil
	if code, _, errs := w.do("run", "--backend", "mem:", "n", "--", "true"); code != 0 || errs != "" {
		t.Fatalf("got %d and %q, want 0 and silence", code, errs)
	}
	if got := w.spec().TTL; got != time.Minute {
		t.Errorf("got ttl %v on a store that needs one, want 1m", got)
	}
}

func TestAWrongCommandLineIsRefusedWithTheRightForm(t *testing.T) {
	for _, c := range []struct {
		args       []string
		want, hint string
	}{
		{[]string{"run"}, "the name of the lease and the command are missing", runForm},
		{[]string{"run", "n"}, "-- is missing between the name of the lease and the command", runForm},
		{[]string{"run", "n", "backup.sh"}, "-- is missing between the name of the lease and the command", runForm},
		{[]string{"run", "n", "tar", "-czf", "x"}, "unknown flag -c", runForm},
		{[]string{"run", "--", "true"}, "the name of the lease is missing before --", runForm},
		{[]string{"run", "n", "m", "--", "true"}, `"m" stands between the name of the lease "n" and --`, runForm},
		{[]string{"run", "n", "--"}, "the command is missing after --", runForm},
		{[]string{"run", "n", "--", ""}, "the command after -- is empty", runForm},
		{[]string{"run", "--wiat", "1s", "n", "--", "true"}, "unknown flag --wiat", "did you mean --wait"},
		{[]string{"run", "--also", "m", "n", "--", "true"}, "unknown flag --also", ""},
		{[]string{"run", "-x", "n", "--", "true"}, "unknown flag -x", ""},
		{[]string{"run", "n", "--ttl"}, "--ttl needs a value: give one duration", runForm},
		{[]string{"run", "--=", "n", "--", "true"}, `"--=" is not a flag`, ""},
		{[]string{"run", "", "--", "true"}, "the name is empty: give 1 to 200 bytes", ""},
		{[]string{"run", "..", "--", "true"}, `the name ".." is not allowed: choose another`, ""},
		{[]string{"run", "a\x1bb", "--", "true"}, `the name "a\x1bb" has the control character U+001B`, ""},
		{[]string{"run", strings.Repeat("x", 201), "--", "true"}, "the name has 201 bytes: at most 200 are allowed", ""},
		{[]string{"rnu", "n", "--", "true"}, `unknown command "rnu"`, "did you mean underlease run"},
		{[]string{"elect"}, `unknown command "elect"`, "underlease --help lists the commands"},
		{[]string{"--nope"}, "unknown flag --nope", ""},
		{[]string{"config", "a", "b"}, `"b" stands after the name of the lease "a"`, "underlease config [flags] [NAME]"},
		{[]string{"config", "a,b"}, `the name "a,b" has a comma, which separates the terms of several leases`, ""},
		{[]string{"completion"}, "the name of a shell is missing", "write it as: underlease completion bash, zsh or fish"},
		{[]string{"completion", "nosuch"}, `there is no completion for "nosuch"`, "write it as: underlease completion bash, zsh or fish"},
		{[]string{"completion", "powershell"}, `there is no completion for "powershell"`, "write it as: underlease completion bash, zsh or fish"},
		{[]string{"completion", "zhs"}, `there is no completion for "zhs"`, "did you mean underlease completion zsh"},
		{[]string{"completion", "bash", "x"}, `"x" stands after the name of the shell`, "write it as: underlease completion bash, zsh or fish"},
		{[]string{"gate"}, "the ID and the command are missing", gateForm},
		{[]string{"gate", "id", "migrate.sh"}, "-- is missing between the ID and the command", gateForm},
		{[]string{"gate", "id", "tar", "-czf", "x"}, "unknown flag -c", gateForm},
		{[]string{"gate", "a,b", "--", "true"}, `the name "a,b" has a comma, which separates the terms of several leases`, ""},
		{[]string{"gate", "--slots=2", "id", "--", "true"}, "unknown flag --slots", ""},
		{[]string{"gate", "--once-per=1h", "id", "--", "true"}, "unknown flag --once-per", ""},
		{[]string{"run", "--applied-if=true", "n", "--", "true"}, "unknown flag --applied-if", ""},
		{[]string{"marker"}, "the word after marker is missing", markerForm},
		{[]string{"marker", "shw", "x"}, `marker knows no "shw"`, "did you mean underlease marker show"},
		{[]string{"marker", "nothing"}, `marker knows no "nothing"`, markerForm},
		{[]string{"marker", "list", "x"}, `"x" stands after marker list`, "write it as: underlease marker list"},
		{[]string{"marker", "show"}, "the ID is missing", "write it as: underlease marker show ID"},
		{[]string{"marker", "set", "a", "b"}, `"b" stands after the ID "a"`, "write it as: underlease marker set ID"},
		{[]string{"marker", "clear", ".."}, `the name ".." is not allowed: choose another`, ""},
		{[]string{"marker", "show", "--reason=x", "a"}, "unknown flag --reason", "did you mean --json"},
		{[]string{"marker", "set", "--reason=a\nb", "a"}, `--reason: "a\nb" has control characters or is not UTF-8: give a text for people`, ""},
		{[]string{"marker", "set", "--ttl=1m", "a"}, "unknown flag --ttl", ""},
		{[]string{"help", "rnu"}, `unknown command "rnu"`, "did you mean underlease run"},
		{[]string{"help", "nosuch"}, `unknown command "nosuch"`, "underlease --help lists the commands"},
		{[]string{"help", "run", "x"}, `"x" stands after the name of the command`, "underlease help [COMMAND]"},
		{[]string{"version", "x"}, `"x" stands after version`, "underlease version [--json]"},
	} {
		w := newWorld(t)
		code, out, errs := w.do(c.args...)
		want := "underlease: " + c.want + "\n"
		if c.hint != "" {
			want += "underlease: hint: " + c.hint + "\n"
		}
		if code != runner.ExitUsage || out != "" || errs != want {
			t.Errorf("%q: got %d, %q and\n%s want 64, nothing and\n%s", c.args, code, out, errs, want)
		}
		w.untouched()
	}
}

// C60: what the rule allows reaches the runner byte for byte.
func TestNamesReachTheRunnerAsTheyAre(t *testing.T) {
	for _, name := range []string{strings.Repeat("é", 100), "a/b", "a:b", "日本", "a b", "-"} {
		w := newWorld(t)
		if code, _, errs := w.do("run", name, "--", "true"); code != 0 {
			t.Errorf("%q: got %d and %q, want 0", name, code, errs)
			continue
		}
		if got := w.spec().Lease; got != name {
			t.Errorf("got %q, want %q", got, name)
		}
	}
}

func TestSettingsThatContradictEachOtherAre78(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "url")
	if err := os.WriteFile(secret, []byte("mem:\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if err := os.WriteFile(open, []byte("mem:\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o622); err != nil {
		t.Fatal(err)
	}
	leaky := filepath.Join(dir, "leaky")
	if err := os.WriteFile(leaky, []byte("host/db?password=hunter2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--backend-file", leaky}, "--backend-file: " + leaky + ": the URL of the store has no scheme\n"},
		{[]string{"--grace", "40s", "--ttl", "30s"}, "--ttl 30s"},
		{[]string{"--backend", "mem:", "--ttl", "none"}, "--ttl none works only"},
		{[]string{"--backend", "mem:", "--backend-file", secret}, "both --backend and --backend-file name the store"},
		{[]string{"--backend-file", open}, "--backend-file: " + open + " can be written by others than its owner (mode 0622)\nunderlease: hint: chmod go-w " + open + "\n"},
		{[]string{"--backend-file", dir + "/none"}, "--backend-file: " + dir + "/none: no such file or directory\n"},
		{[]string{"--backend-file", "/dev/null"}, "--backend-file: /dev/null: the URL of the store is empty\nunderlease: hint: write file:"},
		{[]string{"--on-busy", "wait", "--wait", "5s"}, "--on-busy says to wait without an end, and --wait says to wait 5s\n"},
		{[]string{"--config", dir + "/none.yaml"}, "--config: cannot read the settings file: " + dir + "/none.yaml: no such file or directory\n"},
		{[]string{"--config", dir}, "--config: cannot read the settings file: " + dir + ": is a directory\n"},
		{[]string{"--report", dir}, "--report: " + dir + " is a directory: name a file\n"},
		{[]string{"--report", dir + "/no/report"}, "--report: cannot write into the directory of " + dir + "/no/report: no such file or directory\n"},
	} {
		w := newWorld(t)
		code, out, errs := w.do(append(append([]string{"run"}, c.args...), "n", "--", "true")...)
		if code != runner.ExitSettings || out != "" || !strings.HasPrefix(errs, "underlease: "+c.want) || strings.Contains(errs, "hunter2") {
			t.Errorf("%q: got %d, %q and %q, want 78 and %q", c.args, code, out, errs, c.want)
		}
		w.untouched()
	}
	w := newWorld(t)
	if code, _, errs := w.do("run", "--backend-file", secret, "n", "--", "true"); code != 0 || errs != "" || w.opened[0] != "mem:" {
		t.Errorf("got %d, %q and store %q, want the one of the file", code, errs, w.opened)
	}
}

func TestABackendFileOfAnotherUserIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(path, []byte("mem:\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := trusted(f, os.Geteuid()); err != nil {
		t.Errorf("got %v for a file of our own, want none", err)
	}
	if os.Geteuid() == 0 { // it is root's, and becomes another's
		if err := trusted(f, 77); err != nil {
			t.Errorf("got %v for a file of root, want none", err)
		}
		if err := os.Chown(path, 78, 0); err != nil {
			t.Fatal(err)
		}
	}
	err = trusted(f, 77)
	want := fmt.Sprintf("%s belongs to the user %d, who could send this run to another store", path, inode(t, path).Uid)
	if err == nil || err.Error() != want || backends.Hint(err) != "give it to root, or to the user 77, who runs this" {
		t.Errorf("got %v (%s), want %s and a hint", err, backends.Hint(err), want)
	}
	r, w := pipe(t)
	if _, err := w.WriteString("mem:\n"); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if got, err := readBackendFile("/dev/fd/" + itoa(r.Fd())); got != "mem:" || err != nil {
		t.Errorf("got %q and %v from a pipe, want its URL", got, err)
	}
}

func TestAWrongSettingsFileIsRefusedWithFileLineAndKey(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", "backend: 'file:'\nwiat: 1s\n", "line 2: unknown key \"wiat\"\nunderlease: hint: did you mean wait\n"},
		{"unknown key in the section of another lease", "leases:\n  x:\n    zzzz: 1\n", "line 3: unknown key \"zzzz\"\nunderlease: hint: underlease config shows all settings\n"},
		{"upper case", "Wait: 1s\n", "line 1: unknown key \"Wait\"\nunderlease: hint: did you mean wait\n"},
		{"later setting", "restart: always\n", "line 1: unknown key \"restart\"\n"},
		{"another file", "config: x\n", "line 1: a settings file cannot name another one\n"},
		{"twice", "wait: 1s\nttl: 60s\nwait: 2s\n", "line 3: \"wait\" stands twice: also in line 1\n"},
		{"section twice", "leases:\n  a: {wait: 1s}\n  a: {wait: 2s}\n", "line 3: \"a\" stands twice: also in line 2\n"},
		{"list for a value", "wait:\n  - 1s\n", "line 2: wait is a list: give one duration\n"},
		{"table for a value", "busy-exit: {a: 1}\n", "line 1: busy-exit is a table: give one code\n"},
		{"nothing for a value", "ttl:\n", "line 1: ttl has no value: give one, or remove the line\n"},
		{"list for the file", "- a\n", "line 1: the file is a list: give keys with values, such as ttl: 60s\n"},
		{"word for the file", "ttl 60s\n", "line 1: the file is a single value: give keys with values, such as ttl: 60s\n"},
		{"value for leases", "leases: yes\n", "line 1: leases is a single value: give keys with values, such as ttl: 60s\n"},
		{"value for a section", "leases:\n  n: 2m\n", "line 2: the section of \"n\" is a single value: give keys with values, such as ttl: 60s\n"},
		{"bad name of a section", "leases:\n  'a,b': {}\n", "line 2: leases: the name \"a,b\" has a comma"},
		{"list as a key", "? [a]\n: b\n", "line 1: a key is a list: give a name\n"},
		{"merge key", "leases:\n  a: &a {wait: 1s}\n  b:\n    <<: *a\n", "line 4: the key << is not known here"},
		{"two documents", "wait: 1s\n---\nwait: 2s\n", "line 2: a second document begins, of which nothing would be read\n"},
		{"not YAML", "wait: [1s\n", "not YAML: line 1: did not find expected"},
		{"not UTF-8", "wait: 1s\n# \xff\n", "line 2: not UTF-8\n"},
		{"a key with a dot", "leases.n.wait: 1s\n", "line 1: unknown key \"leases.n.wait\"\n"},
		{"control characters", "\"a\\e[2J\": 1\n", "line 1: unknown key \"a\\x1b[2J\"\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.file(c.text)
			code, out, errs := w.do("run", "n", "--", "true")
			want := "underlease: " + w.systemFile + ": " + c.want
			if code != runner.ExitSettings || out != "" || !strings.HasPrefix(errs, want) {
				t.Errorf("got %d, %q and\n%s want 78 and\n%s", code, out, errs, want)
			}
			w.untouched()
		})
	}
	for _, text := range []string{"", "# nothing\n", "---\n", "null\n", "leases: {}\n", "leases: {n: {}}\n", "\ufeffwait: 1s\n"} {
		w := newWorld(t)
		w.file(text)
		if code, _, errs := w.do("run", "n", "--", "true"); code != 0 || errs != "" {
			t.Errorf("%q: got %d and %q, want a run", text, code, errs)
		}
	}
	w := newWorld(t)
	w.file("#" + strings.Repeat("x", maxSettingsFile))
	code, _, errs := w.do("run", "n", "--", "true")
	if want := w.systemFile + " has more than 1048576 bytes"; code != 78 || !strings.Contains(errs, want) {
		t.Errorf("got %d and %q, want 78 and %q", code, errs, want)
	}
}

func TestADefaultFileThatIsThereAndCannotBeReadIs78(t *testing.T) {
	w := newWorld(t)
	w.systemFile = t.TempDir() // a directory: root reads any file
	code, _, errs := w.do("run", "n", "--", "true")
	if want := "underlease: cannot read the settings file: " + w.systemFile + ": is a directory\n"; code != 78 || !strings.HasPrefix(errs, want) {
		t.Errorf("got %d and %q, want 78 and %q", code, errs, want)
	}
	w.untouched()
}

func TestWithoutHomeThereIsNoUsersFile(t *testing.T) {
	w := newWorld(t)
	w.environ = nil
	if code, _, errs := w.do("run", "n", "--", "true"); code != 0 || errs != "" {
		t.Errorf("got %d and %q, want a run", code, errs)
	}
}

func TestAVariableThatIsNeitherSettingNorFactIsNamedOnce(t *testing.T) {
	w := newWorld(t)
	for _, fact := range runner.Facts() {
		w.setenv(fact + "=x")
	}
	w.setenv("UNDERLEASE_TLL=9s")
	w.setenv("UNDERLEASE_METRICS_FILE=/x")
	code, _, errs := w.do("run", "n", "--", "true")
	want := "underlease: warning: UNDERLEASE_TLL is in the environment, and is not a setting\n" +
		"underlease: hint: did you mean UNDERLEASE_TTL\n" +
		"underlease: warning: UNDERLEASE_METRICS_FILE is in the environment, and is not a setting\n"
	if code != 0 || errs != want {
		t.Errorf("got %d and\n%s want 0 and\n%s", code, errs, want)
	}
	if _, _, errs := w.do("run", "--log-level=error", "n", "--", "true"); errs != "" {
		t.Errorf("got %q at level error, want nothing", errs)
	}
}

func TestAShortTTLIsWarnedAbout(t *testing.T) {
	w := newWorld(t)
	_, _, errs := w.do("run", "--ttl", "3s", "n", "--", "true")
	if want := "underlease: warning: --ttl 3s is below 10s: a store that is away for a moment stops the command\n"; errs != want {
		t.Errorf("got %q, want %q", errs, want)
	}
}

func TestACommandThatCannotRunIsFoundBeforeAnythingIsAsked(t *testing.T) {
	for name, want := range map[string]int{"nowhere": runner.ExitNotFound, "forbidden": runner.ExitCannotRun} { // C46
		w := newWorld(t)
		code, _, errs := w.do("run", "n", "--", name)
		if code != want || !strings.HasPrefix(errs, "underlease: "+name) {
			t.Errorf("%s: got %d and %q, want %d", name, code, errs, want)
		}
		w.untouched()
	}
}

func TestTheStoresRefusalHasItsOwnCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
		errs string
	}{
		{backends.Configf("name a directory", "no HOME"), 78, "underlease: no HOME\nunderlease: hint: name a directory\n"},
		{backends.Denied(nil, "/var/lib is not ours"), 77, "underlease: /var/lib is not ours\n"},
		{backends.Broken(nil, "a foreign record"), 76, "underlease: a foreign record\n"},
	} {
		w := newWorld(t)
		w.openErr = c.err
		code, _, errs := w.do("run", "n", "--", "true")
		if code != c.code || errs != c.errs {
			t.Errorf("%v: got %d and %q, want %d and %q", c.err, code, errs, c.code, c.errs)
		}
		if l, cl := w.launched.Load(), w.closed.Load(); l != 1 || cl != 1 {
			t.Errorf("got %d guardians and %d sent away, want 1 and 1", l, cl)
		}
	}
}

// A store that cannot be opened for now is one that does not answer.
func TestAStoreThatCannotBeOpenedForNowIsUnavailable(t *testing.T) {
	for _, c := range []struct {
		args    []string
		code    int
		errs    string
		started bool
	}{
		{nil, 69, "underlease: too many open files\nunderlease: hint: ulimit\n", false},
		{[]string{"--wait=forever"}, 69, "underlease: too many open files\nunderlease: hint: ulimit\n", false},
		{[]string{"--if-unavailable=skip", "-q"}, 75, "", false},
		{[]string{"--if-unavailable=skip"}, 75, "underlease: skipped: too many open files\nunderlease: hint: ulimit\n", false},
		{[]string{"--if-unavailable=skip", "--busy-exit=5"}, 5, "underlease: skipped: too many open files\nunderlease: hint: ulimit\n", false},
		{[]string{"--if-unavailable=run"}, 7, "underlease: running \"n\" without a lease: too many open files\n", true},
	} {
		for _, err := range []error{backends.Unavailable(nil, "too many open files"), errors.New("too many open files")} {
			w := newWorld(t)
			w.run = runner.Run
			w.openErr = backends.WithHint(err, "ulimit")
			path := filepath.Join(t.TempDir(), "report")
			code, _, errs := w.do(append(append([]string{"run", "--backend=mem://u:hunter2@h", "--report=" + path}, c.args...), "n", "--", "true")...)
			if code != c.code || errs != c.errs {
				t.Errorf("%q: got %d and %q, want %d and %q", c.args, code, errs, c.code, c.errs)
			}
			got := read(t, path)
			for _, part := range []string{fmt.Sprintf(`"started":%t`, c.started), `"term":null`, `"store":"mem://u:xxxxx@h"`} {
				if !strings.Contains(got, part) {
					t.Errorf("%q: got report %s, want %s", c.args, got, part)
				}
			}
		}
	}
}

func TestABugKillsTheTreeAndIs70(t *testing.T) {
	for _, c := range []struct {
		name    string
		during  func(runner.Tree) // what was done with the tree before
		startEr error
		started bool
	}{
		{"before the start", func(runner.Tree) {}, nil, false},
		{"after a start that was refused", start, &signals.StartError{Path: "true", Errno: syscall.ENOEXEC}, false},
		{"after a start without an answer", start, errors.New("no answer"), true},
		{"after the start", start, nil, true},
	} {
		w := newWorld(t)
		w.startErr = c.startEr
		w.during = func(_ runner.Spec, p runner.Platform) {
			tree, err := p.Launch()
			if err != nil {
				t.Error(err)
			}
			c.during(tree)
			panic("lost the thread")
		}
		path := filepath.Join(t.TempDir(), "report")
		code, _, errs := w.do("run", "--report", path, "n", "--", "true")
		if code != runner.ExitBug || !strings.HasPrefix(errs, "underlease: a bug of underlease: lost the thread (at cmd_test.go:") {
			t.Errorf("%s: got %d and %q, want 70 and the place", c.name, code, errs)
		}
		if w.killed.Load() != 1 {
			t.Errorf("%s: got %d kills of the tree, want 1", c.name, w.killed.Load())
		}
		if got, want := read(t, path), fmt.Sprintf(`"started":%t`, c.started); !strings.Contains(got, `"outcome":"bug"`) || !strings.Contains(got, want) {
			t.Errorf("%s: got report %s, want outcome bug and %s", c.name, got, want)
		}
	}
}

func start(t runner.Tree) { _, _ = t.Start(signals.Command{}, signals.Deadlines{}) }

// A fault beside the decision is passed on with its own stack: the place is that of the fault.
func TestABugThatWasPassedOnIsReportedWhereItArose(t *testing.T) {
	w := newWorld(t)
	w.during = func(runner.Spec, runner.Platform) {
		bugs := make(chan *runner.Bug)
		go func() {
			defer func() { bugs <- &runner.Bug{Value: recover(), Stack: debug.Stack()} }()
			faulty(nil)
		}()
		panic(<-bugs)
	}
	code, _, errs := w.do("run", "--log-level=debug", "n", "--", "true")
	if want := "underlease: a bug of underlease: assignment to entry in nil map (at faulty_test.go:7)\n"; code != 70 || !strings.Contains(errs, want) {
		t.Errorf("got %d and %q, want 70 and %q", code, errs, want)
	}
	if !strings.Contains(errs, "cmd.faulty(") {
		t.Errorf("got %q, want the stack of the fault", errs)
	}
}

// Around us may be another underlease, to which a guardian that outlives us is a process left behind.
func TestNoGuardianOutlivesARunWithoutACommand(t *testing.T) {
	w := newWorld(t)
	w.result = runner.Result{Outcome: runner.OutcomeInterrupted, Signal: syscall.SIGTERM, ExitCode: 143}
	left := int32(-1)
	w.dieBy = func(syscall.Signal) { left = w.launched.Load() - w.closed.Load() }
	if code, _, _ := w.do("run", "n", "--", "true"); code != 143 || left != 0 {
		t.Errorf("interrupted in its wait: got %d and %d guardians at the end, want 143 and none", code, left)
	}

	w = newWorld(t)
	w.startErr = &signals.StartError{TooLate: true}
	w.result = runner.Result{Outcome: runner.OutcomeInterrupted, Signal: syscall.SIGTERM, ExitCode: 143}
	w.during = func(_ runner.Spec, p runner.Platform) {
		for range 2 {
			tree, err := p.Launch()
			if err != nil {
				t.Error(err)
			}
			start(tree)
		}
	}
	left = -1
	w.dieBy = func(syscall.Signal) { left = w.launched.Load() - w.closed.Load() }
	if code, _, _ := w.do("run", "n", "--", "true"); code != 143 || left != 0 {
		t.Errorf("interrupted after starts that came too late: got %d and %d guardians at the end, want 143 and none", code, left)
	}
}

func TestOnlyTheFirstGuardianIsLaunchedEarly(t *testing.T) {
	w := newWorld(t)
	w.during = func(_ runner.Spec, p runner.Platform) {
		for range 2 {
			tree, err := p.Launch()
			if err != nil {
				t.Error(err)
			}
			start(tree)
		}
	}
	if code, _, errs := w.do("run", "n", "--", "true"); code != 0 || w.launched.Load() != 2 || w.closed.Load() != 0 {
		t.Errorf("got %d, %q, %d launched and %d closed, want 0, 2 and 0", code, errs, w.launched.Load(), w.closed.Load())
	}
	for _, args := range [][]string{{"run", "--help"}, {"config"}, {"version"}, {}} {
		w := newWorld(t)
		w.do(args...)
		if n := w.launched.Load(); n != 0 {
			t.Errorf("%q: got %d guardians, want none", args, n)
		}
	}
}

func TestTheRunnersResultBecomesTheExitCode(t *testing.T) {
	held := &backends.BusyError{Lease: "n", Holder: "db1/4711/00c0ffee", Since: time.Date(2026, 11, 30, 3, 0, 2, 0, time.UTC), Left: 40*time.Second + 1}
	const line = "underlease: busy: \"n\" is held by db1 (pid 4711) since 03:00:02, 41s left\n"
	busy := runner.Result{Outcome: runner.OutcomeBusy, Reason: "unused", ExitCode: runner.ExitBusy, Busy: held}
	for _, c := range []struct {
		name   string
		args   []string
		result runner.Result
		code   int
		errs   string
	}{
		{"ok", nil, runner.Result{Outcome: runner.OutcomeOK, Started: true}, 0, ""},
		{"failed", nil, runner.Result{Outcome: runner.OutcomeFailed, Started: true, ExitCode: 3}, 3, ""},
		{"busy", nil, busy, 75, line},
		{"busy with another code", []string{"--busy-exit=0"}, busy, 0, line},
		{"busy and quiet", []string{"-q", "--busy-exit=7"}, busy, 7, ""},
		{"75 of the command", []string{"--busy-exit=0"}, runner.Result{Outcome: runner.OutcomeFailed, Started: true, ExitCode: 75}, 75, ""},
		{"skipped without the store", []string{"-q", "--busy-exit=9"}, runner.Result{Outcome: runner.OutcomeUnavailable, ExitCode: runner.ExitBusy, Reason: "no answer"}, 9, "underlease: no answer\n"},
		{"lost", []string{"-q"}, runner.Result{Outcome: runner.OutcomeLostTaken, Started: true, ExitCode: 74, Reason: "the lease was taken", Hint: "look"}, 74, "underlease: the lease was taken\nunderlease: hint: look\n"},
	} {
		w := newWorld(t)
		w.result = c.result
		code, _, errs := w.do(append(append([]string{"run"}, c.args...), "n", "--", "true")...)
		if code != c.code || errs != c.errs {
			t.Errorf("%s: got %d and %q, want %d and %q", c.name, code, errs, c.code, c.errs)
		}
	}
	w := newWorld(t)
	w.result = runner.Result{Outcome: runner.OutcomeFailed, Started: true, ExitCode: 143, Signal: syscall.SIGTERM}
	if code, _, _ := w.do("run", "n", "--", "true"); w.diedBy != syscall.SIGTERM || code != 143 {
		t.Errorf("got death by %v and %d, want TERM, and 143 where it does not end us", w.diedBy, code)
	}
}

func TestAnOutcomeIsOneLogRecordWithJSON(t *testing.T) {
	w := newWorld(t)
	w.result = runner.Result{Outcome: runner.OutcomeBusy, ExitCode: 75, Waited: 1500 * time.Millisecond, Busy: &backends.BusyError{Lease: "n", Holder: "h", Left: backends.Forever}}
	code, _, errs := w.do("run", "--log-format=json", "n", "--", "true")
	for _, part := range []string{`"level":"WARN"`, `"msg":"outcome"`, `"outcome":"busy"`, `"exit_code":75`, `"waited_for_ms":1500`, `"reason":"busy: \"n\" is held by h"`} {
		if code != 75 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, part) {
			t.Errorf("got %d and %q, want 75 and one line with %s", code, errs, part)
		}
	}
	code, _, errs = w.do("run", "--ttl=soon", "--log-format=json", "n", "--", "true")
	if code != 64 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, `"outcome":"invalid"`) {
		t.Errorf("got %d and %q, want 64 and one record", code, errs)
	}
}

func TestCompletionScriptsAreWritten(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		code, out, errs := newWorld(t).do("completion", shell)
		if code != 0 || errs != "" || !strings.Contains(out, "underlease") || len(out) < 1000 {
			t.Errorf("%s: got %d, %d bytes and %q, want a script", shell, code, len(out), errs)
		}
	}
	_, out, _ := newWorld(t).do("__complete", "run", "--leftovers", "")
	if want := "kill\nwait\nignore\n"; !strings.HasPrefix(out, want) {
		t.Errorf("got %q, want %q first", out, want)
	}
	_, out, _ = newWorld(t).do("__complete", "run", "--isolate", "")
	if want := "auto\ntree\ncgroup\npidns\n"; !strings.HasPrefix(out, want) {
		t.Errorf("got %q, want %q first", out, want)
	}
}

// What was asked for and cannot be had is found before the store is asked, and before there is a report of a run.
func TestAnIsolationThatCannotBeHadIsRefusedBeforeTheStoreIsAsked(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		env  string
		want string
	}{
		{"flag", []string{"--isolate=cgroup"}, "", "underlease: --isolate cgroup: /sys/fs/cgroup is mounted read-only\n"},
		{"variable", nil, "UNDERLEASE_ISOLATE=cgroup", "underlease: UNDERLEASE_ISOLATE cgroup: /sys/fs/cgroup is mounted read-only\n"},
		{"relation", []string{"--isolate=pidns", "--leftovers=ignore"}, "", "underlease: --isolate pidns and --leftovers ignore do not go together"},
	} {
		w := newWorld(t)
		w.cannot = map[signals.Isolation]error{signals.IsolateCgroup: errors.New("/sys/fs/cgroup is mounted read-only")}
		if c.env != "" {
			w.environ = append(w.environ, c.env)
		}
		code, _, errs := w.do(append(append([]string{"run"}, c.args...), "n", "--", "true")...)
		if code != 78 || !strings.HasPrefix(errs, c.want) || len(w.opened) != 0 || len(w.specs) != 0 {
			t.Errorf("%s: got %d, %q, stores %q and %d runs, want 78, %q and nothing touched", c.name, code, errs, w.opened, len(w.specs), c.want)
		}
	}
	w := newWorld(t)
	if code, _, errs := w.do("run", "n", "--", "true"); code != 0 || w.spec().Isolate != signals.IsolateAuto {
		t.Errorf("got %d, %q and isolation %q, want auto", code, errs, w.spec().Isolate)
	}
}

func TestWhatCannotBeWrittenToStandardOutputIs71(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, line := range []string{
		"version", "version --json", "version --help", "--version", "config", "config n --json", "config --help", "run --help", "--help",
		"list --help", "status --help",
		"help", "help run", "completion bash", "completion zsh", "completion fish", "completion --help",
	} {
		w := newWorld(t)
		w.full = full
		code, _, errs := w.do(strings.Fields(line)...)
		if want := "underlease: cannot write to standard output: no space left on device\n"; code != runner.ExitSystem || errs != want {
			t.Errorf("%s: got %d and %q, want 71 and %q", line, code, errs, want)
		}
	}
}

func TestHelpFitsAScreenAndNamesEveryFlag(t *testing.T) {
	w := newWorld(t)
	code, out, errs := w.do("run", "--help")
	if code != 0 || errs != "" || out != runHelp {
		t.Fatalf("got %d, %q and\n%s want the help on standard output", code, errs, out)
	}
	if n := strings.Count(out, "\n"); n > 50 {
		t.Errorf("got %d lines, want at most 50", n)
	}
	for i, line := range strings.Split(out, "\n") {
		if len(line) > 80 {
			t.Errorf("line %d has %d columns, want at most 80", i+1, len(line))
		}
	}
	newFlags(&settings{}, nil).VisitAll(func(f *pflag.Flag) {
		out := out
		if commandOf(f.Name) == "gate" {
			out = gateHelp
		}
		if !strings.Contains(out, "--"+f.Name+" ") && !strings.Contains(out, "--"+f.Name+"\n") {
			t.Errorf("--%s is not in the help", f.Name)
		}
	})
	if code, out, errs := newWorld(t).do(); code != 64 || out != "" || errs != rootHelp {
		t.Errorf("got %d, %q and %q, want 64 and the short help on standard error", code, out, errs)
	}
	for _, args := range [][]string{{"--help"}, {"help"}, {"-h"}} {
		if code, out, errs := newWorld(t).do(args...); code != 0 || out != rootHelp || errs != "" {
			t.Errorf("%q: got %d, %q and %q, want 0 and the short help", args, code, out, errs)
		}
	}
	for args, want := range map[string]string{"help run": runHelp, "gate --help": gateHelp, "help marker": markerHelp, "marker set --help": markerHelp, "config --help": configHelp, "version -h": versionHelp, "completion --help": completionHelp, "help completion": completionHelp, "help help": rootHelp} {
		if code, out, _ := newWorld(t).do(strings.Fields(args)...); code != 0 || out != want {
			t.Errorf("%s: got %d and %q, want 0 and %q", args, code, out, want)
		}
	}
}

func TestVersionSaysWhatWasBuilt(t *testing.T) {
	code, out, _ := newWorld(t).do("version", "--json")
	for _, key := range []string{`"version":`, `"commit":`, `"go": "go1.`, `"platform": "`} {
		if code != 0 || !strings.Contains(out, key) {
			t.Errorf("got %d and %s, want %s", code, out, key)
		}
	}
	if code, out, _ := newWorld(t).do("version"); code != 0 || !strings.HasPrefix(out, "underlease ") {
		t.Errorf("got %d and %q, want a version", code, out)
	}
	if code, out, _ := newWorld(t).do("--version"); code != 0 || !strings.HasPrefix(out, "underlease ") {
		t.Errorf("got %d and %q, want a version", code, out)
	}
}

func TestConfigSaysWhereEachSettingCameFrom(t *testing.T) {
	w := newWorld(t)
	w.file("wait: 5s\nleases:\n  n:\n    busy-exit: 0\n    ttl: 40s\n")
	w.setenv("UNDERLEASE_BACKEND=mem://u:hunter2@h/db?token=hunter2&a=b")
	code, out, errs := w.do("config", "n", "--grace", "5s")
	if code != 0 || errs != "" || strings.Contains(out, "hunter2") {
		t.Fatalf("got %d, %q and\n%s want 0 and no secret", code, errs, out)
	}
	got := map[string]string{}
	for line := range strings.SplitSeq(out, "\n") {
		if f := strings.Fields(line); len(f) > 2 {
			got[f[0]] = strings.Join(f[1:], " ")
		}
	}
	for name, want := range map[string]string{
		"backend":     "mem://u:xxxxx@h/db?token=xxxxx&a=xxxxx UNDERLEASE_BACKEND",
		"wait":        "5s " + w.systemFile + ":1",
		"busy-exit":   "0 " + w.systemFile + ":4 (leases: n)",
		"ttl":         "40s " + w.systemFile + ":5 (leases: n)",
		"grace":       "5s --grace",
		"drain":       "forever default",
		"margin":      "250ms default",
		"clock-drift": "1% default",
		"stop-signal": "TERM default",
		"holder":      `"" default`,
	} {
		if got[name] != want {
			t.Errorf("%s: got %q, want %q", name, got[name], want)
		}
	}
	if !strings.HasPrefix(out, "# "+w.systemFile+": read\n") {
		t.Errorf("got %q first, want the file that was read", out[:60])
	}
	if _, out, _ := w.do("config", "--applied-if", "psql postgres://u:hunter2@h/db -c 'select 1'"); strings.Contains(out, "hunter2") || !strings.Contains(out, "u:xxxxx@h/db") {
		t.Errorf("got\n%s want the check without its password", out)
	}
	code, out, _ = w.do("config", "--json")
	if code != 0 || !strings.Contains(out, `"lease": null`) || !strings.Contains(out, `"source": "environment"`) || strings.Contains(out, "hunter2") {
		t.Errorf("got %d and %s, want JSON without a section and without a secret", code, out)
	}
	code, out, errs = w.do("config", "n", "--grace", "50s")
	if code != 78 || !strings.Contains(out, "50s") || !strings.HasPrefix(errs, "underlease: --ttl 40s") {
		t.Errorf("got %d, %q and %q, want the settings, and 78 for what does not fit together", code, out, errs)
	}
	w.untouched()
}

// What config prints is what a flag takes: else nobody could copy it.
func TestEverySettingIsReadBackAsItIsWritten(t *testing.T) {
	for _, a := range acceptances {
		s := settings{}
		schemes := map[string]backends.Scheme{"mem": {}, "file": {}}
		flags := newFlags(&s, schemes)
		f := flags.Lookup(a.flag)
		if err := f.Value.Set(a.value); err != nil {
			t.Fatal(err)
		}
		text, before := f.Value.String(), s
		if err := f.Value.Set(text); err != nil || s != before {
			t.Errorf("--%s %s: got %q back, and %v", a.flag, a.value, text, err)
		}
	}
}

func TestNoSecretOfAURLIsShown(t *testing.T) {
	for raw, want := range map[string]string{
		"file:":                              "file:",
		"file:///a?network=1":                "file:///a?network=1",
		"redis://:pw@h:1/0":                  "redis://:xxxxx@h:1/0",
		"redis://u:pw@h":                     "redis://u:xxxxx@h",
		"x://h?password=pw&PassWord=pw&db=1": "x://h?password=xxxxx&PassWord=xxxxx&db=1",
		"x://h?pasword=misspelt":             "x://h?pasword=xxxxx",
		"x://h?pass%77ord=pw":                "x://h?pass%77ord=xxxxx",
		"x:u:pw@h":                           "x:xxxxx@h",
		"x://h:port":                         masked,
	} {
		if got := mask(raw); got != want {
			t.Errorf("%s: got %s, want %s", raw, got, want)
		}
	}
}

func FuzzSettings(f *testing.F) {
	f.Add([]byte("backend: 'file:'\nttl: 60s\nleases:\n  a.B: {ttl: 2m, busy-exit: 0}\n"))
	f.Add([]byte("leases: &a {n: *a}\n"))
	f.Add([]byte("? [1]\n: 2\n"))
	f.Add([]byte("wait: !!binary aGk=\n"))
	f.Add([]byte("\xff\xfe"))
	f.Add([]byte("a: 1\n--- b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := settings{}
		flags := newFlags(&s, map[string]backends.Scheme{"file": {}})
		_, err := load(flags, "n", nil, []readFile{{path: "the-file", data: data}})
		if err == nil {
			return
		}
		var bad *failure
		if !errors.As(err, &bad) || bad.code != runner.ExitSettings || !strings.HasPrefix(bad.text, "the-file: ") {
			t.Errorf("got %v, want an error that begins with the file", err)
		}
	})
}
