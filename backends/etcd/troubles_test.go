//go:build linux

package etcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/quorum"
)

func acquire(t *testing.T, s *backends.Store, lease string) (backends.Grant, error) {
	t.Helper()
	return acquireIn(t, 10*time.Second, s, lease)
}

func acquireIn(t *testing.T, limit time.Duration, s *backends.Store, lease string) (backends.Grant, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return s.Acquire(ctx, backends.Request{Lease: lease, Holder: "somebody", Handle: backends.NewHandle(), Slots: 1, TTL: time.Minute})
}

// What each mistake in a URL, and each state of a server, is called.
func TestEachTroubleHasItsOwnWords(t *testing.T) {
	const secret = "s3cr3t-pass"
	certificates := servers.MakeCertificates(t)
	plain := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	closed := servers.StartEtcd(t, 1, servers.EtcdOptions{Password: secret, Args: []string{"--bcrypt-cost", "4"}})
	addUser(closed.Nodes[0], "other", secret, "elsewhere/")
	encrypted := servers.StartEtcd(t, 1, servers.EtcdOptions{TLS: certificates})
	full := servers.StartEtcd(t, 1, servers.EtcdOptions{Args: []string{"--quota-backend-bytes", "40000"}})
	three := servers.StartEtcd(t, 3, servers.EtcdOptions{})
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
	addr := func(c *servers.EtcdCluster) string { return c.Nodes[0].Addr() }
	for name, c := range map[string]struct {
		URL        string
		Kind       error
		Text, Hint string
	}{
		"port":        {fmt.Sprintf("etcd://127.0.0.1:%d", servers.FreePort(t, 0)), backends.ErrUnreached, "connection refused", ""},
		"host":        {"etcd://host.invalid", backends.ErrUnreached, "host.invalid", ""},
		"no user":     {"etcd://" + addr(closed), backends.ErrDenied, "asks for a user", "etcd://USER:PASSWORD@host"},
		"password":    {"etcd://root:" + secret + "x@" + addr(closed), backends.ErrDenied, "refused user or password", "%XX"},
		"user":        {"etcd://nobody:" + secret + "@" + addr(closed), backends.ErrDenied, "refused user or password", "%XX"},
		"rights":      {"etcd://other:" + secret + "@" + addr(closed), backends.ErrDenied, "may not read or write", "grant-permission"},
		"no TLS":      {"etcds://" + addr(plain), backends.ErrUnavailable, "", "etcd in the place of etcds"},
		"TLS":         {"etcd://" + addr(encrypted), backends.ErrUnavailable, "", "etcds in the place of etcd"},
		"authority":   {"etcds://" + addr(encrypted) + q(client...), backends.ErrUnreached, "authority", "the parameter ca"},
		"name":        {"etcds://" + addr(encrypted) + q(append(client, "ca", certificates.CA, "server-name", "elsewhere")...), backends.ErrUnreached, "elsewhere", "server-name"},
		"certificate": {"etcds://" + addr(encrypted) + q("ca", certificates.CA), backends.ErrUnavailable, "", "cert and key"},
		"no leader":   {"etcd://" + others[1].Addr(), backends.ErrUnavailable, "no leader", "majority"},
		"full":        {"etcd://" + addr(full), backends.ErrUnavailable, "full", "alarm disarm"},
		"not etcd":    {"etcd://" + web.Listener.Addr().String(), backends.ErrUnavailable, "", ""},
	} {
		s := opened(t, c.URL)
		var err error
		servers.Within(t, 40*time.Second, name, func() error { // a member needs a moment to miss its leader, and a database to be full
			_, err = acquireIn(t, 2*time.Second, s, "trouble")
			if name == "full" {
				_, _ = s.Records().Put(t.Context(), "", "x", backends.Put{Key: "k", Value: make([]byte, backends.MaxRecord), Version: backends.AnyVersion}, nil)
			}
			return faults.Trouble(c).Matches(err)
		})
		faults.Trouble(c).Check(t, name, s, err, secret)
		if !strings.Contains(err.Error(), s.Address) {
			t.Errorf("%s: got %q, want the address %q", name, err, s.Address)
		}
	}
}

