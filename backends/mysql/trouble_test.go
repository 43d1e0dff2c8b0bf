//go:build linux

package mysql

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/table"
	. "github.com/underlease/underlease/backends/table/tabletest"
)

// What each mistake in a URL, and each state of a server, is called.
func TestEachTroubleHasItsOwnWords(t *testing.T) {
	const secret = "s3cr3t-pass"
	m := servers.StartMariaDB(t, servers.MariaDBOptions{Password: secret, Args: []string{"--server-id=1", "--log-bin=bin"}})
	m.Do("CREATE USER poor@'%' IDENTIFIED BY '" + secret + "'; GRANT SELECT ON lease.* TO poor@'%'; CREATE DATABASE closed")
	Granted(t, opened(t, "mysql://lease:"+secret+"@"+m.Addr()+"/lease"), Request("held"))
	replica := servers.StartMariaDB(t, servers.MariaDBOptions{Args: []string{"--server-id=2", "--read-only=ON"}})
	replica.Do("GRANT REPLICA MONITOR ON *.* TO lease@'%'")
	replica.Do(fmt.Sprintf("CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT=%d, MASTER_USER='lease', MASTER_PASSWORD='%s'", m.Port, secret))
	lonely := servers.StartMariaDB(t, servers.MariaDBOptions{Args: []string{"--read-only=ON"}})
	other := servers.StartMariaDB(t, servers.MariaDBOptions{})
	Granted(t, opened(t, direct(other)), Request("l"))
	other.Do("ALTER TABLE underlease CHANGE COLUMN slots places LONGTEXT")
	full := servers.StartMariaDB(t, servers.MariaDBOptions{})
	full.Do("CREATE USER one@'%' WITH MAX_USER_CONNECTIONS 1; GRANT ALL ON lease.* TO one@'%'")
	Granted(t, opened(t, "mysql://one@"+full.Addr()+"/lease"), Request("l")) // and keeps its connection
	encrypted := servers.StartMariaDB(t, servers.MariaDBOptions{TLS: servers.MakeCertificates(t)})
	dead := servers.StartMariaDB(t, servers.MariaDBOptions{})
	dead.Kill()
	for name, c := range map[string]struct {
		URL        string
		Kind       error
		Text, Hint string
	}{
		"password":  {"mysql://lease:wrong" + secret + "@" + m.Addr() + "/lease", backends.ErrDenied, "refused user or password", "%XX"},
		"user":      {"mysql://nobody:" + secret + "@" + m.Addr() + "/lease", backends.ErrDenied, "refused user or password", "%XX"},
		"database":  {"mysql://root@" + m.Addr() + "/nowhere", nil, "Unknown database", "mysql://host/database"},
		"no right":  {"mysql://lease:" + secret + "@" + m.Addr() + "/closed", backends.ErrDenied, "Access denied", "underlease schema print"},
		"to create": {"mysql://poor:" + secret + "@" + m.Addr() + "/lease?table=locks", backends.ErrDenied, "command denied", "underlease schema print"},
		"to write":  {"mysql://poor:" + secret + "@" + m.Addr() + "/lease", backends.ErrDenied, "UPDATE command denied", "underlease schema print"},
		"replica":   {direct(replica), backends.ErrUnavailable, "read-only: the primary is " + m.Addr(), "mysql://host1,host2/database"},
		"read only": {direct(lonely), backends.ErrUnavailable, "read-only: the server refuses writes", "replica"},
		"two":       {"mysql://lease@" + replica.Addr() + "," + lonely.Addr() + "/lease", backends.ErrUnavailable, "read-only: the primary is " + m.Addr(), "mysql://host1,host2/database"},
		"form":      {direct(other), backends.ErrBroken, "have another form", "schema apply"},
		"dead":      {direct(dead), backends.ErrUnreached, "connection refused", ""},
		"no room":   {"mysql://one@" + full.Addr() + "/lease", backends.ErrUnavailable, "max_user_connections", "max_connections"},
		"tls":       {direct(other) + "?tls=true", backends.ErrUnreached, "", ""},
		"unknown":   {direct(encrypted) + "?tls=true", backends.ErrUnreached, "certificate", "parameter ca"},
		"no tls":    {direct(encrypted), backends.ErrDenied, "", "tls=true"},
		"host":      {"mysql://lease@no.such.host.invalid/lease", backends.ErrUnreached, "no such host", "host in the store's URL"},
	} {
		s := opened(t, c.URL)
		_, err := Answered(t, s, Request("l"))
		faults.Trouble(c).Check(t, name, s, err, secret)
	}
}

