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

	"github.com/underlease/underlease/proof/figures"
)

// The limits are those of a build with the file store alone.
const (
	mostToFlock  = 3.5
	mostPSS      = 12 << 20
	mostSize     = 12 << 20
	mostInits    = 29
	mostWakes    = 2 // of the wrapper, a second
	afterNoStart = 50 * time.Millisecond
	quietMachine = 6 * time.Millisecond // not a gate: only the ratio is
	module       = "github.com/underlease/underlease"
)

func TestARunCostsAtMostSoMuchMoreThanFlock(t *testing.T) {
	rounds := 200
	if testing.Short() {
		rounds = 60
	}
	subjects, err := figures.Usual(bin.underlease, t.TempDir())
	require(t, "flock", err)
	all, err := figures.Starts(subjects, rounds)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		t.Logf("%-10s median %v, p99 %v, least %v", s.Name, s.Median(), s.Quantile(0.99), s.Quantile(0))
	}
	flock, ours := all[1].Median(), all[2].Median()
	ratio := float64(ours) / float64(flock)
	t.Logf("%.2f times flock's (at most %v); %v of at most %v on a quiet machine", ratio, mostToFlock, ours, quietMachine)
	if ratio > mostToFlock {
		t.Errorf("got a median of %v, %.2f times flock's %v, want at most %v times", ours, ratio, flock, mostToFlock)
	}
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
	const watch = 20 * time.Second
	_, guardian := switches(h.Guardian)
	wrapper, _ := switches(h.Wrapper)
	time.Sleep(watch)
	_, guardianAfter := switches(h.Guardian)
	wrapperAfter, _ := switches(h.Wrapper)
	t.Logf("in %v the guardian's threads were switched %d times, the wrapper's went to sleep %d times", watch, guardianAfter-guardian, wrapperAfter-wrapper)
	if got := guardianAfter - guardian; got != 0 {
		t.Errorf("got %d context switches of an idle guardian in %v, want none", got, watch)
	}
	if got, most := wrapperAfter-wrapper, int64(mostWakes*watch/time.Second); got > most {
		t.Errorf("got %d wake-ups of an idle wrapper in %v, want at most %d", got, watch, most)
	}
}

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
		if strings.Contains(first, ".") && !strings.HasPrefix(p, module+"/") {
			t.Errorf("got %s among them, want none of a library", p)
		}
	}
}

func TestACommandThatCannotStartGivesTheLeaseBackAtOnce(t *testing.T) {
	dir, where := t.TempDir(), store(t)
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
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
		{"a program of nobody's format", []string{write("format", "\x7fELF\x02\x01\x01"+strings.Repeat("\x00", 57))}, 126},
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
			if median := took[len(took)/2]; median > afterNoStart {
				t.Errorf("got the next command %v after our exit, want it within %v", median, afterNoStart)
			}
		})
	}
	nothingLeft(t, time.Second)
}
