// Package etcd keeps leases in etcd 3.4 or newer, on one server or on a cluster. The protocol stands in package quorum; here is how
// etcd serves it.
//
// # The promise
//
// A slot's key hangs on an etcd lease whose number is derived from the handle: what became of a request whose answer was lost is
// found by asking again. What is answered comes from a linearizable read or from a transaction that compares. The cluster alone counts the ttl.
//
// # The rules
//
//   - Acquire grants the etcd lease while it looks at what the member knows that it asked, and takes the slot in one transaction, which is
//     sent before the etcd lease is known to be there: two round trips, of which the cluster has to agree on one. The transaction
//     compares, so that an old look costs another try; what is busy is looked at again, by a linearizable read. An etcd lease of more than
//     two minutes is granted after the look, so that who finds the lease busy leaves nothing behind for long.
//   - Renew sends a keep-alive and a linearizable read at the same time: one round trip.
//   - Release is one transaction. The etcd lease has no keys then, and ends by itself; a long one is revoked.
//   - One member is asked, over one connection. One that cannot be reached, has no leader, or does not answer as a member that works does,
//     is left for the next at once, within the call; but for a transaction of which nobody knows whether it was made. One that gave no
//     answer in time is left, with the connection, after that attempt.
//   - No library of etcd is linked: a dozen messages of gRPC go over the HTTP/2 of the standard library (see wire.go). That library takes
//     two milliseconds before main, of every run on every store.
//
// # The limits
//
// etcd counts whole seconds, at least one and a half election timeouts (2 s by default), and revokes up to a second late: a ttl is
// never cut short, but it may last a little longer than asked. After a change of the leader every ttl is counted anew. Servers
// before 3.4.31 and 3.5.13 revoke leases that are kept after their leader was frozen (etcd-io/etcd#15247): the holder is told
// by his next renewal and stops; a loss on such a server says so.
//
// A role needs read and write on the keys that begin with the URL's path (ul/ by default).
package etcd

import (
	"context"
	"net/url"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/quorum"
)

// Schemes returns how the URLs of etcd are opened, by their schemes:
//
//	etcd://[USER:PASSWORD@][HOST[:PORT],...][/PREFIX]
//
// With etcds in the place of etcd connections are encrypted. Parameters:
//
//	ca=FILE                 the authorities that may have signed the servers' certificates, instead of the system's
//	cert=FILE, key=FILE     the client's own certificate
//	server-name=NAME        what the certificates have to be of, where that is not the host
//
// What the URL does not say is taken from the variables that etcdctl reads: ETCDCTL_ENDPOINTS, ETCDCTL_USER, ETCDCTL_PASSWORD,
// ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY and ETCDCTL_INSECURE_SKIP_TLS_VERIFY. Without any host it is 127.0.0.1:2379.
// As etcdctl does, an endpoint without a scheme is spoken to encrypted where one of the three files is named. A password is never sent
// unencrypted while one is.
func Schemes() map[string]backends.Scheme {
	s := backends.Scheme{Open: open}
	return map[string]backends.Scheme{"etcd": s, "etcds": s}
}

func open(_ context.Context, u *url.URL) (*backends.Store, error) { return openAt(u, nil) }

// openAt opens a URL on a host with some clock.
func openAt(u *url.URL, now func() time.Time) (*backends.Store, error) {
	s, err := parse(u)
	if err != nil {
		return nil, err
	}
	d := newDriver(s)
	return &backends.Store{
		Backend: quorum.New(d, quorum.Options{Root: s.root, Now: now}),
		Scheme:  s.scheme, Address: d.address, Identity: s.identity(),
	}, nil
}
