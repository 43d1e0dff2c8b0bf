package network

import (
	"crypto/tls"
	"crypto/x509"
	"os"

	"github.com/underlease/underlease/backends"
)

// Certificates are what the parameters ca, cert, key and server-name of a URL say. Each may be empty.
type Certificates struct {
	CA         string // file of the authorities that may have signed the server's certificate, instead of the system's
	Cert, Key  string // files of the client's own certificate
	ServerName string // what the server's certificate has to be of, where that is not the host
}

// Set takes the value of a parameter, and reports whether it is one of certificates.
func (c *Certificates) Set(parameter, value string) bool {
	switch parameter {
	case "ca":
		c.CA = value
	case "cert":
		c.Cert = value
	case "key":
		c.Key = value
	case "server-name":
		c.ServerName = value
	default:
		return false
	}
	return true
}

// Config reads the files. It asks for TLS 1.2 or newer. Errors are a [*backends.ConfigError].
func (c *Certificates) Config() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.ServerName}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, backends.Configf("", "the file of authorities cannot be read: %v", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, backends.Configf("it has to hold certificates in the form PEM", "no certificate can be read in %s", c.CA)
		}
	}
	if err := c.Paired(); err != nil {
		return nil, err
	}
	if c.Cert == "" {
		return config, nil
	}
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		return nil, backends.Configf("", "the client's certificate cannot be used: %v", err)
	}
	config.Certificates = []tls.Certificate{pair}
	return config, nil
}

// Paired returns a [*backends.ConfigError] where there is a certificate without a key, or a key without a certificate.
func (c *Certificates) Paired() error {
	if (c.Cert == "") != (c.Key == "") {
		return backends.Configf("give cert and key, or neither", "the client's certificate is incomplete")
	}
	return nil
}
