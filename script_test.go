//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/underlease/underlease/internal/needed"
	"github.com/underlease/underlease/signals"
)

// TestMain runs the tests, or is one of the programs that the scripts run.
func TestMain(m *testing.M) { testscript.Main(m, programs) }

// patience is how long a script waits for something that has to happen, on a machine that is busy with other things.
const patience = 20 * time.Second

// TestScripts runs the scripts in testdata/script, each with a state directory of its own, $WORK/state. Besides the commands of
// testscript there are:
//
//	exits STATUS CMD...            run CMD; it has to end with exactly this exit code, or by the signal of this name
//	start NAME CMD...              start CMD; what it says is in NAME.out and NAME.err; a script ends what it started
//	finish NAME STATUS             wait for its end, which has to be exactly this; stdout and stderr are what it said
//	signal SIG NAME|PIDFILE        send a signal to it, or to the process whose number is in a file
//	waitfor PATTERN FILE...        wait until every one of these files has a match
//	mark NAME                      take down this instant
//	between FROM TO LEAST MOST     compare two instants
//	overlap COUNT GLOB...          judge runs by what their commands wrote: see [checkOverlap]
//	gone GLOB...                   no process that wrote to these files is there any more
//	normalize FILE                 write FILE to stdout, with words in place of what is different every time
//	trace FILE                     write the trace of a mem: store to stdout, with its handles as A, B, ...
//
// An instant is a mark, `now`, `first:GLOB` and `last:GLOB` for the stamps that commands wrote (see program beat), or
// `begin`, `end` and `SIG` of something started: `a.begin`, `a.end`, `a.TERM`. For exits these are `begin` and `end`.
func TestScripts(t *testing.T) {
	t.Parallel()
	if os.Geteuid() == 0 { // the scripts of another user have to reach the programs and the directories
		underlease, err := exec.LookPath("underlease")
		if err != nil {
			t.Fatal(err)
		}
		for dir := filepath.Dir(underlease); dir != filepath.Clean(os.TempDir()) && dir != "/"; dir = filepath.Dir(dir) {
			open(t, dir)
		}
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		Setup:               setUp,
		Condition:           condition,
		Cmds:                commands,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
	})
}

func open(t *testing.T, dir string) {
	t.Helper()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
}

// stage is the state of one script.
type stage struct {
	procs map[string]*process
	marks map[string]signals.Instant
}

type process struct {
	cmd  *exec.Cmd
	over chan struct{} // closed at its end
	end  signals.Instant
}

type stageKey struct{}

func setUp(e *testscript.Env) error {
	if err := os.Chmod(filepath.Dir(e.WorkDir), 0o755); err != nil {
		return err
	}
	for _, entry := range e.Vars {
		// What the tests themselves are told is not for the program, which warns about settings that it does not know.
		if name, _, _ := strings.Cut(entry, "="); strings.HasPrefix(name, "UNDERLEASE_") {
			return fmt.Errorf("%s reaches the scripts", name)
		}
	}
	s := &stage{procs: map[string]*process{}, marks: map[string]signals.Instant{}}
	e.Values[stageKey{}] = s
	e.Setenv("HOME", filepath.Join(e.WorkDir, "home"))
	if underlease, err := exec.LookPath("underlease"); err == nil {
		e.Setenv("BIN", filepath.Dir(underlease))
	}
	e.Setenv("UNDERLEASE_BACKEND", "file://"+filepath.Join(e.WorkDir, "state"))
	if e.Getenv("GORACE") == "" {
		e.Setenv("GORACE", "atexit_sleep_ms=0")
	}
	e.Defer(s.clear)
	return nil
}

// clear ends what a script that failed has left.
func (s *stage) clear() {
	for _, p := range s.procs {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
		_ = p.cmd.Process.Kill() // its guardian kills the tree
		<-p.over
	}
}

// needs are what scripts ask for with [root] and [has:NAME], and what is missing where it is not there.
var needs = map[string]func() error{
	"root": func() error {
		if uid := os.Geteuid(); uid != 0 {
			return fmt.Errorf("the tests run as user %d", uid)
		}
		return nil
	},
	"bash":    program("bash"),
	"prlimit": program("prlimit"),
	"unshare": program("unshare"),
	"cgroup":  signals.IsolateCgroup.Possible,
	"pidns":   signals.IsolatePidns.Possible,
}

func program(name string) func() error {
	return func() error {
		_, err := exec.LookPath(name)
		return err
	}
}

func condition(cond string) (bool, error) {
	name := strings.TrimPrefix(cond, "has:")
	missing, ok := needs[name]
	if !ok {
		return false, fmt.Errorf("no need is called %q", name)
	}
	return missing() == nil, nil
}

