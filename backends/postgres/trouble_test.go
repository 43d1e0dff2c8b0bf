//go:build linux

package postgres

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	. "github.com/underlease/underlease/backends/table/tabletest"
)

// What each mistake in a URL, and each state of a server, is called.
func TestEachTroubleHasItsOwnWords(t *testing.T) {
	const secret = "s3cr3t-pass"
	p := servers.StartPostgres(t, servers.PostgresOptions{Password: secret})
	p.Do("CREATE ROLE poor LOGIN PASSWORD '" + secret + "'")
	p.Do("CREATE DATABASE other")
	plain := servers.StartPostgres(t, servers.PostgresOptions{Config: []string{"max_connections = 5", "superuser_reserved_connections = 1"}})
	replica := plain.Replica()
	encrypted := servers.StartPostgres(t, servers.PostgresOptions{TLS: servers.MakeCertificates(t)})
	pooler := servers.StartPgBouncer(t, plain, 2)
	Granted(t, opened(t, direct(plain)), Request("held"))
	plain.Do("ALTER ROLE lease SET default_transaction_read_only = off")
	readOnly := servers.StartPostgres(t, servers.PostgresOptions{})
	readOnly.Do("ALTER ROLE lease SET default_transaction_read_only = on")
	stopping := servers.StartPostgres(t, servers.PostgresOptions{})
	Granted(t, opened(t, direct(stopping)), Request("l"))
	stopping.Do("ALTER TABLE underlease RENAME COLUMN slots TO places")
	dead := servers.StartPostgres(t, servers.PostgresOptions{})
	dead.Kill()
	for name, c := range map[string]struct {
		URL        string
		Kind       error
		Text, Hint string
	}{
		"password":  {"postgres://lease:wrong" + secret + "@" + p.Addr() + "/lease", backends.ErrDenied, "refused user or password", "%XX"},
		"none":      {"postgres://lease@" + p.Addr() + "/lease", backends.ErrDenied, "refused user or password", "%XX"},
		"user":      {"postgres://nobody:" + secret + "@" + p.Addr() + "/lease", backends.ErrDenied, "refused user or password", "pg_hba"},
		"database":  {"postgres://lease:" + secret + "@" + p.Addr() + "/nowhere", nil, "does not exist", "postgres://host/database"},
		"rights":    {"postgres://poor:" + secret + "@" + p.Addr() + "/lease", backends.ErrDenied, "permission denied for schema public", "underlease schema print"},
		"schema":    {"postgres://lease:" + secret + "@" + p.Addr() + "/lease?schema=nowhere", nil, "schema \"nowhere\" does not exist", "search_path"},
		"parameter": {"postgres://lease@" + plain.Addr() + "/lease?options=-c%20nonsense%3D1", nil, "unrecognized configuration parameter", "parameters"},
		"replica":   {direct(replica), backends.ErrUnavailable, "read-only: the", "postgres://host1,host2/database"},
		"read only": {direct(readOnly), backends.ErrUnavailable, "read-only: the server refuses writes", "default_transaction_read_only"},
		"form":      {direct(stopping), backends.ErrBroken, "have another form", "schema apply"},
		"dead":      {direct(dead), backends.ErrUnreached, "connection refused", ""},
		"tls":       {direct(plain) + "?sslmode=require", backends.ErrUnreached, "refused TLS", "sslmode"},
		"unknown":   {direct(encrypted) + "?sslmode=verify-full", backends.ErrUnreached, "certificate", "sslrootcert"},
		"no tls":    {direct(encrypted) + "?sslmode=disable", backends.ErrDenied, "refused user or password", "pg_hba"},
		"host":      {"postgres://no.such.host.invalid/lease", backends.ErrUnreached, "no such host", "host in the store's URL"},
		"pooler":    {"postgres://lease@" + pooler.Addr() + "/nowhere", backends.ErrUnavailable, "does not exist", ""}, // it hides the server's code
	} {
		s := opened(t, c.URL)
		_, err := Answered(t, s, Request("l"))
		faults.Trouble(c).Check(t, name, s, err, secret)
	}
	var all []*backends.Store
	for range 5 {
		s := opened(t, direct(plain))
		all = append(all, s)
		if _, err := Answered(t, s, Request("held")); errors.Is(err, backends.ErrUnavailable) {
			if !strings.Contains(err.Error(), "too many") && !strings.Contains(err.Error(), "remaining connection slots") || !strings.Contains(backends.Hint(err), "max_connections") {
				t.Errorf("no connection left: got %v with the hint %q, want max_connections", err, backends.Hint(err))
			}
			return
		}
	}
	t.Errorf("%d clients, and a server with 5 connections had one for each", len(all))
}

