//go:build linux

package servers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
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
	*Process
	ConsulOptions
	Name string
	Dir  string
	Port int // of HTTP
}

// ConsulCluster is Consul on one server or on several.
type ConsulCluster struct {
	t     testing.TB
	Nodes []*Consul
}

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
	c := &ConsulCluster{t: t}
	ports := map[int]bool{}
	free := func() int {
		for {
			if port := FreePort(t, 0); !ports[port] {
				ports[port] = true
				return port
			}
		}
	}
	first := 0
	for i := range nodes {
		n := &Consul{ConsulOptions: o, Name: fmt.Sprintf("s%d", i), Dir: t.TempDir(), Port: free()}
		serf, server := free(), free()
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
	for _, n := range c.Nodes {
		n.Launch()
	}
	c.AwaitReady()
	return c
}

// AwaitReady waits until every server knows a leader, and the leader can write.
func (c *ConsulCluster) AwaitReady() {
	c.t.Helper()
	awaitReady(c.t, c.Nodes, func(n *Consul) *Process { return n.Process })
	n := c.Nodes[0]
	Within(c.t, patience, "the leader can write", func() error {
		_, err := n.try(http.MethodPut, "/v1/kv/kit", []byte("ready"))
		return err
	})
}

// awaitReady waits until every server is ready.
func awaitReady[T any](t testing.TB, nodes []T, process func(T) *Process) {
	t.Helper()
	for _, n := range nodes {
		p := process(n)
		Within(t, patience, p.command.Name+" is ready", func() error {
			select {
			case <-p.done():
				return fmt.Errorf("it ended (%v)\n%s", p.state(), p.tail())
			default:
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			return p.ready(ctx)
		})
	}
}

// Data is where a server keeps what it knows.
func (n *Consul) Data() string { return filepath.Join(n.Dir, "data") }

// Addr returns host:port.
func (n *Consul) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.Port)) }

// Lose ends every server and starts it again without what it knew.
func (c *ConsulCluster) Lose() { c.again(true) }

// Restart ends every server and starts it again with what it knows.
func (c *ConsulCluster) Restart() { c.again(false) }

func (c *ConsulCluster) again(without bool) {
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

func (n *Consul) ready(ctx context.Context) error {
	got, err := n.send(ctx, http.MethodGet, "/v1/status/leader", nil)
	if err == nil && !bytes.Contains(got, []byte(":")) {
		err = errors.New("no leader yet")
	}
	return err
}

// Leader returns the server that leads, and the others.
func (c *ConsulCluster) Leader() (leader *Consul, others []*Consul) {
	c.t.Helper()
	Within(c.t, patience, "the cluster has a leader", func() error {
		leader, others = nil, nil
		for _, n := range c.Nodes {
			got, err := n.try(http.MethodGet, "/v1/agent/self", nil)
			var self struct {
				Stats struct {
					Consul struct {
						Leader string
					}
				}
			}
			if err == nil {
				err = json.Unmarshal(got, &self)
			}
			if err == nil && self.Stats.Consul.Leader == "true" {
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

// steady is [Consul.try] for longer, and again where the servers have no leader at the moment.
func (n *Consul) steady(method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	return steady(ctx, func() ([]byte, error) { return n.send(ctx, method, path, body) })
}

// steady asks again while the servers say that it is their fault: three of them lose their leader where the machine stands still for as long
// as an election takes.
func steady(ctx context.Context, ask func() ([]byte, error)) ([]byte, error) {
	for {
		got, err := ask()
		if err == nil || !strings.HasPrefix(err.Error(), "50") || ctx.Err() != nil {
			return got, err
		}
		time.Sleep(pace)
	}
}

func (n *Consul) try(method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	return n.send(ctx, method, path, body)
}

func (n *Consul) send(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	scheme := "http"
	transport := &http.Transport{DisableKeepAlives: true}
	if n.TLS != nil {
		config, err := n.TLS.client()
		if err != nil {
			return nil, err
		}
		scheme, transport.TLSClientConfig = "https", config
	}
	req, err := http.NewRequestWithContext(ctx, method, scheme+"://"+n.Addr()+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if n.Token != "" {
		req.Header.Set("X-Consul-Token", n.Token)
	}
	answer, err := (&http.Client{Transport: transport}).Do(req)
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
