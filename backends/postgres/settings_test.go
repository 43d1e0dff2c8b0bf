package postgres

import (
	"net/url"
	"testing"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
)

func mustURL(t *testing.T, raw string) *url.URL {
	t.Helper()
	u, err := backends.ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestAURLSaysWhereTheStoreIs(t *testing.T) {
	for raw, want := range map[string]string{
		"postgres://u@h/db":                              "postgres://h:5432/db",
		"postgresql://u:p@H:7/db?table=locks":            "postgresql://h:7/db?table=locks",
		"postgres://u@h1,h2:7/db?schema=ops":             "postgres://h1:5432,h2:7/db?schema=ops",
		"postgres://u@[::1]:7/db?sslmode=disable":        "postgres://[::1]:7/db",
		"postgres://u@/db?host=/run/pg":                  "postgres:///db?host=/run/pg",
		"postgres://u@/db?host=/run/pg&table=a_1&user=x": "postgres:///db?host=/run/pg&table=a_1",
	} {
		s, err := parse(mustURL(t, raw))
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if got := s.address(); got != want {
			t.Errorf("%s: got the address %q, want %q", raw, got, want)
		}
	}
	s, err := parse(mustURL(t, `postgres://us%40er:p%2Fw%27%5C%20@h/d%20b`))
	if err != nil || s.config.User != "us@er" || s.config.Password != `p/w'\ ` || s.config.Database != "d b" {
		t.Errorf("user, password and database: got %+v, %v", s, err)
	}
	if s, err = parse(mustURL(t, "postgres://u@h1,h2/db")); err != nil || s.config.ValidateConnect == nil {
		t.Errorf("several hosts: got %v, want one that can be written to", err)
	}
}

func TestTwoURLsOfOneStoreHaveOneIdentity(t *testing.T) {
	seen := map[string]string{}
	for _, same := range [][]string{
		{"postgres://h/db", "postgresql://u:p@H:5432/db?sslmode=disable"},
		{"postgres://h1,h2/db", "postgres://h2,h1:5432/db"},
		{"postgres://h/other"},
		{"postgres://h/db?schema=s"},
		{"postgres://h/db?table=s"},
	} {
		for _, raw := range same {
			s, err := parse(mustURL(t, raw))
			if err != nil {
				t.Fatal(err)
			}
			if other, ok := seen[s.identity()]; ok && other != same[0] {
				t.Errorf("%s and %s have one identity", raw, other)
			} else if !ok && raw != same[0] {
				t.Errorf("%s and %s have two identities", raw, same[0])
			}
			seen[s.identity()] = same[0]
		}
	}
}

func TestABadURLIsRefusedWithoutItsSecrets(t *testing.T) {
	const secret = "s3cr3t"
	backendtest.Refuses(t, parse, secret, map[string]string{
		"postgres:" + secret + "@h":                     "no host",
		"postgres://u:" + secret + "@h:0/db":            "port",
		"postgres://u:" + secret + "@h,:7/db":           "empty host",
		"postgres://u:" + secret + "@h/db#x":            "fragment",
		"postgres://h/db?x=" + secret:                   `no parameter "x"`,
		"postgres://h/db?table=a-b":                     "not a plain name",
		"postgres://h/db?table=":                        "not a plain name",
		"postgres://h/db?schema=a%22b":                  "not a plain name",
		"postgres://h/db?table=a&table=b":               "more than once",
		"postgres://h/db?%zz":                           "cannot be read",
		"postgres://u:" + secret + "@h/db?sslmode=x":    "cannot be used",
		"postgres://u:" + secret + "@h/db?service=none": "cannot be used",

		"postgres://u:" + secret + "@h/db?sslmode=verify-full&sslrootcert=/nonexistent": "/nonexistent",
	})
}
