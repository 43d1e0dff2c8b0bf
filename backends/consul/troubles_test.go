//go:build linux

package consul

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

func acquire(t *testing.T, s *backends.Store, lease string, ttl time.Duration) (backends.Grant, error) {
	t.Helper()
	return acquireIn(t, 10*time.Second, s, lease, ttl)
}

func acquireIn(t *testing.T, limit time.Duration, s *backends.Store, lease string, ttl time.Duration) (backends.Grant, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return s.Acquire(ctx, backends.Request{Lease: lease, Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: ttl})
}

// token makes a token with the rights of a rule.
func token(t *testing.T, n *servers.Consul, rule string) string {
	t.Helper()
	made := func(path string, body map[string]any) (id string) {
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		var answer struct{ SecretID string }
		if err := json.Unmarshal(n.Do(http.MethodPut, path, b), &answer); err != nil {
			t.Fatal(err)
		}
		return answer.SecretID
	}
	name := "p-" + backends.NewHandle()[:8]
	made("/v1/acl/policy", map[string]any{"Name": name, "Rules": rule})
	return made("/v1/acl/token", map[string]any{"Policies": []map[string]string{{"Name": name}}})
}

// What each mistake in a URL, and each state of a server, is called.
func TestEachTroubleHasItsOwnWords(t *testing.T) {
	const secret = "5ec3e7aa-0000-4000-8000-000000000001"
	certificates := servers.MakeCertificates(t)
	plain := servers.StartConsul(t, 1, servers.ConsulOptions{})
	closed := servers.StartConsul(t, 1, servers.ConsulOptions{Token: secret})
	none := token(t, closed.Nodes[0], `key_prefix "other/" { policy = "write" }`)
	noSession := token(t, closed.Nodes[0], `key_prefix "ul/" { policy = "write" }`)
	readOnly := token(t, closed.Nodes[0], `key_prefix "ul/" { policy = "read" } session_prefix "" { policy = "write" }`)
	encrypted := servers.StartConsul(t, 1, servers.ConsulOptions{TLS: certificates})
	strict := servers.StartConsul(t, 1, servers.ConsulOptions{Config: map[string]any{"session_ttl_min": "30s"}})
	three := servers.StartConsul(t, 3, servers.ConsulOptions{})
	leader, others := three.Leader()
	leader.Kill()
	others[0].Kill()
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	q := func(kv ...string) string {
		v := url.Values{}
		for i := 0; i < len(kv); i += 2 {
			v.Set(kv[i], kv[i+1])
		}
		return "?" + v.Encode()
	}
	client := []string{"cert", certificates.ClientCert, "key", certificates.ClientKey}
	addr := func(c *servers.ConsulCluster) string { return c.Nodes[0].Addr() }
	for name, c := range map[string]struct {
		URL        string
		Kind       error
		Text, Hint string
	}{
		"port":       {fmt.Sprintf("consul://127.0.0.1:%d", servers.FreePort(t, 0)), backends.ErrUnreached, "connection refused", ""},
		"host":       {"consul://host.invalid", backends.ErrUnreached, "host.invalid", ""},
		"token":      {"consul://:" + strings.Replace(secret, "1", "2", 1) + "@" + addr(closed), backends.ErrDenied, "does not know the token", "CONSUL_HTTP_TOKEN"},
		"no token":   {"consul://" + addr(closed), backends.ErrDenied, "token", "session_prefix"},
		"rights":     {"consul://:" + none + "@" + addr(closed), backends.ErrDenied, "token", "key_prefix"},
		"session":    {"consul://:" + noSession + "@" + addr(closed), backends.ErrDenied, "token", "session_prefix"},
		"read only":  {"consul://:" + readOnly + "@" + addr(closed), backends.ErrDenied, "token", "key_prefix"},
		"no TLS":     {"consuls://" + addr(plain), backends.ErrUnavailable, "", "consul in the place of consuls"},
		"TLS":        {"consul://" + addr(encrypted), backends.ErrUnavailable, "", "consuls in the place of consul"},
		"authority":  {"consuls://" + addr(encrypted) + q(client...), backends.ErrUnreached, "authority", "the parameter ca"},
		"name":       {"consuls://" + addr(encrypted) + q(append(client, "ca", certificates.CA, "server-name", "elsewhere")...), backends.ErrUnreached, "elsewhere", "server-name"},
		"no leader":  {"consul://" + others[1].Addr(), backends.ErrUnavailable, "", ""},
		"datacenter": {"consul://" + addr(plain) + "?datacenter=nowhere", nil, "No path to datacenter", "datacenter"},
		"ttl":        {"consul://" + addr(strict), nil, "30s", ""},
		"not consul": {"consul://" + web.Listener.Addr().String(), backends.ErrUnavailable, "", ""},
	} {
		s := opened(t, c.URL)
		var err error
		servers.Within(t, 40*time.Second, name, func() error { // a server needs a moment to miss its leader
			_, err = acquireIn(t, 2*time.Second, s, "trouble", 20*time.Second)
			return faults.Trouble(c).Matches(err)
		})
		faults.Trouble(c).Check(t, name, s, err, secret, none, noSession, readOnly)
	}
}

