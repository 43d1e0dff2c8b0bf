package cmd

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
)

// manDir has the man pages, in mdoc(7). What they list is compared here with what there is: a page can neither miss something nor
// speak of something that is gone.
const manDir = "../packaging/man"

// manPage is a page as its source.
type manPage struct {
	name  string // as in its file's name, without the section
	lines []string
}

func manPages(t *testing.T) map[string]manPage {
	t.Helper()
	files, err := filepath.Glob(manDir + "/*.[157]")
	if err != nil || len(files) == 0 {
		t.Fatalf("got %d man pages and %v, want some", len(files), err)
	}
	pages := map[string]manPage{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		base := filepath.Base(f)
		pages[base] = manPage{strings.TrimSuffix(base, filepath.Ext(base)), strings.Split(string(text), "\n")}
	}
	return pages
}

// section returns a section without its title, or nothing.
func (m manPage) section(title string) manPage {
	begin := slices.Index(m.lines, ".Sh "+title)
	if begin < 0 {
		return manPage{name: m.name}
	}
	rest := m.lines[begin+1:]
	if end := slices.IndexFunc(rest, func(l string) bool { return strings.HasPrefix(l, ".Sh ") }); end >= 0 {
		rest = rest[:end]
	}
	return manPage{m.name, rest}
}

// item is an entry of a list: its head, and what is said of it, without macros.
type item struct{ head, text string }

func (m manPage) items() (all []item) {
	in := false
	for _, line := range m.lines {
		head, isHead := strings.CutPrefix(line, ".It")
		switch {
		case isHead:
			all, in = append(all, item{head: strings.TrimSpace(head)}), true
		case strings.HasPrefix(line, ".El"), strings.HasPrefix(line, ".Sh"):
			in = false
		case in:
			all[len(all)-1].text += " " + plain(line)
		}
	}
	return all
}

// plain is a line as it is read: the macros are gone.
func plain(line string) string {
	words := strings.Fields(strings.TrimPrefix(line, "."))
	if strings.HasPrefix(line, ".") {
		words = slices.DeleteFunc(words, func(w string) bool { return regexp.MustCompile(`^([A-Z][a-z]|No)$`).MatchString(w) })
	}
	return strings.Join(words, " ")
}

// heads returns what stands behind a macro in the heads of entries: "Fl -ttl Ar D" has the Fl "-ttl".
func (m manPage) heads(macro string) (all []string) {
	for _, it := range m.items() {
		all = append(all, argumentsOf(macro, it.head)...)
	}
	return all
}

// argumentsOf returns the words of a macro on a line. Those after a comma belong to it too.
func argumentsOf(macro, line string) (all []string) {
	now := ""
	for w := range strings.FieldsSeq(line) {
		switch {
		case regexp.MustCompile(`^[A-Z][a-z]$`).MatchString(w):
			now = w
		case now == macro && w != "," && w != "|" && w != ":":
			all = append(all, w)
		}
	}
	return all
}

// same compares two sets.
func same(t *testing.T, what string, got, want []string) {
	t.Helper()
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%s: %s has no entry", what, w)
		}
	}
	for _, g := range got {
		if !slices.Contains(want, g) {
			t.Errorf("%s: got an entry %s, and there is no such thing", what, g)
		}
	}
}

func walkedRoot(t *testing.T) (*program, *cobra.Command) {
	t.Helper()
	w := newWorld(t)
	w.schemes = all.Schemes()
	p := &program{deps: w.deps, voice: newVoice(w.stderr), out: &output{f: w.stdout}}
	return p, p.root()
}

// flagsOf returns the flags of a command and of those below it, as they are written.
func flagsOf(c *cobra.Command) map[string]*pflag.Flag {
	found := map[string]*pflag.Flag{}
	c.Flags().VisitAll(func(f *pflag.Flag) {
		found["-"+f.Name] = f
		if f.Shorthand != "" {
			found[f.Shorthand] = f
		}
	})
	for _, sub := range c.Commands() {
		maps.Copy(found, flagsOf(sub))
	}
	return found
}

