package redis

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/underlease/underlease/backends"
)

// end is [backends.End] as it is stored.
type end struct {
	Outcome  string `json:"o"`
	ExitCode int    `json:"c"`
	Took     int64  `json:"m"` // milliseconds
}

func (e end) end() backends.End {
	return backends.End{Outcome: e.Outcome, ExitCode: e.ExitCode, Took: millis(e.Took)}
}

// ask is [backends.Ask] as it is stored.
type ask struct {
	Kind   string `json:"k"`
	Reason string `json:"r"`
	By     string `json:"b"`
	At     int64  `json:"a"` // milliseconds since 1970
}

func (a *ask) ask() *backends.Ask {
	if a == nil {
		return nil
	}
	return &backends.Ask{Kind: backends.AskKind(a.Kind), Reason: a.Reason, By: a.By, At: instant(a.At)}
}

// shown is a slot as the script shows it, without its handle.
type shown struct {
	Slot   int           `json:"i"`
	Holder string        `json:"w"`
	Term   backends.Term `json:"t,string"`
	Since  int64         `json:"b"`
	Left   int64         `json:"l"`
	Held   bool          `json:"h"`
	Unsaid bool          `json:"u"` // it expired, and nobody has written that down
	Last   end           `json:"p"`
	Ask    *ask          `json:"q"`
}

// past is an entry of the history.
type past struct {
	Slot   int           `json:"s"`
	Term   backends.Term `json:"t,string"`
	Holder string        `json:"w"`
	Since  int64         `json:"b"`
	End    end           `json:"p"`
}

// Inspect implements [backends.Backend].
func (c *Client) Inspect(ctx context.Context, namespace, lease string) (backends.State, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return backends.State{}, err
	}
	words, err := c.eval(ctx, toInspect, namespace, lease, false)
	if err != nil {
		return backends.State{}, err
	}
	return c.state(words)
}

func (c *Client) state(words []string) (state backends.State, err error) {
	if len(words) < 5 {
		return state, c.unreadable(nil)
	}
	waiters, err := strconv.Atoi(words[4])
	if err != nil {
		return state, c.unreadable(err)
	}
	state.Waiters = &waiters
	state.Namespace, state.Lease, _ = strings.Cut(words[2], "\x00")
	for _, raw := range words[5:] {
		var s shown
		if err := json.Unmarshal([]byte(raw), &s); err != nil {
			return state, c.unreadable(err)
		}
		slot := backends.SlotState{Slot: s.Slot, Term: s.Term, Held: s.Held, Kept: !s.Held && s.Left > 0, Left: millis(s.Left), Last: s.Last.end()}
		if slot.Taken() {
			slot.Holder, slot.Since = s.Holder, instant(s.Since)
		}
		if s.Held {
			slot.Ask = s.Ask.ask()
		}
		if s.Unsaid {
			slot.Last = backends.End{Outcome: backends.OutcomeUnknown}
			state.History = append(state.History, backends.Past{Slot: s.Slot, Term: s.Term, Holder: s.Holder, Since: instant(s.Since), End: slot.Last})
		}
		state.Slots = append(state.Slots, slot)
	}
	for line := range strings.Lines(words[3]) {
		var p past
		if err := json.Unmarshal([]byte(line), &p); err != nil {
			return state, c.unreadable(err)
		}
		state.History = append(state.History, backends.Past{Slot: p.Slot, Term: p.Term, Holder: p.Holder, Since: instant(p.Since), End: p.End.end()})
	}
	state.History = state.History[:min(len(state.History), backends.HistoryLength)]
	return state, nil
}

// scanCount is how many keys a server looks at in one step of a scan: enough for few round trips, and a millisecond of its time.
const scanCount = 1000

// List implements [backends.Backend]. It looks at every key of every primary.
func (c *Client) List(ctx context.Context, namespace string) ([]backends.State, error) {
	if err := backends.CheckNamespace(namespace); err != nil {
		return nil, &backends.ConfigError{Text: err.Error()}
	}
	servers, err := c.route.primaries(ctx)
	if err != nil {
		return nil, c.classify(err, "")
	}
	found := map[string]backends.State{} // by key: a scan may show one twice
	unshown := map[string]error{}
	for _, addr := range servers {
		if err := c.scan(ctx, addr, namespace, found, unshown); err != nil {
			return nil, err
		}
	}
	var states []backends.State
	for _, s := range found {
		states = append(states, s)
	}
	slices.SortFunc(states, func(a, b backends.State) int { return strings.Compare(a.Lease, b.Lease) })
	var failed []error
	for _, key := range slices.Sorted(maps.Keys(unshown)) {
		failed = append(failed, unshown[key])
	}
	return states, errors.Join(failed...)
}

