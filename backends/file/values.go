package file

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/underlease/underlease/backends"
)

// values are the durable records of a client. They stand in the record of their lease and are on the disk before Put
// and Delete return.
type values struct{ c *Client }

func (v values) read(namespace, lease string) (*record, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return nil, err
	}
	dir := v.c.lease(namespace, lease)
	if err := v.c.safe(dir); err != nil {
		return nil, err
	}
	path := dir + "/rec"
	rec, err := readRecord(path)
	if err != nil || rec == nil {
		return nil, err
	}
	return rec, rec.belongs(path, namespace, lease)
}

func (v values) show(r *record, i int) backends.Record {
	x := r.values[i]
	return backends.Record{
		Namespace: r.namespace, Lease: r.lease, Key: x.key, Value: []byte(x.bytes), Version: x.version,
		Age: time.Duration(v.c.clock.wall() - x.written),
	}
}

// Get implements [backends.Records].
func (v values) Get(ctx context.Context, namespace, lease, key string) (backends.Record, error) {
	if err := v.usable(ctx); err != nil {
		return backends.Record{}, err
	}
	rec, err := v.read(namespace, lease)
	if err != nil {
		return backends.Record{}, err
	}
	if rec != nil {
		for i := range rec.values {
			if rec.values[i].key == key {
				return v.show(rec, i), nil
			}
		}
	}
	return backends.Record{}, fmt.Errorf("%w: %q of %q", backends.ErrNoRecord, key, backends.Display(namespace, lease))
}

// List implements [backends.Records].
func (v values) List(ctx context.Context, namespace, lease string) ([]backends.Record, error) {
	if err := v.usable(ctx); err != nil {
		return nil, err
	}
	rec, err := v.read(namespace, lease)
	if err != nil || rec == nil {
		return nil, err
	}
	var all []backends.Record
	for i := range rec.values {
		all = append(all, v.show(rec, i))
	}
	return all, nil
}

// Put implements [backends.Records].
func (v values) Put(ctx context.Context, namespace, lease string, p backends.Put, while *backends.Grant) (int64, error) {
	if err := errors.Join(backends.CheckNames(namespace, lease), p.Check()); err != nil {
		return 0, err
	}
	why := toMake
	if while != nil {
		why = toChange
	}
	d, err := v.c.enter(ctx, namespace, lease, why)
	if err != nil {
		return 0, err
	}
	if d == nil {
		return 0, backends.Lost(nil, "the lease %q was deleted", backends.Display(namespace, lease))
	}
	defer d.leave()
	if while != nil {
		if err := d.inForce(*while); err != nil {
			return 0, err
		}
	}
	version, err := d.record().put(p, v.c.clock.wall())
	if err != nil {
		return 0, fmt.Errorf("%w: %q of %q", err, p.Key, backends.Display(namespace, lease))
	}
	return version, d.write(true)
}

// inForce returns [backends.ErrLost] unless the grant stands.
func (d *door) inForce(g backends.Grant) error {
	if h := d.c.holds(d.dir, g.Handle); h != nil {
		_, err := h.look()
		return err
	}
	// A grant of another client: its lock is held by somebody, and the record says by whom.
	s := d.record().carrying(g.Handle)
	if s == nil || s.number != g.Slot || s.term != g.Term || s.ask.kind == string(backends.AskBreak) {
		return backends.Lost(nil, "%s does not name this holder", d.path)
	}
	locked, _, err := d.locked(s.number)
	if err == nil && !locked {
		err = backends.Lost(nil, "the lock of slot %d is not held by anybody", s.number)
	}
	return err
}

// Delete implements [backends.Records].
func (v values) Delete(ctx context.Context, namespace, lease, key string) error {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return err
	}
	d, err := v.c.enter(ctx, namespace, lease, toChange)
	if err != nil || d == nil {
		return err
	}
	defer d.leave()
	all := d.record().values
	for i := range all {
		if all[i].key == key {
			d.rec.values = append(all[:i], all[i+1:]...)
			return d.write(true)
		}
	}
	return nil
}

func (v values) usable(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return backends.Unavailable(err, "%s", v.c.dir)
	}
	return nil
}
