package table

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/underlease/underlease/backends"
)

// end is [backends.End] as it is stored.
type end struct {
	Outcome  string `json:"o"`
	ExitCode int    `json:"c"`
	Took     int64  `json:"m"` // milliseconds
}

var unknown = end{Outcome: backends.OutcomeUnknown}

func asEnd(e backends.End) end {
	return end{clean(e.Outcome), e.ExitCode, e.Took.Milliseconds()}
}

func (e end) end() backends.End {
	return backends.End{Outcome: e.Outcome, ExitCode: e.ExitCode, Took: millis(e.Took)}
}

// ask is [backends.Ask] as it is stored.
type ask struct {
	Kind   string `json:"k"`
	Reason string `json:"r"`
	By     string `json:"b"`
	At     int64  `json:"a"`
}

func (a *ask) ask() *backends.Ask {
	if a == nil {
		return nil
	}
	return &backends.Ask{Kind: backends.AskKind(a.Kind), Reason: a.Reason, By: a.By, At: instant(a.At)}
}

// slot is a slot as it is stored.
type slot struct {
	Digest string `json:"h"` // empty: nobody's
	Holder string `json:"w"`
	Term   int64  `json:"t"`
	Since  int64  `json:"b"`
	TTL    int64  `json:"l"`
	Expiry int64  `json:"e"`
	Hold   int64  `json:"d"`
	Kept   int64  `json:"k"`
	Last   *end   `json:"p"`
	Ask    *ask   `json:"q,omitempty"`
}

func (s *slot) broken() bool { return s.Ask != nil && s.Ask.Kind == string(backends.AskBreak) }

// past is how an acquisition ended: an entry of the history, or, without a term, the trace of one that was given back before anybody
// knew whether it was granted.
type past struct {
	Slot   int    `json:"s"`
	Term   int64  `json:"t"`
	Holder string `json:"w"`
	Since  int64  `json:"b"`
	End    end    `json:"p"`
	Back   string `json:"h,omitempty"` // the digest of a handle that was given back: nothing is granted to it any more
}

// record is a record as it is stored.
type record struct {
	Version int64  `json:"v"`
	Written int64  `json:"a"`
	Value   string `json:"d"` // base64
}

// lease is a row that was read, and what becomes of it.
type lease struct {
	row     *Row
	now     int64
	slots   []slot
	ends    []past
	records map[string]record // by the key in hexadecimal
	version int64

	moved  bool  // the clock was set back, and something that ends too late was cut
	before int64 // see [Change.Before]
	wake   bool
}

// None and Unknown are the ends of [backends.OutcomeNone] and [backends.OutcomeUnknown] as they are stored.
const (
	None    = `{"o":"` + backends.OutcomeNone + `","c":0,"m":0}`
	Unknown = `{"o":"` + backends.OutcomeUnknown + `","c":0,"m":0}`
)

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and numbers alone
	}
	return b
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func instant(n int64) time.Time { return time.UnixMilli(n) }

// read reads a row.
func (c *Client) read(row *Row) (*lease, error) {
	name := backends.Display(row.Namespace, row.Lease)
	if row.Form != Form {
		return nil, backends.WithHint(backends.Broken(nil, "%s: the row of %q has the form %d of a newer version", c.db.Address(), name, row.Form),
			"update underlease on this host: nothing was changed")
	}
	damaged := func(what string, err error) (*lease, error) {
		return nil, backends.WithHint(backends.Broken(err, "%s: the row of %q is damaged: %s cannot be read", c.db.Address(), name, what),
			"look at it, then delete it: the next term starts from the clock")
	}
	l := &lease{row: row, now: row.Micros / 1000, version: row.Version}
	if err := json.Unmarshal(row.Slots, &l.slots); err != nil {
		return damaged("slots", err)
	}
	for i := range l.slots {
		s := &l.slots[i]
		if s.Term <= 0 || s.TTL <= 0 || s.Expiry <= 0 || s.Last == nil {
			return damaged(fmt.Sprintf("slot %d", i), nil)
		}
		if s.Expiry-l.now > s.TTL {
			s.Expiry, l.moved = l.now+s.TTL, true
		}
		if s.Kept-l.now > s.Hold {
			s.Kept, l.moved = l.now+s.Hold, true
		}
	}
	if row.Ends != nil {
		if err := json.Unmarshal(row.Ends, &l.ends); err != nil {
			return damaged("ends", err)
		}
	}
	if row.Records != nil {
		if err := json.Unmarshal(row.Records, &l.records); err != nil {
			return damaged("records", err)
		}
	}
	return l, nil
}