// With several hosts the one is used that can be written to, also after it has changed.
func TestTheServerThatTakesWritesIsFollowed(t *testing.T) {
	a := servers.StartMariaDB(t, servers.MariaDBOptions{})
	b := servers.StartMariaDB(t, servers.MariaDBOptions{Args: []string{"--read-only=ON"}})
	s := opened(t, "mysql://lease@"+b.Addr()+","+a.Addr()+"/lease")
	g := Granted(t, s, Request("l"))
	if got := a.Do("SELECT count(*) FROM underlease"); got != "1" {
		t.Errorf("rows at the one that takes writes: got %s, want 1", got)
	}
	a.Kill()
	b.Do("SET GLOBAL read_only = OFF")
	servers.Within(t, 30*time.Second, "the other knows nothing of it", func() error {
		if err := Renew(t, s, g); !errors.Is(err, backends.ErrLost) {
			return errors.New("not told yet")
		}
		return nil
	})
	if next := Granted(t, s, Request("l")); next.Term <= g.Term {
		t.Errorf("term: got %d, want more than %d", next.Term, g.Term)
	}
}

// Of ten thousand rows none is read but the lease's own.
func TestEveryStatementUsesAnIndex(t *testing.T) {
	m := servers.StartMariaDB(t, servers.MariaDBOptions{})
	Granted(t, opened(t, direct(m)), Request("first"))
	for _, sql := range append(harness.Stuff("", 10000), harness.Stuff("n", 50)...) {
		m.Do(sql)
	}
	m.Do("UPDATE underlease SET gone = 99999 WHERE lease <> 'row-000009'; ANALYZE TABLE underlease")
	m.Do("INSERT INTO underlease_marks SELECT namespace, lease, 1, 1, 1, '{}' FROM underlease WHERE namespace = ''; ANALYZE TABLE underlease_marks")
	d := &database{settings: &settings{table: table.DefaultName}}
	k := table.Key{Lease: "row-000007"}
	h := table.Held{Key: k, Digest: "h", Term: 1}
	acquire, look, _ := strings.Cut(d.acquire(table.Take{Key: k, Digest: "h", Slots: 3, TTL: 1000}), "; ")
	for name, sql := range map[string]string{
		"acquire": acquire, "look": look, "renew": d.renew(h), "release": d.release(h, []byte("{}"), false), "read": d.read(k),
		"write": d.write(k, table.Change{Slots: []byte("[]")}), "list": d.list("n", "", 500), "prune": d.prune(),
		"mark": d.mark(k), "unmark": d.unmark(k, 1),
	} {
		plan := strings.Split(m.Do("EXPLAIN "+sql), "\t")
		if len(plan) < 9 || plan[3] == "ALL" || plan[3] == "index" || plan[5] != "PRIMARY" && plan[5] != "gone" {
			t.Errorf("%s: got the plan %q, want a part of an index", name, plan)
		}
	}
}

// The term at the resource.
func TestALateOldWriterIsRefusedOnceTheNewTermIsInstalled(t *testing.T) {
	m := servers.StartMariaDB(t, servers.MariaDBOptions{})
	s := opened(t, direct(m))
	m.Do("CREATE TABLE effects (id INT AUTO_INCREMENT PRIMARY KEY, who TEXT) ENGINE=InnoDB")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	old := Granted(t, s, Request("l"))
	write := func(term backends.Term, who, before string) error {
		_, err := m.TryDo(ctx, fmt.Sprintf("START TRANSACTION; SELECT COUNT(*) FROM effects; CALL underlease_guard('l', %d); %s INSERT INTO effects (who) VALUES ('%s'); COMMIT", term, before, who))
		return err
	}
	if err := write(old.Term, "old", ""); err != nil {
		t.Errorf("a writer whose term is the first: got %v, want nil", err)
	}
	m.Do("DELETE FROM underlease") // two hold it now
	now := Granted(t, s, Request("l"))
	if err := write(old.Term, "late", ""); err != nil {
		t.Errorf("the old writer before the new term is installed: got %v, want nil: nobody has told the resource", err)
	}
	if err := write(now.Term, "new", ""); err != nil {
		t.Errorf("the new writer: got %v, want nil", err)
	}
	if err := write(old.Term, "too late", ""); err == nil || !strings.Contains(err.Error(), "older than the one that is installed") {
		t.Errorf("the old writer afterwards: got %v, want an error that says so", err)
	}
	if err := write(now.Term, "again", ""); err != nil {
		t.Errorf("the new writer again: got %v, want nil", err)
	}
	// A transaction of the old writer that is still open keeps the new one waiting, and is then before it.
	m.Do("DELETE FROM underlease_fences")
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := write(old.Term, "slow", "DO SLEEP(4);"); err != nil {
			t.Errorf("the slow writer: got %v, want nil", err)
		}
	})
	servers.Within(t, 30*time.Second, "the old writer works", func() error {
		if m.Do("SELECT count(*) FROM information_schema.processlist WHERE state = 'User sleep'") == "0" {
			return errors.New("not yet")
		}
		return nil
	})
	if err := write(now.Term, "after", ""); err != nil {
		t.Errorf("the new writer: got %v, want nil", err)
	}
	wg.Wait()
	if got := m.Do("SELECT GROUP_CONCAT(who ORDER BY id) FROM effects"); got != "old,late,new,again,slow,after" {
		t.Errorf("effects: got %s, want those of before, of the new writer, and the slow one before the last", got)
	}
	for _, bad := range []string{"NULL, 1", "'', 1", "'l', 0", "'l', NULL"} {
		if _, err := m.TryDo(ctx, "CALL underlease_guard("+bad+")"); err == nil || !strings.Contains(err.Error(), "needs a lease") {
			t.Errorf("guard(%s): got %v, want an error", bad, err)
		}
	}
}

