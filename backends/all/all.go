// Package all knows every kind of store that this program was built with. It is the only importer of implementations.
package all

import (
	"context"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/file"
)

// Schemes returns how the stores are opened, by the scheme of their URL. The map is the caller's own.
func Schemes() map[string]backends.Scheme {
	return map[string]backends.Scheme{
		"file": file.Scheme(),
	}
}

// Open opens the store that a URL names. What is wrong with the URL is a [*backends.ConfigError], which shows nothing of
// it but its scheme: anything else could be part of a password.
func Open(ctx context.Context, rawURL string, schemes map[string]backends.Scheme) (*backends.Store, error) {
	if strings.TrimSpace(rawURL) == "" {
		return nil, backends.Configf("write file: for the embedded store, or leave the setting out", "the backend URL is empty")
	}
	name, ok := scheme(rawURL)
	if !ok {
		hint := "a backend URL is one of " + list(schemes)
		if _, exists := schemes[strings.ToLower(rawURL)]; exists {
			hint = "write " + strings.ToLower(rawURL) + ":"
		} else if strings.HasPrefix(rawURL, "/") {
			hint = "for a directory write file:// and its absolute path"
		}
		return nil, backends.Configf(hint, "the backend URL has no scheme")
	}
	s, ok := schemes[name]
	if !ok {
		hint := "known are " + list(schemes)
		if near := nearest(name, schemes); near != "" {
			hint = "did you mean " + near + ":? " + hint
		}
		return nil, backends.Configf(hint, "no store has the scheme %q", name)
	}
	u, err := url.Parse(rawURL)
	if err != nil {
		// The parser's own error repeats parts of the URL.
		return nil, backends.Configf("write special characters of a user, a password or a path as %XX (@ is %40, / is %2F, % is %25)",
			"the backend URL with the scheme %q cannot be read", name)
	}
	return s.Open(ctx, u)
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

// nearest returns the scheme that differs from name in the fewest letters, if they are so few that it may be a slip.
func nearest(name string, schemes map[string]backends.Scheme) string {
	best, least := "", 3
	for _, s := range slices.Sorted(maps.Keys(schemes)) {
		if d := distance(name, s); d < least && d < len(s) {
			best, least = s, d
		}
	}
	return best
}

// distance is the number of letters to be inserted, removed or replaced to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
