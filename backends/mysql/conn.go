package mysql

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/go-sql-driver/mysql"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// database is [table.Database].
type database struct {
	settings *settings
	address  string
	pool     *table.Pool[*conn]
}

var _ table.Database = (*database)(nil)

// conn is a connection, without the pool of the standard library: that one keeps a goroutine, and tries again by itself.
type conn struct {
	driver.Conn
	begun bool // the session is as it has to be
}

// session stands before the first request of a connection, in the same round trip: assignments from left to right, no silent
// truncation, and no transaction that stays open.
//
// Source: MariaDB, SQL_MODE: SIMULTANEOUS_ASSIGNMENT would turn the first off.
const session = "SET sql_mode = 'STRICT_ALL_TABLES', autocommit = 1; "

func (c *conn) begin(sql string) string {
	if c.begun {
		return sql
	}
	c.begun = true // or it is closed
	return session + sql
}

// Usable implements [table.Conn].
func (c *conn) Usable() bool { return c.Conn.(driver.Validator).IsValid() }

// Fresh implements [table.Conn]. It lets the library look before it sends the next statement, too.
func (c *conn) Fresh() bool {
	return c.Conn.(driver.SessionResetter).ResetSession(context.Background()) == nil && c.Usable()
}

// Close implements [table.Conn].
func (c *conn) Close() { _ = c.Conn.Close() } // the server finds out in any case

// errReadOnly says that no server can be written to.
var errReadOnly = errors.New("read-only")

// dial connects to the first server that can be written to. Whether it can is looked at where there are several.
func (d *database) dial(ctx context.Context) (*conn, error) {
	hosts := d.settings.hosts
	if d.settings.socket != "" {
		hosts = []string{""}
	}
	var last error
	for _, host := range hosts {
		connector, err := mysql.NewConnector(d.settings.config(host))
		if err != nil {
			return nil, backends.Configf(rightForm, "the settings of the store cannot be used")
		}
		plain, err := connector.Connect(ctx)
		if err != nil {
			last = err
			continue
		}
		c := &conn{Conn: plain}
		if len(hosts) > 1 {
			got, err := c.rows(ctx, "SELECT @@global.read_only")
			if err == nil && len(got) == 1 && string(got[0][0]) != "0" {
				err = errReadOnly
			}
			if err != nil {
				c.Close()
				last = err
				continue
			}
		}
		return c, nil
	}
	return nil, &unconnected{last}
}

// unconnected is why no connection came about over which anything could have been asked.
type unconnected struct{ error }

func (e *unconnected) Unwrap() error { return e.error }

// rows runs a request that returns rows.
func (c *conn) rows(ctx context.Context, sql string) (all [][][]byte, err error) {
	rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, c.begin(sql), nil)
	if err != nil {
		return nil, c.lost(err)
	}
	defer func() { err = errors.Join(err, c.lost(rows.Close())) }()
	values := make([]driver.Value, len(rows.Columns()))
	for {
		switch err := rows.Next(values); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, c.lost(err)
		}
		one := make([][]byte, len(values))
		for i, v := range values {
			switch v := v.(type) {
			case nil:
			case []byte:
				one[i] = append([]byte{}, v...)
			case int64:
				one[i] = strconv.AppendInt(nil, v, 10)
			case string:
				one[i] = []byte(v)
			default:
				return nil, fmt.Errorf("a value of the type %T", v)
			}
		}
		all = append(all, one)
	}
}

// lost closes a connection that its library only says to be bad.
func (c *conn) lost(err error) error {
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn) {
		c.Close()
	}
	return err
}

func (d *database) query(ctx context.Context, sql string) (got [][][]byte, err error) {
	err = d.pool.Do(ctx, func(c *conn) error {
		got, err = c.rows(ctx, sql)
		return err
	})
	return got, err
}