// A replica says where the primary is, to who may know; with both in the URL the one that takes writes is used, also after it
// has changed. C14: what the new one did not get is told to the old holder, and terms grow.
func TestAFailoverIsFollowed(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{Durable: true})
	p.Do("GRANT pg_monitor TO lease")
	r := p.Replica()
	_, err := Answered(t, opened(t, direct(r)), Request("l"))
	if err == nil {
		t.Fatal("Acquire at a replica: got a grant")
	}
	Granted(t, opened(t, direct(p)), Request("first")) // makes the tables, which the replica gets
	servers.Within(t, 30*time.Second, "the replica has them", func() error {
		if got := r.Do("SELECT count(*) FROM pg_tables WHERE tablename = 'underlease'"); got != "1" {
			return errors.New("not yet")
		}
		return nil
	})
	_, err = Answered(t, opened(t, direct(r)), Request("l"))
	if want := "read-only: the primary is " + p.Addr(); !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), want) {
		t.Errorf("Acquire at a replica: got %v, want unavailable with %q", err, want)
	}
	both := "postgres://lease@" + r.Addr() + "," + p.Addr() + "/lease"
	s := opened(t, both)
	kept := Granted(t, s, Request("kept"))
	servers.Within(t, 30*time.Second, "the replica has it", func() error {
		if got := r.Do("SELECT count(*) FROM underlease " + where("", "kept")); got != "1" {
			return errors.New("not yet")
		}
		return nil
	})
	r.Kill() // what comes now it misses
	missed := Granted(t, s, Request("missed"))
	p.Kill()
	r.Restart()
	r.Promote()
	begun := time.Now()
	servers.Within(t, 30*time.Second, "the old client finds the new primary", func() error { return Renew(t, s, kept) })
	t.Logf("renewed %v after the promotion", time.Since(begun))
	other := opened(t, both)
	g := Granted(t, other, Request("missed"))
	if g.Term <= missed.Term {
		t.Errorf("term after the failover: got %d, want more than %d", g.Term, missed.Term)
	}
	if err := Renewed(t, s, missed); !errors.Is(err, backends.ErrLost) {
		t.Errorf("Renew of the grant that was forgotten: got %v, want ErrLost", err)
	}
	if _, err := Answered(t, other, Request("kept")); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire of the one that was kept: got %v, want busy", err)
	}
}

