//go:build linux

package proof

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// A run inside another one keeps its lease until its own tree is dead, also when the outer one kills everything: the inner
// guardian, which holds the inner lock, dies last.
func TestAKillFromOutsideKeepsTheInnerLeaseUntilItsTreeIsDead(t *testing.T) {
	if _, err := exec.LookPath("flock"); err != nil {
		servers.Require(t, "flock", err)
	}
	where, dir := store(t), t.TempDir()
	witness, up := filepath.Join(dir, "witness"), filepath.Join(dir, "up")
	// Every process of the inner tree holds a shared lock on the witness.
	tree := `exec 9> "$0"; flock -s 9; mkfifo "$1.never"; exec 7<> "$1.never"
		i=0; while [ $i -lt 1500 ]; do (read _ <&7) & i=$((i+1)); done; : > "$1"; wait`
	outer := underlease("--backend", where, "--max-run", "15s", "--grace", "50ms", "outer", "--",
		bin.underlease, "run", "--backend", where, "inner", "--", "sh", "-c", tree, witness, up)
	if err := outer.Start(); err != nil {
		t.Fatal(err)
	}
	if !within(patience, func() bool { _, err := os.Stat(up); return err == nil }) {
		t.Fatal("the inner tree did not come up")
	}
	next := underlease("--backend", where, "--wait", "60s", "inner", "--", "flock", "-n", witness, "true")
	if out, err := next.CombinedOutput(); err != nil {
		t.Errorf("the next holder of the inner lease met its tree alive: %v\n%s", err, out)
	}
	if err := outer.Wait(); code(outer) != 124 {
		t.Errorf("got %v from the outer run, want 124", err)
	}
	nothingLeft(t, patience)
}
