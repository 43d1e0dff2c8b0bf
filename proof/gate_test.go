//go:build linux

package proof

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/stamps"
)

// onceStores are the stores on which it is proved that something runs once, by the URL of an empty one.
var onceStores = map[string]func(t *testing.T) string{
	"file": store,
	"redis": func(t *testing.T) string {
		return "redis://" + servers.StartRedis(t, servers.RedisOptions{}).Addr()
	},
	"postgres": func(t *testing.T) string {
		return "postgres://lease@" + servers.StartPostgres(t, servers.PostgresOptions{}).Addr() + "/lease"
	},
	"mariadb": func(t *testing.T) string {
		return "mysql://lease@" + servers.StartMariaDB(t, servers.MariaDBOptions{}).Addr() + "/lease"
	},
	// These two show no clock: the slot, as the term, is by the clock of the host that was granted the lease. The hosts of these tests have
	// one clock and several zones.
	"etcd": func(t *testing.T) string {
		return "etcd://" + servers.StartEtcd(t, 1, servers.EtcdOptions{}).Nodes[0].Addr()
	},
	"consul": func(t *testing.T) string {
		return "consul://" + servers.StartConsul(t, 1, servers.ConsulOptions{}).Nodes[0].Addr() + "?session-ttl-min=1s"
	},
}

func onEveryStore(t *testing.T, f func(t *testing.T, url string)) {
	for name, open := range onceStores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, open(t))
		})
	}
}

// instance is one start of underlease: a gate or a run.
type instance struct {
	t      *testing.T
	cmd    *exec.Cmd
	report string
	errs   bytes.Buffer
	over   chan struct{}
}

// zones are those of the hosts: none of them may matter.
var zones = []string{"UTC", "Europe/Berlin", "America/St_Johns", "Asia/Kathmandu", "Pacific/Kiritimati"}

func launch(t *testing.T, url string, host int, words ...string) *instance {
	t.Helper()
	n := &instance{t: t, report: filepath.Join(t.TempDir(), "report"), over: make(chan struct{})}
	n.cmd = exec.Command(bin.underlease, append([]string{words[0], "--backend", url, "--report", n.report}, words[1:]...)...)
	n.cmd.Env = append(environ(), "TZ="+zones[host%len(zones)])
	n.cmd.Stderr = &n.errs
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(n.over)
		_ = n.cmd.Wait() // the state is what is asked
	}()
	t.Cleanup(func() {
		select {
		case <-n.over:
		default:
			_ = n.cmd.Process.Kill()
			<-n.over
		}
	})
	return n
}

// end waits for the end and returns the exit code and the outcome in the report.
func (n *instance) end() (exit int, outcome string) {
	n.t.Helper()
	select {
	case <-n.over:
	case <-time.After(2 * time.Minute):
		n.t.Fatalf("still running after two minutes; it said %q", n.errs.String())
	}
	var r struct{ Outcome string }
	if data, err := os.ReadFile(n.report); err == nil {
		if err := json.Unmarshal(data, &r); err != nil {
			n.t.Errorf("the report %q: %v", data, err)
		}
	}
	return code(n.cmd), r.Outcome
}

// executions returns the terms of the commands that left stamps, after it has judged them.
func executions(t *testing.T, dir string) (terms []int64) {
	t.Helper()
	judge(t, dir)
	lives, err := stamps.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lives {
		if l.Command {
			terms = append(terms, l.Term)
		}
	}
	return terms
}

func markerIs(t *testing.T, url, id string, want int) {
	t.Helper()
	c := exec.Command(bin.underlease, "marker", "show", "--json", "--backend", url, id)
	c.Env = environ()
	out, _ := c.CombinedOutput() // the code is what is asked
	if got := code(c); got != want {
		t.Errorf("marker show: got %d and %s, want %d", got, out, want)
	}
}

// Three instances at once: one applies it, the others say that it is applied. The migration takes five ttl.
func TestThreeInstancesAtOnceMigrateOnce(t *testing.T) {
	onEveryStore(t, func(t *testing.T, url string) {
		for name, flags := range map[string][]string{"short": nil, "five ttl": {"--ttl", "5s", "--grace", "200ms"}} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				dir, lasts := t.TempDir(), "200ms"
				if flags != nil {
					lasts = "25s"
				}
				var all []*instance
				for host := range 3 {
					words := append([]string{"gate", "--wait", "1m", "--log-level", "error"}, flags...)
					all = append(all, launch(t, url, host, append(words, name, "--", bin.job, dir, lasts)...))
				}
				var got []string
				for _, n := range all {
					exit, outcome := n.end()
					if exit != 0 {
						t.Errorf("got %d and %q, want 0", exit, n.errs.String())
					}
					got = append(got, outcome)
				}
				slices.Sort(got)
				if want := []string{"already-applied", "already-applied", "migrated"}; !slices.Equal(got, want) {
					t.Errorf("got %q, want %q", got, want)
				}
				if n := len(executions(t, dir)); n != 1 {
					t.Errorf("the command ran %d times, want once", n)
				}
				markerIs(t, url, name, 0)
			})
		}
	})
}