// change is what has to be written.
func (l *lease) change() Change {
	c := Change{Revision: l.row.Revision, Before: l.before, Version: l.version, Slots: encode(l.slots), Wake: l.wake}
	if l.slots == nil {
		c.Slots = []byte("[]")
	}
	until := l.now
	for i := range l.slots {
		until = max(until, l.slots[i].Expiry, l.slots[i].Kept)
	}
	c.Gone = Gone(until)
	if l.row.Ends != nil {
		c.Ends = encode(l.ends)
		if l.ends == nil {
			c.Ends = []byte("[]")
		}
	}
	switch {
	case l.row.Records == nil:
		c.Gone = 0 // as it is
	case len(l.records) > 0:
		c.Gone, c.Records = Never, encode(l.records)
	default:
		c.Records = []byte("{}")
	}
	return c
}

func (l *lease) held(s *slot) bool { return s.Digest != "" && s.Expiry > l.now }

// left is how long a slot stays taken unless renewed.
func (l *lease) left(s *slot) int64 {
	most := max(0, s.Kept-l.now)
	if l.held(s) {
		most = max(most, s.Expiry-l.now)
	}
	return most
}

func (l *lease) carrying(digest string) *slot {
	for i := range l.slots {
		if digest != "" && l.slots[i].Digest == digest {
			return &l.slots[i]
		}
	}
	return nil
}

// ofTerm returns the slot whose last holder had the grant, whether it is in force or not.
func (l *lease) ofTerm(h Held) *slot {
	if h.Term == 0 || h.Slot < 0 || h.Slot >= len(l.slots) || l.slots[h.Slot].Term != h.Term {
		return nil
	}
	return &l.slots[h.Slot]
}

// force returns the slot of a grant, and why the grant is not in force.
func (l *lease) force(h Held) (*slot, string) {
	if h.Slot < 0 || h.Slot >= len(l.slots) {
		return nil, "its slot was deleted"
	}
	s := &l.slots[h.Slot]
	switch {
	case s.Digest == "" && s.Term == h.Term:
		return nil, "it has ended"
	case s.Digest != h.Digest || s.Term != h.Term:
		return nil, "another holder has it"
	case !l.held(s):
		return nil, "it has expired"
	case s.broken():
		return s, "broken by an operator: " + s.Ask.Reason
	}
	return s, ""
}

// answer is what a row says after an acquisition: a grant, or an error; or neither, where it explains nothing.
func (l *lease) answer(req backends.Request, t Take) (backends.Grant, error) {
	if s := l.carrying(t.Digest); s != nil && l.held(s) {
		if s.broken() {
			return backends.Grant{}, backends.Lost(nil, "broken by an operator: %s", s.Ask.Reason)
		}
		number := slices.IndexFunc(l.slots, func(o slot) bool { return o.Digest == t.Digest && o.Term == s.Term })
		return backends.Grant{
			Namespace: req.Namespace, Lease: req.Lease, Holder: s.Holder, Handle: req.Handle, Slot: number, Term: backends.Term(s.Term),
			TTL: millis(s.TTL), Previous: s.Last.end(), Ask: s.Ask.ask(),
		}, nil
	}
	if _, err := backends.Term(l.row.Term).Next(l.now); err != nil {
		return backends.Grant{}, backends.WithHint(err, "look at the row of %q", backends.Display(req.Namespace, req.Lease))
	}
	first := -1
	for i := range min(t.Slots, len(l.slots)) {
		if first < 0 || l.left(&l.slots[i]) < l.left(&l.slots[first]) {
			first = i
		}
	}
	if len(l.slots) < t.Slots || l.left(&l.slots[first]) == 0 {
		return backends.Grant{}, nil // it became free just now
	}
	s := &l.slots[first]
	return backends.Grant{}, &backends.BusyError{
		Namespace: req.Namespace, Lease: req.Lease, Holder: s.Holder, Slot: first, Term: backends.Term(s.Term),
		Since: instant(s.Since), Left: millis(l.left(s)), Kept: !l.held(s),
	}
}

