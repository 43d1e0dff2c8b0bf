package cmd

import (
	"errors"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

const checkForm = "write it as: underlease check [--for D] [--print]"

// exitNo is what a check says when the answer is no, as test(1) and grep(1) do. What cannot be known is [runner.ExitLost].
const exitNo = 1

func (p *program) checkCommand() *cobra.Command {
	var (
		atLeast time.Duration
		show    bool
	)
	c := &cobra.Command{
		Use:               "check [--for D] [--print]",
		Short:             "Ask, inside the command, whether there is still time",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef(checkForm, "%q stands after check", args[0])
			}
			return p.check(atLeast, show)
		},
	}
	add(c.Flags(), &atLeast, "for", 0, "duration",
		func(v string) (time.Duration, error) { return parseDuration(v, 0) },
		func(d time.Duration) string { return writeDuration(d, nil) })
	flag(c.Flags(), &show, "print", "")
	return p.withHelp(c, checkHelp)
}

// check asks the guardian of the command that this process belongs to.
func (p *program) check(atLeast time.Duration, show bool) error {
	socket, ok := lookup(p.environ, runner.FactSocket)
	if !ok || socket == "" {
		return &failure{
			runner.ExitLost, runner.OutcomeInvalid, "there is no lease around this process: " + runner.FactSocket + " is not set",
			"underlease run sets it for a command that has a lease",
		}
	}
	s, err := p.ask(socket)
	if err == nil && s.Term == "" {
		err = errors.New("the guardian knows of no lease")
	}
	if err != nil {
		return &failure{
			runner.ExitLost, runner.OutcomeInvalid, "cannot know whether there is still time: " + err.Error(),
			"its run is over, or this process is in a network namespace of its own",
		}
	}
	left := s.Left
	if s.Stage != signals.StageHolding {
		left = 0
	}
	if show {
		text := "never\n"
		if left != math.MaxInt64 {
			text = strconv.FormatInt(int64(left/time.Second), 10) + "\n"
		}
		_, _ = io.WriteString(p.out, text) // the error is kept
	}
	switch {
	case s.Stage == signals.StageDraining:
		p.voice.say("no time left: a signal has asked the command to finish", "")
	case s.Stage != signals.StageHolding:
		p.voice.say("no time left: the command is being stopped", "")
	case left < atLeast:
		p.voice.say(runner.Short(left.Truncate(time.Second))+" left before the command would be stopped, less than "+runner.Short(atLeast), "")
	default:
		return nil
	}
	p.code = exitNo
	return nil
}
