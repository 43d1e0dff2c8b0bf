package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/underlease/underlease/backends"
)

// The keys of the records that belong to a lease, and the version of their form. Each is one JSON object.
const (
	markerKey  = "marker"
	auditKey   = "marker-audit"
	successKey = "last-success"

	recordVersion = 1
)

// Ran is one success, as it is kept.
type Ran struct {
	Term   backends.Term // zero: not by a run
	Holder string
	RunID  string
	At     time.Time     // when the lease was acquired, by the store's clock; zero where that is not known
	Took   time.Duration // from the start of the command to the end of its tree
	Until  time.Duration // from the acquisition to the writing of the record, by the holder's clock
}

// ago returns how long ago the run began, if its record is that old.
func (r Ran) ago(age time.Duration) time.Duration { return r.Until + age }

// Marker says that something is applied, once for all. It is read by people and by the holders of its lease.
type Marker struct {
	Ran
	By     string // who set it by hand; empty where a run did
	Reason string // of the former; may be empty
}

// MarkerRecord is a marker as it is found.
type MarkerRecord struct {
	Marker
	Namespace, ID string
	Age           time.Duration // since it was written, by the store's clock
}

// Change is an entry of the list of what was done to a marker by hand.
type Change struct {
	What   string    `json:"what"` // "set" or "clear"
	By     string    `json:"by"`
	At     time.Time `json:"at"` // by the clock of the host on which it was done
	Reason string    `json:"reason"`
}

// changesKept is how many changes stay with a marker.
const changesKept = 50

// ranForm is [Ran] as it is stored.
type ranForm struct {
	Term    backends.Term `json:"term"`
	Holder  string        `json:"holder"`
	RunID   string        `json:"run_id"`
	At      int64         `json:"at_ms"` // since 1970; zero: not known
	TookMs  int64         `json:"took_ms"`
	UntilMs int64         `json:"until_ms"`
}

func (r Ran) form() ranForm {
	f := ranForm{Term: r.Term, Holder: r.Holder, RunID: r.RunID, TookMs: r.Took.Milliseconds(), UntilMs: r.Until.Milliseconds()}
	if !r.At.IsZero() {
		f.At = r.At.UnixMilli()
	}
	return f
}

func (f ranForm) ran() Ran {
	r := Ran{
		Term: f.Term, Holder: f.Holder, RunID: f.RunID,
		Took: time.Duration(f.TookMs) * time.Millisecond, Until: time.Duration(f.UntilMs) * time.Millisecond,
	}
	if f.At != 0 {
		r.At = time.UnixMilli(f.At).UTC()
	}
	return r
}

type markerForm struct {
	Version int `json:"version"`
	ranForm
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
}

type successForm struct {
	Version int       `json:"version"`
	Runs    []ranForm `json:"runs"` // newest first
}

type auditForm struct {
	Version int      `json:"version"`
	Changes []Change `json:"changes"` // newest first
}

func encodeForm(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and numbers alone
	}
	return b
}

// decodeForm reads a record. One that is damaged, or of a newer program, is [backends.ErrBroken]: what it says is not known.
func decodeForm(rec backends.Record, into any) error {
	var head struct {
		Version int `json:"version"`
	}
	name := backends.Display(rec.Namespace, rec.Lease)
	if err := json.Unmarshal(rec.Value, &head); err != nil {
		return backends.Broken(nil, "the record %q of %q cannot be read", rec.Key, name)
	}
	if head.Version != recordVersion {
		return backends.Broken(nil, "the record %q of %q has the version %d, and this program knows only %d", rec.Key, name, head.Version, recordVersion)
	}
	if err := json.Unmarshal(rec.Value, into); err != nil {
		return backends.Broken(nil, "the record %q of %q cannot be read", rec.Key, name)
	}
	return nil
}

func (m Marker) encode() []byte {
	return encodeForm(markerForm{Version: recordVersion, ranForm: m.form(), By: m.By, Reason: m.Reason})
}

func decodeMarker(rec backends.Record) (Marker, error) {
	var f markerForm
	if err := decodeForm(rec, &f); err != nil {
		return Marker{}, err
	}
	return Marker{Ran: f.ran(), By: f.By, Reason: f.Reason}, nil
}

// successesKept is enough for the slot that is and the one before it, of whatever length: a slot has one success.
const successesKept = 2

func encodeSuccess(runs []Ran) []byte {
	f := successForm{Version: recordVersion}
	for _, r := range runs[:min(len(runs), successesKept)] {
		f.Runs = append(f.Runs, r.form())
	}
	return encodeForm(f)
}

func decodeSuccess(rec backends.Record) (runs []Ran, err error) {
	var f successForm
	if err := decodeForm(rec, &f); err != nil {
		return nil, err
	}
	for _, r := range f.Runs {
		runs = append(runs, r.ran())
	}
	return runs, nil
}