func TestEveryCommandHasItsPageAndEveryFlagItsEntry(t *testing.T) {
	pages := manPages(t)
	_, root := walkedRoot(t)
	root.InitDefaultHelpFlag()
	first := pages["underlease.1"]
	same(t, "underlease.1: flags", first.section("DESCRIPTION").heads("Fl"), slices.Collect(maps.Keys(rootFlags(root))))
	same(t, "underlease.1: commands", first.section("DESCRIPTION").heads("Cm"), append(commandNames(root), "help"))

	seen := map[string]bool{"underlease.1": true}
	for _, c := range root.Commands() {
		if c.Hidden {
			continue
		}
		name := "underlease-" + c.Name() + ".1"
		page, ok := pages[name]
		seen[name] = true
		if !ok {
			t.Errorf("underlease %s has no page: write %s", c.Name(), name)
			continue
		}
		flags := flagsOf(c)
		own := page.section("FLAGS").heads("Fl")
		text := strings.Join(page.section("FLAGS").lines, " ")
		known := slices.Clone(own)
		for _, of := range []string{"run", "gate"} {
			if strings.Contains(text, "takes the flags of") && strings.Contains(text, ".Xr underlease-"+of+" 1") {
				known = append(known, pages["underlease-"+of+".1"].section("FLAGS").heads("Fl")...)
			}
		}
		for f := range flags {
			if !slices.Contains(known, f) {
				t.Errorf("%s: the flag -%s has no entry", name, f)
			}
		}
		for _, f := range own {
			if flags[f] == nil {
				t.Errorf("%s: got an entry for -%s, which is no flag of the command", name, f)
			}
		}
		for _, it := range page.section("FLAGS").items() {
			for _, name := range argumentsOf("Fl", it.head) {
				f := flags[name]
				if f == nil || f.DefValue == "" || f.DefValue == "false" {
					continue
				}
				if !strings.Contains(it.text, "default is "+f.DefValue) {
					t.Errorf("underlease-%s.1: -%s: got %q, want \"The default is %s\" in it", c.Name(), name, it.text, f.DefValue)
				}
			}
		}
		for _, sub := range c.Commands() {
			if !slices.Contains(page.heads("Cm"), sub.Name()) {
				t.Errorf("%s: %s %s has no entry", name, c.Name(), sub.Name())
			}
		}
	}
	for name := range pages {
		if strings.HasSuffix(name, ".1") && !seen[name] {
			t.Errorf("%s is about no command", name)
		}
	}
}

func rootFlags(root *cobra.Command) map[string]*pflag.Flag {
	found := map[string]*pflag.Flag{}
	root.Flags().VisitAll(func(f *pflag.Flag) { found["-"+f.Name], found[f.Shorthand] = f, f })
	return found
}

// ourConstants returns the values of the constants of package runner whose names begin so.
func ourConstants(t *testing.T, prefix string) (values []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "../runner/spec.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, prefix) || len(spec.Values) != 1 {
			return true
		}
		if lit, ok := spec.Values[0].(*ast.BasicLit); ok {
			text, err := strconv.Unquote(lit.Value)
			if err != nil {
				text = lit.Value
			}
			values = append(values, text)
		}
		return true
	})
	if len(values) < 10 {
		t.Fatalf("got %d constants %s..., want more", len(values), prefix)
	}
	return values
}

func TestEveryExitCodeHasItsEntry(t *testing.T) {
	pages := manPages(t)
	codes := ourConstants(t, "Exit")
	heads := func(m manPage) (all []string) {
		for _, it := range m.section("EXIT STATUS").items() {
			all = append(all, it.head)
		}
		return all
	}
	same(t, "underlease.1", heads(pages["underlease.1"]), append([]string{"0", "1"}, codes...))
	same(t, "underlease-operating.7", heads(pages["underlease-operating.7"]), codes)

	p, root := walkedRoot(t)
	for _, c := range root.Commands() {
		for _, c := range append([]*cobra.Command{c}, c.Commands()...) {
			help := helpOf(t, p, c)
			_, about, ok := strings.Cut(help, "\nOutcomes")
			if !ok {
				_, about, ok = strings.Cut(help, "\nExit codes:")
			}
			if !ok {
				t.Errorf("the help of %s does not show its exit codes", c.CommandPath())
				continue
			}
			page := pages["underlease-"+strings.Fields(c.CommandPath())[1]+".1"]
			if c.Hidden {
				continue
			}
			said := strings.Join(page.section("EXIT STATUS").lines, "\n")
			same(t, page.name+"(1) beside the help of "+c.CommandPath(), numbers(said), numbers(about))
			for _, n := range numbers(said) {
				if n != "0" && n != "1" && !slices.Contains(codes, n) {
					t.Errorf("%s(1): got the exit code %s, which is none", page.name, n)
				}
			}
		}
	}
}

