package cmd

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

// The largest values of --slots and of any duration. Instants are nanoseconds in 64 bits: ten years leave room for every
// sum of them.
const (
	maxSlots    = 1000
	maxDuration = 10 * 365 * 24 * time.Hour
)

// settings are the values of all flags of a run, wherever they came from.
type settings struct {
	backend, backendFile, config, namespace string
	holder, report                          string

	ttl                  time.Duration // zero: none
	wait                 time.Duration // [runner.Forever] with --on-busy wait too
	minHold, maxRun      time.Duration
	minInterval, oncePer time.Duration
	drain, grace, margin time.Duration
	renewEvery           time.Duration
	clockDrift           float64

	onBusy        string
	busyExit      int
	ifUnavailable runner.IfUnavailable
	onLost        runner.OnLost
	leftovers     signals.Leftovers
	isolate       signals.Isolation
	stopSignal    syscall.Signal
	slots         int

	appliedIf    string // of gate
	checkTimeout time.Duration

	quiet, verbose bool
	logLevel       string
	logFormat      logFormat
}

// The values of --on-busy.
const (
	busySkip = "skip"
	busyWait = "wait"
)

// isolations are the values of --isolate.
var isolations = []signals.Isolation{signals.IsolateAuto, signals.IsolateTree, signals.IsolateCgroup, signals.IsolatePidns}

// auto is the word for a duration that follows from others.
const auto = "auto"

// newFlags returns the flags of a run, with s at their defaults. The same parsers read the environment and the files.
func newFlags(s *settings, schemes map[string]backends.Scheme) *pflag.FlagSet {
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	fs.SortFlags = false
	text := func(p *string, name, def, what string, check func(string) error) {
		add(fs, p, name, def, what, func(v string) (string, error) { return v, check(v) }, func(v string) string { return v })
	}
	span := func(p *time.Duration, name string, def, least time.Duration, words ...word) {
		add(fs, p, name, def, "duration",
			func(v string) (time.Duration, error) { return parseDuration(v, least, words...) },
			func(d time.Duration) string { return writeDuration(d, words) })
	}

	text(&s.backend, "backend", "file:", "URL", func(v string) error {
		_, err := all.Check(v, schemes)
		return err
	})
	text(&s.backendFile, "backend-file", "", "file", notEmpty("a file that holds the URL of the store"))
	text(&s.config, "config", "", "file", notEmpty("a settings file"))
	text(&s.namespace, "namespace", "", "name", backends.CheckNamespace)

	span(&s.ttl, "ttl", 0, runner.MinTTL, word{"none", 0})
	span(&s.wait, "wait", 0, 0, word{"forever", runner.Forever})
	choice(fs, &s.onBusy, "on-busy", busySkip, busySkip, busyWait)
	add(fs, &s.busyExit, "busy-exit", runner.ExitBusy, "code", parseBusyExit, strconv.Itoa)
	flag(fs, &s.quiet, "quiet", "q")
	choice(fs, &s.ifUnavailable, "if-unavailable", runner.UnavailableFail,
		runner.UnavailableFail, runner.UnavailableSkip, runner.UnavailableRun)
	span(&s.minHold, "min-hold", 0, 0)
	span(&s.minInterval, "min-interval", 0, 0)
	add(fs, &s.oncePer, "once-per", 0, "duration", parsePer, writePer)
	text(&s.appliedIf, "applied-if", "", "command", notEmpty("a command for sh -c"))
	span(&s.checkTimeout, "check-timeout", defaultCheckTimeout, time.Millisecond)

	span(&s.maxRun, "max-run", 0, 0)
	span(&s.drain, "drain", runner.Forever, 0, word{"forever", runner.Forever})
	span(&s.grace, "grace", runner.Auto, 0, word{auto, runner.Auto})
	span(&s.margin, "margin", runner.Auto, 0, word{auto, runner.Auto})
	span(&s.renewEvery, "renew-every", runner.Auto, time.Millisecond, word{auto, runner.Auto})
	add(fs, &s.clockDrift, "clock-drift", 0.01, "percentage", parsePercent, writePercent)
	choice(fs, &s.onLost, "on-lost", runner.LostKill, runner.LostKill, runner.LostTerm)
	add(fs, &s.stopSignal, "stop-signal", syscall.SIGTERM, "signal", parseStopSignal, signals.Name)
	choice(fs, &s.leftovers, "leftovers", signals.LeftoversKill,
		signals.LeftoversKill, signals.LeftoversWait, signals.LeftoversIgnore)
	choice(fs, &s.isolate, "isolate", signals.IsolateAuto, isolations...)
	add(fs, &s.slots, "slots", 1, "number", parseSlots, strconv.Itoa)

	text(&s.holder, "holder", "", "label", checkHolder)
	text(&s.report, "report", "", "file", checkReport)
	flag(fs, &s.verbose, "verbose", "v")
	choice(fs, &s.logLevel, "log-level", "warn", "debug", "info", "warn", "error")
	choice(fs, &s.logFormat, "log-format", formatText, formatText, formatJSON)
	return fs
}

