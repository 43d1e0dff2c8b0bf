package quorum

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
)

// Records implements [backends.Backend]. The version of a record is that of its key, which grows over all writes of the store.
func (c *Client) Records() backends.Records { return records{c} }

type records struct{ c *Client }

// put adds the write of a record to a transaction.
func (c *Client) put(t *Txn, p place, put backends.Put) {
	key := p.record(put.Key)
	if put.Version != backends.AnyVersion {
		t.check(key, put.Version)
	}
	t.put(key, append(strconv.AppendInt(nil, c.millis(), 10), append([]byte{' '}, put.Value...)...), "")
}

// missing is [backends.ErrNoRecord].
type missing struct{ lease, key string }

func (m *missing) Error() string { return fmt.Sprintf("no such record: %q of %q", m.key, m.lease) }

func (m *missing) Is(target error) bool { return target == backends.ErrNoRecord }

// Get implements [backends.Records].
func (r records) Get(ctx context.Context, namespace, lease, key string) (backends.Record, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return backends.Record{}, err
	}
	p := r.c.place(namespace, lease)
	pair, err := r.c.key(ctx, p.record(key))
	if err != nil {
		return backends.Record{}, err
	}
	if pair == nil {
		return backends.Record{}, &missing{backends.Display(namespace, lease), key}
	}
	return r.c.record(p, *pair)
}

// key reads one key. Nil: there is none.
func (c *Client) key(ctx context.Context, key string) (*Pair, error) {
	view, err := c.store.Read(ctx, key)
	if err != nil {
		return nil, err
	}
	for _, pair := range view.Pairs {
		if pair.Key == key {
			return &pair, nil
		}
	}
	return nil, nil
}

func (c *Client) record(p place, pair Pair) (backends.Record, error) {
	key, err := unescape(strings.TrimPrefix(pair.Key, p.records()))
	written, value, ok := bytes.Cut(pair.Value, []byte{' '})
	at, err2 := strconv.ParseInt(string(written), 10, 64)
	if err != nil || err2 != nil || !ok {
		return backends.Record{}, backends.Broken(nil, "%s: the key %s is damaged", c.store.Address(), pair.Key)
	}
	return backends.Record{
		Namespace: p.namespace, Lease: p.name, Key: key, Value: value, Version: pair.Version,
		// By the clocks of two hosts: what seems to come is their difference.
		Age: max(0, time.Duration(c.millis()-at)*time.Millisecond),
	}, nil
}

// Put implements [backends.Records].
func (r records) Put(ctx context.Context, namespace, lease string, put backends.Put, while *backends.Grant) (int64, error) {
	if err := first(backends.CheckNames(namespace, lease), put.Check()); err != nil {
		return 0, err
	}
	p := r.c.place(namespace, lease)
	for range mostRounds {
		var t Txn
		if while != nil {
			there, err := r.c.inForce(ctx, p, *while)
			if err != nil {
				return 0, err
			}
			t.same(there.pair)
		}
		r.c.put(&t, p, put)
		version, ok, err := r.c.store.Commit(ctx, t)
		if err != nil || ok {
			return version, err
		}
		if err := r.c.conflict(ctx, p, []backends.Put{put}); err != nil {
			if while != nil {
				if _, lost := r.c.inForce(ctx, p, *while); lost != nil {
					return 0, lost
				}
			}
			return 0, err
		}
	}
	return 0, r.c.contended(p)
}

// conflict returns [backends.ErrConflict] if a record has another version than its put compares with.
func (c *Client) conflict(ctx context.Context, p place, puts []backends.Put) error {
	for _, put := range puts {
		if put.Version == backends.AnyVersion {
			continue
		}
		pair, err := c.key(ctx, p.record(put.Key))
		if err != nil {
			return err
		}
		version := int64(0)
		if pair != nil {
			version = pair.Version
		}
		if version != put.Version {
			return fmt.Errorf("%w: %q", backends.ErrConflict, put.Key)
		}
	}
	return nil
}

// inForce returns the key of a grant that is in force, or [backends.ErrLost].
func (c *Client) inForce(ctx context.Context, p place, g backends.Grant) (*grant, error) {
	view, err := c.store.Read(ctx, p.slot(g.Slot))
	if err != nil {
		return nil, err
	}
	l, err := c.parse(p, view)
	if err != nil {
		return nil, err
	}
	return l.of(g)
}

// List implements [backends.Records].
func (r records) List(ctx context.Context, namespace, lease string) ([]backends.Record, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return nil, err
	}
	p := r.c.place(namespace, lease)
	view, err := r.c.store.Read(ctx, p.records())
	if err != nil {
		return nil, err
	}
	var all []backends.Record
	for _, pair := range view.Pairs {
		rec, err := r.c.record(p, pair)
		if err != nil {
			return nil, err
		}
		all = append(all, rec)
	}
	slices.SortFunc(all, func(a, b backends.Record) int { return strings.Compare(a.Key, b.Key) })
	return all, nil
}

// Delete implements [backends.Records].
func (r records) Delete(ctx context.Context, namespace, lease, key string) error {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return err
	}
	var t Txn
	t.delete(r.c.place(namespace, lease).record(key))
	_, _, err := r.c.store.Commit(ctx, t)
	return err
}
