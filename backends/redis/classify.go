package redis

import (
	"crypto/tls"
	"errors"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

// classify gives an error of the library or of the server its kind. It is the only place that does. Key is the one that was
// asked about, or empty.
//
// Source: the first word of an error of Redis is its code.
func (c *Client) classify(err error, key string) error {
	var (
		old *tooOld
		no  *refused
	)
	switch {
	case err == nil:
		return nil
	case backends.Classified(err):
		return err
	case errors.As(err, &old):
		return backends.WithHint(backends.Broken(nil, "%s: %v", c.address, old), "update the server")
	case errors.As(err, &no):
		return c.said(c.harmless(no.text), key)
	}
	if e, ok := errors.AsType[goredis.Error](err); ok && !errors.Is(err, goredis.Nil) {
		return c.said(c.harmless(e.Error()), key)
	}
	if e, ok := errors.AsType[*notEncrypted](err); ok {
		return c.handshake(e.error)
	}
	late := network.Late(err)
	if unconnected(err) {
		if late {
			return backends.Unreached(nil, "no answer from %s", c.address)
		}
		answer := backends.Unreached(nil, "%s: %s", c.address, c.harmless(err.Error()))
		if hint := network.Hint(err); hint != "" {
			return backends.WithHint(answer, "%s", hint)
		}
		return answer
	}
	if late {
		return backends.Unavailable(nil, "no answer from %s", c.address)
	}
	return backends.Unavailable(nil, "%s: %s", c.address, c.harmless(err.Error()))
}

// handshake is why a connection could not be encrypted. Nothing was asked yet.
func (c *Client) handshake(err error) error {
	if network.Late(err) {
		// A server without TLS takes the greeting for the begin of a command, and waits for the rest.
		return backends.WithHint(backends.Unreached(nil, "no answer from %s to the greeting of TLS", c.address),
			"if the server does not speak TLS, write redis in the place of rediss")
	}
	answer := backends.Unreached(nil, "%s: %s", c.address, c.harmless(err.Error()))
	if hint := network.Hint(err); hint != "" {
		return backends.WithHint(answer, "%s", hint)
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return backends.WithHint(answer, "the server does not seem to speak TLS: write redis in the place of rediss")
	}
	return answer
}

// unconnected reports whether there was no connection over which anything could have been asked.
func unconnected(err error) bool {
	_, plain := errors.AsType[*notEncrypted](err)
	_, mute := errors.AsType[*unmet](err)
	return plain || mute || network.Undialled(err)
}

// said is the server's own word.
func (c *Client) said(text, key string) error {
	code, _, _ := strings.Cut(text, " ")
	away := func(hint string) error {
		return backends.WithHint(backends.Unavailable(nil, "%s: %s", c.address, text), "%s", hint)
	}
	// What a script may not do has no code, and words of each version's own.
	// Source: Redis, src/script_lua.c: since 7.2 "ACL failure in script", before "The user executing the script can't run" and "can't access".
	if strings.Contains(text, "The user executing the script can't") || strings.Contains(text, "ACL failure in script") {
		code = "NOPERM"
	}
	switch code {
	case "NOAUTH":
		return backends.WithHint(backends.Denied(nil, "%s: the server asks for a password", c.address),
			"write USER:PASSWORD@ or :PASSWORD@ behind the :// of the store's URL")
	case "WRONGPASS":
		return backends.WithHint(backends.Denied(nil, "%s: the server refused user or password: %s", c.address, text),
			"look at user and password in the store's URL, where special characters are written as %%XX")
	case "NOPERM":
		return backends.WithHint(backends.Denied(nil, "%s: %s", c.address, text),
			"the user needs keys and channels ul:* and the commands %s", strings.Join(Commands, ", "))
	case "DENIED":
		return backends.Denied(nil, "%s: %s", c.address, text)
	case "READONLY":
		return backends.WithHint(backends.Unavailable(nil, "%s: the server is a replica, which cannot grant anything", c.address),
			"name the primary, or let the sentinels name it: redis+sentinel://host1,host2/primary")
	case "OOM":
		return away("the server's memory has run out: raise maxmemory, or make room")
	case "MISCONF":
		return away("the server cannot write to its disk, and refuses writes")
	case "NOREPLICAS":
		return away("the server misses replicas, and refuses writes: see min-replicas-to-write")
	case "LOADING":
		return away("the server reads its data, and will answer soon")
	case "BUSY":
		return away("a script on the server runs for too long: see SCRIPT KILL")
	case "MASTERDOWN":
		return away("the server is a replica that has lost its primary")
	case "CLUSTERDOWN":
		return away("the cluster does not serve this key: see CLUSTER INFO on its nodes")
	case "TRYAGAIN", "ASK":
		return away("a part of the cluster is being moved")
	case "MOVED":
		if c.settings.kind == cluster {
			return away("the nodes of the cluster do not agree on who serves this key")
		}
		return backends.Configf("write redis+cluster:// in the place of redis://", "%s: the server belongs to a cluster", c.address)
	case "WRONGTYPE":
		return c.foreign(key)
	case "NOPROTO", "EXECABORT":
		return backends.Broken(nil, "%s: %s", c.address, text)
	}
	if strings.HasPrefix(text, "ERR DB index is out of range") {
		// It has no code of its own.
		return backends.Configf("see databases in the server's configuration", "%s: the server has no such database", c.address)
	}
	return backends.Unavailable(nil, "%s: %s", c.address, text)
}

func (c *Client) foreign(key string) error {
	return backends.WithHint(backends.Broken(nil, "%s: the key %s holds something else", c.address, key),
		"look at it, then rename or delete it: nothing was changed")
}

// harmless takes out of a text what may not be shown: secrets, and what a server repeats of a command that it does not know.
func (c *Client) harmless(text string) string {
	text, _, _ = strings.Cut(text, ", with args beginning with")
	return backends.Masked(text, c.settings.secrets()...)
}
