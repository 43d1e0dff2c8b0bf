//go:build linux

package servers

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// NeedRedis is the need of Redis servers, for [Require].
const NeedRedis = "redis"

const installRedis = "apt-get install -y --no-install-recommends redis-server redis-sentinel"

// sbin is where programs of servers may be that PATH of an ordinary user does not have.
var sbin = []string{"/usr/sbin", "/usr/local/sbin", "/sbin"}

// RedisOptions are what makes a Redis server special.
type RedisOptions struct {
	Port     int           // zero: a free one
	User     string        // beside Password: an ACL user of this name; the user default is then off
	Password string        // of User or, without one, of the user default
	ACL      string        // the rights of User; empty is "~ul:* &ul:* +@all"
	TLS      *Certificates // the port speaks TLS alone and asks for a client's certificate
	Socket   bool          // listens on a socket in the file system, too
	Durable  bool          // appendonly yes, appendfsync always
	Clock    bool          // its wall clock can be set with [Redis.SetClock]; needs gcc
	Database int           // that [Redis.Do] looks at
	Config   []string      // further lines of its configuration
}

// Redis is a Redis server.
type Redis struct {
	*Process
	RedisOptions
	Dir        string
	SocketPath string // with [RedisOptions.Socket]
}

// StartRedis starts a Redis server.
func StartRedis(t testing.TB, o RedisOptions) *Redis {
	t.Helper()
	program := Programs(t, NeedRedis, installRedis, sbin, "redis-server")["redis-server"]
	if o.Port == 0 {
		o.Port = FreePort(t, 0)
	}
	return startRedis(t, program, o, nil)
}

func startRedis(t testing.TB, program string, o RedisOptions, more []string) *Redis {
	t.Helper()
	r := &Redis{RedisOptions: o, Dir: t.TempDir()}
	lines := []string{"bind 127.0.0.1", "dir " + r.Dir, `save ""`, "daemonize no", "protected-mode no", "loglevel notice", "repl-diskless-sync-delay 0"}
	if o.Durable {
		lines = append(lines, "appendonly yes", "appendfsync always")
	} else {
		lines = append(lines, "appendonly no")
	}
	if o.TLS != nil {
		lines = append(lines, "port 0", fmt.Sprintf("tls-port %d", o.Port), "tls-auth-clients yes",
			"tls-ca-cert-file "+o.TLS.CA, "tls-cert-file "+o.TLS.Cert, "tls-key-file "+o.TLS.Key)
	} else {
		lines = append(lines, fmt.Sprintf("port %d", o.Port))
	}
	if o.Socket {
		// A path of the test's own may be longer than the 107 bytes that a socket may have. Source: unix(7).
		dir, err := os.MkdirTemp("", "ul-") //nolint:usetesting // a short one
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		r.SocketPath = filepath.Join(dir, "redis.sock")
		lines = append(lines, "unixsocket "+r.SocketPath, "unixsocketperm 600")
	}
	switch {
	case o.User != "":
		rights := o.ACL
		if rights == "" {
			rights = "~ul:* &ul:* +@all"
		}
		lines = append(lines, "user default off", fmt.Sprintf("user %s on >%s %s", o.User, o.Password, rights), "user kit on nopass ~* &* +@all")
	case o.Password != "":
		lines = append(lines, "requirepass "+o.Password)
	}
	lines = append(append(lines, more...), o.Config...)
	conf := filepath.Join(r.Dir, "redis.conf")
	if err := os.WriteFile(conf, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Command{Name: fmt.Sprintf("redis-%d", o.Port), Path: program, Args: []string{conf}, Dir: r.Dir, Ports: []int{o.Port}, Ready: r.ping}
	if r.SocketPath != "" {
		c.Sockets = []string{r.SocketPath}
	}
	if o.Clock {
		c.Env = fakeClock(t, r.clockFile())
	}
	r.Process = Start(t, c)
	return r
}

func (r *Redis) clockFile() string { return filepath.Join(r.Dir, "clock") }

// SetClock sets the server's wall clock so far ahead of the host's, or behind it. It needs [RedisOptions.Clock].
func (r *Redis) SetClock(ahead time.Duration) {
	r.t.Helper()
	setClock(r.t, r.clockFile(), ahead)
}

// Addr returns host:port.
func (r *Redis) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(r.Port)) }

func (r *Redis) ping(ctx context.Context) error {
	got, err := r.TryDo(ctx, "PING")
	if err == nil && got != "PONG" {
		err = fmt.Errorf("answered %q to PING", got)
	}
	return err
}

