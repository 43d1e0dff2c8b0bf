//go:build linux

package servers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certificates are an authority made for one test, and what it has signed: the paths of PEM files.
type Certificates struct {
	CA                    string
	Cert, Key             string // of a server on 127.0.0.1, which is also localhost
	ClientCert, ClientKey string
}

// MakeCertificates makes an authority, the certificate of a server and that of a client. They are good for an hour.
func MakeCertificates(t testing.TB) *Certificates {
	t.Helper()
	dir := t.TempDir()
	now := time.Now()
	template := func(serial int64, name string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
			NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		}
	}
	key := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	authority, authorityKey := template(1, "a test's authority"), key()
	authority.IsCA, authority.BasicConstraintsValid, authority.KeyUsage = true, true, x509.KeyUsageCertSign
	sign := func(c *x509.Certificate, k *ecdsa.PrivateKey) []byte {
		der, err := x509.CreateCertificate(rand.Reader, c, authority, &k.PublicKey, authorityKey)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	issue := func(c *x509.Certificate, name string) (certPath, keyPath string) {
		k := key()
		der, err := x509.MarshalECPrivateKey(k)
		if err != nil {
			t.Fatal(err)
		}
		return write(name+".crt", "CERTIFICATE", sign(c, k)), write(name+".key", "EC PRIVATE KEY", der)
	}
	made := &Certificates{CA: write("ca.crt", "CERTIFICATE", sign(authority, authorityKey))}
	server := template(2, "a test's server")
	server.DNSNames, server.IPAddresses = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	made.Cert, made.Key = issue(server, "server")
	client := template(3, "a test's client")
	client.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	made.ClientCert, made.ClientKey = issue(client, "client")
	return made
}

// client is how the kit itself talks to a server.
func (c *Certificates) client() (*tls.Config, error) {
	ca, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	cert, err := tls.LoadX509KeyPair(c.ClientCert, c.ClientKey)
	if err != nil {
		return nil, err
	}
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{cert}, ServerName: "localhost"}, nil
}
