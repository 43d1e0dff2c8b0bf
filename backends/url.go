package backends

import (
	"errors"
	"net/url"
	"strings"
)

// ParseURL is [url.Parse] for the URL of a store, which may name several hosts with a port each: scheme://h1:1,h2:2/path.
// Its [url.URL.Host] then is the whole list. Like that of url.Parse, the error repeats parts of the URL.
func ParseURL(raw string) (*url.URL, error) {
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		return url.Parse(raw)
	}
	authority, after := rest, ""
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority, after = rest[:i], rest[i:]
	}
	// A password with a slash ends the authority early, and what follows would pass for a path, which is no secret.
	if path, _, _ := strings.Cut(after, "?"); authority != "" && strings.Contains(path, "@") {
		return nil, errors.New("there is an @ behind the host")
	}
	user, hosts := "", authority
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		user, hosts = authority[:i+1], authority[i+1:]
	}
	first, others, ok := strings.Cut(hosts, ",")
	if !ok {
		return url.Parse(raw)
	}
	u, err := url.Parse(scheme + "://" + user + first + after)
	if err != nil {
		return nil, err
	}
	for host := range strings.SplitSeq(others, ",") {
		if one, err := url.Parse("x://" + host); err != nil || one.Host != host || host == "" {
			return nil, errors.New("a host in the list cannot be read")
		}
	}
	u.Host = hosts
	return u, nil
}