// numbers returns what can be an exit code, once each. The name of a page has the number of its section behind a blank.
func numbers(text string) []string {
	text = regexp.MustCompile(`\.Xr \S+ \d`).ReplaceAllString(text, "")
	found := regexp.MustCompile(`\b[0-9]{1,3}\b`).FindAllString(text, -1)
	slices.Sort(found)
	return slices.Compact(found)
}

// helpOf returns what --help prints.
func helpOf(t *testing.T, p *program, c *cobra.Command) string {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "help")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	was := p.out.f
	p.out.f = f
	err = c.Help()
	p.out.f = was
	text, readErr := os.ReadFile(f.Name())
	if err != nil || readErr != nil || len(text) == 0 {
		t.Fatalf("the help of %s: got %d bytes, %v and %v", c.CommandPath(), len(text), err, readErr)
	}
	return string(text)
}

func TestTheHelpOfEveryCommandIsOneScreenThatBeginsWithAnExample(t *testing.T) {
	p, root := walkedRoot(t)
	for _, c := range root.Commands() {
		help := helpOf(t, p, c)
		if lines := strings.Count(help, "\n"); lines > 50 {
			t.Errorf("%s: got %d lines of help, want at most 50", c.Name(), lines)
		}
		if !strings.HasPrefix(help, "  underlease ") && !c.Hidden {
			t.Errorf("%s: the help begins with %.30q, want an example", c.Name(), help)
		}
		for line := range strings.Lines(help) {
			if len(strings.TrimSuffix(line, "\n")) > 80 {
				t.Errorf("%s: got a line of %d bytes: %s", c.Name(), len(line), line)
			}
		}
	}
}

func TestEveryVariableAndKeyHasItsEntry(t *testing.T) {
	pages := manPages(t)
	var facts []string
	for _, v := range pages["underlease.1"].section("ENVIRONMENT").heads("Ev") {
		if strings.HasPrefix(v, variablePrefix) {
			facts = append(facts, v)
		}
	}
	same(t, "underlease.1: what the command finds", facts, runner.Facts())

	p, _ := walkedRoot(t)
	want := []string{leasesKey}
	p.flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "config" {
			want = append(want, f.Name)
		}
	})
	var got []string
	for _, it := range pages["underlease.yaml.5"].section("KEYS").items() {
		key := argumentsOf("Cm", it.head)[0]
		got = append(got, key)
		if v := argumentsOf("Ev", it.head); key != leasesKey && !slices.Equal(v, []string{variableOf(key)}) {
			t.Errorf("underlease.yaml.5: %s: got the variable %q, want %s", key, v, variableOf(key))
		}
	}
	same(t, "underlease.yaml.5: keys", got, want)
}

// What the program reads from its environment beside settings and facts is in the sources, by its name.
func TestEveryOtherVariableThatIsReadHasItsEntry(t *testing.T) {
	pages := manPages(t)
	known := slices.Concat(pages["underlease.1"].section("ENVIRONMENT").heads("Ev"), pages["underlease-backends.7"].heads("Ev"))
	read := regexp.MustCompile(`(?:lookup\([^,()]+(?:\([^()]*\))?, |[gG]etenv\(|LookupEnv\()"([A-Z][A-Z0-9_]+)"`)
	var found []string
	for _, dir := range []string{".", "../runner", "../backends/*"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") || strings.Contains(f, "backendtest") {
				continue
			}
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range read.FindAllStringSubmatch(string(text), -1) {
				found = append(found, m[1])
				if !slices.Contains(known, m[1]) {
					t.Errorf("%s reads the variable %s, which has no entry in underlease(1) or underlease-backends(7)", f, m[1])
				}
			}
		}
	}
	if !slices.Contains(found, "XDG_STATE_HOME") || !slices.Contains(found, "LISTEN_PID") {
		t.Errorf("got the variables %q, want XDG_STATE_HOME and LISTEN_PID among them: this test no longer sees how they are read", found)
	}
}

