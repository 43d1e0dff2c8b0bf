//go:build linux

package servers

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// NeedPostgres and NeedPgBouncer are the needs of PostgreSQL and of the pooler in front of it, for [Require].
const (
	NeedPostgres  = "postgres"
	NeedPgBouncer = "pgbouncer"
)

const (
	installPostgres  = "apt-get install -y --no-install-recommends postgresql-15"
	installPgBouncer = "apt-get install -y --no-install-recommends pgbouncer"
)

// postgresBin is where Debian has the programs of the server.
var postgresBin = []string{"/usr/lib/postgresql/15/bin", "/usr/lib/postgresql/16/bin", "/usr/lib/postgresql/17/bin"}

// PostgresOptions are what makes a PostgreSQL server special.
type PostgresOptions struct {
	Password string        // of the role lease, which then is asked for it; else nobody is asked
	TLS      *Certificates // connections are encrypted, or refused
	Durable  bool          // fsync on
	Clock    bool          // its wall clock can be set with [Postgres.SetClock]; needs gcc
	Config   []string      // further lines of its configuration
}

// Postgres is a PostgreSQL server with the database lease, which the role lease owns.
type Postgres struct {
	*Process
	PostgresOptions
	Port int
	Dir  string

	user     *syscall.Credential
	programs map[string]string
}

// StartPostgres starts a PostgreSQL server.
func StartPostgres(t testing.TB, o PostgresOptions) *Postgres {
	t.Helper()
	p := newPostgres(t, o)
	p.program(t, "initdb", "-D", p.data(), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions")
	p.configure(t)
	p.start(t)
	p.Do("CREATE ROLE lease LOGIN")
	if o.Password != "" {
		p.Do("ALTER ROLE lease PASSWORD '" + o.Password + "'")
	}
	p.Do("CREATE DATABASE lease OWNER lease")
	return p
}

func newPostgres(t testing.TB, o PostgresOptions) *Postgres {
	t.Helper()
	found := Programs(t, NeedPostgres, installPostgres, postgresBin, "initdb", "postgres", "psql", "pg_basebackup")
	p := &Postgres{PostgresOptions: o, Port: FreePort(t, 0), programs: found}
	p.user, p.Dir = as(t, NeedPostgres, "postgres")
	return p
}

func (p *Postgres) data() string { return filepath.Join(p.Dir, "data") }

func (p *Postgres) configure(t testing.TB) {
	t.Helper()
	lines := []string{
		"listen_addresses = '127.0.0.1'", fmt.Sprintf("port = %d", p.Port), "unix_socket_directories = '" + p.Dir + "'",
		"max_connections = 200", "shared_buffers = 16MB", "max_wal_senders = 4", "wal_level = replica", "hot_standby = on", "log_min_messages = warning",
		"dynamic_shared_memory_type = mmap", "autovacuum_naptime = 10s",
	}
	if !p.Durable {
		lines = append(lines, "fsync = off", "full_page_writes = off")
	}
	access := "local all all trust\nhost all postgres 127.0.0.1/32 trust\nhost replication postgres 127.0.0.1/32 trust\n"
	how, kind := "trust", "host"
	if p.Password != "" {
		how = "scram-sha-256"
	}
	if p.TLS != nil {
		kind = "hostssl"
		lines = append(lines, "ssl = on")
		for name, from := range map[string]string{"ssl_ca_file": p.TLS.CA, "ssl_cert_file": p.TLS.Cert, "ssl_key_file": p.TLS.Key} {
			to := filepath.Join(p.Dir, name)
			copied(t, p.user, from, to)
			lines = append(lines, name+" = '"+to+"'")
		}
	}
	access += kind + " all all 127.0.0.1/32 " + how + "\n"
	lines = append(lines, p.Config...)
	written(t, p.user, filepath.Join(p.data(), "postgresql.auto.conf"), strings.Join(lines, "\n")+"\n")
	written(t, p.user, filepath.Join(p.data(), "pg_hba.conf"), access)
}

func (p *Postgres) start(t testing.TB) {
	t.Helper()
	c := Command{
		Name: fmt.Sprintf("postgres-%d", p.Port), Path: p.programs["postgres"], Args: []string{"-D", p.data()}, Dir: p.Dir, User: p.user,
		Ports: []int{p.Port}, Ready: func(ctx context.Context) error { _, err := p.TryDo(ctx, "SELECT 1"); return err },
	}
	if p.Clock {
		c.Env = fakeClock(t, p.clockFile())
	}
	p.Process = Start(t, c)
	t.Cleanup(p.killAll) // the kernel ends the parent alone with the test's process; the others see it and end
}

// program runs a program of PostgreSQL, as the server's user.
func (p *Postgres) program(t testing.TB, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c := exec.CommandContext(ctx, p.programs[name], args...)
	c.Dir, c.Env = p.Dir, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.Dir, "LC_ALL=C"}
	c.SysProcAttr = &syscall.SysProcAttr{Credential: p.user}
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// Replica starts a replica that streams from the server.
func (p *Postgres) Replica() *Postgres {
	t := p.t
	t.Helper()
	r := newPostgres(t, PostgresOptions{Password: p.Password, TLS: p.TLS, Durable: p.Durable, Config: p.Config})
	r.program(t, "pg_basebackup", "-R", "-D", r.data(), "-h", "127.0.0.1", "-p", strconv.Itoa(p.Port), "-U", "postgres", "--checkpoint=fast", "--no-sync")
	auto, err := os.ReadFile(filepath.Join(r.data(), "postgresql.auto.conf"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(auto)) {
		if strings.HasPrefix(line, "primary_conninfo") {
			r.Config = append([]string{strings.TrimSpace(line)}, r.Config...)
		}
	}
	r.configure(t)
	r.start(t)
	Within(t, patience, "the replica follows", func() error {
		if got := p.Do("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"); got == "0" {
			return fmt.Errorf("nobody streams")
		}
		return nil
	})
	return r
}

// Promote makes a replica a primary.
func (p *Postgres) Promote() {
	p.t.Helper()
	if got := p.Do("SELECT pg_promote()"); got != "t" {
		p.t.Fatalf("pg_promote: got %q, want t", got)
	}
}

func (p *Postgres) clockFile() string { return filepath.Join(p.Dir, "clock") }

// SetClock sets the server's wall clock so far ahead of the host's, or behind it. It needs [PostgresOptions.Clock].
func (p *Postgres) SetClock(ahead time.Duration) {
	p.t.Helper()
	setClock(p.t, p.clockFile(), ahead)
}

// Freeze stops all processes of the server.
func (p *Postgres) Freeze() {
	p.t.Helper()
	p.freezeAll()
}

// Resume continues all processes of the server.
func (p *Postgres) Resume() {
	p.t.Helper()
	p.family(syscall.SIGCONT)
}

// Kill kills all processes of the server.
func (p *Postgres) Kill() {
	p.t.Helper()
	p.killAll()
}

// Stop asks the server to end, and not to wait for those who are connected.
//
// Source: PostgreSQL, Shutting Down the Server: SIGTERM waits for all clients, SIGINT is a fast shutdown.
func (p *Postgres) Stop() {
	p.t.Helper()
	p.end(syscall.SIGINT)
}

// Addr returns host:port.
func (p *Postgres) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(p.Port)) }