// A line of a script that is passed over is not seen: here it is.
func TestWhatTheScriptsNeedIsThere(t *testing.T) {
	for name, missing := range needs {
		t.Run(name, func(t *testing.T) { needed.Require(t, name, missing()) })
	}
	scripts, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("got %d scripts and %v, want some", len(scripts), err)
	}
	for _, script := range scripts {
		text, err := os.ReadFile(script)
		if err != nil {
			t.Fatal(err)
		}
		if regexp.MustCompile(`(?m)^\[!?exec:`).Match(text) {
			t.Errorf("%s: got a condition exec:, want has:, which is looked at here", script)
		}
	}
}

var commands = map[string]func(ts *testscript.TestScript, neg bool, args []string){
	"exits":     cmdExits,
	"start":     cmdStart,
	"finish":    cmdFinish,
	"signal":    cmdSignal,
	"waitfor":   cmdWaitfor,
	"mark":      cmdMark,
	"between":   cmdBetween,
	"overlap":   cmdOverlap,
	"gone":      cmdGone,
	"normalize": cmdNormalize,
	"trace":     cmdTrace,
}

// form ends the script unless a command is used as it has to be.
func form(ts *testscript.TestScript, neg bool, ok bool, usage string) *stage {
	if neg || !ok {
		ts.Fatalf("usage: %s", usage)
	}
	return ts.Value(stageKey{}).(*stage)
}

func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	s := form(ts, neg, len(args) >= 2, "exits STATUS CMD...")
	s.marks["begin"] = signals.Now()
	err := ts.Exec(args[1], args[2:]...)
	s.marks["end"] = signals.Now()
	var state *os.ProcessState
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		state = exit.ProcessState
	} else if err != nil {
		ts.Fatalf("%s: %v", args[1], err)
	}
	checkStatus(ts, args[1], state, args[0])
}

// checkStatus compares how a process ended with a code or the name of a signal. No state is success.
func checkStatus(ts *testscript.TestScript, name string, state *os.ProcessState, want string) {
	got := "0"
	if state != nil {
		ws := state.Sys().(syscall.WaitStatus)
		got = strconv.Itoa(ws.ExitStatus())
		if ws.Signaled() {
			got = signals.Name(ws.Signal())
		}
	}
	if _, err := strconv.Atoi(want); err != nil {
		sig, err := signals.Parse(want)
		ts.Check(err)
		want = signals.Name(sig)
	}
	if got != want {
		ts.Fatalf("%s ended with %s, want %s", name, got, want)
	}
}

func cmdStart(ts *testscript.TestScript, neg bool, args []string) {
	s := form(ts, neg, len(args) >= 2, "start NAME CMD...")
	name := args[0]
	if s.procs[name] != nil {
		ts.Fatalf("%s runs already", name)
	}
	ts.Check(ts.Exec("environ")) // the only way to all variables of the script
	var environ []string
	for line := range strings.Lines(ts.ReadFile("stdout")) {
		entry, err := strconv.Unquote(strings.TrimSuffix(line, "\n"))
		ts.Check(err)
		environ = append(environ, entry)
	}
	path, err := exec.LookPath(args[1])
	ts.Check(err)
	cmd := exec.CommandContext(context.Background(), path, args[2:]...)
	cmd.Args[0] = args[1]
	cmd.Dir, cmd.Env = ts.MkAbs("."), environ
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no terminal, whoever runs the tests
	var files []*os.File
	for _, end := range []string{".out", ".err"} {
		f, err := os.Create(ts.MkAbs(name + end))
		ts.Check(err)
		files = append(files, f)
	}
	cmd.Stdout, cmd.Stderr = files[0], files[1]
	s.marks[name+".begin"] = signals.Now()
	err = cmd.Start()
	for _, f := range files {
		f.Close()
	}
	ts.Check(err)
	p := &process{cmd: cmd, over: make(chan struct{})}
	s.procs[name] = p
	go func() {
		defer close(p.over)
		_ = cmd.Wait() // the state is what is compared
		p.end = signals.Now()
	}()
}

func cmdFinish(ts *testscript.TestScript, neg bool, args []string) {
	s := form(ts, neg, len(args) == 2, "finish NAME STATUS")
	name := args[0]
	p := s.procs[name]
	if p == nil {
		ts.Fatalf("%s was not started", name)
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-p.over:
	case <-limit.C:
		ts.Fatalf("%s still runs after %v", name, patience)
	}
	delete(s.procs, name)
	s.marks[name+".end"] = p.end
	fmt.Fprint(ts.Stdout(), ts.ReadFile(name+".out"))
	fmt.Fprint(ts.Stderr(), ts.ReadFile(name+".err"))
	checkStatus(ts, name, p.cmd.ProcessState, args[1])
}

