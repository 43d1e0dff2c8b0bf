package cmd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
)

// How long a store may be silent.
const (
	statusPatience   = 5 * time.Second
	listPatience     = 30 * time.Second
	completePatience = time.Second
	lastWords        = 250 * time.Millisecond // after that, for the store's own words about why
)

const (
	listForm   = "write it as: underlease list [flags] [--json]"
	statusForm = "write it as: underlease status [flags] [NAME]"
)

func (p *program) listCommand() *cobra.Command {
	return p.lookCommand(&cobra.Command{
		Use:               "list",
		Short:             "Show the leases of a store",
		ValidArgsFunction: cobra.NoFileCompletions,
	}, listHelp, func(args []string, asJSON bool) error {
		if len(args) > 0 {
			return usagef("underlease status NAME shows one lease", "%q stands after list", args[0])
		}
		return p.look(false, asJSON)
	})
}

func (p *program) statusCommand() *cobra.Command {
	return p.lookCommand(&cobra.Command{
		Use:   "status [NAME]",
		Short: "Show whether a lease is held, and by whom",
		ValidArgsFunction: func(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return p.leaseNames(word), cobra.ShellCompDirectiveNoFileComp
		},
	}, statusHelp, func(args []string, asJSON bool) error {
		switch {
		case len(args) > 1:
			return usagef(statusForm, "%q stands after the name of the lease %q", args[1], args[0])
		case len(args) == 1:
			if err := backends.CheckLease(args[0]); err != nil {
				return usagef("", "%v", err)
			}
			p.lease = args[0]
		}
		return p.look(true, asJSON)
	})
}

// lookCommand gives c the flags of run: the settings come from the same places, so that one looks where a run would go.
func (p *program) lookCommand(c *cobra.Command, help string, do func(args []string, asJSON bool) error) *cobra.Command {
	asJSON := false
	c.Args = cobra.ArbitraryArgs
	c.RunE = func(_ *cobra.Command, args []string) error { return do(args, asJSON) }
	c.Flags().SortFlags = false
	c.Flags().AddFlagSet(p.flags) // the same values: only one of the commands runs
	c.Flags().BoolVar(&asJSON, "json", false, "")
	completeWords(c)
	return p.withHelp(c, help)
}

// look shows the lease p.lease, or all where it is empty. It takes nothing and makes nothing in the store.
func (p *program) look(status, asJSON bool) error {
	w, err := p.loadSettings()
	if err != nil {
		return err
	}
	p.startLog()
	p.warnStrange(w)
	// Only where it is said here: a crontab that sets it for its runs means their words.
	quiet := p.s.quiet && w.origins["quiet"].Source == sourceFlag
	g := &gallery{p: p, status: status, quiet: quiet, asJSON: asJSON, store: mask(p.s.backend), out: bufio.NewWriterSize(p.out, 32<<10)}

	ctx := context.Background()
	if p.store, err = p.openStore(ctx, w); err == nil {
		defer func() { _ = p.store.Close() }() // nothing was asked of it but to be looked at
		g.store = p.store.Address
		err = p.leases(ctx, g.add)
	}
	g.begin()
	if err != nil {
		g.fail("", err)
	}
	p.code = g.end()
	return nil
}

// leases calls show with the lease p.lease, or with all of the namespace where it is empty.
func (p *program) leases(ctx context.Context, show func(backends.State, error)) error {
	store, patience := p.store, statusPatience
	if p.lease == "" {
		patience = listPatience
	}
	return answers(ctx, store.Address, patience, func(ctx context.Context, shown func(backends.State, error) bool) error {
		if p.lease != "" {
			s, err := store.Inspect(ctx, p.s.namespace, p.lease)
			s.Namespace, s.Lease = p.s.namespace, p.lease
			shown(s, err)
			return nil
		}
		return walk(ctx, store, p.s.namespace, shown)
	}, show)
}

// walk shows all leases of a namespace, one after the other where the store can do that.
func walk(ctx context.Context, store *backends.Store, namespace string, shown func(backends.State, error) bool) error {
	if w, ok := store.Backend.(backends.Walker); ok {
		g := newGap()
		defer g.end()
		g.Lock()
		defer g.Unlock()
		return w.Walk(ctx, namespace, func(s backends.State, err error) bool {
			g.Unlock()
			defer g.Lock()
			return shown(s, err)
		})
	}
	all, err := store.List(ctx, namespace)
	for _, s := range all {
		if !shown(s, nil) {
			return nil
		}
	}
	return err
}

