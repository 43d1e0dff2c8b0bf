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
			all, err := figures.Starts([]figures.Subject{subject("true", "/bin/true"), c.tool, c.ours}, c.rounds)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range all {
				t.Logf("%-12s median %v, p99 %v, fastest tenth %v, least %v", s.Name, s.Median(), s.Quantile(0.99), s.Quantile(0.1), s.Quantile(0))
			}
			// By the fastest tenth of either: a run of ours is several processes, and slower than its own work wherever the machine has
			// something else to do.
			ratio := float64(all[2].Quantile(0.1)) / float64(all[1].Quantile(0.1))
			t.Logf("%.2f times %s (at most %v); by the medians %.2f", ratio, c.tool.Name, c.most, float64(all[2].Median())/float64(all[1].Median()))
			return ratio
		})
	}
}
