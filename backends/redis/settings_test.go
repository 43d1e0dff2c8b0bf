package redis

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
)

func parsed(raw string) (settings, error) {
	u, err := backends.ParseURL(raw)
	if err != nil {
		return settings{}, err
	}
	return parse(u)
}

func TestAURLSaysWhereTheStoreIs(t *testing.T) {
	for _, c := range []struct {
		raw, hosts, address string
		database            int
		primary             string
	}{
		{"redis://h", "h:6379", "redis://h:6379", 0, ""},
		{"redis://H:7/2", "h:7", "redis://h:7/2", 2, ""},
		{"redis://u:p@[::1]:7/", "[::1]:7", "redis://[::1]:7", 0, ""},
		{"REDISS://:p@h?server-name=x", "h:6379", "rediss://h:6379", 0, ""},
		{"redis+unix:///run/r.sock", "/run/r.sock", "redis+unix:///run/r.sock", 0, ""},
		{"redis+unix://u:p@/run/r.sock?db=3", "/run/r.sock", "redis+unix:///run/r.sock?db=3", 3, ""},
		{"redis+sentinel://h1,h2:7/lease", "h1:26379 h2:7", "redis+sentinel://h1:26379,h2:7/lease", 0, "lease"},
		{"rediss+sentinel://:p@h1?db=4&sentinel-password=q", "h1:26379", "rediss+sentinel://h1:26379/mymaster?db=4", 4, "mymaster"},
		{"redis+cluster://u:p@h1:1,h2:2", "h1:1 h2:2", "redis+cluster://h1:1,h2:2", 0, ""},
		{"redis+cluster://h1/0", "h1:6379", "redis+cluster://h1:6379", 0, ""},
	} {
		s, err := parsed(c.raw)
		if err != nil {
			t.Errorf("%s: %v", c.raw, err)
			continue
		}
		if got := strings.Join(s.hosts, " "); got != c.hosts || s.database != c.database || s.primary != c.primary {
			t.Errorf("%s: got hosts %q, database %d and primary %q, want %q, %d and %q", c.raw, got, s.database, s.primary, c.hosts, c.database, c.primary)
		}
		if got := s.address(); got != c.address {
			t.Errorf("%s: got the address %q, want %q", c.raw, got, c.address)
		}
	}
	s, err := parsed("redis://us%40er:p%2Fw%23@h?replicas=2")
	if err != nil || s.user != "us@er" || s.password != "p/w#" || s.replicas != 2 {
		t.Errorf("user and password: got %q and %q, replicas %d, %v", s.user, s.password, s.replicas, err)
	}
}

func TestTwoURLsOfOneStoreHaveOneIdentity(t *testing.T) {
	for _, same := range [][]string{
		{"redis://h", "redis://u:p@H:6379/0", "rediss://h"},
		{"redis+sentinel://h1,h2/x", "rediss+sentinel://:p@h2:26379,h1/x"},
		{"redis+cluster://h1,h2,h1", "redis+cluster://h2,h1:6379"},
	} {
		want, err := parsed(same[0])
		if err != nil {
			t.Fatal(err)
		}
		for _, raw := range same[1:] {
			if got, err := parsed(raw); err != nil || got.identity() != want.identity() {
				t.Errorf("%s: got %q, %v, want that of %s", raw, got.identity(), err, same[0])
			}
		}
	}
	seen := map[string]string{}
	for _, raw := range []string{
		"redis://h", "redis://h/1", "redis://h:1", "redis+sentinel://h:6379/x", "redis+sentinel://h:6379/y", "redis+sentinel://h:6379/x?db=1",
		"redis+cluster://h", "redis+unix:///h",
	} {
		s, err := parsed(raw)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := seen[s.identity()]; ok {
			t.Errorf("%s and %s have one identity", raw, other)
		}
		seen[s.identity()] = raw
	}
}

func TestABadURLIsRefusedWithoutItsSecrets(t *testing.T) {
	const secret = "s3cr3t"
	dir := t.TempDir()
	junk := filepath.Join(dir, "junk")
	if err := os.WriteFile(junk, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	backendtest.Refuses(t, parse, secret, map[string]string{
		"redis:":                                   "no host",
		"redis:" + secret + "@h":                   "no host",
		"redis:///0":                               "no host",
		"redis://" + secret + "@h":                 "user without a password",
		"redis://:" + secret + "@h1,h2":            "several hosts",
		"redis://:" + secret + "@h/x":              "not a number",
		"redis://:" + secret + "@h/-1":             "not a number",
		"redis://:" + secret + "@h:0":              "port",
		"redis://:" + secret + "@h:65536":          "port",
		"redis://:" + secret + "@h#x":              "fragment",
		"redis://h?x=" + secret:                    `no parameter "x"`,
		"redis://h?db=1":                           `no parameter "db"`,
		"redis://h?sentinel-password=" + secret:    "no parameter",
		"redis://h?ca=x":                           "encrypted",
		"redis://h?replicas=x":                     "replicas",
		"redis://h?replicas=101":                   "replicas",
		"redis://h?replicas=1&replicas=2":          "more than once",
		"redis://h?%zz":                            "cannot be read",
		"redis+unix://h/run/x":                     "no absolute path",
		"redis+unix://":                            "no absolute path",
		"redis+unix:///run/":                       "no absolute path",
		"redis+unix:///run/x?db=x":                 "db",
		"redis+cluster://:" + secret + "@h/1":      "no database",
		"redis+cluster://:" + secret + "@:1":       "empty host",
		"rediss://:" + secret + "@h?ca=" + junk:    "no certificate",
		"rediss://h?ca=" + dir + "/none":           "cannot be read",
		"rediss://h?cert=" + junk:                  "incomplete",
		"rediss://h?cert=" + junk + "&key=" + junk: "cannot be used",
	})
}