// A role that may not make tables uses those that somebody else has made from what is printed, and no right more than is named.
func TestARoleWithoutRightsUsesTheTablesOfAnother(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	u, err := backends.ParseURL("postgres://lease@" + p.Addr() + "/lease?schema=ops&table=locks")
	if err != nil {
		t.Fatal(err)
	}
	text, err := Schema(u)
	if err != nil {
		t.Fatal(err)
	}
	p.Do("CREATE SCHEMA ops")
	for range 2 {
		p.Do(text) // again and again
	}
	p.Do("GRANT USAGE ON SCHEMA ops TO lease")
	for line := range strings.Lines(text) {
		if grant, ok := strings.CutPrefix(line, "-- GRANT "); ok {
			grant, _, _ = strings.Cut(grant, ";")
			p.Do("GRANT " + strings.ReplaceAll(grant, "TO role", "TO lease"))
		}
	}
	s := opened(t, u.String())
	g := Granted(t, s, Request("l"))
	if err := Renewed(t, s, g); err != nil {
		t.Errorf("Renew: %v", err)
	}
	p.Do("SET ROLE lease; SELECT ops.locks_mark('l', " + g.Term.String() + ")")
	if _, err := s.Records().Get(t.Context(), "", "l", "marker"); err != nil {
		t.Errorf("Get of the marker: %v", err)
	}
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release: %v", err)
	}
	p.Do("SET ROLE lease; SELECT ops.locks_guard('l', " + g.Term.String() + ")")
	for _, want := range []string{"was there", "was there"} {
		if _, err := Apply(t.Context(), u); !errors.Is(err, backends.ErrDenied) {
			t.Errorf("Apply without the right: got %v, want denied (%s)", err, want)
		}
	}
	owner, _ := backends.ParseURL("postgres://postgres@" + p.Addr() + "/lease?schema=ops&table=locks")
	if did, err := Apply(t.Context(), owner); err != nil || !strings.Contains(did, "was there") {
		t.Errorf("Apply: got %q, %v, want that it was there", did, err)
	}
	p.Do("UPDATE ops.locks_schema SET version = 2")
	if _, err := Apply(t.Context(), owner); !errors.Is(err, backends.ErrBroken) || !strings.Contains(backends.Hint(err), "update underlease") {
		t.Errorf("Apply over a newer version: got %v, want broken", err)
	}
}

// A statement may read the clock before it waits: then what it writes ends the earlier, and never later than its holder thinks.
func TestAStatementThatWaitsForTheRowPromisesNoMoreThanItKeeps(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	s := opened(t, direct(p))
	req := Request("l")
	req.TTL = 20 * time.Second
	g := Granted(t, s, req)
	const blocked = 4 * time.Second // so long that it is seen
	for name, f := range map[string]func() error{
		"renew":   func() error { _, err := s.Renew(t.Context(), g); return err },
		"acquire": func() error { _, err := s.Acquire(t.Context(), req); return err },
	} {
		begun := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			p.Do(fmt.Sprintf("BEGIN; SELECT 1 FROM underlease %s FOR UPDATE; SELECT pg_sleep(%v); COMMIT", where("", "l"), blocked.Seconds()))
		})
		servers.Within(t, 30*time.Second, "the row is locked", func() error {
			if p.Do("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep%' AND wait_event = 'PgSleep'") == "0" {
				return errors.New("not yet")
			}
			return nil
		})
		if err := f(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		wg.Wait()
		state, err := s.Inspect(t.Context(), "", "l")
		if err != nil {
			t.Fatal(err)
		}
		left, least := state.Slots[0].Left, req.TTL-time.Since(begun)-time.Millisecond // what its holder counts on
		if left < least || left > req.TTL {
			t.Errorf("%s after a wait of %v: got %v left, want %v to %v", name, blocked, left, least, req.TTL)
		}
	}
}

// Of ten thousand rows none is read but the lease's own.
// A role that does not wait for its commits, a server whose log is written seldom, and a crash.
func TestAGrantAndARenewalOutliveACrash(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{Config: []string{"wal_writer_delay = 10s", "wal_writer_flush_after = 1GB"}})
	p.Do("ALTER ROLE lease SET synchronous_commit = off")
	s := opened(t, direct(p))
	g := Granted(t, s, Request("l"))
	for range 3 {
		if err := Renewed(t, s, g); err != nil {
			t.Fatal(err)
		}
	}
	const expiry = "SELECT slots->0->>'e' FROM underlease"
	want := p.Do(expiry)
	p.Kill()
	p.Restart()
	if got := p.Do(expiry); got != want {
		t.Errorf("expiry after the crash: got %s, want %s", got, want)
	}
	if err := Renewed(t, opened(t, direct(p)), g); err != nil {
		t.Errorf("Renew after the crash: got %v, want the grant", err)
	}
}

