package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/backends/mem"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

func TestAGateIsARunOnceForAll(t *testing.T) {
	w := newWorld(t)
	w.setenv("UNDERLEASE_CHECK_TIMEOUT=5s")
	if code, _, errs := w.do("gate", "--wait=5m", "schema-v3", "--", "migrate", "-v"); code != 0 || errs != "" {
		t.Fatalf("got %d and %q, want 0", code, errs)
	}
	s := w.spec()
	if s.Once != (runner.Once{Ever: true}) || s.Lease != "schema-v3" || s.Wait != 5*time.Minute || strings.Join(s.Args, " ") != "migrate -v" {
		t.Errorf("got %+v, want a gate of schema-v3 that waits", s)
	}
	w = newWorld(t)
	if w.do("run", "--once-per=1d", "--min-interval=20h", "n", "--", "true"); w.spec().Once != (runner.Once{Per: 24 * time.Hour, Interval: 20 * time.Hour}) {
		t.Errorf("got %+v, want what was asked for", w.spec().Once)
	}
	// Only a gate has a check, whatever the environment says.
	for command, has := range map[string]bool{"run": false, "gate": true} {
		w := newWorld(t)
		w.setenv("UNDERLEASE_APPLIED_IF=true")
		w.during = func(_ runner.Spec, p runner.Platform) {
			if got := p.Applied != nil; got != has {
				t.Errorf("%s: it has a check: %t, want %t", command, got, has)
			}
		}
		if code, _, errs := w.do(command, "n", "--", "true"); code != 0 || errs != "" {
			t.Errorf("%s: got %d and %q", command, code, errs)
		}
	}
	for _, setting := range []string{"slots: 2", "once-per: 1h", "min-interval: 1h", "if-unavailable: run"} {
		w := newWorld(t)
		w.file("leases:\n  n: {" + setting + "}\n")
		if code, _, errs := w.do("gate", "n", "--", "true"); code != runner.ExitSettings || !strings.Contains(errs, "hint: ") {
			t.Errorf("%s: got %d and %q, want 78 and what to do", setting, code, errs)
		}
		w.untouched()
	}
	// What is said for all runs of a host is not meant for its gates.
	w = newWorld(t)
	w.file("slots: 2\nonce-per: 1h\n")
	w.setenv("UNDERLEASE_MIN_INTERVAL=1h")
	if code, _, errs := w.do("gate", "n", "--", "true"); code != 0 || errs != "" || w.spec().Slots != 1 || w.spec().Once != (runner.Once{Ever: true}) {
		t.Errorf("got %d, %q and %+v, want a gate with one slot", code, errs, w.spec())
	}
}

