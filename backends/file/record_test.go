//go:build linux

package file

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// full is a record with everything in it.
func full() *record {
	r := &record{
		namespace: "ns \"quoted\"", lease: "名前\u2028x", last: 1796040232999, version: 1796040232005,
		slots: []slot{
			{
				number: 0, term: 1796040232999, since: 1796040232999e6, ttl: time.Minute, handle: "0123456789abcdef", holder: "db1 (pid 4711)\n\xff",
				kept: kept{boot: "b", at: 5, wall: 1796040242999e6}, ask: ask{kind: "stop", reason: "r\\", by: "", at: -1},
				by: process{boot: "b", space: 4026531836, pid: 4711, start: 99}, end: backends.End{Outcome: "failed", ExitCode: 17, Took: time.Second},
			},
			{number: 3, term: 7, holder: ""},
		},
		values: []value{{key: "a", version: 1, written: 3, bytes: "\x00\n\"end"}, {key: "é", version: 1796040232005, bytes: ""}},
	}
	for i := range backends.HistoryLength {
		r.past = append(r.past, backends.Past{Slot: i % 3, Term: backends.Term(100 - i), Holder: "h", Since: time.Unix(0, int64(i)), End: backends.End{Outcome: "ok"}})
	}
	return r
}

func TestARecordIsReadAsItWasWritten(t *testing.T) {
	for _, r := range []*record{{lease: "n"}, full()} {
		b := r.encode()
		got, err := decode(b)
		if err != nil {
			t.Fatalf("decode of\n%s: got %v, want the record", b, err)
		}
		if again := got.encode(); !bytes.Equal(again, b) {
			t.Errorf("record: got\n%s, want\n%s", again, b)
		}
	}
	// The form is read by every later version and may not change.
	want := "underlease record 1\nlease \"\" \"n\"\nlast 5 0\nslot 0 5 6 0 \"h\" \"me\"\nsum "
	small := &record{lease: "n", last: 5, slots: []slot{{number: 0, term: 5, since: 6, handle: "h", holder: "me"}}}
	if got := string(small.encode()); !strings.HasPrefix(got, want) {
		t.Errorf("record: got %q, want %q and the sum", got, want)
	}
}