// gap is locked while a lease is looked at, and free between two looks: there Ctrl-Z may stop this process. Within a look it could
// hold what every run of that lease has to pass through, until somebody thinks of it again.
type gap struct {
	sync.Mutex
	stops      chan os.Signal // nil where Ctrl-Z is ignored
	over, gone chan struct{}
}

func newGap() *gap {
	g := &gap{}
	if signal.Ignored(syscall.SIGTSTP) {
		return g
	}
	g.stops, g.over, g.gone = make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(g.stops, syscall.SIGTSTP)
	go func() {
		defer close(g.gone)
		for {
			select {
			case <-g.stops:
				g.stop()
			case <-g.over:
				return
			}
		}
	}()
	return g
}

// stop stops this process as the signal would have, until it is continued.
func (g *gap) stop() {
	g.Lock()
	defer g.Unlock()
	stopSelf()
}

// end gives the signal back. It is called with the gap free.
func (g *gap) end() {
	if g.stops == nil {
		return
	}
	close(g.over)
	<-g.gone
	signal.Stop(g.stops)
	if len(g.stops) > 0 {
		stopSelf()
	}
}

// glimpse is a lease, or why it cannot be shown.
type glimpse struct {
	state backends.State
	err   error
}

// answers runs look beside and calls show with what it finds, one after the other. A store that says nothing for longer than its
// patience is unavailable, also where it does not heed the end of its context.
func answers(ctx context.Context, address string, patience time.Duration,
	look func(context.Context, func(backends.State, error) bool) error, show func(backends.State, error),
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	defer close(over)
	found := make(chan glimpse, 64)
	done := make(chan error, 1)
	bug := make(chan *runner.Bug, 1)
	go func() {
		defer func() {
			if x := recover(); x != nil {
				bug <- &runner.Bug{Value: x, Stack: debug.Stack()}
			}
		}()
		done <- look(ctx, func(s backends.State, err error) bool {
			select {
			case found <- glimpse{s, err}:
				return true
			case <-over:
				return false
			}
		})
	}()
	silence := time.NewTimer(patience)
	defer silence.Stop()
	silent := backends.Unavailable(nil, "%s did not answer within %s", address, runner.Short(patience))
	for late := false; ; {
		select {
		case x := <-bug:
			panic(x)
		case g := <-found:
			late = false
			show(g.state, g.err)
			silence.Reset(patience)
		case err := <-done:
			for len(found) > 0 {
				late = false
				g := <-found
				show(g.state, g.err)
			}
			if late && err == nil {
				err = silent
			}
			return err
		case <-silence.C:
			if late {
				return silent
			}
			late = true
			cancel()
			silence.Reset(lastWords)
		}
	}
}

// leaseNames completes the name of a lease from what the store shows at once. Names that a shell would have to be protected from
// are left out.
func (p *program) leaseNames(word string) []string {
	if _, err := p.loadSettings(); err != nil {
		return nil
	}
	var names []string
	p.lease = ""
	_ = answers(context.Background(), "", completePatience, func(ctx context.Context, shown func(backends.State, error) bool) error {
		store, err := p.open(ctx, p.s.backend)
		if err != nil {
			return err
		}
		defer func() { _ = store.Close() }() // as above
		return walk(ctx, store, p.s.namespace, shown)
	}, func(s backends.State, err error) {
		if err != nil || !strings.HasPrefix(s.Lease, word) || strings.HasPrefix(s.Lease, "-") || backends.CheckLease(s.Lease) != nil || !isHarmless(s.Lease) {
			return
		}
		name := s.Lease
		if i := slices.IndexFunc(s.Slots, backends.SlotState.Taken); i >= 0 {
			name += "\theld by " + person(s.Slots[i].Holder)
		}
		names = append(names, name)
	})
	return names
}