func TestTheResultOfAGateIsALineACodeAndAReport(t *testing.T) {
	ran := runner.Ran{Term: 7, Holder: "db1/4711/00c0ffee", RunID: "n/7", Took: 3 * time.Second}
	held := &backends.BusyError{Lease: "n", Holder: "db1/4711/00c0ffee", Since: time.Date(2026, 11, 30, 3, 0, 2, 0, time.UTC), Left: 41 * time.Second}
	for _, c := range []struct {
		args   []string
		result runner.Result
		code   int
		errs   string
		report string
	}{
		{nil, runner.Result{Outcome: runner.OutcomeMigrated, Started: true, Reason: `migrated: "n" in 3s`}, 0, `migrated: "n" in 3s`, `"outcome":"migrated"`},
		{[]string{"-q"}, runner.Result{Outcome: runner.OutcomeMigrated, Started: true, Reason: "x"}, 0, "", `"outcome":"migrated"`},
		{
			nil,
			runner.Result{Outcome: runner.OutcomeApplied, Done: &runner.Done{Ran: ran, Ago: 2 * time.Hour, Left: runner.Forever}},
			0, `already applied: "n" by db1 (pid 4711) at 10:00:00`,
			`"done":{"holder":"db1/4711/00c0ffee","term":7,"run_id":"n/7","by":null,"at":"2026-11-30T10:00:00Z","ran_ms":3000,"next_at":null}`,
		},
		{
			nil,
			runner.Result{Outcome: runner.OutcomeApplied, Done: &runner.Done{By: "root@db1", Ago: 48 * time.Hour, Left: runner.Forever}},
			0, `already applied: the marker of "n" was set by root@db1 at 2026-11-28 12:00:00`,
			`"done":{"holder":null,"term":null,"run_id":null,"by":"root@db1","at":"2026-11-28T12:00:00Z","ran_ms":null,"next_at":null}`,
		},
		{
			[]string{"--applied-if=true"},
			runner.Result{Outcome: runner.OutcomeApplied, Done: &runner.Done{Left: runner.Forever}},
			0, `already applied: "n", by the check of --applied-if`, `"at":null`,
		},
		{[]string{"-q"}, runner.Result{Outcome: runner.OutcomeApplied, Done: &runner.Done{}}, 0, "", `"outcome":"already-applied"`},
		{
			nil,
			runner.Result{Outcome: runner.OutcomeSkipped, ExitCode: 75, Busy: held},
			75, `skipped: "n" is held by db1 (pid 4711) since 03:00:02, 41s left`, `"outcome":"skipped"`,
		},
		{[]string{"-q", "--busy-exit=3"}, runner.Result{Outcome: runner.OutcomeSkipped, ExitCode: 75, Busy: held}, 3, "", `"exit_code":3`},
		{
			[]string{"-q"},
			runner.Result{Outcome: runner.OutcomeFailed, Started: true, ExitCode: 3, Reason: `failed: "n" is not applied: the command exited with 3`},
			3, `failed: "n" is not applied: the command exited with 3`, `"outcome":"failed"`,
		},
		{
			[]string{"-q"},
			runner.Result{Outcome: runner.OutcomeUnrecorded, Started: true, ExitCode: 74, Reason: "done, but not recorded: gone"},
			74, "done, but not recorded: gone", `"outcome":"done-unrecorded"`,
		},
	} {
		w := newWorld(t)
		w.result = c.result
		path := filepath.Join(t.TempDir(), "report")
		code, _, errs := w.do(append(append([]string{"gate", "--report", path}, c.args...), "n", "--", "true")...)
		want := ""
		if c.errs != "" {
			want = "underlease: " + c.errs + "\n"
		}
		if code != c.code || errs != want {
			t.Errorf("got %d and %q, want %d and %q", code, errs, c.code, want)
		}
		if report := read(t, path); !strings.Contains(report, c.report) {
			t.Errorf("got the report\n%s want %s", report, c.report)
		}
	}
}

// A slot is told in the store's time, whatever the host's clock says, and in the host's zone.
func TestASlotIsToldByTheStoresClock(t *testing.T) {
	w := newWorld(t)
	w.wall = func() time.Time { return time.Date(2026, 11, 30, 12, 0, 0, 0, time.FixedZone("", 3600)) } // 11:00 UTC, and an hour behind
	w.result = runner.Result{
		Outcome: runner.OutcomeNotDue, ExitCode: 75,
		Done: &runner.Done{
			Ran: runner.Ran{Term: 7, At: time.Date(2026, 11, 30, 11, 30, 2, 0, time.UTC)}, Ago: 30 * time.Minute,
			Left: 30*time.Minute - 2*time.Second, Next: time.Date(2026, 11, 30, 13, 0, 0, 0, time.UTC),
		},
	}
	const want = `underlease: not due: "n" last ran at 12:30:02 (30m ago), and may run again at 14:00:00 (in 29m58s)` + "\n"
	if code, _, errs := w.do("run", "--once-per=1h", "n", "--", "true"); code != 75 || errs != want {
		t.Errorf("got %d and %q, want 75 and %q", code, errs, want)
	}
}

// The store says how long ago it was and how long it is to wait: a host whose clock or zone is another one says so in its own time.
func TestNotDueIsSaidInTheTimeOfTheHost(t *testing.T) {
	for zone, want := range map[*time.Location]string{
		time.UTC: `not due: "n" last ran at 11:47:59 (12m1s ago), and may run again at 12:48:00 (in 48m)`,
		time.FixedZone("", 3600+int((5*time.Minute).Seconds())): `not due: "n" last ran at 12:52:59 (12m1s ago), and may run again at 13:53:00 (in 48m)`,
		time.FixedZone("", -12*3600):                            `not due: "n" last ran at 2026-11-29 23:47:59 (12m1s ago), and may run again at 00:48:00 (in 48m)`,
	} {
		w := newWorld(t)
		w.wall = func() time.Time { return time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC).In(zone) }
		w.result = runner.Result{
			Outcome: runner.OutcomeNotDue, ExitCode: 75,
			Done: &runner.Done{Ran: runner.Ran{Term: 7}, Ago: 12*time.Minute + time.Second, Left: 48*time.Minute - time.Millisecond},
		}
		if code, _, errs := w.do("run", "--min-interval=1h", "n", "--", "true"); code != 75 || errs != "underlease: "+want+"\n" {
			t.Errorf("got %d and %q, want 75 and %q", code, errs, want)
		}
		if code, _, errs := w.do("run", "-q", "--busy-exit=0", "--once-per=1h", "n", "--", "true"); code != 0 || errs != "" {
			t.Errorf("got %d and %q, want nothing", code, errs)
		}
	}
}