// The token has no other right than those that the documentation names.
func TestTheLeastRightsSuffice(t *testing.T) {
	c := servers.StartConsul(t, 1, servers.ConsulOptions{Token: "5ec3e7aa-0000-4000-8000-000000000001"})
	least := token(t, c.Nodes[0], `key_prefix "app/leases/" { policy = "write" } session_prefix "" { policy = "write" }`)
	s := opened(t, "consul://:"+least+"@"+c.Nodes[0].Addr()+"/app/leases")
	g, err := acquire(t, s, "l", time.Minute)
	if err != nil {
		t.Fatalf("Acquire: got %v, want a grant", err)
	}
	if _, err := s.Renew(t.Context(), g); err != nil {
		t.Errorf("Renew: got %v, want the grant", err)
	}
	if err := s.Ask(t.Context(), "", "l", 0, backends.Ask{Kind: backends.AskStop}); err != nil {
		t.Errorf("Ask: got %v, want nil", err)
	}
	if _, err := s.Inspect(t.Context(), "", "l"); err != nil {
		t.Errorf("Inspect: got %v, want the state", err)
	}
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release: got %v, want nil", err)
	}
}

// A session hangs on its ttl alone, and there is no lock-delay.
func TestASessionHasNoChecksAndNoDelay(t *testing.T) {
	c := servers.StartConsul(t, 1, servers.ConsulOptions{})
	s := opened(t, "consul://"+c.Nodes[0].Addr())
	if _, err := acquire(t, s, "l", 15*time.Second); err != nil {
		t.Fatal(err)
	}
	var all []struct {
		NodeChecks, ServiceChecks, Checks []any
		LockDelay                         int64
		TTL, Behavior                     string
	}
	if err := json.Unmarshal(c.Nodes[0].Do(http.MethodGet, "/v1/session/list", nil), &all); err != nil {
		t.Fatal(err)
	}
	if len(all) != 1 || len(all[0].NodeChecks)+len(all[0].ServiceChecks)+len(all[0].Checks) != 0 || all[0].LockDelay != 0 || all[0].TTL != "15s" || all[0].Behavior != "delete" {
		t.Errorf("sessions: got %+v, want one of 15s that deletes, without checks and delay", all)
	}
}

