package postgres

import (
	"context"
	"errors"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

// Codes of the server. Source: PostgreSQL, Error Codes.
const (
	undefinedTable      = "42P01"
	serialization       = "40001"
	deadlock            = "40P01"
	notNull             = "23502" // the clock was set back between two looks at it in one statement
	readOnlyTransaction = "25006"
	insufficientRight   = "42501"
	alreadyThere        = "42P07"
	unique              = "23505"
	duplicateObject     = "42710"
)

func code(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}

// Missing implements [table.Database].
func (d *database) Missing(err error) bool { return code(err) == undefinedTable }

// Again implements [table.Database].
func (d *database) Again(err error) bool {
	switch code(err) {
	case serialization, deadlock, notNull:
		return true
	}
	return false
}

// Classify implements [table.Database]. It is the only place that gives an error of the library or of the server its kind.
func (d *database) Classify(ctx context.Context, err error) error {
	if err == nil || backends.Classified(err) {
		return err
	}
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return d.said(ctx, e)
	}
	kind := backends.Unavailable
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		kind = backends.Unreached
	}
	if pgconn.Timeout(err) || network.Late(err) {
		return kind(nil, "no answer from %s", d.address)
	}
	answer := kind(nil, "%s: %s", d.address, d.harmless(innermost(err)))
	hint := network.Hint(err)
	switch { // the parameters are libpq's
	case network.OfAnother(err):
		hint = "the host in the URL has to be one that the server's certificate names"
	case network.Distrusted(err):
		hint = "the parameter sslrootcert names a file with the authority that signed the server's certificate"
	}
	if hint != "" {
		return backends.WithHint(answer, "%s", hint)
	}
	if strings.Contains(err.Error(), "refused TLS") {
		// The library has neither a type nor a code for it.
		return backends.WithHint(answer, "the server does not speak TLS: see sslmode")
	}
	if strings.Contains(err.Error(), "read only connection") {
		return d.readOnly(ctx)
	}
	return answer
}

// innermost is what happened, without the library's story around it. Of several hosts, the last.
func innermost(err error) string {
	for {
		if op, ok := err.(*net.OpError); ok { //nolint:errorlint // the outermost of this type is looked for step by step
			return op.Error()
		}
		switch e := err.(type) { //nolint:errorlint // as above
		case interface{ Unwrap() []error }:
			all := e.Unwrap()
			if len(all) == 0 {
				return err.Error()
			}
			err = all[len(all)-1]
		case interface{ Unwrap() error }:
			next := e.Unwrap()
			if next == nil {
				return err.Error()
			}
			err = next
		default:
			return err.Error()
		}
	}
}

// said is the server's own word.
func (d *database) said(ctx context.Context, e *pgconn.PgError) error {
	text := d.harmless(e.Message)
	away := func(hint string) error {
		return backends.WithHint(backends.Unavailable(nil, "%s: %s", d.address, text), "%s", hint)
	}
	switch e.Code {
	case "28P01", "28000":
		return backends.WithHint(backends.Denied(nil, "%s: the server refused user or password: %s", d.address, text),
			"look at user and password in the store's URL, where special characters are written as %%XX, and at pg_hba.conf")
	case "3D000":
		return backends.Configf("the name stands after the host: postgres://host/database", "%s: %s", d.address, text)
	case "3F000":
		return backends.Configf("the parameter schema names one that is there; without it the role's search_path says", "%s: %s", d.address, text)
	case undefinedTable:
		return d.withoutTables(backends.Broken(nil, "%s: %s", d.address, text))
	case insufficientRight:
		return d.withoutTables(backends.Denied(nil, "%s: %s", d.address, text))
	case "42703", "42804", "42883":
		return backends.WithHint(backends.Broken(nil, "%s: the tables have another form: %s", d.address, text),
			"underlease schema apply brings them up to date, or says what has to be done")
	case "22P02", "22003", "22004", "22023", "2203A", "22030", "22032", "22033", "22035":
		return backends.WithHint(backends.Broken(nil, "%s: a row is damaged: %s", d.address, text), "look at the table %s", d.settings.name(""))
	case "22P05", "22021":
		return backends.WithHint(backends.Broken(nil, "%s: %s", d.address, text), "the database needs the encoding UTF8")
	case readOnlyTransaction:
		return d.readOnly(ctx)
	case "53300":
		return away("the server has no connection to spare: raise max_connections, or put a pooler in front of it")
	case "53100":
		return away("the server's disk is full")
	case "53200":
		return away("the server's memory has run out")
	case "57P03":
		return away("the server is starting or stopping, and will answer soon")
	case "57P01", "57P02":
		return away("the server is being stopped")
	case "57014", "55P03":
		return away("the server gave up: see statement_timeout and lock_timeout of the role")
	case "42704":
		return backends.Configf("see the parameters of the store's URL", "%s: %s", d.address, text)
	}
	return backends.Unavailable(nil, "%s: %s (%s)", d.address, text, e.Code)
}

func (d *database) withoutTables(err error) error {
	return backends.WithHint(err, "underlease schema print shows what somebody with more rights has to run")
}

// readOnly is an error about a server that cannot be written to. It asks that server where the primary is.
func (d *database) readOnly(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askPrimary)
	defer cancel()
	// The address of the primary is for those who may read all statistics.
	const ask = `SELECT pg_is_in_recovery(), (SELECT sender_host || ':' || sender_port FROM pg_stat_wal_receiver WHERE sender_host IS NOT NULL)`
	got, err := d.anywhere(ctx, ask)
	switch {
	case err == nil && len(got) == 1 && got[0][1] != nil:
		return backends.WithHint(backends.Unavailable(nil, "%s: read-only: the primary is %s", d.address, got[0][1]),
			"name both in the store's URL, postgres://host1,host2/database, and the one that can be written to is used")
	case err == nil && len(got) == 1 && string(got[0][0]) == "t":
		return backends.WithHint(backends.Unavailable(nil, "%s: read-only: the server is a replica", d.address),
			"name the primary, or all servers: postgres://host1,host2/database")
	}
	return backends.WithHint(backends.Unavailable(nil, "%s: read-only: the server refuses writes", d.address),
		"it may be a replica, or default_transaction_read_only is on for the role or the database")
}

// anywhere asks the first server that answers, whatever it can do.
func (d *database) anywhere(ctx context.Context, sql string) ([][][]byte, error) {
	config := d.settings.config.Copy()
	config.ValidateConnect = nil
	plain, err := pgconn.ConnectConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	c := &conn{PgConn: plain}
	defer c.Close()
	return c.query(ctx, sql)
}

// harmless takes secrets out of a text.
func (d *database) harmless(text string) string {
	return backends.Masked(text, d.settings.config.Password)
}