func TestTheCheckSaysYesNoOrNothing(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		check string
		yes   bool
		err   string
	}{
		{"exit 0", true, ""},
		{"exit 1", false, ""},
		{"exit 2", false, "the check exited with 2, which is neither 0 (applied) nor 1 (not applied)"},
		{"nosuchcommand", false, "the check exited with 127, which is neither 0 (applied) nor 1 (not applied)"},
		{"kill -9 $$", false, "the check could not be run to its end: signal: killed"},
		{"sleep 60; exit 1", false, "the check did not end within --check-timeout 1s"},
		{`test "$UNDERLEASE_NAME" = n && test -z "$UNDERLEASE_REPORT"`, true, ""},
		{"cat; echo seen >&2; echo dropped", true, ""},
	} {
		w := newWorld(t)
		w.setenv("UNDERLEASE_REPORT=" + filepath.Join(dir, "report"))
		w.setenv("UNDERLEASE_NAME=outer")
		w.environ[1] = "PATH=" + os.Getenv("PATH")
		w.resolve = signals.Resolve
		asked := false
		w.during = func(_ runner.Spec, p runner.Platform) {
			asked = true
			yes, err := p.Applied(t.Context())
			text := ""
			if check, ok := errors.AsType[*runner.CheckError](err); ok {
				text = check.Text
			} else if err != nil {
				t.Errorf("%s: got %v, want an error of the check", c.check, err)
			}
			if yes != c.yes || text != c.err {
				t.Errorf("%s: got %t and %q, want %t and %q", c.check, yes, text, c.yes, c.err)
			}
		}
		code, out, errs := w.do("gate", "--applied-if", c.check, "--check-timeout=1s", "n", "--", "true")
		if code != 0 || out != "" || !asked {
			t.Errorf("%s: got %d and %q on standard output, asked %t", c.check, code, out, asked)
		}
		if strings.Contains(c.check, "seen") != strings.Contains(errs, "seen\n") || strings.Contains(errs, "dropped") {
			t.Errorf("%s: got %q on standard error", c.check, errs)
		}
	}
}

// What a check has started ends with it, when it is ended.
func TestACheckIsEndedWithWhatItWaitsFor(t *testing.T) {
	w := newWorld(t)
	w.environ[1] = "PATH=" + os.Getenv("PATH")
	w.resolve = signals.Resolve
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	w.during = func(_ runner.Spec, p runner.Platform) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := p.Applied(ctx)
			ended <- err
		}()
		f, err := os.Open(fifo) // returns when the grandchild has opened it
		if err != nil {
			t.Error(err)
		}
		defer f.Close()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want that it was called off", err)
		}
		if _, err := f.Read(make([]byte, 1)); err == nil || err.Error() != "EOF" {
			t.Errorf("got %v, want the end of file that the death of the last writer gives", err)
		}
	}
	w.do("gate", "--applied-if", "sh -c 'sleep 60 > "+fifo+"; true'; true", "n", "--", "true")
}

// counted is a world whose stores are in memory.
func counted(t *testing.T) (*world, *mem.Server) {
	t.Helper()
	w, server := newWorld(t), mem.NewServer(mem.Options{})
	w.schemes["mem"] = mem.Scheme(server)
	w.open = func(ctx context.Context, raw string) (*backends.Store, error) {
		return all.Open(ctx, raw, w.schemes)
	}
	w.setenv("UNDERLEASE_BACKEND=mem:")
	w.setenv("USER=ann")
	return w, server
}