// A refused attempt writes nothing.
func TestARefusedAttemptWritesNothing(t *testing.T) {
	c := servers.StartConsul(t, 1, servers.ConsulOptions{})
	s := opened(t, "consul://"+c.Nodes[0].Addr())
	if _, err := acquire(t, s, "l", time.Minute); err != nil {
		t.Fatal(err)
	}
	index := func() int {
		var self struct {
			Stats struct {
				Raft struct {
					Last string `json:"last_log_index"`
				}
			}
		}
		if err := json.Unmarshal(c.Nodes[0].Do(http.MethodGet, "/v1/agent/self", nil), &self); err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(self.Stats.Raft.Last)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	const attempts = 20
	before := index()
	for range attempts {
		if _, err := acquire(t, s, "l", time.Minute); !errors.Is(err, backends.ErrBusy) {
			t.Errorf("Acquire: got %v, want busy", err)
		}
	}
	// A server that was just started writes an entry or two of its own.
	if written := index() - before; written >= attempts {
		t.Errorf("raft log: got %d entries by %d refused attempts, want none of theirs", written, attempts)
	}
}

// The limits of a session are known before anything is asked.
func TestDurationsThatConsulCannotKeepAreRefused(t *testing.T) {
	for _, c := range []struct {
		url       string
		ttl, hold time.Duration
		text      string // empty: nothing is wrong
	}{
		{"consul://h", 9 * time.Second, 0, "from 10s to 24h0m0s: the ttl 9s is too short"},
		{"consul://h", 10 * time.Second, time.Second, ""},
		{"consul://h?session-ttl-min=1s", time.Second, 0, ""},
		{"consul://h?session-ttl-min=1s", 900 * time.Millisecond, 0, "from 1s to 24h0m0s: the ttl 900ms is too short"},
		{"consul://h", 25 * time.Hour, 0, "the ttl 25h0m0s is too long"},
		{"consul://h", time.Minute, 25 * time.Hour, "the hold 25h0m0s is too long"},
	} {
		u, err := url.Parse(c.url)
		if err != nil {
			t.Fatal(err)
		}
		s, err := parse(u)
		if err != nil {
			t.Fatal(err)
		}
		d, err := newDriver(s)
		if err != nil {
			t.Fatal(err)
		}
		err = d.Check(c.ttl, c.hold)
		var config *backends.ConfigError
		if c.text == "" && err != nil || c.text != "" && (!errors.As(err, &config) || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%s, ttl %v, hold %v: got %v, want %q", c.url, c.ttl, c.hold, err, c.text)
		}
	}
}

func TestEveryErrorHasItsKind(t *testing.T) {
	d := &driver{address: "consul://h:8500", settings: settings{root: "ul", secrets: []string{"s3cr3t"}}}
	for _, e := range []struct {
		err        error
		kind       error // nil: a *ConfigError
		text, hint string
	}{
		{api.StatusError{Code: 403, Body: "ACL not found"}, backends.ErrDenied, "does not know the token", "CONSUL_HTTP_TOKEN"},
		{api.StatusError{Code: 403, Body: "Permission denied"}, backends.ErrDenied, "lacks a right", "key_prefix \"ul/\""},
		{api.StatusError{Code: 500, Body: "rpc error making call: Permission denied"}, backends.ErrDenied, "lacks a right", "session_prefix"},
		{api.StatusError{Code: 500, Body: "No cluster leader"}, backends.ErrUnavailable, "no leader", "majority"},
		{api.StatusError{Code: 500, Body: "rpc error making call: leadership lost while committing log"}, backends.ErrUnavailable, "no leader", "majority"},
		{api.StatusError{Code: 500, Body: "Invalid Session TTL '1', must be between [10s=24h0m0s]"}, nil, "10s=24h0m0s", "--ttl"},
		{api.StatusError{Code: 500, Body: "No path to datacenter"}, nil, "No path", "datacenter"},
		{api.StatusError{Code: 429, Body: ""}, backends.ErrUnavailable, "too many requests", ""},
		{api.StatusError{Code: 404, Body: ""}, backends.ErrUnavailable, "does not answer as Consul", "host and port"},
		{api.StatusError{Code: 500, Body: "x s3cr3t"}, backends.ErrUnavailable, "x xxxxx", ""},
		{api.StatusError{Code: 503, Body: ""}, backends.ErrUnavailable, "503", ""},
		{errors.New("Unexpected response code: 403"), backends.ErrDenied, "lacks a right", ""},
		{&url.Error{Op: "Get", URL: "http://h/v1/kv/secret", Err: errors.New("EOF")}, backends.ErrUnavailable, "consul://h:8500: EOF", ""},
		{context.DeadlineExceeded, backends.ErrUnavailable, "no answer from consul://h:8500", ""},
		{context.Canceled, backends.ErrUnavailable, "no answer from consul://h:8500", ""},
		{backends.Unavailable(nil, "as it is"), backends.ErrUnavailable, "as it is", ""},
	} {
		got := d.classify(e.err)
		var config *backends.ConfigError
		if e.kind == nil && !errors.As(got, &config) || e.kind != nil && !errors.Is(got, e.kind) {
			t.Errorf("%v: got %v, want %v", e.err, got, e.kind)
		}
		if !strings.Contains(got.Error(), e.text) || !strings.Contains(backends.Hint(got), e.hint) || strings.Contains(got.Error(), "s3cr3t") {
			t.Errorf("%v: got %q with the hint %q, want %q and %q", e.err, got, backends.Hint(got), e.text, e.hint)
		}
	}
	if got := d.classify(nil); got != nil {
		t.Errorf("no error: got %v, want nil", got)
	}
}

func TestAURLAndTheVariablesOfConsulSayWhere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("from-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ url, env, address, token string }{
		{"consul:", "", "consul://localhost:8500", ""},
		{"consul://", "CONSUL_HTTP_ADDR=h:1 CONSUL_HTTP_TOKEN=t", "consul://h:1", "t"},
		{"consul://", "CONSUL_HTTP_ADDR=https://h:1/behind", "consuls://h:1", ""},
		{"consul://", "CONSUL_HTTP_ADDR=h:1 CONSUL_HTTP_SSL=true", "consuls://h:1", ""},
		{"consul://", "CONSUL_HTTP_ADDR=unix:///run/consul.sock", "consul:///run/consul.sock", ""},
		{"consul://H/app/x", "CONSUL_HTTP_ADDR=g:1", "consul://h:8500/app/x", ""},
		{"consul://:a%2Fb@h", "CONSUL_HTTP_TOKEN=t", "consul://h:8500", "a/b"},
		{"consul://h?token-file=" + file, "CONSUL_HTTP_TOKEN=t", "consul://h:8500", "from-file"},
		{"consul://h", "CONSUL_HTTP_TOKEN_FILE=" + file, "consul://h:8500", "from-file"},
		{"consuls://h?datacenter=dc2&namespace=n", "", "consuls://h:8500?datacenter=dc2&namespace=n", ""},
	} {
		t.Run(c.url+" "+c.env, func(t *testing.T) {
			for pair := range strings.FieldsSeq(c.env) {
				name, value, _ := strings.Cut(pair, "=")
				t.Setenv(name, value)
			}
			u, err := backends.ParseURL(c.url)
			if err != nil {
				t.Fatal(err)
			}
			s, err := parse(u)
			if err != nil || s.address() != c.address || s.config.Token != c.token {
				t.Errorf("got %q, %q, %v, want %q, %q", s.address(), s.config.Token, err, c.address, c.token)
			}
		})
	}
}

