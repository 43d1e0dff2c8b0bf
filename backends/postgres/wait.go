package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/underlease/underlease/backends/table"
)

const prefix = "underlease_"

// channel is on what a lease's waiters listen.
func (d *database) channel(k table.Key) string {
	sum := sha256.Sum256([]byte(d.settings.schema + "\x00" + d.settings.table + "\x00" + k.Namespace + "\x00" + k.Lease))
	return prefix + hex.EncodeToString(sum[:16])
}

// Who waits gives its session a name, by which others see how many came before it. The name is no lock and no row: it goes when the
// connection does, and nobody has to clean up. With the channel's first digits and the server's clock it has 61 of the 63 bytes that it may have.
const (
	waits       = "underlease waits for "
	queued      = waits + "%s since "
	queueDigits = 16
)

// turn is for how long a waiter lets each one that came before it go first. In that time an attempt is made and committed, unless the
// machine is busy: then two ask at the same time, as all would without it. One that waits and is frozen or gone costs so much and no more.
const turn = 8 * time.Millisecond

// Listen implements [table.Teller]. It uses one connection, which listens on until it is closed: a waiter calls again and again,
// with attempts in between, keeps its place, and what is told meanwhile is not missed.
//
// All are told of a release. The first goes at once, without another look. The others look one after the other whether it is still
// free, so that a handover does not wait for statements that get nothing.
func (d *database) Listen(ctx context.Context, k table.Key, left func(*table.Row) (time.Duration, error)) (able bool, err error) {
	err = d.pool.Do(ctx, func(c *conn) error {
		if able, err = c.direct(ctx); err != nil || !able {
			return err
		}
		if channel := d.channel(k); c.listens != channel || !c.queued() {
			if err := c.queue(ctx, channel); err != nil {
				return err
			}
		}
		for after := false; ; {
			if told := c.told; told > 0 {
				if c.told = 0; c.before < told {
					return nil
				}
				c.before -= told // one goes for each
				if err := c.await(ctx, time.Duration(c.before+1)*d.turn); err != nil {
					return err
				}
				if c.told > 0 {
					continue
				}
				after = true
			}
			row, err := d.queueUp(ctx, c, k)
			if d.Missing(err) {
				return nil
			}
			if err != nil {
				return err
			}
			limit, err := left(row)
			if err != nil {
				return err
			}
			switch {
			case limit > 0:
				after = false
			case after || c.before == 0:
				return nil
			default: // it ended by itself, or was given back a moment ago
				limit, after = time.Duration(c.before)*d.turn, true
			}
			if err := c.await(ctx, limit); err != nil {
				return err
			}
		}
	})
	if err != nil && ctx.Err() == nil {
		err = d.Classify(ctx, err)
	}
	return able, err
}

// queued reports whether a connection has a place among those that wait. The server tells each change of the name.
//
// Source: PostgreSQL, Message Flow, Asynchronous Operations: ParameterStatus of application_name.
func (c *conn) queued() bool { return strings.HasPrefix(c.ParameterStatus("application_name"), waits) }

// queue makes a connection listen, and gives it a place behind those that do.
func (c *conn) queue(ctx context.Context, channel string) error {
	name := fmt.Sprintf(queued, channel[len(prefix):][:queueDigits])
	_, err := c.Exec(ctx, `LISTEN "`+channel+`"; SELECT set_config('application_name', '`+name+`' || `+micros+`, false)`).ReadAll()
	if err == nil {
		c.listens, c.told, c.before = channel, 0, 0
	}
	return err
}

// queueUp reads a lease's row, and how many came before.
func (d *database) queueUp(ctx context.Context, c *conn, k table.Key) (*table.Row, error) {
	if !c.blind {
		got, err := c.query(ctx, d.text.of(lookQueued), raw(k.Namespace), raw(k.Lease))
		row, err := table.First(d.address, k, got, err)
		if code(err) != insufficientRight {
			if row != nil {
				c.before, err = strconv.Atoi(string(got[0][6]))
			}
			return row, err
		}
		c.blind, c.before = true, 0 // somebody has taken away what everybody may see by default, or the table
	}
	got, err := c.query(ctx, d.text.of(look), raw(k.Namespace), raw(k.Lease))
	return table.First(d.address, k, got, err)
}

// await waits until something is told on the channel, for so long at most.
func (c *conn) await(ctx context.Context, limit time.Duration) error {
	waiting, stop := context.WithTimeout(ctx, limit)
	defer stop()
	for c.told == 0 {
		if err := c.WaitForNotification(waiting); err != nil {
			if ctx.Err() == nil && waiting.Err() != nil {
				return nil
			}
			return err
		}
	}
	return nil
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
