//go:build linux

package mysql

import (
	"net/url"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/table"
)

// opened opens a URL, or ends the test.
func opened(t testing.TB, raw string) *backends.Store {
	t.Helper()
	return backendtest.Open(t, Schemes(), raw)
}

func conforms(t *testing.T, raw string, m *servers.MariaDB) {
	t.Helper()
	backendtest.Run(t, backendtest.Harness{
		Place: func(t *testing.T) backendtest.Place {
			return backendtest.Place{
				Open: func() *backends.Store { return opened(t, raw) },
				Wipe: func(namespace, lease string) {
					if got := m.Do("DELETE FROM underlease" + where(table.Key{Namespace: namespace, Lease: lease}) + "; SELECT ROW_COUNT()"); got != "1" {
						t.Fatalf("deleted: got %s rows, want 1", got)
					}
				},
			}
		},
		TTL:   400 * time.Millisecond,
		Slack: 200 * time.Millisecond,
	})
}

func direct(m interface{ Addr() string }) string { return "mysql://lease@" + m.Addr() + "/lease" }

func TestConformance(t *testing.T) {
	m := servers.StartMariaDB(t, servers.MariaDBOptions{})
	conforms(t, direct(m), m)
}

func TestConformanceEncryptedWithAPassword(t *testing.T) {
	c := servers.MakeCertificates(t)
	m := servers.StartMariaDB(t, servers.MariaDBOptions{TLS: c, Password: "p/w", Zone: "+09:00"})
	q := url.Values{"tls": {"true"}, "ca": {c.CA}}
	conforms(t, "mariadb://lease:p%2Fw@"+m.Addr()+"/lease?"+q.Encode(), m)
}
