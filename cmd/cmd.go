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
	"io/fs"
	"log/slog"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
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
	isolate func(signals.Isolation) error                   // why an isolation cannot be had
	resolve func(name string, env []string) (string, error) // the path of a command
	open    func(context.Context, string) (*backends.Store, error)
	run     func(context.Context, runner.Spec, *backends.Store, runner.Platform) runner.Result
	dieBy   func(syscall.Signal)
	ask     func(socket string) (signals.Standing, error) // a guardian
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
	out   *output
	code  int

	// Of run and config.
	s     settings
	flags *pflag.FlagSet
	lease string // or the ID of a gate
	gate  bool

	// Of run.
	guardian chan launched  // launched early and not yet taken
	trees    []*watchedTree // those that were taken
	log      *slog.Logger
	report   *reportFile
	store    *backends.Store
	settled  bool // the settings are known
}

type launched struct {
	tree runner.Tree
	err  error
}

// watchedTree is a tree that knows whether a command was started in it.
type watchedTree struct {
	runner.Tree
	started atomic.Bool // it was, or may have been
}

func (t *watchedTree) Start(c signals.Command, d signals.Deadlines) (pid int, err error) {
	t.started.Store(true) // nobody knows better after a panic in the midst of it
	pid, err = t.Tree.Start(c, d)
	// Only the guardian's own refusal says that there is no command.
	_, refused := errors.AsType[*signals.StartError](err)
	t.started.Store(!refused)
	return pid, err
}

// output is standard output as this program itself uses it. It keeps the first error: what was printed for a machine is
// worth nothing when a part of it is missing.
type output struct {
	f   *os.File
	err error
}

func (o *output) Write(b []byte) (int, error) {
	n, err := o.f.Write(b)
	if o.err == nil && err != nil {
		o.err = err
		if p, ok := errors.AsType[*fs.PathError](err); ok {
			o.err = p.Err
		}
	}
	return n, err
}

// execute runs the command line and returns the exit code.
func execute(d deps) (code int) {
	p := &program{deps: d, voice: newVoice(d.stderr), out: &output{f: d.stdout}}
	defer p.voice.close()
	defer p.dismissGuardians() // after a bug its tree is killed first
	defer func() {
		if x := recover(); x != nil {
			code = p.bug(x)
		}
	}()
	if signals.Wanted(d.args) {
		p.launchGuardian()
	}
	cmd, err := p.start()
	if p.out.err != nil {
		p.voice.say("cannot write to standard output: "+p.out.err.Error(), "")
		return runner.ExitSystem
	}
	if err == nil {
		return p.code
	}
	var f *failure
	if !errors.As(err, &f) {
		f = &failure{runner.ExitUsage, runner.OutcomeInvalid, err.Error(), ""}
	}
	if cmd.Name() == "run" || cmd.Name() == "gate" {
		return p.refuse(f)
	}
	p.voice.say(f.text, f.hint)
	return f.code
}

// start parses the command line and does what it asks for. Of a check, which a command may make often, nothing else is built.
func (p *program) start() (*cobra.Command, error) {
	if len(p.args) > 0 && p.args[0] == "check" {
		c := p.checkCommand()
		c.SetArgs(p.args[1:])
		p.prepare(c)
		return c.ExecuteC()
	}
	return p.root().ExecuteC()
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
	if l.err != nil {
		return nil, l.err
	}
	t := &watchedTree{Tree: l.tree}
	p.trees = append(p.trees, t)
	return t, nil
}

// dismissGuardians ends the guardians that have no command, whether a run has taken them or not, and waits for their end: one
// that outlives us would be a process that this run has left behind, and around us may be another underlease. The second
// call does nothing.
func (p *program) dismissGuardians() {
	var idle []runner.Tree
	if p.guardian != nil {
		if l := <-p.guardian; l.err == nil {
			idle = append(idle, l.tree)
		}
		p.guardian = nil
	}
	p.trees = slices.DeleteFunc(p.trees, func(t *watchedTree) bool {
		if t.started.Load() {
			return false
		}
		idle = append(idle, t.Tree)
		return true
	})
	for _, t := range idle {
		t.Close()
	}
	for _, t := range idle {
		waitGone(t, guardianEnd)
	}
}

// started reports whether there was a command, as far as anybody knows.
func (p *program) started() bool {
	return slices.ContainsFunc(p.trees, func(t *watchedTree) bool { return t.started.Load() })
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
	// How long the end of a guardian without a command is waited for.
	guardianEnd = time.Second
	// The guardian goes on killing when we are gone.
	bugKill = 5 * time.Second
)

// bug reports a recovered panic. The tree is killed first: whoever lost track of it must not let it outlive the lease.
func (p *program) bug(x any) int {
	for _, t := range p.trees {
		t.Kill()
	}
	for _, t := range p.trees {
		waitGone(t, bugKill)
	}
	stack := debug.Stack()
	if b, ok := x.(*runner.Bug); ok { // it arose beside the decision, on a stack of its own
		stack = b.Stack
	}
	if p.s.logLevel == "debug" {
		_, _ = p.voice.Write(stack)
	}
	return p.finish(runner.Result{
		Outcome:  runner.OutcomeBug,
		Reason:   fmt.Sprintf("a bug of underlease: %v (at %s)", x, panicked(string(stack))),
		Hint:     "please report it: https://github.com/underlease/underlease/issues",
		ExitCode: runner.ExitBug,
		Started:  p.started(),
	})
}