func TestEveryTornRecordIsRefused(t *testing.T) {
	b := full().encode()
	for n := range len(b) {
		if _, err := decode(b[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes were read as a record", n, len(b))
		}
	}
	for i := range b {
		for _, c := range []byte{0, b[i] ^ 1, b[i] ^ 0x80, ' ', '\n'} {
			if c == b[i] {
				continue
			}
			bad := bytes.Clone(b)
			bad[i] = c
			if _, err := decode(bad); err == nil {
				t.Fatalf("a record with byte %d changed to %q was read", i, c)
			}
		}
	}
}

// damaged are forms of C15: what stands where the record has to be.
func damaged(whole []byte) map[string][]byte {
	foreign := &record{lease: "another", last: 5}
	otherSpace := &record{namespace: "other", lease: "l", last: 5}
	inconsistent := &record{lease: "l", last: 5, slots: []slot{{number: 0, term: 6}}}
	twice := &record{lease: "l", last: 5, slots: []slot{{number: 1}, {number: 1}}}
	newer := seal(bytes.Replace(whole[:bytes.LastIndex(whole, []byte("sum "))], []byte("record 1"), []byte("record 2"), 1))
	edited := bytes.Replace(whole, []byte("last 1"), []byte("last 2"), 1)
	return map[string][]byte{
		"empty":             {},
		"one byte":          whole[:1],
		"half":              whole[:len(whole)/2],
		"no last line":      whole[:bytes.LastIndex(whole, []byte("sum "))],
		"no last byte":      whole[:len(whole)-1],
		"twice":             append(bytes.Clone(whole), whole...),
		"a byte more":       append(bytes.Clone(whole), '\n'),
		"zero bytes":        make([]byte, len(whole)),
		"edited":            edited,
		"another lease":     foreign.encode(),
		"another namespace": otherSpace.encode(),
		"a newer format":    newer,
		"format zero":       bytes.Replace(whole, []byte("record 1"), []byte("record 01"), 1),
		"json":              []byte(`{"version":1}` + "\n"),
		"text":              []byte("4711\n"),
		"a slot above last": inconsistent.encode(),
		"a slot twice":      twice.encode(),
	}
}

func TestADamagedRecordStopsEverythingAndStaysAsItIs(t *testing.T) {
	dir := t.TempDir()
	c := openAt(t, dir)
	g := acquire(t, c, "l", 1)
	release(t, c, g)
	path := c.lease("", "l") + "/rec"
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range damaged(whole) {
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		for call, f := range map[string]func() error{
			"Acquire": func() error {
				_, err := c.Acquire(ctx, backends.Request{Lease: "l", Handle: backends.NewHandle(), Slots: 3})
				return err
			},
			"Release":        func() error { return c.Release(ctx, g, backends.End{Outcome: "ok"}) },
			"Inspect":        func() error { _, err := c.Inspect(ctx, "", "l"); return err },
			"List":           func() error { _, err := c.List(ctx, ""); return err },
			"Ask":            func() error { return c.Ask(ctx, "", "l", 0, backends.Ask{Kind: backends.AskStop}) },
			"Break":          func() error { return c.Break(ctx, "", "l", 0, "", true) },
			"Records.Get":    func() error { _, err := c.Records().Get(ctx, "", "l", "k"); return err },
			"Records.List":   func() error { _, err := c.Records().List(ctx, "", "l"); return err },
			"Records.Put":    func() error { _, err := c.Records().Put(ctx, "", "l", backends.Put{Key: "k"}, nil); return err },
			"Records.Delete": func() error { return c.Records().Delete(ctx, "", "l", "k") },
			"WaitFree":       func() error { return c.WaitFree(ctx, backends.Request{Lease: "l", Handle: "h", Slots: 1}) },
		} {
			err := f()
			if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), path) || !strings.Contains(backends.Hint(err), path) {
				t.Errorf("%s on a record that is %s: got %v (hint %q), want ErrBroken and a hint that name %s", call, name, err, backends.Hint(err), path)
			}
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, bad) {
			t.Errorf("the record that is %s was changed: %q, %v", name, now, err)
		}
	}
	if err := os.WriteFile(path, damaged(whole)["a newer format"], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Inspect(t.Context(), "", "l"); err == nil || !strings.Contains(backends.Hint(err), "update underlease") {
		t.Errorf("hint for a newer record: got %q, want to update", backends.Hint(err))
	}
	// The other leases go on, and List shows them beside the error.
	release(t, c, acquire(t, c, "other", 1))
	if list, err := c.List(t.Context(), ""); !errors.Is(err, backends.ErrBroken) || len(list) != 1 || list[0].Lease != "other" {
		t.Errorf("List: got %v, %v, want the other lease and ErrBroken", list, err)
	}
}

func TestWhatIsNoFileOfOursIsBroken(t *testing.T) {
	for _, name := range []string{"rec", "slot.0", "mu"} {
		for what, put := range map[string]func(path string) error{
			"a directory":     func(path string) error { return os.Mkdir(path, 0o700) },
			"a FIFO":          func(path string) error { return unix.Mkfifo(path, 0o600) },
			"a symbolic link": func(path string) error { return os.Symlink("/etc/hostname", path) },
			"a socket":        func(path string) error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) },
		} {
			c := openAt(t, t.TempDir())
			dir := c.lease("", "l")
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, name)
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			_, err := c.Acquire(t.Context(), backends.Request{Lease: "l", Handle: "h", Slots: 1})
			if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), path) {
				t.Errorf("Acquire with %s as %s: got %v, want ErrBroken that names it", what, name, err)
			}
		}
	}
}