func TestEveryStatementUsesAnIndex(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	s := opened(t, direct(p))
	Granted(t, s, Request("row-000007"))
	for _, sql := range harness.Stuff("", 10000) {
		p.Do(strings.Replace(sql, "FROM generate_series", "FROM generate_series", 1) + " ON CONFLICT DO NOTHING")
	}
	for _, sql := range harness.Stuff("n", 50) {
		p.Do(strings.Replace(sql, "0, 100, '[]'", "0, 99999, '[]'", 1))
	}
	p.Do("UPDATE underlease SET gone = 99999 WHERE lease <> 'row-000009'")
	p.Do("INSERT INTO underlease_marks SELECT namespace, lease, 1, 1, 1, '{}' FROM underlease WHERE namespace = ''")
	p.Do("VACUUM ANALYZE underlease, underlease_marks")
	d, err := newDatabase(mustURL(t, direct(p)))
	if err != nil {
		t.Fatal(err)
	}
	key := `'\x'::bytea, '\x726f772d303030303037'::bytea`
	for name, c := range map[string]struct{ sql, args string }{
		"acquire": {d.text.of(acquire), key + `, 'h', '1', 'w', '1', '0'`},
		"one":     {d.text.of(acquireOne), key + `, 'h', '1', 'w', '1', '0'`},
		"take":    {d.text.of(takeOne), key + `, 'h', '1', 'w', '1', '0'`},
		"renew":   {d.text.of(renew), key + `, '0', 'h', '1'`},
		"release": {d.text.of(release), key + `, '0', 'h', '1', '{}', 'false', 'c'`},
		"read":    {d.text.of(read), key},
		"look":    {d.text.of(look), key},
		"insert":  {d.text.of(insert), key},
		"write":   {d.text.of(write), key + `, '1', '0', '1', '0', '[]', NULL, NULL, NULL`},
		"list":    {d.text.of(list), `'\x6e'::bytea, '\x'::bytea, 500`},
		"prune":   {d.text.of(prune), ""},
		"mark":    {d.text.of(mark), key},
		"unmark":  {d.text.of(unmark), key + ", '1'"},
	} {
		args := ""
		if c.args != "" {
			args = "(" + c.args + ")"
		}
		plan := p.Do("PREPARE q AS " + c.sql + "; EXPLAIN EXECUTE q" + args)
		if strings.Contains(plan, "Seq Scan on underlease") || name != "insert" && !strings.Contains(plan, "Index") && !strings.Contains(plan, "Conflict Arbiter") {
			t.Errorf("%s: got a plan without an index:\n%s", name, plan)
		}
	}
}

// A waiter has one connection, is told at once, and costs no statement while it waits. Behind a pooler it looks, and listens to
// nobody: a connection that listens there would be another client's next.
func TestAWaiterListensOnItsOwnConnectionAlone(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	pooler := servers.StartPgBouncer(t, p, 2)
	for _, name := range []string{"pooler", "direct"} {
		addr := p.Addr()
		if name == "pooler" {
			addr = pooler.Addr()
		}
		way := proxy.New(t, addr)
		holder, s := opened(t, direct(p)), opened(t, direct(way)+"?sslmode=disable")
		g := Granted(t, holder, Request(name))
		req := Request(name)
		if _, err := Answered(t, s, req); !errors.Is(err, backends.ErrBusy) {
			t.Fatalf("Acquire: got %v, want busy", err)
		}
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- s.Backend.(backends.Waiter).WaitFree(ctx, req) }()
			time.Sleep(300 * time.Millisecond) // the length of a wait in which several questions are asked
			// A call that ends while its question is under way costs its connection. This one ends between two.
			idle := 0
			servers.Within(t, 10*time.Second, "nothing is asked", func() error {
				if idle++; !way.Idle() {
					idle = 0
				}
				if idle < 3 {
					return errors.New("something was, a moment ago")
				}
				return nil
			})
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: WaitFree: got %v, want the context's error", name, err)
			}
		}
		trips := way.Trips()
		done := make(chan error, 1)
		go func() { done <- s.Backend.(backends.Waiter).WaitFree(t.Context(), req) }()
		begun := time.Now()
		if err := holder.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Errorf("%s: WaitFree: got %v, want nil", name, err)
		}
		took := time.Since(begun)
		t.Logf("%s: told after %v; %d round trips from the start to the end of 0.9 s of waiting", name, took, trips)
		limit := 10 * time.Second // of a ttl of a minute
		if took > limit {
			t.Errorf("%s: told after %v, want at most %v", name, took, limit)
		}
		if made := way.Made(); made != 1 {
			t.Errorf("%s: %d connections, want 1", name, made)
		}
		if got := p.Do("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"); name == "pooler" && got != "0" {
			t.Errorf("pooler: %s connections have listened, want none", got)
		}
		Granted(t, s, req)
		_ = s.Close()
	}
}

