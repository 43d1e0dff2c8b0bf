package runner

import (
	"strings"
	"time"
)

// Short writes a duration for people: without its empty parts ("1h" where Go writes "1h0m0s"), to the millisecond where
// it is longer than that, and [Forever] as a word.
func Short(d time.Duration) string {
	if d == Forever {
		return "forever"
	}
	if d >= time.Millisecond || d <= -time.Millisecond {
		d = d.Round(time.Millisecond)
	}
	s := d.String()
	if rest, ok := strings.CutSuffix(s, "m0s"); ok {
		s = rest + "m"
	}
	if rest, ok := strings.CutSuffix(s, "h0m"); ok {
		s = rest + "h"
	}
	return s
}
