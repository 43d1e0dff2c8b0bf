// Package consul keeps leases in the key-value store of Consul 1.11 or newer. The protocol stands in package quorum; here is how
// Consul serves it.
//
// # The promise
//
// A slot's key is locked by a session of its own, which hangs on its ttl alone: no health check of a node takes part, so that an
// agent that is cut off does not free a lease before its holder has had the time to stop. There is no lock-delay. Every read
// is consistent, every change one transaction.
//
// # The rules
//
//   - Acquire reads first and makes a session only when a slot is free: a refused attempt writes nothing. It takes three round
//     trips.
//   - Renew renews the session and reads the slot at the same time: one round trip.
//   - Release is one transaction. The session has no keys then, and ends by itself; a long one is destroyed.
//   - A session whose making was not answered has no keys, and ends by itself: Consul chooses its name.
//
// # The limits
//
// Consul invalidates a session at up to twice its ttl, and counts anew after a change of the leader: a lease whose holder
// died is free after ttl to 2 ttl. Sessions last from 10 s to 24 h; where session_ttl_min of the servers is lower, the URL says
// so by ?session-ttl-min. A hold of D is kept for D to 2 D, and for 10 s at least. What is left of a lease cannot be asked of Consul:
// what is shown is the ttl.
//
// A token needs session_prefix "" write, and key_prefix write on the URL's path (ul/ by default).
package consul

import (
	"context"
	"io"
	"log"
	"net/url"
	"sync"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/quorum"
)

// Schemes returns how the URLs of Consul are opened, by their schemes:
//
//	consul://[:TOKEN@][HOST[:PORT]][/PREFIX]
//
// With consuls in the place of consul connections are encrypted. Parameters:
//
//	token-file=FILE         the file of a token
//	datacenter=NAME, namespace=NAME, partition=NAME
//	session-ttl-min=D       what the servers have as session_ttl_min, where that is not 10s
//	ca=FILE                 the authorities that may have signed the server's certificate, instead of the system's
//	cert=FILE, key=FILE     the client's own certificate
//	server-name=NAME        what the certificate has to be of, where that is not the host
//
// What the URL does not say is taken from the variables that Consul's own client reads: CONSUL_HTTP_ADDR, CONSUL_HTTP_TOKEN,
// CONSUL_HTTP_TOKEN_FILE, CONSUL_HTTP_AUTH, CONSUL_HTTP_SSL, CONSUL_HTTP_SSL_VERIFY, CONSUL_CACERT, CONSUL_CAPATH,
// CONSUL_CLIENT_CERT, CONSUL_CLIENT_KEY, CONSUL_TLS_SERVER_NAME, CONSUL_NAMESPACE and CONSUL_PARTITION. Without any host it
// is 127.0.0.1:8500.
func Schemes() map[string]backends.Scheme {
	s := backends.Scheme{Open: open}
	return map[string]backends.Scheme{"consul": s, "consuls": s}
}

// quiet silences what net/http says by the standard logger about idle connections. Nobody else here uses that.
var quiet = sync.OnceFunc(func() { log.SetOutput(io.Discard) })

func open(_ context.Context, u *url.URL) (*backends.Store, error) { return openAt(u, nil) }

// openAt opens a URL on a host with some clock.
func openAt(u *url.URL, now func() time.Time) (*backends.Store, error) {
	s, err := parse(u)
	if err != nil {
		return nil, err
	}
	quiet()
	d, err := newDriver(s)
	if err != nil {
		return nil, err
	}
	return &backends.Store{
		Backend: quorum.New(d, quorum.Options{Root: s.root, Now: now}),
		Scheme:  s.scheme(), Address: d.address, Identity: s.identity(),
	}, nil
}
