//go:build linux

package servers

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// NeedEtcd is the need of etcd servers, for [Require].
const NeedEtcd = "etcd"

// EtcdOptions are what makes etcd servers special.
type EtcdOptions struct {
	Password string        // of the user root; logins are then asked for
	TLS      *Certificates // clients are asked for a certificate
	Args     []string      // further arguments of every server
}

// Etcd is one server of etcd.
type Etcd struct {
	*Process
	EtcdOptions
	Name        string
	Dir         string // of the test; the data are below it
	Port, Peers int
}

// EtcdCluster is etcd on one server or on several.
type EtcdCluster struct {
	t     testing.TB
	Nodes []*Etcd
}

// Etcdctl returns the command line client of etcd, built like the server.
func Etcdctl(t testing.TB) string {
	t.Helper()
	return built(t, NeedEtcd, "etcd", "go.etcd.io/etcd/etcdctl/v3", "etcdctl")
}

// EtcdProgram returns the path of the server.
func EtcdProgram(t testing.TB) string {
	t.Helper()
	return built(t, NeedEtcd, "etcd", "go.etcd.io/etcd/server/v3", "etcd")
}

// StartEtcd starts so many servers of one cluster, and returns when all are ready.
func StartEtcd(t testing.TB, nodes int, o EtcdOptions) *EtcdCluster {
	t.Helper()
	program := EtcdProgram(t)
	c := &EtcdCluster{t: t}
	var initial []string
	for i := range nodes {
		n := &Etcd{EtcdOptions: o, Name: fmt.Sprintf("m%d", i), Dir: t.TempDir(), Port: c.freePort(), Peers: c.freePort()}
		initial = append(initial, fmt.Sprintf("%s=http://127.0.0.1:%d", n.Name, n.Peers))
		c.Nodes = append(c.Nodes, n)
	}
	for _, n := range c.Nodes {
		scheme := "http"
		args := []string{
			"--name", n.Name, "--data-dir", n.Data(), "--unsafe-no-fsync", "--log-level", "warn", "--logger", "zap",
			"--listen-peer-urls", fmt.Sprintf("http://127.0.0.1:%d", n.Peers),
			"--initial-advertise-peer-urls", fmt.Sprintf("http://127.0.0.1:%d", n.Peers),
			"--initial-cluster", strings.Join(initial, ","), "--initial-cluster-token", c.Nodes[0].Dir,
		}
		if o.TLS != nil {
			scheme = "https"
			args = append(args, "--cert-file", o.TLS.Cert, "--key-file", o.TLS.Key, "--trusted-ca-file", o.TLS.CA, "--client-cert-auth")
		}
		client := fmt.Sprintf("%s://127.0.0.1:%d", scheme, n.Port)
		args = append(append(args, "--listen-client-urls", client, "--advertise-client-urls", client), o.Args...)
		n.Process = &Process{t: t, command: Command{
			Name: "etcd-" + n.Name, Path: program, Args: args, Dir: n.Dir, Log: filepath.Join(n.Dir, "log"),
			Ports: []int{n.Port, n.Peers}, Ready: n.ready,
		}}
		t.Cleanup(func() { n.end(syscall.SIGKILL) })
		n.Launch()
	}
	c.AwaitReady()
	if o.Password != "" {
		first := c.Nodes[0]
		first.Post("/v3/auth/user/add", map[string]any{"name": "root", "password": o.Password})
		first.Post("/v3/auth/role/add", map[string]any{"name": "root"})
		first.Post("/v3/auth/user/grant", map[string]any{"user": "root", "role": "root"})
		first.Post("/v3/auth/enable", map[string]any{})
	}
	return c
}

// freePort returns a port that no node of the cluster has.
func (c *EtcdCluster) freePort() int {
	for {
		port := FreePort(c.t, 0)
		taken := false
		for _, n := range c.Nodes {
			taken = taken || n.Port == port || n.Peers == port
		}
		if !taken {
			return port
		}
	}
}

// AwaitReady waits until every server that runs is ready to serve.
func (c *EtcdCluster) AwaitReady() {
	c.t.Helper()
	awaitReady(c.t, c.Nodes, func(n *Etcd) *Process { return n.Process })
}

// Data is where a server keeps what it knows.
func (n *Etcd) Data() string { return filepath.Join(n.Dir, "data") }

// Addr returns host:port.
func (n *Etcd) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.Port)) }

// Addrs returns host:port of every server.
func (c *EtcdCluster) Addrs() []string {
	var all []string
	for _, n := range c.Nodes {
		all = append(all, n.Addr())
	}
	return all
}

// Lose ends every server and starts it again without what it knew.
func (c *EtcdCluster) Lose() { c.again(true) }

// Restart ends every server and starts it again with what it knows.
func (c *EtcdCluster) Restart() { c.again(false) }

