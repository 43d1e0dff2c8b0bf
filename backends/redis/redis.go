// Package redis keeps leases in Redis 6.2 or newer: in one server, in a set watched by Sentinel, or in Redis Cluster.
//
// # The promise
//
// Every operation is one script, which runs alone on the server, in one round trip. The server's clock decides expiry and
// nothing else does: hosts with clocks an hour apart never run one lease twice. Whatever a script did before its answer
// was lost, the next attempt with the same handle finds and continues.
//
// # The key
//
// A lease is one hash, ul:{NAMESPACE/LEASE}, both by [backends.Key] (the empty namespace is `_`), so that in a cluster all of
// it moves, fails and is deleted together:
//
//	f    the form of what follows, 1
//	n    the plain names, with a zero byte between: compared by every script
//	t    the last term; c: how many slots were ever used; m: how many records; v: the last version of a record
//	s0…  a slot, as JSON: h handle, w holder, t term, b since, l ttl, e expiry, d hold, k kept until, p how the last
//	     holder ended, q what is asked, x the handle of a holder that has expired; instants and durations in milliseconds
//	p    the last 50 ends, one JSON object a line, newest first
//	q    those that wait, one a line: place, end of the ticket, slots, ticket
//	z    tickets of the last 16 acquisitions that were given back
//	r:…  a record: its version, when it was written, its bytes
//
// It lives for 7 days after its last use, and for ever where it has records.
//
// # The rules
//
//   - An expiry that is further away than its own ttl counts as now + ttl: a server's clock that was set back delays a lease
//     by one ttl at most.
//   - A grant is handed out when the clock has passed its term, in a millisecond at most as a rule, so that a deleted lease
//     cannot repeat it.
//   - A replica, or a primary that lacks the replicas it is told to have, is refused before anything is answered: each script
//     that could say busy or lost writes first, or tries to.
//   - A renewal and a release work where the memory has run out; an acquisition does not.
//   - Who waits subscribes to a channel of his own and takes a place in the queue. A release tells the first one who may
//     take the slot, and goes on to the next where nobody listens any more: what a handover costs does not grow with the
//     number of those that wait. The place is a hint: a run that does not wait may come between.
//   - The library retries nothing. A connection that gave no answer is closed with all others to that server, and the next
//     attempt makes a new one.
//
// # The limits
//
// What the server forgets is free at once: an acknowledged write that is lost in a fail-over, a restart without
// persistence, an eviction (use maxmemory-policy noeviction), a key that somebody deletes. The old holder is told by its next
// renewal and stops; until then two run. The term grows all the same, for it is never below the server's clock.
// ?replicas=N lets a grant count only when N replicas have it, which also ends a holder that is cut off together with an old
// primary. A server's clock that is set forward frees leases early by as much.
//
// The user of an ACL needs, for keys and channels ul:*, the commands of [Commands].
package redis

import (
	"context"
	"net/url"
	"strings"
	"sync"

	goredis "github.com/redis/go-redis/v9"

	"github.com/underlease/underlease/backends"
)

// Commands are those that the user of an ACL has to be allowed, for the keys and the channels ul:*. Without publish and
// subscribe waiters poll; scan, and cluster in a cluster, are for List alone; select is for a database other than 0, wait for
// ?replicas.
var Commands = []string{
	"hello", "auth", "eval", "evalsha", "time", "exists", "hget", "hmget", "hgetall", "hset", "hdel", "persist", "pexpire",
	"publish", "subscribe", "scan", "cluster|slots", "asking", "select", "wait",
}

// Schemes returns how the URLs of Redis are opened, by their schemes:
//
//	redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]
//	redis+unix:///PATH?db=DATABASE
//	redis+sentinel://[USER:PASSWORD@]HOST[:PORT],...[/PRIMARY][?db=DATABASE&sentinel-user=USER&sentinel-password=PASSWORD]
//	redis+cluster://[USER:PASSWORD@]HOST[:PORT],...
//
// With rediss in the place of redis, but not over a socket, connections are encrypted. Parameters:
//
//	ca=FILE                 the authorities that may have signed the server's certificate, instead of the system's
//	cert=FILE, key=FILE     the client's own certificate
//	server-name=NAME        what the certificate has to be of, where that is not the host
//	replicas=N              a grant counts when so many replicas have it
func Schemes() map[string]backends.Scheme {
	s := backends.Scheme{Open: open}
	return map[string]backends.Scheme{
		"redis": s, "rediss": s, "redis+unix": s,
		"redis+sentinel": s, "rediss+sentinel": s,
		"redis+cluster": s, "rediss+cluster": s,
	}
}

// quiet silences the library, which would write to standard error.
var quiet = sync.OnceFunc(func() { goredis.SetLogger(silence{}) })

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

func open(_ context.Context, u *url.URL) (*backends.Store, error) {
	s, err := parse(u)
	if err != nil {
		return nil, err
	}
	quiet()
	c := &Client{settings: s, address: s.address(), nodes: map[string]*node{}, waiting: map[string]*waiting{}}
	switch s.kind {
	case sentinels:
		c.route = &watched{client: c}
	case cluster:
		c.route = &sharded{client: c, known: map[string]string{}}
	default:
		c.route = single(s.hosts[0])
	}
	return &backends.Store{Backend: c, Scheme: strings.ToLower(u.Scheme), Address: c.address, Identity: s.identity()}, nil
}
