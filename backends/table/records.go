package table

import (
	"context"
	"encoding/hex"
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/underlease/underlease/backends"
)

type records struct{ c *Client }

// missing is [backends.ErrNoRecord].
type missing struct{ lease, key string }

func (m *missing) Error() string { return "no such record: \"" + m.key + "\" of \"" + m.lease + "\"" }

func (m *missing) Is(target error) bool { return target == backends.ErrNoRecord }

// mark returns what a job has written for the marker of a lease, where the lease's row does not know it.
func (r records) mark(ctx context.Context, k Key, l *lease) (*Mark, error) {
	if l != nil && l.marked() {
		return nil, nil
	}
	return look(ctx, r.c.db, func(ctx context.Context) (*Mark, error) { return r.c.db.Mark(ctx, k) })
}

// all returns a lease with its records, or nil where it has none. Where its marker is looked for, too, one that a job has written is
// moved into its row.
func (r records) all(ctx context.Context, namespace, name string, marker bool) (l *lease, err error) {
	if err := backends.CheckNames(namespace, name); err != nil {
		return nil, err
	}
	k := Key{namespace, name}
	row, err := look(ctx, r.c.db, func(ctx context.Context) (*Row, error) { return r.c.db.Read(ctx, k) })
	if err != nil {
		return nil, err
	}
	if row != nil {
		if l, err = r.c.read(row); err != nil {
			return nil, err
		}
	}
	if !marker {
		return l, nil
	}
	m, err := r.mark(ctx, k, l)
	if err != nil || m == nil {
		return l, err
	}
	// It is asked for again under the revision of the row, which whoever clears the marker changes after it has deleted this one.
	err = r.c.change(ctx, k, true, func(moved *lease) (err error) {
		if m, err = r.mark(ctx, k, moved); err != nil {
			return err
		}
		l = moved
		if m == nil {
			return errNothing
		}
		l.adopt(m)
		return nil
	})
	if err == nil && m != nil {
		_ = r.c.db.Unmark(ctx, k, m.Version) // else it is passed over
	}
	return l, err
}

// Get implements [backends.Records].
func (r records) Get(ctx context.Context, namespace, name, key string) (backends.Record, error) {
	l, err := r.all(ctx, namespace, name, key == MarkerKey)
	if err != nil {
		return backends.Record{}, err
	}
	if l != nil {
		coded := hex.EncodeToString([]byte(key))
		if one, ok := l.records[coded]; ok {
			return l.record(coded, one)
		}
	}
	return backends.Record{}, &missing{backends.Display(namespace, name), key}
}

// List implements [backends.Records].
func (r records) List(ctx context.Context, namespace, name string) ([]backends.Record, error) {
	l, err := r.all(ctx, namespace, name, true)
	if err != nil || l == nil {
		return nil, err
	}
	var list []backends.Record
	for key, one := range l.records {
		rec, err := l.record(key, one)
		if err != nil {
			return nil, err
		}
		list = append(list, rec)
	}
	slices.SortFunc(list, func(a, b backends.Record) int { return strings.Compare(a.Key, b.Key) })
	return list, nil
}

// Put implements [backends.Records].
func (r records) Put(ctx context.Context, namespace, name string, p backends.Put, while *backends.Grant) (version int64, err error) {
	if err := errors.Join(backends.CheckNames(namespace, name), p.Check()); err != nil {
		return 0, err
	}
	found := false
	err = r.c.change(ctx, Key{namespace, name}, while == nil, func(l *lease) (err error) {
		found = true
		if while != nil {
			h := heldBy(*while)
			h.Key = Key{namespace, name}
			s, why := l.force(h)
			if why != "" {
				return backends.Lost(nil, "%s", why)
			}
			l.before = s.Expiry
		}
		if p.Key == MarkerKey {
			m, err := r.mark(ctx, Key{namespace, name}, l)
			if err != nil {
				return err
			}
			l.adopt(m)
		}
		version, err = l.put(p)
		return err
	})
	if err == nil && !found {
		err = backends.Lost(nil, "it was deleted")
	}
	return version, err
}

// Delete implements [backends.Records].
func (r records) Delete(ctx context.Context, namespace, name, key string) error {
	if err := backends.CheckNames(namespace, name); err != nil {
		return err
	}
	k := Key{namespace, name}
	if key == MarkerKey {
		if _, err := look(ctx, r.c.db, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, r.c.db.Unmark(ctx, k, math.MaxInt64)
		}); err != nil {
			return err
		}
	}
	return r.c.change(ctx, k, false, func(l *lease) error {
		coded := hex.EncodeToString([]byte(key))
		if _, ok := l.records[coded]; !ok && key != MarkerKey {
			return errNothing
		}
		delete(l.records, coded)
		return nil
	})
}
