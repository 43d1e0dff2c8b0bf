package cmd

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

const defaultTTL = 60 * time.Second

func (p *program) runCommand() *cobra.Command {
	p.flags = newFlags(&p.s, p.schemes)
	c := &cobra.Command{
		Use:               "run [flags] NAME -- COMMAND [ARG...]",
		Short:             "Run a command under a lease",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: p.completeRun,
		RunE: func(c *cobra.Command, args []string) error {
			command, err := p.words(args, c.ArgsLenAtDash(), runForm)
			if err != nil {
				return err
			}
			return p.runLease(command)
		},
	}
	p.addFlags(c, gateFlags)
	return p.withHelp(c, runHelp)
}

// words takes the command line apart. Dash is how many words stand before "--", or negative where there is none.
func (p *program) words(args []string, dash int, form string) (command []string, err error) {
	what := "the name of the lease"
	if form == gateForm {
		what = "the ID"
	}
	switch {
	case dash < 0 && len(args) == 0:
		return nil, usagef(form, "%s and the command are missing", what)
	case dash < 0:
		return nil, usagef(form, "-- is missing between %s and the command", what)
	case dash == 0:
		return nil, usagef(form, "%s is missing before --", what)
	case dash > 1:
		return nil, usagef(form, "%q stands between %s %q and --", args[1], what, args[0])
	case len(args) == 1:
		return nil, usagef(form, "the command is missing after --")
	case args[1] == "":
		return nil, usagef(form, "the command after -- is empty")
	}
	if err := backends.CheckLease(args[0]); err != nil {
		return nil, usagef("", "%v", err)
	}
	p.lease = args[0]
	return args[1:], nil
}

// loadSettings fills p.s and returns where each value came from.
func (p *program) loadSettings() (where, error) {
	files, err := readSettings(p.flags, p.environ, p.systemFile)
	if err != nil {
		return where{}, err
	}
	w, err := load(p.flags, p.lease, p.environ, files)
	if err != nil {
		return w, err
	}
	if p.gate {
		p.leaveToRuns(w)
	}
	if err := p.s.settle(&w, p.flags); err != nil {
		return w, err
	}
	if w.origins["ttl"].Source == sourceDefault && !p.schemes[schemeOf(p.s.backend, p.schemes)].Endless {
		p.s.ttl = defaultTTL
	}
	p.settled = true
	return w, nil
}

// openStore opens the store that the settings name.
func (p *program) openStore(ctx context.Context, w where) (*backends.Store, error) {
	s, err := p.open(ctx, p.s.backend)
	return s, w.ofBackend(err)
}

// ofBackend lets an error that is about the store's URL begin with where that stands.
func (w where) ofBackend(err error) error {
	c, ok := errors.AsType[*backends.ConfigError](err)
	if !ok || w.origins["backend"].Source == sourceDefault {
		return err
	}
	return backends.Configf(c.Hint, "%v: %s", w.origins["backend"], c.Text)
}

// spec turns the settings into what the runner takes, with the defaults that follow from others filled in.
func (p *program) spec() (runner.Spec, error) {
	s := &p.s
	spec := runner.Spec{
		Namespace: s.namespace, Lease: p.lease, Holder: s.holder, Slots: s.slots,
		TTL: s.ttl, Wait: s.wait, IfUnavailable: s.ifUnavailable, MinHold: s.minHold, Once: p.once(),
		MaxRun: s.maxRun, Drain: s.drain, Grace: s.grace, Margin: s.margin, RenewEvery: s.renewEvery,
		ClockDrift: s.clockDrift, OnLost: s.onLost, StopSignal: s.stopSignal, Leftovers: s.leftovers,
		Isolate: s.isolate,
	}
	err := spec.Settle(p.schemes[schemeOf(s.backend, p.schemes)].Endless)
	if r, ok := errors.AsType[*runner.RelationError](err); ok {
		err = settingsf(r.Hint, "%s", r.Text)
	}
	return spec, err
}

// startLog makes the logger that the settings ask for.
func (p *program) startLog() {
	level := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}[p.s.logLevel]
	if p.s.verbose {
		level = min(level, slog.LevelInfo)
	}
	p.log = newLogger(p.voice, p.s.logFormat, level)
}

// notice says one line at once.
func (p *program) notice(line, hint string) {
	if p.s.logFormat != formatJSON {
		p.voice.say(line, hint)
		return
	}
	attrs := []slog.Attr{slog.String("text", line)}
	if hint != "" {
		attrs = append(attrs, slog.String("hint", hint))
	}
	p.log.LogAttrs(context.Background(), slog.LevelWarn, "notice", attrs...)
}

// warn says one line that is not worth more than --log-level warn.
func (p *program) warn(line, hint string) {
	if p.log.Enabled(context.Background(), slog.LevelWarn) {
		p.notice("warning: "+line, hint)
	}
}

func (p *program) warnStrange(w where) {
	for _, v := range w.strange {
		hint := ""
		if v.nearest != "" {
			hint = "did you mean " + v.nearest
		}
		p.warn(v.name+" is in the environment, and is not a setting", hint)
	}
}

