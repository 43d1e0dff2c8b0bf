package quorum

import (
	"context"
	"encoding/json"
	"errors"
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
	var view, ends, queue View
	var err, endsErr, queueErr error
	together(
		func() { view, err = c.store.Read(ctx, p.lease()) },
		func() { ends, endsErr = c.store.Read(ctx, p.ends()) },
		func() { queue, queueErr = c.store.Read(ctx, p.queue()) },
	)
	if err := first(err, endsErr, queueErr); err != nil {
		return backends.State{}, err
	}
	l, err := c.parse(p, view)
	if err != nil {
		return backends.State{}, err
	}
	state := c.state(ctx, l)
	state.Waiters = new(len(queue.Pairs))
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
func (c *Client) List(ctx context.Context, namespace string) (states []backends.State, err error) {
	var troubles []error
	err = c.Walk(ctx, namespace, func(s backends.State, err error) bool {
		if err != nil {
			troubles = append(troubles, err)
		} else {
			states = append(states, s)
		}
		return true
	})
	return states, errors.Join(append(troubles, err)...)
}

// Walk implements [backends.Walker]. All leases are read at once, as they were at one moment; what is left of each is asked for while
// they are shown.
func (c *Client) Walk(ctx context.Context, namespace string, show func(backends.State, error) bool) error {
	if err := backends.CheckNamespace(namespace); err != nil {
		return &backends.ConfigError{Text: err.Error()}
	}
	var view, queue View
	var err, queueErr error
	together(
		func() { view, err = c.store.Read(ctx, c.namespaces("lease", namespace)) },
		func() { queue, queueErr = c.store.Read(ctx, c.namespaces("queue", namespace)) },
	)
	if err := first(err, queueErr); err != nil {
		return err
	}
	waiters := map[string]int{} // by the prefix of the lease's tickets
	for _, pair := range queue.Pairs {
		waiters[pair.Key[:strings.LastIndexByte(pair.Key, '/')+1]]++
	}
	all := c.prune(ctx, c.listed(namespace, view))
	for from := 0; from < len(all); from += atOnce {
		some := all[from:min(from+atOnce, len(all))]
		states := make([]backends.State, len(some))
		fs := []func(){func() {}}
		for i, l := range some {
			if l.err != nil {
				states[i] = backends.State{Namespace: namespace, Lease: l.place.name}
				continue
			}
			fs = append(fs, func() {
				states[i] = c.state(ctx, l.lease)
				states[i].History, states[i].Waiters = nil, new(waiters[l.place.queue()])
			})
		}
		together(fs...)
		for i, l := range some {
			if l.err == nil && len(states[i].Slots) == 0 {
				continue // nobody had it: an acquisition was abandoned
			}
			if !show(states[i], l.err) {
				return nil
			}
		}
	}
	return nil
}

// listed is a lease of a list, or why it cannot be shown.
type listed struct {
	*lease
	err error
}

// listed returns the leases that keys belong to, ordered by name. Those whose name is not known come first.
func (c *Client) listed(namespace string, view View) (all []listed) {
	prefix := c.namespaces("lease", namespace)
	groups := map[string][]Pair{}
	for _, pair := range view.Pairs {
		key, _, _ := strings.Cut(strings.TrimPrefix(pair.Key, prefix), "/")
		groups[key] = append(groups[key], pair)
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		p := place{c.options.Root, namespace, nameOf(groups[key])}
		if p.name == "" && backends.Key(namespace, key) == key {
			p.name = key
		}
		l, err := c.parse(p, View{Pairs: groups[key], Version: view.Version})
		switch {
		case err != nil:
			all = append(all, listed{&lease{place: p}, err})
		case l.version != 0: // without its doc nobody knows its name
			all = append(all, listed{l, nil})
		}
	}
	slices.SortStableFunc(all, func(a, b listed) int { return strings.Compare(a.place.name, b.place.name) })
	return all
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

// prune deletes leases that were not used for the retention, and returns the others. Those with records stay. That it cannot be done, for
// lack of a right perhaps, is no matter of who lists.
func (c *Client) prune(ctx context.Context, all []listed) (others []listed) {
	old, pruned := c.millis()-retention.Milliseconds(), 0
	for _, l := range all {
		unused := l.err == nil && len(l.grants) == 0 && len(l.holds) == 0 && int64(l.doc.Term) < old
		if unused && pruned < mostPruned && c.delete(ctx, l.lease) {
			pruned++
		} else {
			others = append(others, l)
		}
	}
	return others
}

// delete deletes a lease that nobody has, with its history. Its term stays in the mark of the namespace: neither the clock of who lists
// nor that of who acquires next can be trusted to be further than it.
func (c *Client) delete(ctx context.Context, l *lease) bool {
	kept, err := c.store.Read(ctx, l.place.records())
	if err != nil || len(kept.Pairs) > 0 {
		return false
	}
	h, err := c.marked(ctx, l.place)
	if err != nil {
		return false
	}
	var t Txn
	t.check(l.place.doc(), l.version)
	t.delete(l.place.doc())
	if h.Term < l.doc.Term {
		t.check(l.place.high(), h.version)
		t.put(l.place.high(), stored(high{Form: form, Term: l.doc.Term}), "")
	}
	for i := range min(l.doc.Ends, backends.HistoryLength) {
		t.delete(l.place.end(i + 1))
	}
	_, ok, err := c.store.Commit(ctx, t)
	return err == nil && ok
}
