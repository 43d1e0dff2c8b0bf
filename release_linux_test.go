//go:build linux

package main

import (
	"bytes"
	"debug/buildinfo"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/internal/needed"
)

// released builds the program as the Makefile and releases do, once.
var released = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "underlease-released-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	flags := "-s -w"
	if runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64" {
		flags += " -E ulentry"
	}
	c := exec.Command("go", "build", "-trimpath", "-ldflags", flags, "-o", filepath.Join(dir, "underlease"), ".")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build: %w\n%s", err, out)
	}
	return os.ReadFile(filepath.Join(dir, "underlease"))
})

// install puts the program into a directory, which may be the root of another system.
func install(t *testing.T, dir string) (path string) {
	t.Helper()
	program, err := released()
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "underlease")
	servers.WriteProgram(t, path, program)
	return path
}

// The bars of DESIGN: how large the program may be, how much it may link, and how much longer than an empty program of Go it may take
// to start and end. The last one is a ratio of times that were taken side by side, so that it holds on any machine: of medians, or of the
// shortest, where another package that is tested beside this one makes the longer program wait more often than the shorter one.
const (
	mostBytes   = 35 << 20
	mostModules = 60
	mostStart   = 4.0
)

func TestBudgetOfTheProgram(t *testing.T) {
	path := install(t, t.TempDir())
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	build, err := buildinfo.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%.1f MB, %d modules linked", float64(info.Size())/(1<<20), len(build.Deps))
	if info.Size() > mostBytes {
		t.Errorf("got a program of %d bytes, want at most %d", info.Size(), mostBytes)
	}
	if len(build.Deps) > mostModules {
		t.Errorf("got %d linked modules, want at most %d", len(build.Deps), mostModules)
	}
	for _, s := range build.Settings {
		if s.Key == "CGO_ENABLED" && s.Value != "0" {
			t.Errorf("got CGO_ENABLED=%s, want 0", s.Value)
		}
	}
	for _, d := range build.Deps {
		if d.Replace != nil {
			t.Errorf("%s is replaced by %s: what was checked is not what is linked", d.Path, d.Replace.Path)
		}
	}
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if libraries, err := f.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("got the libraries %q and %v, want a static program", libraries, err)
	}
}

func TestBudgetOfTheStart(t *testing.T) {
	dir := t.TempDir()
	program, empty := install(t, dir), filepath.Join(dir, "empty")
	if err := os.WriteFile(empty+".go", []byte("package main\n\nfunc main() {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", empty, empty+".go")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	const pairs = 60
	took := map[string][]time.Duration{}
	for range pairs {
		for _, words := range [][]string{{empty}, {program, "version"}} {
			from := time.Now()
			if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%q: %v\n%s", words, err, out)
			}
			took[words[0]] = append(took[words[0]], time.Since(from))
		}
	}
	slices.Sort(took[program])
	slices.Sort(took[empty])
	times := func(i int) float64 {
		mine, least := took[program][i], took[empty][i]
		ratio := float64(mine) / float64(least)
		t.Logf("number %d of %d: an empty program %v, underlease version %v: %.2f times", i+1, pairs, least, mine, ratio)
		return ratio
	}
	if ratio := min(times(pairs/2), times(0)); ratio > mostStart {
		t.Errorf("got %.2f times an empty program, want at most %.1f", ratio, mostStart)
	}
}

func TestTheManPagesAreClean(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("packaging/man/*.[0-9]")
	if err != nil || len(pages) == 0 {
		t.Fatalf("got %d pages and %v", len(pages), err)
	}
	t.Run("mandoc", func(t *testing.T) {
		needed.Require(t, "mandoc", program("mandoc")())
		for _, page := range pages {
			if out, err := exec.Command("mandoc", "-Tlint", "-Wwarning", page).CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("mandoc: %v\n%s", err, out)
			}
		}
	})
	t.Run("man", func(t *testing.T) {
		needed.Require(t, "man", program("man")())
		for _, page := range pages {
			c := exec.Command("man", "--warnings", "-E", "UTF-8", "-l", page)
			c.Env = append(os.Environ(), "MANWIDTH=80", "MANPAGER=cat", "LC_ALL=C.UTF-8")
			var warnings bytes.Buffer
			c.Stderr = &warnings
			out, err := c.Output()
			if err != nil || warnings.Len() > 0 || !bytes.Contains(out, []byte("underlease")) {
				t.Errorf("%s: got %v, %d bytes and the warnings %q", page, err, len(out), &warnings)
			}
		}
	})
}

