//go:build linux

package stamps

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// life makes a life of a command; at are its stamps.
func life(term int64, at ...int64) Life {
	return Life{Pid: int(term) * 10, Term: term, Command: true, At: at}
}

// child makes one of a descendant.
func child(term int64, at ...int64) Life {
	l := life(term, at...)
	l.Command = false
	return l
}

func TestWhatMayNotBeIsFound(t *testing.T) {
	for _, c := range []struct {
		name     string
		limits   Limits
		lives    []Life
		overlaps int
		longest  time.Duration
		repeats  int
		disorder int
	}{
		{name: "one after the other", lives: []Life{life(1, 10, 20), life(2, 21, 30), life(5, 31, 31)}},
		{name: "in any order of reading", lives: []Life{life(5, 31, 40), life(1, 10, 20), life(2, 21, 30)}},
		{name: "two together", lives: []Life{life(1, 10, 20), life(2, 15, 30)}, overlaps: 1, longest: 5, disorder: 1},
		{name: "the end and the begin in one instant", lives: []Life{life(1, 10, 20), life(2, 20, 30)}, overlaps: 1},
		{name: "one stamp alone within another", lives: []Life{life(1, 10, 20), life(2, 15)}, overlaps: 1, disorder: 1},
		{name: "one within another", lives: []Life{life(1, 10, 40), life(2, 15, 20)}, overlaps: 1, longest: 5, disorder: 1},
		{name: "a grandchild that lives on", lives: []Life{life(1, 10, 20), child(1, 12, 26), life(2, 21, 30)}, overlaps: 1, longest: 5, disorder: 1},
		{name: "a grandchild that does not", lives: []Life{life(1, 10, 18), child(1, 12, 20), life(2, 21, 30)}},
		{name: "a grandchild alone, its command being killed early", lives: []Life{child(1, 12, 26), life(2, 21, 30)}, overlaps: 1, longest: 5, disorder: 1},
		{name: "three together are one stretch", lives: []Life{life(1, 10, 40), life(2, 15, 40), life(3, 20, 50)}, overlaps: 1, longest: 25, disorder: 2},
		{name: "two stretches", lives: []Life{life(1, 10, 40), life(2, 15, 20), life(3, 25, 35)}, overlaps: 2, longest: 10, disorder: 1},
		{name: "a term twice", lives: []Life{life(1, 10, 20), life(1, 30, 40)}, repeats: 1},
		{name: "a term three times is one finding", lives: []Life{life(1, 10, 20), life(1, 30, 40), life(1, 50)}, repeats: 1},
		{name: "a term that goes back", lives: []Life{life(2, 10, 20), life(1, 30, 40)}, disorder: 2},
		{name: "within the allowance", limits: Limits{Allowance: 5}, lives: []Life{life(1, 10, 20), life(2, 15, 30)}, disorder: 1},
		{name: "above the allowance", limits: Limits{Allowance: 4}, lives: []Life{life(1, 10, 20), life(2, 15, 30)}, overlaps: 1, longest: 5, disorder: 1},
		{name: "two of two slots", limits: Limits{Slots: 2}, lives: []Life{life(1, 10, 20), life(2, 15, 30)}},
		{name: "three of two slots", limits: Limits{Slots: 2}, lives: []Life{life(1, 10, 20), life(2, 15, 30), life(3, 18, 19)}, overlaps: 1, longest: 1},
		{name: "terms of two slots begin in any order", limits: Limits{Slots: 2}, lives: []Life{life(2, 10, 20), life(1, 12, 30)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Check(c.lives, c.limits)
			longest := time.Duration(0)
			for _, s := range r.Overlaps {
				longest = max(longest, s.Length())
			}
			if len(r.Overlaps) != c.overlaps || longest != c.longest || len(r.Repeats) != c.repeats || len(r.Disorder) != c.disorder {
				t.Errorf("got %d overlaps, the longest %v, %d repeats and disorder %q, want %d, %v, %d and %d",
					len(r.Overlaps), longest, len(r.Repeats), r.Disorder, c.overlaps, c.longest, c.repeats, c.disorder)
			}
			if found := c.overlaps+c.repeats+c.disorder > 0; (r.Err() != nil) != found {
				t.Errorf("got the error %v, want one: %v", r.Err(), found)
			}
		})
	}
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	dir := t.TempDir()
	before := Now()
	w, err := Create(dir, Begin, 7)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []Kind{Beat, Beat, End} {
		if err := w.Put(k); err != nil {
			t.Fatal(err)
		}
	}
	killed, err := Create(dir, Join, 7)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := killed.f.WriteString("beat 1"); err != nil {
		t.Fatal(err)
	}
	lives, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(lives) != 2 {
		t.Fatalf("got %d lives, want 2", len(lives))
	}
	l, k := lives[0], lives[1]
	if !l.Command || !l.Ended || l.Term != 7 || l.Pid != os.Getpid() || len(l.At) != 4 || l.At[0] < before || l.At[3] > Now() {
		t.Errorf("got %+v, want a whole command of term 7 with 4 stamps from %d on", l, before)
	}
	if k.Command || k.Ended || len(k.At) != 1 {
		t.Errorf("got %+v, want a descendant with one stamp and no end", k)
	}
	if r := Check(lives, Limits{}); r.Runs != 1 || r.Processes != 2 || r.Stamps != 5 || r.Err() != nil {
		t.Errorf("got %+v, want 1 run of 2 processes with 5 stamps and nothing wrong", r)
	}
}

func TestAFileThatIsNoneIsRefused(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"beat 1 2 3\n", "does not belong here"},
		{"begin 1 2 0\n", "the term is 0"},
		{"begin 1 2\n", "has 3 words"},
		{"begin x 2 3\n", "line 1"},
		{"begin 1 2 3\nbegin 2 2 3\n", "does not belong here"},
		{"begin 1 2 3\nend 2 2 3\nbeat 3 2 3\n", "does not belong here"},
		{"begin 1 2 3\nbeat 2 2 4\n", "of pid 2 and term 4"},
		{"begin 2 2 3\nbeat 1 2 3\n", "older"},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "1.2"), []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: got the error %v, want one with %q", c.text, err, c.want)
		}
	}
}
