package backends

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// The longest names in bytes.
const (
	MaxNamespace = 100
	MaxLease     = 200
)

// CheckLease returns an error that says what is wrong with a lease name, or nil. A name is 1 to 200 bytes of valid UTF-8 in
// normal form C, without control characters and commas, without a space at either end, and not "." or "..". Every other
// byte is significant.
func CheckLease(name string) error {
	if name == "" {
		return fmt.Errorf("the name is empty: give 1 to %d bytes", MaxLease)
	}
	return checkName("name", name, MaxLease)
}

// CheckNamespace returns an error that says what is wrong with a namespace, or nil. The empty namespace is one of its own;
// else the rule is that of [CheckLease] with at most 100 bytes.
func CheckNamespace(name string) error {
	if name == "" {
		return nil
	}
	return checkName("namespace", name, MaxNamespace)
}

func checkName(what, name string, most int) error {
	switch {
	case len(name) > most:
		return fmt.Errorf("the %s has %d bytes: at most %d are allowed", what, len(name), most)
	case !utf8.ValidString(name):
		return fmt.Errorf("the %s %q is not valid UTF-8", what, name)
	case name == "." || name == "..":
		return fmt.Errorf("the %s %q is not allowed: choose another", what, name)
	case strings.HasPrefix(name, " ") || strings.HasSuffix(name, " "):
		return fmt.Errorf("the %s %q has a space at its start or end", what, name)
	case strings.Contains(name, ","):
		return fmt.Errorf("the %s %q has a comma, which separates the terms of several leases", what, name)
	case !norm.NFC.IsNormalString(name):
		// In ASCII, for on a terminal the two look alike.
		return fmt.Errorf("the %s %+q is not in normal form C, in which it is %+q", what, name, norm.NFC.String(name))
	}
	for _, r := range name {
		if unicode.IsControl(r) {
			return fmt.Errorf("the %s %q has the control character %U", what, name, r)
		}
	}
	return nil
}

var base32hex = base32.HexEncoding.WithPadding(base32.NoPadding)

// Key returns a name for stores that allow only a part of the bytes: the lease's own name where it matches
// [a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])? and does not start with x-ul-, else x-ul- and the SHA-256 of namespace, a zero byte
// and name in lower-case base32hex. The plain name is stored with the lease and compared on every read, so that two names
// never share a lease, whatever their keys.
func Key(namespace, lease string) string {
	if plain(lease) {
		return lease
	}
	sum := sha256.Sum256([]byte(namespace + "\x00" + lease))
	return keyPrefix + strings.ToLower(base32hex.EncodeToString(sum[:]))
}

const keyPrefix = "x-ul-"

func plain(s string) bool {
	if s == "" || len(s) > 63 || strings.HasPrefix(s, keyPrefix) {
		return false
	}
	for i := range len(s) {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= '0' && c <= '9'
		inside := i > 0 && i < len(s)-1
		if !letter && (!inside || c != '.' && c != '-') {
			return false
		}
	}
	return true
}

// Display is how a lease is written for people: the name, with its namespace and a slash before it where there is one.
func Display(namespace, lease string) string {
	if namespace == "" {
		return lease
	}
	return namespace + "/" + lease
}

// NewHandle returns a new handle: 128 random bits in hexadecimal.
func NewHandle() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails: it ends the program instead
	return hex.EncodeToString(b[:])
}