func TestEverySchemeHasItsEntry(t *testing.T) {
	var got []string
	for _, s := range manPages(t)["underlease-backends.7"].section("DESCRIPTION").heads("Cm") {
		if name, ok := strings.CutSuffix(s, ":"); ok {
			got = append(got, name)
		}
	}
	same(t, "underlease-backends.7: schemes", got, slices.Collect(maps.Keys(all.Schemes())))
}

// fieldsOf returns the names of all fields in the JSON of a type.
func fieldsOf(types ...reflect.Type) (all []string) {
	for _, r := range types {
		switch r.Kind() { //nolint:exhaustive // the others have no fields
		case reflect.Pointer, reflect.Slice:
			all = append(all, fieldsOf(r.Elem())...)
		case reflect.Struct:
			if r.Implements(reflect.TypeFor[json.Marshaler]()) {
				continue
			}
			for f := range r.Fields() {
				if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
					all = append(all, name)
				}
				all = append(all, fieldsOf(f.Type)...)
			}
		}
	}
	return all
}

// shownLeases is what list --json prints, piece by piece.
type shownLeases struct {
	leasesHead `json:"-"`
	Leases     []shownLease `json:"leases"`
	Errors     []shownError `json:"errors"`
	ExitCode   int          `json:"exit_code"`
}

func TestEveryFieldOfTheJSONHasItsEntry(t *testing.T) {
	pages := manPages(t)
	for _, c := range []struct {
		page, section string
		of            []reflect.Type
	}{
		{"underlease-run.1", "REPORT", []reflect.Type{reflect.TypeFor[report]()}},
		{"underlease-list.1", "JSON", []reflect.Type{reflect.TypeFor[shownLeases]()}},
		{"underlease-marker.1", "JSON", []reflect.Type{reflect.TypeFor[markerList](), reflect.TypeFor[markerShow](), reflect.TypeFor[markerChange]()}},
		{"underlease-config.1", "JSON", []reflect.Type{reflect.TypeFor[configReport]()}},
		{"underlease-version.1", "JSON", []reflect.Type{reflect.TypeFor[build]()}},
	} {
		section := pages[c.page].section(c.section)
		var said []string
		for _, line := range section.lines {
			said = append(said, argumentsOf("Cm", strings.TrimPrefix(line, "."))...)
		}
		fields := fieldsOf(c.of...)
		if len(fields) < 3 {
			t.Errorf("%s: got the fields %q, want more", c.page, fields)
		}
		for _, f := range fields {
			if !slices.Contains(said, f) {
				t.Errorf("%s: the field %s has no entry", c.page, f)
			}
		}
		for _, h := range section.heads("Cm") {
			if !slices.Contains(fields, h) {
				t.Errorf("%s: got an entry %s, and there is no such field", c.page, h)
			}
		}
	}
	same(t, "underlease-run.1: outcomes", pages["underlease-run.1"].section("OUTCOMES").heads("Cm"), ourConstants(t, "Outcome"))
}

func TestThePagesReferToEachOther(t *testing.T) {
	pages := manPages(t)
	for file, page := range pages {
		text := strings.Join(page.lines, "\n")
		for _, want := range []string{".Dd ", ".Dt " + strings.ToUpper(page.name) + " " + file[len(file)-1:] + "\n.Os\n", ".Nm " + strings.ReplaceAll(page.name, "underlease.yaml", "underlease.yaml"), ".Nd ", ".Sh SEE ALSO\n"} {
			if !strings.Contains(text, want) {
				t.Errorf("%s has no %q", file, want)
			}
		}
		for _, m := range regexp.MustCompile(`\.Xr (underlease\S*) (\d)`).FindAllStringSubmatch(text, -1) {
			if _, ok := pages[m[1]+"."+m[2]]; !ok {
				t.Errorf("%s refers to %s(%s), which is not there", file, m[1], m[2])
			}
		}
	}
	for _, want := range []string{"SIGNALS", "EXIT STATUS", "LIMITS", "EXAMPLES"} {
		if pages["underlease-operating.7"].section(want).lines == nil {
			t.Errorf("underlease-operating.7 has no section %s", want)
		}
	}
}
