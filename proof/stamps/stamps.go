//go:build linux

// Package stamps tells from outside whether two commands ran at the same time under one lease.
//
// # Promise
//
// What is judged was written by the commands themselves, and nothing of underlease takes part: not its clock, not its
// record, not its word. A command that is alive while the command of a later term is alive is found, down to a
// nanosecond; so is a term that comes twice, or goes back.
//
// # How
//
// Every process of a command writes a file of its own: one line when it begins, one for each beat, and one at its end if it
// gets that far. A line carries an instant of CLOCK_BOOTTIME, which all processes of a host share and which nobody can
// set, the pid and the term. A term is alive from the first stamp of any of its processes to the last one of any of them.
// The files are read when everything is over.
//
// # Limits
//
// A process that is alive and does not beat is not seen: what hides between two beats, and between the start of a program
// and its first line, is as long as [Report.LongestGap] says, and no proof. One host only: other hosts have other clocks.
package stamps

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is what a line says.
type Kind string

// The kinds of lines. A file begins with Begin, if its process is the command itself, or else with Join.
const (
	Begin Kind = "begin"
	Join  Kind = "join"
	Beat  Kind = "beat"
	End   Kind = "end"
)

// Now reads CLOCK_BOOTTIME in nanoseconds.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // since Linux 2.6.39 it cannot fail
	}
	return ts.Nano()
}

// Writer writes the file of one process.
type Writer struct {
	f    *os.File
	tail string
	line []byte
}

// Create makes the file of this process, in a directory that exists, and writes its first line: Begin or Join.
func Create(dir string, first Kind, term int64) (*Writer, error) {
	name := fmt.Sprintf("%d.%d", Now(), os.Getpid()) // a pid alone may come again
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	w := &Writer{f: f, tail: fmt.Sprintf(" %d %d\n", os.Getpid(), term)}
	return w, w.Put(first)
}

// Put writes a line. It is one write, so that a process which is killed leaves whole lines, or at worst an unfinished last one.
func (w *Writer) Put(k Kind) error {
	w.line = append(append(w.line[:0], k...), ' ')
	w.line = append(strconv.AppendInt(w.line, Now(), 10), w.tail...)
	_, err := w.f.Write(w.line)
	return err
}

// Life is what one process wrote.
type Life struct {
	File    string
	Pid     int
	Term    int64
	Command bool    // it is the command itself, not a descendant
	Ended   bool    // it wrote End
	At      []int64 // instants, in the order of the lines
}

// Read returns the lives in a directory. What is not a file of [Writer] is an error, except that the last line may be unfinished.
func Read(dir string) ([]Life, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var lives []Life
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		l, err := parse(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if l.File = e.Name(); len(l.At) > 0 {
			lives = append(lives, l)
		}
	}
	return lives, nil
}

func parse(data []byte) (l Life, err error) {
	for number := 1; ; number++ {
		line, rest, whole := bytes.Cut(data, []byte("\n"))
		if !whole {
			return l, nil
		}
		data = rest
		f := bytes.Fields(line)
		if len(f) != 4 {
			return l, fmt.Errorf("line %d has %d words, want 4", number, len(f))
		}
		at, err1 := strconv.ParseInt(string(f[1]), 10, 64)
		pid, err2 := strconv.Atoi(string(f[2]))
		term, err3 := strconv.ParseInt(string(f[3]), 10, 64)
		if err := errors.Join(err1, err2, err3); err != nil {
			return l, fmt.Errorf("line %d: %w", number, err)
		}
		kind := Kind(f[0])
		switch first := len(l.At) == 0; {
		case term <= 0:
			return l, fmt.Errorf("line %d: the term is %d", number, term)
		case first && (kind == Begin || kind == Join):
			l.Pid, l.Term, l.Command = pid, term, kind == Begin
		case first || l.Ended || kind != Beat && kind != End:
			return l, fmt.Errorf("line %d: %q does not belong here", number, kind)
		case pid != l.Pid || term != l.Term:
			return l, fmt.Errorf("line %d is of pid %d and term %d, the first one of %d and %d", number, pid, term, l.Pid, l.Term)
		case at < l.At[len(l.At)-1]:
			return l, fmt.Errorf("line %d is older than the one before it", number)
		}
		l.Ended = kind == End
		l.At = append(l.At, at)
	}
}

// Limits are what is allowed. The zero value is of a lease with one holder and no overlap at all.
type Limits struct {
	Slots     int           // how many terms may be alive at once; 0 counts as 1
	Allowance time.Duration // how long more of them may be alive
}

