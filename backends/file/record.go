package file

import (
	"bytes"
	"hash/crc32"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/underlease/underlease/backends"
)

// A record is what is known about one lease, as it stands in the file `rec`:
//
//	underlease record 1
//	lease "namespace" "name"
//	last TERM VERSION
//	slot NUMBER TERM SINCE TTL "handle" "holder"
//	kept "boot id" BOOT WALL
//	ask "kind" "reason" "by" AT
//	process "boot id" PIDSPACE PID START
//	end "outcome" CODE TOOK
//	past NUMBER TERM SINCE "holder" "outcome" CODE TOOK
//	value "key" VERSION WRITTEN "bytes"
//	sum CRC32
//
// The first line ends with the version of the format. Texts are Go string literals, numbers are decimal, times are
// nanoseconds (SINCE, AT, WALL and WRITTEN since 1970; BOOT and START since the boot), the sum is that of all bytes
// before its line (IEEE, hexadecimal). The lines kept, ask, process and end belong to the slot above them and are
// left out when there is nothing to say. Slots are ordered by number, the past is newest first, values by key.
//
// There is exactly one way to write a record, and [decode] takes nothing else: what is torn, edited, foreign or of
// another version is an error, never a record with parts missing.
type record struct {
	namespace, lease string

	last    backends.Term // the largest that was ever handed out
	version int64         // the largest of a value
	slots   []slot
	past    []backends.Past
	values  []value
}

// A slot is one place of the lease. Whether it is held is told by the lock on its file, not by the handle here: the
// holder may have died without a word.
type slot struct {
	number int
	term   backends.Term
	since  int64
	ttl    time.Duration
	handle string // empty when its holder has said how it ended
	holder string // of the present or last holder
	kept   kept
	ask    ask
	by     process
	end    backends.End // of the holder before the present one or, when free, of the last; Outcome is empty before the first
}

// kept is the end of a hold.
type kept struct {
	boot string // the boot that at belongs to
	at   int64  // CLOCK_BOOTTIME
	wall int64  // for after a reboot
}

type ask struct {
	kind, reason, by string
	at               int64
}

type value struct {
	key     string
	version int64
	written int64
	bytes   string
}

const (
	magic  = "underlease record "
	format = "1"
)

// encode returns the one form of r.
func (r *record) encode() []byte { return r.appendTo(make([]byte, 0, 1024)) }

func (r *record) appendTo(b []byte) []byte {
	w := writer{b: b}
	w.b = append(w.b, magic+format+"\n"...)
	w.word("lease").text(r.namespace).text(r.lease).line()
	w.word("last").number(int64(r.last)).number(r.version).line()
	for i := range r.slots {
		s := &r.slots[i]
		w.word("slot").number(int64(s.number)).number(int64(s.term)).number(s.since).number(int64(s.ttl)).
			text(s.handle).text(s.holder).line()
		if s.kept != (kept{}) {
			w.word("kept").text(s.kept.boot).number(s.kept.at).number(s.kept.wall).line()
		}
		if s.ask != (ask{}) {
			w.word("ask").text(s.ask.kind).text(s.ask.reason).text(s.ask.by).number(s.ask.at).line()
		}
		if s.by != (process{}) {
			w.word("process").text(s.by.boot).number(s.by.space).number(int64(s.by.pid)).number(s.by.start).line()
		}
		if s.end.Outcome != "" {
			w.word("end").text(s.end.Outcome).number(int64(s.end.ExitCode)).number(int64(s.end.Took)).line()
		}
	}
	for _, p := range r.past {
		w.word("past").number(int64(p.Slot)).number(int64(p.Term)).number(p.Since.UnixNano()).text(p.Holder).
			text(p.End.Outcome).number(int64(p.End.ExitCode)).number(int64(p.End.Took)).line()
	}
	for _, v := range r.values {
		w.word("value").text(v.key).number(v.version).number(v.written).text(v.bytes).line()
	}
	return seal(w.b)
}

// seal appends the sum.
func seal(b []byte) []byte {
	sum := crc32.ChecksumIEEE(b)
	b = append(b, "sum "...)
	b = strconv.AppendUint(b, uint64(sum), 16)
	return append(b, '\n')
}