// Do sends a command, with all rights, and returns the answer: a string as it is, and the elements of a list a line each.
func (r *Redis) Do(args ...string) string {
	r.t.Helper()
	got, err := r.try(args...)
	if err != nil {
		r.t.Fatalf("%s: %s: %v", r.command.Name, args[0], err)
	}
	return got
}

func (r *Redis) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	return r.TryDo(ctx, args...)
}

// TryDo is [Redis.Do] with an error.
func (r *Redis) TryDo(ctx context.Context, args ...string) (string, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", r.Addr())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline) // a connection that has no deadlines fails below
	}
	if r.TLS != nil {
		config, err := r.TLS.client()
		if err != nil {
			return "", err
		}
		conn = tls.Client(conn, config)
	}
	in := bufio.NewReader(conn)
	if r.User != "" || r.Password != "" {
		auth := []string{"AUTH", r.Password}
		if r.User != "" {
			auth = []string{"AUTH", "kit", "-"}
		}
		if _, err := ask(conn, in, auth); err != nil {
			return "", err
		}
	}
	if r.Database != 0 {
		if _, err := ask(conn, in, []string{"SELECT", strconv.Itoa(r.Database)}); err != nil {
			return "", err
		}
	}
	return ask(conn, in, args)
}

// ask sends one command and reads its answer. It is written here, so that what is tested is not its own witness.
//
// Source: the Redis serialization protocol, version 2.
func ask(out io.Writer, in *bufio.Reader, args []string) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := io.WriteString(out, b.String()); err != nil {
		return "", err
	}
	return answer(in)
}

func answer(in *bufio.Reader) (string, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimRight(line, "\r\n")
	if line == "" {
		return "", errors.New("an empty line in the place of an answer")
	}
	kind, rest := line[0], line[1:]
	switch kind {
	case '+', ':':
		return rest, nil
	case '-':
		return "", errors.New(rest)
	}
	n, err := strconv.Atoi(rest)
	switch {
	case err != nil:
		return "", fmt.Errorf("%q in the place of an answer", line)
	case n < 0:
		return "", nil
	case kind == '$':
		b := make([]byte, n+2)
		if _, err := io.ReadFull(in, b); err != nil {
			return "", err
		}
		return string(b[:n]), nil
	case kind == '*':
		all := make([]string, n)
		for i := range all {
			if all[i], err = answer(in); err != nil {
				return "", err
			}
		}
		return strings.Join(all, "\n"), nil
	}
	return "", fmt.Errorf("%q in the place of an answer", line)
}

// Info returns one line of the server's INFO.
func (r *Redis) Info(field string) string {
	r.t.Helper()
	for line := range strings.SplitSeq(r.Do("INFO", "everything"), "\r\n") {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			return v
		}
	}
	r.t.Fatalf("%s: INFO has no %q", r.command.Name, field)
	return ""
}

// Sentinel is a primary with a replica, and three sentinels that watch them.
type Sentinel struct {
	Primary, Replica *Redis // as they were in the beginning
	Sentinels        []*Redis
	Name             string // of the primary, as the sentinels know it
}

