//go:build linux

package postgres

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// opened opens a URL, or ends the test.
func opened(t testing.TB, raw string) *backends.Store {
	t.Helper()
	return backendtest.Open(t, Schemes(), raw)
}

// where is the condition of a lease's row.
func where(namespace, lease string) string {
	return fmt.Sprintf(`WHERE namespace = '\x%x' AND lease = '\x%x'`, namespace, lease)
}

func conforms(t *testing.T, raw string, p *servers.Postgres) {
	t.Helper()
	backendtest.Run(t, backendtest.Harness{
		Place: func(t *testing.T) backendtest.Place {
			return backendtest.Place{
				Open: func() *backends.Store { return opened(t, raw) },
				Wipe: func(namespace, lease string) {
					if got := p.Do("WITH d AS (DELETE FROM underlease " + where(namespace, lease) + " RETURNING 1) SELECT count(*) FROM d"); got != "1" {
						t.Fatalf("deleted: got %s rows, want 1", got)
					}
				},
			}
		},
		TTL:   400 * time.Millisecond,
		Slack: 200 * time.Millisecond,
	})
}

func direct(p interface{ Addr() string }) string { return "postgres://lease@" + p.Addr() + "/lease" }

func TestConformance(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	conforms(t, direct(p), p)
}

// With fewer connections to the server than clients, so that no two statements of one client need to meet the same.
func TestConformanceBehindAPooler(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	conforms(t, direct(servers.StartPgBouncer(t, p, 3)), p)
}

func TestConformanceEncryptedWithAPassword(t *testing.T) {
	c := servers.MakeCertificates(t)
	p := servers.StartPostgres(t, servers.PostgresOptions{TLS: c, Password: "p/w"})
	q := url.Values{"sslmode": {"verify-full"}, "sslrootcert": {c.CA}}
	p.Do("CREATE SCHEMA jobs AUTHORIZATION lease")
	p.Do("ALTER ROLE lease SET search_path = jobs")
	p.Do("ALTER ROLE postgres SET search_path = jobs")
	conforms(t, "postgres://lease:p%2Fw@"+p.Addr()+"/lease?"+q.Encode(), p)
}

// A role whose transactions are serializable, and whose commits are not waited for.
func TestConformanceOfASerializableRole(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	p.Do("ALTER ROLE lease SET default_transaction_isolation = serializable")
	p.Do("ALTER ROLE lease SET synchronous_commit = off")
	p.Do("ALTER ROLE lease SET timezone = '+09:00'")
	conforms(t, direct(p), p)
}