func TestAURLThatCannotWorkIsRefused(t *testing.T) {
	const secret = "s3cr3t"
	backendtest.Refuses(t, parse, secret, map[string]string{
		"consul:relative":                  "names no host",
		"consul://h#f":                     "fragment",
		"consul://h:0":                     "port",
		"consul://h1,h2":                   "several hosts",
		"consul://" + secret + "@h":        "tokens alone",
		"consul://u:" + secret + "@h":      "tokens alone",
		"consul://h?x=1":                   `no parameter "x"`,
		"consul://h?ca=f":                  "needs an encrypted connection",
		"consuls://h?cert=f":               "incomplete",
		"consuls://h?ca=f&ca=g":            "more than once",
		"consul://h?session-ttl-min=soon":  "session-ttl-min",
		"consul://h?token-file=/none/such": "cannot be read",
	})
}

// A proxy that has lost its way says 404, which is also what Consul says where there is no key, and no session. It is no loss, and
// nothing is free.
func TestWhatAProxySaysIsNotWhatConsulSays(t *testing.T) {
	c := servers.StartConsul(t, 1, servers.ConsulOptions{})
	to, err := url.Parse("http://" + c.Nodes[0].Addr())
	if err != nil {
		t.Fatal(err)
	}
	through := httputil.NewSingleHostReverseProxy(to)
	var instead atomic.Pointer[http.HandlerFunc]
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := instead.Load(); h != nil {
			(*h)(w, r)
		} else {
			through.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(web.Close)
	s := opened(t, "consul://"+web.Listener.Addr().String())
	g, err := acquire(t, s, "l", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for name, answer := range map[string]http.HandlerFunc{
		"404": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "default backend - 404", http.StatusNotFound)
		},
		"null": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "null") },
		"{}":   func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{}") },
	} {
		instead.Store(&answer)
		limit := func() context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			t.Cleanup(cancel)
			return ctx
		}
		_, renewErr := s.Renew(limit(), g)
		_, inspectErr := s.Inspect(limit(), "", "l")
		_, listErr := s.List(limit(), "")
		_, acquireErr := acquire(t, s, "l", time.Minute)
		_, putErr := s.Records().Put(limit(), "", "l", backends.Put{Key: "k", Version: backends.AnyVersion}, nil)
		_, getErr := s.Records().Get(limit(), "", "l", "k")
		releaseErr := s.Release(limit(), g, backends.End{Outcome: "ok"})
		for call, err := range map[string]error{
			"Renew": renewErr, "Inspect": inspectErr, "List": listErr, "Acquire": acquireErr, "Put": putErr, "Get": getErr, "Release": releaseErr,
		} {
			if !errors.Is(err, backends.ErrUnavailable) {
				t.Errorf("%s: %s: got %v, want unavailable", name, call, err)
			}
		}
		instead.Store(nil)
		if _, err := s.Renew(t.Context(), g); err != nil {
			t.Errorf("%s: Renew afterwards: got %v, want the grant", name, err)
		}
	}
	// What Consul itself says of a session that is not there is a loss.
	c.Nodes[0].Destroy("ul/lease/_/l/slot/0/grant")
	if _, err := s.Renew(t.Context(), g); !errors.Is(err, backends.ErrLost) {
		t.Errorf("Renew without a session: got %v, want lost", err)
	}
}
