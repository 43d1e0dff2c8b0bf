package consul

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
	"github.com/underlease/underlease/backends/quorum"
)

// classify gives an error of the library or of the server its kind. It is the only place that does.
func (d *driver) classify(err error) error {
	switch {
	case err == nil:
		return nil
	case backends.Classified(err), errors.Is(err, quorum.ErrGone):
		return err
	}
	if refused, ok := errors.AsType[api.StatusError](err); ok {
		return d.said(refused.Code, harmless(d.settings.secrets, strings.TrimSpace(refused.Body)))
	}
	// Some calls of the library tell the code by words alone.
	var code int
	if n, _ := fmt.Sscanf(err.Error(), "Unexpected response code: %d", &code); n == 1 {
		return d.said(code, http.StatusText(code))
	}
	failed := backends.Unavailable
	if network.Unconnected(err) {
		failed = backends.Unreached
	}
	if network.Late(err) {
		return failed(nil, "no answer from %s", d.address)
	}
	cause := err
	if u, ok := errors.AsType[*url.Error](err); ok {
		cause = u.Err // the URL has the keys, which say nothing to people
	}
	text := harmless(d.settings.secrets, cause.Error())
	answer := failed(nil, "%s: %s", d.address, text)
	if hint := network.Hint(err); hint != "" {
		return backends.WithHint(answer, "%s", hint)
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok || strings.Contains(text, "server gave HTTP response to HTTPS client") {
		return backends.WithHint(answer, "the agent does not seem to speak TLS: write consul in the place of consuls")
	}
	return answer
}

func (d *driver) denied(what string) error {
	return backends.WithHint(backends.Denied(nil, "%s: %s", d.address, what),
		`the token needs session_prefix "" { policy = "write" } and key_prefix "%s/" { policy = "write" }`, d.settings.root)
}

// said is the agent's own word.
func (d *driver) said(code int, text string) error {
	away := func() error { return backends.Unavailable(nil, "%s: %s", d.address, text) }
	switch {
	// Of errors of the servers behind it the agent hands on the words alone.
	case strings.Contains(text, "ACL not found"):
		return backends.WithHint(backends.Denied(nil, "%s: the server does not know the token", d.address), "write consul://:TOKEN@host, or set CONSUL_HTTP_TOKEN")
	case code == http.StatusForbidden || strings.Contains(text, "Permission denied"):
		return d.denied("the token lacks a right")
	case strings.Contains(text, "Invalid Session TTL"):
		return backends.Configf("give a --ttl within its limits", "%s: the servers refuse the ttl: %s", d.address, text)
	case strings.Contains(text, "No cluster leader") || strings.Contains(text, "not the leader") || strings.Contains(text, "leadership lost"):
		return backends.WithHint(backends.Unavailable(nil, "%s: the cluster has no leader", d.address), "a majority of its servers has to run, and to reach one another")
	case strings.Contains(text, "No path to datacenter"):
		return backends.Configf("look at the parameter datacenter of the store's URL", "%s: %s", d.address, text)
	case code == http.StatusBadRequest && strings.Contains(text, "Client sent an HTTP request to an HTTPS server"):
		return backends.WithHint(away(), "write consuls in the place of consul")
	case code == http.StatusTooManyRequests:
		return backends.Unavailable(nil, "%s: the server has too many requests", d.address)
	case code == http.StatusNotFound || code == http.StatusMethodNotAllowed:
		return backends.WithHint(backends.Unavailable(nil, "%s: it does not answer as Consul does: %d %s", d.address, code, http.StatusText(code)), "look at host and port in the store's URL")
	case text == "":
		text = fmt.Sprintf("%d %s", code, http.StatusText(code))
	}
	return away()
}

// harmless takes secrets out of a text, and what a proxy says with many words.
func harmless(secrets []string, text string) string {
	text, _, _ = strings.Cut(text, "\n")
	return backends.Masked(text, secrets...)
}
