//go:build linux

package proof

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
)

// database is a store that keeps leases in the rows of a table.
type database struct {
	*network
	sql interface{ Do(statement string) string }
}

// rows is what all stores have in common that keep leases in a table. The row of the lease l is that for which a condition holds.
func rows(t *testing.T, s server, addr string, sql interface{ Do(string) string }, row string) *database {
	n := &network{
		t: t, dir: t.TempDir(), proxy: proxy.New(t, addr), server: s, addr: addr, slow: true,
		stale: time.Second, soon: 8 * looks, free: ttl + time.Second, held: 11 * time.Second,
		back:     ttl, // the holder could not give back
		contests: 500,
	}
	d := &database{network: n, sql: sql}
	n.revision = func() string { return sql.Do("SELECT revision FROM underlease WHERE " + row) }
	n.remove = func() { d.statement("DELETE FROM underlease") }
	n.gone = []deed{{"DELETE", n.remove}}
	for _, how := range []string{"DROP TABLE underlease", "UPDATE underlease SET slots = '[]'"} {
		n.gone = append(n.gone, deed{how, func() { sql.Do(how) }})
	}
	n.edit = func() {
		sql.Do("UPDATE underlease SET gone = gone + 1, revision = revision + 100")
		sql.Do("ALTER TABLE underlease ADD COLUMN IF NOT EXISTS note text")
	}
	return d
}

// looks is the longest time between two looks of a run that waits and is not told. A second is the bar for eight where they are told; on a busy
// machine it takes as long as looking does.
const looks = 375 * time.Millisecond

// statement runs SQL where it can, and returns nothing where there is no table yet.
func (d *database) statement(sql string) string {
	d.t.Helper()
	if d.sql.Do("SELECT count(*) FROM information_schema.tables WHERE table_name = 'underlease'") == "0" {
		return ""
	}
	return d.sql.Do(sql)
}

// connections are those for which a condition holds, but for that of the holder.
func (d *database) connections(condition string) int {
	many, _ := strconv.Atoi(d.sql.Do("SELECT count(*) - 1 FROM " + condition))
	return many
}

func onPostgres(t *testing.T, o servers.PostgresOptions) *database {
	t.Helper()
	p := servers.StartPostgres(t, o)
	const row = `lease = '\x6c'`
	d := rows(t, p, p.Addr(), p, row)
	d.acquires, d.renews = "SET (revision, term, gone, slots", "RETURNING u.slots->$3"
	d.url = func(addr string) string { return "postgres://lease@" + addr + "/lease?sslmode=disable" }
	d.all = d.straight()
	d.holder = func() string {
		return d.statement("SELECT slots->0->>'h' || (slots->0->>'t') FROM underlease WHERE slots->0->>'h' <> '' AND " + row)
	}
	d.queued = func() int { return d.connections("pg_stat_activity WHERE usename = 'lease' AND state = 'idle'") }
	return d
}

func onMariaDB(t *testing.T, o servers.MariaDBOptions) *database {
	t.Helper()
	m := servers.StartMariaDB(t, o)
	const row = "lease = 'l'"
	d := rows(t, m, m.Addr(), m, row)
	d.acquires, d.renews = "own = 0, choice = CASE", "LAST_INSERT_ID"
	d.url = func(addr string) string { return "mysql://lease@" + addr + "/lease" }
	d.all = d.straight()
	d.holder = func() string {
		return d.statement("SELECT CONCAT(JSON_VALUE(slots, '$[0].h'), JSON_VALUE(slots, '$[0].t')) FROM underlease WHERE JSON_VALUE(slots, '$[0].h') <> '' AND " + row)
	}
	d.queued = func() int {
		return d.connections("information_schema.processlist WHERE user = 'lease' AND command = 'Sleep'")
	}
	return d
}

