package main_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/underlease/underlease"

// layer is what one package may import beside the standard library, and why no more. Names without a dot in their first
// element are packages of this module.
type layer struct {
	may []string
	std []string // if not nil, the only packages of the standard library
	why string
}

// layers is the import table: main -> cmd -> runner -> (backends, signals); backends/X -> backends and its own client library.
var layers = map[string]layer{
	"": {may: []string{"cmd"}, std: []string{"os"}, why: "main ends the process with cmd's code, and does nothing else"},
	"cmd": {
		may: []string{
			"runner", "backends", "backends/all", "signals",
			"github.com/spf13/cobra", "github.com/spf13/pflag", "github.com/spf13/viper", "go.yaml.in/yaml/v3", "golang.org/x/sys/unix",
		},
		why: "the command line alone knows flags, files and terminals; stores reach it through backends/all",
	},
	"runner": {
		may: []string{"runner/internal/tenure", "backends", "signals"},
		why: "a run must not know which store it is on, or that there is a command line",
	},
	"runner/internal/tenure": {
		std: []string{"errors", "fmt", "math", "math/rand/v2", "time"},
		why: "the arithmetic of the deadline is pure: it does no I/O and starts nothing",
	},
	"signals": {may: []string{"signals/guard"}, why: "the tree is held without any library"},
	"signals/guard": {
		std: []string{"errors", "math", "os", "runtime", "slices", "strconv", "sync/atomic", "syscall", "unsafe"},
		why: "the guardian diverts while packages initialise: whatever it imports is initialised before, in every guardian",
	},
	"internal/churn": {
		std: []string{"os", "runtime", "strconv", "syscall"},
		why: "a test binary alone links it, and it has to be initialised before the guardian diverts",
	},
	"internal/needed":              {std: []string{"os", "strings", "testing"}, why: "every test may ask it, also one whose binary is a guardian"},
	"backends":                     {may: []string{"golang.org/x/text/unicode/norm"}, why: "the contract knows no store"},
	"backends/all":                 {may: []string{"backends", "backends/consul", "backends/etcd", "backends/file", "backends/mysql", "backends/postgres", "backends/redis"}, why: "one place links the stores of the released binary; mem is not among them"},
	"backends/backendtest":         {may: []string{"backends"}, why: "the suite is the same for all stores"},
	"backends/backendtest/faults":  {may: []string{"backends", "backends/backendtest/proxy"}, why: "what stores on a network have to bear is the same for all"},
	"backends/backendtest/proxy":   {why: "what happens to connections has nothing to do with stores"},
	"backends/backendtest/servers": {may: []string{"internal/needed"}, why: "what is tested is not its own witness: servers are asked without any client library"},
	"backends/mem":                 {may: []string{"backends"}, why: "a store for tests needs no client library"},
	"packaging/assets":             {why: "what a release has beside the program is made without it being linked"},
	"proof":                        {why: "what is proved is looked at from outside"},
	"proof/stamps":                 {may: []string{"golang.org/x/sys/unix"}, why: "the witness does not trust us: nothing of ours takes part"},
	"proof/figures":                {may: []string{"proof/stamps"}, why: "what is measured is a program like any other"},
	"proof/bench":                  {may: []string{"proof/figures", "backends/backendtest/servers"}, why: "it prints what figures measures, on servers that it starts"},
	"proof/compare":                {may: []string{"proof/stamps"}, why: "what is compared are programs, and their commands are the witness"},
	"proof/job":                    {may: []string{"proof/stamps"}, why: "it is a command like any other"},
	"packaging":                    {why: "what is copied is run from outside, as its users run it"},
	"backends/redis": {
		may: []string{"backends", "backends/network", "github.com/redis/go-redis/v9", "github.com/redis/go-redis/v9/maintnotifications"},
		why: "a store knows the contract and its own client library",
	},
	"backends/network": {may: []string{"backends"}, why: "what stores behind a network have in common knows none of them"},
	"backends/table":   {may: []string{"backends"}, why: "what stores in a database have in common knows none of them"},
	"backends/mysql": {
		may: []string{"backends", "backends/network", "backends/table", "github.com/go-sql-driver/mysql"},
		why: "a store knows the contract and its own client library",
	},
	"backends/table/tabletest": {may: []string{"backends", "backends/backendtest/faults", "backends/backendtest/proxy", "backends/backendtest/servers"}, why: "what a database has to bear is the same for all"},
	"backends/postgres": {
		may: []string{"backends", "backends/network", "backends/table", "github.com/jackc/pgx/v5/pgconn"},
		why: "a store knows the contract and its own client library; pgconn alone, for pgx itself costs more at every start",
	},
	"backends/quorum": {may: []string{"backends"}, why: "what two stores have in common knows neither"},
	"backends/consul": {
		may: []string{"backends", "backends/network", "backends/quorum", "github.com/hashicorp/consul/api"},
		why: "a store knows the contract, the protocol that it shares, and its own client library",
	},
	"backends/etcd": {
		may: []string{"backends", "backends/network", "backends/quorum"},
		why: "a dozen messages of etcd need no library: that of etcd takes two milliseconds before main, of every run on every store",
	},
	"backends/file": {may: []string{"backends", "golang.org/x/sys/unix"}, why: "a store knows the contract and its own client library"},
}