// StartSentinel starts a primary, a replica and three sentinels, and returns when all of them know one another.
func StartSentinel(t testing.TB, o RedisOptions) *Sentinel {
	t.Helper()
	found := Programs(t, NeedRedis, installRedis, sbin, "redis-server", "redis-sentinel")
	s := &Sentinel{Name: "lease"}
	o.Port = FreePort(t, 0)
	s.Primary = startRedis(t, found["redis-server"], o, nil)
	o.Port = FreePort(t, 0)
	s.Replica = startRedis(t, found["redis-server"], o, []string{fmt.Sprintf("replicaof 127.0.0.1 %d", s.Primary.Port)})
	Within(t, patience, "the replica follows", func() error {
		if state := s.Replica.Info("master_link_status"); state != "up" {
			return fmt.Errorf("its link is %q", state)
		}
		return nil
	})
	for i := range 3 {
		one := &Redis{RedisOptions: RedisOptions{Port: FreePort(t, 0)}, Dir: t.TempDir()}
		conf := filepath.Join(one.Dir, "sentinel.conf")
		lines := []string{
			"bind 127.0.0.1", fmt.Sprintf("port %d", one.Port), "dir " + one.Dir, "protected-mode no",
			fmt.Sprintf("sentinel monitor %s 127.0.0.1 %d 2", s.Name, s.Primary.Port),
			"sentinel down-after-milliseconds " + s.Name + " 1000",
			"sentinel failover-timeout " + s.Name + " 3000",
		}
		if err := os.WriteFile(conf, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		one.Process = Start(t, Command{
			Name: fmt.Sprintf("sentinel-%d", i), Path: found["redis-sentinel"], Args: []string{conf}, Dir: one.Dir,
			Ports: []int{one.Port}, Ready: one.ping,
		})
		s.Sentinels = append(s.Sentinels, one)
	}
	Within(t, patience, "the sentinels know one another and the replica", func() error {
		for _, one := range s.Sentinels {
			if got, err := one.try("SENTINEL", "CKQUORUM", s.Name); !strings.HasPrefix(got, "OK 3 ") {
				return errors.Join(fmt.Errorf("CKQUORUM: %q", got), err)
			}
			if got, err := one.try("SENTINEL", "REPLICAS", s.Name); !strings.Contains(got, fmt.Sprintf("127.0.0.1:%d", s.Replica.Port)) {
				return errors.Join(errors.New("the replica is not known"), err)
			}
		}
		return nil
	})
	return s
}

// Addrs returns the sentinels, host:port each.
func (s *Sentinel) Addrs() []string { return addrs(s.Sentinels) }

// AwaitFailover waits until every sentinel names the replica as the primary, and the replica agrees.
func (s *Sentinel) AwaitFailover() {
	t := s.Replica.t
	t.Helper()
	Within(t, patience, "the replica becomes the primary", func() error {
		for _, one := range s.Sentinels {
			got, err := one.try("SENTINEL", "GET-MASTER-ADDR-BY-NAME", s.Name)
			if want := fmt.Sprintf("127.0.0.1\n%d", s.Replica.Port); got != want {
				return errors.Join(fmt.Errorf("a sentinel names %q", got), err)
			}
		}
		if role := s.Replica.Info("role"); role != "master" {
			return fmt.Errorf("its role is %q", role)
		}
		return nil
	})
}

// Cluster is a Redis Cluster of three primaries.
type Cluster struct{ Nodes []*Redis }

// The bus of a node is on its port and that much. Source: Redis Cluster specification.
const busOffset = 10000

// clusterSlots is how many slots a cluster has. Source: Redis Cluster specification.
const clusterSlots = 16384

// StartCluster starts three primaries, each with a third of the slots, and returns when all say that the cluster is up.
func StartCluster(t testing.TB, o RedisOptions) *Cluster {
	t.Helper()
	program := Programs(t, NeedRedis, installRedis, sbin, "redis-server")["redis-server"]
	c := &Cluster{}
	for i := range 3 {
		o.Port = FreePort(t, busOffset)
		n := startRedis(t, program, o, []string{"cluster-enabled yes", "cluster-config-file nodes.conf", "cluster-node-timeout 5000"})
		first, last := clusterSlots*i/3, clusterSlots*(i+1)/3
		assign := []string{"CLUSTER", "ADDSLOTS"}
		for slot := first; slot < last; slot++ {
			assign = append(assign, strconv.Itoa(slot))
		}
		n.Do(assign...)
		n.Do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		c.Nodes = append(c.Nodes, n)
	}
	for _, n := range c.Nodes[1:] {
		n.Do("CLUSTER", "MEET", "127.0.0.1", strconv.Itoa(c.Nodes[0].Port))
	}
	c.AwaitUp(t)
	return c
}

// AwaitUp waits until every node says that the cluster is up and knows the others.
func (c *Cluster) AwaitUp(t testing.TB) {
	t.Helper()
	Within(t, patience, "the cluster is up", func() error {
		for _, n := range c.Nodes {
			info, err := n.try("CLUSTER", "INFO")
			if err != nil {
				return err
			}
			for _, want := range []string{"cluster_state:ok", fmt.Sprintf("cluster_known_nodes:%d", len(c.Nodes))} {
				if !strings.Contains(info, want) {
					return fmt.Errorf("%s has no %s", n.Addr(), want)
				}
			}
		}
		return nil
	})
}

// Addrs returns the nodes, host:port each.
func (c *Cluster) Addrs() []string { return addrs(c.Nodes) }

// Owner returns the node that has a key.
func (c *Cluster) Owner(key string) *Redis {
	for _, n := range c.Nodes {
		slot := n.Do("CLUSTER", "KEYSLOT", key)
		number, err := strconv.Atoi(slot)
		if err != nil {
			n.t.Fatalf("CLUSTER KEYSLOT: got %q, want a number", slot)
		}
		for i, owner := range c.Nodes {
			if number >= clusterSlots*i/3 && number < clusterSlots*(i+1)/3 {
				return owner
			}
		}
	}
	return nil
}

func addrs(all []*Redis) (list []string) {
	for _, r := range all {
		list = append(list, r.Addr())
	}
	return list
}
