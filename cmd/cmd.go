// Package cmd is the command line of underlease.
//
// It promises three things. A value is refused in the same words wherever it came from: flag, environment and settings
// file go through one parser. Nothing is started and no store is asked before every setting has been checked. And what
// this program has to say goes to standard error and never blocks it: standard output belongs to the command, and nobody
// waits for the reader of a log.
//
// A run is one pass: settings, then the command's path, the report's file, the store, and then package runner, which
// alone decides; what comes back is printed once, as words or as a log record, written to the report, and becomes the exit
// code. The guardian process is started before all of that, while the packages are initialised, because the time that it
// takes to start is then hidden behind the reading of the settings; a run that fails early sends it away.
//
// Errors carry their exit code with them as a [failure]; no function but main's ends the process, except that a run whose
// command was ended by a signal ends by the same one.
package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

// deps is what the program needs of the world, and what its tests replace.
type deps struct {
	args           []string // without the program's name
	environ        []string
	stdout, stderr *os.File
	systemFile     string // the settings file of the host

	schemes map[string]backends.Scheme
	launch  func() (runner.Tree, error)                     // starts a guardian
	listen  func() <-chan syscall.Signal                    // signals from outside, from now on
	alarm   func() (runner.Alarm, error)                    // wakes the runner's loop up
	now     func() signals.Instant                          // the runner's clock
	wall    func() time.Time                                // the time of day, for people
	resolve func(name string, env []string) (string, error) // the path of a command
	open    func(context.Context, string) (*backends.Store, error)
	run     func(context.Context, runner.Spec, *backends.Store, runner.Platform) runner.Result
	dieBy   func(syscall.Signal)
}

// failure is an error that ends the program with a code of ours, before there was a command.
type failure struct {
	code       int
	outcome    runner.Outcome
	text, hint string
}

func (f *failure) Error() string { return f.text }

// usagef is a fault of the command line.
func usagef(hint, format string, args ...any) error {
	return &failure{runner.ExitUsage, runner.OutcomeInvalid, fmt.Sprintf(format, args...), hint}
}

// settingsf is a fault of the environment, of a file, or between settings.
func settingsf(hint, format string, args ...any) error {
	return &failure{runner.ExitSettings, runner.OutcomeInvalid, fmt.Sprintf(format, args...), hint}
}

// program is one execution.
type program struct {
	deps
	voice *voice
	code  int

	// Of run and config.
	s     settings
	flags *pflag.FlagSet
	lease string

	// Of run.
	guardian chan launched // launched early and not yet taken
	tree     runner.Tree   // the one that was taken last
	log      *slog.Logger
	report   *reportFile
	store    *backends.Store
}

type launched struct {
	tree runner.Tree
	err  error
}

// execute runs the command line and returns the exit code.
func execute(d deps) (code int) {
	p := &program{deps: d, voice: newVoice(d.stderr)}
	defer p.voice.close()
	defer func() {
		if x := recover(); x != nil {
			code = p.bug(x)
		}
	}()
	if signals.Wanted(d.args) {
		p.launchGuardian()
		defer p.dismissGuardian()
	}
	root := p.root()
	cmd, err := root.ExecuteC()
	if err == nil {
		return p.code
	}
	var f *failure
	if !errors.As(err, &f) {
		f = &failure{runner.ExitUsage, runner.OutcomeInvalid, err.Error(), ""}
	}
	if cmd.Name() == "run" {
		return p.refuse(f)
	}
	p.voice.say(f.text, f.hint)
	return f.code
}

// launchGuardian starts the guardian without waiting for it.
func (p *program) launchGuardian() {
	done := make(chan launched, 1) // p.guardian is the main goroutine's
	p.guardian = done
	go func() {
		t, err := p.launch()
		done <- launched{t, err}
	}()
}

// takeGuardian returns the guardian that was launched early, and later ones anew.
func (p *program) takeGuardian() (runner.Tree, error) {
	l := launched{}
	if early := p.guardian; early != nil {
		p.guardian = nil
		l = <-early
	} else {
		l.tree, l.err = p.launch()
	}
	if l.err == nil {
		p.tree = l.tree
	}
	return l.tree, l.err
}

// dismissGuardian ends a guardian that no run has taken.
func (p *program) dismissGuardian() {
	if p.guardian == nil {
		return
	}
	if l := <-p.guardian; l.err == nil {
		l.tree.Close()
		waitGone(l.tree, guardianEnd)
	}
}

// waitGone waits until a tree has told its end, for no longer than within.
func waitGone(tree runner.Tree, within time.Duration) {
	t := time.NewTimer(within)
	defer t.Stop()
	for {
		select {
		case _, ok := <-tree.Events():
			if !ok {
				return
			}
		case <-t.C:
			return
		}
	}
}

