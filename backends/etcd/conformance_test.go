//go:build linux

package etcd

import (
	"net/url"
	"strings"
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

// under returns what the keys of a lease begin with.
func under(root, namespace, lease string) string {
	n := "_"
	if namespace != "" {
		n = backends.Key("", namespace)
	}
	return root + "/lease/" + n + "/" + backends.Key(namespace, lease) + "/"
}

func conforms(t *testing.T, raw, root string, c *servers.EtcdCluster, ttl time.Duration) {
	t.Helper()
	backendtest.Run(t, backendtest.Harness{
		Place: func(t *testing.T) backendtest.Place {
			return backendtest.Place{
				Open: func() *backends.Store { return opened(t, raw) },
				Wipe: func(namespace, lease string) {
					if n := c.Nodes[0].Delete(under(root, namespace, lease)); n == 0 {
						t.Fatal("there was nothing to delete")
					}
				},
			}
		},
		TTL:   ttl,
		Slack: slack,
		Ticks: true,
	})
}

const (
	ttl   = 2 * time.Second // the shortest one with the default election timeout of 1 s
	slack = 1500 * time.Millisecond
)

func TestConformance(t *testing.T) {
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	conforms(t, "etcd://"+c.Nodes[0].Addr(), "ul", c, ttl)
}

func TestConformanceOnThreeServers(t *testing.T) {
	// A leader that stands still for a second is left in office: the suite is not about elections. The shortest ttl grows with their timeout.
	c := servers.StartEtcd(t, 3, servers.EtcdOptions{Args: []string{"--election-timeout", "3000"}})
	conforms(t, "etcd://"+strings.Join(c.Addrs(), ","), "ul", c, 5*time.Second)
}

// The user has no other right than those that the documentation names.
func TestConformanceWithTheLeastRights(t *testing.T) {
	notOnceMore(t)
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{Password: "kit", Args: []string{"--bcrypt-cost", "4"}})
	addUser(c.Nodes[0], "lease", "p/w", "app/leases/")
	conforms(t, "etcd://lease:p%2Fw@"+c.Nodes[0].Addr()+"/app/leases", "app/leases", c, ttl)
}

// addUser adds a user who may read and write the keys below a prefix, which ends with a slash.
func addUser(n *servers.Etcd, user, password, prefix string) {
	n.Post("/v3/auth/user/add", map[string]any{"name": user, "password": password})
	n.Post("/v3/auth/role/add", map[string]any{"name": user})
	n.Post("/v3/auth/role/grant", map[string]any{"name": user, "perm": map[string]any{
		"permType": "READWRITE", "key": []byte(prefix), "range_end": []byte(strings.TrimSuffix(prefix, "/") + "0"),
	}})
	n.Post("/v3/auth/user/grant", map[string]any{"user": user, "role": user})
}

// notOnceMore leaves out under the race detector, where the suite has run already, what is special in the server alone.
func notOnceMore(t *testing.T) {
	t.Helper()
	if race {
		t.Skip("SKIPPED under the race detector: the code that runs is that of the suite on a server without rights and certificates")
	}
}

func TestConformanceEncrypted(t *testing.T) {
	notOnceMore(t)
	certificates := servers.MakeCertificates(t)
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{TLS: certificates})
	q := url.Values{"ca": {certificates.CA}, "cert": {certificates.ClientCert}, "key": {certificates.ClientKey}}
	conforms(t, "etcds://"+c.Nodes[0].Addr()+"?"+q.Encode(), "ul", c, ttl)
}

func TestHostsWithClocksAnHourApart(t *testing.T) { // C63
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	backendtest.Clocks(t, backendtest.Harness{TTL: ttl, Slack: slack, Ticks: true}, func(now func() time.Time) *backends.Store {
		u, err := backends.ParseURL("etcd://" + c.Nodes[0].Addr())
		if err != nil {
			t.Fatal(err)
		}
		s, err := openAt(u, now)
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}