// givenBack reports whether the holder of a handle has given back what it may have got.
func (l *lease) givenBack(digest string) bool {
	return slices.ContainsFunc(l.ends, func(p past) bool { return p.Back == digest })
}

// giveBack remembers a handle that nothing was granted to.
func (l *lease) giveBack(digest string) { l.ended(past{End: unknown, Back: digest}) }

func (l *lease) ended(p past) {
	l.ends = slices.Insert(l.ends, 0, p)
	l.ends = l.ends[:min(len(l.ends), Ends)]
}

// finish writes how a holder ended.
func (l *lease) finish(s *slot, e end) {
	i := slices.IndexFunc(l.slots, func(o slot) bool { return o.Term == s.Term })
	l.ended(past{i, s.Term, s.Holder, s.Since, e, s.Digest})
	s.Digest, s.Last, s.Ask = "", &e, nil
}

func (l *lease) state() backends.State {
	state := backends.State{Namespace: l.row.Namespace, Lease: l.row.Lease}
	for i := range l.slots {
		s := &l.slots[i]
		left, held := l.left(s), l.held(s)
		shown := backends.SlotState{Slot: i, Term: backends.Term(s.Term), Held: held, Kept: !held && left > 0, Left: millis(left), Last: s.Last.end()}
		if shown.Taken() {
			shown.Holder, shown.Since = s.Holder, instant(s.Since)
		}
		if held {
			shown.Ask = s.Ask.ask()
		}
		if s.Digest != "" && !held { // it expired, and nobody has written that down
			shown.Last = unknown.end()
			state.History = append(state.History, backends.Past{Slot: i, Term: shown.Term, Holder: s.Holder, Since: instant(s.Since), End: shown.Last})
		}
		state.Slots = append(state.Slots, shown)
	}
	for _, p := range l.ends {
		if p.Term == 0 {
			continue
		}
		state.History = append(state.History, backends.Past{Slot: p.Slot, Term: backends.Term(p.Term), Holder: p.Holder, Since: instant(p.Since), End: p.End.end()})
	}
	state.History = state.History[:min(len(state.History), backends.HistoryLength)]
	return state
}

var codedMarker = hex.EncodeToString([]byte(MarkerKey))

func (l *lease) marked() bool {
	_, ok := l.records[codedMarker]
	return ok
}

// adopt takes a marker that a job has written, unless one is there.
func (l *lease) adopt(m *Mark) {
	if m == nil || l.marked() {
		return
	}
	if l.records == nil {
		l.records = map[string]record{}
	}
	l.version = max(l.version, m.Version)
	l.records[codedMarker] = record{m.Version, m.Written, base64.StdEncoding.EncodeToString(m.Value)}
}

// put puts a record and returns its version, or [backends.ErrConflict].
func (l *lease) put(p backends.Put) (int64, error) {
	key := hex.EncodeToString([]byte(p.Key))
	if p.Version != backends.AnyVersion && l.records[key].Version != p.Version {
		return 0, fmt.Errorf("%w: %q", backends.ErrConflict, p.Key)
	}
	l.version = max(l.version+1, l.now)
	if l.records == nil {
		l.records = map[string]record{}
	}
	l.records[key] = record{l.version, l.now, base64.StdEncoding.EncodeToString(p.Value)}
	return l.version, nil
}

func (l *lease) record(key string, r record) (backends.Record, error) {
	plain, err := hex.DecodeString(key)
	value, wrong := base64.StdEncoding.DecodeString(r.Value)
	if err := errors.Join(err, wrong); err != nil || r.Version <= 0 {
		return backends.Record{}, backends.Broken(err, "the record %q of %q cannot be read", key, backends.Display(l.row.Namespace, l.row.Lease))
	}
	return backends.Record{
		Namespace: l.row.Namespace, Lease: l.row.Lease, Key: string(plain), Value: value, Version: r.Version,
		Age: millis(l.now - r.Written),
	}, nil
}
