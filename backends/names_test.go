package backends

import (
	"errors"
	"hash/crc32"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

func TestNamesAreTakenOrRefusedByOneRule(t *testing.T) {
	long := strings.Repeat("n", MaxLease)
	for _, c := range []struct {
		name string
		want string // part of the error; empty where the name is taken
	}{
		{"nightly", ""},
		{"a/b", ""},
		{"a:b", ""},
		{"a b", ""},
		{"...", ""},
		{"-v", ""},
		{"Ünïcode-名前", ""},
		{"x-ul-abc", ""},
		{"\\", ""},
		{long, ""},
		{strings.Repeat("é", MaxLease/2), ""},

		{"", "is empty"},
		{".", "is not allowed"},
		{"..", "is not allowed"},
		{" a", "space at its start or end"},
		{"a ", "space at its start or end"},
		{"a,b", "comma"},
		{"a\nb", "control character U+000A"},
		{"a\x00b", "control character U+0000"},
		{"a\x7fb", "control character U+007F"},
		{"a\u0085b", "control character U+0085"},
		{"a\xffb", "not valid UTF-8"},
		{"e\u0301", `"e\u0301" is not in normal form C, in which it is "\u00e9"`},
		{long + "n", "has 201 bytes"},
	} {
		err := CheckLease(c.name)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("CheckLease(%q): got %v, want nil", c.name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("CheckLease(%q): got %v, want an error with %q", c.name, err, c.want)
		}
	}
}

func TestTheEmptyNamespaceIsOneOfItsOwn(t *testing.T) {
	if err := CheckNamespace(""); err != nil {
		t.Errorf("CheckNamespace of the empty one: got %v, want nil", err)
	}
	if err := CheckNamespace(strings.Repeat("n", MaxNamespace)); err != nil {
		t.Errorf("CheckNamespace of %d bytes: got %v, want nil", MaxNamespace, err)
	}
	for _, bad := range []string{strings.Repeat("n", MaxNamespace+1), "a,b", "..", "a\tb", " a"} {
		if err := CheckNamespace(bad); err == nil || !strings.Contains(err.Error(), "namespace") {
			t.Errorf("CheckNamespace(%q): got %v, want an error that says namespace", bad, err)
		}
	}
}

func TestKeysOfDifferentNamesDiffer(t *testing.T) {
	// A pair of words with equal CRC-32: equal sums must not mean equal keys.
	if a, b := crc32.ChecksumIEEE([]byte("plumless")), crc32.ChecksumIEEE([]byte("buckeroo")); a != b {
		t.Fatalf("CRC-32: got %x and %x, want equal ones", a, b)
	}
	sixtyFour := strings.Repeat("s", 64)
	names := []struct{ namespace, lease string }{
		{"", "plumless"},
		{"", "buckeroo"},
		{"", sixtyFour},
		{"", sixtyFour + "a"},
		{"", sixtyFour + "b"},
		{"", strings.Repeat("n", 200)},
		{"", "a/b"},
		{"", "a:b"},
		{"", "A"},
		{"", "a"},
		{"", "a "},
		{"", "名前"},
		{"a", "b/c"},
		{"a/b", "c d"},
		{"a", "/b c d"},
		{"ab", "Z"},
		{"a", "bZ"},
		{"", Key("", "a/b")}, // a name that looks like the key of another
	}
	seen := map[string]string{}
	for _, n := range names {
		key := Key(n.namespace, n.lease)
		if other, ok := seen[key]; ok {
			t.Errorf("Key(%q, %q) = %q, which is also that of %s", n.namespace, n.lease, key, other)
		}
		seen[key] = n.namespace + " and " + n.lease
	}
}

func TestPlainNamesAreTheirOwnKeys(t *testing.T) {
	for name, own := range map[string]bool{
		"nightly":               true,
		"a":                     true,
		"0":                     true,
		"a.b-c":                 true,
		strings.Repeat("a", 63): true,
		strings.Repeat("a", 64): false,
		"a_b":                   false,
		"Nightly":               false,
		"-a":                    false,
		"a-":                    false,
		".a":                    false,
		"a.":                    false,
		"x-ul-a":                false,
		"x-ul":                  true,
	} {
		if got := Key("ns", name) == name; got != own {
			t.Errorf("Key(%q) = %q: got own name %v, want %v", name, Key("ns", name), got, own)
		}
	}
	// The form is part of the stores' formats and may not change.
	if got, want := Key("", "a/b"), "x-ul-"; !strings.HasPrefix(got, want) || len(got) != len(want)+52 {
		t.Errorf("Key of a/b: got %q, want %s and 52 letters", got, want)
	}
}

func TestHandlesAreLongAndNeverRepeat(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		h := NewHandle()
		if len(h) != 32 || strings.Trim(h, "0123456789abcdef") != "" {
			t.Fatalf("NewHandle: got %q, want 32 hexadecimal digits", h)
		}
		if seen[h] {
			t.Fatalf("NewHandle gave %q twice", h)
		}
		seen[h] = true
	}
}