func (p *program) runLease(command []string) error {
	w, err := p.loadSettings()
	if err != nil {
		return err
	}
	p.startLog()
	p.warnStrange(w)
	spec, err := p.spec()
	if err != nil {
		return err
	}
	if spec.TTL != 0 && spec.TTL < runner.WarnTTL {
		p.warn("--ttl "+runner.Short(spec.TTL)+" is below "+runner.Short(runner.WarnTTL)+": a store that is away for a moment stops the command", "")
	}
	if spec.Holder == "" {
		host, _ := os.Hostname() // the label is for people: without a name it is localhost
		spec.Holder = newHolder(host, os.Getpid())
	}
	p.s.holder = spec.Holder
	if err := p.isolate(spec.Isolate); err != nil {
		return settingsf("--isolate auto takes the strongest that can be had without side effects", "%v %s: %v", w.origins["isolate"], spec.Isolate, err)
	}
	if spec.Path, err = p.resolve(command[0], p.environ); err != nil {
		code, hint := runner.ExitCannotRun, backends.Hint(err)
		if r, ok := errors.AsType[*signals.ResolveError](err); ok && r.NotFound() {
			code, hint = runner.ExitNotFound, p.notFound(command)
		}
		return &failure{code, runner.OutcomeNotStarted, err.Error(), hint}
	}
	if pid, _ := lookup(p.environ, "LISTEN_PID"); pid == strconv.Itoa(os.Getpid()) && !signals.Exact() {
		p.warn("LISTEN_PID names this process and not the command, which will not take its sockets",
			"releases for Linux on amd64 and arm64 pass them on: see underlease version")
	}
	spec.Args, spec.Env = command, p.environ
	if p.s.report != "" {
		if p.report, err = openReport(p.s.report); err != nil {
			return settingsf("", "%v: %v", w.origins["report"], err)
		}
	}
	ctx := context.Background()
	if p.store, err = p.openStore(ctx, w); err != nil {
		if f := openFailure(err); f != nil {
			return f
		}
		p.store = &backends.Store{Backend: unopened{err: err}, Address: mask(p.s.backend), Scheme: schemeOf(p.s.backend, p.schemes)}
		spec.Wait = 0 // what is wrong with this host is not mended by waiting
	}
	defer func() { _ = p.store.Close() }() // nothing of the run depends on it any more

	outside := p.listen()
	alarm, err := p.alarm()
	if err != nil {
		return &failure{runner.ExitSystem, runner.OutcomeNotStarted, err.Error(), ""}
	}
	defer alarm.Close()
	platform := runner.Platform{
		Launch: p.takeGuardian, Now: p.now, Alarm: alarm, Signals: outside,
		Log: p.log, Say: p.notice, Applied: p.applied(),
	}
	if term, _ := lookup(p.environ, "TERM"); p.s.logFormat == formatText && terminalWidth(p.stderr, term) > 0 {
		platform.Waiting = func(w runner.Waiting) {
			if w.Done {
				p.voice.draw("")
				return
			}
			p.voice.draw(fit(waitingWords(w, p.wall()), terminalWidth(p.stderr, term)))
		}
	}
	p.code = p.finish(p.run(ctx, spec, p.store, platform))
	return nil
}

// notFound is what to do about a command that was not found.
func (p *program) notFound(command []string) string {
	switch path, set := lookup(p.environ, "PATH"); {
	case len(command) == 1 && strings.ContainsAny(command[0], " \t"):
		return "write the command and its arguments as words of their own, or sh -c and one text"
	case strings.Contains(command[0], "/"):
		return ""
	case !set:
		return "PATH is not set"
	default:
		return "PATH is " + strconv.Quote(path)
	}
}

// openFailure is what it means that a store could not be opened, or nil where it is unavailable: out of descriptors, or with a
// disk that fails. Then --if-unavailable decides, for the runner, which is handed an [unopened] store.
func openFailure(err error) error {
	f := &failure{text: err.Error(), hint: backends.Hint(err)}
	var c *backends.ConfigError
	switch {
	case errors.As(err, &c):
		f.code, f.outcome = runner.ExitSettings, runner.OutcomeInvalid
	case errors.Is(err, backends.ErrDenied):
		f.code, f.outcome = runner.ExitDenied, runner.OutcomeDenied
	case errors.Is(err, backends.ErrBroken):
		f.code, f.outcome = runner.ExitBroken, runner.OutcomeBroken
	default:
		return nil
	}
	return f
}

// unopened is a store that could not be opened: whatever a run without a lease asks of it fails for that reason.
type unopened struct {
	backends.Backend // nil: there is no grant, so that nothing else is called
	err              error
}

func (u unopened) Acquire(context.Context, backends.Request) (backends.Grant, error) {
	return backends.Grant{}, u.err
}

func (u unopened) Release(context.Context, backends.Grant, backends.End) error { return u.err }

func (u unopened) Inspect(context.Context, string, string) (backends.State, error) {
	return backends.State{}, u.err
}

func (u unopened) Close() error { return nil }

