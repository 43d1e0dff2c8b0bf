package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
)

// shelf is a store with leases to be looked at. Whatever else is asked of it is a bug.
type shelf struct {
	backends.Backend
	states []backends.State
	err    error
	before func() // each answer
	asked  []string
}

func (s *shelf) Close() error { return nil }

func (s *shelf) Inspect(_ context.Context, namespace, lease string) (backends.State, error) {
	s.asked = append(s.asked, "inspect "+backends.Display(namespace, lease))
	if s.before != nil {
		s.before()
	}
	for _, state := range s.states {
		if state.Lease == lease {
			return state, s.err
		}
	}
	return backends.State{}, s.err
}

func (s *shelf) List(_ context.Context, namespace string) ([]backends.State, error) {
	s.asked = append(s.asked, "list "+namespace)
	if s.before != nil {
		s.before()
	}
	return s.states, s.err
}

// walkway is a shelf that shows one lease after the other, with an error each where there is one.
type walkway struct {
	shelf
	errs map[string]error
}

func (w *walkway) Walk(_ context.Context, _ string, show func(backends.State, error) bool) error {
	for _, s := range w.states {
		if w.before != nil {
			w.before()
		}
		if !show(s, w.errs[s.Lease]) {
			return nil
		}
	}
	return w.err
}

func (w *world) stock(b backends.Backend) {
	w.open = func(_ context.Context, raw string) (*backends.Store, error) {
		w.opened = append(w.opened, raw)
		return &backends.Store{Backend: b, Address: mask(raw), Endless: true}, w.openErr
	}
}

// since is a little before the fake time of day.
var since = time.Date(2026, 11, 30, 11, 59, 2, 345, time.UTC)

func shownStates() []backends.State {
	return []backends.State{
		{Lease: "empty"},
		{Lease: "free", Slots: []backends.SlotState{
			{Term: 1700000000001, Last: backends.End{Outcome: "failed", ExitCode: 3, Took: 61200 * time.Millisecond}},
		}},
		{Lease: "held", Waiters: new(2), Slots: []backends.SlotState{
			{Term: 1700000000002, Held: true, Holder: "db1/4711/0badcafe", Since: since, Left: backends.Forever, Last: backends.End{Outcome: "none"}},
			{
				Slot: 2, Term: 1700000000003, Held: true, Holder: "a label", Since: since.AddDate(0, 0, -1), Left: 40100 * time.Millisecond,
				Ask: &backends.Ask{Kind: backends.AskStop, Reason: "upgrade", By: "ann", At: since}, Last: backends.End{Outcome: "unknown"},
			},
		}},
		{Lease: "kept", Slots: []backends.SlotState{
			{Term: 1700000000004, Kept: true, Holder: "db2/12/00000000", Since: since, Left: time.Second, Last: backends.End{Outcome: "ok", Took: 120 * time.Millisecond}},
		}},
	}
}

const heading = "LEASE  SLOT  STATE  HOLDER  SINCE  LEFT  TERM  LAST\n"

func TestTheTableSaysWhoHoldsWhat(t *testing.T) {
	w := newWorld(t)
	w.stock(&shelf{states: shownStates()})
	code, out, errs := w.do("list")
	want := `
LEASE  SLOT  STATE                HOLDER          SINCE                LEFT  TERM           LAST
empty  -     free                 -               -                    -     -              -
free   0     free                 -               -                    -     1700000000001  failed (3) after 1m1s
held   0     held, 2 waiting      db1 (pid 4711)  11:59:02             -     1700000000002  -
held   2     held, asked to stop  "a label"       2026-11-29 11:59:02  41s   1700000000003  unknown
kept   0     kept                 db2 (pid 12)    11:59:02             1s    1700000000004  ok after 120ms
`
	if code != 0 || errs != "" || "\n"+out != want {
		t.Errorf("got %d, %q and\n%s\nwant 0 and%s", code, errs, out, want)
	}
}

