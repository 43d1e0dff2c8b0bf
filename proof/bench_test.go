//go:build linux

package proof

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// The bench is run by hand: here it is looked at whether all of it works, and whether its figures can be drawn.
func TestTheBenchMeasuresAndDraws(t *testing.T) {
	servers.Programs(t, servers.NeedRedis, "apt-get install -y redis-server", []string{"/usr/sbin"}, "redis-server")
	dir := t.TempDir()
	file, picture := filepath.Join(dir, "bench.json"), filepath.Join(dir, "bench.svg")
	c := exec.CommandContext(t.Context(), "go", "run", "./proof/bench", "-quick", "-n", "5", "-stores", "file,redis", "-json", file, bin.underlease)
	c.Dir = ".."
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("bench: %v: %s", err, out)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Version int
		Starts  []struct {
			Median float64 `json:"median_ms"`
		}
		Profiles []struct {
			Store string
			Ask   float64 `json:"until_it_asks_ms"`
			Grant float64 `json:"grant_ms"`
			Begin float64 `json:"until_the_command_begins_ms"`
			End   float64 `json:"after_the_command_ms"`
			Total float64 `json:"total_ms"`
			Asked float64
		}
		Memory    []struct{ WrapperPSS, GuardianPSS int64 }
		Handovers []struct {
			Waiters, Samples int
			Median           float64 `json:"median_ms"`
		}
		Takeovers []struct {
			Samples int
			TTL     float64 `json:"ttl_ms"`
			Max     float64 `json:"max_ms"`
		}
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Version != 2 || len(got.Starts) < 4 || len(got.Profiles) != 2 || len(got.Memory) != 2 || len(got.Handovers) != 4 || len(got.Takeovers) != 2 {
		t.Fatalf("got %s, want the figures of two stores", b)
	}
	for _, s := range got.Starts {
		if s.Median <= 0 {
			t.Errorf("got %+v, want a time", s)
		}
	}
	for _, p := range got.Profiles {
		if p.Begin <= 0 || p.End <= 0 || p.Total < p.Begin+p.End/2 {
			t.Errorf("got %+v, want a time for each part", p)
		}
		if p.Store == "redis" && (p.Ask <= 0 || p.Grant <= 0 || p.Asked < 3) {
			t.Errorf("got %+v, want a greeting, a grant and a release that have passed", p)
		}
	}
	for _, h := range got.Handovers {
		if h.Samples != h.Waiters || h.Median <= 0 {
			t.Errorf("got %+v, want as many handovers as there were to wait", h)
		}
	}
	for _, o := range got.Takeovers {
		if o.Samples == 0 || o.Max <= 0 {
			t.Errorf("got %+v, want holders that were killed", o)
		}
	}
	for _, want := range []string{"flock", "where the time of a run goes", "held on", "handover on", "takeover on"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("got the tables\n%s\nwant %q in them", out, want)
		}
	}
	c = exec.CommandContext(t.Context(), "go", "run", ".", file, picture)
	c.Dir = "../testdata/tools/plot"
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("plot: %v: %s", err, out)
	}
	if svg, err := os.ReadFile(picture); err != nil || !strings.Contains(string(svg), "</svg>") || !strings.Contains(string(svg), "underlease, redis") {
		t.Errorf("got %d bytes and %v, want a picture of the stores", len(svg), err)
	}
}
