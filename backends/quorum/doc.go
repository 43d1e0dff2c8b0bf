package quorum

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
)

// form is the form of what is stored here.
const form = 1

// doc is what a lease keeps over sessions.
type doc struct {
	Form      int           `json:"f"`
	Namespace string        `json:"ns"`
	Name      string        `json:"n"`
	Term      backends.Term `json:"t"`
	Ends      int64         `json:"e"` // how many ends were ever written
	Slots     []slotDoc     `json:"s"` // those that were ever used, in order
}

type slotDoc struct {
	Slot   int           `json:"i"`
	Holder string        `json:"w"`
	Term   backends.Term `json:"t"`
	Since  int64         `json:"b"` // milliseconds since 1970
	Open   bool          `json:"o"` // nobody has written yet how the holder ended
	Last   end           `json:"p"`
}

// end is [backends.End] as it is stored.
type end struct {
	Outcome  string `json:"o"`
	ExitCode int    `json:"c"`
	Took     int64  `json:"m"` // milliseconds
}

func (e end) end() backends.End {
	return backends.End{Outcome: e.Outcome, ExitCode: e.ExitCode, Took: duration(e.Took)}
}

func duration(millis int64) time.Duration { return time.Duration(millis) * time.Millisecond }

var (
	none    = end{Outcome: backends.OutcomeNone}
	unknown = end{Outcome: backends.OutcomeUnknown}
)

// past is an entry of the history as it is stored.
type past struct {
	Count  int64         `json:"n"`
	Slot   int           `json:"i"`
	Term   backends.Term `json:"t"`
	Holder string        `json:"w"`
	Since  int64         `json:"b"`
	End    end           `json:"p"`
}

// grant is what the key of a taken slot holds.
type grant struct {
	Digest string        `json:"h"`
	Holder string        `json:"w"`
	Term   backends.Term `json:"t"`
	Since  int64         `json:"b"`
	TTL    int64         `json:"l"` // milliseconds

	pair Pair
}

// hold is what the key of a hold holds.
type hold struct {
	Holder string        `json:"w"`
	Term   backends.Term `json:"t"`
	Since  int64         `json:"b"`
	Length int64         `json:"d"` // milliseconds

	pair Pair
}

// ask is [backends.Ask] as it is stored. Its instant is nobody's: the store has no clock.
type ask struct {
	Kind   string `json:"k"`
	Reason string `json:"r"`
	By     string `json:"b"`

	pair Pair
}

func (a *ask) ask() *backends.Ask {
	if a == nil {
		return nil
	}
	return &backends.Ask{Kind: backends.AskKind(a.Kind), Reason: a.Reason, By: a.By}
}

func (a *ask) breaks() bool { return a != nil && a.Kind == string(backends.AskBreak) }

// lease is a lease as it was read.
type lease struct {
	place   place
	doc     doc
	version int64 // of the doc; zero: there is none
	read    int64 // the version of the view
	grants  map[int]*grant
	asks    map[int]*ask
	holds   map[int]*hold
}

// parse reads the keys of a lease, or of one slot of it.
func (c *Client) parse(p place, v View) (*lease, error) {
	l := &lease{
		place: p, read: v.Version, doc: doc{Form: form, Namespace: p.namespace, Name: p.name},
		grants: map[int]*grant{}, asks: map[int]*ask{}, holds: map[int]*hold{},
	}
	prefix := p.lease()
	for _, pair := range v.Pairs {
		parts := strings.Split(strings.TrimPrefix(pair.Key, prefix), "/")
		var err error
		number := -1
		if len(parts) > 1 {
			if number, err = strconv.Atoi(parts[1]); err != nil || number < 0 {
				continue // somebody else's
			}
		}
		switch {
		case len(parts) == 1 && parts[0] == "doc":
			err = c.doc(l, pair)
		case len(parts) == 3 && parts[0] == "slot" && parts[2] == "grant":
			g := &grant{pair: pair}
			if err = json.Unmarshal(pair.Value, g); err == nil && (g.Digest == "" || g.Term <= 0) {
				err = errIncomplete
			}
			l.grants[number] = g
		case len(parts) == 3 && parts[0] == "slot" && parts[2] == "ask":
			a := &ask{pair: pair}
			err = json.Unmarshal(pair.Value, a)
			l.asks[number] = a
		case len(parts) == 2 && parts[0] == "hold":
			h := &hold{pair: pair}
			err = json.Unmarshal(pair.Value, h)
			l.holds[number] = h
		}
		if err != nil {
			return nil, c.damaged(pair.Key, err)
		}
	}
	return l, nil
}

// errIncomplete is JSON that is not what was written here.
var errIncomplete = backends.Broken(nil, "something is missing")

