package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
)

// markerVersion changes when a reader of marker --json has to.
const markerVersion = 1

// markerLimit is how long one request of a marker command may take.
const markerLimit = 5 * time.Second

const markerForm = "write it as: underlease marker list, show ID, set ID or clear ID"

// marker is a marker in JSON. What is not known is null.
type marker struct {
	ID        string         `json:"id"`
	Namespace string         `json:"namespace"`
	AppliedAt time.Time      `json:"applied_at"` // when the run that applied it began, by the store's clock; or when it was set
	Holder    *string        `json:"holder"`     // who ran it
	Term      *backends.Term `json:"term"`
	RunID     *string        `json:"run_id"`
	TookMs    *int64         `json:"took_ms"`
	SetBy     *string        `json:"set_by"` // who set it by hand
	Reason    string         `json:"reason"`
	AgeMs     int64          `json:"age_ms"` // since it was written, by the store's clock
}

// The objects of --json, by command.
type (
	markerList struct {
		Version int      `json:"version"`
		Markers []marker `json:"markers"` // ordered by ID
	}
	markerShow struct {
		Version int             `json:"version"`
		Marker  *marker         `json:"marker"`  // null: it is not set
		Changes []runner.Change `json:"changes"` // by hand, newest first
	}
	markerChange struct {
		Version int    `json:"version"`
		ID      string `json:"id"`
		Changed bool   `json:"changed"` // false: it was so already
	}
)

func (p *program) markerCommand() *cobra.Command {
	c := &cobra.Command{
		Use:               "marker list|show|set|clear",
		Short:             "List, show, set or clear what gate has written down",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef(markerForm, "the word after marker is missing")
			}
			hint := markerForm
			if near := all.Nearest(args[0], commandNames(c)); near != "" {
				hint = "did you mean underlease marker " + near
			}
			return usagef(hint, "marker knows no %q", args[0])
		},
	}
	asJSON, reason := false, ""
	add := func(name, short string, one, change bool, do func(context.Context, runner.Markers) error) {
		sub := &cobra.Command{
			Use:   name,
			Short: short,
			Args:  cobra.ArbitraryArgs,
			ValidArgsFunction: func(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
				if !one || len(args) > 0 {
					return nil, cobra.ShellCompDirectiveNoFileComp
				}
				return p.leaseNames(word), cobra.ShellCompDirectiveNoFileComp
			},
			RunE: func(_ *cobra.Command, args []string) error {
				if err := p.markerWords(name, args, one); err != nil {
					return err
				}
				return p.withMarkers(do)
			},
		}
		sub.Flags().SortFlags = false
		for _, of := range []string{"backend", "backend-file", "config", "namespace"} {
			sub.Flags().AddFlag(p.flags.Lookup(of)) // the same values: only one command runs
		}
		flag(sub.Flags(), &asJSON, "json", "")
		if change {
			text := func(s string) (string, error) { return s, checkReason(s) }
			addReason(sub, &reason, text)
		}
		c.AddCommand(p.withHelp(sub, markerHelp))
	}
	add("list", "List the markers of a namespace", false, false, func(ctx context.Context, m runner.Markers) error { return p.listMarkers(ctx, m, asJSON) })
	add("show", "Show a marker and what was done to it by hand", true, false, func(ctx context.Context, m runner.Markers) error { return p.showMarker(ctx, m, asJSON) })
	add("set", "Set a marker by hand", true, true, func(ctx context.Context, m runner.Markers) error {
		set, err := m.Set(ctx, p.s.namespace, p.lease, p.change(reason))
		return p.changedMarker(set, err, asJSON, "set", "is set already")
	})
	add("clear", "Clear a marker", true, true, func(ctx context.Context, m runner.Markers) error {
		cleared, err := m.Clear(ctx, p.s.namespace, p.lease, p.change(reason))
		return p.changedMarker(cleared, err, asJSON, "cleared", "is not set")
	})
	return p.withHelp(c, markerHelp)
}

func addReason(c *cobra.Command, to *string, parse func(string) (string, error)) {
	add(c.Flags(), to, "reason", "", "text", parse, func(s string) string { return s })
}

const maxReason = 500

func checkReason(s string) error {
	switch {
	case len(s) > maxReason:
		return fmt.Errorf("it has %d bytes: give at most %d", len(s), maxReason)
	case !isHarmless(s):
		return fmt.Errorf("%q has control characters or is not UTF-8: give a text for people", s)
	}
	return nil
}

// markerWords takes the ID where a command has one.
func (p *program) markerWords(name string, args []string, one bool) error {
	form := "write it as: underlease marker " + name
	if one {
		form += " ID"
	}
	switch {
	case one && len(args) == 0:
		return usagef(form, "the ID is missing")
	case one && len(args) > 1:
		return usagef(form, "%q stands after the ID %q", args[1], args[0])
	case one:
		if err := backends.CheckLease(args[0]); err != nil {
			return usagef("", "%v", err)
		}
		p.lease = args[0]
	case len(args) > 0:
		return usagef(form, "%q stands after marker %s", args[0], name)
	}
	return nil
}

// withMarkers opens the store that the settings name.
func (p *program) withMarkers(do func(context.Context, runner.Markers) error) error {
	w, err := p.loadSettings()
	if err != nil {
		return err
	}
	p.startLog()
	p.warnStrange(w)
	ctx := context.Background()
	store, err := p.openStore(ctx, w)
	if err != nil {
		return storeFailure(err)
	}
	defer func() { _ = store.Close() }() // everything has been answered
	if err := do(ctx, runner.Markers{Store: store, Limit: markerLimit}); err != nil {
		return storeFailure(err)
	}
	return nil
}

