package cmd

import (
	"context"
	"maps"
	"os"
	"syscall"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

// Main runs the program and returns its exit code.
func Main() int { return MainWith(nil) }

// MainWith is [Main] with further kinds of stores, by the scheme of their URLs.
func MainWith(further map[string]backends.Scheme) int {
	schemes := all.Schemes()
	maps.Copy(schemes, further)
	return execute(deps{
		args:       os.Args[1:],
		environ:    syscall.Environ(),
		stdout:     os.Stdout,
		stderr:     os.Stderr,
		systemFile: "/etc/" + userFile,
		schemes:    schemes,
		launch: func() (runner.Tree, error) {
			g, err := signals.Launch(signals.Options{DropInherited: true})
			if err != nil {
				return nil, err
			}
			return g, nil
		},
		listen: func() <-chan syscall.Signal {
			c, _ := signals.Listen() // until the end of the process
			return c
		},
		alarm: func() (runner.Alarm, error) {
			a, err := signals.NewAlarm()
			if err != nil {
				return nil, err
			}
			return a, nil
		},
		now:     signals.Now,
		wall:    time.Now, //nolint:forbidigo // the time of day in words to people decides nothing
		isolate: signals.Isolation.Possible,
		resolve: signals.Resolve,
		open: func(ctx context.Context, rawURL string) (*backends.Store, error) {
			return all.Open(ctx, rawURL, schemes)
		},
		run:   runner.Run,
		dieBy: signals.DieBy,
		ask:   signals.Ask,
	})
}
