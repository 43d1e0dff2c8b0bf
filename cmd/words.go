package cmd

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
)

// newHolder returns the default label of a holder: host/pid/8 random hexadecimal digits. The random part keeps two
// runs apart whose host names and pids are equal, as those of two containers may be.
func newHolder(host string, pid int) string {
	if host == "" {
		host = "localhost"
	}
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	return host + "/" + strconv.Itoa(pid) + "/" + hex.EncodeToString(b[:])
}

// person writes a holder's label for people: a default one as "host (pid 4711)", any other as it is, and in quotes where
// it has spaces, quotes or what a terminal would act on.
func person(label string) string {
	if host, pid, ok := splitHolder(label); ok {
		return plainOrQuoted(host) + " (pid " + pid + ")"
	}
	return plainOrQuoted(label)
}

func splitHolder(label string) (host, pid string, ok bool) {
	rest, random, ok := cutLast(label, "/")
	if !ok || len(random) != 8 || strings.Trim(random, "0123456789abcdef") != "" {
		return "", "", false
	}
	host, pid, ok = cutLast(rest, "/")
	if !ok || host == "" || pid == "" || len(pid) > 10 || strings.Trim(pid, "0123456789") != "" {
		return "", "", false
	}
	return host, pid, true
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

func plainOrQuoted(s string) string {
	if s == "" || strings.ContainsAny(s, " \"'`\\,") || !isHarmless(s) {
		return strconv.Quote(s)
	}
	return s
}

// busyWords is the line about a lease that is held by another.
func busyWords(b *backends.BusyError, now time.Time) string {
	var w strings.Builder
	fmt.Fprintf(&w, "busy: %s is held by %s", quoteLease(b.Namespace, b.Lease), person(b.Holder))
	if !b.Since.IsZero() {
		w.WriteString(" since " + clock(b.Since, now))
	}
	if b.Left != backends.Forever {
		w.WriteString(", " + left(b.Left) + " left")
		if b.Kept {
			w.WriteString(" of its hold")
		}
	}
	return w.String()
}

func quoteLease(namespace, lease string) string {
	return strconv.Quote(backends.Display(namespace, lease))
}

// clock writes a time of day, with its date unless that is today's.
func clock(t, now time.Time) string {
	t = t.In(now.Location())
	if t.Format(time.DateOnly) != now.Format(time.DateOnly) {
		return t.Format(time.DateTime)
	}
	return t.Format(time.TimeOnly)
}

// left writes a rest in whole seconds, rounded up: nobody should come back too early for it.
func left(d time.Duration) string {
	if d <= 0 {
		return "0s"
	}
	return runner.Short((d + time.Second - 1).Truncate(time.Second))
}

// waitingWords is the line that is rewritten while a run waits.
func waitingWords(w runner.Waiting, now time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%swaiting for %s %s", prefix, strconv.Quote(w.Lease), runner.Short(w.Waited.Truncate(time.Second)))
	if w.Left != runner.Forever {
		b.WriteString(", " + left(w.Left) + " left")
	}
	switch {
	case w.Busy != nil:
		b.WriteString(": held by " + person(w.Busy.Holder))
		if !w.Busy.Since.IsZero() {
			b.WriteString(" since " + clock(w.Busy.Since, now))
		}
	case w.Err != nil:
		b.WriteString(": the store does not answer")
	}
	return harmless(b.String())
}