// databases keep what they have said.
var databases = []start[*database]{
	{"postgres", func(t *testing.T) *database { return onPostgres(t, servers.PostgresOptions{Durable: true}) }},
	{"mariadb", func(t *testing.T) *database {
		return onMariaDB(t, servers.MariaDBOptions{Args: []string{"--innodb-flush-log-at-trx-commit=1"}})
	}},
}

// C14: a replica that missed the grant is promoted. The old holder is told by its next renewal.
func TestPostgresAFailoverThatForgetsTheGrantIsNoticedAtTheNextRenewal(t *testing.T) {
	t.Parallel()
	d := onPostgres(t, servers.PostgresOptions{Durable: true})
	p := d.server.(*servers.Postgres)
	d.run(d.straight(), nil, d.job(0)).wants(0, "ok", "") // the tables are there
	r := p.Replica()
	d.failover("postgres://lease@"+p.Addr()+","+r.Addr()+"/lease?sslmode=disable", r.Kill, func() {
		p.Kill()
		r.Restart()
		r.Promote()
	})
}

// C67: a pooler in transaction mode, connections that are cut every two seconds, and a server that closes those that nobody used
// for a second: nothing is stranded, and nobody stops.
func TestDatabaseConnectionsThatDoNotLast(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(*testing.T) *database{
		"pooler": func(t *testing.T) *database {
			d := onPostgres(t, servers.PostgresOptions{})
			b := servers.StartPgBouncer(t, d.server.(*servers.Postgres), 2)
			d.addr, d.proxy = b.Addr(), proxy.New(t, b.Addr())
			return d
		},
		"wait_timeout": func(t *testing.T) *database {
			return onMariaDB(t, servers.MariaDBOptions{Args: []string{"--wait-timeout=1"}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := make(t)
			d.proxy.CutEvery(2 * time.Second)
			flags := []string{"--ttl", "12s", "--renew-every", "1500ms", "--wait", "60s"}
			a := d.run(d.through(), flags, d.job(10*time.Second))
			a.begins()
			var all []*live
			for range 3 {
				all = append(all, d.run(d.through(), flags, d.job(500*time.Millisecond)))
			}
			a.wants(0, "ok", "")
			if r := a.reported(); r.Renewals < 4 || !r.Released {
				t.Errorf("report: got %+v, want renewals and a release", r)
			}
			for _, b := range all {
				b.wants(0, "ok", "")
			}
			if d.proxy.Cuts() == 0 {
				t.Error("no connection was cut")
			}
			if r := judge(t, d.dir); r.Runs != 4 {
				t.Errorf("got %d runs, want 4", r.Runs)
			}
		})
	}
}

// C68: sixteen processes make the tables at once, of a database that has none, and again while a lease is held.
func TestDatabaseSixteenMakeTheTables(t *testing.T) {
	onEach(t, databases, func(t *testing.T, d *database) {
		var all []*live
		for range 16 {
			all = append(all, d.run(d.straight(), []string{"--wait", "60s"}, d.job(0)))
		}
		for _, l := range all {
			l.wants(0, "ok", "")
		}
		a := d.run(d.straight(), nil, d.job(time.Minute))
		a.begins()
		before := d.holder()
		d.sql.Do("DROP TABLE underlease_fences; DROP TABLE underlease_marks; DROP TABLE underlease_schema")
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				c := exec.Command(bin.underlease, "schema", "apply", "--backend", d.straight())
				c.Env = environ()
				if out, err := c.CombinedOutput(); err != nil {
					t.Errorf("schema apply: got %v and %q, want 0", err, out)
				}
			})
		}
		wg.Wait()
		if after := d.holder(); after != before || after == "" {
			t.Errorf("holder and term: got %q, want %q as before", after, before)
		}
		d.renewed(1)
		a.signal(syscall.SIGTERM)
		if a.ends(); !a.reported().Released {
			t.Errorf("report: got %+v, want a release", a.reported())
		}
		if r := judge(t, d.dir); r.Runs != 17 {
			t.Errorf("got %d runs, want 17", r.Runs)
		}
	})
}