func TestMarkersAreSetShownListedAndCleared(t *testing.T) {
	w, server := counted(t)
	w.wall = time.Now
	when := regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d`)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	step := func(args string, code int, out, errs string) {
		t.Helper()
		c, o, e := w.do(append([]string{"marker"}, strings.Fields(args)...)...)
		o = when.ReplaceAllString(o, "WHEN")
		if c != code || o != out || e != errs {
			t.Errorf("marker %s: got %d, %q and %q, want %d, %q and %q", args, c, o, e, code, out, errs)
		}
	}
	const said = "underlease: "
	step("list", 0, "", "")
	step("list --json", 0, "{\n  \"version\": 1,\n  \"markers\": []\n}\n", "")
	step("show v3", 1, "", said+"not applied: \"v3\" has no marker\n")
	step("show --json v3", 1, "{\n  \"version\": 1,\n  \"marker\": null,\n  \"changes\": []\n}\n", "")
	step("clear v3", 0, "", said+"the marker of \"v3\" is not set\n")
	step("set --reason=copied v3", 0, "", said+"the marker of \"v3\" was set\n")
	step("set v3", 0, "", said+"the marker of \"v3\" is set already\n")
	step("set --json v2", 0, "{\n  \"version\": 1,\n  \"id\": \"v2\",\n  \"changed\": true\n}\n", "")
	step("list", 0, "v2  WHEN  set by ann@"+host+"\nv3  WHEN  set by ann@"+host+"\n", "")
	step("list --namespace=other", 0, "", "")
	step("show v3", 0, "applied  WHEN\nby       set by ann@"+host+"\nreason   copied\nWHEN  set by ann@"+host+": copied\n", "")
	step("clear --reason=again v3", 0, "", said+"the marker of \"v3\" was cleared\n")
	step("show v3", 1, "WHEN  clear by ann@"+host+": again\nWHEN  set by ann@"+host+": copied\n", said+"not applied: \"v3\" has no marker\n")

	// What a gate has written.
	g, err := server.Open().Acquire(t.Context(), backends.Request{Lease: "v4", Holder: "db1/4711/00c0ffee", Handle: "h", Slots: 1, TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	value := fmt.Sprintf(`{"version":1,"term":%d,"holder":%q,"run_id":"v4/7","at_ms":1796040000000,"took_ms":3000,"until_ms":3100}`, g.Term, g.Holder)
	if _, err := server.Open().Records().Put(t.Context(), "", "v4", backends.Put{Key: "marker", Value: []byte(value)}, nil); err != nil {
		t.Fatal(err)
	}
	step("show v4", 0, fmt.Sprintf("applied  WHEN\nby       db1 (pid 4711), term %d, in 3s\nrun      v4/7\n", g.Term), "")
	_, out, _ := w.do("marker", "list", "--json")
	var list struct {
		Version int
		Markers []map[string]any
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || list.Version != 1 || len(list.Markers) != 2 {
		t.Fatalf("got %v and %s, want two markers", err, out)
	}
	m := list.Markers[1]
	if m["id"] != "v4" || m["holder"] != "db1/4711/00c0ffee" || m["run_id"] != "v4/7" || m["took_ms"] != 3000.0 || m["applied_at"] != "2026-11-30T12:00:00Z" || m["set_by"] != nil {
		t.Errorf("got %v, want what was written", m)
	}
}

func TestAStoreThatFailsAMarkerCommandHasItsCode(t *testing.T) {
	for fault, code := range map[string]int{"unavailable": 69, "denied": 77, "broken": 76} {
		for _, args := range []string{"list", "show x", "set x", "clear x"} {
			w, _ := counted(t)
			w.setenv("UNDERLEASE_TTL=60s") // settings of a run are known here, too
			line := append([]string{"marker"}, strings.Fields(args)...)
			got, out, errs := w.do(append(line, "--backend", "mem:?fault=any:1%2B:"+fault)...)
			if got != code || out != "" || strings.Count(errs, "\n") != 1 {
				t.Errorf("%s, %s: got %d, %q and %q, want %d and one line", fault, args, got, out, errs, code)
			}
		}
	}
	// A damaged marker can be cleared, and nothing else.
	w, server := counted(t)
	if _, err := server.Open().Records().Put(t.Context(), "", "x", backends.Put{Key: "marker", Value: []byte("yes")}, nil); err != nil {
		t.Fatal(err)
	}
	for args, code := range map[string]int{"show x": 76, "set x": 76, "list": 76} {
		if got, _, _ := w.do(append([]string{"marker"}, strings.Fields(args)...)...); got != code {
			t.Errorf("%s of a damaged marker: got %d, want %d", args, got, code)
		}
	}
	if got, _, errs := w.do("marker", "clear", "x"); got != 0 {
		t.Errorf("got %d and %q, want that it is cleared", got, errs)
	}
	if got, _, _ := w.do("marker", "show", "x"); got != exitNo {
		t.Errorf("got %d, want that there is none", got)
	}
}