// C67: a pooler that is started again, and one with fewer connections than clients, strand nobody.
func TestAPoolerThatGoesAndComesStrandsNobody(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	pooler := servers.StartPgBouncer(t, p, 1)
	s, other := opened(t, direct(pooler)), opened(t, direct(pooler))
	g := Granted(t, s, Request("l"))
	for range 3 {
		if err := Renewed(t, s, g); err != nil {
			t.Errorf("Renew: %v", err)
		}
		if _, err := Answered(t, other, Request("l")); !errors.Is(err, backends.ErrBusy) {
			t.Errorf("Acquire by another: got %v, want busy", err)
		}
		pooler.Kill()
		pooler.Restart()
		servers.Within(t, 30*time.Second, "a renewal", func() error { return Renew(t, s, g) })
		servers.Within(t, 30*time.Second, "the other is busy again", func() error {
			if _, err := Acquire(t, other, Request("l")); !errors.Is(err, backends.ErrBusy) {
				return err
			}
			return nil
		})
	}
	p.Kill()
	p.Restart()
	servers.Within(t, 40*time.Second, "a renewal after a restart of the server", func() error { return Renew(t, s, g) })
}

// The term at the resource: a late old writer is refused from the moment on at which the new term is installed, and not before.
func TestALateOldWriterIsRefusedOnceTheNewTermIsInstalled(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	s := opened(t, direct(p))
	p.Do("SET ROLE lease; CREATE TABLE effects (who text)")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	old := Granted(t, s, Request("l"))
	write := func(term backends.Term, who string) error {
		_, err := p.TryDo(ctx, fmt.Sprintf("BEGIN; SELECT underlease_guard('l', %d); INSERT INTO effects VALUES ('%s'); COMMIT", term, who))
		return err
	}
	if err := write(old.Term, "old"); err != nil {
		t.Errorf("a writer whose term is the first: got %v, want nil", err)
	}
	p.Do("DELETE FROM underlease") // two hold it now
	now := Granted(t, s, Request("l"))
	if err := write(old.Term, "late"); err != nil {
		t.Errorf("the old writer before the new term is installed: got %v, want nil: nobody has told the resource", err)
	}
	if err := write(now.Term, "new"); err != nil {
		t.Errorf("the new writer: got %v, want nil", err)
	}
	if err := write(old.Term, "too late"); err == nil || !strings.Contains(err.Error(), "is older than") {
		t.Errorf("the old writer afterwards: got %v, want an error that says so", err)
	}
	if err := write(now.Term, "again"); err != nil {
		t.Errorf("the new writer again: got %v, want nil", err)
	}
	if got := p.Do("SELECT string_agg(who, ',') FROM effects"); got != "old,late,new,again" {
		t.Errorf("effects: got %s, want those of before and of the new writer", got)
	}
	// A transaction of the old writer that is still open keeps the new one waiting, and is then before it.
	p.Do("DELETE FROM underlease_fences")
	var wg sync.WaitGroup
	wg.Go(func() {
		p.Do(fmt.Sprintf("BEGIN; SELECT underlease_guard('l', %d); SELECT pg_sleep(4); INSERT INTO effects VALUES ('slow'); COMMIT", old.Term))
	})
	servers.Within(t, 30*time.Second, "the old writer works", func() error {
		if p.Do("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == "0" {
			return errors.New("not yet")
		}
		return nil
	})
	if err := write(now.Term, "after"); err != nil {
		t.Errorf("the new writer: got %v, want nil", err)
	}
	wg.Wait()
	if got := p.Do("SELECT string_agg(who, ',') FROM effects"); got != "old,late,new,again,slow,after" {
		t.Errorf("effects: got %s, want the slow one before the new one", got)
	}
	for _, bad := range []string{"NULL, 1", "'', 1", "'l', 0", "'l', NULL"} {
		if _, err := p.TryDo(ctx, "SELECT underlease_guard("+bad+")"); err == nil || !strings.Contains(err.Error(), "needs a lease") {
			t.Errorf("guard(%s): got %v, want an error", bad, err)
		}
	}
}