// decode returns the record in b. The error is the reason why there is none; it has no kind yet.
func decode(b []byte) (*record, error) {
	if len(b) == 0 {
		return nil, damage("is empty")
	}
	head, rest, ok := bytes.Cut(b, []byte("\n"))
	version, ours := bytes.CutPrefix(head, []byte(magic))
	if !ok || !ours {
		return nil, damage("is not a record of underlease, or only a part of one")
	}
	if string(version) != format {
		if _, err := strconv.ParseUint(string(version), 10, 31); err != nil {
			return nil, damage("is not a record of underlease")
		}
		return nil, newer("has the format " + string(version) + ", and this program knows only " + format)
	}
	r, ok := parse(string(rest))
	// One comparison finds every other form of damage, a wrong sum and a missing last line among them.
	if !ok || !bytes.Equal(r.appendTo(make([]byte, 0, len(b)+64)), b) {
		return nil, damage("is damaged or only a part of a record")
	}
	return r, nil
}

// damage says why the bytes are not a record; newer says that a newer program wrote them.
type (
	damage string
	newer  string
)

func (d damage) Error() string { return string(d) }
func (n newer) Error() string  { return string(n) }

func parse(text string) (*record, bool) {
	r := &record{}
	p := parser{left: text}
	if p.word() != "lease" {
		return r, false
	}
	r.namespace, r.lease = p.text(), p.text()
	if p.line(); p.word() != "last" {
		return r, false
	}
	r.last, r.version = p.term(), p.number(0, math.MaxInt64)
	p.line()
	for !p.bad {
		word := p.word()
		var s *slot
		if n := len(r.slots); n > 0 {
			s = &r.slots[n-1]
		}
		switch word {
		case "kept", "ask", "process", "end":
			if s == nil {
				return r, false
			}
		}
		switch word {
		case "slot":
			next := slot{
				number: int(p.number(0, math.MaxInt32)), term: p.term(), since: p.number(math.MinInt64, math.MaxInt64),
				ttl: p.duration(), handle: p.text(), holder: p.text(),
			}
			if next.term > r.last || s != nil && next.number <= s.number {
				return r, false
			}
			r.slots = append(r.slots, next)
		case "kept":
			s.kept = kept{boot: p.text(), at: p.number(0, math.MaxInt64), wall: p.number(math.MinInt64, math.MaxInt64)}
		case "ask":
			s.ask = ask{kind: p.text(), reason: p.text(), by: p.text(), at: p.number(math.MinInt64, math.MaxInt64)}
		case "process":
			s.by = process{
				boot: p.text(), space: p.number(0, math.MaxInt64), pid: int(p.number(1, math.MaxInt32)),
				start: p.number(0, math.MaxInt64),
			}
		case "end":
			s.end = p.end()
		case "past":
			past := backends.Past{Slot: int(p.number(0, math.MaxInt32)), Term: p.term(), Since: time.Unix(0, p.number(math.MinInt64, math.MaxInt64))}
			past.Holder = p.text()
			past.End = p.end()
			if r.past == nil {
				r.past = make([]backends.Past, 0, backends.HistoryLength)
			}
			r.past = append(r.past, past)
		case "value":
			v := value{key: p.text(), version: p.number(1, r.version), written: p.number(math.MinInt64, math.MaxInt64), bytes: p.text()}
			if n := len(r.values); n > 0 && v.key <= r.values[n-1].key {
				return r, false
			}
			r.values = append(r.values, v)
		case "sum":
			return r, len(r.past) <= backends.HistoryLength
		default:
			return r, false
		}
		p.line()
	}
	return r, false
}

// writer appends the words of a line.
type writer struct{ b []byte }

func (w *writer) word(s string) *writer { w.b = append(w.b, s...); return w }

func (w *writer) number(n int64) *writer {
	w.b = strconv.AppendInt(append(w.b, ' '), n, 10)
	return w
}

func (w *writer) text(s string) *writer {
	w.b = strconv.AppendQuote(append(w.b, ' '), s)
	return w
}

func (w *writer) line() { w.b = append(w.b, '\n') }

// parser takes the words of a line. After the first that does not fit it is bad and gives zero values.
type parser struct {
	left string
	bad  bool
}