func TestADeletedRecordDoesNotRepeatATerm(t *testing.T) {
	c := openAt(t, memory(t))
	path := c.lease("", "l") + "/rec"
	last := backends.Term(0)
	// As fast as can be: terms are still not ahead of the clock that has to continue them.
	for i := range 200 {
		g := acquire(t, c, "l", 1)
		if g.Term <= last {
			t.Fatalf("term %d came after %d", g.Term, last)
		}
		last = g.Term
		release(t, c, g)
		if i%3 == 0 {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestTermsGoOnWhenTheClockIsSetBack(t *testing.T) {
	c := openAt(t, t.TempDir())
	first := acquire(t, c, "l", 1)
	release(t, c, first)
	wall := c.clock.wall
	c.clock.wall = func() int64 { return wall() - int64(time.Hour) }
	begun := time.Now()
	second := acquire(t, c, "l", 1)
	if second.Term != first.Term+1 {
		t.Errorf("term: got %d, want %d", second.Term, first.Term+1)
	}
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %v, want no wait for the clock", took)
	}
}

func TestTheLargestTermIsTheLast(t *testing.T) {
	c := openAt(t, t.TempDir())
	release(t, c, acquire(t, c, "l", 1))
	path := c.lease("", "l") + "/rec"
	rec := &record{lease: "l", last: backends.MaxTerm}
	if err := os.WriteFile(path, rec.encode(), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := c.Acquire(t.Context(), backends.Request{Lease: "l", Handle: "h", Slots: 1})
	if !errors.Is(err, backends.ErrBroken) {
		t.Errorf("Acquire after the largest term: got %v, want ErrBroken", err)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, rec.encode()) {
		t.Errorf("the record was changed: %v", err)
	}
}

// FuzzRecord looks for bytes that are read as another record than they are, or that end the program.
func FuzzRecord(f *testing.F) {
	whole := full().encode()
	f.Add(whole)
	f.Add((&record{lease: "n"}).encode())
	for _, b := range damaged(whole) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		check := func(b []byte) {
			r, err := decode(b)
			if (r == nil) == (err == nil) {
				t.Fatalf("decode: got %v and %v, want one of them", r, err)
			}
			if err != nil {
				if !errors.Is(unreadable("p", err), backends.ErrBroken) {
					t.Errorf("%v is not ErrBroken", err)
				}
				return
			}
			if again := r.encode(); !bytes.Equal(again, b) {
				t.Errorf("read as another record:\n%q\nwant\n%q", again, b)
			}
			if r.last < 0 || r.last > backends.MaxTerm || len(r.past) > backends.HistoryLength {
				t.Errorf("record out of range: last %d, %d ends", r.last, len(r.past))
			}
		}
		check(b)
		// With a right sum, so that the fuzzer gets past it.
		if at := bytes.LastIndex(b, []byte("sum ")); at >= 0 {
			check(seal(bytes.Clone(b[:at])))
		}
	})
}

func acquire(tb testing.TB, c *Client, lease string, slots int) backends.Grant {
	tb.Helper()
	g, err := c.Acquire(tb.Context(), backends.Request{Lease: lease, Holder: "pid " + strconv.Itoa(os.Getpid()), Handle: backends.NewHandle(), Slots: slots})
	if err != nil {
		tb.Fatalf("Acquire %q: got %v, want a grant", lease, err)
	}
	return g
}

func release(tb testing.TB, c *Client, g backends.Grant) {
	tb.Helper()
	if err := c.Release(tb.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		tb.Fatalf("Release %q: got %v, want nil", g.Lease, err)
	}
}

// memory is a directory where an fsync costs nothing, where there is one.
func memory(tb testing.TB) string {
	tb.Helper()
	if _, err := os.Stat("/dev/shm"); err == nil {
		dir, err := os.MkdirTemp("/dev/shm", "underlease-test-") //nolint:usetesting // TempDir is on the disk
		if err == nil {
			tb.Cleanup(func() { _ = os.RemoveAll(dir) })
			return dir
		}
	}
	return tb.TempDir()
}
