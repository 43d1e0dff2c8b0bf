package cmd

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/all"
	"github.com/underlease/underlease/runner"
)

const (
	variablePrefix = "UNDERLEASE_"
	leasesKey      = "leases"
	userFile       = "underlease.yaml"

	maxSettingsFile = 1 << 20
	maxBackendFile  = 64 << 10
)

// origin says where a setting came from.
type origin struct {
	Source   string // one of the words below
	Flag     string // "--ttl"
	Variable string // "UNDERLEASE_TTL"
	File     string
	Line     int    // in File
	Section  string // the lease whose section of File it is in, with sourceSection
	Key      string // in File
}

// The sources of a setting, each of which wins over those before it.
const (
	sourceDefault     = "default"
	sourceFile        = "file"
	sourceSection     = "lease"
	sourceEnvironment = "environment"
	sourceFlag        = "flag"
)

// weaker reports whether a value from o gives way to one from p, which says something else.
func (o origin) weaker(p origin) bool {
	order := []string{sourceDefault, sourceFile, sourceSection, sourceEnvironment, sourceFlag}
	return slices.Index(order, o.Source) < slices.Index(order, p.Source)
}

// String is how an error begins that is about a value from there.
func (o origin) String() string {
	switch o.Source {
	case sourceFlag:
		return o.Flag
	case sourceEnvironment:
		return o.Variable
	case sourceFile:
		return fmt.Sprintf("%s: line %d: %s", o.File, o.Line, o.Key)
	case sourceSection:
		return fmt.Sprintf("%s: line %d: %s: %s: %s", o.File, o.Line, leasesKey, strconv.Quote(o.Section), o.Key)
	default:
		return o.Key
	}
}

// given is the text of a setting and where it stands.
type given struct {
	text string
	from origin
}

// document is a settings file: the values of its top level, and those of each lease's section, by key.
type document struct {
	top    map[string]any // of given
	leases map[string]map[string]any
}

// where knows the origin of each setting in force, by flag name, and what was read.
type where struct {
	origins map[string]origin
	files   []readFile
	strange []strangeVariable
}

// readFile is a settings file that was looked for.
type readFile struct {
	path string
	data []byte // nil where there is none
}

type strangeVariable struct{ name, nearest string }

// load fills the flags that were not given on the command line: from the environment, else from the lease's section of
// the settings files, else from their top level. Lease may be empty: then there is no section.
//
// Viper decides which of them wins; the values stay texts, with their origins, until the flag's own parser reads them.
func load(flags *pflag.FlagSet, lease string, environ []string, files []readFile) (where, error) {
	w := where{origins: map[string]origin{}, files: files}
	v := viper.New()
	variables, strange := environment(flags, environ)
	w.strange = strange

	var docs []document
	for _, f := range files {
		if f.data == nil {
			continue
		}
		d, err := parseSettings(f.path, f.data, flags)
		if err != nil {
			return w, err
		}
		docs = append(docs, d)
	}
	layers := make([]map[string]any, 0, 2*len(docs)+1)
	for _, d := range docs {
		layers = append(layers, d.top)
	}
	for _, d := range docs {
		if lease != "" && d.leases[lease] != nil {
			layers = append(layers, d.leases[lease])
		}
	}
	for _, layer := range append(layers, variables) {
		if err := v.MergeConfigMap(layer); err != nil {
			return w, err
		}
	}
	if err := v.BindPFlags(flags); err != nil {
		return w, err
	}

	var failed error
	flags.VisitAll(func(f *pflag.Flag) {
		g, fromBelow := v.Get(f.Name).(given)
		switch {
		case f.Changed:
			w.origins[f.Name] = origin{Source: sourceFlag, Flag: "--" + f.Name}
		case !fromBelow:
			w.origins[f.Name] = origin{Source: sourceDefault, Key: f.Name}
		default:
			w.origins[f.Name] = g.from
			if err := f.Value.Set(g.text); err != nil && failed == nil {
				failed = settingsf(backends.Hint(err), "%v: %v", g.from, err)
			}
		}
	})
	return w, failed
}

