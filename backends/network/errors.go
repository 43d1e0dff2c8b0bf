package network

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
)

// Late reports whether an error says that an answer, or a connection, did not come in time, or was not waited for any longer.
func Late(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return true
	}
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}

// Undialled reports whether the host was not found, or did not take the connection: nothing was sent.
func Undialled(err error) bool {
	e, ok := errors.AsType[*net.OpError](err)
	return ok && e.Op == "dial"
}

// Unconnected reports whether there was no connection over which anything could have been asked: it was not taken, or could not be
// encrypted.
func Unconnected(err error) bool {
	_, plain := errors.AsType[tls.RecordHeaderError](err)
	return plain || Distrusted(err) || Undialled(err)
}

// Distrusted reports whether the server's certificate was refused.
func Distrusted(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// OfAnother reports whether the server's certificate was refused because it is that of another host.
func OfAnother(err error) bool {
	_, ok := errors.AsType[x509.HostnameError](err)
	return ok && Distrusted(err)
}

// Hint is what a person can do about a certificate that was refused, in the words of [Certificates], or about a host that is not known.
// It is empty for anything else.
func Hint(err error) string {
	switch dns, _ := errors.AsType[*net.DNSError](err); {
	case OfAnother(err):
		return "the parameter server-name says of what the certificate has to be"
	case Distrusted(err):
		return "the parameter ca names a file with the authority that signed the server's certificate"
	case dns != nil && dns.IsNotFound:
		return "look at the host in the store's URL"
	}
	return ""
}