// restricted are packages that only the named ones may import, in their tests too.
var restricted = []struct {
	pkg  string
	only []string
	why  string
}{
	{"github.com/spf13/cobra", []string{"cmd"}, "nobody else knows that there is a command line"},
	{"github.com/spf13/viper", []string{"cmd"}, "settings reach the rest as values: viper fills flags, and nobody reads it"},
	{"github.com/spf13/pflag", []string{"cmd"}, "settings reach the rest as values"},
	{"go.yaml.in/yaml/v3", []string{"cmd"}, "only the settings file is YAML"},
	{"github.com/hashicorp/consul/api", []string{"backends/consul"}, "a client library is the matter of its store alone"},
	{"github.com/redis/go-redis/v9", []string{"backends/redis"}, "a client library is the matter of its store alone"},
	{"github.com/go-sql-driver/mysql", []string{"backends/mysql"}, "a client library is the matter of its store alone"},
	{"github.com/jackc/pgx/v5/pgconn", []string{"backends/postgres"}, "a client library is the matter of its store alone"},
}

type goPackage struct {
	ImportPath, Dir                    string
	GoFiles                            []string
	Imports, TestImports, XTestImports []string
}

func listPackages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Dir,GoFiles,Imports,TestImports,XTestImports", "./...")
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatalf("go list: %v", err)
	}
	var all []goPackage
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// short is a package of this module without the module's path.
func short(path string) string {
	return strings.TrimPrefix(strings.TrimPrefix(path, module), "/")
}

func isStandard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

func TestImportsPointOneWay(t *testing.T) {
	seen := map[string]bool{}
	used := map[string]bool{}
	for _, p := range listPackages(t) {
		name := short(p.ImportPath)
		seen[name] = true
		row, known := layers[name]
		if !known {

			t.Errorf("%s has no row in the table of layers: add one, with its reason", p.ImportPath)
			continue
		}
		for _, imp := range p.Imports {
			used[imp] = true
			switch {
			case isStandard(imp):
				if row.std != nil && !slices.Contains(row.std, imp) {
					t.Errorf("%s imports %s, and may not: %s", p.ImportPath, imp, row.why)
				}
			case !slices.Contains(row.may, short(imp)):
				t.Errorf("%s imports %s, and may not: %s", p.ImportPath, imp, row.why)
			}
		}
		for _, r := range restricted {
			everything := slices.Concat(p.Imports, p.TestImports, p.XTestImports)
			if slices.Contains(everything, r.pkg) && !slices.Contains(r.only, name) {
				t.Errorf("%s imports %s, and only %v may: %s", p.ImportPath, r.pkg, r.only, r.why)
			}
		}
	}
	// A rule about a package that is gone would hold for ever and say nothing.
	for name := range layers {
		if !seen[name] {
			t.Errorf("the table of layers has a row for %q, and there is no such package", name)
		}
	}
	for _, r := range restricted {
		if !used[r.pkg] {
			t.Errorf("nobody imports %s any more: remove its rule", r.pkg)
		}
	}
	for name, row := range layers {
		for _, may := range row.may {
			path := may
			if isStandard(may) {
				path = module + "/" + may
			}
			if !used[path] {
				t.Errorf("the row of %q allows %s, which nobody imports", name, may)
			}
		}
	}
}

func TestTheReleasedBinaryDoesNotLinkTheStoreForTests(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	for _, pkg := range []string{module + "/backends/mem", module + "/backends/backendtest", module + "/internal/churn", "testing"} {
		if slices.Contains(deps, pkg) {
			t.Errorf("the program links %s", pkg)
		}
	}
	if !slices.Contains(deps, module+"/backends/file") {
		t.Error("the program does not link the file store: the list that was looked at is not the right one")
	}
}

func TestTheDeadlineMachineHasNoClockAndStartsNothing(t *testing.T) {
	clock := []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}
	files, err := filepath.Glob("runner/internal/tenure/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("got %d files and %v, want the machine's", len(files), err)
	}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%v: a goroutine", fset.Position(n.Pos()))
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(clock, n.Sel.Name) {
					t.Errorf("%v: time.%s", fset.Position(n.Pos()), n.Sel.Name)
				}
			}
			return true
		})
	}
}

// Whoever looks up a method by a name that the compiler does not see makes the linker keep every exported method of every
// type: with the client libraries of stores that is most of the binary. Package text/template does.
func TestTheLinkerMayDropWhatNobodyCalls(t *testing.T) {
	c := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(t.TempDir(), "underlease"), "-ldflags=-dumpdep", ".")
	c.Env = append(c.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "main.main -> ") {
		t.Fatalf("go build: %v, and %d bytes of dependencies", err, len(out))
	}
	for line := range strings.Lines(string(out)) {
		if _, to, ok := strings.Cut(line, " -> "); ok && strings.Contains(to, "<ReflectMethod>") {
			t.Errorf("%s", line)
		}
	}
}
