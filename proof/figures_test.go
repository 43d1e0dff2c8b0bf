//go:build linux

package proof

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
)

// The limits are those of a build with all stores.
const (
	mostToFlock  = 4.5
	mostPSS      = 14 << 20
	mostSize     = 15 << 20
	mostInits    = 29
	mostWakes    = 2                     // of the wrapper, a second
	afterNoStart = 50 * time.Millisecond // of a quiet machine, where it takes six
	quietMachine = 9 * time.Millisecond  // not a gate: only the ratio is
	module       = "github.com/underlease/underlease"
)

// The bars are those of a quiet machine. What is measured may be so much above its bar before a test fails: whatever else the machine does adds
// to a run of ours, which is two processes beside each other, more than to a program that is one; and a handover is the start of several, which a
// slow machine makes that much longer. A store that is looked at now and then, and does not tell, is far above it.
const (
	busyRoom = 1.4
	slowRoom = 3
)

// atBest measures until it is at most its bar, so many times at most. The least counts, and is said; only what is far above the bar fails.
func atBest[N ~int64 | ~float64](t *testing.T, what string, bar N, room float64, times int, measure func() N) {
	t.Helper()
	best := measure()
	for more := times - 1; best > bar && more > 0; more-- {
		t.Logf("%s: %v: once more", what, best)
		best = min(best, measure())
	}
	switch most := N(float64(bar) * room); {
	case best > most:
		t.Errorf("%s: got %v, want at most %v, and %v on a machine that is slow or busy", what, best, bar, most)
	case best > bar:
		t.Logf("%s: %v is above the bar of %v, which is for a quiet machine", what, best, bar)
	}
}

// least wants a ratio to be at most its bar.
func least(t *testing.T, bar float64, ratio func() float64) {
	t.Helper()
	atBest(t, "so many times as much", bar, busyRoom, 4, ratio)
}

// handover wants the median of many handovers to be at most its bar.
func handover(t *testing.T, what string, bar time.Duration, measure func() (median time.Duration)) {
	t.Helper()
	atBest(t, what+", the median of a handover", bar, slowRoom, 3, measure)
}

// flock(1) writes nothing, and a run puts its term on the disk before it starts the command. What the disk needs for that, and for
// whoever else writes to it, is no figure of ours: the gate is measured in memory where there is such a file system, the disk is shown.
func TestARunCostsAtMostSoMuchMoreThanFlock(t *testing.T) {
	measure := func(dir, where string) float64 {
		subjects, err := figures.Usual(bin.underlease, dir)
		servers.Require(t, "flock", err)
		quiet := starts(t, subjects, 200)
		ours, flock := quiet[2].Median(), quiet[1].Median()
		t.Logf("%s: %.2f times flock's (at most %v); %v of at most %v on a quiet machine", where, float64(ours)/float64(flock), mostToFlock, ours, quietMachine)
		return float64(ours) / float64(flock)
	}
	gate, where := t.TempDir(), "on the disk"
	if dir, err := os.MkdirTemp("/dev/shm", "underlease-proof-"); err == nil { //nolint:usetesting // TempDir is on the disk
		defer os.RemoveAll(dir)
		measure(gate, where)
		gate, where = dir, "in memory"
	}
	least(t, mostToFlock, func() float64 { return measure(gate, where) })
}

// starts returns what so many starts of each subject took, in those rounds in which the machine was least busy.
func starts(t *testing.T, subjects []figures.Subject, rounds int) []figures.Series {
	t.Helper()
	if testing.Short() {
		rounds /= 4
	}
	all, err := figures.Starts(subjects, rounds)
	if err != nil {
		t.Fatal(err)
	}
	quiet := figures.Quietest(all, 0.25)
	for i, s := range all {
		t.Logf("%-10s median %v, p99 %v, least %v; in quiet rounds %v", s.Name, s.Median(), s.Quantile(0.99), s.Quantile(0), quiet[i].Median())
	}
	return quiet
}