func (c *EtcdCluster) again(without bool) {
	c.t.Helper()
	for _, n := range c.Nodes {
		n.Kill()
		if without {
			if err := os.RemoveAll(n.Data()); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	for _, n := range c.Nodes {
		n.Launch()
	}
	c.AwaitReady()
}

func (n *Etcd) ready(ctx context.Context) error {
	_, err := n.send(ctx, http.MethodGet, "/readyz", nil)
	return err
}

// Leader returns the server that leads, and the others.
func (c *EtcdCluster) Leader() (leader *Etcd, others []*Etcd) {
	c.t.Helper()
	Within(c.t, patience, "the cluster has a leader", func() error {
		leader, others = nil, nil
		for _, n := range c.Nodes {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			got, err := n.send(ctx, http.MethodPost, "/v3/maintenance/status", map[string]any{})
			cancel()
			if err != nil {
				others = append(others, n)
				continue
			}
			var status struct {
				Leader string
				Header struct {
					MemberID string `json:"member_id"`
				}
			}
			if err := json.Unmarshal(got, &status); err != nil {
				return err
			}
			if status.Leader == status.Header.MemberID {
				leader = n
			} else {
				others = append(others, n)
			}
		}
		if leader == nil {
			return errors.New("none yet")
		}
		return nil
	})
	return leader, others
}

// Requests returns how many requests the server has got, but for watches and those of the kit.
func (n *Etcd) Requests() int {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	got, err := n.send(ctx, http.MethodGet, "/metrics", nil)
	if err != nil {
		n.t.Fatal(err)
	}
	sum := 0
	for line := range strings.Lines(string(got)) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), "} ")
		for _, method := range []string{"Range", "Txn", "LeaseGrant", "LeaseRevoke", "LeaseKeepAlive", "LeaseTimeToLive"} {
			if strings.HasPrefix(name, "grpc_server_started_total{") && strings.Contains(name, `grpc_method="`+method+`"`) {
				n64, err := strconv.ParseFloat(number, 64)
				if err != nil {
					n.t.Fatal(err)
				}
				sum += int(n64)
			}
		}
	}
	return sum
}

// Get returns the values of the keys that begin with prefix, by key.
func (n *Etcd) Get(prefix string) map[string]string {
	n.t.Helper()
	b64 := base64.StdEncoding.EncodeToString
	end := []byte(prefix)
	end[len(end)-1]++
	got := n.Post("/v3/kv/range", map[string]any{"key": b64([]byte(prefix)), "range_end": b64(end)})
	var answer struct {
		Kvs []struct{ Key, Value []byte }
	}
	if err := json.Unmarshal(got, &answer); err != nil {
		n.t.Fatal(err)
	}
	all := map[string]string{}
	for _, kv := range answer.Kvs {
		all[string(kv.Key)] = string(kv.Value)
	}
	return all
}

// Delete deletes the keys that begin with prefix, and returns how many there were.
func (n *Etcd) Delete(prefix string) int {
	n.t.Helper()
	b64 := base64.StdEncoding.EncodeToString
	end := []byte(prefix)
	end[len(end)-1]++
	got := n.Post("/v3/kv/deleterange", map[string]any{"key": b64([]byte(prefix)), "range_end": b64(end)})
	var answer struct{ Deleted string }
	if err := json.Unmarshal(got, &answer); err != nil {
		n.t.Fatal(err)
	}
	deleted, _ := strconv.Atoi(answer.Deleted) // left out where it is zero
	return deleted
}

// Revoke revokes the etcd lease on which a key hangs.
func (n *Etcd) Revoke(key string) {
	n.t.Helper()
	got := n.Post("/v3/kv/range", map[string]any{"key": base64.StdEncoding.EncodeToString([]byte(key))})
	var answer struct {
		Kvs []struct{ Lease string }
	}
	if err := json.Unmarshal(got, &answer); err != nil || len(answer.Kvs) != 1 {
		n.t.Fatalf("%s: got %d keys, %v, want one", key, len(answer.Kvs), err)
	}
	n.Post("/v3/lease/revoke", map[string]any{"ID": answer.Kvs[0].Lease})
}

// Put writes a key, and leaves it in the etcd lease in which it is, or takes it out of it.
func (n *Etcd) Put(key, value string, keep bool) {
	n.t.Helper()
	b64 := base64.StdEncoding.EncodeToString
	n.Post("/v3/kv/put", map[string]any{"key": b64([]byte(key)), "value": b64([]byte(value)), "ignore_lease": keep})
}

// Post sends a request to the server's JSON gateway, as root where logins are asked for.
//
// Source: etcd, the gRPC gateway: bytes are base64, numbers of 64 bits strings.
func (n *Etcd) Post(path string, body map[string]any) []byte {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	got, err := steady(ctx, func() ([]byte, error) { return n.send(ctx, http.MethodPost, path, body) })
	if err != nil {
		n.t.Fatalf("%s: %s: %v", n.Name, path, err)
	}
	return got
}

func (n *Etcd) send(ctx context.Context, method, path string, body map[string]any) ([]byte, error) {
	var config *tls.Config
	scheme := "http"
	if n.TLS != nil {
		var err error
		if config, err = n.TLS.client(); err != nil {
			return nil, err
		}
		scheme = "https"
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
	do := func(path string, body map[string]any, token string) ([]byte, error) {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		req, err := http.NewRequestWithContext(ctx, method, scheme+"://"+n.Addr()+path, bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		if token != "" {
			req.Header.Set("Authorization", token)
		}
		answer, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		defer answer.Body.Close()
		got, err := io.ReadAll(answer.Body)
		if err == nil && answer.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", answer.Status, got)
		}
		return got, err
	}
	got, err := do(path, body, "")
	if err == nil || n.Password == "" || method != http.MethodPost {
		return got, err
	}
	login, err2 := do("/v3/auth/authenticate", map[string]any{"name": "root", "password": n.Password}, "")
	if err2 != nil {
		return nil, err
	}
	var token struct{ Token string }
	if err := json.Unmarshal(login, &token); err != nil {
		return nil, err
	}
	return do(path, body, token.Token)
}