// completeRun completes the name of the lease, then "--", and leaves what follows to the shell.
func (p *program) completeRun(_ *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	switch {
	case slices.Contains(p.args, "--"):
		return nil, cobra.ShellCompDirectiveDefault
	case len(args) == 0:
		return p.leaseNames(word), cobra.ShellCompDirectiveNoFileComp
	case len(args) == 1:
		return []string{"--"}, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// listVersion changes when a reader of list --json or status --json has to. New fields do not change it.
const listVersion = 1

// The object that --json prints is a leasesHead, one shownLease a line, one shownError a line, and the exit code, so that no reader
// and no writer has to have all of it at hand. Its fields are always there; what is not known is null.
type leasesHead struct {
	Version   int       `json:"version"`
	Store     string    `json:"store"` // without credentials
	Namespace string    `json:"namespace"`
	At        time.Time `json:"at"` // by this host's clock
}

type shownLease struct {
	Lease     string      `json:"lease"`
	Namespace string      `json:"namespace"`
	Busy      *bool       `json:"busy"`    // a run with the same settings would find no slot; null where all leases are shown
	Held      int         `json:"held"`    // slots with a grant in force
	Kept      int         `json:"kept"`    // slots that only a hold keeps
	Waiters   *int        `json:"waiters"` // null where the store does not know
	Slots     []shownSlot `json:"slots"`   // those that were ever used
}

type shownSlot struct {
	Slot   int            `json:"slot"`
	State  slotWord       `json:"state"`
	Term   *backends.Term `json:"term"`   // of the holder; when free, of the last one
	Holder *string        `json:"holder"` // null when free
	Host   *string        `json:"host"`   // of a holder with the default label
	Pid    *int           `json:"pid"`    // the same
	Since  *time.Time     `json:"since"`
	LeftMs *int64         `json:"left_ms"` // until it is free unless renewed; 0 when free, null: until its holder ends
	Ask    *shownAsk      `json:"ask"`     // what somebody asks of the holder
	Last   shownEnd       `json:"last"`    // how the last holder that ended did so
}

type slotWord string

// The values of shownSlot.State.
const (
	slotHeld slotWord = "held"
	slotKept slotWord = "kept" // its holder has ended, its hold has not
	slotFree slotWord = "free"
)

type shownAsk struct {
	Kind   backends.AskKind `json:"kind"`
	Reason string           `json:"reason"`
	By     string           `json:"by"`
	At     *time.Time       `json:"at"`
}

type shownEnd struct {
	Outcome  string `json:"outcome"` // as in the report; none: nobody held it before; unknown: it never said
	ExitCode *int   `json:"exit_code"`
	TookMs   *int64 `json:"took_ms"`
}

type shownError struct {
	Lease   *string        `json:"lease"`   // null where it is the whole store, or a record that does not tell its lease
	Outcome runner.Outcome `json:"outcome"` // unavailable, denied, broken or invalid
	Text    string         `json:"text"`
	Hint    string         `json:"hint"`
	code    int
}

func showLease(s backends.State, busy *bool) shownLease {
	l := shownLease{Lease: s.Lease, Namespace: s.Namespace, Busy: busy, Waiters: s.Waiters, Slots: make([]shownSlot, 0, len(s.Slots))}
	for _, slot := range s.Slots {
		shown := showSlot(slot)
		switch shown.State {
		case slotHeld:
			l.Held++
		case slotKept:
			l.Kept++
		case slotFree:
		}
		l.Slots = append(l.Slots, shown)
	}
	return l
}

func showSlot(s backends.SlotState) shownSlot {
	out := shownSlot{Slot: s.Slot, State: slotFree, LeftMs: new(int64)}
	if s.Term != 0 {
		out.Term = &s.Term
	}
	switch {
	case s.Held:
		out.State = slotHeld
	case s.Kept:
		out.State = slotKept
	}
	if s.Taken() {
		out.Holder = &s.Holder
		if host, digits, ok := splitHolder(s.Holder); ok {
			if pid, err := strconv.Atoi(digits); err == nil {
				out.Host, out.Pid = &host, &pid
			}
		}
		if !s.Since.IsZero() {
			out.Since = new(s.Since.UTC())
		}
		if out.LeftMs = nil; s.Left != backends.Forever {
			out.LeftMs = new(max(0, s.Left.Milliseconds()))
		}
	}
	if a := s.Ask; a != nil {
		out.Ask = &shownAsk{Kind: a.Kind, Reason: a.Reason, By: a.By}
		if !a.At.IsZero() {
			out.Ask.At = new(a.At.UTC())
		}
	}
	switch out.Last.Outcome = s.Last.Outcome; s.Last.Outcome {
	case "":
		out.Last.Outcome = backends.OutcomeNone
	case backends.OutcomeNone, backends.OutcomeUnknown:
	default:
		out.Last.ExitCode, out.Last.TookMs = &s.Last.ExitCode, new(s.Last.Took.Milliseconds())
	}
	return out
}

// gallery writes leases as they come.
type gallery struct {
	p             *program
	status, quiet bool
	asJSON        bool
	store         string
	out           *bufio.Writer

	begun  bool
	leases int
	taken  bool // status has something to say no to
	errors []shownError

	table table
	line  bytes.Buffer // of JSON
}

const mostErrors = 100 // in words; more would be lost on their way, and --json has them all

func (g *gallery) begin() {
	if g.begun || g.quiet {
		return
	}
	g.begun = true
	if !g.asJSON {
		g.table.row("LEASE", "SLOT", "STATE", "HOLDER", "SINCE", "LEFT", "TERM", "LAST")
		return
	}
	b := g.encode(leasesHead{listVersion, g.store, g.p.s.namespace, g.p.wall().UTC()})
	_, _ = g.out.Write(b[:len(b)-1]) // the object goes on; p.out keeps the error, here and below
	_, _ = g.out.WriteString(`,"leases":[`)
}

// add shows one lease, or takes down why it cannot be shown.
func (g *gallery) add(s backends.State, err error) {
	g.begin()
	if err != nil {
		g.fail(s.Lease, err)
		if s.Lease != "" && g.p.lease == "" && !g.quiet && !g.asJSON {
			g.table.row(plainOrQuoted(s.Lease), "-", "unknown", "-", "-", "-", "-", "-")
		}
		return
	}
	var busy *bool
	if g.p.lease != "" {
		busy = new(isBusy(s, g.p.s.slots))
		g.taken = *busy
	} else if slices.ContainsFunc(s.Slots, backends.SlotState.Taken) {
		g.taken = true
	}
	g.leases++
	switch {
	case g.quiet:
	case g.asJSON:
		if g.leases > 1 {
			_ = g.out.WriteByte(',')
		}
		_ = g.out.WriteByte('\n')
		_, _ = g.out.Write(g.encode(showLease(s, busy)))
	default:
		g.rows(s)
	}
}

// isBusy reports whether a contender would find every one of its slots taken.
func isBusy(s backends.State, slots int) bool {
	taken := 0
	for _, slot := range s.Slots {
		if slot.Slot < slots && slot.Taken() {
			taken++
		}
	}
	return taken >= slots
}

// fail takes down why a lease, or with an empty name the store, cannot be shown.
func (g *gallery) fail(lease string, err error) {
	f, ok := openFailure(err).(*failure) //nolint:errorlint // it is that or nil
	if !ok {
		f = &failure{runner.ExitUnavailable, runner.OutcomeUnavailable, err.Error(), backends.Hint(err)}
	}
	e := shownError{Outcome: f.outcome, Text: strings.ReplaceAll(f.text, "\n", "; "), Hint: f.hint, code: f.code}
	if lease != "" {
		e.Lease = &lease
	}
	g.errors = append(g.errors, e)
}

// end writes what is left and returns the exit code.
func (g *gallery) end() int {
	code := 0
	if g.status && g.taken {
		code = runner.ExitBusy
	}
	// Of several the one that asks most of whoever reads it.
	for _, worst := range []int{runner.ExitUnavailable, runner.ExitDenied, runner.ExitBroken, runner.ExitSettings} {
		if slices.ContainsFunc(g.errors, func(e shownError) bool { return e.code == worst }) {
			code = worst
		}
	}
	switch {
	case g.quiet:
	case g.asJSON:
		g.tail(code)
	case len(g.table.rows) == 1 && g.table.widths == nil && len(g.errors) > 0: // there is nothing below the heading
	default:
		g.table.flush(g.out)
	}
	_ = g.out.Flush() // as above
	for i, e := range g.errors {
		if i == mostErrors {
			g.p.notice(strconv.Itoa(len(g.errors)-i)+" more leases cannot be shown", "--json names all of them")
			break
		}
		g.p.notice(e.Text, e.Hint)
	}
	if g.leases == 0 && len(g.errors) == 0 && !g.quiet && !g.asJSON {
		where := g.store
		if g.p.s.namespace != "" {
			where = "the namespace " + strconv.Quote(g.p.s.namespace) + " of " + where
		}
		g.p.notice("there is no lease in "+where, "")
	}
	return code
}

func (g *gallery) tail(code int) {
	_, _ = g.out.WriteString("\n],\"errors\":[")
	for i, e := range g.errors {
		if i > 0 {
			_ = g.out.WriteByte(',')
		}
		_ = g.out.WriteByte('\n')
		_, _ = g.out.Write(g.encode(e))
	}
	if len(g.errors) > 0 {
		_ = g.out.WriteByte('\n')
	}
	_, _ = fmt.Fprintf(g.out, "],\"exit_code\":%d}\n", code)
}

// encode returns v as JSON in one line, until the next call. What a terminal would act on is written as an escape, which JSON by
// itself does for a part of it only: DEL, C1 and the marks of direction would pass.
func (g *gallery) encode(v any) []byte {
	g.line.Reset()
	enc := json.NewEncoder(&g.line)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // there is no type in it that could fail
	}
	b := bytes.TrimSuffix(g.line.Bytes(), []byte("\n"))
	if isHarmless(string(b)) {
		return b
	}
	var safe []byte
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		switch {
		case harmlessRune(r):
			safe = append(safe, b[i:i+n]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			safe = fmt.Appendf(safe, `\u%04x\u%04x`, high, low)
		default:
			safe = fmt.Appendf(safe, `\u%04x`, r)
		}
		i += n
	}
	return safe
}

func (g *gallery) rows(s backends.State) {
	defer g.table.flushFull(g.out)
	name := plainOrQuoted(s.Lease)
	waiting := ""
	if s.Waiters != nil && *s.Waiters > 0 {
		waiting = ", " + strconv.Itoa(*s.Waiters) + " waiting"
	}
	if len(s.Slots) == 0 {
		g.table.row(name, "-", string(slotFree)+waiting, "-", "-", "-", "-", "-")
		return
	}
	for _, slot := range s.Slots {
		shown := showSlot(slot)
		state, holder, since, rest, term := string(shown.State)+waiting, "-", "-", "-", "-"
		waiting = "" // once a lease
		if a := slot.Ask; a != nil {
			switch a.Kind {
			case backends.AskBreak:
				state += ", broken"
			case backends.AskStop:
				state += ", asked to stop"
			}
		}
		if slot.Taken() {
			holder = person(slot.Holder)
			if !slot.Since.IsZero() {
				since = clock(slot.Since, g.p.wall())
			}
			if slot.Left != backends.Forever {
				rest = left(slot.Left)
			}
		}
		if shown.Term != nil {
			term = shown.Term.String()
		}
		g.table.row(name, strconv.Itoa(slot.Slot), state, holder, since, rest, term, endWords(slot.Last))
	}
}

// endWords says how a holder ended.
func endWords(e backends.End) string {
	switch e.Outcome {
	case "", backends.OutcomeNone:
		return "-"
	case backends.OutcomeUnknown:
		return e.Outcome
	}
	w := plainOrQuoted(e.Outcome)
	if e.ExitCode != 0 {
		w += " (" + strconv.Itoa(e.ExitCode) + ")"
	}
	took := e.Took.Round(time.Millisecond)
	if took >= 10*time.Second {
		took = took.Round(time.Second)
	}
	if took > 0 {
		w += " after " + runner.Short(took)
	}
	return w
}

// table aligns rows in blocks: the columns of a block are as wide as those before it or wider, so that the first rows do not have
// to wait for the last.
type table struct {
	rows   [][]string
	widths []int
}

const tableBlock = 256

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) flushFull(w *bufio.Writer) {
	if len(t.rows) >= tableBlock {
		t.flush(w)
		_ = w.Flush() // p.out keeps the error
	}
}

func (t *table) flush(w *bufio.Writer) {
	for _, row := range t.rows {
		for i, cell := range row {
			if i == len(t.widths) {
				t.widths = append(t.widths, 0)
			}
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range t.rows {
		for i, cell := range row {
			_, _ = w.WriteString(cell) // p.out keeps the error, here and below
			if i == len(row)-1 {
				break
			}
			for range t.widths[i] + 2 - utf8.RuneCountInString(cell) {
				_ = w.WriteByte(' ')
			}
		}
		_ = w.WriteByte('\n')
	}
	t.rows = t.rows[:0]
}
