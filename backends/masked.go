package backends

import (
	"cmp"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// mask stands in the place of a secret.
const mask = "xxxxx"

// Masked takes secrets out of what a server or a library says: as they are, and as they stand in a URL. A secret that is a part of a
// longer word is none: a short one would eat every word that has its letters. Empty secrets are none either.
func Masked(text string, secrets ...string) string {
	var forms []string
	for _, s := range secrets {
		if s != "" {
			forms = append(forms, s, url.QueryEscape(s), url.PathEscape(s), url.UserPassword("", s).String()[1:])
		}
	}
	// One may contain another.
	slices.SortStableFunc(forms, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	for _, form := range slices.Compact(forms) {
		text = masked(text, form)
	}
	return text
}

func masked(text, secret string) string {
	var b strings.Builder
	for rest := text; ; {
		i := strings.Index(rest, secret)
		if i < 0 {
			b.WriteString(rest)
			return b.String()
		}
		end := i + len(secret)
		before := text[:len(text)-len(rest)+i]
		if within(before, secret) || within(secret, rest[end:]) {
			_, size := utf8.DecodeRuneInString(rest[i:])
			b.WriteString(rest[:i+size])
			rest = rest[i+size:]
			continue
		}
		b.WriteString(rest[:i] + mask)
		rest = rest[end:]
	}
}

// within reports whether a word goes on from the end of one text to the beginning of the next.
func within(one, next string) bool {
	last, _ := utf8.DecodeLastRuneInString(one)
	first, _ := utf8.DecodeRuneInString(next)
	return ofWord(last) && ofWord(first)
}

func ofWord(r rune) bool { return r != utf8.RuneError && (unicode.IsLetter(r) || unicode.IsDigit(r)) }
