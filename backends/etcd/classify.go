package etcd

import (
	"context"
	"errors"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/quorum"
)

// classify gives an error of the library or of the server its kind. It is the only place that does.
func (d *driver) classify(err error) error {
	var config *backends.ConfigError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &config), errors.Is(err, backends.ErrUnavailable), errors.Is(err, backends.ErrDenied), errors.Is(err, backends.ErrBroken), errors.Is(err, quorum.ErrGone):
		return err
	}
	away := func(format string, args ...any) error {
		return backends.Unavailable(nil, d.address+": "+format, args...)
	}
	err = rpctypes.Error(err)
	is := func(all ...error) bool {
		for _, one := range all {
			if errors.Is(err, one) {
				return true
			}
		}
		return false
	}
	switch {
	case is(rpctypes.ErrLeaseNotFound):
		return quorum.ErrGone
	case is(rpctypes.ErrAuthFailed):
		return backends.WithHint(backends.Denied(nil, "%s: the server refused user or password", d.address),
			"look at user and password in the store's URL, where special characters are written as %%XX")
	case is(rpctypes.ErrUserEmpty, rpctypes.ErrUserNotFound):
		return backends.WithHint(backends.Denied(nil, "%s: the server asks for a user and a password", d.address), "write etcd://USER:PASSWORD@host")
	case is(rpctypes.ErrPermissionDenied, rpctypes.ErrPermissionNotGranted):
		return backends.WithHint(backends.Denied(nil, "%s: the user may not read or write the keys", d.address),
			"his role needs them: etcdctl role grant-permission ROLE --prefix=true readwrite %s/", d.settings.root)
	case is(rpctypes.ErrInvalidAuthToken, rpctypes.ErrInvalidAuthMgmt, rpctypes.ErrAuthOldRevision):
		return away("the server knows our token no more: the next attempt asks for another")
	case is(rpctypes.ErrNoLeader, rpctypes.ErrLeaderChanged, rpctypes.ErrNotLeader):
		return backends.WithHint(away("the cluster has no leader"), "a majority of its members has to run, and to reach one another")
	case is(rpctypes.ErrNoSpace):
		return backends.WithHint(away("the server's database is full, and refuses writes"), "compact and defragment it, or raise its quota, then: etcdctl alarm disarm")
	case is(rpctypes.ErrCorrupt):
		return away("the server's database is corrupt")
	case is(rpctypes.ErrCompacted, rpctypes.ErrFutureRev):
		return away("what was looked for was compacted away")
	case is(rpctypes.ErrTooManyRequests):
		return away("the server has too many requests")
	case is(rpctypes.ErrLeaseTTLTooLarge):
		return backends.Configf("", "%s: etcd keeps no lease that long", d.address)
	case is(rpctypes.ErrNotCapable):
		return backends.WithHint(backends.Broken(nil, "%s: the server is too old", d.address), "3.4 or newer is needed")
	case is(rpctypes.ErrTimeout, rpctypes.ErrTimeoutDueToLeaderFail, rpctypes.ErrTimeoutDueToConnectionLost, rpctypes.ErrTimeoutWaitAppliedIndex, rpctypes.ErrUnhealthy, rpctypes.ErrStopped):
		return away("%s", d.harmless(err.Error()))
	case is(context.DeadlineExceeded, context.Canceled):
		return d.silence()
	}
	code, text := status.Code(err), d.harmless(status.Convert(err).Message())
	// The library turns errors of a connection into words.
	text, dialing := strings.CutPrefix(text, "Error while dialing: ")
	if dialing || strings.Contains(text, "handshake failed") {
		away = func(format string, args ...any) error {
			return backends.Unreached(nil, d.address+": "+format, args...)
		}
	}
	switch {
	case code == codes.DeadlineExceeded || code == codes.Canceled:
		return d.silence()
	case code == codes.Unimplemented:
		return backends.WithHint(away("it does not answer as etcd does: %s", text), "look at host and port in the store's URL")
	case strings.Contains(text, "x509: certificate is valid for") || strings.Contains(text, "x509: cannot validate certificate for") || strings.Contains(text, "x509: certificate is not valid"):
		return backends.WithHint(away("%s", text), "the parameter server-name says of what the certificate has to be")
	case strings.Contains(text, "x509: "):
		return backends.WithHint(away("%s", text), "the parameter ca names a file with the authority that signed the server's certificate")
	case strings.Contains(text, "no such host"):
		return backends.WithHint(away("%s", text), "look at the host in the store's URL")
	case code == codes.Unavailable && !strings.Contains(text, "connection refused"):
		return d.unheard(away("%s", text))
	}
	return away("%s", text)
}

func (d *driver) silence() error {
	return d.unheard(backends.Unavailable(nil, "no answer from %s", d.address))
}

// unheard adds what may be wrong where no server has ever answered: servers and the library say little or nothing where one side
// speaks TLS and the other does not, or where a client's certificate is missing.
func (d *driver) unheard(err error) error {
	switch {
	case d.answered.Load():
		return err
	case d.settings.tls == nil:
		return backends.WithHint(err, "look at host and port; where the server speaks TLS, write etcds in the place of etcd")
	default:
		return backends.WithHint(err, "look at host and port; where the server does not speak TLS, write etcd in the place of etcds; "+
			"the parameters cert and key name the client's own certificate")
	}
}

// harmless takes the password out of a text, and what says nothing.
func (d *driver) harmless(text string) string {
	text = strings.TrimPrefix(text, "etcdserver: ")
	if _, desc, ok := strings.Cut(text, `desc = "`); ok {
		text = strings.TrimSuffix(strings.TrimPrefix(desc, "transport: "), `"`)
	}
	if d.settings.password != "" {
		text = strings.ReplaceAll(text, d.settings.password, "xxxxx")
	}
	return text
}
