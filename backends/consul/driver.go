package consul

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/quorum"
)

// driver is Consul as package quorum wants it.
type driver struct {
	settings settings
	address  string
	client   *api.Client
}

var _ quorum.Store = (*driver)(nil)

// idle is for how long a connection is kept that nobody uses. A run that waits needs one, and two more for a moment every few seconds:
// an agent that takes 200 of one host has room for a hundred and more that wait.
//
// Source: Consul, limits.http_max_conns_per_client: 200 by default.
const idle = 250 * time.Millisecond

func newDriver(s settings) (*driver, error) {
	// The library's own limits are for connections that live long; here a call has the limit of its context.
	s.config.Transport.MaxIdleConnsPerHost = 8
	s.config.Transport.IdleConnTimeout = idle
	c, err := api.NewClient(s.config)
	if err != nil {
		return nil, backends.Configf("", "the client of Consul cannot be made: %s", harmless(s.secrets, err.Error()))
	}
	return &driver{settings: s, address: s.address(), client: c}, nil
}

// Address implements [quorum.Store].
func (d *driver) Address() string { return d.address }

// Check implements [quorum.Store].
func (d *driver) Check(ttl, hold time.Duration) error {
	switch {
	case ttl < d.settings.least:
		hint := "give a longer --ttl; if session_ttl_min of the servers is lower, add ?session-ttl-min=D to the store's URL"
		if d.settings.least != defaultLeast {
			hint = "give a longer --ttl"
		}
		return backends.Configf(hint, "%s: sessions of Consul last from %v to %v: the ttl %v is too short", d.address, d.settings.least, longest, ttl)
	case ttl > longest:
		return backends.Configf("give a shorter --ttl", "%s: sessions of Consul last from %v to %v: the ttl %v is too long", d.address, d.settings.least, longest, ttl)
	case hold > longest:
		return backends.Configf("give a shorter --min-hold", "%s: sessions of Consul last from %v to %v: the hold %v is too long", d.address, d.settings.least, longest, hold)
	}
	return nil
}

// reading are the options of a read that sees every write that was done before it began.
func reading(ctx context.Context) *api.QueryOptions {
	return (&api.QueryOptions{RequireConsistent: true}).WithContext(ctx)
}

// Read implements [quorum.Store].
func (d *driver) Read(ctx context.Context, prefix string) (quorum.View, error) {
	return d.list(prefix, reading(ctx))
}

func (d *driver) list(prefix string, q *api.QueryOptions) (quorum.View, error) {
	pairs, meta, err := d.client.KV().List(prefix, q)
	if err != nil {
		return quorum.View{}, d.classify(err)
	}
	// Without keys Consul says 404, and so does whatever stands before it and does not know the way. Only Consul counts.
	// Source: Consul, agent/http.go, setIndex: the header is on each answer to a read, and never zero.
	if meta.LastIndex == 0 {
		return quorum.View{}, d.foreign("it is no answer of Consul's to a read")
	}
	if meta.ResultsFilteredByACLs {
		return quorum.View{}, d.denied("the token may not read keys below " + prefix)
	}
	v := quorum.View{Version: int64(meta.LastIndex), Pairs: make([]quorum.Pair, len(pairs))}
	for i, p := range pairs {
		v.Pairs[i] = quorum.Pair{Key: p.Key, Value: p.Value, Version: int64(p.ModifyIndex), Created: int64(p.CreateIndex), Session: p.Session}
	}
	return v, nil
}

// Commit implements [quorum.Store].
func (d *driver) Commit(ctx context.Context, t quorum.Txn) (version int64, ok bool, err error) {
	var ops api.TxnOps
	add := func(op api.KVTxnOp) { ops = append(ops, &api.TxnOp{KV: &op}) }
	for _, c := range t.Checks {
		if c.Version == 0 {
			add(api.KVTxnOp{Verb: api.KVCheckNotExists, Key: c.Key})
		} else {
			add(api.KVTxnOp{Verb: api.KVCheckIndex, Key: c.Key, Index: uint64(c.Version)})
			if c.Session != "" {
				add(api.KVTxnOp{Verb: api.KVCheckSession, Key: c.Key, Session: c.Session})
			}
		}
	}
	for _, w := range t.Writes {
		switch {
		case w.Delete:
			add(api.KVTxnOp{Verb: api.KVDelete, Key: w.Key})
		case w.Session != "":
			add(api.KVTxnOp{Verb: api.KVLock, Key: w.Key, Value: w.Value, Session: w.Session})
		default:
			add(api.KVTxnOp{Verb: api.KVSet, Key: w.Key, Value: w.Value})
		}
	}
	// The library's own call loses what the server says when it refuses.
	var answer api.TxnResponse
	_, err = d.client.Raw().Write("/v1/txn", ops, &answer, (&api.WriteOptions{}).WithContext(ctx))
	if refused, is := errors.AsType[api.StatusError](err); is && refused.Code == http.StatusConflict {
		if json.Unmarshal([]byte(refused.Body), &answer) != nil || len(answer.Errors) == 0 {
			return 0, false, backends.Broken(nil, "%s: the answer to a transaction cannot be read", d.address)
		}
		for _, e := range answer.Errors {
			// Source: Consul, agent/consul/state/kvs.go: there is no code for it.
			if strings.Contains(e.What, "invalid session") {
				return 0, false, quorum.ErrGone
			}
			if strings.Contains(e.What, "ermission denied") {
				return 0, false, d.denied("the token may not write the keys")
			}
		}
		return 0, false, nil
	}
	if err != nil {
		return 0, false, d.classify(err)
	}
	for _, r := range answer.Results {
		if r.KV != nil {
			version = max(version, int64(r.KV.ModifyIndex))
		}
	}
	if puts := slices.ContainsFunc(t.Writes, func(w quorum.Write) bool { return !w.Delete }); puts && version == 0 {
		return 0, false, d.foreign("it is no answer of Consul's to a transaction")
	}
	return version, true, nil
}