func variableOf(flag string) string {
	return variablePrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// environment returns the settings among the variables, by flag name, and the variables of ours that are neither a
// setting nor a fact. A variable that is set twice counts as the C library's getenv sees it: the first one wins.
func environment(flags *pflag.FlagSet, environ []string) (map[string]any, []strangeVariable) {
	var names map[string]string // variable to flag
	found := map[string]any{}
	var strange []strangeVariable
	for _, entry := range environ {
		if !strings.HasPrefix(entry, variablePrefix) {
			continue
		}
		if names == nil {
			names = map[string]string{}
			flags.VisitAll(func(f *pflag.Flag) { names[variableOf(f.Name)] = f.Name })
		}
		variable, text, _ := strings.Cut(entry, "=")
		name, ok := names[variable]
		switch {
		case ok && found[name] == nil:
			found[name] = given{text, origin{Source: sourceEnvironment, Variable: variable}}
		case ok || slices.Contains(runner.Facts(), variable):
		default:
			known := make([]string, 0, len(names))
			for v := range names {
				known = append(known, strings.TrimPrefix(v, variablePrefix))
			}
			slices.Sort(known)
			near := all.Nearest(strings.ToUpper(strings.TrimPrefix(variable, variablePrefix)), known)
			if near != "" {
				near = variablePrefix + near
			}
			strange = append(strange, strangeVariable{variable, near})
		}
	}
	return found, strange
}

// lookup returns the first variable of that name.
func lookup(environ []string, name string) (string, bool) {
	for _, entry := range environ {
		if key, value, ok := strings.Cut(entry, "="); ok && key == name {
			return value, true
		}
	}
	return "", false
}

// readSettings reads the file that --config or UNDERLEASE_CONFIG names, else the system's and, over it, the user's. A
// default file that does not exist is no error. Without HOME and XDG_CONFIG_HOME there is no user's file.
func readSettings(flags *pflag.FlagSet, environ []string, systemFile string) ([]readFile, error) {
	named, from := "", origin{}
	if f := flags.Lookup("config"); f.Changed {
		named, from = f.Value.String(), origin{Source: sourceFlag, Flag: "--config"}
	} else if text, ok := lookup(environ, variableOf("config")); ok {
		from = origin{Source: sourceEnvironment, Variable: variableOf("config")}
		if err := f.Value.Set(text); err != nil {
			return nil, settingsf("", "%v: %v", from, err)
		}
		named = text
	}
	if named != "" {
		data, err := readTrusted(named, maxSettingsFile)
		if err != nil {
			return nil, settingsf(backends.Hint(err), "%v: cannot read the settings file: %v", from, err)
		}
		return []readFile{{named, data}}, nil
	}
	var files []readFile
	for _, path := range []string{systemFile, userSettings(environ)} {
		if path == "" {
			continue
		}
		data, err := readTrusted(path, maxSettingsFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			hint := cmp.Or(backends.Hint(err), "mend it, name another with --config, or set HOME where it is another user's")
			return nil, settingsf(hint, "cannot read the settings file: %v", err)
		}
		files = append(files, readFile{path, data})
	}
	return files, nil
}

func userSettings(environ []string) string {
	// Source: XDG Base Directory Specification 0.8: a relative path is invalid and is to be ignored.
	if dir, _ := lookup(environ, "XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, userFile)
	}
	if home, _ := lookup(environ, "HOME"); home != "" {
		return filepath.Join(home, ".config", userFile)
	}
	return ""
}

// readTrusted reads a file that says to which store a run goes, or what it asks a shell: one that others own or may write is refused. It never
// returns nil without an error. Its errors name the path.
func readTrusted(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, plainPathError(err)
	}
	defer func() { _ = f.Close() }()
	if err := trusted(f, os.Geteuid()); err != nil {
		return nil, err
	}
	return readAll(f, most)
}

func readAll(f *os.File, most int) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	switch {
	case err != nil:
		return nil, plainPathError(err)
	case len(data) > most:
		return nil, fmt.Errorf("%s has more than %d bytes", f.Name(), most)
	case data == nil:
		data = []byte{}
	}
	return data, nil
}

// plainPathError puts the path first and leaves the name of the system call out.
func plainPathError(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("%s: %w", p.Path, p.Err)
	}
	return err
}

