package cmd

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/underlease/underlease/backends"
)

// configVersion changes when a reader of config --json has to.
const configVersion = 1

type configReport struct {
	Version  int             `json:"version"`
	Lease    *string         `json:"lease"` // whose section counts
	Files    []configFile    `json:"files"` // in the order in which they are read
	Settings []configSetting `json:"settings"`
}

type configFile struct {
	Path string `json:"path"`
	Read bool   `json:"read"` // false: there is none
}

type configSetting struct {
	Name   string  `json:"name"`
	Value  string  `json:"value"`  // as a flag would take it, without secrets
	Source string  `json:"source"` // flag, environment, lease, file or default
	From   *string `json:"from"`   // the flag, the variable, or the file
	Line   *int    `json:"line"`   // of the file
}

func (p *program) configCommand() *cobra.Command {
	asJSON := false
	c := &cobra.Command{
		Use:               "config [flags] [NAME]",
		Short:             "Show the settings in force, and where each came from",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) > 1:
				return usagef("underlease config [flags] [NAME]", "%q stands after the name of the lease %q", args[1], args[0])
			case len(args) == 1:
				if err := backends.CheckLease(args[0]); err != nil {
					return usagef("", "%v", err)
				}
				p.lease = args[0]
			}
			return p.showConfig(asJSON)
		},
	}
	c.Flags().SortFlags = false
	c.Flags().AddFlagSet(p.flags) // the same values: only one of the two commands runs
	c.Flags().BoolVar(&asJSON, "json", false, "")
	completeWords(c)
	return p.withHelp(c, configHelp)
}

// showConfig prints the settings also where they do not fit together, and then says so.
func (p *program) showConfig(asJSON bool) error {
	w, err := p.loadSettings()
	if err != nil {
		return err
	}
	p.startLog()
	p.warnStrange(w)
	spec, relation := p.spec()
	if relation == nil {
		p.s.grace, p.s.margin, p.s.renewEvery = spec.Grace, spec.Margin, spec.RenewEvery
	}
	out := configReport{Version: configVersion, Files: []configFile{}}
	if p.lease != "" {
		out.Lease = &p.lease
	}
	for _, f := range w.files {
		out.Files = append(out.Files, configFile{f.path, f.data != nil})
	}
	p.flags.VisitAll(func(f *pflag.Flag) {
		from := w.origins[f.Name]
		s := configSetting{Name: f.Name, Value: f.Value.String(), Source: from.Source}
		switch f.Name {
		case "backend":
			s.Value = mask(s.Value)
		case "applied-if":
			// The passwords of URLs in it. What else in a command is secret nobody can tell.
			s.Value = regexp.MustCompile(`(://[^\s/@:]*:)[^\s/@]+@`).ReplaceAllString(s.Value, "${1}"+masked+"@")
		}
		switch from.Source {
		case sourceFlag:
			s.From = &from.Flag
		case sourceEnvironment:
			s.From = &from.Variable
		case sourceFile, sourceSection:
			s.From, s.Line = &from.File, &from.Line
		}
		out.Settings = append(out.Settings, s)
	})
	if asJSON {
		err = writeJSON(p.out, out)
	} else {
		err = writeConfig(p.out, out)
	}
	if err != nil {
		return err
	}
	return relation
}

func writeConfig(w io.Writer, c configReport) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, f := range c.Files {
		state := "not there"
		if f.Read {
			state = "read"
		}
		fmt.Fprintf(t, "# %s: %s\n", harmless(f.Path), state)
	}
	for _, s := range c.Settings {
		value := s.Value
		if value == "" || strings.ContainsAny(value, " \"#") || !isHarmless(value) {
			value = strconv.Quote(value)
		}
		from := s.Source
		if s.From != nil {
			from = *s.From
		}
		if s.Line != nil {
			from += ":" + strconv.Itoa(*s.Line)
		}
		if s.Source == sourceSection {
			from += " (" + leasesKey + ": " + *c.Lease + ")"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", s.Name, value, harmless(from))
	}
	return t.Flush()
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
