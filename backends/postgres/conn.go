package postgres

import (
	"context"
	"encoding/hex"
	"errors"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/underlease/underlease/backends/table"
)

// database is [table.Database].
type database struct {
	settings *settings
	address  string
	text     *sql
	pool     *table.Pool[*conn]
	turn     time.Duration
}

var (
	_ table.Database = (*database)(nil)
	_ table.Teller   = (*database)(nil)
)

// conn is a connection to a server or a pooler.
type conn struct {
	*pgconn.PgConn
	listens string // the channel, or empty
	told    int    // how often, since it was looked at last
	before  int    // how many came before it and wait, when it looked last
	blind   bool   // it may not see others' sessions
}

// Usable implements [table.Conn].
func (c *conn) Usable() bool { return !c.IsClosed() && !c.IsBusy() && c.TxStatus() == 'I' }

// Fresh implements [table.Conn]. What the server may have sent is left where it is.
func (c *conn) Fresh() bool {
	if !c.Usable() {
		return false
	}
	plain := c.Conn()
	if t, ok := plain.(interface{ NetConn() net.Conn }); ok {
		plain = t.NetConn() // of TLS
	}
	s, ok := plain.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	open := true
	err = raw.Read(func(fd uintptr) bool {
		n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		open = n > 0 || errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
		return true // whatever it is: nobody waits
	})
	return err == nil && open
}

// Close implements [table.Conn].
func (c *conn) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_ = c.PgConn.Close(ctx) // the server finds out in any case
}

func (d *database) dial(ctx context.Context) (*conn, error) {
	c := &conn{}
	config := d.settings.config.Copy()
	config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) {
		if n.Channel == c.listens {
			c.told++
		}
	}
	var err error
	c.PgConn, err = pgconn.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// query runs one statement in one round trip and returns its rows. A nil parameter is null.
func (d *database) query(ctx context.Context, sql string, params ...any) (rows [][][]byte, err error) {
	err = d.pool.Do(ctx, func(c *conn) error {
		rows, err = c.query(ctx, sql, params...)
		return err
	})
	return rows, err
}

func (c *conn) query(ctx context.Context, sql string, params ...any) ([][][]byte, error) {
	values := make([][]byte, len(params))
	for i, p := range params {
		switch p := p.(type) {
		case nil:
		case string:
			values[i] = []byte(p)
		case []byte:
			values[i] = p // text of a document; nil is null
		case int:
			values[i] = strconv.AppendInt(nil, int64(p), 10)
		case int64:
			values[i] = strconv.AppendInt(nil, p, 10)
		case bool:
			values[i] = strconv.AppendBool(nil, p)
		case raw:
			values[i] = append([]byte(`\x`), hex.AppendEncode(nil, []byte(p))...)
		default:
			panic("a parameter of an unknown type")
		}
	}
	// The unnamed statement, parsed and run before the next Sync: a pooler keeps these together.
	got := c.ExecParams(ctx, sql, values, nil, nil, nil).Read()
	return got.Rows, got.Err
}

// raw is a string as bytes.
type raw string

// Acquire implements [table.Database]. A second statement says what is in the way, or makes the row of a lease that is new.
func (d *database) Acquire(ctx context.Context, t table.Take) (*table.Row, error) {
	ask := func(text, queued string) (row *table.Row, err error) {
		params := []any{raw(t.Namespace), raw(t.Lease), t.Digest, t.Slots, t.Holder, t.TTL, t.Hold}
		err = d.pool.Do(ctx, func(c *conn) error {
			if c.queued() {
				text, params = queued, append(params, d.settings.config.RuntimeParams["application_name"])
			}
			got, err := c.query(ctx, d.text.of(text), params...)
			row, err = table.First(d.address, t.Key, got, err)
			return err
		})
		return row, err
	}
	if t.Slots > 1 {
		return ask(acquire, acquireQueued)
	}
	if row, err := ask(takeOne, takeOneQueued); err != nil || row != nil {
		return row, err
	}
	return ask(acquireOne, acquireOneQueued)
}

// Renew implements [table.Database].
func (d *database) Renew(ctx context.Context, h table.Held) (ok, asked bool, err error) {
	got, err := d.query(ctx, d.text.of(renew), raw(h.Namespace), raw(h.Lease), h.Slot, h.Digest, h.Term)
	if err != nil || len(got) == 0 {
		return false, false, err
	}
	return true, string(got[0][0]) == "t", nil
}

// Release implements [table.Database].
func (d *database) Release(ctx context.Context, h table.Held, end []byte, drop bool) error {
	_, err := d.query(ctx, d.text.of(release), raw(h.Namespace), raw(h.Lease), h.Slot, h.Digest, h.Term, end, drop, d.channel(h.Key))
	return err
}

// Read implements [table.Database].
func (d *database) Read(ctx context.Context, k table.Key) (*table.Row, error) {
	got, err := d.query(ctx, d.text.of(read), raw(k.Namespace), raw(k.Lease))
	row, err := table.First(d.address, k, got, err)
	if row != nil {
		row.Ends, row.Records = got[0][6], got[0][7]
	}
	return row, err
}

// Look implements [table.Database].
func (d *database) Look(ctx context.Context, k table.Key) (*table.Row, error) {
	got, err := d.query(ctx, d.text.of(look), raw(k.Namespace), raw(k.Lease))
	return table.First(d.address, k, got, err)
}

// List implements [table.Database].
func (d *database) List(ctx context.Context, namespace, after string, most int) ([]*table.Row, error) {
	got, err := d.query(ctx, d.text.of(list), raw(namespace), raw(after), most)
	if err != nil {
		return nil, err
	}
	all, err := table.Rows(d.address, table.Key{Namespace: namespace}, got)
	for i, r := range all {
		name, wrong := hex.DecodeString(string(got[i][6]))
		r.Lease, err = string(name), errors.Join(err, wrong)
	}
	return all, err
}

// Insert implements [table.Database].
func (d *database) Insert(ctx context.Context, k table.Key) error {
	_, err := d.query(ctx, d.text.of(insert), raw(k.Namespace), raw(k.Lease))
	return err
}

// Write implements [table.Database].
func (d *database) Write(ctx context.Context, k table.Key, c table.Change) (bool, error) {
	var channel any
	if c.Wake {
		channel = d.channel(k)
	}
	got, err := d.query(ctx, d.text.of(write), raw(k.Namespace), raw(k.Lease), c.Revision, c.Before, c.Version, c.Gone, c.Slots, c.Ends, c.Records, channel)
	return len(got) > 0, err
}

// Prune implements [table.Database].
func (d *database) Prune(ctx context.Context) error {
	_, err := d.query(ctx, d.text.of(prune))
	return err
}

// Mark implements [table.Database].
func (d *database) Mark(ctx context.Context, k table.Key) (*table.Mark, error) {
	got, err := d.query(ctx, d.text.of(mark), raw(k.Namespace), raw(k.Lease))
	return table.FirstMark(d.address, k, got, err)
}

// Unmark implements [table.Database].
func (d *database) Unmark(ctx context.Context, k table.Key, version int64) error {
	_, err := d.query(ctx, d.text.of(unmark), raw(k.Namespace), raw(k.Lease), version)
	return err
}

// Address implements [table.Database].
func (d *database) Address() string { return d.address }

// Close implements [table.Database].
func (d *database) Close() error {
	d.pool.Close()
	return nil
}