func cmdSignal(ts *testscript.TestScript, neg bool, args []string) {
	s := form(ts, neg, len(args) == 2, "signal SIG NAME|PIDFILE")
	sig, err := signals.Parse(args[0])
	ts.Check(err)
	var pid int
	if p := s.procs[args[1]]; p != nil {
		pid = p.cmd.Process.Pid
	} else {
		pid, err = strconv.Atoi(strings.TrimSpace(ts.ReadFile(args[1])))
		ts.Check(err)
	}
	s.marks[args[1]+"."+args[0]] = signals.Now()
	if err := syscall.Kill(pid, sig); err != nil {
		ts.Fatalf("signal %s to %s: %v", args[0], args[1], err)
	}
}

func cmdWaitfor(ts *testscript.TestScript, neg bool, args []string) {
	form(ts, neg, len(args) >= 2, "waitfor PATTERN FILE...")
	re, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	limit := signals.Now() + int64(patience)
	for _, file := range args[1:] {
		for {
			data, err := os.ReadFile(ts.MkAbs(file))
			if err == nil && re.Match(data) {
				break
			}
			if signals.Now() > limit {
				ts.Fatalf("no %s in %s after %v; there is %q", args[0], file, patience, data)
			}
			time.Sleep(2 * time.Millisecond) // the pace of the looks
		}
	}
}

func cmdMark(ts *testscript.TestScript, neg bool, args []string) {
	s := form(ts, neg, len(args) == 1, "mark NAME")
	s.marks[args[0]] = signals.Now()
}

func cmdBetween(ts *testscript.TestScript, neg bool, args []string) {
	s := form(ts, neg, len(args) == 4, "between FROM TO LEAST MOST")
	least, err := time.ParseDuration(args[2])
	ts.Check(err)
	most, err := time.ParseDuration(args[3])
	ts.Check(err)
	got := time.Duration(s.instant(ts, args[1]) - s.instant(ts, args[0]))
	if got < least || got > most {
		ts.Fatalf("from %s to %s it took %v, want %v to %v", args[0], args[1], got, least, most)
	}
	ts.Logf("from %s to %s: %v", args[0], args[1], got)
}

func (s *stage) instant(ts *testscript.TestScript, name string) signals.Instant {
	if name == "now" {
		return signals.Now()
	}
	if at, ok := s.marks[name]; ok {
		return at
	}
	which, glob, _ := strings.Cut(name, ":")
	stamps := readStamps(ts, []string{glob})
	switch which {
	case "first":
		return slices.MinFunc(stamps, byTime).at
	case "last":
		return slices.MaxFunc(stamps, byTime).at
	}
	ts.Fatalf("there is no mark %s", name)
	return 0
}

// stamp is a line that a command wrote: see program beat.
type stamp struct {
	what string
	at   signals.Instant
	pid  int
	term int64 // zero: it had none
}

func byTime(a, b stamp) int { return cmp.Compare(a.at, b.at) }

func readStamps(ts *testscript.TestScript, globs []string) []stamp {
	var all []stamp
	for _, glob := range globs {
		files, err := filepath.Glob(ts.MkAbs(glob))
		ts.Check(err)
		if len(files) == 0 {
			ts.Fatalf("nothing wrote to %s", glob)
		}
		for _, file := range files {
			for line := range strings.Lines(ts.ReadFile(file)) {
				var s stamp
				if _, err := fmt.Sscanf(line, "%s %d %d %d\n", &s.what, &s.at, &s.pid, &s.term); err != nil {
					ts.Fatalf("%s: %q is no stamp: %v", file, line, err)
				}
				all = append(all, s)
			}
		}
	}
	if len(all) == 0 {
		ts.Fatalf("there is no stamp in %v", globs)
	}
	return all
}

func cmdOverlap(ts *testscript.TestScript, neg bool, args []string) {
	form(ts, neg, len(args) >= 2, "overlap COUNT GLOB...")
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	runs, err := checkOverlap(readStamps(ts, args[1:]))
	ts.Check(err)
	if runs != want {
		ts.Fatalf("there were %d runs, want %d", runs, want)
	}
}