// What is printed can be run again and again, and a user with the rights that it names, and no others, can work with it.
func TestWhatIsPrintedSuffices(t *testing.T) {
	m := servers.StartMariaDB(t, servers.MariaDBOptions{})
	m.Do("CREATE USER poor@'%'")
	u, err := backends.ParseURL("mysql://poor@" + m.Addr() + "/lease?table=locks")
	if err != nil {
		t.Fatal(err)
	}
	text, err := Schema(u)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		m.Do(text)
	}
	for line := range strings.Lines(text) {
		if grant, ok := strings.CutPrefix(line, "-- GRANT "); ok {
			grant, _, _ = strings.Cut(grant, ";")
			m.Do("GRANT " + strings.ReplaceAll(grant, "TO user", "TO poor@'%'"))
		}
	}
	s := opened(t, u.String())
	g := Granted(t, s, Request("l"))
	if err := Renewed(t, s, g); err != nil {
		t.Errorf("Renew: %v", err)
	}
	d, err := newDatabase(u)
	if err != nil {
		t.Fatal(err)
	}
	defer d.pool.Close()
	for _, call := range []string{"CALL locks_guard('l', %d)", "CALL locks_mark('l', %d, '')"} {
		if _, _, err := d.exec(t.Context(), fmt.Sprintf(call, g.Term)); err != nil {
			t.Errorf("%s: %v", call, err)
		}
	}
	if _, err := s.Records().Get(t.Context(), "", "l", "marker"); err != nil {
		t.Errorf("Get of the marker: %v", err)
	}
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release: %v", err)
	}
	m.Do("CREATE USER owner@'%'; GRANT ALL ON lease.* TO owner@'%'")
	owner, _ := backends.ParseURL("mysql://owner@" + m.Addr() + "/lease?table=locks")
	if did, err := Apply(t.Context(), owner); err != nil || !strings.Contains(did, "was there") {
		t.Errorf("Apply: got %q, %v, want that it was there", did, err)
	}
	m.Do("UPDATE locks_schema SET version = 2")
	if _, err := Apply(t.Context(), owner); !errors.Is(err, backends.ErrBroken) || !strings.Contains(backends.Hint(err), "update underlease") {
		t.Errorf("Apply over a newer version: got %v, want broken", err)
	}
}

