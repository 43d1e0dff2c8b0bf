//go:build linux

package proof

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// earlier are the commits that stand for the version before this one while there is no tag: the first whose runs were proved, on the
// store file:, the first with Redis, and the first with all stores.
var earlier = []string{
	"8c8d13b4117458e2ec17b8a95d98355e85c6aedc",
	"9b279cd6e22f2a169dc377b065563e28e40db4a7",
	"74f313dff3cb8ec4632a4e1a02c1471c49794c80",
}

// previous returns the version before this one: the last tag before HEAD, else the commits of earlier. Without the history of
// this tree it skips the test, loudly.
func previous(t *testing.T) []string {
	t.Helper()
	shallow, err := git("rev-parse", "--is-shallow-repository")
	if err != nil {
		t.Skipf("SKIPPED, the version before this one was not tested: this tree has no history: %v", err)
	}
	if tag, err := git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"); err == nil {
		return []string{tag}
	}
	for _, commit := range earlier {
		if _, err := git("rev-parse", "--verify", "--quiet", commit+"^{commit}"); err == nil {
			continue
		}
		if shallow == "true" {
			t.Skipf("SKIPPED, the version before this one was not tested: this clone is shallow and has no commit %.12s", commit)
		}
		servers.Require(t, "history", fmt.Errorf("no commit %.12s", commit))
	}
	return earlier
}

func git(args ...string) (string, error) {
	out, err := exec.Command("git", append([]string{"-C", ".."}, args...)...).Output()
	return strings.TrimSpace(string(out)), err
}

// buildAt builds the program of a commit.
func buildAt(t *testing.T, commit string) string {
	t.Helper()
	dir := t.TempDir()
	tree, program := filepath.Join(dir, "tree.tar"), filepath.Join(dir, "underlease")
	if out, err := git("archive", "--output", tree, commit); err != nil {
		t.Fatalf("git archive %s: %v\n%s", commit, err, out)
	}
	source := filepath.Join(dir, "source")
	if err := os.Mkdir(source, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("tar", "-xf", tree, "-C", source).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	c := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, ".")
	c.Dir, c.Env = source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go build of %s: %v\n%s", commit, err, out)
	}
	return program
}

// While hosts are upgraded one after the other, both versions contend on one name.
func TestTheVersionBeforeAndThisOneNeverOverlap(t *testing.T) {
	for _, commit := range previous(t) {
		t.Run(fmt.Sprintf("%.12s", commit), func(t *testing.T) {
			old := buildAt(t, commit)
			for name, open := range onceStores {
				t.Run(name, func(t *testing.T) {
					if !knows(t, old, name) {
						t.Skipf("the version before knows no store %s", name)
					}
					contendAcross(t, old, open(t), name)
				})
			}
		})
	}
}

// knows reports whether a program has a kind of store. No store is asked for that.
func knows(t *testing.T, program, scheme string) bool {
	t.Helper()
	c := exec.Command(program, "config", "--backend", scheme+"://host")
	c.Env = environ()
	out, err := c.CombinedOutput()
	if err != nil && (code(c) != 64 || !bytes.Contains(out, []byte("no store has the scheme"))) {
		t.Fatalf("config --backend %s://host: got %v and %q", scheme, err, out)
	}
	return err == nil
}

// contendAcross lets both versions contend on one lease of a store that both know.
func contendAcross(t *testing.T, old, url, store string) {
	const contenders, each = 6, 15
	dir := t.TempDir()
	t.Logf("seed %d", *seed)
	var (
		mu  sync.Mutex
		had = map[bool]int{} // commands that began, by whether the version before started them
		wg  sync.WaitGroup
	)
	for i := range contenders {
		r := rand.New(rand.NewPCG(*seed, uint64(i)))
		before := i%2 == 0
		program := bin.underlease
		if before {
			program = old
		}
		wg.Go(func() {
			for range each {
				// A killed wrapper keeps the lease for its ttl on a store for several hosts: there nobody is killed.
				kill := store == "file" && r.IntN(4) == 0
				began, exit, words := across(t, program, url, dir, 3*time.Millisecond+time.Duration(r.Int64N(int64(15*time.Millisecond))), kill)
				if began {
					mu.Lock()
					had[before]++
					mu.Unlock()
				}
				killed := kill && exit == 128+int(syscall.SIGKILL)
				if exit != 0 && !killed {
					t.Errorf("version before %t: got the exit code %d and %q", before, exit, words)
				}
			}
		})
	}
	wg.Wait()
	if store == "file" { // else the server is left
		nothingLeft(t, patience)
	}
	report := judge(t, dir)
	free(t, url, "contended")
	if least := contenders / 2 * each * 3 / 4; had[true] < least || had[false] < least {
		t.Errorf("got %d commands of the version before and %d of this one, want at least %d of each", had[true], had[false], least)
	}
	t.Logf("%d runs of the version before, %d of this one, %d stamps, %d overlaps", had[true], had[false], report.Stamps, len(report.Overlaps))
}

// across runs one run. With kill its wrapper is killed once the command has begun.
func across(t *testing.T, program, url, dir string, lasts time.Duration, kill bool) (began bool, exit int, words string) {
	c := exec.Command(program, "run", "--backend", url, "--wait", "2m", "--grace", "30ms", "contended", "--", bin.job, dir, lasts.String())
	c.Env = environ()
	var stderr bytes.Buffer
	c.Stderr, c.WaitDelay = &stderr, 10*time.Second
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Error(err)
		return false, -1, ""
	}
	line, _ := bufio.NewReader(out).ReadString('\n') // of the command: its term
	if _, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64); err == nil {
		began = true
		if kill {
			_ = c.Process.Kill() // it is waited for below
		}
	}
	if err := c.Wait(); err != nil && c.ProcessState == nil {
		t.Error(err)
		return began, -1, stderr.String()
	}
	return began, code(c), stderr.String()
}
