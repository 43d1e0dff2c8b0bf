// Package mysql keeps leases in MariaDB 10.5 or newer, and in MySQL 8.
//
// # The promise
//
// To renew and to release a lease is one statement and one round trip each, which commits by itself; to acquire it is two, a
// change and a look, in one round trip. The clock is the server's. See package table for what this rests on.
//
// # How
//
// There is no UPDATE that returns rows. An acquisition writes into the row which slot it has chosen, and goes on from there: in
// an UPDATE of one table assignments are done from left to right. Whether something is asked of a holder comes back with a
// renewal as the id that it has inserted. Rows that match are counted, not rows that change.
//
// The clock is UTC_TIMESTAMP, which no time zone moves; UNIX_TIMESTAMP would be wrong by the session's. It is read when the
// statement begins: one that waits for the row finds leases to end later than they do, and its own earlier.
//
// Nobody is told anything here: those that wait look again, with a reading statement, four times a second at most.
//
// # The limits
//
// MySQL itself was not tested, MariaDB 10.11 was. A replica is refused, where it is read-only. One that is promoted without
// having got a grant gives the lease to another; the old holder is told by its next renewal.
package mysql

import (
	"context"
	"net/url"
	"strings"

	driver "github.com/go-sql-driver/mysql"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// Schemes returns how the URLs of MySQL and MariaDB are opened, by their schemes:
//
//	mysql://[USER[:PASSWORD]@][HOST[:PORT],...]/DATABASE[?PARAMETER=VALUE&...]
//
// Parameters:
//
//	table=NAME              of the table of leases, and what the names of the others begin with
//	tls=MODE                true, false (the default), skip-verify, or preferred: where the server can, without looking at whose it is
//	ca=FILE                 the authorities that may have signed the server's certificate, instead of the system's
//	cert=FILE, key=FILE     the client's own certificate
//	server-name=NAME        what the certificate has to be of, where that is not the host
//	socket=PATH             of a server on this host, instead of a host
//
// Of several hosts the one is used that can be written to.
func Schemes() map[string]backends.Scheme {
	s := backends.Scheme{Open: open, Schema: Schema, Apply: Apply}
	return map[string]backends.Scheme{"mysql": s, "mariadb": s}
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
	d := &database{settings: s, address: s.address()}
	d.pool = &table.Pool[*conn]{Dial: d.dial}
	return d, nil
}

// silence is a logger: the library would write to standard error.
type silence struct{}

func (silence) Print(...any) {}

var _ driver.Logger = silence{}