// Do runs SQL as a superuser in the database lease and returns what it shows, unaligned, without headers.
func (p *Postgres) Do(sql string) string {
	p.t.Helper()
	return done(p.t, sql, p.TryDo)
}

// TryDo is [Postgres.Do] with an error.
func (p *Postgres) TryDo(ctx context.Context, sql string) (string, error) {
	database := "lease"
	if strings.HasPrefix(sql, "CREATE ROLE") || strings.HasPrefix(sql, "CREATE DATABASE") || strings.HasPrefix(sql, "ALTER ROLE") || sql == "SELECT 1" {
		database = "postgres"
	}
	c := exec.CommandContext(ctx, p.programs["psql"], "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", p.Dir, "-p", strconv.Itoa(p.Port), "-U", "postgres", "-d", database, "-c", sql)
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + p.Dir, "LC_ALL=C"}
	return said(c)
}

// PgBouncer is a pooler in transaction mode.
type PgBouncer struct {
	*Process
	Port int
}

// Addr returns host:port.
func (b *PgBouncer) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(b.Port)) }

// StartPgBouncer starts a pooler in front of a server, with so many connections to it.
func StartPgBouncer(t testing.TB, p *Postgres, connections int) *PgBouncer {
	t.Helper()
	program := Programs(t, NeedPgBouncer, installPgBouncer, sbin, "pgbouncer")["pgbouncer"]
	b := &PgBouncer{Port: FreePort(t, 0)}
	user, dir := as(t, NeedPgBouncer, "postgres")
	lines := []string{
		"[databases]", fmt.Sprintf("* = host=127.0.0.1 port=%d", p.Port), "[pgbouncer]", "pool_mode = transaction", "listen_addr = 127.0.0.1",
		fmt.Sprintf("listen_port = %d", b.Port), "unix_socket_dir =", "auth_type = any", fmt.Sprintf("default_pool_size = %d", connections), "max_client_conn = 500",
	}
	lines[1] += " user=lease"
	conf := filepath.Join(dir, "pgbouncer.ini")
	if err := os.WriteFile(conf, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.Process = Start(t, Command{Name: fmt.Sprintf("pgbouncer-%d", b.Port), Path: program, Args: []string{conf}, Dir: dir, User: user, Ports: []int{b.Port}})
	return b
}