// checkOverlap judges runs of one lease from the outside, by the stamps of their commands. What has the same term is one run, with all
// of its processes. No two runs overlap, and a later one has a larger term. It returns how many there were.
func checkOverlap(stamps []stamp) (runs int, err error) {
	type span struct {
		term     int64
		from, to signals.Instant
	}
	byTerm := map[int64]*span{}
	for _, s := range stamps {
		if s.term == 0 {
			return 0, fmt.Errorf("process %d ran without a term", s.pid)
		}
		r := byTerm[s.term]
		if r == nil {
			r = &span{s.term, math.MaxInt64, math.MinInt64}
			byTerm[s.term] = r
		}
		r.from, r.to = min(r.from, s.at), max(r.to, s.at)
	}
	var all []*span
	for _, r := range byTerm {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b *span) int { return cmp.Compare(a.from, b.from) })
	for i := 1; i < len(all); i++ {
		a, b := all[i-1], all[i]
		switch {
		case b.from <= a.to:
			return 0, fmt.Errorf("the runs of terms %d and %d overlap by %v", a.term, b.term, time.Duration(a.to-b.from))
		case b.term <= a.term:
			return 0, fmt.Errorf("a run of term %d came after one of term %d", b.term, a.term)
		}
	}
	return len(all), nil
}

// A judge that never says no would make every script pass.
func TestOverlapAndTermsThatGoBackAreSeen(t *testing.T) {
	for _, c := range []struct {
		what   string
		stamps []stamp
		runs   int
		err    string
	}{
		{"one after the other", []stamp{{at: 1, term: 7}, {at: 3, term: 7}, {at: 4, term: 8}, {at: 2, term: 7}}, 2, ""},
		{"overlap", []stamp{{at: 1, term: 7}, {at: 5, term: 7}, {at: 4, term: 8}}, 0, "overlap"},
		{"the same instant", []stamp{{at: 1, term: 7}, {at: 4, term: 7}, {at: 4, term: 8}}, 0, "overlap"},
		{"inside", []stamp{{at: 1, term: 7}, {at: 9, term: 7}, {at: 4, term: 8}, {at: 5, term: 8}}, 0, "overlap"},
		{"a term that goes back", []stamp{{at: 1, term: 8}, {at: 2, term: 7}}, 0, "came after"},
		{"no term", []stamp{{at: 1}}, 0, "without a term"},
	} {
		runs, err := checkOverlap(c.stamps)
		if runs != c.runs || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %d runs and %v, want %d and %q", c.what, runs, err, c.runs, c.err)
		}
	}
}

func cmdGone(ts *testscript.TestScript, neg bool, args []string) {
	form(ts, neg, len(args) >= 1, "gone GLOB...")
	for _, s := range readStamps(ts, args) {
		if running(s.pid) {
			ts.Fatalf("process %d still runs", s.pid)
		}
	}
}

// running says whether a process is there and no zombie.
func running(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

// What is different every time, and the words for it. The order counts.
var changing = []struct {
	pattern *regexp.Regexp
	word    string
}{
	{regexp.MustCompile(`[^ "=]+/\d+/[0-9a-f]{8}\b`), "HOLDER"},
	{regexp.MustCompile(`[^ "]+ \(pid \d+\)`), "HOST (pid PID)"},
	{regexp.MustCompile(`\bpids \[[\d ]+\]`), "pids [PIDS]"},
	{regexp.MustCompile(`\bsince (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d`), "since TIME"},
	{regexp.MustCompile(`"20\d\d-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)"`), `"TIME"`},
	{regexp.MustCompile(`\b1\d{12}\b`), "TERM"},
	{regexp.MustCompile(`@underlease/[A-Z2-7]{26}`), "SOCKET"},
	{regexp.MustCompile(`\b[0-9a-f]{32}:TERM`), "LINK:TERM"},
	{regexp.MustCompile(`("(waited|held|ran|left|waited_for|held_for)_ms":)\d+`), "${1}N"},
	{regexp.MustCompile(`"renewals":[1-9]\d*`), `"renewals":N`},
}

func cmdNormalize(ts *testscript.TestScript, neg bool, args []string) {
	form(ts, neg, len(args) == 1, "normalize FILE")
	text := strings.ReplaceAll(ts.ReadFile(args[0]), ts.Getenv("WORK"), "$WORK")
	for _, c := range changing {
		text = c.pattern.ReplaceAllString(text, c.word)
	}
	fmt.Fprint(ts.Stdout(), text)
}

func cmdTrace(ts *testscript.TestScript, neg bool, args []string) {
	form(ts, neg, len(args) == 1, "trace FILE")
	letters := map[string]string{"-": "-"}
	for line := range strings.Lines(ts.ReadFile(args[0])) {
		words := strings.Fields(line)
		if len(words) != 4 {
			ts.Fatalf("%q is no line of a trace", line)
		}
		if letters[words[2]] == "" {
			letters[words[2]] = string(rune('A' + len(letters) - 1))
		}
		words[2] = letters[words[2]]
		fmt.Fprintln(ts.Stdout(), strings.Join(words, " "))
	}
}
