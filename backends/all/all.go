// Package all knows every kind of store that this program was built with. It is the only importer of implementations.
package all

import (
	"context"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/consul"
	"github.com/underlease/underlease/backends/etcd"
	"github.com/underlease/underlease/backends/file"
	"github.com/underlease/underlease/backends/mysql"
	"github.com/underlease/underlease/backends/postgres"
	"github.com/underlease/underlease/backends/redis"
)

// Schemes returns how the stores are opened, by the scheme of their URL. The map is the caller's own.
func Schemes() map[string]backends.Scheme {
	all := map[string]backends.Scheme{
		"file": file.Scheme(),
	}
	maps.Copy(all, consul.Schemes())
	maps.Copy(all, etcd.Schemes())
	maps.Copy(all, redis.Schemes())
	maps.Copy(all, postgres.Schemes())
	maps.Copy(all, mysql.Schemes())
	return all
}

// Open opens the store that a URL names. What is wrong with the URL is a [*backends.ConfigError]: see [Check].
func Open(ctx context.Context, rawURL string, schemes map[string]backends.Scheme) (*backends.Store, error) {
	u, name, err := parse(rawURL, schemes)
	if err != nil {
		return nil, err
	}
	return schemes[name].Open(ctx, u)
}

// Schema returns the SQL that makes what a store needs, for people whose role may not make it.
func Schema(rawURL string, schemes map[string]backends.Scheme) (string, error) {
	u, name, err := parse(rawURL, schemes)
	if err == nil && schemes[name].Schema == nil {
		err = noSchema(name)
	}
	if err != nil {
		return "", err
	}
	return schemes[name].Schema(u)
}

// Apply makes what a store needs and brings it up to date. It returns what it did, in words.
func Apply(ctx context.Context, rawURL string, schemes map[string]backends.Scheme) (string, error) {
	u, name, err := parse(rawURL, schemes)
	if err == nil && schemes[name].Apply == nil {
		err = noSchema(name)
	}
	if err != nil {
		return "", err
	}
	return schemes[name].Apply(ctx, u)
}

func noSchema(name string) error {
	return backends.Configf("databases alone need tables", "a store with the scheme %s needs no schema", name)
}

// Check returns the scheme of a URL, in lower case, or a [*backends.ConfigError] where no store here can have that URL.
// Of the URL the error shows nothing but a scheme of at most 20 bytes: anything else could be part of a password. What
// follows the scheme is for the store to judge, when it is opened.
func Check(rawURL string, schemes map[string]backends.Scheme) (scheme string, err error) {
	_, scheme, err = parse(rawURL, schemes)
	return scheme, err
}

func parse(rawURL string, schemes map[string]backends.Scheme) (u *url.URL, name string, err error) {
	if strings.TrimSpace(rawURL) == "" {
		return nil, "", backends.Configf("write file: for the embedded store, or leave the setting out", "the URL of the store is empty")
	}
	name, ok := scheme(rawURL)
	if !ok {
		hint := "it begins with one of " + list(schemes) + "; it is not shown here, since it may hold a password"
		if _, exists := schemes[strings.ToLower(rawURL)]; exists {
			hint = "write " + strings.ToLower(rawURL) + ":"
		} else if strings.HasPrefix(rawURL, "/") {
			hint = "for a directory write file:// and its absolute path"
		}
		return nil, "", backends.Configf(hint, "the URL of the store has no scheme")
	}
	if _, ok := schemes[name]; !ok {
		hint := "known are " + list(schemes)
		if near := Nearest(name, slices.Sorted(maps.Keys(schemes))); near != "" {
			hint = "did you mean " + near + ":? " + hint
		}
		return nil, "", backends.Configf(hint, "no store has the scheme %q", name)
	}
	if u, err = backends.ParseURL(rawURL); err != nil {
		// The parser's own error repeats parts of the URL.
		return nil, "", backends.Configf("write special characters of a user, a password or a path as %XX (@ is %40, / is %2F, % is %25)",
			"the URL with the scheme %q cannot be read", name)
	}
	return u, name, nil
}

// longestScheme bounds what of a URL is ever shown: a longer word before a colon is no scheme but a secret, perhaps.
const longestScheme = 20

// scheme returns the scheme of a URL in lower case.
//
// Source: RFC 3986, section 3.1: a letter, then letters, digits, plus, period and hyphen.
func scheme(rawURL string) (string, bool) {
	name, _, ok := strings.Cut(rawURL, ":")
	if !ok || name == "" || len(name) > longestScheme {
		return "", false
	}
	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		other := c >= '0' && c <= '9' || c == '+' || c == '-' || c == '.'
		if !letter && (i == 0 || !other) {
			return "", false
		}
	}
	return strings.ToLower(name), true
}

func list(schemes map[string]backends.Scheme) string {
	return strings.Join(slices.Sorted(maps.Keys(schemes)), ":, ") + ":"
}