// A client of another kind finds PG* and the file of passwords.
func TestTheEnvironmentFillsIn(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{Password: "from-a-file"})
	path := t.TempDir() + "/pgpass"
	if out, err := exec.Command("sh", "-c", "umask 077; echo '*:*:*:lease:from-a-file' > "+path).CombinedOutput(); err != nil {
		t.Fatalf("%v, %s", err, out)
	}
	host, port, _ := strings.Cut(p.Addr(), ":")
	for name, value := range map[string]string{"PGHOST": host, "PGPORT": port, "PGUSER": "lease", "PGDATABASE": "lease", "PGPASSFILE": path} {
		t.Setenv(name, value)
	}
	s := opened(t, "postgres://")
	Granted(t, s, Request("l"))
	if want := "postgres://" + p.Addr() + "/lease"; s.Address != want {
		t.Errorf("address: got %s, want %s", s.Address, want)
	}
}

// What apply cannot give back it names, and does not recommend itself.
func TestTablesOfAnotherFormAreNamed(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	u := mustURL(t, direct(p))
	s := opened(t, direct(p))
	if err := s.Release(t.Context(), Granted(t, s, Request("l")), backends.End{}); err != nil {
		t.Fatal(err)
	}
	p.Do("ALTER TABLE underlease DROP COLUMN gone")
	if _, err := Answered(t, s, Request("l")); !errors.Is(err, backends.ErrBroken) || !strings.Contains(backends.Hint(err), "schema apply") {
		t.Errorf("Acquire without a column: got %v (%s), want broken and the command", err, backends.Hint(err))
	}
	for _, c := range []struct{ change, want string }{
		{"SELECT 1", "column gone of underlease is missing"},
		{"ALTER TABLE underlease ADD COLUMN gone text NOT NULL DEFAULT '0'", "gone of underlease is text in the place of integer"},
	} {
		p.Do(c.change)
		_, err := Apply(t.Context(), u)
		if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Apply: got %v, want broken with %q", err, c.want)
		}
		if hint := backends.Hint(err); !strings.Contains(hint, "ALTER TABLE") || strings.Contains(hint, "schema apply") {
			t.Errorf("Apply: got the hint %q, want what to do by hand", hint)
		}
	}
	p.Do("ALTER TABLE underlease ALTER COLUMN gone DROP DEFAULT, ALTER COLUMN gone TYPE integer USING gone::integer")
	if did, err := Apply(t.Context(), u); err != nil || !strings.Contains(did, "was there") {
		t.Errorf("Apply: got %q, %v, want that it was there", did, err)
	}
	Granted(t, s, Request("l"))
}
