package quorum

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
)

// Inspect implements [backends.Backend].
func (c *Client) Inspect(ctx context.Context, namespace, name string) (backends.State, error) {
	if err := backends.CheckNames(namespace, name); err != nil {
		return backends.State{}, err
	}
	p := c.place(namespace, name)
	var view, ends View
	var err, endsErr error
	together(
		func() { view, err = c.store.Read(ctx, p.lease()) },
		func() { ends, endsErr = c.store.Read(ctx, p.ends()) },
	)
	if err := first(err, endsErr); err != nil {
		return backends.State{}, err
	}
	l, err := c.parse(p, view)
	if err != nil {
		return backends.State{}, err
	}
	state := c.state(ctx, l)
	var all []past
	for _, pair := range ends.Pairs {
		var e past
		if err := json.Unmarshal(pair.Value, &e); err != nil {
			return backends.State{}, c.damaged(pair.Key, err)
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b past) int { return int(max(-1, min(1, b.Count-a.Count))) })
	for _, e := range all {
		state.History = append(state.History, backends.Past{Slot: e.Slot, Term: e.Term, Holder: e.Holder, Since: time.UnixMilli(e.Since), End: e.End.end()})
	}
	state.History = state.History[:min(len(state.History), backends.HistoryLength)]
	return state, nil
}

// state shows a lease. Its history has those alone whose end nobody has written yet.
func (c *Client) state(ctx context.Context, l *lease) backends.State {
	state := backends.State{Namespace: l.place.namespace, Lease: l.place.name}
	numbers := map[int]bool{}
	for _, s := range l.doc.Slots {
		numbers[s.Slot] = true
	}
	for i := range l.grants {
		numbers[i] = true
	}
	for i := range l.holds {
		numbers[i] = true
	}
	for _, i := range slices.Sorted(maps.Keys(numbers)) {
		s := l.doc.entry(i)
		slot := backends.SlotState{Slot: i, Term: s.Term, Last: s.Last.end()}
		switch g, h := l.grants[i], l.holds[i]; {
		case g != nil:
			slot.Held, slot.Holder, slot.Term, slot.Since, slot.Ask = true, g.Holder, g.Term, time.UnixMilli(g.Since), l.asks[i].ask()
		case h != nil:
			slot.Kept, slot.Holder, slot.Term, slot.Since = true, h.Holder, h.Term, time.UnixMilli(h.Since)
		}
		if s.Open && !slot.Held {
			slot.Last = unknown.end()
			state.History = append(state.History, backends.Past{Slot: i, Term: s.Term, Holder: s.Holder, Since: time.UnixMilli(s.Since), End: slot.Last})
		}
		state.Slots = append(state.Slots, slot)
	}
	n := 0
	for i := range numbers {
		n = max(n, i+1)
	}
	left := c.left(ctx, l, min(n, mostShown))
	for i := range state.Slots {
		if slot := &state.Slots[i]; slot.Taken() && slot.Slot < len(left) {
			slot.Left = left[slot.Slot]
		}
	}
	return state
}

// mostShown bounds for how many slots of one lease the store is asked what is left.
const mostShown = 100

// atOnce is how many leases of a list are looked at at the same time.
const atOnce = 8

// List implements [backends.Backend].
func (c *Client) List(ctx context.Context, namespace string) ([]backends.State, error) {
	if err := backends.CheckNamespace(namespace); err != nil {
		return nil, &backends.ConfigError{Text: err.Error()}
	}
	prefix := c.namespaces("lease", namespace)
	view, err := c.store.Read(ctx, prefix)
	if err != nil {
		return nil, err
	}
	groups := map[string][]Pair{}
	for _, pair := range view.Pairs {
		key, _, _ := strings.Cut(strings.TrimPrefix(pair.Key, prefix), "/")
		groups[key] = append(groups[key], pair)
	}
	var leases []*lease
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		l, err := c.parse(place{c.options.Root, namespace, nameOf(groups[key])}, View{Pairs: groups[key], Version: view.Version})
		if err != nil {
			return nil, err
		}
		if l.version != 0 { // without its doc nobody knows its name
			leases = append(leases, l)
		}
	}
	leases = c.prune(ctx, leases)
	states := make([]backends.State, len(leases))
	for from := 0; from < len(leases); from += atOnce {
		var fs []func()
		for i := from; i < min(from+atOnce, len(leases)); i++ {
			fs = append(fs, func() { states[i] = c.state(ctx, leases[i]) })
		}
		together(fs...)
	}
	for i := range states {
		states[i].History = nil
	}
	slices.SortFunc(states, func(a, b backends.State) int { return strings.Compare(a.Lease, b.Lease) })
	return states, nil
}

// nameOf returns the plain name of the lease that keys belong to, as its doc says it.
func nameOf(pairs []Pair) string {
	for _, pair := range pairs {
		if strings.HasSuffix(pair.Key, "/doc") {
			var d doc
			if json.Unmarshal(pair.Value, &d) == nil {
				return d.Name
			}
		}
	}
	return ""
}

const (
	// retention is how long a lease that nobody uses is remembered.
	retention = 7 * 24 * time.Hour
	// mostPruned bounds what one list deletes.
	mostPruned = 100
)

// prune deletes leases that were not used for the retention, and returns the others. Those with records stay. The term starts from
// a clock then, which is further than it ever was. That it cannot be done, for lack of a right perhaps, is no matter of who lists.
func (c *Client) prune(ctx context.Context, leases []*lease) (others []*lease) {
	old, pruned := millis()-retention.Milliseconds(), 0
	for _, l := range leases {
		if pruned < mostPruned && len(l.grants) == 0 && len(l.holds) == 0 && int64(l.doc.Term) < old && c.delete(ctx, l) {
			pruned++
		} else {
			others = append(others, l)
		}
	}
	return others
}

// delete deletes a lease that nobody has, with its history.
func (c *Client) delete(ctx context.Context, l *lease) bool {
	kept, err := c.store.Read(ctx, l.place.records())
	if err != nil || len(kept.Pairs) > 0 {
		return false
	}
	var t Txn
	t.check(l.place.doc(), l.version)
	t.delete(l.place.doc())
	for i := range min(l.doc.Ends, backends.HistoryLength) {
		t.delete(l.place.end(i + 1))
	}
	_, ok, err := c.store.Commit(ctx, t)
	return err == nil && ok
}