func (c *Client) doc(l *lease, pair Pair) error {
	var head struct {
		Form int `json:"f"`
	}
	if err := json.Unmarshal(pair.Value, &head); err != nil {
		return err
	}
	switch {
	case head.Form > form:
		return backends.WithHint(backends.Broken(nil, "%s: the key %s has the form %d of a newer version", c.store.Address(), pair.Key, head.Form),
			"update underlease on this host: nothing was changed")
	case head.Form != form:
		return errIncomplete
	}
	var d doc
	if err := json.Unmarshal(pair.Value, &d); err != nil {
		return err
	}
	if l.place.name == "" { // asked for by its key alone
		l.place.namespace, l.place.name = d.Namespace, d.Name
	}
	if d.Namespace != l.place.namespace || d.Name != l.place.name {
		return backends.WithHint(backends.Broken(nil, "%s: the key %s is of another lease", c.store.Address(), pair.Key), "%s", hintDamaged)
	}
	l.doc, l.version = d, pair.Version
	return nil
}

const hintDamaged = "look at it, then rename or delete it: the next term starts from the clock"

func (c *Client) damaged(key string, err error) error {
	if backends.Hint(err) != "" {
		return err // it says everything
	}
	return backends.WithHint(backends.Broken(nil, "%s: the key %s is damaged", c.store.Address(), key), "%s", hintDamaged)
}

// last is the largest term that the lease shows. Keys that outlived a doc that somebody deleted count, too.
func (l *lease) last() backends.Term {
	t := l.doc.Term
	for _, g := range l.grants {
		t = max(t, g.Term)
	}
	for _, h := range l.holds {
		t = max(t, h.Term)
	}
	return t
}

// high is the largest term of the leases of a namespace that were deleted because nobody used them.
type high struct {
	Form int           `json:"f"`
	Term backends.Term `json:"t"`

	version int64 // of the key; zero: there is none
}

// next returns the term of the next grant, and has a transaction compare what it comes from. A lease without a doc may have been
// deleted: it goes on from the mark of its namespace. That there is none is what is taken for granted until a transaction says otherwise,
// so that it costs no look where nothing was ever deleted.
func (c *Client) next(l *lease, now int64, t *Txn) (backends.Term, error) {
	last := l.last()
	t.check(l.place.doc(), l.version)
	if l.version == 0 {
		c.mu.Lock()
		h := c.high[l.place.high()]
		c.mu.Unlock()
		t.check(l.place.high(), h.version)
		last = max(last, h.Term)
	}
	term, err := last.Next(now)
	if err != nil {
		return 0, c.damaged(l.place.doc(), err)
	}
	return term, nil
}

// again looks at the mark once more where a transaction compared with it in vain.
func (c *Client) again(ctx context.Context, l *lease) error {
	if l.version != 0 {
		return nil
	}
	_, err := c.marked(ctx, l.place)
	return err
}

// marked reads the mark of a namespace.
func (c *Client) marked(ctx context.Context, p place) (h high, err error) {
	pair, err := c.key(ctx, p.high())
	if err != nil {
		return h, err
	}
	if pair != nil {
		if err := json.Unmarshal(pair.Value, &h); err != nil || h.Form != form {
			return h, c.damaged(p.high(), err)
		}
		h.version = pair.Version
	}
	c.mu.Lock()
	c.high[p.high()] = h
	c.mu.Unlock()
	return h, nil
}

// carrying returns the grant with a digest and its slot, or nil.
func (l *lease) carrying(digest string) (int, *grant) {
	for i, g := range l.grants {
		if g.Digest == digest {
			return i, g
		}
	}
	return 0, nil
}

// free returns the first slot of from to n-1 that nobody has, or -1.
func (l *lease) free(from, n int) int {
	for i := from; i < n; i++ {
		if l.grants[i] == nil && l.holds[i] == nil {
			return i
		}
	}
	return -1
}

// entry returns what the doc says about a slot.
func (d *doc) entry(i int) slotDoc {
	if n, ok := d.find(i); ok {
		return d.Slots[n]
	}
	return slotDoc{Slot: i, Last: none}
}

func (d *doc) find(i int) (int, bool) {
	return slices.BinarySearchFunc(d.Slots, i, func(s slotDoc, i int) int { return s.Slot - i })
}

// clone returns a copy that may be changed.
func (d *doc) clone() *doc {
	c := *d
	c.Slots = slices.Clone(d.Slots)
	return &c
}

func (d *doc) set(s slotDoc) {
	if n, ok := d.find(s.Slot); ok {
		d.Slots[n] = s
	} else {
		d.Slots = slices.Insert(d.Slots, n, s)
	}
}

// finish writes down how the holder of a slot ended.
func (d *doc) finish(p place, t *Txn, s slotDoc, e end) {
	d.Ends++
	t.put(p.end(d.Ends), stored(past{Count: d.Ends, Slot: s.Slot, Term: s.Term, Holder: s.Holder, Since: s.Since, End: e}), "")
	s.Open, s.Last = false, e
	d.set(s)
}

// mostFinished bounds a transaction. Source: Consul allows 64 operations in one, etcd 128 by default.
const mostFinished = 20

// settle writes down that holders whose session ended never said how they ended.
func (l *lease) settle(d *doc, t *Txn) {
	done := 0
	for _, s := range l.doc.Slots {
		if s.Open && l.grants[s.Slot] == nil && done < mostFinished {
			d.finish(l.place, t, s, unknown)
			done++
		}
	}
}

// stored is a value as it is stored.
func stored(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and numbers alone
	}
	return b
}
