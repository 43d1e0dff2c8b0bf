package network_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

func TestHostsOfAURL(t *testing.T) {
	for _, c := range []struct {
		list string
		want []string
		err  string
	}{
		{list: "db", want: []string{"db:7"}},
		{list: "DB.Internal:8,[::1],10.0.0.1:65535", want: []string{"db.internal:8", "[::1]:7", "10.0.0.1:65535"}},
		{list: "a,,b", err: "the URL of the store has an empty host"},
		{list: ":8", err: "the URL of the store has an empty host"},
		{list: "a:0", err: `the port "0" of the store is not one of 1 to 65535`},
		{list: "a,b:65536", err: `the port "65536" of the store is not one of 1 to 65535`},
	} {
		got, err := network.Hosts(c.list, "7", "write x://host")
		if c.err == "" {
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%s: got %q, %v, want %q", c.list, got, err, c.want)
			}
			continue
		}
		if e, ok := errors.AsType[*backends.ConfigError](err); !ok || e.Text != c.err || e.Hint != "write x://host" {
			t.Errorf("%s: got %q, %v, want %q", c.list, got, err, c.err)
		}
	}
}

func TestCertificatesThatCannotBeUsed(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, one := range []struct {
		network.Certificates
		want string
	}{
		{network.Certificates{CA: empty + "-not"}, "the file of authorities cannot be read: "},
		{network.Certificates{CA: empty}, "no certificate can be read in " + empty},
		{network.Certificates{Cert: empty}, "the client's certificate is incomplete"},
		{network.Certificates{Key: empty}, "the client's certificate is incomplete"},
		{network.Certificates{Cert: empty, Key: empty}, "the client's certificate cannot be used: "},
	} {
		config, err := one.Config()
		if e, ok := errors.AsType[*backends.ConfigError](err); !ok || !strings.HasPrefix(e.Text, one.want) || config != nil {
			t.Errorf("%+v: got %v, %v, want %q", one.Certificates, config, err, one.want)
		}
	}
}

func TestWhatAnErrorOfAConnectionMeans(t *testing.T) {
	s := httptest.NewTLSServer(nil)
	t.Cleanup(s.Close)
	plain := httptest.NewServer(nil)
	t.Cleanup(plain.Close)
	ca := filepath.Join(t.TempDir(), "ca")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	dial := func(addr string, c network.Certificates) error {
		config, err := c.Config()
		if err != nil {
			t.Fatal(err)
		}
		conn, err := (&tls.Dialer{Config: config}).DialContext(t.Context(), "tcp", addr)
		if err == nil {
			_ = conn.Close()
		}
		return err
	}
	addr := s.Listener.Addr().String()
	if err := dial(addr, network.Certificates{CA: ca}); err != nil {
		t.Fatalf("with its authority: got %v, want a connection", err)
	}
	closed := httptest.NewServer(nil)
	closed.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	silent, other := net.Pipe()
	t.Cleanup(func() { _, _ = silent.Close(), other.Close() })
	if err := silent.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	_, late := silent.Read(make([]byte, 1))

	const authority = "the parameter ca names a file with the authority that signed the server's certificate"
	for _, c := range []struct {
		name                                     string
		err                                      error
		late, undialled, unconnected, distrusted bool
		hint                                     string
	}{
		{name: "refused", err: dial(closed.Listener.Addr().String(), network.Certificates{}), undialled: true, unconnected: true},
		{name: "no such host", err: &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", IsNotFound: true}}, undialled: true, unconnected: true, hint: "look at the host in the store's URL"},
		{name: "no answer of a resolver", err: &net.OpError{Op: "dial", Err: &net.DNSError{Err: "timeout", IsTimeout: true}}, late: true, undialled: true, unconnected: true},
		{name: "authority", err: dial(addr, network.Certificates{}), unconnected: true, distrusted: true, hint: authority},
		{name: "name", err: dial(addr, network.Certificates{CA: ca, ServerName: "else"}), unconnected: true, distrusted: true, hint: "the parameter server-name says of what the certificate has to be"},
		{name: "expired", err: &tls.CertificateVerificationError{Err: x509.CertificateInvalidError{Reason: x509.Expired}}, unconnected: true, distrusted: true, hint: authority},
		{name: "not encrypted", err: dial(plain.Listener.Addr().String(), network.Certificates{CA: ca}), unconnected: true},
		{name: "a read that took too long", err: late, late: true},
		{name: "the end of the call", err: ended.Err(), late: true},
		{name: "the end of its time", err: context.DeadlineExceeded, late: true},
		{name: "reset", err: &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}},
	} {
		if c.err == nil {
			t.Errorf("%s: got no error", c.name)
			continue
		}
		err := fmt.Errorf("a library: %w", c.err)
		if got := network.Late(err); got != c.late {
			t.Errorf("%s: late: got %v, want %v: %v", c.name, got, c.late, err)
		}
		if got := network.Undialled(err); got != c.undialled {
			t.Errorf("%s: undialled: got %v, want %v: %v", c.name, got, c.undialled, err)
		}
		if got := network.Unconnected(err); got != c.unconnected {
			t.Errorf("%s: unconnected: got %v, want %v: %v", c.name, got, c.unconnected, err)
		}
		if got := network.Distrusted(err); got != c.distrusted {
			t.Errorf("%s: distrusted: got %v, want %v: %v", c.name, got, c.distrusted, err)
		}
		if got := network.Hint(err); got != c.hint {
			t.Errorf("%s: hint: got %q, want %q: %v", c.name, got, c.hint, err)
		}
	}
}
