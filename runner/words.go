package runner

import (
	"strings"
	"time"
)

// Short writes a duration for people: without its empty parts, rounded to the millisecond where it is longer than that,
// and [Forever] as a word.
func Short(d time.Duration) string {
	switch {
	case d == Forever:
		return "forever"
	case d >= time.Millisecond || d <= -time.Millisecond:
		d = d.Round(time.Millisecond)
	}
	return Exact(d)
}

// Exact writes a duration without its empty parts, so that [time.ParseDuration] reads the same one back.
func Exact(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}
