//go:build linux

package servers

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
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
	Member
	EtcdOptions
	Peers int // the port of the other servers
}

// EtcdCluster is etcd on one server or on several.
type EtcdCluster = Quorum[*Etcd]

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
	c := &EtcdCluster{t: t, taken: map[int]bool{}, leads: (*Etcd).leads}
	var initial []string
	for i := range nodes {
		n := &Etcd{Member{Name: fmt.Sprintf("m%d", i), Dir: t.TempDir(), Port: c.freePort()}, o, c.freePort()}
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
	}
	c.launch()
	if o.Password != "" {
		first := c.Nodes[0]
		first.Post("/v3/auth/user/add", map[string]any{"name": "root", "password": o.Password})
		first.Post("/v3/auth/role/add", map[string]any{"name": "root"})
		first.Post("/v3/auth/user/grant", map[string]any{"user": "root", "role": "root"})
		first.Post("/v3/auth/enable", map[string]any{})
	}
	return c
}

func (n *Etcd) ready(ctx context.Context) error {
	_, err := n.send(ctx, http.MethodGet, "/readyz", nil)
	return err
}

func (n *Etcd) leads() (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	got, err := n.send(ctx, http.MethodPost, "/v3/maintenance/status", map[string]any{})
	if err != nil {
		return false, err
	}
	var status struct {
		Leader string
		Header struct {
			MemberID string `json:"member_id"`
		}
	}
	err = json.Unmarshal(got, &status)
	return status.Leader == status.Header.MemberID, err
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
	got := n.Post("/v3/kv/range", below(prefix))
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

// below are the keys that begin with prefix.
func below(prefix string) map[string]any {
	end := []byte(prefix)
	end[len(end)-1]++
	return map[string]any{"key": []byte(prefix), "range_end": end} // which JSON writes as base64
}

// Delete deletes the keys that begin with prefix, and returns how many there were.
func (n *Etcd) Delete(prefix string) int {
	n.t.Helper()
	got := n.Post("/v3/kv/deleterange", below(prefix))
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
	got, err := steady(func(ctx context.Context) ([]byte, error) { return n.send(ctx, http.MethodPost, path, body) })
	if err != nil {
		n.t.Fatalf("%s: %s: %v", n.Name, path, err)
	}
	return got
}

func (n *Etcd) send(ctx context.Context, method, path string, body map[string]any) ([]byte, error) {
	do := func(path string, body map[string]any, token string) ([]byte, error) {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		header := map[string]string{}
		if token != "" {
			header["Authorization"] = token
		}
		return asked(ctx, n.TLS, method, n.Addr(), path, b, header)
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