func TestJSONSaysTheSameAndMore(t *testing.T) {
	w := newWorld(t)
	w.stock(&shelf{states: shownStates()})
	code, out, errs := w.do("list", "--json", "--namespace", "team")
	lines := strings.Split(out, "\n")
	want := []string{
		`{"version":1,"store":"file:","namespace":"team","at":"2026-11-30T12:00:00Z","leases":[`,
		`{"lease":"empty","namespace":"","busy":null,"held":0,"kept":0,"waiters":null,"slots":[]},`,
		`{"lease":"free","namespace":"","busy":null,"held":0,"kept":0,"waiters":null,"slots":[{"slot":0,"state":"free","term":1700000000001,"holder":null,"host":null,"pid":null,"since":null,"left_ms":0,"ask":null,"last":{"outcome":"failed","exit_code":3,"took_ms":61200}}]},`,
		`{"lease":"held","namespace":"","busy":null,"held":2,"kept":0,"waiters":2,"slots":[{"slot":0,"state":"held","term":1700000000002,"holder":"db1/4711/0badcafe","host":"db1","pid":4711,"since":"2026-11-30T11:59:02.000000345Z","left_ms":null,"ask":null,"last":{"outcome":"none","exit_code":null,"took_ms":null}},` +
			`{"slot":2,"state":"held","term":1700000000003,"holder":"a label","host":null,"pid":null,"since":"2026-11-29T11:59:02.000000345Z","left_ms":40100,"ask":{"kind":"stop","reason":"upgrade","by":"ann","at":"2026-11-30T11:59:02.000000345Z"},"last":{"outcome":"unknown","exit_code":null,"took_ms":null}}]},`,
		`{"lease":"kept","namespace":"","busy":null,"held":0,"kept":1,"waiters":null,"slots":[{"slot":0,"state":"kept","term":1700000000004,"holder":"db2/12/00000000","host":"db2","pid":12,"since":"2026-11-30T11:59:02.000000345Z","left_ms":1000,"ask":null,"last":{"outcome":"ok","exit_code":0,"took_ms":120}}]}`,
		`],"errors":[],"exit_code":0}`, ``,
	}
	if code != 0 || errs != "" || !slices.Equal(lines, want) {
		t.Errorf("got %d, %q and\n%s\nwant 0 and\n%s", code, errs, out, strings.Join(want, "\n"))
	}
	if !json.Valid([]byte(out)) {
		t.Errorf("got %s, want JSON", out)
	}
}

func TestStatusSaysByItsCodeWhetherARunWouldFindItHeld(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		busy string
	}{
		{"free", 0, "false"},
		{"empty", 0, "false"},
		{"never", 0, "false"},
		{"held", 75, "true"},
		{"kept", 75, "true"},
		{"held --slots 2", 0, "false"}, // slot 1 was never used
		{"--slots=3 held", 0, "false"},
		{"--slots 2 kept", 0, "false"},
		{"--busy-exit 0 held", 75, "true"}, // which is about runs
	} {
		w := newWorld(t)
		s := &shelf{states: shownStates()}
		w.stock(s)
		args := append([]string{"status"}, strings.Fields(c.args)...)
		code, out, errs := w.do(args...)
		if code != c.code || errs != "" || !strings.HasPrefix(out, "LEASE ") || strings.Count(out, "\n") < 2 {
			t.Errorf("status %s: got %d, %q and %q, want %d and a table", c.args, code, out, errs, c.code)
		}
		code, out, _ = w.do(append(args, "--json")...)
		if code != c.code || !strings.Contains(out, `"busy":`+c.busy) || !strings.HasSuffix(out, fmt.Sprintf(`"exit_code":%d}`+"\n", c.code)) || !json.Valid([]byte(out)) {
			t.Errorf("status %s --json: got %d and %s, want %d and busy %s", c.args, code, out, c.code, c.busy)
		}
		if code, out, errs := w.do(append(args, "-q")...); code != c.code || out != "" || errs != "" {
			t.Errorf("status %s -q: got %d, %q and %q, want %d alone", c.args, code, out, errs, c.code)
		}
		for _, asked := range s.asked {
			if !strings.HasPrefix(asked, "inspect ") {
				t.Errorf("status %s asked for %s, want one lease", c.args, asked)
			}
		}
	}
	for states, want := range map[int]int{1: 0, 2: 0, 3: 75, 4: 75} { // all of them
		w := newWorld(t)
		w.stock(&shelf{states: shownStates()[:states]})
		if code, _, _ := w.do("status"); code != want {
			t.Errorf("status of %d leases: got %d, want %d", states, code, want)
		}
	}
}

