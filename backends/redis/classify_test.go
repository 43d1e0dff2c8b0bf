package redis

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/underlease/underlease/backends"
)

// said is an error as a server says it.
type said string

func (s said) Error() string { return string(s) }
func (said) RedisError()     {}

var _ goredis.Error = said("")

func TestEveryErrorHasItsKind(t *testing.T) {
	const secret = "s3cr3t"
	c := &Client{address: "redis://h:6379", settings: settings{password: secret}}
	config := &backends.ConfigError{}
	for _, e := range []struct {
		err        error
		kind       error // nil: a *ConfigError
		text, hint string
	}{
		{said("NOAUTH Authentication required."), backends.ErrDenied, "asks for a password", ":PASSWORD@ behind the ://"},
		{said("WRONGPASS invalid username-password pair"), backends.ErrDenied, "refused user or password", "%XX"},
		{&refused{"WRONGPASS " + secret}, backends.ErrDenied, "refused user or password", "%XX"},
		{said("ERR ACL failure in script: User lease has no permissions to run the 'time' command script: 5, on @user_script:17."), backends.ErrDenied, "no permissions", "ul:*"},
		{said("ERR Error running script (call to f_5): @user_script:1: The user executing the script can't access at least one of the keys"), backends.ErrDenied, "at least one of the keys", "ul:*"},
		{said("NOPERM this user has no permissions to run the 'eval' command"), backends.ErrDenied, "no permissions", "ul:*"},
		{said("DENIED Redis is running in protected mode"), backends.ErrDenied, "protected mode", ""},
		{said("READONLY You can't write against a read only replica."), backends.ErrUnavailable, "is a replica", "primary"},
		{said("OOM command not allowed when used memory > 'maxmemory'."), backends.ErrUnavailable, "OOM", "maxmemory"},
		{said("MISCONF Redis is configured to save RDB snapshots"), backends.ErrUnavailable, "MISCONF", "disk"},
		{said("NOREPLICAS Not enough good replicas to write."), backends.ErrUnavailable, "NOREPLICAS", "min-replicas"},
		{said("LOADING Redis is loading the dataset in memory"), backends.ErrUnavailable, "LOADING", "soon"},
		{said("BUSY Redis is busy running a script."), backends.ErrUnavailable, "BUSY", "SCRIPT KILL"},
		{said("MASTERDOWN Link with MASTER is down"), backends.ErrUnavailable, "MASTERDOWN", "primary"},
		{said("CLUSTERDOWN The cluster is down"), backends.ErrUnavailable, "CLUSTERDOWN", "CLUSTER INFO"},
		{said("TRYAGAIN Multiple keys request during rehashing of slot"), backends.ErrUnavailable, "TRYAGAIN", "moved"},
		{said("MOVED 1 h2:1"), nil, "cluster", "redis+cluster://"},
		{said("WRONGTYPE Operation against a key holding the wrong kind of value"), backends.ErrBroken, "ul:{_/x} holds something else", "rename"},
		{said("ERR DB index is out of range"), nil, "no such database", "databases"},
		{fmt.Errorf("failed to initialize: %w", said("ERR DB index is out of range")), nil, "no such database", ""},
		{said("ERR something new"), backends.ErrUnavailable, "something new", ""},
		{said("ERR unknown command 'EVAL', with args beginning with: '" + secret + "'"), backends.ErrUnavailable, "unknown command 'EVAL'", ""},
		{said("ERR " + secret), backends.ErrUnavailable, "xxxxx", ""},
		{&tooOld{"5.0.7"}, backends.ErrBroken, "Redis 5.0.7, and 6.2 is needed", "update"},
		{context.DeadlineExceeded, backends.ErrUnavailable, "no answer from redis://h:6379", ""},
		{context.Canceled, backends.ErrUnavailable, "no answer from redis://h:6379", ""},
		{&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, backends.ErrUnavailable, "no answer from redis://h:6379", ""},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, backends.ErrUnreached, "redis://h:6379: dial: connection refused", ""},
		{&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, backends.ErrUnreached, "no answer from redis://h:6379", ""},
		{&net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "h", IsNotFound: true}}, backends.ErrUnreached, "no such host", "host in the store's URL"},
		{io.EOF, backends.ErrUnavailable, "redis://h:6379: EOF", ""},
		{goredis.ErrClosed, backends.ErrUnavailable, "redis://h:6379", ""},
		{&notEncrypted{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}}, backends.ErrUnreached, "unknown authority", "ca"},
		{&notEncrypted{&tls.CertificateVerificationError{Err: x509.HostnameError{Certificate: &x509.Certificate{}}}}, backends.ErrUnreached, "", "server-name"},
		{&notEncrypted{tls.RecordHeaderError{Msg: "first record does not look like a TLS handshake"}}, backends.ErrUnreached, "TLS", "redis in the place of rediss"},
		{&notEncrypted{context.DeadlineExceeded}, backends.ErrUnreached, "greeting of TLS", "redis in the place of rediss"},
		{backends.Lost(nil, "as it is"), backends.ErrLost, "as it is", ""},
		{backends.Unavailable(nil, "as it is"), backends.ErrUnavailable, "as it is", ""},
		{config, nil, "", ""},
	} {
		got := c.classify(e.err, "ul:{_/x}")
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
		if shown := fmt.Sprintf("%v %+v %s", got, got, backends.Hint(got)); strings.Contains(shown, secret) {
			t.Errorf("%v: the secret is shown: %s", e.err, shown)
		}
	}
	if got := c.classify(nil, ""); got != nil {
		t.Errorf("no error: got %v, want nil", got)
	}
}

func TestARedirectionIsRead(t *testing.T) {
	for _, c := range []struct {
		err  error
		addr string
		once bool
	}{
		{said("MOVED 3999 127.0.0.1:6381"), "127.0.0.1:6381", false},
		{said("ASK 3999 h:6381"), "h:6381", true},
		{said("MOVED 3999 :6381"), "told:6381", false},
		{fmt.Errorf("wrapped: %w", said("MOVED 1 [::1]:7")), "[::1]:7", false},
		{said("ERR MOVED"), "", false},
		{said("MOVED 1"), "", false},
		{io.EOF, "", false},
	} {
		if addr, once := redirection(c.err, "told:1"); addr != c.addr || once != c.once {
			t.Errorf("%v: got %q and %v, want %q and %v", c.err, addr, once, c.addr, c.once)
		}
	}
}

func TestTheOwnersOfSlotsAreRead(t *testing.T) {
	node := func(host any, port int64) []any { return []any{host, port, "id", []any{}} }
	answer := []any{
		[]any{int64(0), int64(99), node("h1", 1), node("replica", 9)},
		[]any{int64(100), int64(200), node(nil, 2)},
		[]any{int64(201), int64(300), node("::1", 3)},
		[]any{int64(301)},
		"x",
	}
	if got, want := owners(answer), []string{"h1:1", ":2", "[::1]:3"}; !slices.Equal(got, want) {
		t.Errorf("owners: got %q, want %q", got, want)
	}
	if got := owners("x"); got != nil {
		t.Errorf("owners of what is no list: got %q, want none", got)
	}
}

func TestVersionsAreCompared(t *testing.T) {
	for v, want := range map[string]bool{"6.0.20": true, "5.0": true, "6.2.0": false, "7.0.15": false, "10.1": false, "": false, "unstable": false, "6": false} {
		if got := older(v, 6, 2); got != want {
			t.Errorf("%q is older than 6.2: got %v, want %v", v, got, want)
		}
	}
}