func TestEveryErrorHasItsKind(t *testing.T) {
	const secret = "s3cr3t"
	d := &driver{address: "etcd://h:2379", settings: settings{password: secret, root: "ul"}}
	config := &backends.ConfigError{}
	says := func(text string) error { return &refusal{code: codeUnavailable, text: text} }
	for _, e := range []struct {
		err        error
		kind       error // nil: a *ConfigError
		text, hint string
	}{
		{says(saysNoLease), quorum.ErrGone, "", ""},
		{says(saysLeaseExists), errExists, "", ""},
		{says(saysAuthFailed), backends.ErrDenied, "refused user or password", "%XX"},
		{says(saysNoUser), backends.ErrDenied, "asks for a user", "USER:PASSWORD"},
		{says(saysDenied), backends.ErrDenied, "may not read or write", "readwrite ul/"},
		{says(saysToken), backends.ErrUnavailable, "token", ""},
		{says(saysOldRevision), backends.ErrUnavailable, "token", ""},
		{says(saysNoLeader), backends.ErrUnavailable, "no leader", "majority"},
		{says(saysLeaderChanged), backends.ErrUnavailable, "no leader", "majority"},
		{says(saysFull), backends.ErrUnavailable, "full", "alarm disarm"},
		{says(saysCorrupt), backends.ErrUnavailable, "corrupt", ""},
		{says(saysCompacted), backends.ErrUnavailable, "compacted", ""},
		{says(saysTooMany), backends.ErrUnavailable, "too many requests", ""},
		{says(saysTTL), nil, "that long", ""},
		{says(saysNotCapable), backends.ErrBroken, "too old", "3.4"},
		{says("etcdserver: request timed out"), backends.ErrUnavailable, "request timed out", ""},
		{&refusal{code: codeDeadline, text: "x"}, backends.ErrUnavailable, "no answer from etcd://h:2379", ""},
		{context.DeadlineExceeded, backends.ErrUnavailable, "no answer from etcd://h:2379", ""},
		{context.Canceled, backends.ErrUnavailable, "no answer from etcd://h:2379", ""},
		{net.ErrClosed, backends.ErrUnavailable, "no answer from etcd://h:2379", ""},
		{&refusal{code: codeUnimplemented, text: "unknown service"}, backends.ErrUnavailable, "does not answer as etcd", "host and port"},
		{&net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "h", IsNotFound: true}}, backends.ErrUnreached, "no such host", "host in the store's URL"},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, backends.ErrUnreached, "no answer from etcd://h:2379", ""},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, backends.ErrUnavailable, "reset", ""},
		{&refusal{code: codeUnavailable, text: secret}, backends.ErrUnavailable, "xxxxx", ""},
		{errors.New("something new"), backends.ErrUnavailable, "something new", ""},
		{backends.Unavailable(nil, "as it is"), backends.ErrUnavailable, "as it is", ""},
		{config, nil, "", ""},
	} {
		got := d.classify(e.err)
		if e.kind == nil {
			if !errors.As(got, &config) {
				t.Errorf("%v: got %v, want a *ConfigError", e.err, got)
			}
		} else if !errors.Is(got, e.kind) {
			t.Errorf("%v: got %v, want %v", e.err, got, e.kind)
		}
		if !strings.Contains(got.Error(), e.text) || !strings.Contains(backends.Hint(got), e.hint) {
			t.Errorf("%v: got %q with the hint %q, want %q and %q", e.err, got, backends.Hint(got), e.text, e.hint)
		}
		if shown := fmt.Sprint(got, backends.Hint(got)); strings.Contains(shown, secret) {
			t.Errorf("%v: the secret is shown: %s", e.err, shown)
		}
	}
	if got := d.classify(nil); got != nil {
		t.Errorf("no error: got %v, want nil", got)
	}
}

func parsed(t *testing.T, raw string) (settings, error) {
	t.Helper()
	u, err := backends.ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	return parse(u)
}

func TestAURLAndTheVariablesOfEtcdctlSayWhere(t *testing.T) {
	certificates := servers.MakeCertificates(t)
	for _, c := range []struct {
		url, env                string // NAME=VALUE, separated by spaces
		address, user, password string
	}{
		{"etcd:", "", "etcd://127.0.0.1:2379", "", ""},
		{"etcd://", "ETCDCTL_ENDPOINTS=h1:1,http://h2:2", "etcd://h1:1,h2:2", "", ""},
		{"etcd://", "ETCDCTL_ENDPOINTS=https://h1", "etcds://h1:2379", "", ""},
		{"etcd://", "ETCDCTL_ENDPOINTS=http://h1:1/,h2:2/,[::1]:3", "etcd://h1:1,h2:2,[::1]:3", "", ""},
		{"etcd://", "ETCDCTL_ENDPOINTS=https://h1:1/ ETCDCTL_USER=u:w", "etcds://h1:1", "u", "w"},
		{"etcds://", "ETCDCTL_ENDPOINTS=http://h1:1", "etcds://h1:1", "", ""},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1 ETCDCTL_USER=u:w ETCDCTL_CACERT=" + certificates.CA, "etcds://h1:1", "u", "w"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1 ETCDCTL_CERT=" + certificates.ClientCert + " ETCDCTL_KEY=" + certificates.ClientKey, "etcds://h1:1", "", ""},
		{"etcd:", "ETCDCTL_CACERT=" + certificates.CA, "etcds://127.0.0.1:2379", "", ""},
		{"etcd:", "ETCDCTL_ENDPOINTS=http://h1:1 ETCDCTL_CACERT=" + certificates.CA, "etcd://h1:1", "", ""},
		{"etcd://h1", "ETCDCTL_CACERT=" + certificates.CA, "etcd://h1:2379", "", ""},
		{"etcd://H1,h2:7/app/x", "ETCDCTL_ENDPOINTS=h3", "etcd://h1:2379,h2:7/app/x", "", ""},
		{"etcd://u:p%2F@h", "ETCDCTL_USER=v:w", "etcd://h:2379", "u", "p/"},
		{"etcd://h", "ETCDCTL_USER=v:w:x", "etcd://h:2379", "v", "w:x"},
		{"etcd://h", "ETCDCTL_USER=v ETCDCTL_PASSWORD=w", "etcd://h:2379", "v", "w"},
		{"etcds://h?ca=" + certificates.CA, "ETCDCTL_CERT=" + certificates.ClientCert + " ETCDCTL_KEY=" + certificates.ClientKey, "etcds://h:2379", "", ""},
	} {
		t.Run(c.url+" "+c.env, func(t *testing.T) {
			for pair := range strings.FieldsSeq(c.env) {
				name, value, _ := strings.Cut(pair, "=")
				t.Setenv(name, value)
			}
			s, err := parsed(t, c.url)
			if err != nil || s.address() != c.address || s.user != c.user || s.password != c.password {
				t.Errorf("got %q, %q, %q, %v, want %q, %q, %q", s.address(), s.user, s.password, err, c.address, c.user, c.password)
			}
			if strings.HasPrefix(s.address(), "etcds") != (s.tls != nil) {
				t.Errorf("got encryption %v at %q", s.tls != nil, s.address())
			}
		})
	}
	a, _ := parsed(t, "etcd://u:p@h1,h2")
	b, _ := parsed(t, "etcds://h2:2379,h1:2379")
	if a.identity() != b.identity() {
		t.Errorf("identity: got %q and %q, want the same", a.identity(), b.identity())
	}
}