// The bar is 11 ms on a quiet machine, in one run with true(1) and flock(1). A server that starts a process for each connection needs a
// processor beside ours, and what else a machine does is no figure of ours: limited is how much more it is than a run on the file store.
func TestARunOnADatabaseTakesMilliseconds(t *testing.T) {
	const mostToFile = 4.0
	p, m := onPostgres(t, servers.PostgresOptions{Durable: true}), onMariaDB(t, servers.MariaDBOptions{Args: []string{"--innodb-flush-log-at-trx-commit=1"}})
	b := servers.StartPgBouncer(t, p.server.(*servers.Postgres), 2)
	subjects, err := figures.Usual(bin.underlease, t.TempDir())
	servers.Require(t, "flock", err)
	first := len(subjects)
	for _, s := range []struct{ name, url string }{
		{"postgres", p.straight()}, {"sslmode=prefer", "postgres://lease@" + p.addr + "/lease"}, {"pgbouncer", p.url(b.Addr())}, {"mariadb", m.straight()},
	} {
		subjects = append(subjects, figures.Subject{
			Name: s.name, Env: environ(), Args: []string{bin.underlease, "run", "--backend", s.url, "x", "--", subjects[0].Args[0]},
		})
	}
	least(t, mostToFile, func() float64 {
		all, err := figures.Starts(subjects, 120)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			t.Logf("%-14s median %v, p99 %v, fastest tenth %v, least %v", s.Name, s.Median(), s.Quantile(0.99), s.Quantile(0.1), s.Quantile(0))
		}
		// By the fastest tenth: a run is several processes, and slower than its own work wherever the machine has something else to do.
		postgres, file, flock := all[first].Quantile(0.1), all[first-1].Quantile(0.1), all[1].Quantile(0.1)
		t.Logf("%.2f times a run on the file store, %.1f times flock; %v of at most 11ms on a quiet machine", float64(postgres)/float64(file), float64(postgres)/float64(flock), postgres)
		return float64(postgres) / float64(file)
	})
}

// effect is a job that writes one row and the marker of its gate in one transaction, with words of the shell before and after it
// commits. It has the name of its gate from the environment alone.
func (d *database) effect(beforeCommit, afterCommit string) []string {
	host, port, _ := strings.Cut(d.addr, ":")
	client := fmt.Sprintf(`psql -Xq -v ON_ERROR_STOP=1 -v lease="$UNDERLEASE_NAME" -v term="$UNDERLEASE_TERM" -h %s -p %s -U lease -d lease`, host, port)
	begin, mark := "BEGIN", "SELECT underlease_mark(:'lease', :term)"
	if _, ok := d.server.(*servers.MariaDB); ok {
		client = fmt.Sprintf("mariadb --no-defaults -h %s -P %s -u lease lease", host, port)
		begin, mark = "START TRANSACTION", "CALL underlease_mark('$UNDERLEASE_NAME', $UNDERLEASE_TERM, '')"
	}
	return []string{"sh", "-c", fmt.Sprintf(`%s > /dev/null <<END
%s;
INSERT INTO effects VALUES ('$UNDERLEASE_NAME', $UNDERLEASE_TERM);
%s;
\! %s
COMMIT;
\! %s
END
`, client, begin, mark, beforeCommit, afterCommit)}
}