// The wrapper or the guardian is killed in the middle: there is no marker, and the next instance, which waits for the lease, runs it again
// when nothing is left of the first.
func TestAMigrationThatWasKilledIsRunAgain(t *testing.T) {
	onEveryStore(t, func(t *testing.T, url string) {
		for _, victim := range []string{"wrapper", "guardian"} {
			t.Run(victim, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				words := []string{"gate", "--ttl", "6s", "--grace", "200ms", "--log-level", "error", "--wait", "1m", victim, "--", bin.job, dir}
				first := launch(t, url, 0, append(words, "1m", "tree", "stubborn")...)
				if !within(time.Minute, func() bool { lives, _ := stamps.Read(dir); return len(lives) == 4 }) {
					t.Fatalf("the migration did not begin: %q", first.errs.String())
				}
				pid := first.cmd.Process.Pid
				if victim == "guardian" {
					if pid = guardian(pid); pid == 0 { // and zero would be ourselves
						t.Fatalf("the guardian was not found: %q", first.errs.String())
					}
				}
				second := launch(t, url, 1, append(words, "50ms")...)
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				killed := time.Now()
				exit, _ := first.end()
				if want := map[string]int{"wrapper": 128 + 9, "guardian": 74}[victim]; exit != want {
					t.Errorf("the one that was killed ended with %d, want %d", exit, want)
				}
				if exit, outcome := second.end(); exit != 0 || outcome != "migrated" {
					t.Errorf("the next one ended with %d and %q: %q, want that it migrates", exit, outcome, second.errs.String())
				}
				if took := time.Since(killed); took > 20*time.Second { // at Consul a lease may last for twice its ttl
					t.Errorf("it took %v until it was applied, with a ttl of 6s", took)
				}
				if n := len(executions(t, dir)); n != 2 {
					t.Errorf("the command ran %d times, want twice", n)
				}
				markerIs(t, url, victim, 0)
			})
		}
	})
}

// Two to five hosts in other time zones start one job at offsets up to two seconds. All offsets are taken, with every length of the job and
// every number of hosts in turn; the whole product is swept in the tests of package runner.
func TestATickOfSeveralHostsIsOneExecution(t *testing.T) { // C65
	for name, flags := range map[string][]string{
		"min-hold": {"--min-hold", "30s"},
		"once-per": {"--once-per", "1m"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEveryStore(t, func(t *testing.T, url string) {
				atOnce := make(chan struct{}, 12) // cases
				var all sync.WaitGroup
				lengths := []string{"0s", "100ms", "500ms", "1s"}
				runs := 0
				for tenths := 0; tenths <= 20; tenths++ {
					for i, lasts := range lengths {
						hosts, offset := 2+(tenths+i)%4, time.Duration(tenths)*100*time.Millisecond
						lease, dir := fmt.Sprintf("%v %s %d", offset, lasts, hosts), t.TempDir()
						runs += hosts
						atOnce <- struct{}{}
						all.Go(func() {
							defer func() { <-atOnce }()
							began := time.Now()
							var started []*instance
							for host := range hosts {
								timer := time.NewTimer(time.Until(began.Add(offset * time.Duration(host) / time.Duration(hosts-1))))
								<-timer.C
								started = append(started, launch(t, url, host, append(append([]string{"run"}, flags...), lease, "--", bin.job, dir, lasts)...))
							}
							succeeded := 0
							for _, n := range started {
								switch exit, outcome := n.end(); {
								case exit == 0 && outcome == "ok":
									succeeded++
								case exit != 75:
									t.Errorf("%s: got %d and %q", lease, exit, n.errs.String())
								}
							}
							terms := executions(t, dir)
							if name == "min-hold" && len(terms) != 1 || len(terms) == 0 || len(terms) != succeeded {
								t.Errorf("%s: the job ran %d times, and %d said so; want once", lease, len(terms), succeeded)
							}
							// A term is the clock of the store at the acquisition: a case over the full minute has two slots.
							slots := map[int64]int{}
							for _, term := range terms {
								if slots[term/time.Minute.Milliseconds()]++; slots[term/time.Minute.Milliseconds()] > 1 {
									t.Errorf("%s: the job ran twice in one minute, with the terms %v", lease, terms)
								}
							}
						})
					}
				}
				all.Wait()
				t.Logf("%d runs", runs)
			})
		})
	}
}

// What the documentation says of a lease alone.
func TestWithoutAHoldASecondHostRunsItAgain(t *testing.T) {
	onEveryStore(t, func(t *testing.T, url string) {
		dir := t.TempDir()
		for host := range 2 {
			if exit, _ := launch(t, url, host, "run", "tick", "--", bin.job, dir, "1ms").end(); exit != 0 {
				t.Errorf("got %d, want 0", exit)
			}
		}
		if n := len(executions(t, dir)); n != 2 {
			t.Errorf("the job ran %d times, want twice", n)
		}
	})
}