// What a crontab says about its runs must not make a look silent.
func TestOnlyAFlagMakesALookSilent(t *testing.T) {
	w := newWorld(t)
	w.stock(&shelf{states: shownStates()})
	w.setenv("UNDERLEASE_QUIET=1")
	if _, out, _ := w.do("status", "held"); out == "" {
		t.Error("got nothing, want the table")
	}
}

func TestALookGoesWhereARunWouldGo(t *testing.T) {
	w := newWorld(t)
	s := &shelf{}
	w.stock(s)
	w.file("backend: mem:top\nnamespace: team\nleases:\n  n: {backend: 'mem:section', slots: 2}\n")
	w.do("list")
	w.do("status", "n")
	w.do("status", "--backend=file:///flag", "n")
	w.setenv("UNDERLEASE_BACKEND=file:///variable")
	w.do("status", "n")
	if want := []string{"mem:top", "mem:section", "file:///flag", "file:///variable"}; !slices.Equal(w.opened, want) {
		t.Errorf("got the stores %q, want %q", w.opened, want)
	}
	if want := []string{"list team", "inspect team/n", "inspect team/n", "inspect team/n"}; !slices.Equal(s.asked, want) {
		t.Errorf("got %q, want %q", s.asked, want)
	}
}

func TestTheHelpOfALookFitsAScreen(t *testing.T) {
	for args, want := range map[string]string{"list --help": listHelp, "help list": listHelp, "status -h": statusHelp, "help status": statusHelp} {
		code, out, errs := newWorld(t).do(strings.Fields(args)...)
		if code != 0 || out != want || errs != "" {
			t.Errorf("%s: got %d, %q and %q, want 0 and %q", args, code, out, errs, want)
		}
		for line := range strings.Lines(out) {
			if len(line) > 81 {
				t.Errorf("%s: got a line of %d columns, want at most 80: %s", args, len(line)-1, line)
			}
		}
	}
}

func TestAWrongLookIsRefused(t *testing.T) {
	for args, want := range map[string]string{
		"list x":         `64 underlease: "x" stands after list` + "\nunderlease: hint: underlease status NAME shows one lease\n",
		"status a b":     `64 underlease: "b" stands after the name of the lease "a"` + "\nunderlease: hint: " + statusForm + "\n",
		"status ..":      `64 underlease: the name ".." is not allowed: choose another` + "\n",
		"status --ttl=x": "64 underlease: --ttl: \"x\" is not a duration: give a number with a unit, such as 90s or 1h30m, or none\n",
		"list --jsn":     "64 underlease: unknown flag --jsn\nunderlease: hint: did you mean --json\n",
		"list --config=": "64 underlease: --config: it is empty: give a settings file, or leave it out\n",
	} {
		w := newWorld(t)
		w.stock(&shelf{})
		code, out, errs := w.do(strings.Fields(args)...)
		if got := fmt.Sprintf("%d %s", code, errs); got != want || out != "" {
			t.Errorf("%s: got %q and %q, want %q", args, got, out, want)
		}
		if len(w.opened) != 0 {
			t.Errorf("%s: the store was opened", args)
		}
	}
}

