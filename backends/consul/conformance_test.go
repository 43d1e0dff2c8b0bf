//go:build linux

package consul

import (
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

func conforms(t *testing.T, raw, root string, n *servers.Consul) {
	t.Helper()
	backendtest.Run(t, backendtest.Harness{
		Place: func(t *testing.T) backendtest.Place {
			return backendtest.Place{
				Open: func() *backends.Store { return opened(t, raw) },
				Wipe: func(namespace, lease string) {
					prefix := under(root, namespace, lease)
					if len(n.Keys(prefix)) == 0 {
						t.Fatal("there is nothing to delete")
					}
					n.Delete(prefix)
				},
			}
		},
		TTL:   ttl,
		Slack: slack,
		Ticks: true,
	})
}

const (
	ttl   = time.Second
	slack = 3 * time.Second // a session lives for up to twice its ttl, and a hold of two ttl is one
)

const short = "?session-ttl-min=1s"

func TestConformance(t *testing.T) {
	c := servers.StartConsul(t, 1, servers.ConsulOptions{})
	conforms(t, "consul://"+c.Nodes[0].Addr()+short, "ul", c.Nodes[0])
}

// The agent that is asked is not the leader.
func TestConformanceOnThreeServers(t *testing.T) {
	// A leader that stands still for a second is left in office: the suite is not about elections.
	c := servers.StartConsul(t, 3, servers.ConsulOptions{Config: map[string]any{"performance": map[string]any{"raft_multiplier": 3}}})
	_, others := c.Leader()
	conforms(t, "consul://"+others[0].Addr()+short, "ul", c.Nodes[0])
}

func TestHostsWithClocksAnHourApart(t *testing.T) { // C63
	c := servers.StartConsul(t, 1, servers.ConsulOptions{})
	backendtest.Clocks(t, backendtest.Harness{TTL: ttl, Slack: slack, Ticks: true}, func(now func() time.Time) *backends.Store {
		u, err := backends.ParseURL("consul://" + c.Nodes[0].Addr() + short)
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
