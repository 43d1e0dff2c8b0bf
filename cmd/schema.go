package cmd

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
)

const schemaForm = "write it as: underlease schema print|apply [--backend URL]"

// applyLimit is how long a store may take to make its tables: others that do the same are waited for.
const applyLimit = 30 * time.Second

func (p *program) schemaCommand() *cobra.Command {
	words := []string{"print", "apply"}
	c := &cobra.Command{
		Use:               "schema print|apply [flags]",
		Short:             "Show or make the tables that a database needs",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usagef(schemaForm, "print or apply is missing")
			case len(args) > 1:
				return usagef(schemaForm, "%q stands after %s", args[1], args[0])
			case args[0] != words[0] && args[0] != words[1]:
				hint := schemaForm
				if near := all.Nearest(args[0], words); near != "" {
					hint = "did you mean underlease schema " + near
				}
				return usagef(hint, "schema cannot %q", args[0])
			}
			return p.schema(args[0] == words[1])
		},
	}
	c.Flags().SortFlags = false
	c.Flags().AddFlagSet(p.flags) // the same values: only one of the commands runs
	completeWords(c)
	return p.withHelp(c, schemaHelp)
}

func (p *program) schema(apply bool) error {
	w, err := p.loadSettings()
	if err != nil {
		return err
	}
	p.startLog()
	p.warnStrange(w)
	var text string
	if apply {
		ctx, cancel := context.WithTimeout(context.Background(), applyLimit)
		defer cancel()
		text, err = all.Apply(ctx, p.s.backend, p.schemes)
		text += "\n"
	} else {
		text, err = all.Schema(p.s.backend, p.schemes)
	}
	if err = w.ofBackend(err); err != nil {
		if f := openFailure(err); f != nil {
			return f
		}
		return &failure{runner.ExitUnavailable, runner.OutcomeUnavailable, err.Error(), backends.Hint(err)}
	}
	_, _ = io.WriteString(p.out, text) // the error is kept
	return nil
}