func TestAnEmptyStoreIsNoError(t *testing.T) {
	w := newWorld(t)
	w.stock(&shelf{})
	code, out, errs := w.do("list")
	if want := "underlease: there is no lease in file:\n"; code != 0 || out != heading || errs != want {
		t.Errorf("got %d, %q and %q, want 0, the heading and %q", code, out, errs, want)
	}
	code, out, errs = w.do("list", "--namespace", "team")
	if want := "underlease: there is no lease in the namespace \"team\" of file:\n"; code != 0 || out != heading || errs != want {
		t.Errorf("got %d, %q and %q, want 0, the heading and %q", code, out, errs, want)
	}
	code, out, errs = w.do("list", "--json")
	if want := `{"version":1,"store":"file:","namespace":"","at":"2026-11-30T12:00:00Z","leases":[` + "\n" + `],"errors":[],"exit_code":0}` + "\n"; code != 0 || out != want || errs != "" {
		t.Errorf("got %d, %q and %q, want 0 and %q", code, out, errs, want)
	}
	if code, out, errs := w.do("list", "-q"); code != 0 || out != "" || errs != "" {
		t.Errorf("list -q: got %d, %q and %q, want nothing", code, out, errs)
	}
}

func TestAStoreThatCannotBeLookedAtHasItsOwnCode(t *testing.T) {
	for _, c := range []struct {
		err     error
		code    int
		outcome runner.Outcome
	}{
		{backends.WithHint(backends.Unavailable(nil, "the store is away"), "start it"), 69, runner.OutcomeUnavailable},
		{errors.New("of no kind"), 69, runner.OutcomeUnavailable},
		{backends.Broken(nil, "a foreign record"), 76, runner.OutcomeBroken},
		{backends.Denied(nil, "no right"), 77, runner.OutcomeDenied},
		{backends.Configf("", "not like this"), 78, runner.OutcomeInvalid},
	} {
		for _, args := range [][]string{{"list"}, {"status", "n"}} {
			for _, opening := range []bool{true, false} {
				w := newWorld(t)
				s := &shelf{err: c.err}
				w.stock(s)
				if opening {
					s.err, w.openErr = nil, c.err
				}
				code, _, errs := w.do(args...)
				if code != c.code || !strings.HasPrefix(errs, "underlease: "+c.err.Error()+"\n") {
					t.Errorf("%v, while opening %t: %v: got %d and %q, want %d", args, opening, c.err, code, errs, c.code)
				}
				code, out, _ := w.do(append(args, "--json")...)
				var got struct {
					Leases []any
					Errors []struct{ Outcome, Text, Hint string }
					Exit   int `json:"exit_code"`
				}
				if err := json.Unmarshal([]byte(out), &got); err != nil || code != c.code || got.Exit != c.code || len(got.Leases) != 0 || len(got.Errors) != 1 ||
					got.Errors[0].Outcome != string(c.outcome) || got.Errors[0].Text != c.err.Error() || got.Errors[0].Hint != backends.Hint(c.err) {
					t.Errorf("%v --json: %v: got %d, %v and %s, want one error", args, c.err, code, err, out)
				}
			}
		}
	}
	// Below a heading there would be nothing.
	w := newWorld(t)
	w.stock(&shelf{err: backends.Unavailable(nil, "away")})
	if _, out, _ := w.do("list"); out != "" {
		t.Errorf("got %q on standard output, want nothing", out)
	}
}

