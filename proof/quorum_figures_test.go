//go:build linux

package proof

import (
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
)

// What a run of `true` may cost beside what the store's own tool costs, which starts no guardian.
const (
	mostToEtcdctl = 0.75
	mostToConsul  = 0.25
)

// Whole processes, one of each in turn, in one run: nothing, the store's own tool, and ours.
func TestARunCostsLessThanTheStoresOwnTool(t *testing.T) {
	etcd := servers.StartEtcd(t, 1, servers.EtcdOptions{}).Nodes[0].Addr()
	consul := servers.StartConsul(t, 1, servers.ConsulOptions{}).Nodes[0].Addr()
	subject := func(name string, args ...string) figures.Subject {
		return figures.Subject{Name: name, Args: args, Env: environ()}
	}
	ours := func(url string) figures.Subject {
		return subject("underlease", bin.underlease, "run", "--backend", url, "ours", "--", "true")
	}
	for _, c := range []struct {
		tool, ours figures.Subject
		most       float64
		rounds     int
	}{
		{subject("etcdctl lock", servers.Etcdctl(t), "--endpoints", etcd, "lock", "theirs", "true"), ours("etcd://" + etcd), mostToEtcdctl, 160},
		{subject("consul lock", servers.ConsulProgram(t), "lock", "-http-addr="+consul, "-shell=false", "theirs", "true"), ours("consul://" + consul), mostToConsul, 60},
	} {
		least(t, c.most, func() float64 {
			quiet := starts(t, []figures.Subject{subject("true", "/bin/true"), c.tool, c.ours}, c.rounds)
			ratio := float64(quiet[2].Median()) / float64(quiet[1].Median())
			t.Logf("%.2f times %s (at most %v)", ratio, c.tool.Name, c.most)
			return ratio
		})
	}
}