func (p *parser) fail() { p.bad, p.left = true, "" }

// word takes what stands before the next blank or the end of the line, and leaves that.
func (p *parser) word() string {
	for i := range len(p.left) {
		if c := p.left[i]; c == ' ' || c == '\n' {
			taken := p.left[:i]
			p.left = p.left[i:]
			return taken
		}
	}
	p.fail()
	return ""
}

// next takes c.
func (p *parser) next(c byte) {
	if p.left == "" || p.left[0] != c {
		p.fail()
		return
	}
	p.left = p.left[1:]
}

func (p *parser) line() { p.next('\n') }

func (p *parser) number(least, most int64) int64 {
	p.next(' ')
	n, err := strconv.ParseInt(p.word(), 10, 64)
	if p.bad || err != nil || n < least || n > most {
		p.fail()
		return 0
	}
	return n
}

func (p *parser) term() backends.Term     { return backends.Term(p.number(0, int64(backends.MaxTerm))) }
func (p *parser) duration() time.Duration { return time.Duration(p.number(0, math.MaxInt64)) }

func (p *parser) end() backends.End {
	return backends.End{Outcome: p.text(), ExitCode: int(p.number(math.MinInt32, math.MaxInt32)), Took: time.Duration(p.number(math.MinInt64, math.MaxInt64))}
}

func (p *parser) text() string {
	p.next(' ')
	quoted, err := strconv.QuotedPrefix(p.left)
	if err != nil || quoted[0] != '"' {
		p.fail()
		return ""
	}
	s, err := strconv.Unquote(quoted)
	if err != nil {
		p.fail()
		return ""
	}
	p.left = p.left[len(quoted):]
	return s
}

// slot returns the slot of that number, or nil.
func (r *record) slot(number int) *slot {
	for i := range r.slots {
		if r.slots[i].number == number {
			return &r.slots[i]
		}
	}
	return nil
}

// make returns the slot of that number, which it adds where there is none.
func (r *record) make(number int) *slot {
	at := 0
	for at < len(r.slots) && r.slots[at].number < number {
		at++
	}
	if at == len(r.slots) || r.slots[at].number != number {
		r.slots = append(r.slots, slot{})
		copy(r.slots[at+1:], r.slots[at:])
		r.slots[at] = slot{number: number}
	}
	return &r.slots[at]
}

// carrying returns the slot that carries the handle, or nil.
func (r *record) carrying(handle string) *slot {
	for i := range r.slots {
		if handle != "" && r.slots[i].handle == handle {
			return &r.slots[i]
		}
	}
	return nil
}

// finish writes how the holder of s ended. The hold stays.
func (r *record) finish(s *slot, end backends.End) {
	end.Puts = nil
	if end.Outcome == "" {
		end.Outcome = backends.OutcomeUnknown
	}
	keep := min(len(r.past), backends.HistoryLength-1)
	r.past = slices.Insert(r.past[:keep], 0, backends.Past{
		Slot: s.number, Term: s.term, Holder: s.holder, Since: time.Unix(0, s.since), End: end,
	})
	s.end, s.handle, s.ask, s.by, s.ttl = end, "", ask{}, process{}, 0
}

// settle writes that a holder is gone which never said how it ended.
func (r *record) settle(s *slot) {
	if s.handle != "" {
		r.finish(s, backends.End{Outcome: backends.OutcomeUnknown})
	}
}

// put writes a value and returns its version. A conflict changes nothing.
func (r *record) put(p backends.Put, wall int64) (int64, error) {
	at := 0
	for at < len(r.values) && r.values[at].key < p.Key {
		at++
	}
	there := at < len(r.values) && r.values[at].key == p.Key
	var version int64
	if there {
		version = r.values[at].version
	}
	if p.Version != backends.AnyVersion && p.Version != version {
		return 0, backends.ErrConflict
	}
	if !there {
		r.values = append(r.values, value{})
		copy(r.values[at+1:], r.values[at:])
	}
	// Versions follow the clock as terms do, so that none comes again after a deletion.
	r.version = max(r.version+1, wall/int64(time.Millisecond))
	r.values[at] = value{key: p.Key, version: r.version, written: wall, bytes: string(p.Value)}
	return r.version, nil
}
