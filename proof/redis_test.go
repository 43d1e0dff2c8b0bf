//go:build linux

package proof

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
)

// onRedis is the store on a Redis.
func onRedis(t *testing.T, r *servers.Redis) *network {
	t.Helper()
	const record = "ul:{_/l}"
	n := &network{
		t: t, dir: t.TempDir(), proxy: proxy.New(t, r.Addr()), server: r, addr: r.Addr(),
		url:      func(addr string) string { return "redis://" + addr },
		queued:   func() int { return strings.Count(r.Do("HGET", record, "q"), "\n") },
		revision: func() string { return r.Do("HGET", record, "s0") },
		remove:   func() { r.Do("DEL", record) },
		edit:     func() { r.Do("HSET", record, "note", "somebody else's") },
		acquires: "-- ARGV: name, handle, holder, slots", // the script, which only the first request of a connection has
		tickets:  1, stale: 500 * time.Millisecond,
		soon: time.Second, free: ttl + time.Second, held: 11 * time.Second,
		back:     ttl, // the holder could not give back
		contests: 1000,
	}
	n.all = n.straight()
	n.holder = func() string { return holderOf(n.revision()) }
	n.gone = []deed{
		{"DEL", n.remove},
		{"FLUSHALL", func() { r.Do("FLUSHALL") }},
		{"HDEL", func() { r.Do("HDEL", record, "s0") }},
	}
	return n
}

// holderOf is what a slot has that no renewal changes, or all of it where it has no such thing.
func holderOf(slot string) string {
	var s struct{ H, W, T string }
	if json.Unmarshal([]byte(slot), &s) != nil || s.H+s.W+s.T == "" {
		return slot
	}
	return s.H + s.W + s.T
}

// C14: a replica that missed the grant is promoted. The old holder is told by its next renewal.
func TestRedisAFailoverThatForgetsTheGrantIsNoticedAtTheNextRenewal(t *testing.T) {
	t.Parallel()
	set := servers.StartSentinel(t, servers.RedisOptions{Durable: true})
	n := onRedis(t, set.Primary)
	n.failover("redis+sentinel://"+strings.Join(set.Addrs(), ",")+"/"+set.Name, set.Replica.Kill, func() {
		set.Primary.Kill()
		set.Replica.Restart()
	})
}

// longestHandover is the bar for a store that tells who waits, on a quiet machine.
const longestHandover = 15 * time.Millisecond

// What a handover costs does not grow with those that wait.
func TestRedisAHandoverCostsTheSameWithAHundredWaiters(t *testing.T) {
	handOn := func(many int) time.Duration {
		r := servers.StartRedis(t, servers.RedisOptions{})
		n := onRedis(t, r)
		a := n.run(n.straight(), nil, n.job(time.Minute, "obedient")) // a handover after a clean end
		a.begins()
		all := n.queue(n.straight(), many, "--ttl", "60s", "--wait", "60s")
		before := scripts(t, r)
		n.handOn(a, all)
		each := float64(scripts(t, r)-before) / float64(many)
		judge(t, n.dir)
		median, p99 := n.handovers()
		t.Logf("%d waiters: %.1f requests and a median of %v for each handover, p99 %v", many, each, median, p99)
		// One to acquire, one to release, and what those who wait ask now and then to be safe.
		if each > 4 {
			t.Errorf("%d waiters: got %.1f requests for each handover, want at most 4", many, each)
		}
		return median
	}
	for _, many := range []int{8, 100} {
		handover(t, fmt.Sprintf("%d waiters", many), longestHandover, func() time.Duration { return handOn(many) })
	}
}

// scripts counts those that a server has run.
func scripts(t *testing.T, r *servers.Redis) (sum int) {
	t.Helper()
	for line := range strings.SplitSeq(r.Do("INFO", "commandstats"), "\r\n") {
		if stats, ok := strings.CutPrefix(line, "cmdstat_eval"); ok { // and evalsha
			_, after, _ := strings.Cut(stats, "calls=")
			number, _, _ := strings.Cut(after, ",")
			calls, err := strconv.Atoi(number)
			if err != nil {
				t.Fatal(err)
			}
			sum += calls
		}
	}
	return sum
}

// Credentials are nowhere: also not in settings, in what the guardian shows, or in the words of a run that finds the lease held.
func TestRedisSecretsAreShownNowhere(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t-pass"
	n := onRedis(t, servers.StartRedis(t, servers.RedisOptions{User: "lease", Password: secret}))
	store := "redis://lease:" + secret + "@" + n.addr
	var all strings.Builder
	a := n.prepare(store, []string{"--log-level", "debug"}, n.job(time.Minute))
	for i := range a.cmd.Args { // as a user does who keeps it out of the list of processes
		if a.cmd.Args[i] == "--backend" {
			a.cmd.Args = slices.Delete(a.cmd.Args, i, i+2)
			break
		}
	}
	a.cmd.Env = append(a.cmd.Env, "UNDERLEASE_BACKEND="+store)
	a.start().begins()
	n.renewed(1)
	for _, pid := range []int{a.cmd.Process.Pid, guardian(a.cmd.Process.Pid)} {
		files := []string{"cmdline"}
		if pid != a.cmd.Process.Pid {
			files = append(files, "environ")
		}
		for _, name := range files {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
			if err != nil {
				t.Fatal(err)
			}
			all.Write(b)
		}
	}
	b := n.run(store, []string{"-v"}, n.job(0))
	b.wants(75, "busy", "busy: ")
	n.remove()
	a.ends()
	fmt.Fprintln(&all, a.said(), b.said())
	config := exec.Command(bin.underlease, "config")
	config.Env = append(environ(), "HOME="+t.TempDir(), "UNDERLEASE_BACKEND="+store)
	out, err := config.CombinedOutput()
	if err != nil {
		t.Fatalf("config: %v, %q", err, out)
	}
	all.Write(out)
	if strings.Contains(all.String(), secret) {
		t.Errorf("the secret is shown:\n%s", &all)
	}
	if !strings.Contains(all.String(), "redis://"+n.addr) {
		t.Errorf("the address is shown nowhere:\n%s", &all)
	}
}

// The bar is 9 ms on a quiet machine, where flock(1) takes 1.8: what is limited is how often flock(1) could have run.
func TestARunOnRedisTakesMilliseconds(t *testing.T) {
	kept := servers.StartRedis(t, servers.RedisOptions{Durable: true})
	subjects, err := figures.Usual(bin.underlease, t.TempDir())
	servers.Require(t, "flock", err)
	subjects = append(subjects, figures.Subject{
		Name: "redis", Env: environ(), Args: []string{bin.underlease, "run", "--backend", "redis://" + kept.Addr(), "x", "--", subjects[0].Args[0]},
	})
	least(t, 5, func() float64 {
		quiet := starts(t, subjects, 120)
		return float64(quiet[len(quiet)-1].Median()) / float64(quiet[1].Median())
	})
}
