// Package postgres keeps leases in PostgreSQL 12 or newer, also behind PgBouncer in transaction mode.
//
// # The promise
//
// To acquire, to renew and to release a lease is one statement and one round trip each, which PostgreSQL runs alone on the row
// of the lease; a second one says what is in the way, or makes the row of a lease that is new. The clock is the server's. See
// package table for what this rests on.
//
// # How
//
// An UPDATE, and INSERT … ON CONFLICT DO UPDATE for a lease that is new, look at the newest version of a row that others have changed
// meanwhile: under contention too they find the first slot that is free, or the one that carries the same handle, and write nothing
// where there is neither. No statement is prepared, and nothing belongs to the session, so that a pooler may give each statement
// another connection to the server.
//
// A commit is waited for even where the role has synchronous_commit off: a grant that is forgotten in a crash is none. That of a
// release is not.
//
// Who waits listens on a channel of the lease, which a release notifies. The name of its session says since when, so that the others
// see how many came before them: the first asks at once, and the others look later, one after the other. Behind a pooler, which shows
// by the number of the server's process, that would reach anybody, and those that wait look themselves, with a reading statement, four
// times a second at most.
//
// # The limits
//
// A replica is refused. One that is promoted without having got a grant gives the lease to another; the old holder is told by
// its next renewal. For that not to happen, have synchronous_standby_names name it.
package postgres

import (
	"context"
	"net/url"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// Schemes returns how the URLs of PostgreSQL are opened, by their schemes:
//
//	postgres://[USER[:PASSWORD]@]HOST[:PORT],.../[DATABASE][?PARAMETER=VALUE&...]
//
// They are those of libpq, and what they leave out comes from the variables PG* and the file ~/.pgpass. Parameters beside
// libpq's own:
//
//	table=NAME   of the table of leases, and what the names of the others begin with
//	schema=NAME  where they are; else where the role's search_path says
//
// Of several hosts the one is used that can be written to.
func Schemes() map[string]backends.Scheme {
	s := backends.Scheme{Open: open, Schema: Schema, Apply: Apply}
	return map[string]backends.Scheme{"postgres": s, "postgresql": s}
}

func open(_ context.Context, u *url.URL) (*backends.Store, error) {
	d, err := newDatabase(u)
	if err != nil {
		return nil, err
	}
	return &backends.Store{Backend: table.New(d), Scheme: strings.ToLower(u.Scheme), Address: d.address, Identity: d.settings.identity()}, nil
}

func newDatabase(u *url.URL) (*database, error) {
	s, err := parse(u)
	if err != nil {
		return nil, err
	}
	d := &database{settings: s, address: s.address(), text: statements(s), turn: turn}
	d.pool = &table.Pool[*conn]{Dial: d.dial}
	return d, nil
}