// parseSettings reads a settings file. Every key and every value is checked, in the sections of other leases too; values are left as texts.
func parseSettings(path string, data []byte, flags *pflag.FlagSet) (document, error) {
	doc := document{top: map[string]any{}, leases: map[string]map[string]any{}}
	if !utf8.Valid(data) {
		valid := data
		for i := 0; i < len(data); {
			r, n := utf8.DecodeRune(data[i:])
			if r == utf8.RuneError && n == 1 {
				valid = data[:i]
				break
			}
			i += n
		}
		return doc, settingsf("write the file as UTF-8", "%s: line %d: not UTF-8", path, 1+bytes.Count(valid, []byte("\n")))
	}
	root, err := decodeOne(path, data)
	if err != nil || root == nil {
		return doc, err
	}
	p := settingsParser{path: path, flags: flags}
	err = p.mapping(root, "the file", func(key, val *yaml.Node) error {
		if key.Value == leasesKey {
			return p.sections(val, doc.leases)
		}
		return p.setting(key, val, "", doc.top)
	})
	return doc, err
}

// decodeOne returns the only document of a YAML stream, or nil where it holds nothing but comments.
func decodeOne(path string, data []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	switch err := dec.Decode(&first); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, yamlError(path, err)
	}
	switch err := dec.Decode(&second); {
	case err == nil:
		return nil, settingsf("keep one document", "%s: line %d: a second document begins, of which nothing would be read", path, second.Line)
	case !errors.Is(err, io.EOF):
		return nil, yamlError(path, err)
	}
	if first.Kind != yaml.DocumentNode || len(first.Content) != 1 {
		return nil, nil
	}
	root := first.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil, nil
	}
	return root, nil
}

func yamlError(path string, err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	return settingsf("", "%s: not YAML: %s", path, strings.ReplaceAll(text, "\n", " "))
}

type settingsParser struct {
	path  string
	flags *pflag.FlagSet
}

func (p settingsParser) errorf(n *yaml.Node, hint, format string, args ...any) error {
	return settingsf(hint, "%s: line %d: %s", p.path, n.Line, fmt.Sprintf(format, args...))
}

// mapping calls do for every key of n, in order. No key may stand twice.
func (p settingsParser) mapping(n *yaml.Node, what string, do func(key, val *yaml.Node) error) error {
	n = target(n)
	if n.Kind != yaml.MappingNode {
		return p.errorf(n, "", "%s is %s: give keys with values, such as ttl: 60s", what, kindOf(n))
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := target(n.Content[i]), n.Content[i+1]
		switch {
		case key.Kind != yaml.ScalarNode:
			return p.errorf(n.Content[i], "", "a key is %s: give a name", kindOf(key))
		case key.Tag == "!!merge":
			return p.errorf(key, "", "the key << is not known here: write the settings out, or use an alias for a whole section")
		case lines[key.Value] != 0:
			return p.errorf(key, "keep one of the two", "%q stands twice: also in line %d", key.Value, lines[key.Value])
		}
		lines[key.Value] = key.Line
		if err := do(key, val); err != nil {
			return err
		}
	}
	return nil
}

// target follows one alias. An alias of an alias cannot be written.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode && n.Alias != nil {
		return n.Alias
	}
	return n
}

func (p settingsParser) sections(n *yaml.Node, into map[string]map[string]any) error {
	return p.mapping(n, leasesKey, func(key, val *yaml.Node) error {
		if err := backends.CheckLease(key.Value); err != nil {
			return p.errorf(key, "", "%s: %v", leasesKey, err)
		}
		section := map[string]any{}
		into[key.Value] = section
		return p.mapping(val, "the section of "+strconv.Quote(key.Value), func(k, v *yaml.Node) error {
			return p.setting(k, v, key.Value, section)
		})
	})
}