func TestAURLThatCannotWorkIsRefused(t *testing.T) {
	const secret = "s3cr3t"
	backendtest.Refuses(t, parse, secret, map[string]string{
		"etcd:relative":                   "names no host",
		"etcd://h#f":                      "fragment",
		"etcd://h:0":                      "port",
		"etcd://h?x=1":                    `no parameter "x"`,
		"etcd://h?ca=f":                   "needs an encrypted connection",
		"etcds://h?ca=/nonexistent":       "cannot be read",
		"etcds://h?ca=/dev/null":          "no certificate",
		"etcds://h?cert=f":                "incomplete",
		"etcds://h?ca=f&ca=g":             "more than once",
		"etcd://" + secret + "@h":         "user with a password",
		"etcd://:" + secret + "@h":        "user with a password",
		"etcd://u:" + secret + "@h?a=%zz": "cannot be read",
	})
}

// A password never goes where somebody may listen while a variable says that there is encryption, and what is no endpoint is found out
// before anything is asked.
func TestVariablesThatCannotWorkAreRefused(t *testing.T) {
	const secret = "s3cr3t"
	ca := "ETCDCTL_CACERT=" + servers.MakeCertificates(t).CA
	for _, c := range []struct{ url, env, text string }{
		{"etcd://u:" + secret + "@h", ca, "unencrypted"},
		{"etcd://u:" + secret + "@h", "ETCDCTL_CERT=x", "unencrypted"},
		{"etcd://h", "ETCDCTL_KEY=x ETCDCTL_USER=u:" + secret, "unencrypted"},
		{"etcd:", "ETCDCTL_ENDPOINTS=http://h:1 ETCDCTL_USER=u:" + secret + " " + ca, "unencrypted"},
		{"etcd:", "ETCDCTL_ENDPOINTS=unix:///run/etcd.sock", "neither http nor https"},
		{"etcd:", "ETCDCTL_ENDPOINTS=etcd://h", "neither http nor https"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1,https://h2:2", "with encryption and without"},
		{"etcd:", "ETCDCTL_ENDPOINTS=https://a:1,http://b:2", "with encryption and without"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1,", "endpoint 2 in"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1/path", "endpoint 1 in"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1//", "endpoint 1 in"},
		{"etcd:", "ETCDCTL_ENDPOINTS=http://u:" + secret + "@h1:1", "endpoint 1 in"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:x", "endpoint 1 in"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:1?x", "endpoint 1 in"},
		{"etcd:", "ETCDCTL_ENDPOINTS=:1", "empty host"},
		{"etcd:", "ETCDCTL_ENDPOINTS=h1:70000", "port"},
	} {
		t.Run(strings.ReplaceAll(c.env, "/", "|"), func(t *testing.T) {
			for pair := range strings.FieldsSeq(c.env) {
				name, value, _ := strings.Cut(pair, "=")
				t.Setenv(name, value)
			}
			_, err := parsed(t, c.url)
			var config *backends.ConfigError
			if !errors.As(err, &config) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v, want a *ConfigError with %q", err, c.text)
			}
			if strings.Contains(fmt.Sprint(err, backends.Hint(err)), secret) {
				t.Errorf("the secret is shown: %v", err)
			}
		})
	}
}

func TestVersionsThatRevokeWhatIsKeptAreKnown(t *testing.T) {
	for version, want := range map[string]bool{
		"3.7.3": false, "3.6.0": false, "3.5.13": false, "3.5.12": true, "3.5.0": true, "3.4.31": false, "3.4.23": true, "3.3.27": true, "4.0.0": false,
		"": false, "unknown": false,
	} {
		if got := revokesWhatIsKept(version); got != want {
			t.Errorf("%q: got %v, want %v", version, got, want)
		}
	}
}