// Hosts that are an hour before and an hour behind their store: the slot is that of the store, so that they neither lose nor double one.
func TestTheSlotIsThatOfTheStoresClock(t *testing.T) { // C63
	type clock interface {
		Addr() string
		SetClock(ahead time.Duration)
	}
	for name, start := range map[string]func(t *testing.T) (clock, string){
		"redis": func(t *testing.T) (clock, string) {
			r := servers.StartRedis(t, servers.RedisOptions{Clock: true})
			return r, "redis://" + r.Addr()
		},
		"postgres": func(t *testing.T) (clock, string) {
			p := servers.StartPostgres(t, servers.PostgresOptions{Clock: true})
			return p, "postgres://lease@" + p.Addr() + "/lease"
		},
		"mariadb": func(t *testing.T) (clock, string) {
			m := servers.StartMariaDB(t, servers.MariaDBOptions{Clock: true, Zone: "+09:00"})
			return m, "mysql://lease@" + m.Addr() + "/lease"
		},
	} {
		for _, ahead := range []time.Duration{time.Hour, -time.Hour} {
			t.Run(name+" "+ahead.String(), func(t *testing.T) {
				t.Parallel()
				server, url := start(t)
				server.SetClock(ahead)
				path := filepath.Join(t.TempDir(), "id")
				slot := func() string { return "tick/" + time.Now().Add(ahead).UTC().Truncate(time.Hour).Format(time.RFC3339) }
				before := slot()
				exit, _ := launch(t, url, 0, "run", "--once-per", "1h", "tick", "--", "sh", "-c", `printf %s "$UNDERLEASE_RUN_ID" > "$0"`, path).end()
				id, err := os.ReadFile(path)
				if got := string(id); exit != 0 || err != nil || got != before && got != slot() {
					t.Fatalf("got %d, %v and the run id %q, want %q", exit, err, got, before)
				}
				if before != slot() {
					t.Skip("the hour has ended in the midst of it")
				}
				if exit, outcome := launch(t, url, 1, "run", "--once-per", "1h", "tick", "--", "true").end(); exit != 75 || outcome != "not-due" {
					t.Errorf("got %d and %q from a second host, want 75 and not-due", exit, outcome)
				}
				server.SetClock(ahead + time.Hour)
				if exit, _ := launch(t, url, 2, "run", "--once-per", "1h", "tick", "--", "true").end(); exit != 0 {
					t.Errorf("got %d in the store's next hour, want 0", exit)
				}
			})
		}
	}
}

// A store's clock that was set back delays the next run by one interval at most, and never until it has caught up.
func TestAClockThatWasSetBackDelaysByOneInterval(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{Clock: true})
	url := "redis://" + r.Addr()
	start := func(flag, value, name string) (exit int) {
		exit, _ = launch(t, url, 0, "run", flag, value, name, "--", "true").end()
		return exit
	}
	r.SetClock(365 * 24 * time.Hour)
	for _, name := range []string{"daily", "often"} {
		flag, value := "--min-interval", "2s"
		if name == "daily" {
			flag, value = "--once-per", "1d"
		}
		if exit := start(flag, value, name); exit != 0 {
			t.Fatalf("%s: got %d, want 0", name, exit)
		}
	}
	r.SetClock(0)
	if exit := start("--once-per", "1d", "daily"); exit != 0 {
		t.Errorf("got %d in another slot, want 0", exit)
	}
	begun := time.Now()
	if exit := start("--min-interval", "2s", "often"); exit != 75 {
		t.Errorf("got %d, want 75: it cannot be known that it is due", exit)
	}
	if !within(30*time.Second, func() bool { return start("--min-interval", "2s", "often") == 0 }) {
		t.Errorf("it is not due %v later, with an interval of 2s", time.Since(begun))
	}
}

// An idempotency key is the same for all runs of a slot, whoever makes them and wherever they are.
func TestTheRunIDOfASlotIsItsBeginInUTC(t *testing.T) {
	onEveryStore(t, func(t *testing.T, url string) {
		for host := range len(zones) {
			path := filepath.Join(t.TempDir(), "id")
			before := time.Now().UTC().Truncate(24 * time.Hour)
			launch(t, url, host, "run", "--once-per", "1d", strconv.Itoa(host), "--", "sh", "-c", `printf %s "$UNDERLEASE_RUN_ID" > "$0"`, path).end()
			id, err := os.ReadFile(path)
			after := time.Now().UTC().Truncate(24 * time.Hour)
			if got := string(id); err != nil || got != strconv.Itoa(host)+"/"+before.Format(time.RFC3339) && got != strconv.Itoa(host)+"/"+after.Format(time.RFC3339) {
				t.Errorf("%s: got %q and %v, want the midnight before in UTC", zones[host], got, err)
			}
		}
	})
}