func (p settingsParser) setting(key, val *yaml.Node, section string, into map[string]any) error {
	f := p.flags.Lookup(key.Value)
	switch {
	case f == nil:
		var names []string
		p.flags.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if section == "" {
			names = append(names, leasesKey)
		}
		hint := "underlease config shows all settings"
		if near := all.Nearest(key.Value, names); near != "" {
			hint = "did you mean " + near
		}
		return p.errorf(key, hint, "unknown key %q", key.Value)
	case f.Name == "config":
		return p.errorf(key, "give it on the command line or as "+variableOf("config"), "a settings file cannot name another one")
	}
	scalar := target(val)
	switch {
	case scalar.Kind != yaml.ScalarNode:
		return p.errorf(val, "", "%s is %s: give one %s", key.Value, kindOf(scalar), f.Value.Type())
	case scalar.Tag == "!!null":
		return p.errorf(val, "", "%s has no value: give one, or remove the line", key.Value)
	}
	from := origin{Source: sourceFile, File: p.path, Line: key.Line, Key: key.Value}
	if section != "" {
		from.Source, from.Section = sourceSection, section
	}
	if v, ok := f.Value.(interface{ check(string) error }); ok && section != "" { // the others are read below
		if err := v.check(scalar.Value); err != nil {
			return settingsf(backends.Hint(err), "%v: %v", from, err)
		}
	}
	into[key.Value] = given{scalar.Value, from}
	return nil
}

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a table"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "empty"
		}
		return "a single value"
	default:
		return "not a value"
	}
}

// settle checks what holds between settings and reads --backend-file. What it refuses is a matter of several settings, or of
// a file, and therefore 78 wherever they came from.
func (s *settings) settle(w *where, flags *pflag.FlagSet) error {
	set := func(name string) bool { return w.origins[name].Source != sourceDefault }
	// Of two settings that say the same thing in two ways the stronger one wins, as it would with one.
	for _, pair := range [][2]string{{"backend", "backend-file"}, {"wait", "on-busy"}} {
		for _, name := range pair {
			other := pair[0]
			if name == other {
				other = pair[1]
			}
			if set(other) && w.origins[name].weaker(w.origins[other]) && set(name) {
				f := flags.Lookup(name)
				if name == "backend-file" {
					s.backendFile = "" // its parser refuses an empty one
				} else if err := f.Value.Set(f.DefValue); err != nil {
					return err
				}
				w.origins[name] = origin{Source: sourceDefault, Key: name}
			}
		}
	}
	if s.backendFile != "" {
		if set("backend") {
			return settingsf("keep one of them", "both %v and %v name the store", w.origins["backend"], w.origins["backend-file"])
		}
		url, err := readBackendFile(s.backendFile)
		if err == nil {
			err = flags.Lookup("backend").Value.Set(url)
			if err != nil {
				err = fmt.Errorf("%s: %w", s.backendFile, err)
			}
		}
		if err != nil {
			return settingsf(backends.Hint(err), "%v: %v", w.origins["backend-file"], err)
		}
		w.origins["backend"] = origin{Source: sourceFile, File: s.backendFile, Line: 1, Key: "backend"}
	}
	if s.onBusy == busyWait {
		if set("wait") && s.wait != runner.Forever {
			return settingsf("leave one of them out", "%v says to wait without an end, and %v says to wait %s", w.origins["on-busy"], w.origins["wait"], runner.Short(s.wait))
		}
		s.wait = runner.Forever
		if !set("wait") {
			w.origins["wait"] = w.origins["on-busy"]
		}
	}
	return nil
}

// readBackendFile returns the URL in a file. Who can read it has the password, but a mounted secret is often readable by all.
func readBackendFile(path string) (string, error) {
	data, err := readTrusted(path, maxBackendFile)
	if err != nil {
		return "", err
	}
	url := strings.TrimRight(string(data), "\r\n\t ")
	if n := strings.Count(url, "\n"); n > 0 {
		return "", backends.WithHint(fmt.Errorf("%s has %d lines", path, n+1), "it holds the URL of the store and nothing else")
	}
	return url, nil
}

func trusted(f *os.File, uid int) error {
	info, err := f.Stat()
	if err != nil {
		return plainPathError(err)
	}
	if _, inherited := ownDescriptor(f.Name()); inherited && !info.Mode().IsRegular() {
		return nil // a pipe that whoever started us has made
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	switch {
	case owner != uid && owner != 0:
		return backends.WithHint(fmt.Errorf("%s belongs to the user %d, who could send this run to another store", f.Name(), owner),
			"give it to root, or to the user %d, who runs this", uid)
	case info.Mode().IsRegular() && info.Mode().Perm()&0o022 != 0:
		return backends.WithHint(fmt.Errorf("%s can be written by others than its owner (mode %04o)", f.Name(), info.Mode().Perm()),
			"chmod go-w %s", f.Name())
	}
	return nil
}
