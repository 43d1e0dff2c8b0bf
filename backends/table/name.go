package table

import "github.com/underlease/underlease/backends"

// DefaultName is that of the table of leases; what else belongs to it has a name that begins with it.
const DefaultName = "underlease"

// longestName leaves room for what is appended. Source: PostgreSQL keeps 63 bytes of a name, MySQL 64 characters.
const longestName = 48

// CheckName returns a [*backends.ConfigError] for a name that is not plain: a letter, then letters, digits and underscores.
func CheckName(what, name string) error {
	good := name != "" && len(name) <= longestName
	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_'
		good = good && (letter || i > 0 && c >= '0' && c <= '9')
	}
	if !good {
		return backends.Configf("a letter, then letters, digits and underscores, 48 at most", "the %s %q of the store's URL is not a plain name", what, name)
	}
	return nil
}
