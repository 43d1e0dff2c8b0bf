package cmd

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
)

// Flags that have no meaning for the one command or the other. As settings of the environment and of files they are known to both.
var (
	gateFlags = []string{"applied-if", "check-timeout"}
	runFlags  = []string{"slots", "once-per", "min-interval"}
)

const (
	defaultCheckTimeout = 30 * time.Second

	day    = 24 * time.Hour
	oneDay = "1d"
)

func (p *program) gateCommand() *cobra.Command {
	c := &cobra.Command{
		Use:               "gate [flags] ID -- COMMAND [ARG...]",
		Short:             "Run a command once for all",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: p.completeRun,
		RunE: func(c *cobra.Command, args []string) error {
			command, err := p.words(args, c.ArgsLenAtDash(), gateForm)
			if err != nil {
				return err
			}
			p.gate = true
			return p.runLease(command)
		},
	}
	p.addFlags(c, runFlags)
	return p.withHelp(c, gateHelp)
}

// addFlags gives c the flags of a run but for some. The values are the same: only one command runs.
func (p *program) addFlags(c *cobra.Command, except []string) {
	c.Flags().SortFlags = false
	p.flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(except, f.Name) {
			c.Flags().AddFlag(f)
		}
	})
	completeWords(c)
}

// leaveToRuns takes back what the environment or the top of a file says for runs and a gate has no use for. What stands in the gate's own section
// was meant for it.
func (p *program) leaveToRuns(w where) {
	for _, name := range runFlags {
		if from := w.origins[name]; from.Source != sourceSection && from.Source != sourceDefault {
			f := p.flags.Lookup(name)
			_ = f.Value.Set(f.DefValue) // it has been read before
			w.origins[name] = origin{Source: sourceDefault, Key: name}
		}
	}
}

// once is what the settings say about successes that there were already.
func (p *program) once() runner.Once {
	return runner.Once{Ever: p.gate, Per: p.s.oncePer, Interval: p.s.minInterval}
}

// parsePer reads the length of a slot of the UTC clock. Every day has a whole number of them.
func parsePer(s string) (time.Duration, error) {
	const form = "give a length that divides a day, such as 1h or 1d"
	if s == oneDay {
		return day, nil
	}
	d, err := parseDuration(s, 0, word{oneDay, day})
	switch {
	case err != nil:
		return 0, err
	case d == 0:
		return 0, nil
	case d < time.Second:
		return 0, fmt.Errorf("%q is too short: give at least 1s", s)
	case day%d != 0:
		return 0, fmt.Errorf("%q does not divide a day: %s", s, form)
	}
	return d, nil
}

func writePer(d time.Duration) string { return writeDuration(d, []word{{oneDay, day}}) }

// applied returns the check of --applied-if, or nil where the marker is asked.
func (p *program) applied() func(context.Context) (bool, error) {
	if !p.gate || p.s.appliedIf == "" {
		return nil
	}
	return func(ctx context.Context) (bool, error) { return p.askCheck(ctx) }
}

// askCheck runs the check: 0 says applied, 1 not applied. It reads nothing, and what it prints to standard output is dropped, since that
// belongs to the command. A process group of its own lets it be ended with everything that it waits for.
func (p *program) askCheck(ctx context.Context) (bool, error) {
	path, err := p.resolve("sh", p.environ)
	if err != nil {
		return false, &runner.CheckError{Text: err.Error()}
	}
	limited, cancel := context.WithTimeout(ctx, p.s.checkTimeout)
	defer cancel()
	c := exec.CommandContext(limited, path, "-c", p.s.appliedIf)
	c.Args[0] = "sh"
	c.Env = p.checkEnviron()
	c.Stderr = p.stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	err = c.Run()
	exit, exited := errors.AsType[*exec.ExitError](err)
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case limited.Err() != nil:
		return false, &runner.CheckError{Text: "the check did not end within --check-timeout " + runner.Short(p.s.checkTimeout)}
	case err == nil:
		return true, nil
	case exited && exit.ExitCode() == 1:
		return false, nil
	case exited && exit.Exited():
		return false, &runner.CheckError{Text: fmt.Sprintf("the check exited with %d, which is neither 0 (applied) nor 1 (not applied)", exit.ExitCode())}
	default:
		return false, &runner.CheckError{Text: "the check could not be run to its end: " + err.Error()}
	}
}

