//go:build linux

package servers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// NeedConsul is the need of Consul servers, for [Require].
const NeedConsul = "consul"

// ConsulOptions are what makes Consul servers special.
type ConsulOptions struct {
	Token  string         // of the management; without one everything is allowed
	TLS    *Certificates  // the HTTP port speaks TLS and asks for a client's certificate
	Config map[string]any // further settings of every server
}

// Consul is one server of Consul, which is an agent, too.
type Consul struct {
	Member
	ConsulOptions
}

// ConsulCluster is Consul on one server or on several.
type ConsulCluster = Quorum[*Consul]

// ConsulProgram returns the path of Consul, which is its own command line client.
func ConsulProgram(t testing.TB) string {
	t.Helper()
	return built(t, NeedConsul, "consul", "github.com/hashicorp/consul", "consul")
}

// StartConsul starts so many servers of one cluster, and returns when they have a leader. One alone is started as a server for
// development, which keeps nothing.
func StartConsul(t testing.TB, nodes int, o ConsulOptions) *ConsulCluster {
	t.Helper()
	program := ConsulProgram(t)
	c := &ConsulCluster{t: t, taken: map[int]bool{}, leads: (*Consul).leads}
	c.works = func(ctx context.Context) error { // the leader can write
		_, err := c.Nodes[0].send(ctx, http.MethodPut, "/v1/kv/kit", []byte("ready"))
		return err
	}
	first := 0
	for i := range nodes {
		n := &Consul{Member{Name: fmt.Sprintf("s%d", i), Dir: t.TempDir(), Port: c.freePort()}, o}
		serf, server := c.freePort(), c.freePort()
		if i == 0 {
			first = serf
		}
		listen := map[string]int{"dns": -1, "grpc": -1, "grpc_tls": -1, "serf_wan": -1, "http": n.Port, "serf_lan": serf, "server": server}
		config := map[string]any{
			"node_name": n.Name, "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1", "ports": listen,
			"session_ttl_min": "1s", "log_level": "WARN", "disable_update_check": true,
			"leave_on_terminate": false, "skip_leave_on_interrupt": true,
			"performance": map[string]any{"raft_multiplier": 1}, "connect": map[string]any{"enabled": false},
		}
		if o.Token != "" {
			config["acl"] = map[string]any{
				"enabled": true, "default_policy": "deny", "tokens": map[string]any{"initial_management": o.Token, "agent": o.Token},
			}
		}
		if o.TLS != nil {
			listen["http"], listen["https"] = -1, n.Port
			config["tls"] = map[string]any{"https": map[string]any{
				"ca_file": o.TLS.CA, "cert_file": o.TLS.Cert, "key_file": o.TLS.Key, "verify_incoming": true,
			}}
		}
		args := []string{"agent"}
		if nodes == 1 {
			args = append(args, "-dev")
		} else {
			config["server"], config["bootstrap_expect"], config["data_dir"] = true, nodes, n.Data()
			config["retry_join"] = []string{fmt.Sprintf("127.0.0.1:%d", first)}
			config["retry_interval"] = "500ms"
		}
		maps.Copy(config, o.Config)
		b, err := json.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(n.Dir, "c.json")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		n.Process = &Process{t: t, command: Command{
			Name: "consul-" + n.Name, Path: program, Args: append(args, "-config-file="+file), Dir: n.Dir, Log: filepath.Join(n.Dir, "log"),
			Ports: []int{n.Port, server}, Ready: n.ready,
		}}
		t.Cleanup(func() { n.end(syscall.SIGKILL) })
		c.Nodes = append(c.Nodes, n)
	}
	c.launch()
	return c
}

func (n *Consul) ready(ctx context.Context) error {
	got, err := n.send(ctx, http.MethodGet, "/v1/status/leader", nil)
	if err == nil && !bytes.Contains(got, []byte(":")) {
		err = errors.New("no leader yet")
	}
	return err
}

func (n *Consul) leads() (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	got, err := n.send(ctx, http.MethodGet, "/v1/agent/self", nil)
	if err != nil {
		return false, err
	}
	var self struct {
		Stats struct{ Consul struct{ Leader string } }
	}
	err = json.Unmarshal(got, &self)
	return self.Stats.Consul.Leader == "true", err
}

// Delete deletes the keys that begin with prefix.
func (n *Consul) Delete(prefix string) { n.Do(http.MethodDelete, "/v1/kv/"+prefix+"?recurse", nil) }

// Keys returns the keys that begin with prefix.
func (n *Consul) Keys(prefix string) (keys []string) {
	n.t.Helper()
	got, err := n.steady(http.MethodGet, "/v1/kv/"+prefix+"?keys&consistent", nil)
	if err != nil && strings.Contains(err.Error(), "404") {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(got, &keys)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return keys
}

// Get returns the value of a key, or nothing.
func (n *Consul) Get(key string) string {
	n.t.Helper()
	got, err := n.steady(http.MethodGet, "/v1/kv/"+key+"?raw&consistent", nil)
	if err != nil && !strings.Contains(err.Error(), "404") {
		n.t.Fatal(err)
	}
	if err != nil {
		return ""
	}
	return string(got)
}

// Destroy ends the session that has locked a key.
func (n *Consul) Destroy(key string) {
	n.t.Helper()
	var pairs []struct{ Session string }
	if err := json.Unmarshal(n.Do(http.MethodGet, "/v1/kv/"+key+"?consistent", nil), &pairs); err != nil || len(pairs) != 1 {
		n.t.Fatalf("%s: got %d keys, %v, want one", key, len(pairs), err)
	}
	n.Do(http.MethodPut, "/v1/session/destroy/"+pairs[0].Session, nil)
}

// Do sends a request, with all rights.
func (n *Consul) Do(method, path string, body []byte) []byte {
	n.t.Helper()
	got, err := n.steady(method, path, body)
	if err != nil {
		n.t.Fatalf("%s: %s: %v", n.Name, path, err)
	}
	return got
}

// steady is [Consul.send] for longer, and again where the servers have no leader at the moment.
func (n *Consul) steady(method, path string, body []byte) ([]byte, error) {
	return steady(func(ctx context.Context) ([]byte, error) { return n.send(ctx, method, path, body) })
}

func (n *Consul) send(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	header := map[string]string{}
	if n.Token != "" {
		header["X-Consul-Token"] = n.Token
	}
	return asked(ctx, n.TLS, method, n.Addr(), path, body, header)
}