func TestMakeInstallPutsEverythingInItsPlace(t *testing.T) {
	t.Parallel()
	needed.Require(t, "make", program("make")())
	dir := t.TempDir()
	c := exec.Command("make", "-s", "install", "PREFIX=/usr", "DESTDIR="+dir)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("make install: %v\n%s", err, out)
	}
	want := []string{"bin/underlease", "share/bash-completion/completions/underlease", "share/zsh/site-functions/_underlease", "share/fish/vendor_completions.d/underlease.fish"}
	pages, err := filepath.Glob("packaging/man/*.[0-9]")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		want = append(want, "share/man/man"+page[len(page)-1:]+"/"+filepath.Base(page))
	}
	for _, file := range want {
		if info, err := os.Stat(filepath.Join(dir, "usr", file)); err != nil || info.Size() == 0 {
			t.Errorf("%s: got %v, want a file", file, err)
		}
	}
}

func TestTheExampleOfTheSettingsIsOne(t *testing.T) {
	t.Parallel()
	path := install(t, t.TempDir())
	c := exec.Command(path, "config", "--config", "packaging/underlease.yaml", "nightly-backup")
	c.Env = []string{"HOME=/nonexistent"}
	out, err := c.CombinedOutput()
	if err != nil || !regexp.MustCompile(`(?m)^once-per +1d +\S+ \(leases: nightly-backup\)$`).Match(out) {
		t.Errorf("got %v, want its once-per\n%s", err, out)
	}
}

// The first commands of the README, as printed, in a fresh clone; and, for root, in a fresh root: the system's programs, Go, and nothing that
// was ever compiled or set.
func TestTheFirstCommandsOfTheREADMEAreEnough(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("(?m)^(CGO_ENABLED=0 go build .*run demo -- echo hello)$").FindSubmatch(text)
	if found == nil {
		t.Fatal("the README has no command that builds and runs")
	}
	dir := t.TempDir()
	clone := filepath.Join(dir, "clone")
	if out, err := exec.Command("git", "clone", "-q", "--depth=1", "file://"+workTree(t), clone).CombinedOutput(); err != nil {
		t.Skipf("SKIPPED, the README's command was not tried: this tree cannot be cloned: %v\n%s", err, out)
	}
	c := exec.Command("sh", "-c", string(found[1]))
	c.Dir = clone
	where := "a fresh clone, with what was compiled before: a fresh root is root's to make"
	if os.Geteuid() == 0 {
		where = "a fresh clone in a fresh root"
		c = inFreshRoot(t, filepath.Join(dir, "root"), clone, string(found[1]))
	} else {
		c.Env = append(slices.DeleteFunc(os.Environ(), func(entry string) bool { return strings.HasPrefix(entry, "UNDERLEASE_") }), "XDG_STATE_HOME="+dir)
	}
	var words bytes.Buffer // which modules are downloaded
	c.Stderr = &words
	from := time.Now()
	out, err := c.Output()
	t.Logf("%s, in %s: %v", found[1], where, time.Since(from).Round(time.Millisecond))
	if err != nil || string(out) != "hello\n" {
		t.Errorf("got %v and %q, want hello\n%s", err, out, &words)
	}
}