func TestWhatCannotBeShownIsNamedAndTheOthersAreShown(t *testing.T) {
	w := newWorld(t)
	w.stock(&walkway{
		shelf: shelf{states: []backends.State{{}, {Lease: "a"}, {Lease: "b"}, {Lease: "c"}, {Lease: "d"}}},
		errs: map[string]error{
			"":  backends.Denied(nil, "no right"),
			"b": backends.WithHint(backends.Broken(nil, "/b is damaged"), "move it away"),
			"d": backends.Unavailable(nil, "/d is locked"),
		},
	})
	code, out, errs := w.do("list")
	wantOut := `
LEASE  SLOT  STATE    HOLDER  SINCE  LEFT  TERM  LAST
a      -     free     -       -      -     -     -
b      -     unknown  -       -      -     -     -
c      -     free     -       -      -     -     -
d      -     unknown  -       -      -     -     -
`
	wantErrs := "underlease: no right\nunderlease: /b is damaged\nunderlease: hint: move it away\nunderlease: /d is locked\n"
	if code != 76 || "\n"+out != wantOut || errs != wantErrs {
		t.Errorf("got %d, %q and\n%s\nwant 76, %q and%s", code, errs, out, wantErrs, wantOut)
	}
	code, out, _ = w.do("list", "--json")
	want := `],"errors":[
{"lease":null,"outcome":"denied","text":"no right","hint":""},
{"lease":"b","outcome":"broken","text":"/b is damaged","hint":"move it away"},
{"lease":"d","outcome":"unavailable","text":"/d is locked","hint":""}
],"exit_code":76}
`
	if code != 76 || !strings.HasSuffix(out, want) || !json.Valid([]byte(out)) {
		t.Errorf("got %d and\n%s\nwant 76 and at the end\n%s", code, out, want)
	}

	var many walkway
	many.errs = map[string]error{}
	for i := range 1000 {
		name := fmt.Sprintf("%04d", i)
		many.states = append(many.states, backends.State{Lease: name})
		many.errs[name] = backends.Broken(nil, "%s is damaged", name)
	}
	w.stock(&many)
	_, _, errs = w.do("list")
	if want := "underlease: 900 more leases cannot be shown\nunderlease: hint: --json names all of them\n"; strings.Count(errs, "damaged") != 100 || !strings.HasSuffix(errs, want) {
		t.Errorf("got %d damaged and %q, want 100 and %q", strings.Count(errs, "damaged"), errs, want)
	}
}

// A terminal would do what a holder's label tells it.
func TestNoEscapeSequenceOfAStoreReachesATerminal(t *testing.T) {
	evil := "\x1b]0;owned\a\x9b31m\u009b2J\u202e\x7f\r\nx\U000E0041\xff"
	w := newWorld(t)
	w.stock(&walkway{
		shelf: shelf{states: []backends.State{
			{Lease: "l" + evil, Slots: []backends.SlotState{{
				Held: true, Holder: "h" + evil, Since: since, Left: time.Second,
				Ask: &backends.Ask{Kind: backends.AskBreak, Reason: evil, By: evil}, Last: backends.End{Outcome: evil},
			}, {Slot: 1, Held: true, Holder: "h" + evil + "/4711/0badcafe"}}},
			{Lease: "broken" + evil},
		}},
		errs: map[string]error{"broken" + evil: backends.WithHint(backends.Broken(nil, "%s", evil), "%s", evil)},
	})
	for _, args := range [][]string{{"list"}, {"list", "--json"}, {"status"}, {"status", "--json", "x"}, {"__complete", "status", ""}} {
		_, out, errs := w.do(args...)
		for stream, got := range map[string]string{"output": out, "error": errs} {
			if !isHarmless(strings.ReplaceAll(strings.ReplaceAll(got, "\n", ""), "\t", "")) {
				t.Errorf("%q: standard %s is %q, want nothing that a terminal acts on", args, stream, got)
			}
		}
		if slices.Contains(args, "list") && strings.Count(out, "\n") > 5 {
			t.Errorf("%q: got %q, want a line each", args, out)
		}
	}
	// As an escape, a reader of JSON gets all of it but what is no UTF-8.
	_, out, _ := w.do("list", "--json")
	var got struct{ Leases []struct{ Lease string } }
	if err := json.Unmarshal([]byte(out), &got); err != nil || len(got.Leases) != 1 || got.Leases[0].Lease != "l"+strings.ToValidUTF8(evil, "\ufffd") {
		t.Errorf("got %q and %v, want the name", got, err)
	}
}

func TestAStoreThatIsSilentIsUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // where no time passes while somebody has something to do
		never := make(chan struct{})
		defer close(never)
		shown := 0
		err := answers(t.Context(), "redis://db1", 50*time.Millisecond, func(_ context.Context, show func(backends.State, error) bool) error {
			show(backends.State{}, nil)
			<-never // and the context is not heeded
			return nil
		}, func(backends.State, error) { shown++ })
		if want := "redis://db1 did not answer within 50ms"; !errors.Is(err, backends.ErrUnavailable) || err.Error() != want || shown != 1 {
			t.Errorf("got %v after %d leases, want %s after 1", err, shown, want)
		}
		err = answers(t.Context(), "", 10*time.Millisecond, func(ctx context.Context, _ func(backends.State, error) bool) error {
			<-ctx.Done()
			return backends.Denied(nil, "the store's own words")
		}, nil)
		if !errors.Is(err, backends.ErrDenied) {
			t.Errorf("got %v, want the store's own words", err)
		}
		err = answers(t.Context(), "", 10*time.Millisecond, func(ctx context.Context, _ func(backends.State, error) bool) error {
			<-ctx.Done()
			return nil // cut short
		}, nil)
		if !errors.Is(err, backends.ErrUnavailable) {
			t.Errorf("got %v for half an answer, want ErrUnavailable", err)
		}
	})
}

// The first rows do not wait for the last.
func TestALongListIsWrittenAsItComes(t *testing.T) {
	for _, args := range [][]string{{"list"}, {"list", "--json"}} {
		w := newWorld(t)
		var long walkway
		for i := range 10000 {
			long.states = append(long.states, backends.State{Lease: "lease-" + strconv.Itoa(i)})
		}
		r, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		first := make(chan string, 1)
		go func() {
			b := make([]byte, 1<<10)
			n, _ := r.Read(b)
			first <- string(b[:n])
			for err == nil {
				_, err = r.Read(b)
			}
		}()
		w.full = write
		looks := 0
		long.before = func() {
			if looks++; looks == len(long.states) {
				select {
				case text := <-first:
					if !strings.Contains(text, "lease-0") {
						t.Errorf("%q: got %q first, want the first lease", args, text)
					}
				case <-time.After(20 * time.Second):
					t.Errorf("%q: nothing was written before the last lease was looked at", args)
				}
			}
		}
		w.stock(&long)
		if code, _, errs := w.do(args...); code != 0 || errs != "" {
			t.Errorf("%q: got %d and %q, want 0", args, code, errs)
		}
		_ = write.Close()
	}
}

func TestABugWhileLookingIs70(t *testing.T) {
	w := newWorld(t)
	w.stock(&shelf{before: func() { panic("told to") }})
	for _, args := range [][]string{{"list"}, {"status", "n"}} {
		if code, _, errs := w.do(args...); code != 70 || !strings.Contains(errs, "a bug of underlease: told to (at list_test.go:") {
			t.Errorf("%q: got %d and %q, want 70 and where it was", args, code, errs)
		}
	}
}