// foreign says that something else than Consul answered.
func (d *driver) foreign(what string) error {
	return backends.WithHint(backends.Unavailable(nil, "%s: it does not answer as Consul does: %s", d.address, what), "look at host and port in the store's URL")
}

// A blocking query goes on at the server when nobody waits for it any more, and counts as a connection of this host, of which
// there may be 200. It lasts no longer than its caller does, where that is known.
// Source: Consul HTTP API, blocking queries: at most 10 minutes; limits.http_max_conns_per_client.
const (
	longestWait  = 5 * time.Minute
	shortestWait = 10 * time.Millisecond
)

// Await implements [quorum.Store].
func (d *driver) Await(ctx context.Context, prefix string, after int64) error {
	for {
		q := reading(ctx)
		q.WaitIndex, q.WaitTime = uint64(max(1, after)), longestWait
		if deadline, ok := ctx.Deadline(); ok {
			q.WaitTime = max(shortestWait, min(time.Until(deadline), longestWait))
		}
		v, err := d.list(prefix, q)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		if v.Version != after { // smaller: the server was started without what it knew
			return nil
		}
	}
}

// Name implements [quorum.Store]: Consul chooses.
func (d *driver) Name(string) string { return "" }

// Begin implements [quorum.Store].
func (d *driver) Begin(ctx context.Context, _ string, ttl time.Duration) (quorum.Session, error) {
	ttl = max(ttl, d.settings.least)
	// The library's own call leaves out a lock-delay of zero, and Consul takes 15 s then; without a list of checks it would take that
	// of the agent's node. Source: Consul HTTP API, session/create.
	body := map[string]any{
		"Name": "underlease", "TTL": ttl.String(), "LockDelay": "0s", "Behavior": api.SessionBehaviorDelete, "NodeChecks": []string{},
	}
	var made struct{ ID string }
	if _, err := d.client.Raw().Write("/v1/session/create", body, &made, (&api.WriteOptions{}).WithContext(ctx)); err != nil {
		return quorum.Session{}, d.classify(err)
	}
	if made.ID == "" {
		return quorum.Session{}, d.foreign("a session was made without a name")
	}
	return quorum.Session{ID: made.ID, TTL: ttl}, nil
}

// Keep implements [quorum.Store].
func (d *driver) Keep(ctx context.Context, session string) error {
	if session == "" {
		return quorum.ErrGone
	}
	_, err := d.client.Raw().Write("/v1/session/renew/"+session, nil, nil, (&api.WriteOptions{}).WithContext(ctx))
	// Source: Consul, agent/session_endpoint.go, SessionRenew. A 404 with other words is not Consul's, and says nothing of a session.
	if refused, is := errors.AsType[api.StatusError](err); is && refused.Code == http.StatusNotFound &&
		strings.TrimSpace(refused.Body) == "Session id '"+session+"' not found" {
		return quorum.ErrGone
	}
	return d.classify(err)
}

// End implements [quorum.Store].
func (d *driver) End(ctx context.Context, session string) error {
	if session == "" {
		return nil
	}
	_, err := d.client.Raw().Write("/v1/session/destroy/"+session, nil, nil, (&api.WriteOptions{}).WithContext(ctx))
	return d.classify(err)
}

// Left implements [quorum.Store]. Consul does not tell.
func (d *driver) Left(_ context.Context, _ string, stated time.Duration) (time.Duration, error) {
	return stated, nil
}

// Close implements [quorum.Store].
func (d *driver) Close() error {
	d.settings.config.Transport.CloseIdleConnections()
	return nil
}
