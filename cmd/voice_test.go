package cmd

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
)

func itoa(fd uintptr) string { return strconv.Itoa(int(fd)) }

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close(); _ = w.Close() })
	return r, w
}

// C13: the loop logs while nobody reads, and must go on.
func TestAReaderThatDoesNotReadHoldsNobody(t *testing.T) {
	r, w := pipe(t)
	v := newVoice(w)
	const lines = 20000
	line := []byte(strings.Repeat("x", 99) + "\n")
	began := time.Now()
	for range lines {
		if _, err := v.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	v.close()
	if took := time.Since(began); took > 10*voiceFlush {
		t.Errorf("got %v for %d lines and the end, want little more than %v", took, lines, voiceFlush)
	}
	// Whoever comes late reads what was kept, and how much was not.
	got, told := 0, 0
	_ = r.SetReadDeadline(time.Now().Add(10 * time.Second)) // pipes have deadlines
	for s := bufio.NewScanner(r); got+told < lines && s.Scan(); {
		if text, ok := strings.CutPrefix(s.Text(), "underlease: warn log lines dropped count="); ok {
			n, _ := strconv.Atoi(text)
			told += n
			continue
		}
		got++
	}
	if got < voiceLines || told == 0 || got+told != lines {
		t.Errorf("got %d lines and %d told as dropped, want %d together", got, told, lines)
	}
}

func TestAReaderThatHasGoneEndsNobody(t *testing.T) {
	r, w := pipe(t)
	_ = r.Close()
	v := newVoice(w)
	v.say("nobody reads this", "")
	v.close() // waits for the write, which fails
	select {
	case <-v.finished:
	default:
		t.Error("the writer still runs after the end")
	}
	closed := newVoice(w)
	_ = w.Close()
	closed.say("nor this", "")
	closed.close()
	none := newVoice(nil)
	none.say("nor this", "")
	none.close()
}

func TestTheWaitingLineIsRewrittenAndErased(t *testing.T) {
	r, w := pipe(t)
	v := newVoice(w)
	v.draw("")
	v.draw("one")
	v.draw("two")
	v.say("a line", "")
	v.draw("three")
	v.close()
	_ = w.Close()
	got, err := io.ReadAll(r)
	if want := "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[Kunderlease: a line\n\r\x1b[Kthree\r\x1b[K"; err != nil || string(got) != want {
		t.Errorf("got %q and %v, want %q", got, err, want)
	}
}

func TestLogLinesHaveOneForm(t *testing.T) {
	var b bytes.Buffer
	log := newLogger(&b, formatText, slog.LevelInfo)
	g := backends.Grant{Namespace: "blue", Lease: "n", Handle: "secret", Slot: 1, Term: 9}
	log.Debug("lease renewed")
	log.Info("lease acquired", "grant", g, "valid_for", 1500*time.Millisecond)
	log.With("a", 1).WithGroup("g").Warn("renewal failed", "err", io.EOF, "left", runner.Forever)
	log.Error("lease lost", "by", "x\x1b[2J\ny")
	log.Error("run ended")
	want := "underlease: info lease acquired grant.lease=blue/n grant.slot=1 grant.term=9 valid_for=1.5s\n" +
		"underlease: warn renewal failed a=1 g.err=EOF g.left=forever\n" +
		"underlease: error lease lost by=\"x\\x1b[2J\\ny\"\n" +
		"underlease: error run ended\n"
	if got := b.String(); got != want {
		t.Errorf("got\n%s want\n%s", got, want)
	}
	b.Reset()
	log = newLogger(&b, formatJSON, slog.LevelInfo)
	log.Info("lease acquired", "grant", g, "valid_for", 1500*time.Millisecond, "left", runner.Forever, "by", "a\u009bb",
		"err", errors.New("b\x7f\u009bc"), "pids", []int{1, 2}, "names", []string{"\u009b"}, "none", nil)
	_, got, _ := strings.Cut(b.String(), ",")
	if want := `"level":"INFO","msg":"lease acquired","grant":{"lease":"blue/n","slot":1,"term":9},"valid_for_ms":1500,"left_ms":null,"by":"a\\u009bb",` +
		`"err":"b\\x7f\\u009bc","pids":[1,2],"names":"[\"\\u009b\"]","none":null}` + "\n"; got != want {
		t.Errorf("got\n%s want\n%s", got, want)
	}
}

func TestNothingMovesTheCursor(t *testing.T) {
	for in, want := range map[string]string{
		"plain é 日本":      "plain é 日本",
		"a\x1b[2Jb\nc\td": `a\x1b[2Jb\x0ac\x09d`,
		"\u009b2J\u202e":  `\u009b2J\u202e`,
		"\xff\x7f":        `\xff\x7f`,
	} {
		if got := harmless(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestHoldersAreWrittenForPeople(t *testing.T) {
	for in, want := range map[string]string{
		newHolder("db1", 4711):        "db1 (pid 4711)",
		newHolder("", 1):              "localhost (pid 1)",
		"a/b/4711/00c0ffee":           "a/b (pid 4711)",
		"db1":                         "db1",
		"db1/4711/xyz":                "db1/4711/xyz",
		"db1/pid/00c0ffee":            "db1/pid/00c0ffee",
		"two words":                   `"two words"`,
		"":                            `""`,
		"x\x1b[2J":                    `"x\x1b[2J"`,
		"x\x1b[2J/4711/00c0ffee":      `"x\x1b[2J" (pid 4711)`,
		"db1/47110000000000/00c0ffee": "db1/47110000000000/00c0ffee",
	} {
		if got := person(in); got != want {
			t.Errorf("%q: got %s, want %s", in, got, want)
		}
	}
}

func TestTheBusyLine(t *testing.T) { // C45
	now := time.Date(2026, 11, 30, 3, 5, 0, 0, time.FixedZone("", 3600))
	since := time.Date(2026, 11, 30, 2, 0, 2, 0, time.UTC)
	for want, b := range map[string]backends.BusyError{
		`busy: "nightly" is held by db1 (pid 4711) since 03:00:02, 41s left`:      {Lease: "nightly", Since: since, Left: 41 * time.Second},
		`busy: "nightly" is held by db1 (pid 4711) since 03:00:02`:                {Lease: "nightly", Since: since, Left: backends.Forever},
		`busy: "ns/a\nb" is held by db1 (pid 4711), 1s left`:                      {Namespace: "ns", Lease: "a\nb", Left: time.Millisecond},
		`busy: "n" is held by db1 (pid 4711) since 2026-11-29 03:00:02, 0s left`:  {Lease: "n", Since: since.AddDate(0, 0, -1)},
		`busy: "n" is held by db1 (pid 4711) since 03:00:02, 2m left of its hold`: {Lease: "n", Since: since, Left: 2 * time.Minute, Kept: true},
	} {
		b.Holder = "db1/4711/00c0ffee"
		if got := busyWords(&b, now); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestTheWaitingLineSaysForWhomHowLongAndWhatIsLeft(t *testing.T) {
	now := time.Date(2026, 11, 30, 3, 5, 0, 0, time.UTC)
	held := &backends.BusyError{Holder: "db1/4711/00c0ffee", Since: now.Add(-5 * time.Minute)}
	for want, w := range map[string]runner.Waiting{
		`underlease: waiting for "n" 12s, 48s left: held by db1 (pid 4711) since 03:00:00`: {Lease: "n", Busy: held, Waited: 12*time.Second + 1, Left: 47*time.Second + 1},
		`underlease: waiting for "n" 12s: held by db1 (pid 4711) since 03:00:00`:           {Lease: "n", Busy: held, Waited: 12 * time.Second, Left: runner.Forever},
		`underlease: waiting for "n" 0s, 2s left: the store does not answer`:               {Lease: "n", Err: io.EOF, Left: 2 * time.Second},
	} {
		if got := waitingWords(w, now); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	if got := fit(strings.Repeat("é", 100), 80); len([]rune(got)) != 79 {
		t.Errorf("got %d runes, want 79: a full line would wrap", len([]rune(got)))
	}
}