// panicked returns the line that panicked, from a stack as [debug.Stack] writes it: after the line of panic itself, two lines
// a call, function and place.
func panicked(stack string) string {
	seen, inside := false, false
	for line := range strings.Lines(stack) {
		place, ok := strings.CutPrefix(line, "\t")
		switch {
		case !ok:
			inside = seen && !strings.HasPrefix(line, "runtime.") && !strings.HasPrefix(line, "panic(")
			seen = seen || strings.HasPrefix(line, "panic(")
		case inside:
			place, _, _ = strings.Cut(strings.TrimSpace(place), " ")
			return place[strings.LastIndexByte(place, '/')+1:]
		}
	}
	return "an unknown place"
}

func (p *program) root() *cobra.Command {
	version := false
	root := &cobra.Command{
		Use:               "underlease",
		Short:             "Run a command while holding a named lease",
		Args:              cobra.ArbitraryArgs,
		DisableAutoGenTag: true,
		RunE: func(c *cobra.Command, args []string) error {
			if version {
				_, _ = io.WriteString(p.out, "underlease "+buildVersion().Version+"\n") // the error is kept
				return nil
			}
			if len(args) == 0 {
				_, _ = p.voice.Write([]byte(rootHelp))
				p.code = runner.ExitUsage
				return nil
			}
			return unknownCommand(c, args[0])
		},
	}
	root.SetArgs(p.args)
	p.prepare(root)
	// Cobra's own flag needs text/template, by which the linker keeps every exported method of every type: 10 MB.
	root.Flags().BoolVarP(&version, "version", "v", false, "show the version")
	root.SetHelpFunc(func(c *cobra.Command, _ []string) {
		text := strings.TrimSpace(c.Long) + "\n"
		if c != root && c.HasAvailableFlags() {
			text += "\n" + c.UsageString()
		}
		if c == root {
			text = rootHelp
		}
		_, _ = io.WriteString(p.out, text) // the error is kept
	})
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(p.runCommand(), p.checkCommand(), p.configCommand(), p.schemaCommand(), p.versionCommand(), p.completionCommand())
	root.SetHelpCommand(p.helpCommand(root))
	if len(p.args) == 0 || p.args[0] != "run" { // which need not wait for the flags of commands that it is not
		root.AddCommand(p.gateCommand(), p.markerCommand(), p.listCommand(), p.statusCommand())
	}
	return root
}

func unknownCommand(root *cobra.Command, name string) error {
	hint := "underlease --help lists the commands"
	if near := all.Nearest(name, commandNames(root)); near != "" {
		hint = "did you mean underlease " + near
	}
	return usagef(hint, "unknown command %q", name)
}

// prepare makes c speak as this program does.
func (p *program) prepare(c *cobra.Command) {
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetOut(p.out)
	c.SetErr(p.voice)
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return p.flagError(c, err) })
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
func (p *program) withHelp(c *cobra.Command, text string) *cobra.Command {
	c.SetHelpFunc(func(*cobra.Command, []string) { _, _ = io.WriteString(p.out, text) }) // the error is kept
	return c
}

// helpCommand is cobra's own, except that a word which is no command is refused.
func (p *program) helpCommand(root *cobra.Command) *cobra.Command {
	c := &cobra.Command{
		Use:               "help [COMMAND]",
		Hidden:            true,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return root.Help()
			case len(args) > 1:
				return usagef("underlease help [COMMAND]", "%q stands after the name of the command", args[1])
			}
			for _, sub := range root.Commands() {
				if sub.Name() == args[0] {
					return sub.Help()
				}
			}
			return unknownCommand(root, args[0])
		},
	}
	return p.withHelp(c, rootHelp)
}

func (p *program) completionCommand() *cobra.Command {
	shells := []string{"bash", "zsh", "fish"}
	const form = "write it as: underlease completion bash, zsh or fish"
	c := &cobra.Command{
		Use:               "completion SHELL",
		Short:             "Print a completion script",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.FixedCompletions(shells, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(c *cobra.Command, args []string) error {
			switch len(args) {
			case 0:
				return usagef(form, "the name of a shell is missing")
			case 1:
			default:
				return usagef(form, "%q stands after the name of the shell", args[1])
			}
			switch args[0] {
			case "bash":
				return c.Root().GenBashCompletionV2(p.out, true)
			case "zsh":
				return c.Root().GenZshCompletion(p.out)
			case "fish":
				return c.Root().GenFishCompletion(p.out, true)
			}
			hint := form
			if near := all.Nearest(args[0], shells); near != "" {
				hint = "did you mean underlease completion " + near
			}
			return usagef(hint, "there is no completion for %q", args[0])
		},
	}
	return p.withHelp(c, completionHelp)
}

// flagError says what is wrong with a flag in the words of its parser.
func (p *program) flagError(c *cobra.Command, err error) error {
	hint := ""
	if form := formOf(c.Name()); form != "" && !slices.Contains(p.args, "--") {
		hint = form
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
		if near := all.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			hint = "did you mean --" + near
		}
		return usagef(hint, "unknown flag --%s", unknown.GetSpecifiedName())
	default:
		return usagef(hint, "%v", err)
	}
}
