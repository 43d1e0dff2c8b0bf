//go:build linux

package proof

import (
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
)

// What a run of `true` may cost beside what the store's own tool costs. The last number is where we want to be.
const (
	mostToEtcdctl = 0.75 // 0.5
	mostToConsul  = 0.25 // 0.15
)

// Whole processes, one of each in turn, in one run: nothing, the store's own tool, and ours.
func TestARunCostsLessThanTheStoresOwnTool(t *testing.T) {
	rounds := 150
	if testing.Short() {
		rounds = 40
	}
	etcd := servers.StartEtcd(t, 1, servers.EtcdOptions{}).Nodes[0].Addr()
	consul := servers.StartConsul(t, 1, servers.ConsulOptions{}).Nodes[0].Addr()
	ours := func(url string) figures.Subject {
		return figures.Subject{
			Name: "underlease", Args: []string{bin.underlease, "run", "--backend", url, "start", "--", "true"}, Env: environ(),
		}
	}
	for _, c := range []struct {
		tool, ours figures.Subject
		most       float64
		rounds     int
	}{
		{
			figures.Subject{Name: "etcdctl lock", Args: []string{servers.Etcdctl(t), "--endpoints", etcd, "lock", "theirs", "true"}, Env: environ()},
			ours("etcd://" + etcd), mostToEtcdctl, rounds,
		},
		{
			figures.Subject{
				Name: "consul lock", Env: environ(),
				Args: []string{servers.ConsulProgram(t), "lock", "-http-addr=" + consul, "-shell=false", "theirs", "true"},
			},
			ours("consul://" + consul), mostToConsul, rounds / 2,
		},
	} {
		nothing := figures.Subject{Name: "true", Args: []string{"/bin/true"}, Env: environ()}
		all, err := figures.Starts([]figures.Subject{nothing, c.tool, c.ours}, c.rounds)
		if err != nil {
			t.Fatal(err)
		}
		quiet := figures.Quietest(all, 0.25)
		for i, s := range all {
			t.Logf("%-12s median %v, p99 %v; in quiet rounds %v", s.Name, s.Median(), s.Quantile(0.99), quiet[i].Median())
		}
		theirs, median := quiet[1].Median(), quiet[2].Median()
		ratio := float64(median) / float64(theirs)
		t.Logf("%.2f times %s (at most %v)", ratio, c.tool.Name, c.most)
		if ratio > c.most {
			t.Errorf("got a median of %v, %.2f times the %v of %s, want at most %v times", median.Round(10*time.Microsecond), ratio, theirs.Round(10*time.Microsecond), c.tool.Name, c.most)
		}
	}
}
