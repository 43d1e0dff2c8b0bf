package etcd

import (
	"errors"
	"net"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
	"github.com/underlease/underlease/backends/quorum"
)

// errExists says that there is a lease of that number.
var errExists = errors.New("there is such a lease")

// classify gives an error of a connection or of the server its kind. It is the only place that does.
func (d *driver) classify(err error) error {
	switch {
	case err == nil:
		return nil
	case backends.Classified(err), errors.Is(err, quorum.ErrGone):
		return err
	}
	if r, ok := errors.AsType[*refusal](err); ok {
		return d.said(r)
	}
	if errors.Is(err, errMessage) {
		return backends.WithHint(backends.Broken(nil, "%s: %v", d.address, err), "look at host and port in the store's URL")
	}
	failed := backends.Unavailable
	if network.Unconnected(err) {
		failed = backends.Unreached
	}
	if network.Late(err) || errors.Is(err, net.ErrClosed) {
		return d.unheard(failed(nil, "no answer from %s", d.address))
	}
	cause := err
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op != "dial" {
		cause = op.Err // without ports that say nothing
	}
	answer := failed(nil, "%s: %s", d.address, d.harmless(cause.Error()))
	if hint := network.Hint(err); hint != "" {
		return backends.WithHint(answer, "%s", hint)
	}
	if network.Undialled(err) {
		return answer
	}
	return d.unheard(answer)
}

// said is the server's own word.
func (d *driver) said(r *refusal) error {
	away := func(format string, args ...any) error {
		return backends.Unavailable(nil, d.address+": "+format, args...)
	}
	switch r.text {
	case saysNoLease:
		return quorum.ErrGone
	case saysLeaseExists:
		return errExists
	case saysAuthFailed:
		return backends.WithHint(backends.Denied(nil, "%s: the server refused user or password", d.address),
			"look at user and password in the store's URL, where special characters are written as %%XX")
	case saysNoUser, saysUnknownUser:
		return backends.WithHint(backends.Denied(nil, "%s: the server asks for a user and a password", d.address), "write etcd://USER:PASSWORD@host")
	case saysDenied, saysNotGranted:
		return backends.WithHint(backends.Denied(nil, "%s: the user may not read or write the keys", d.address),
			"his role needs them: etcdctl role grant-permission ROLE --prefix=true readwrite %s/", d.settings.root)
	case saysToken, saysManagement, saysOldRevision:
		return away("the server knows our token no more: the next attempt asks for another")
	case saysLearner:
		return away("it is a learner, which answers no one")
	case saysNoLeader, saysLeaderChanged, saysNotLeader:
		return backends.WithHint(away("the cluster has no leader"), "a majority of its members has to run, and to reach one another")
	case saysFull:
		return backends.WithHint(away("the server's database is full, and refuses writes"), "compact and defragment it, or raise its quota, then: etcdctl alarm disarm")
	case saysCorrupt:
		return away("the server's database is corrupt")
	case saysCompacted, saysFuture:
		return away("what was looked for was compacted away")
	case saysTooMany:
		return away("the server has too many requests")
	case saysTTL:
		return backends.Configf("", "%s: etcd keeps no lease that long", d.address)
	case saysNotCapable:
		return backends.WithHint(backends.Broken(nil, "%s: the server is too old", d.address), "3.4 or newer is needed")
	}
	text := d.harmless(r.text)
	switch {
	case r.code == codeDeadline || r.code == codeCanceled:
		return d.unheard(backends.Unavailable(nil, "no answer from %s", d.address))
	case r.status != 0 || r.code == codeUnimplemented:
		return backends.WithHint(away("it does not answer as etcd does: %s", text), "look at host and port in the store's URL")
	}
	return away("%s", text)
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
	return backends.Masked(strings.TrimPrefix(text, "etcdserver: "), d.settings.password)
}