// value is a setting as a flag: one parser for whatever gives it, so that one wording refuses it.
type value[T any] struct {
	p     *T
	kind  string
	parse func(string) (T, error) // its error goes on after "--flag: "
	write func(T) string          // what parse reads back
}

func (v *value[T]) Set(s string) error {
	x, err := v.parse(s)
	if err != nil {
		return err
	}
	*v.p = x
	return nil
}

// check reports whether s could be set, and sets nothing.
func (v *value[T]) check(s string) error {
	_, err := v.parse(s)
	return err
}

func (v *value[T]) String() string { return v.write(*v.p) }
func (v *value[T]) Type() string   { return v.kind }

func add[T any](fs *pflag.FlagSet, p *T, name string, def T, kind string, parse func(string) (T, error), write func(T) string) {
	*p = def
	fs.Var(&value[T]{p: p, kind: kind, parse: parse, write: write}, name, "")
}

func choice[T ~string](fs *pflag.FlagSet, p *T, name string, def T, of ...T) {
	add(fs, p, name, def, "word", func(s string) (T, error) {
		if slices.Contains(of, T(s)) {
			return T(s), nil
		}
		return "", fmt.Errorf("%q is none of %s", s, join(of))
	}, func(v T) string { return string(v) })
}

func join[T ~string](words []T) string {
	var b strings.Builder
	for i, w := range words {
		switch {
		case i > 0 && i == len(words)-1:
			b.WriteString(" and ")
		case i > 0:
			b.WriteString(", ")
		}
		b.WriteString(string(w))
	}
	return b.String()
}

func flag(fs *pflag.FlagSet, p *bool, name, short string) {
	fs.VarP(&value[bool]{p: p, kind: "bool", parse: parseBool, write: strconv.FormatBool}, name, short, "")
	fs.Lookup(name).NoOptDefVal = "true"
}

func parseBool(s string) (bool, error) {
	switch s {
	case "true", "1":
		return true, nil
	case "false", "0":
		return false, nil
	}
	return false, fmt.Errorf("%q is neither true nor false", s)
}

// word is a duration that has a name.
type word struct {
	name string
	d    time.Duration
}

const durationExample = "give a number with a unit, such as 90s or 1h30m"

func parseDuration(s string, least time.Duration, words ...word) (time.Duration, error) {
	orWord := ""
	for _, w := range words { // one at most
		if s == w.name {
			return w.d, nil
		}
		orWord = ", or " + w.name
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil && s != "" && strings.Trim(s, "0123456789.+-") == "" && strings.ContainsAny(s, "0123456789"):
		return 0, fmt.Errorf("%q has no unit: %s%s", s, durationExample, orWord)
	case err != nil && !tooLong(s):
		return 0, fmt.Errorf("%q is not a duration: %s%s", s, durationExample, orWord)
	case err != nil || d > maxDuration:
		return 0, fmt.Errorf("%q is too long: give at most %s%s", s, runner.Short(maxDuration), orWord)
	case d < 0:
		return 0, fmt.Errorf("%q is negative: give at least %s%s", s, runner.Short(least), orWord)
	case d < least:
		return 0, fmt.Errorf("%q is too short: give at least %s%s", s, runner.Short(least), orWord)
	}
	return d, nil
}

// tooLong reports whether s would be a duration if its numbers were smaller.
func tooLong(s string) bool {
	var b strings.Builder
	digits := 0
	for _, r := range s {
		if r >= '0' && r <= '9' {
			digits++
		} else {
			digits = 0
		}
		if digits <= 1 {
			b.WriteRune(r)
		}
	}
	_, err := time.ParseDuration(b.String())
	return err == nil
}

func writeDuration(d time.Duration, words []word) string {
	for _, w := range words {
		if d == w.d {
			return w.name
		}
	}
	if d == 0 {
		return "0"
	}
	return runner.Exact(d)
}

func parsePercent(s string) (float64, error) {
	number, ok := strings.CutSuffix(s, "%")
	if !ok && s != "0" {
		if _, err := strconv.ParseFloat(s, 64); err == nil {
			return 0, fmt.Errorf("%q has no per cent sign: give 0%% to 50%%, such as 1%%", s)
		}
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) || math.IsNaN(f) || strings.Trim(number, "+-.0123456789") != "" {
		return 0, fmt.Errorf("%q is not a percentage: give 0%% to 50%%, such as 1%%", s)
	}
	if f < 0 || f > 50 {
		return 0, fmt.Errorf("%q is out of range: give 0%% to 50%%, such as 1%%", s)
	}
	return f / 100, nil
}

