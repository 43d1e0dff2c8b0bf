package mysql

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

// code is the number of a server's error, or zero. Source: MariaDB, Error Codes; MySQL, Server Error Message Reference.
func code(err error) uint16 {
	if e, ok := errors.AsType[*mysql.MySQLError](err); ok {
		return e.Number
	}
	return 0
}

// Missing implements [table.Database].
func (d *database) Missing(err error) bool { return code(err) == 1146 }

// Again implements [table.Database]: a deadlock, a wait for a lock that was too long, a row that has changed since it was read.
func (d *database) Again(err error) bool {
	switch code(err) {
	case 1213, 1205, 1020:
		return true
	}
	return false
}

// Classify implements [table.Database]. It is the only place that gives an error of the library or of the server its kind.
func (d *database) Classify(ctx context.Context, err error) error {
	if err == nil || backends.Classified(err) {
		return err
	}
	if e, ok := errors.AsType[*mysql.MySQLError](err); ok {
		return d.said(ctx, e)
	}
	if errors.Is(err, errReadOnly) {
		return d.readOnly(ctx)
	}
	kind := backends.Unavailable
	if _, ok := errors.AsType[*unconnected](err); ok {
		kind = backends.Unreached
	}
	if network.Late(err) || ctx.Err() != nil {
		return kind(nil, "no answer from %s", d.address)
	}
	answer := kind(nil, "%s: %s", d.address, d.harmless(err.Error()))
	if hint := network.Hint(err); hint != "" {
		return backends.WithHint(answer, "%s", hint)
	}
	if errors.Is(err, mysql.ErrNoTLS) {
		return backends.WithHint(answer, "the server does not speak TLS: see the parameter tls")
	}
	return answer
}

// said is the server's own word.
func (d *database) said(ctx context.Context, e *mysql.MySQLError) error {
	text := d.harmless(e.Message)
	away := func(hint string) error {
		return backends.WithHint(backends.Unavailable(nil, "%s: %s", d.address, text), "%s", hint)
	}
	withoutTables := func(err error) error {
		return backends.WithHint(err, "underlease schema print shows what somebody with more rights has to run")
	}
	switch e.Number {
	case 1045, 1698, 1524, 1862:
		hint := "look at user and password in the store's URL, where special characters are written as %XX"
		if d.settings.tls == nil {
			hint += "; a server that wants encryption says the same: tls=true"
		}
		return backends.WithHint(backends.Denied(nil, "%s: the server refused user or password: %s", d.address, text), "%s", hint)
	case 1130:
		return backends.Denied(nil, "%s: %s", d.address, text)
	case 1044, 1142, 1143, 1227, 1370:
		return withoutTables(backends.Denied(nil, "%s: %s", d.address, text))
	case 1049:
		return backends.Configf("the name stands after the host: mysql://host/database", "%s: %s", d.address, text)
	case 1146:
		return withoutTables(backends.Broken(nil, "%s: %s", d.address, text))
	case 1054, 1364, 1136:
		return backends.WithHint(backends.Broken(nil, "%s: the tables have another form: %s", d.address, text), "underlease schema apply brings them up to date, or says what has to be done")
	case 3140, 3141, 3143, 3146, 4035, 4036, 4037, 4038, 4039, 4042, 4048, 1292, 1366:
		return backends.WithHint(backends.Broken(nil, "%s: a row is damaged: %s", d.address, text), "look at the table %s", d.leases())
	case 1290, 1836, 1792:
		return d.readOnly(ctx)
	case 1040, 1203, 1226:
		return away("the server has no connection to spare: raise max_connections")
	case 1021, 1114:
		return away("the server's disk is full")
	case 1037, 1038, 1041:
		return away("the server's memory has run out")
	case 1053, 1927, 3169:
		return away("the server is being stopped")
	case 1159, 1161, 4031:
		return away("the server closed a connection that was not used: see wait_timeout")
	case 1317, 1969, 3024:
		return away("the server gave up: see max_statement_time")
	case 1213, 1205, 1020:
		return away("others hold locks for too long")
	case 1047, 1180:
		return away("the node is not in its cluster, or has no quorum")
	case 3159:
		return backends.WithHint(backends.Denied(nil, "%s: %s", d.address, text), "write tls=true")
	}
	return backends.Unavailable(nil, "%s: %s (%d)", d.address, text, e.Number)
}

// askPrimary is how long a replica may take to say where its primary is.
const askPrimary = 500 * time.Millisecond

// readOnly is an error about a server that cannot be written to. It asks the first that answers where the primary is, which is
// for those who may see the state of the replication.
func (d *database) readOnly(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askPrimary)
	defer cancel()
	hosts := d.settings.hosts
	if d.settings.socket != "" {
		hosts = []string{""}
	}
	for _, host := range hosts {
		if primary := d.primary(ctx, host); primary != "" {
			return backends.WithHint(backends.Unavailable(nil, "%s: read-only: the primary is %s", d.address, primary),
				"name both in the store's URL, mysql://host1,host2/database, and the one that can be written to is used")
		}
	}
	return backends.WithHint(backends.Unavailable(nil, "%s: read-only: the server refuses writes", d.address),
		"it may be a replica: name the primary, or all servers: mysql://host1,host2/database")
}

func (d *database) primary(ctx context.Context, host string) string {
	connector, err := mysql.NewConnector(d.settings.config(host))
	if err != nil {
		return ""
	}
	plain, err := connector.Connect(ctx)
	if err != nil {
		return ""
	}
	c := &conn{Conn: plain}
	defer c.Close()
	for _, ask := range []string{"SHOW SLAVE STATUS", "SHOW REPLICA STATUS"} {
		found, err := c.named(ctx, ask)
		if err != nil {
			continue
		}
		for _, word := range []string{"Master_", "Source_"} {
			if name := found[word+"Host"]; name != "" {
				return net.JoinHostPort(name, found[word+"Port"])
			}
		}
	}
	return ""
}

// harmless takes secrets out of a text.
func (d *database) harmless(text string) string { return backends.Masked(text, d.settings.password) }