func TestWhatARunKeepsWhileItHolds(t *testing.T) {
	info, err := os.Stat(bin.underlease)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the binary has %.1f MB", float64(info.Size())/(1<<20))
	if info.Size() > mostSize {
		t.Errorf("got a binary of %d bytes, want at most %d", info.Size(), mostSize)
	}
	h, err := figures.Hold(bin.underlease, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer h.End()
	wrapper, err := figures.PSS(h.Wrapper)
	if err != nil {
		t.Fatal(err)
	}
	guardian, err := figures.PSS(h.Guardian)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("PSS: wrapper %.1f MB, guardian %.1f MB", float64(wrapper)/(1<<20), float64(guardian)/(1<<20))
	if wrapper+guardian > mostPSS {
		t.Errorf("got a PSS of %d bytes, wrapper and guardian together, want at most %d", wrapper+guardian, mostPSS)
	}
}

func TestTheGuardianSleepsAndTheWrapperHardlyWakes(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED in a short run: it watches for 20 s")
	}
	h, err := figures.Hold(bin.underlease, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer h.End()
	switches := func(pid int) (voluntary, all int64) {
		v, i, err := figures.Switches(pid)
		if err != nil {
			t.Fatal(err)
		}
		return v, v + i
	}
	// The start is over when nothing has woken the guardian for a second; its runtime's own threads take a while to settle.
	_, last := switches(h.Guardian)
	calm := time.Now()
	if !within(20*time.Second, func() bool {
		if _, now := switches(h.Guardian); now != last {
			last, calm = now, time.Now()
		}
		return time.Since(calm) > time.Second
	}) {
		t.Fatal("the guardian does not come to rest within 20 s")
	}
	// The Go runtime's monitor sleeps 20 us at a time while anything runs, so that one wake-up is dozens of switches. What counts is
	// how often the whole process begins to run after it slept: all that happens within two looks is one wake-up.
	const (
		watch = 20 * time.Second
		look  = 20 * time.Millisecond
	)
	_, guardian := switches(h.Guardian)
	_, before := switches(h.Wrapper)
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	wakes, first, running := 0, before, false
	for end := time.Now().Add(watch); time.Now().Before(end); {
		<-ticker.C
		_, now := switches(h.Wrapper)
		if now != before && !running {
			wakes++
		}
		running, before = now != before, now
	}
	_, guardianAfter := switches(h.Guardian)
	t.Logf("in %v the guardian's threads were switched %d times; the wrapper woke up %d times, its threads were switched %d times",
		watch, guardianAfter-guardian, wakes, before-first)
	if got := guardianAfter - guardian; got != 0 {
		t.Errorf("got %d context switches of an idle guardian in %v, want none", got, watch)
	}
	if most := int(mostWakes * watch / time.Second); wakes > most {
		t.Errorf("got %d wake-ups of an idle wrapper in %v, want at most %d", wakes, watch, most)
	}
}

// light are packages of libraries that need nothing that the guardian does not need, so that they are initialised before it is one: pools of
// buffers, in microseconds.
var light = []string{"github.com/jackc/pgx/v5/internal/iobufpool"}

func TestTheGuardianDivertsBeforeAnythingHeavy(t *testing.T) {
	packages, took, err := figures.Inits(bin.underlease)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d packages in %v: %s", len(packages), took, strings.Join(packages, " "))
	if len(packages) > mostInits {
		t.Errorf("got %d packages that are initialised before the guardian is one, want at most %d", len(packages), mostInits)
	}
	for _, p := range packages {
		first, _, _ := strings.Cut(p, "/")
		if strings.Contains(first, ".") && !strings.HasPrefix(p, module+"/") && !slices.Contains(light, p) {
			t.Errorf("got %s among them, want none of a library that is not light", p)
		}
	}
}

func TestACommandThatCannotStartGivesTheLeaseBackAtOnce(t *testing.T) {
	dir, where := t.TempDir(), store(t)
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		servers.WriteProgram(t, path, []byte(text))
		return path
	}
	stamps := filepath.Join(dir, "stamps")
	if err := os.Mkdir(stamps, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		command []string
		code    int
	}{
		{"not found", []string{filepath.Join(dir, "none")}, 127},
		{"not found by exec: the interpreter", []string{write("interpreter", "#!/nonexistent/sh\n")}, 127},
		{"a directory", []string{dir}, 126},
		{"not run by exec: an interpreter that is a directory", []string{write("directory", "#!"+dir+"\n")}, 126},
	} {
		t.Run(c.name, func(t *testing.T) {
			var took []time.Duration
			for range 9 {
				first := underlease(append([]string{"--backend", where, "--min-hold", "1h", "unstarted", "--"}, c.command...)...)
				var words bytes.Buffer
				first.Stderr = &words
				first.Run()
				ended := time.Now()
				if got := code(first); got != c.code {
					t.Fatalf("got the exit code %d and %.300q, want %d", got, &words, c.code)
				}
				next := underlease("--backend", where, "unstarted", "--", bin.job, stamps, "0s")
				next.Stderr = &words
				out, err := next.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := next.Start(); err != nil {
					t.Fatal(err)
				}
				out.Read(make([]byte, 64)) // the command's first word, or the end
				took = append(took, time.Since(ended))
				if next.Wait() != nil {
					t.Fatalf("got the exit code %d and %.300q from the next run, want it to run", code(next), &words)
				}
			}
			slices.Sort(took)
			t.Logf("the next command ran after %v (median), %v (longest)", took[len(took)/2], took[len(took)-1])
			if median := took[len(took)/2]; median > afterNoStart*slowRoom {
				t.Errorf("got the next command %v after our exit, want it within %v, and %v on a slow machine", median, afterNoStart, afterNoStart*slowRoom)
			}
		})
	}
	nothingLeft(t, patience)
}
