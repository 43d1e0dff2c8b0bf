package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"time"

	"github.com/underlease/underlease/backends/table"
)

// channel is on what a lease's waiters listen.
func (d *database) channel(k table.Key) string {
	sum := sha256.Sum256([]byte(d.settings.schema + "\x00" + d.settings.table + "\x00" + k.Namespace + "\x00" + k.Lease))
	return "underlease_" + hex.EncodeToString(sum[:16])
}

// Listen implements [table.Teller]. It uses one connection, which listens on until it is closed: a waiter calls again and again,
// with attempts in between, and what is told meanwhile is not missed.
func (d *database) Listen(ctx context.Context, k table.Key, left func(*table.Row) (time.Duration, error)) (able bool, err error) {
	channel := d.channel(k)
	err = d.pool.Do(ctx, func(c *conn) error {
		if able, err = c.direct(ctx); err != nil || !able {
			return err
		}
		if c.listens != channel {
			if _, err := c.Exec(ctx, `LISTEN "`+channel+`"`).ReadAll(); err != nil {
				return err
			}
			c.listens, c.told = channel, false
		}
		if c.told {
			c.told = false
			return nil
		}
		got, err := c.query(ctx, d.text.of(look), raw(k.Namespace), raw(k.Lease))
		row, err := table.First(d.address, k, got, err)
		if d.Missing(err) {
			return nil
		}
		if err != nil {
			return err
		}
		limit, err := left(row)
		if err != nil || limit <= 0 {
			return err
		}
		waiting, stop := context.WithTimeout(ctx, limit)
		defer stop()
		for !c.told {
			if err := c.WaitForNotification(waiting); err != nil {
				if ctx.Err() == nil && waiting.Err() != nil {
					break // the lease ends by itself
				}
				return err
			}
		}
		c.told = false
		return nil
	})
	if err != nil && ctx.Err() == nil {
		err = d.Classify(ctx, err)
	}
	return able, err
}

// direct reports whether a server's process is this connection's own, as no pooler's is. The number that a pooler told when the
// connection was made is its own invention.
//
// Source: PgBouncer: the key for cancelling is random, and the server is chosen for each transaction.
func (c *conn) direct(ctx context.Context) (bool, error) {
	if c.listens != "" {
		return true, nil
	}
	got, err := c.query(ctx, `SELECT pg_backend_pid()`)
	if err != nil || len(got) != 1 {
		return false, err
	}
	return string(got[0][0]) == strconv.FormatUint(uint64(c.PID()), 10), nil
}