// storeFailure gives an error of a store its code.
func storeFailure(err error) error {
	if f := openFailure(err); f != nil {
		return f
	}
	if f, ok := errors.AsType[*failure](err); ok {
		return f
	}
	return &failure{runner.ExitUnavailable, runner.OutcomeUnavailable, err.Error(), backends.Hint(err)}
}

func (p *program) change(reason string) runner.Change {
	return runner.Change{By: p.operator(), At: p.wall().UTC().Truncate(time.Second), Reason: reason}
}

// operator is a label of who runs this, for people: it proves nothing.
func (p *program) operator() string {
	user := "uid" + strconv.Itoa(os.Getuid())
	for _, name := range []string{"USER", "LOGNAME", "SUDO_USER"} { // the last one there counts: who became root
		if v, _ := lookup(p.environ, name); v != "" {
			user = v
		}
	}
	host, _ := os.Hostname() // without a name it is localhost
	if host == "" {
		host = "localhost"
	}
	return harmless(user + "@" + host)
}

func (p *program) listMarkers(ctx context.Context, m runner.Markers, asJSON bool) error {
	found, err := m.List(ctx, p.s.namespace)
	if err != nil && len(found) == 0 {
		return err
	}
	if asJSON {
		out := markerList{Version: markerVersion, Markers: []marker{}}
		for _, one := range found {
			out.Markers = append(out.Markers, p.markerOf(one))
		}
		return errors.Join(writeJSON(p.out, out), err)
	}
	t := tabwriter.NewWriter(p.out, 0, 8, 2, ' ', 0)
	for _, one := range found {
		fmt.Fprintf(t, "%s\t%s\t%s\n", plainOrQuoted(one.ID), p.appliedAt(one), byWhom(one))
	}
	return errors.Join(t.Flush(), err)
}

func (p *program) appliedAt(m runner.MarkerRecord) string {
	return p.appliedTime(m).In(p.wall().Location()).Format(time.DateTime)
}

func (p *program) appliedTime(m runner.MarkerRecord) time.Time {
	if !m.At.IsZero() {
		return m.At
	}
	return p.wall().Add(-m.Age - m.Until).UTC().Truncate(time.Millisecond)
}

func byWhom(m runner.MarkerRecord) string {
	if m.By != "" || m.Term == 0 {
		return "set by " + person(m.By)
	}
	return fmt.Sprintf("%s, term %d, in %s", person(m.Holder), m.Term, runner.Short(m.Took))
}

func (p *program) showMarker(ctx context.Context, m runner.Markers, asJSON bool) error {
	one, err := m.Get(ctx, p.s.namespace, p.lease)
	there := err == nil
	if err != nil && !errors.Is(err, backends.ErrNoRecord) {
		return err
	}
	changes, err := m.Changes(ctx, p.s.namespace, p.lease)
	if err != nil {
		return err
	}
	if !there {
		p.code = exitNo
	}
	if asJSON {
		out := markerShow{Version: markerVersion, Changes: changes}
		if there {
			out.Marker = new(p.markerOf(one))
		}
		if changes == nil {
			out.Changes = []runner.Change{}
		}
		return writeJSON(p.out, out)
	}
	if !there {
		p.voice.say("not applied: "+quoteLease(p.s.namespace, p.lease)+" has no marker", "")
	} else {
		t := tabwriter.NewWriter(p.out, 0, 8, 2, ' ', 0)
		fmt.Fprintf(t, "applied\t%s\n", p.appliedAt(one))
		fmt.Fprintf(t, "by\t%s\n", byWhom(one))
		if one.RunID != "" {
			fmt.Fprintf(t, "run\t%s\n", plainOrQuoted(one.RunID))
		}
		if one.Reason != "" {
			fmt.Fprintf(t, "reason\t%s\n", harmless(one.Reason))
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	for _, c := range changes {
		line := fmt.Sprintf("%s  %s by %s", c.At.Local().Format(time.DateTime), c.What, person(c.By))
		if c.Reason != "" {
			line += ": " + c.Reason
		}
		_, _ = io.WriteString(p.out, harmless(line)+"\n") // the error is kept
	}
	return nil
}

func (p *program) changedMarker(changed bool, err error, asJSON bool, did, was string) error {
	if err != nil {
		return err
	}
	if asJSON {
		return writeJSON(p.out, markerChange{Version: markerVersion, ID: p.lease, Changed: changed})
	}
	name := quoteLease(p.s.namespace, p.lease)
	if !changed {
		p.voice.say("the marker of "+name+" "+was, "")
		return nil
	}
	p.voice.say("the marker of "+name+" was "+did, "")
	return nil
}

func (p *program) markerOf(m runner.MarkerRecord) marker {
	out := marker{ID: m.ID, Namespace: m.Namespace, Reason: m.Reason, AppliedAt: p.appliedTime(m), AgeMs: m.Age.Milliseconds()}
	if m.Term != 0 {
		out.Holder, out.Term, out.RunID, out.TookMs = &m.Holder, &m.Term, &m.RunID, new(m.Took.Milliseconds())
	}
	if m.By != "" {
		out.SetBy = &m.By
	}
	return out
}
