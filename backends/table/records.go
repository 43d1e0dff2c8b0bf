package table

import (
	"context"
	"encoding/hex"
	"errors"
	"slices"
	"strings"

	"github.com/underlease/underlease/backends"
)

type records struct{ c *Client }

// missing is [backends.ErrNoRecord].
type missing struct{ lease, key string }

func (m *missing) Error() string { return "no such record: \"" + m.key + "\" of \"" + m.lease + "\"" }

func (m *missing) Is(target error) bool { return target == backends.ErrNoRecord }

// all returns a lease with its records, or nil where there is no row.
func (r records) all(ctx context.Context, namespace, name string) (*lease, error) {
	if err := backends.CheckNames(namespace, name); err != nil {
		return nil, err
	}
	row, err := run(ctx, r.c.db, func(ctx context.Context) (*Row, error) { return r.c.db.Read(ctx, Key{namespace, name}) })
	if err != nil || row == nil {
		return nil, err
	}
	return r.c.read(row)
}

// Get implements [backends.Records].
func (r records) Get(ctx context.Context, namespace, name, key string) (backends.Record, error) {
	l, err := r.all(ctx, namespace, name)
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
	l, err := r.all(ctx, namespace, name)
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
	return r.c.change(ctx, Key{namespace, name}, false, func(l *lease) error {
		coded := hex.EncodeToString([]byte(key))
		if _, ok := l.records[coded]; !ok {
			return errNothing
		}
		delete(l.records, coded)
		return nil
	})
}