// checkEnviron is the environment of a check: ours, with the ID, and without what belongs to one run.
func (p *program) checkEnviron() []string {
	env := slices.DeleteFunc(slices.Clone(p.environ), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return name == nameFact || name == variableOf("report")
	})
	return append(env, nameFact+"="+p.lease)
}

const nameFact = variablePrefix + "NAME"

// uneventful reports whether --quiet has nothing to say: the command has not run, and need not or may not now; or a gate has done its work.
func uneventful(o runner.Outcome) bool {
	//exhaustive:ignore
	switch o {
	case runner.OutcomeBusy, runner.OutcomeSkipped, runner.OutcomeNotDue, runner.OutcomeApplied, runner.OutcomeMigrated:
		return true
	}
	return false
}

// reasonOf is the line about a result.
func (p *program) reasonOf(r runner.Result) string {
	switch {
	case r.Busy != nil && r.Outcome == runner.OutcomeBusy:
		return busyWords(r.Busy, p.wall())
	case r.Busy != nil && r.Outcome == runner.OutcomeSkipped:
		return "skipped" + strings.TrimPrefix(busyWords(r.Busy, p.wall()), "busy")
	case r.Done != nil && r.Outcome == runner.OutcomeApplied:
		return p.appliedWords(*r.Done)
	case r.Done != nil && r.Outcome == runner.OutcomeNotDue:
		return p.dueWords(*r.Done)
	}
	return r.Reason
}

func (p *program) appliedWords(d runner.Done) string {
	name, at := quoteLease(p.s.namespace, p.lease), clock(p.wall().Add(-d.Ago), p.wall())
	switch {
	case d.By != "":
		return fmt.Sprintf("already applied: the marker of %s was set by %s at %s", name, person(d.By), at)
	case d.Term != 0:
		return fmt.Sprintf("already applied: %s by %s at %s", name, person(d.Holder), at)
	case p.s.appliedIf != "":
		return fmt.Sprintf("already applied: %s, by the check of --applied-if", name)
	}
	return "already applied: " + name
}

func (p *program) dueWords(d runner.Done) string {
	at, next := p.times(d)
	next = next.Add(time.Second - 1).Truncate(time.Second) // up: nobody should come back too early for it
	return fmt.Sprintf("not due: %s last ran at %s (%s ago), and may run again at %s (in %s)", quoteLease(p.s.namespace, p.lease),
		clock(at, p.wall()), runner.Short(d.Ago.Truncate(time.Second)), clock(next, p.wall()), left(d.Left))
}

// times returns when a success began and when the command may run again. Those of a slot are of the store's clock, as the slot is; else
// they are of this host's, for only the durations are known.
func (p *program) times(d runner.Done) (at, next time.Time) {
	now := p.wall()
	if !d.Next.IsZero() {
		return d.At, d.Next
	}
	return now.Add(-d.Ago), now.Add(d.Left)
}

// done is the success that made a run needless.
type done struct {
	Holder *string        `json:"holder"` // null where it was no run, or is not known
	Term   *backends.Term `json:"term"`
	RunID  *string        `json:"run_id"`
	By     *string        `json:"by"`      // who set the marker by hand
	At     *time.Time     `json:"at"`      // when that run began; by the store's clock with a slot, else by this host's
	RanMs  *int64         `json:"ran_ms"`  // how long it ran
	NextAt *time.Time     `json:"next_at"` // when the command may run again, by the same clock; null: never
}

func (p *program) doneOf(d *runner.Done) *done {
	if d == nil {
		return nil
	}
	out := &done{}
	at, next := p.times(*d)
	if d.Term != 0 {
		out.Holder, out.Term, out.RunID, out.RanMs = &d.Holder, &d.Term, &d.RunID, new(d.Took.Milliseconds())
	}
	if d.By != "" {
		out.By = &d.By
	}
	if d.Term != 0 || d.By != "" {
		out.At = new(at.UTC().Truncate(time.Millisecond))
	}
	if d.Left != runner.Forever {
		out.NextAt = new(next.UTC().Truncate(time.Millisecond))
	}
	return out
}