func TestABadURLIsRefusedWithoutItsSecrets(t *testing.T) {
	const secret = "s3cr3t"
	backendtest.Refuses(t, parse, secret, map[string]string{
		"mysql:" + secret + "@h":                  "no host",
		"mysql://u:" + secret + "@h":              "no database",
		"mysql://u:" + secret + "@h/a/b":          "no database",
		"mysql://u:" + secret + "@h:0/db":         "port",
		"mysql://u:" + secret + "@h,:7/db":        "empty host",
		"mysql://u:" + secret + "@h/db#x":         "fragment",
		"mysql://h/db?x=" + secret:                `no parameter "x"`,
		"mysql://h/db?table=a-b":                  "not a plain name",
		"mysql://h/db?table=a&table=b":            "more than once",
		"mysql://h/db?tls=x":                      "cannot be",
		"mysql://h/db?ca=/x":                      "encrypted",
		"mysql://h/db?tls=true&ca=/nonexistent":   "cannot be read",
		"mysql://h/db?tls=true&cert=/nonexistent": "incomplete",
		"mysql://h/db?socket=/x":                  "a host and a socket",
		"mysql:///db?socket=x":                    "no absolute path",
		"mysql://h/db?%zz":                        "cannot be read",
	})
	for raw, want := range map[string]string{
		"mysql://u:p@H1,h2:7/db?table=locks": "mysql://h1:3306,h2:7/db?table=locks",
		"mariadb:///db?socket=/run/x":        "mariadb:///db?socket=%2Frun%2Fx",
	} {
		u, err := backends.ParseURL(raw)
		if err != nil {
			t.Fatal(err)
		}
		if s, err := parse(u); err != nil || s.address() != want {
			t.Errorf("%s: got %v, want the address %s", raw, err, want)
		}
	}
}

// What apply cannot give back it names, and does not recommend itself. A procedure it replaces, where it is another one.
func TestTablesOfAnotherFormAreNamed(t *testing.T) {
	m := servers.StartMariaDB(t, servers.MariaDBOptions{})
	raw := "mysql://lease@" + m.Addr() + "/lease"
	u, err := backends.ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	s := opened(t, raw)
	if err := s.Release(t.Context(), Granted(t, s, Request("l")), backends.End{}); err != nil {
		t.Fatal(err)
	}
	m.Do("ALTER TABLE underlease DROP COLUMN gone")
	if _, err := Answered(t, s, Request("l")); !errors.Is(err, backends.ErrBroken) || !strings.Contains(backends.Hint(err), "schema apply") {
		t.Errorf("Acquire without a column: got %v (%s), want broken and the command", err, backends.Hint(err))
	}
	for _, c := range []struct{ change, want string }{
		{"SELECT 1", "column gone of underlease is missing"},
		{"ALTER TABLE underlease ADD COLUMN gone TEXT NOT NULL DEFAULT '0'", "gone of underlease is text in the place of int"},
	} {
		m.Do(c.change)
		_, err := Apply(t.Context(), u)
		if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Apply: got %v, want broken with %q", err, c.want)
		}
		if hint := backends.Hint(err); !strings.Contains(hint, "ALTER TABLE") || strings.Contains(hint, "schema apply") {
			t.Errorf("Apply: got the hint %q, want what to do by hand", hint)
		}
	}
	m.Do("ALTER TABLE underlease MODIFY COLUMN gone INT NOT NULL")
	m.Do("CREATE USER poor@'%'; GRANT EXECUTE ON PROCEDURE lease.underlease_mark TO poor@'%'")
	m.Do("DROP PROCEDURE underlease_guard; CREATE PROCEDURE underlease_guard(IN of_lease TEXT, IN of_term BIGINT) SELECT 'old'")
	if did, err := Apply(t.Context(), u); err != nil || !strings.Contains(did, "was there") {
		t.Errorf("Apply: got %q, %v, want that it was there", did, err)
	}
	if text := m.Do("SHOW CREATE PROCEDURE underlease_guard"); !strings.Contains(text, "underlease_fences") {
		t.Errorf("the guard after Apply: got %s, want the one of this version", text)
	}
	if grants := m.Do("SHOW GRANTS FOR poor@'%'"); !strings.Contains(grants, "underlease_mark") {
		t.Errorf("who may call a procedure that is as it has to be: got %s, want no change", grants)
	}
	Granted(t, s, Request("l"))
}

// Tables are not made beside somebody who is about to.
func TestTheLockOfWhoMakesTheTablesIsHeeded(t *testing.T) {
	t.Parallel() // it waits for as long as it may
	m := servers.StartMariaDB(t, servers.MariaDBOptions{})
	u, err := backends.ParseURL("mysql://lease@" + m.Addr() + "/lease")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _, _ = m.TryDo(t.Context(), "SELECT GET_LOCK('underlease underlease', 0); DO SLEEP(35)") })
	servers.Within(t, 10*time.Second, "somebody has the lock", func() error {
		if m.Do("SELECT IS_FREE_LOCK('underlease underlease')") == "1" {
			return errors.New("not yet")
		}
		return nil
	})
	if did, err := Apply(t.Context(), u); !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), "somebody else makes the tables") {
		t.Errorf("Apply: got %q and %v, want unavailable, for somebody else has the lock", did, err)
	}
	if got := m.Do("SHOW TABLES"); got != "" {
		t.Errorf("tables: got %s, want none", got)
	}
}
