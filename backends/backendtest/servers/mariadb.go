//go:build linux

package servers

import (
	"bytes"
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

// NeedMariaDB is the need of MariaDB, which stands for MySQL, for [Require].
const NeedMariaDB = "mariadb"

const installMariaDB = "apt-get install -y --no-install-recommends mariadb-server"

// MariaDBOptions are what makes a MariaDB server special.
type MariaDBOptions struct {
	Password string        // of the user lease; empty: none
	TLS      *Certificates // connections are encrypted, or refused
	Zone     string        // its time zone, such as +09:00; a name needs the system's time zones, which are then loaded
	Clock    bool          // its wall clock can be set with [MariaDB.SetClock]; needs gcc
	Args     []string      // further arguments
}

// MariaDB is a MariaDB server with the database lease, in which the user lease has all rights.
type MariaDB struct {
	*Process
	MariaDBOptions
	Port int
	Dir  string

	client string
}

// StartMariaDB starts a MariaDB server.
func StartMariaDB(t testing.TB, o MariaDBOptions) *MariaDB {
	t.Helper()
	found := Programs(t, NeedMariaDB, installMariaDB, sbin, "mariadb-install-db", "mariadbd", "mariadb", "mariadb-tzinfo-to-sql")
	m := &MariaDB{MariaDBOptions: o, Port: FreePort(t, 0), client: found["mariadb"]}
	user, dir := as(t, NeedMariaDB, "mysql")
	m.Dir = dir
	data := filepath.Join(dir, "data")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	run := func(name string, args ...string) string {
		t.Helper()
		c := exec.CommandContext(ctx, found[name], args...)
		// Temporary tables have names by the number of the process, which in another namespace another server has, too.
		c.Dir, c.Env = dir, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir, "LC_ALL=C"}
		c.SysProcAttr = &syscall.SysProcAttr{Credential: user}
		var out, words bytes.Buffer
		c.Stdout, c.Stderr = &out, &words
		if err := c.Run(); err != nil {
			t.Fatalf("%s: %v\n%s%s", name, err, &out, &words)
		}
		return out.String()
	}
	run("mariadb-install-db", "--no-defaults", "--datadir="+data, "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve")
	args := []string{
		"--no-defaults", "--datadir=" + data, "--tmpdir=" + dir, "--bind-address=127.0.0.1", fmt.Sprintf("--port=%d", m.Port), "--socket=" + m.socket(),
		"--pid-file=" + filepath.Join(dir, "pid"), "--skip-name-resolve", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=16M",
		"--innodb-log-file-size=8M", "--performance-schema=OFF", "--max-connections=300",
	}
	if o.Zone != "" && !strings.ContainsAny(o.Zone, "/") {
		args = append(args, "--default-time-zone="+o.Zone)
	}
	if o.TLS != nil {
		args = append(args, "--require-secure-transport=ON")
		for name, from := range map[string]string{"ssl-ca": o.TLS.CA, "ssl-cert": o.TLS.Cert, "ssl-key": o.TLS.Key} {
			to := filepath.Join(dir, name)
			copied(t, user, from, to)
			args = append(args, "--"+name+"="+to)
		}
	}
	c := Command{
		Name: fmt.Sprintf("mariadb-%d", m.Port), Path: found["mariadbd"], Args: append(args, o.Args...), Dir: dir, User: user, Ports: []int{m.Port},
		Sockets: []string{m.socket()}, Ready: func(ctx context.Context) error { _, err := m.TryDo(ctx, "SELECT 1"); return err },
	}
	if o.Clock {
		// It ends itself where somebody has waited for so long, by the wall clock, and a clock that is set is no wait.
		// Source: MariaDB, storage/innobase/srv/srv0srv.cc, srv_monitor_task; 600 s by default.
		c.Args = append(c.Args, "--innodb-fatal-semaphore-wait-threshold=1000000")
		c.Env = fakeClock(t, m.clockFile())
	}
	m.Process = Start(t, c)
	m.Do("CREATE DATABASE lease; CREATE USER lease@'%' IDENTIFIED BY '" + o.Password + "'; GRANT ALL ON lease.* TO lease@'%'")
	if strings.ContainsAny(o.Zone, "/") {
		m.Do("USE mysql;\n" + run("mariadb-tzinfo-to-sql", filepath.Join("/usr/share/zoneinfo", o.Zone), o.Zone))
		m.Do("SET GLOBAL time_zone = '" + o.Zone + "'")
	}
	return m
}

func (m *MariaDB) socket() string { return filepath.Join(m.Dir, "sock") }

func (m *MariaDB) clockFile() string { return filepath.Join(m.Dir, "clock") }

// SetClock sets the server's wall clock so far ahead of the host's, or behind it. It needs [MariaDBOptions.Clock].
func (m *MariaDB) SetClock(ahead time.Duration) {
	m.t.Helper()
	setClock(m.t, m.clockFile(), ahead)
}

// Addr returns host:port.
func (m *MariaDB) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(m.Port)) }

// Do runs SQL with all rights in the database lease, once it is there, and returns what it shows, columns by tabs.
func (m *MariaDB) Do(sql string) string {
	m.t.Helper()
	return done(m.t, sql, m.TryDo)
}

// TryDo is [MariaDB.Do] with an error.
func (m *MariaDB) TryDo(ctx context.Context, sql string) (string, error) {
	args := []string{"--no-defaults", "--socket=" + m.socket(), "--user=root", "--batch", "--raw", "--skip-column-names"}
	if sql != "SELECT 1" && !strings.HasPrefix(sql, "CREATE DATABASE") {
		args = append(args, "--database=lease")
	}
	if m.TLS != nil {
		args = append(args, "--ssl-ca="+m.TLS.CA)
	}
	c := exec.CommandContext(ctx, m.client, args...)
	c.Stdin = strings.NewReader(sql)
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + m.Dir, "LC_ALL=C"}
	return said(c)
}