// inFreshRoot returns a line for the shell to run in a clone, in a root with the system's programs and libraries, Go and the modules as they
// were downloaded; without caches, settings and state of anybody.
func inFreshRoot(t *testing.T, root, clone, line string) *exec.Cmd {
	t.Helper()
	needed.Require(t, "unshare", exec.Command("unshare", "--mount", "--pid", "--fork", "true").Run()) // root of a container may not
	env, err := exec.Command("go", "env", "GOROOT", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	goroot, modules, _ := strings.Cut(strings.TrimSpace(string(env)), "\n")
	mount := "set -e\n"
	bind := func(from, to string) {
		to = filepath.Join(root, to)
		if err := os.MkdirAll(to, 0o755); err != nil {
			t.Fatal(err)
		}
		mount += "mount --bind '" + from + "' '" + to + "'\n"
	}
	bind("/usr", "usr")
	for _, name := range []string{"bin", "sbin", "lib", "lib64"} {
		link, err := os.Readlink("/" + name)
		switch {
		case err == nil:
			err = os.Symlink(link, filepath.Join(root, name))
		case errors.Is(err, syscall.EINVAL): // no link
			err = nil
			bind("/"+name, name)
		case errors.Is(err, os.ErrNotExist):
			err = nil
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	bind(goroot, "go")
	bind(filepath.Join(modules, "cache", "download"), "modules")
	bind("/dev", "dev")
	bind(clone, "clone")
	for dir, mode := range map[string]os.FileMode{"proc": 0o555, "root": 0o700, "tmp": 0o700} {
		if err := os.Mkdir(filepath.Join(root, dir), mode); err != nil {
			t.Fatal(err)
		}
	}
	mount += "mount -t proc proc '" + filepath.Join(root, "proc") + "'\n" +
		`exec chroot "$1" env -i PATH=/go/bin:/usr/bin:/bin HOME=/root GOPROXY=file:///modules GOTOOLCHAIN=local sh -c "cd /clone && $2"`
	c := exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", mount, "sh", root, line)
	c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	return c
}

func workTree(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// A root with the program and nothing else: no shell, no /tmp, no /etc, no HOME, no library.
func TestInAnEmptyRootItWorksOrSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	needed.Require(t, "root", needs["root"]())
	needed.Require(t, "unshare", program("unshare")())
	chroot, err := exec.LookPath("chroot")
	if err != nil {
		chroot = "/usr/sbin/chroot" // not in the PATH of everybody
	}
	for _, c := range []struct {
		name string
		proc bool
		user string
		args []string
		exit int
		want string // a pattern of all that it prints
	}{
		{"as root", true, "0", []string{"run", "x", "--", "/underlease", "--version"}, 0, `^underlease \S+\n$`},
		{"a store that is named", true, "1000", []string{"run", "--backend", "file:///state", "x", "--", "/underlease", "--version"}, 0, `^underlease \S+\n$`},
		{"as nobody without a home", true, "1000", []string{"run", "x", "--", "/underlease", "--version"}, 78, `^underlease: HOME .*no default directory\nunderlease: hint: set HOME, or name a directory with file:///dir\n$`},
		{"without proc", false, "0", []string{"run", "x", "--", "/underlease", "--version"}, 71, `^underlease: .*/proc`},
		{"a command that is not there", true, "0", []string{"run", "x", "--", "true"}, 127, `^underlease: true: command not found\n`},
		{"a check that needs a shell", true, "0", []string{"gate", "--applied-if", "true", "x", "--", "/underlease", "--version"}, 69, `^underlease: .*"?sh"?`},
		{"a look", true, "0", []string{"list"}, 0, ``},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			install(t, root)
			state := filepath.Join(root, "state")
			if err := errors.Join(os.Mkdir(state, 0o700), os.Chown(state, 1000, 1000), os.Mkdir(filepath.Join(root, "proc"), 0o555)); err != nil {
				t.Fatal(err)
			}
			words := []string{"--mount", "--pid", "--fork"}
			if c.proc {
				words = append(words, "--mount-proc="+filepath.Join(root, "proc"))
			}
			words = append(words, "env", "-i", chroot, "--userspec="+c.user+":"+c.user, root, "/underlease")
			run := exec.Command("unshare", append(words, c.args...)...)
			run.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
			out, err := run.CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok && !exit.Exited() {
				t.Fatalf("got %v\n%s", err, out)
			}
			if got := run.ProcessState.ExitCode(); got != c.exit || !regexp.MustCompile(c.want).Match(out) {
				t.Errorf("got the exit code %d and %q, want %d and %s", got, out, c.exit, c.want)
			}
		})
	}
}

// An action that is named by a tag is whatever its owner says today.
func TestWorkflowsPinWhatTheyUseAndMayOnlyRead(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(".github/workflows/*")
	if err != nil || len(files) < 2 {
		t.Fatalf("got the workflows %q and %v, want ci and release", files, err)
	}
	uses := regexp.MustCompile(`(?m)^\s*-?\s*uses:\s*(.*)$`)
	pinned := regexp.MustCompile(`^[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range uses.FindAllSubmatch(text, -1) {
			if !pinned.Match(m[1]) {
				t.Errorf("%s: got %q, want the hash of a commit and its version behind it", f, m[1])
			}
		}
		if !bytes.Contains(text, []byte("\npermissions:\n  contents: read\n")) {
			t.Errorf("%s: the workflow may do more than read", f)
		}
		if bytes.Contains(text, []byte("pull_request_target")) {
			t.Errorf("%s: strangers' changes run with our rights", f)
		}
		if !bytes.Contains(text, []byte(".ci/run")) {
			t.Errorf("%s does not call .ci/run", f)
		}
	}
}
