//go:build linux

// Package packaging runs what is beside it to be copied: lines of cron, units of systemd, manifests, images and scripts.
//
// # Promise
//
// What a user copies is what ran here: a test takes the file itself, and changes no more of it than the names of hosts and the time of
// day. What a page says that a command prints is what it printed, with hosts, numbers and times as words.
//
// # Limits
//
// What a test needs and does not find (a cron, systemd, another user) is said, and is a failure where UNDERLEASE_TEST_REQUIRE names it.
package packaging

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// patience is how long something may take that has to happen, on a machine that is busy with other things.
const patience = 30 * time.Second

// underlease is a build as it is released.
var underlease string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "underlease-packaging-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	// Other users have to reach it.
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	underlease = filepath.Join(dir, "underlease")
	flags := "-s -w"
	if runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64" {
		flags += " -E ulentry" // as in the Makefile
	}
	c := exec.Command("go", "build", "-trimpath", "-ldflags", flags, "-o", underlease, "..")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := c.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, text)
		return 1
	}
	return m.Run()
}

// write makes files below dir, with their directories. What is in a directory whose name ends in bin can be executed.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		mode := fs.FileMode(0o644)
		if strings.HasSuffix(filepath.Dir(path), "bin") {
			mode = 0o755
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		// A script that runs keeps its text: its name gets a new file.
		if err := os.WriteFile(path+".new", []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// install copies the program to a directory.
func install(t *testing.T, dir string) {
	t.Helper()
	b, err := os.ReadFile(underlease)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	servers.WriteProgram(t, filepath.Join(dir, "underlease"), b)
}

// within polls until f is true, and returns false if it is not in time.
func within(d time.Duration, f func() bool) bool {
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		if f() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// replaced is a text in which something is put in the place of something else that has to be there.
func replaced(t *testing.T, text, from, to string) string {
	t.Helper()
	if !strings.Contains(text, from) {
		t.Fatalf("got no %q, want it in\n%s", from, text)
	}
	return strings.ReplaceAll(text, from, to)
}

// code returns how a command ended: its exit code, or 128 + n for signal n.
func code(c *exec.Cmd) int {
	ws := c.ProcessState.Sys().(syscall.WaitStatus)
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

// root says what is missing to make mounts and namespaces.
func root() error {
	if os.Geteuid() != 0 {
		return errors.New("not root: there can be no mounts of our own")
	}
	if out, err := exec.Command("unshare", "--mount", "--pid", "--fork", "mount", "--bind", "/usr", "/usr").CombinedOutput(); err != nil {
		return fmt.Errorf("no namespaces: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// environ is what a command inherits: nothing of ours.
func environ(more ...string) []string {
	return append([]string{"PATH=" + filepath.Dir(underlease) + ":/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent"}, more...)
}

// A page that names a file beside it which is not there sends its reader nowhere.
func TestEveryFileThatAPageNamesIsThere(t *testing.T) {
	pages, err := filepath.Glob("*/README.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("got %d pages and %v, want some", len(pages), err)
	}
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	for _, page := range append(pages, "../README.md") {
		for _, m := range link.FindAllStringSubmatch(read(t, page), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
	}
	// And a directory without a page is one that nobody understands.
	for _, dir := range []string{"cron", "systemd", "kubernetes", "container", "scripts"} {
		if _, err := os.Stat(filepath.Join(dir, "README.md")); err != nil {
			t.Error(err)
		}
	}
}