// refuse ends a run that never came to the runner.
func (p *program) refuse(f *failure) int {
	if p.log == nil {
		if format, ok := p.early("log-format"); ok && logFormat(format) == formatJSON {
			p.s.logFormat = formatJSON
		}
		p.startLog()
	}
	if p.report == nil {
		if path, ok := p.early("report"); ok && checkReport(path) == nil {
			p.report, _ = openReport(path) // the error at hand is the one to tell
		}
	}
	return p.finish(runner.Result{Outcome: f.outcome, Reason: f.text, Hint: f.hint, ExitCode: f.code})
}

// early returns the text of a setting while the settings are not known, because one of them cannot be read: from what was
// parsed, from the rest of the command line, or from the environment.
func (p *program) early(name string) (string, bool) {
	if f := p.flags.Lookup(name); f.Changed || f.Value.String() != f.DefValue {
		return f.Value.String(), true
	}
	args := p.args
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	for i, a := range args {
		if text, ok := strings.CutPrefix(a, "--"+name+"="); ok {
			return text, true
		}
		if a == "--"+name && i+1 < len(args) {
			return args[i+1], true
		}
	}
	return lookup(p.environ, variableOf(name))
}

// finish says how a run ended, once, writes the report, and returns the exit code.
func (p *program) finish(r runner.Result) int {
	code := r.ExitCode
	if code == runner.ExitBusy && !r.Started {
		code = p.s.busyExit
	}
	if r.Signal != 0 {
		code = 128 + int(r.Signal)
	}
	p.tell(r, code)
	if p.report != nil {
		if err := p.report.write(p.reportOf(r, code)); err != nil {
			p.notice("cannot write the report: "+err.Error(), "")
		}
	}
	p.dismissGuardians()
	if r.Signal != 0 {
		p.voice.close()
		p.dieBy(r.Signal) // returns where the kernel does not let it: as the first process of a container
	}
	return code
}

func (p *program) tell(r runner.Result, code int) {
	skipped := r.Outcome == runner.OutcomeUnavailable && p.s.ifUnavailable == runner.UnavailableSkip
	quiet := p.s.quiet && (uneventful(r.Outcome) || skipped)
	reason := p.reasonOf(r)
	if skipped {
		reason = "skipped: " + reason
	}
	if p.s.logFormat != formatJSON {
		switch {
		case quiet:
		case reason != "":
			p.voice.say(reason, r.Hint)
		}
		return
	}
	if quiet || r.Started && r.Reason == "" {
		return // the runner has logged the end of a run that went well
	}
	attrs := []slog.Attr{
		slog.String("outcome", string(r.Outcome)), slog.Int("exit_code", code),
		slog.String("lease", p.lease), slog.String("namespace", p.s.namespace), slog.Int64("term", int64(r.Grant.Term)),
		slog.Duration("waited_for", r.Waited), slog.Duration("held_for", r.Held),
	}
	if reason != "" {
		attrs = append(attrs, slog.String("reason", reason))
	}
	if r.Hint != "" {
		attrs = append(attrs, slog.String("hint", r.Hint))
	}
	if p.log == nil {
		p.startLog()
	}
	p.log.LogAttrs(context.Background(), levelOf(r.Outcome), "outcome", attrs...)
}

func levelOf(o runner.Outcome) slog.Level {
	switch o {
	case runner.OutcomeOK, runner.OutcomeFailed, runner.OutcomeStopped, runner.OutcomeInterrupted,
		runner.OutcomeMigrated, runner.OutcomeApplied:
		return slog.LevelInfo
	case runner.OutcomeBusy, runner.OutcomeSkipped, runner.OutcomeNotDue, runner.OutcomeDrainedOut, runner.OutcomeMaxRun:
		return slog.LevelWarn
	case runner.OutcomeLostTaken, runner.OutcomeLostExpired, runner.OutcomeLostUnreachable, runner.OutcomeGuardianLost,
		runner.OutcomeBug, runner.OutcomeNotStarted, runner.OutcomeUnavailable, runner.OutcomeDenied, runner.OutcomeBroken,
		runner.OutcomeNested, runner.OutcomeInvalid, runner.OutcomeUnrecorded:
		return slog.LevelError
	}
	return slog.LevelError
}

// completeWords lets a shell complete the values of flags that take one of a few words.
func completeWords(c *cobra.Command) {
	for name, words := range map[string][]string{
		"on-busy":        {busySkip, busyWait},
		"if-unavailable": {string(runner.UnavailableFail), string(runner.UnavailableSkip), string(runner.UnavailableRun)},
		"on-lost":        {string(runner.LostKill), string(runner.LostTerm)},
		"leftovers":      {"kill", "wait", "ignore"},
		"isolate":        {"auto", "tree", "cgroup", "pidns"},
		"log-level":      {"debug", "info", "warn", "error"},
		"log-format":     {string(formatText), string(formatJSON)},
		"stop-signal":    {"TERM", "INT", "HUP", "QUIT", "USR1", "USR2"},
	} {
		_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // fails for an unknown flag alone
	}
}