// scan finds the leases of a namespace on one server, and those that cannot be shown.
func (c *Client) scan(ctx context.Context, addr, namespace string, found map[string]backends.State, unshown map[string]error) error {
	for cursor, first := uint64(0), true; first || cursor != 0; first = false {
		var keys []string
		got, err := c.node(addr).do(ctx, func(ctx context.Context, l *link) (_ any, err error) {
			keys, cursor, err = l.Scan(ctx, cursor, keysOf(namespace)+"*}", scanCount).Result()
			if err != nil || len(keys) == 0 {
				return nil, err
			}
			pipe := l.Pipeline()
			var cmds []*goredis.Cmd
			for _, key := range keys {
				if c.settings.kind == cluster {
					pipe.Do(ctx, "asking") // the key is here, though its slot may only be on its way
				}
				cmds = append(cmds, pipe.Eval(ctx, toInspect.whole(), []string{key}, ""))
			}
			if _, err := pipe.Exec(ctx); err != nil && !answered(err) {
				return nil, err
			}
			return cmds, nil
		})
		if err != nil {
			c.route.failed("", addr)
			return c.classify(err, "")
		}
		cmds, _ := got.([]*goredis.Cmd)
		for i, cmd := range cmds {
			state, there, err := c.listed(cmd, keys[i], namespace)
			switch {
			case errors.Is(err, backends.ErrBroken):
				unshown[keys[i]] = err
			case err != nil:
				return err
			case there:
				found[keys[i]] = state
			}
		}
	}
	return nil
}

// listed returns what a key that a scan has found says of its lease, if it is still there.
func (c *Client) listed(cmd *goredis.Cmd, key, namespace string) (state backends.State, there bool, err error) {
	val, err := cmd.Result()
	if err != nil {
		return state, false, c.classify(err, key)
	}
	words, err := c.understand(val, key)
	if err != nil || at(words, 2) == "" { // it was deleted since the scan
		return state, false, err
	}
	if state, err = c.state(words); err != nil {
		return state, false, err
	}
	if keyOf(state.Namespace, state.Lease) != key || state.Namespace != namespace {
		return state, false, c.foreign(key)
	}
	state.History = nil
	return state, true, nil
}

// Records implements [backends.Backend].
func (c *Client) Records() backends.Records { return records{c} }

type records struct{ c *Client }

// Get implements [backends.Records].
func (r records) Get(ctx context.Context, namespace, lease, key string) (backends.Record, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return backends.Record{}, err
	}
	words, err := r.c.eval(ctx, toGetRecord, namespace, lease, false, key)
	if err != nil {
		return backends.Record{}, err
	}
	if words[0] == "none" {
		return backends.Record{}, noRecord(namespace, lease, key)
	}
	return r.record(namespace, lease, key, at(words, 2), at(words, 1))
}

func noRecord(namespace, lease, key string) error {
	return &missing{backends.Display(namespace, lease), key}
}

// missing is [backends.ErrNoRecord].
type missing struct{ lease, key string }

func (m *missing) Error() string { return "no such record: \"" + m.key + "\" of \"" + m.lease + "\"" }

func (m *missing) Is(target error) bool { return target == backends.ErrNoRecord }

// record reads what is stored: version, when it was written, bytes.
func (r records) record(namespace, lease, key, raw, now string) (backends.Record, error) {
	version, rest, ok1 := strings.Cut(raw, " ")
	written, value, ok2 := strings.Cut(rest, " ")
	var d digits
	rec := backends.Record{Namespace: namespace, Lease: lease, Key: key, Value: []byte(value), Version: d.read(version)}
	rec.Age = time.Duration(d.read(now)-d.read(written)) * time.Millisecond
	if d.err != nil || !ok1 || !ok2 {
		return backends.Record{}, backends.Broken(nil, "%s: the record %q of %q cannot be read", r.c.address, key, backends.Display(namespace, lease))
	}
	return rec, nil
}

// Put implements [backends.Records].
func (r records) Put(ctx context.Context, namespace, lease string, p backends.Put, while *backends.Grant) (int64, error) {
	if err := errors.Join(backends.CheckNames(namespace, lease), p.Check()); err != nil {
		return 0, err
	}
	handle, slot, term := "", "", ""
	if while != nil {
		handle, slot, term = while.Handle, strconv.Itoa(while.Slot), while.Term.String()
	}
	words, err := r.c.eval(ctx, toPutRecord, namespace, lease, true, handle, slot, term, p.Key, p.Version, p.Value)
	if err != nil {
		return 0, err
	}
	var d digits
	version := d.read(at(words, 1))
	if d.err != nil {
		return 0, r.c.unreadable(d.err)
	}
	return version, nil
}

// List implements [backends.Records].
func (r records) List(ctx context.Context, namespace, lease string) ([]backends.Record, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return nil, err
	}
	words, err := r.c.eval(ctx, toListRecords, namespace, lease, false)
	if err != nil {
		return nil, err
	}
	var all []backends.Record
	for i := 2; i+1 < len(words); i += 2 {
		one, err := r.record(namespace, lease, words[i], words[i+1], words[1])
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b backends.Record) int { return strings.Compare(a.Key, b.Key) })
	return all, nil
}

// Delete implements [backends.Records].
func (r records) Delete(ctx context.Context, namespace, lease, key string) error {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return err
	}
	_, err := r.c.eval(ctx, toDeleteRecord, namespace, lease, false, key)
	return err
}