// What a job has written and the marker of its gate are there both, or neither: whatever is killed, and when.
func TestDatabaseAMarkerCommitsWithTheWork(t *testing.T) {
	onEach(t, databases, func(t *testing.T, d *database) {
		d.run(d.straight(), nil, d.job(0)).wants(0, "ok", "") // the tables are there
		if _, ok := d.server.(*servers.Postgres); ok {
			d.sql.Do("SET ROLE lease; CREATE TABLE effects (name text, term bigint)")
		} else {
			d.sql.Do("CREATE TABLE effects (name TEXT, term BIGINT) ENGINE=InnoDB")
		}
		effects := func(id string) string {
			return d.sql.Do("SELECT count(*), min(term) FROM effects WHERE name = '" + id + "'")
		}
		for _, victim := range []string{"wrapper", "guardian", "client"} {
			for _, moment := range []string{"before the commit", "after the commit"} {
				t.Run(victim+" "+moment, func(t *testing.T) {
					t.Parallel()
					id := strings.ReplaceAll(victim+"-"+moment, " ", "-")
					there := filepath.Join(t.TempDir(), "there")
					words := []string{"gate", "--ttl", "6s", "--grace", "200ms", "--log-level", "error", "--wait", "1m", id, "--"}
					hang := "echo $UNDERLEASE_TERM > " + there + ".new; mv " + there + ".new " + there + "; sleep 60"
					job := d.effect(hang, "true")
					if moment == "after the commit" {
						job = d.effect("true", hang)
					}
					first := launch(t, d.straight(), 0, append(words, job...)...)
					if !within(time.Minute, func() bool { _, err := os.Stat(there); return err == nil }) {
						t.Fatalf("the job did not get %s: %q", moment, first.errs.String())
					}
					var term int64
					b, err := os.ReadFile(there)
					if err != nil {
						t.Fatal(err)
					}
					if _, err := fmt.Sscan(string(b), &term); err != nil {
						t.Fatalf("%q: %v", b, err)
					}
					pid := first.cmd.Process.Pid
					switch victim {
					case "guardian":
						if pid = guardian(pid); pid == 0 { // and zero would be ourselves
							t.Fatalf("the guardian was not found: %q", first.errs.String())
						}
					case "client":
						all := descendants(pid)
						i := slices.IndexFunc(all, func(pid int) bool { return name(pid) == "psql" || name(pid) == "mariadb" })
						if i < 0 {
							t.Fatal("the client of the database was not found")
						}
						pid = all[i]
					}
					if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
					if exit, _ := first.end(); exit == 0 {
						t.Error("the one that was killed ended with 0")
					}
					committed := moment == "after the commit"
					if said := map[bool]string{true: "has written before that", false: "is not applied"}[committed]; victim == "client" && !strings.Contains(first.errs.String(), said) {
						t.Errorf("got the words %q, want %q", first.errs.String(), said)
					}
					if committed {
						markerIs(t, d.straight(), id, 0)
					} else {
						markerIs(t, d.straight(), id, 1)
						if got := effects(id); !strings.HasPrefix(got, "0") {
							t.Errorf("got the effects %q of a job that did not commit, want none", got)
						}
					}
					exit, outcome := launch(t, d.straight(), 1, append(words, d.effect("true", "true")...)...).end()
					want := map[bool]string{true: "already-applied", false: "migrated"}[committed]
					if exit != 0 || outcome != want {
						t.Errorf("the next one: got %d and %q, want %q", exit, outcome, want)
					}
					got := effects(id)
					if is := strings.HasSuffix(got, strconv.FormatInt(term, 10)); !strings.HasPrefix(got, "1") || is != committed {
						t.Errorf("got the effects %q, want one, of the term %d: %t", got, term, committed)
					}
					markerIs(t, d.straight(), id, 0)
					if exit, outcome := launch(t, d.straight(), 2, append(words, "false")...).end(); exit != 0 || outcome != "already-applied" {
						t.Errorf("the last one: got %d and %q, want already-applied", exit, outcome)
					}
				})
			}
		}
	})
}

// TestDatabaseChaos: servers that keep what they have said, one after the other.
func TestDatabaseChaos(t *testing.T) {
	for _, s := range databases {
		t.Run(s.name, func(t *testing.T) {
			d := s.on(t)
			whole := one(d.server, d.addr, d.url)
			whole.brief = true
			runChaos(t, whole)
		})
	}
}