const (
	// A guardian that outlives us would be a process that this run has left behind: around us may be another underlease.
	guardianEnd = time.Second
	// The guardian goes on killing when we are gone.
	bugKill = 5 * time.Second
)

// bug reports a recovered panic. The tree is killed first: whoever lost track of it must not let it outlive the lease.
func (p *program) bug(x any) int {
	if p.tree != nil {
		p.tree.Kill()
		waitGone(p.tree, bugKill)
	}
	if p.s.logLevel == "debug" {
		_, _ = p.voice.Write(debug.Stack())
	}
	return p.finish(runner.Result{
		Outcome:  runner.OutcomeBug,
		Reason:   fmt.Sprintf("a bug of underlease: %v (at %s)", x, panicked()),
		Hint:     "please report it: https://github.com/underlease/underlease/issues",
		ExitCode: runner.ExitBug,
		Started:  p.tree != nil,
	})
}

// panicked returns the line that panicked. It is called by the deferred function's callee.
func panicked() string {
	pcs := make([]uintptr, 32)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs)])
	seen := false
	for {
		f, more := frames.Next()
		if seen && !strings.HasPrefix(f.Function, "runtime.") {
			file := f.File[strings.LastIndexByte(f.File, '/')+1:]
			return fmt.Sprintf("%s:%d", file, f.Line)
		}
		seen = seen || f.Function == "runtime.gopanic"
		if !more {
			return "an unknown place"
		}
	}
}

func (p *program) root() *cobra.Command {
	root := &cobra.Command{
		Use:               "underlease",
		Short:             "Run a command while holding a named lease",
		Args:              cobra.ArbitraryArgs,
		Version:           buildVersion().Version,
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				_, _ = p.voice.Write([]byte(rootHelp))
				p.code = runner.ExitUsage
				return nil
			}
			hint := "underlease --help lists the commands"
			if near := all.Nearest(args[0], commandNames(c)); near != "" {
				hint = "did you mean underlease " + near
			}
			return usagef(hint, "unknown command %q", args[0])
		},
	}
	root.SetArgs(p.args)
	root.SetOut(p.stdout)
	root.SetErr(p.voice)
	root.SetVersionTemplate("underlease {{.Version}}\n")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return p.flagError(c, err) })
	root.SetHelpFunc(func(c *cobra.Command, _ []string) {
		text := strings.TrimSpace(c.Long) + "\n"
		if c != root && c.HasAvailableFlags() {
			text += "\n" + c.UsageString()
		}
		if c == root {
			text = rootHelp
		}
		_, _ = io.WriteString(p.stdout, text)
	})
	root.CompletionOptions.DisableDefaultCmd = len(p.args) > 0 && p.args[0] == "run"
	root.AddCommand(p.runCommand(), p.configCommand(), p.versionCommand())
	return root
}

func commandNames(c *cobra.Command) []string {
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return names
}

// withHelp makes text the whole help of c.
func withHelp(c *cobra.Command, out io.Writer, text string) *cobra.Command {
	c.SetHelpFunc(func(*cobra.Command, []string) { _, _ = io.WriteString(out, text) })
	return c
}

// flagError says what is wrong with a flag in the words of its parser.
func (p *program) flagError(c *cobra.Command, err error) error {
	hint := ""
	if c.Name() == "run" && !slices.Contains(p.args, "--") {
		hint = runForm
	}
	var (
		unknown *pflag.NotExistError
		bad     *pflag.InvalidValueError
		missing *pflag.ValueRequiredError
		syntax  *pflag.InvalidSyntaxError
	)
	switch {
	case errors.As(err, &bad):
		if h := backends.Hint(bad.Unwrap()); h != "" {
			hint = h
		}
		return usagef(hint, "--%s: %v", bad.GetFlag().Name, bad.Unwrap())
	case errors.As(err, &missing):
		return usagef(hint, "--%s needs a value: give one %s", missing.GetFlag().Name, missing.GetFlag().Value.Type())
	case errors.As(err, &syntax):
		return usagef(hint, "%q is not a flag", syntax.GetSpecifiedFlag())
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() != "":
		return usagef(hint, "unknown flag -%s", unknown.GetSpecifiedName())
	case errors.As(err, &unknown):
		var names []string
		c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := all.Nearest(unknown.GetSpecifiedName(), names); near != "" && hint == "" {
			hint = "did you mean --" + near
		}
		return usagef(hint, "unknown flag --%s", unknown.GetSpecifiedName())
	default:
		return usagef(hint, "%v", err)
	}
}