func TestDisplayPutsTheNamespaceBeforeTheName(t *testing.T) {
	for _, c := range [][3]string{{"", "n", "n"}, {"ns", "n", "ns/n"}} {
		if got := Display(c[0], c[1]); got != c[2] {
			t.Errorf("Display(%q, %q): got %q, want %q", c[0], c[1], got, c[2])
		}
	}
}

func TestARequestThatNoStoreCanServeIsRefused(t *testing.T) {
	good := Request{Lease: "n", Handle: "h", Slots: 1, TTL: 1}
	if err := good.Check(false); err != nil {
		t.Fatalf("Check of a good request: got %v, want nil", err)
	}
	for name, spoil := range map[string]func(*Request){
		"bad name":      func(r *Request) { r.Lease = ".." },
		"bad namespace": func(r *Request) { r.Namespace = "a,b" },
		"no handle":     func(r *Request) { r.Handle = "" },
		"no slots":      func(r *Request) { r.Slots = 0 },
		"negative ttl":  func(r *Request) { r.TTL = -1 },
		"no ttl":        func(r *Request) { r.TTL = 0 },
		"negative hold": func(r *Request) { r.Hold = -1 },
	} {
		r := good
		spoil(&r)
		var config *ConfigError
		if err := r.Check(false); !errors.As(err, &config) {
			t.Errorf("%s: got %v, want a *ConfigError", name, err)
		}
	}
	endless := good
	endless.TTL = 0
	if err := endless.Check(true); err != nil {
		t.Errorf("no ttl on an endless store: got %v, want nil", err)
	}
}

func TestARecordThatNoStoreMayKeepIsRefused(t *testing.T) {
	if err := (Put{Key: "k", Value: make([]byte, MaxRecord), Version: AnyVersion}).Check(); err != nil {
		t.Errorf("the largest value: got %v, want nil", err)
	}
	for name, p := range map[string]Put{
		"no key":      {},
		"bad key":     {Key: "a,b"},
		"large value": {Key: "k", Value: make([]byte, MaxRecord+1)},
		"version":     {Key: "k", Version: -2},
	} {
		var config *ConfigError
		if err := p.Check(); !errors.As(err, &config) {
			t.Errorf("%s: got %v, want a *ConfigError", name, err)
		}
	}
}

// FuzzNames holds the rule of names against its own words, and the key against the stores that it is made for.
func FuzzNames(f *testing.F) {
	for _, s := range []string{"", "a", "a/b", "..", "a,b", " a", "e\u0301", "\xff", "x-ul-a", strings.Repeat("é", 101)} {
		f.Add("", s)
		f.Add(s, "n")
	}
	f.Fuzz(func(t *testing.T, namespace, lease string) {
		good := lease != "" && len(lease) <= MaxLease && utf8.ValidString(lease) && norm.NFC.IsNormalString(lease) &&
			lease != "." && lease != ".." && strings.Trim(lease, " ") == lease &&
			!strings.ContainsFunc(lease, func(r rune) bool { return r == ',' || unicode.IsControl(r) })
		if err := CheckLease(lease); (err == nil) != good {
			t.Errorf("CheckLease(%q): got %v, want good=%v", lease, err, good)
		}
		if CheckNames(namespace, lease) != nil {
			return
		}
		key := Key(namespace, lease)
		if len(key) > 63 || key[0] == '.' || strings.Trim(key, "abcdefghijklmnopqrstuvwxyz0123456789.-") != "" {
			t.Errorf("Key(%q, %q) = %q has bytes that not every store allows", namespace, lease, key)
		}
		if key == lease && strings.HasPrefix(key, keyPrefix) {
			t.Errorf("Key(%q, %q) = %q could be the key of another name", namespace, lease, key)
		}
	})
}