// Stretch is a time during which more terms were alive than are allowed.
type Stretch struct {
	From, To int64 // instants; one stamp alone may make a stretch of no length
	Terms    []int64
}

// Length returns how long it lasted at least.
func (s Stretch) Length() time.Duration { return time.Duration(s.To - s.From) }

// Report is what [Check] found.
type Report struct {
	Runs       int           // commands
	Processes  int           // with their descendants
	Stamps     int           // lines
	LongestGap time.Duration // between two lines of one process

	Overlaps []Stretch // longer than allowed
	Repeats  []int64   // terms that more than one command had
	Disorder []string  // where a term was seen after a greater one; with one slot only
}

// Err returns nil if nothing was found that may not be.
func (r Report) Err() error {
	var errs []error
	for _, s := range r.Overlaps {
		errs = append(errs, fmt.Errorf("terms %d were alive together for at least %v, from %d to %d", s.Terms, s.Length(), s.From, s.To))
	}
	for _, t := range r.Repeats {
		errs = append(errs, fmt.Errorf("term %d was given more than once", t))
	}
	for _, d := range r.Disorder {
		errs = append(errs, errors.New(d))
	}
	return errors.Join(errs...)
}

// span is how long a term was alive.
type span struct{ term, from, to int64 }

// Check judges lives.
func Check(lives []Life, limits Limits) Report {
	slots := max(limits.Slots, 1)
	r := Report{Processes: len(lives)}
	spans := map[int64]*span{}
	commands := map[int64]int{}
	type stamp struct{ at, term int64 }
	var all []stamp
	for _, l := range lives {
		if l.Command {
			r.Runs++
			if commands[l.Term]++; commands[l.Term] == 2 {
				r.Repeats = append(r.Repeats, l.Term)
			}
		}
		s := spans[l.Term]
		if s == nil {
			s = &span{l.Term, l.At[0], l.At[0]}
			spans[l.Term] = s
		}
		s.from, s.to = min(s.from, l.At[0]), max(s.to, l.At[len(l.At)-1])
		for i, at := range l.At {
			all = append(all, stamp{at, l.Term})
			if i > 0 {
				r.LongestGap = max(r.LongestGap, time.Duration(at-l.At[i-1]))
			}
		}
	}
	r.Stamps = len(all)
	for _, s := range overlaps(spans, slots) {
		if limits.Allowance == 0 || s.Length() > limits.Allowance {
			r.Overlaps = append(r.Overlaps, s)
		}
	}
	slices.Sort(r.Repeats)
	if slots > 1 {
		return r // two holders who got their terms one after the other may begin in any order
	}
	slices.SortFunc(all, func(a, b stamp) int {
		if a.at != b.at {
			return int(max(-1, min(1, a.at-b.at)))
		}
		return int(max(-1, min(1, a.term-b.term)))
	})
	greatest := int64(0)
	for _, s := range all {
		if s.term < greatest {
			r.Disorder = append(r.Disorder, fmt.Sprintf("term %d was seen at %d, after term %d", s.term, s.at, greatest))
		}
		greatest = max(greatest, s.term)
	}
	return r
}

// overlaps returns the stretches during which more than so many spans were alive. The ends belong to a span.
func overlaps(spans map[int64]*span, slots int) (found []Stretch) {
	type edge struct {
		at    int64
		opens bool
		term  int64
	}
	var edges []edge
	for _, s := range spans {
		edges = append(edges, edge{s.from, true, s.term}, edge{s.to, false, s.term})
	}
	slices.SortFunc(edges, func(a, b edge) int {
		switch {
		case a.at != b.at:
			return int(max(-1, min(1, a.at-b.at)))
		case a.opens != b.opens && a.opens: // who begins in the instant of another's end was alive with it
			return -1
		case a.opens != b.opens:
			return 1
		default:
			return int(max(-1, min(1, a.term-b.term)))
		}
	})
	alive := map[int64]bool{}
	var now *Stretch
	for _, e := range edges {
		if e.opens {
			alive[e.term] = true
			if len(alive) <= slots {
				continue
			}
			if now == nil {
				now = &Stretch{From: e.at}
				for t := range alive {
					now.Terms = append(now.Terms, t)
				}
				slices.Sort(now.Terms)
			} else {
				now.Terms = append(now.Terms, e.term)
			}
			continue
		}
		delete(alive, e.term)
		if now != nil && len(alive) <= slots {
			now.To = e.at
			found = append(found, *now)
			now = nil
		}
	}
	return found
}