// exec runs one statement that returns no rows.
func (d *database) exec(ctx context.Context, sql string) (matched, id int64, err error) {
	err = d.pool.Do(ctx, func(c *conn) error {
		got, err := c.Conn.(driver.ExecerContext).ExecContext(ctx, c.begin(sql), nil)
		if err != nil {
			return c.lost(err)
		}
		matched, err = got.RowsAffected()
		if err == nil {
			id, err = got.LastInsertId()
		}
		return err
	})
	return matched, id, err
}

// Acquire implements [table.Database]. For a lease that is new it needs two round trips more.
func (d *database) Acquire(ctx context.Context, t table.Take) (*table.Row, error) {
	request := d.acquire(t)
	got, err := d.query(ctx, request)
	if err == nil && len(got) == 0 {
		if err := d.Insert(ctx, t.Key); err != nil {
			return nil, err
		}
		got, err = d.query(ctx, request)
	}
	return table.First(d.address, t.Key, got, err)
}

// Renew implements [table.Database].
func (d *database) Renew(ctx context.Context, h table.Held) (ok, asked bool, err error) {
	matched, id, err := d.exec(ctx, d.renew(h))
	return matched == 1, id == somethingAsked, err
}

// Release implements [table.Database].
func (d *database) Release(ctx context.Context, h table.Held, end []byte, drop bool) error {
	_, _, err := d.exec(ctx, d.release(h, end, drop))
	return err
}

// Read implements [table.Database].
func (d *database) Read(ctx context.Context, k table.Key) (*table.Row, error) {
	got, err := d.query(ctx, d.read(k))
	row, err := table.First(d.address, k, got, err)
	if row != nil {
		row.Ends, row.Records = got[0][6], got[0][7]
	}
	return row, err
}

// Look implements [table.Database].
func (d *database) Look(ctx context.Context, k table.Key) (*table.Row, error) {
	got, err := d.query(ctx, d.look(k))
	return table.First(d.address, k, got, err)
}

// List implements [table.Database].
func (d *database) List(ctx context.Context, namespace, after string, most int) ([]*table.Row, error) {
	got, err := d.query(ctx, d.list(namespace, after, most))
	if err != nil {
		return nil, err
	}
	all, err := table.Rows(d.address, table.Key{Namespace: namespace}, got)
	for i, r := range all {
		r.Lease = string(got[i][6])
	}
	return all, err
}

// Insert implements [table.Database].
func (d *database) Insert(ctx context.Context, k table.Key) error {
	_, _, err := d.exec(ctx, d.insert(k))
	return err
}

// Write implements [table.Database].
func (d *database) Write(ctx context.Context, k table.Key, c table.Change) (bool, error) {
	matched, _, err := d.exec(ctx, d.write(k, c))
	return matched == 1, err
}

// Prune implements [table.Database].
func (d *database) Prune(ctx context.Context) error {
	_, _, err := d.exec(ctx, d.prune())
	return err
}

// Mark implements [table.Database].
func (d *database) Mark(ctx context.Context, k table.Key) (*table.Mark, error) {
	got, err := d.query(ctx, d.mark(k))
	return table.FirstMark(d.address, k, got, err)
}

// Unmark implements [table.Database].
func (d *database) Unmark(ctx context.Context, k table.Key, version int64) error {
	_, _, err := d.exec(ctx, d.unmark(k, version))
	return err
}

// Address implements [table.Database].
func (d *database) Address() string { return d.address }

// Close implements [table.Database].
func (d *database) Close() error {
	d.pool.Close()
	return nil
}

// named runs a request and returns its first row by the names of the columns.
func (c *conn) named(ctx context.Context, sql string) (map[string]string, error) {
	rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, c.begin(sql), nil)
	if err != nil {
		return nil, c.lost(err)
	}
	defer func() { _ = rows.Close() }() // what it could say was said
	names := rows.Columns()
	values := make([]driver.Value, len(names))
	if err := rows.Next(values); err != nil {
		return nil, c.lost(err)
	}
	found := map[string]string{}
	for i, v := range values {
		if b, ok := v.([]byte); ok {
			found[names[i]] = string(b)
		} else if v != nil {
			found[names[i]] = fmt.Sprint(v)
		}
	}
	return found, nil
}