func TestNamesOfLeasesAreCompleted(t *testing.T) {
	w := newWorld(t)
	states := append(shownStates(), backends.State{Lease: "-x"}, backends.State{Lease: "fr\u202e"}, backends.State{Lease: "f\tx"})
	w.stock(&shelf{states: states})
	for args, want := range map[string]string{
		"status|":             "empty\nfree\nheld\theld by db1 (pid 4711)\nkept\theld by db2 (pid 12)\n:4\n",
		"status|f":            "free\n:4\n",
		"run|k":               "kept\theld by db2 (pid 12)\n:4\n",
		"run|--ttl|5s|e":      "empty\n:4\n",
		"status|held|":        ":4\n",
		"run|held|":           "--\n:4\n",
		"run|held|--|":        ":0\n",
		"run|held|--|cmd|./x": ":0\n",
		"list|":               ":4\n",
	} {
		code, out, _ := w.do(append([]string{"__complete"}, strings.Split(args, "|")...)...)
		if code != 0 || out != want {
			t.Errorf("%s: got %d and %q, want %q", args, code, out, want)
		}
	}
	// What is wrong is not told in the midst of a line that somebody writes.
	w.stock(&shelf{err: backends.Unavailable(nil, "away")})
	if _, out, errs := w.do("__complete", "status", ""); out != ":4\n" || strings.Contains(errs, "away") {
		t.Errorf("got %q and %q, want no names and no words", out, errs)
	}
	w.file("nonsense: 1\n")
	if _, out, errs := w.do("__complete", "status", ""); out != ":4\n" || strings.Contains(errs, "nonsense") {
		t.Errorf("got %q and %q, want no names and no words", out, errs)
	}
}

const lookVariable = "UNDERLEASE_CMD_TEST_LOOK"

// Within a look a stopped process could hold what every run of the lease has to pass through.
func TestCtrlZStopsAListBetweenTwoLooks(t *testing.T) {
	if path := os.Getenv(lookVariable); path != "" {
		lookOn(t, path)
		return
	}
	path := filepath.Join(t.TempDir(), "mu")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	caught := make(chan os.Signal, 1) // so that the child gets the signal, whatever our parent ignores
	signal.Notify(caught, syscall.SIGTSTP)
	defer signal.Stop(caught)
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestCtrlZStopsAListBetweenTwoLooks$")
	cmd.Env = append(os.Environ(), lookVariable+"="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // and no orphan, whom the kernel would not stop
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	defer func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}()
	until := time.Now().Add(time.Minute) // for all of it
	wait := func(what string, ok func() bool) {
		t.Helper()
		for !ok() {
			if time.Now().After(until) {
				t.Fatalf("waited too long for %s", what)
			}
			time.Sleep(time.Millisecond) // the pace of the looks
		}
	}
	wait("a look", func() bool { _, err := os.Stat(path); return err == nil })
	state := func() string {
		b, _ := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
		_, rest, _ := strings.Cut(string(b), ") ")
		return rest[:min(1, len(rest))]
	}
	mu, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer mu.Close()
	for range 10 {
		if err := cmd.Process.Signal(syscall.SIGTSTP); err != nil {
			t.Fatal(err)
		}
		wait("the stop", func() bool { return state() == "T" })
		if err := unix.Flock(int(mu.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			t.Fatalf("flock of a stopped look: got %v, want that nothing is locked", err)
		}
		_ = unix.Flock(int(mu.Fd()), unix.LOCK_UN)
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		wait("its going on", func() bool { return state() != "T" })
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	err = cmd.Wait()
	if ended = true; err != nil {
		t.Errorf("got %v, want that it went on to its end", err)
	}
}

// lookOn lists until somebody removes the file, which is locked during each look.
func lookOn(t *testing.T, path string) {
	w := newWorld(t)
	w.stock(&endless{path: path})
	if code, _, errs := w.do("list", "--json"); code != 0 {
		t.Errorf("got %d and %q, want 0", code, errs)
	}
}

type endless struct {
	shelf
	path string
}

func (e *endless) Walk(_ context.Context, _ string, show func(backends.State, error) bool) error {
	f, err := os.OpenFile(e.path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		_ = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		time.Sleep(3 * time.Millisecond) // a slow disk
		_, err := os.Stat(e.path)
		_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
		if err != nil {
			return nil
		}
		if !show(backends.State{Lease: "l"}, nil) {
			return nil
		}
	}
}