// Markers are the markers of a store, for those who look at them and change them by hand.
type Markers struct {
	Store *backends.Store
	Limit time.Duration // of one request
}

func ask[T any](ctx context.Context, m Markers, f func(context.Context) (T, error)) (T, error) {
	return call(ctx, m.Store.Address, m.Limit, f)
}

// Get returns a marker. [backends.ErrNoRecord] says that there is none.
func (m Markers) Get(ctx context.Context, namespace, id string) (MarkerRecord, error) {
	rec, err := ask(ctx, m, func(ctx context.Context) (backends.Record, error) {
		return m.Store.Records().Get(ctx, namespace, id, markerKey)
	})
	if err != nil {
		return MarkerRecord{}, err
	}
	marker, err := decodeMarker(rec)
	return MarkerRecord{Marker: marker, Namespace: namespace, ID: id, Age: max(0, rec.Age)}, err
}

// List returns the markers of a namespace, ordered by name. Those that cannot be read are left out, and the first reason is returned with
// the others.
func (m Markers) List(ctx context.Context, namespace string) ([]MarkerRecord, error) {
	states, failed := ask(ctx, m, func(ctx context.Context) ([]backends.State, error) { return m.Store.List(ctx, namespace) })
	var all []MarkerRecord
	for _, s := range states {
		one, err := m.Get(ctx, namespace, s.Lease)
		switch {
		case err == nil:
			all = append(all, one)
		case errors.Is(err, backends.ErrNoRecord):
		case failed == nil:
			failed = err
		}
	}
	return all, failed
}

// Changes returns what was done to a marker by hand, newest first.
func (m Markers) Changes(ctx context.Context, namespace, id string) ([]Change, error) {
	changes, _, err := m.changes(ctx, namespace, id)
	return changes, err
}

func (m Markers) changes(ctx context.Context, namespace, id string) ([]Change, int64, error) {
	rec, err := ask(ctx, m, func(ctx context.Context) (backends.Record, error) {
		return m.Store.Records().Get(ctx, namespace, id, auditKey)
	})
	if errors.Is(err, backends.ErrNoRecord) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	var f auditForm
	if err := decodeForm(rec, &f); err != nil {
		return nil, 0, err
	}
	return f.Changes, rec.Version, nil
}

// note writes down what is about to be done. It comes first: a change without a note cannot be, a note without its change can.
func (m Markers) note(ctx context.Context, namespace, id string, c Change) error {
	const attempts = 10 // of people at one marker
	for i := 1; ; i++ {
		changes, version, err := m.changes(ctx, namespace, id)
		if err != nil {
			return err
		}
		f := auditForm{Version: recordVersion, Changes: append([]Change{c}, changes...)}
		f.Changes = f.Changes[:min(len(f.Changes), changesKept)]
		_, err = ask(ctx, m, func(ctx context.Context) (int64, error) {
			return m.Store.Records().Put(ctx, namespace, id, backends.Put{Key: auditKey, Value: encodeForm(f), Version: version}, nil)
		})
		if !errors.Is(err, backends.ErrConflict) || i == attempts {
			return err
		}
	}
}

// Set sets a marker by hand. One that is there stays as it is, and is not noted; then set is false.
func (m Markers) Set(ctx context.Context, namespace, id string, c Change) (set bool, err error) {
	if _, err := m.Get(ctx, namespace, id); !errors.Is(err, backends.ErrNoRecord) {
		return false, err
	}
	c.What = "set"
	if err := m.note(ctx, namespace, id, c); err != nil {
		return false, err
	}
	value := Marker{By: c.By, Reason: c.Reason}.encode()
	_, err = ask(ctx, m, func(ctx context.Context) (int64, error) {
		return m.Store.Records().Put(ctx, namespace, id, backends.Put{Key: markerKey, Value: value}, nil)
	})
	if errors.Is(err, backends.ErrConflict) { // meanwhile a run was faster; or our own answer was lost
		_, err = m.Get(ctx, namespace, id)
		return false, err
	}
	return err == nil, err
}

// Clear removes a marker. Without one nothing is noted, and cleared is false. One that cannot be read is removed too.
func (m Markers) Clear(ctx context.Context, namespace, id string, c Change) (cleared bool, err error) {
	switch _, err := m.Get(ctx, namespace, id); {
	case errors.Is(err, backends.ErrNoRecord):
		return false, nil
	case err != nil && !errors.Is(err, backends.ErrBroken):
		return false, err
	}
	c.What = "clear"
	if err := m.note(ctx, namespace, id, c); err != nil {
		return false, err
	}
	_, err = ask(ctx, m, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, m.Store.Records().Delete(ctx, namespace, id, markerKey)
	})
	if err != nil {
		return false, fmt.Errorf("the marker of %q: %w", backends.Display(namespace, id), err)
	}
	return true, nil
}
