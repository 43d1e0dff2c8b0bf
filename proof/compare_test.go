//go:build linux

package proof

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// The table of the README, with less patience, and a ttl that outlasts a moment in which the machine stands still. What other tools do is shown, not judged.
func TestTheComparison(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED in a short run: it takes three times as long as each fault lasts")
	}
	etcd, etcdctl, consul := servers.EtcdProgram(t), servers.Etcdctl(t), servers.ConsulProgram(t)
	compare := filepath.Join(t.TempDir(), "compare")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", compare, "./compare").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	c := exec.CommandContext(t.Context(), compare, "-ttl", "6s", "-patience", "10s", "-etcd", etcd, "-etcdctl", etcdctl, "-consul", consul, "-underlease", bin.underlease)
	var words bytes.Buffer
	c.Stderr = &words
	out, err := c.Output()
	if err != nil {
		t.Fatalf("compare: %v and %q", err, &words)
	}
	t.Logf("\n%s", out)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 7 {
		t.Fatalf("got %d lines, want a head, a rule and five rows", len(lines))
	}
	for i, line := range lines[2:] {
		cells := strings.Split(strings.Trim(line, "|"), " | ")
		if len(cells) != 5 {
			t.Fatalf("got the row %q, want five cells", line)
		}
		for _, ours := range cells[3:] {
			want := []string{"; 74", "; 74", "; 74", "3", "143"}[i]
			if ours = strings.TrimSpace(ours); !strings.HasSuffix(ours, want) || strings.Contains(ours, "**") {
				t.Errorf("%s: got %q of underlease, want a command that is stopped before the next one runs, and the code %s", cells[0], ours, strings.TrimPrefix(want, "; "))
			}
		}
	}
}