func writePercent(f float64) string {
	return strconv.FormatFloat(math.Round(f*1e8)/1e6, 'f', -1, 64) + "%"
}

// reservedExits are codes of ours that say something else than "held by another".
var reservedExits = []int{runner.ExitUsage, runner.ExitUnavailable, runner.ExitBug, runner.ExitLost}

func parseBusyExit(s string) (int, error) {
	n, err := strconv.Atoi(s)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%q is not an exit code: give 0 to 125, but not 64, 69, 70 or 74", s)
	case err != nil || n < 0 || n > 125:
		return 0, fmt.Errorf("%q is out of range: give 0 to 125, but not 64, 69, 70 or 74", s)
	case slices.Contains(reservedExits, n):
		return 0, fmt.Errorf("%q means something else here: give 0 to 125, but not 64, 69, 70 or 74", s)
	}
	return n, nil
}

// parseStopSignal reads a signal that a command can end by. One that is ignored by default is legal where programs use it
// for that: WINCH ends Apache's httpd with grace.
func parseStopSignal(s string) (syscall.Signal, error) {
	const form = "give one that a command can end by, such as TERM, INT or QUIT"
	sig, err := signals.Parse(s)
	if err != nil {
		return 0, err
	}
	//exhaustive:ignore
	switch sig {
	case syscall.SIGKILL:
		return 0, fmt.Errorf("%q cannot be caught, and comes by itself when --grace is over: %s", s, form)
	case syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU:
		return 0, fmt.Errorf("%q suspends a command: %s", s, form)
	case syscall.SIGCHLD, syscall.SIGCONT, syscall.SIGURG:
		return 0, fmt.Errorf("%q does not end a command: %s", s, form)
	case 32, 33:
		// Source: signal(7), "Real-time signals": both C libraries use them for threads, and let no program catch them.
		return 0, fmt.Errorf("%q belongs to the C library: %s", s, form)
	}
	return sig, nil
}

func parseSlots(s string) (int, error) {
	n, err := strconv.Atoi(s)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%q is not a number: give 1 to %d", s, maxSlots)
	case err != nil || n < 1 || n > maxSlots:
		return 0, fmt.Errorf("%q is out of range: give 1 to %d", s, maxSlots)
	}
	return n, nil
}

func notEmpty(what string) func(string) error {
	return func(s string) error {
		if s == "" {
			return fmt.Errorf("it is empty: give %s, or leave it out", what)
		}
		return nil
	}
}

func checkReport(path string) error {
	if path == "-" {
		return errors.New("standard output belongs to the command: give a file (./- is one, and /dev/fd/3 a descriptor)")
	}
	return notEmpty("a file for the report")(path)
}

const maxHolder = 200

func checkHolder(s string) error {
	switch {
	case s == "":
		return errors.New("it is empty: give a label, or leave it out for the host name and pid")
	case len(s) > maxHolder:
		return fmt.Errorf("it has %d bytes: give at most %d", len(s), maxHolder)
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("%q has control characters or is not UTF-8: give a label for people", s)
	}
	return nil
}

// schemeOf returns the scheme of a URL that [all.Check] has passed.
func schemeOf(raw string, schemes map[string]backends.Scheme) string {
	name, _ := all.Check(raw, schemes) // it has passed
	return name
}

const masked = "xxxxx"

// shownParameters are those of stores whose values may be shown. Any other may be a secret, or one whose name was misspelt.
var shownParameters = []string{
	"ca", "cert", "connect_timeout", "datacenter", "db", "network", "partition", "replicas", "schema", "server-name", "session-ttl-min", "socket",
	"sslmode", "sslrootcert", "sslcert", "table", "target_session_attrs", "tls",
}

// mask writes a store's URL without what may be secret: the password, and the values of parameters that are not known to be harmless.
func mask(raw string) string {
	u, err := backends.ParseURL(raw)
	if err != nil {
		return masked
	}
	if i := strings.LastIndex(u.Opaque, "@"); i >= 0 {
		u.Opaque = masked + u.Opaque[i:]
	}
	pairs := strings.Split(u.RawQuery, "&")
	for i, p := range pairs {
		key, _, found := strings.Cut(p, "=")
		if plain, err := url.QueryUnescape(key); found && (err != nil || !slices.Contains(shownParameters, plain)) {
			pairs[i] = key + "=" + masked
		}
	}
	u.RawQuery = strings.Join(pairs, "&")
	return u.Redacted()
}
