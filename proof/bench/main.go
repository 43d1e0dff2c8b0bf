//go:build linux

// Command bench measures a build of underlease on every store that it can start here, beside true(1), flock(1) and the stores' own tools,
// in one run. It prints tables, and JSON on request.
//
//	bench [-n SAMPLES] [-stores NAME,...] [-quick] [-json FILE] UNDERLEASE
//	bench [-n SAMPLES] [-json FILE] UNDERLEASE OTHER...
//
// With more than one binary they are compared on files, and nothing else is measured.
//
// What is measured: whole starts of `run x -- true`; memory while holding; the time from the last stamp of a command to the first of the
// next one, with 1, 8 and 100 that wait; and the time until the next command when everything of a holder is killed in one instant. A store
// or a tool that is not here is named.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/underlease/underlease/proof/figures"
)

// result is the JSON, version 2. Times are in milliseconds, sizes in bytes.
type result struct {
	Version   int        `json:"version"`
	Samples   int        `json:"samples"`
	Starts    []times    `json:"starts"`
	Builds    []build    `json:"builds"`
	Profiles  []profile  `json:"profiles"`
	Memory    []memory   `json:"memory"`
	Handovers []handover `json:"handovers"`
	Takeovers []takeover `json:"takeovers"`
	Absent    []string   `json:"absent"` // what could not be measured, and why
}

type times struct {
	Name    string  `json:"name"`
	Store   string  `json:"store"` // empty: none
	Min     float64 `json:"min_ms"`
	Quiet   float64 `json:"quiet_median_ms"` // of the quarter of the rounds in which true(1) was fastest
	Median  float64 `json:"median_ms"`
	P99     float64 `json:"p99_ms"`
	ToFlock float64 `json:"quiet_median_to_flock"`
	ToPeer  float64 `json:"quiet_median_to_peer"` // to the tool that is usual with the store; 0: it is not here, or this is it
}

type build struct {
	Path     string  `json:"path"`
	Size     int64   `json:"size"`
	Inits    int     `json:"guardian_inits"`
	InitTime float64 `json:"guardian_init_ms"`
}

type memory struct {
	Store       string `json:"store"`
	WrapperPSS  int64  `json:"wrapper_pss"`
	GuardianPSS int64  `json:"guardian_pss"`
}

// profile is where the time of a run goes, in medians, which need not add up to the total's. See [figures.Phases].
type profile struct {
	Store   string  `json:"store"`
	Samples int     `json:"samples"`
	Ask     float64 `json:"until_it_asks_ms"` // 0 where there is no server, as of the next two
	Grant   float64 `json:"grant_ms"`
	Release float64 `json:"release_ms"`
	Begin   float64 `json:"until_the_command_begins_ms"`
	Command float64 `json:"command_ms"`
	End     float64 `json:"after_the_command_ms"`
	Exit    float64 `json:"exit_ms"`
	Total   float64 `json:"total_ms"`
	Server  float64 `json:"server_ms"`
	Asked   float64 `json:"asked"`
	Bare    float64 `json:"bare_command_ms"` // the command without us
}

type handover struct {
	Store   string  `json:"store"`
	Waiters int     `json:"waiters"`
	Samples int     `json:"samples"`
	Median  float64 `json:"median_ms"`
	P99     float64 `json:"p99_ms"`
	Max     float64 `json:"max_ms"`
}

type takeover struct {
	Store   string  `json:"store"`
	TTL     float64 `json:"ttl_ms"` // 0: none
	Samples int     `json:"samples"`
	Median  float64 `json:"median_ms"`
	Max     float64 `json:"max_ms"`
}

// environ is what the measured processes get.
var environ = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent"}

// rounds say how often a handover is measured with so many that wait.
var rounds = []struct{ waiters, times int }{{1, 12}, {8, 2}, {100, 1}}

// quickly are the rounds of a look at whether all of it works.
var quickly = []struct{ waiters, times int }{{1, 1}, {8, 1}}

// profiled is how many runs are looked at in their parts, at most.
const profiled = 100

// takeovers are how many holders are killed on each store, all at the same time.
const takeovers = 5

func main() {
	log.SetFlags(0)
	log.SetPrefix("bench: ")
	n := flag.Int("n", 300, "samples of each start")
	names := flag.String("stores", "", "only these, with commas")
	quick := flag.Bool("quick", false, "few handovers: a look, no figures")
	file := flag.String("json", "", "write the figures there too")
	flag.Parse()
	if flag.NArg() == 0 {
		log.Fatal("name a binary of underlease")
	}
	if *quick {
		rounds = quickly
	}
	r, err := measure(flag.Args(), *n, *names)
	if err == nil {
		err = r.print(os.Stdout)
	}
	if err == nil && *file != "" {
		err = r.save(*file)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func measure(builds []string, n int, names string) (r result, err error) {
	r = result{Version: 2, Samples: n}
	dir, err := os.MkdirTemp("", "underlease-bench-")
	if err != nil {
		return r, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.Chmod(dir, 0o755); err != nil { // servers run as other users
		return r, err
	}
	for i := range builds {
		if builds[i], err = filepath.Abs(builds[i]); err != nil {
			return r, err
		}
		b, err := weigh(builds[i])
		if err != nil {
			return r, err
		}
		r.Builds = append(r.Builds, b)
	}
	if len(builds) > 1 {
		return r, r.compare(builds, dir, n)
	}

	k := &kit{dir: dir}
	defer k.end()
	job := filepath.Join(dir, "job")
	if out, err := exec.Command("go", "build", "-o", job, "./proof/job").CombinedOutput(); err != nil { //nolint:noctx // it ends
		return r, fmt.Errorf("go build ./proof/job: %w: %s", err, out)
	}
	log.Print("starting the servers")
	places, absent, err := startStores(k, names)
	if err != nil {
		return r, err
	}
	r.Absent = absent
	log.Printf("%d starts of each", n)
	if err := r.starts(builds[0], places, n); err != nil {
		return r, err
	}
	log.Print("where the time goes")
	for _, p := range places {
		s := figures.Store{Underlease: builds[0], Job: job, URL: p.url}
		if err := r.profile(s, p, min(n, profiled)); err != nil {
			return r, fmt.Errorf("%s: profile: %w", p.name, err)
		}
	}
	for _, p := range places {
		log.Print(p.name, ": memory, handovers, takeovers")
		s := figures.Store{Underlease: builds[0], Job: job, URL: p.url}
		if err := r.hold(builds[0], p); err != nil {
			return r, fmt.Errorf("%s: memory: %w", p.name, err)
		}
		if err := r.handovers(s, p); err != nil {
			return r, fmt.Errorf("%s: handover: %w", p.name, err)
		}
		if err := r.takeovers(s, p); err != nil {
			return r, fmt.Errorf("%s: takeover: %w", p.name, err)
		}
	}
	return r, nil
}

// compare measures several builds on files.
func (r *result) compare(builds []string, dir string, n int) error {
	var subjects []figures.Subject
	for i, path := range builds {
		own := filepath.Join(dir, strconv.Itoa(i))
		if err := os.Mkdir(own, 0o700); err != nil {
			return err
		}
		s, err := figures.Usual(path, own)
		if err != nil {
			return err
		}
		run := s[len(s)-1]
		run.Name = path
		if i == 0 {
			subjects = s[:len(s)-1]
		}
		subjects = append(subjects, run)
	}
	return r.sample(subjects, make([]string, len(subjects)), n)
}

// starts measures whole processes: nothing, each store's usual tool and ours, one of each in turn.
func (r *result) starts(underlease string, places []place, n int) error {
	none, err := exec.LookPath("true")
	if err != nil {
		return err
	}
	subjects, stores := []figures.Subject{{Name: "true", Args: []string{none}, Env: environ}}, []string{""}
	for _, p := range places {
		if p.peer != nil {
			subjects, stores = append(subjects, *p.peer), append(stores, p.name)
		}
		subjects = append(subjects, figures.Subject{
			Name: "underlease", Args: []string{underlease, "run", "--backend", p.url, "start", "--", none}, Env: environ,
		})
		stores = append(stores, p.name)
	}
	return r.sample(subjects, stores, n)
}

func (r *result) sample(subjects []figures.Subject, stores []string, n int) error {
	series, err := figures.Starts(subjects, n)
	if err != nil {
		return err
	}
	quiet := figures.Quietest(series, 0.25)
	var flock, peer float64
	for i, s := range series {
		t := times{
			Name: s.Name, Store: stores[i], Min: ms(s.Quantile(0)), Quiet: ms(quiet[i].Median()), Median: ms(s.Median()), P99: ms(s.Quantile(0.99)),
		}
		if s.Name == "flock" {
			flock = t.Quiet
		}
		if flock > 0 {
			t.ToFlock = t.Quiet / flock
		}
		if s.Name == "underlease" && i > 0 && stores[i-1] == stores[i] {
			t.ToPeer = t.Quiet / peer
		}
		peer = t.Quiet
		r.Starts = append(r.Starts, t)
	}
	return nil
}

// profile looks at the parts of a run.
func (r *result) profile(s figures.Store, p place, rounds int) error {
	runs, bare, err := s.Profile("profile", p.addr, rounds)
	if err != nil {
		return err
	}
	of := func(f func(figures.Phases) time.Duration) float64 {
		var all figures.Series
		for _, run := range runs {
			all.Samples = append(all.Samples, f(run))
		}
		return ms(all.Median())
	}
	var alone figures.Series
	for _, b := range bare {
		alone.Samples = append(alone.Samples, b.Begin+b.Command+b.Exit)
	}
	asked := 0
	for _, run := range runs {
		asked += run.Asked
	}
	r.Profiles = append(r.Profiles, profile{
		Store: p.name, Samples: len(runs), Bare: ms(alone.Median()), Asked: float64(asked) / float64(len(runs)), Total: of(figures.Phases.Total),
		Ask:     of(func(p figures.Phases) time.Duration { return p.Ask }),
		Grant:   of(func(p figures.Phases) time.Duration { return p.Grant }),
		Begin:   of(func(p figures.Phases) time.Duration { return p.Begin }),
		Command: of(func(p figures.Phases) time.Duration { return p.Command }),
		End:     of(func(p figures.Phases) time.Duration { return p.End }),
		Release: of(func(p figures.Phases) time.Duration { return p.Release }),
		Exit:    of(func(p figures.Phases) time.Duration { return p.Exit }),
		Server:  of(func(p figures.Phases) time.Duration { return p.Server }),
	})
	return nil
}

func weigh(path string) (b build, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return b, err
	}
	inits, took, err := figures.Inits(path)
	return build{Path: path, Size: info.Size(), Inits: len(inits), InitTime: ms(took)}, err
}

// hold weighs our processes while a lease is held.
func (r *result) hold(underlease string, p place) error {
	h, err := figures.HoldOn(underlease, p.url)
	if err != nil {
		return err
	}
	defer func() { _ = h.End() }()
	m := memory{Store: p.name}
	if m.WrapperPSS, err = figures.PSS(h.Wrapper); err != nil {
		return err
	}
	if m.GuardianPSS, err = figures.PSS(h.Guardian); err != nil {
		return err
	}
	r.Memory = append(r.Memory, m)
	return nil
}

func (r *result) handovers(s figures.Store, p place) error {
	for _, c := range rounds {
		var all figures.Series
		for i := range c.times {
			gaps, err := s.Handovers(fmt.Sprintf("handover-%d-%d", c.waiters, i), c.waiters)
			if err != nil {
				return err
			}
			all.Samples = append(all.Samples, gaps...)
		}
		r.Handovers = append(r.Handovers, handover{p.name, c.waiters, len(all.Samples), ms(all.Median()), ms(all.Quantile(0.99)), ms(all.Quantile(1))})
	}
	return nil
}

func (r *result) takeovers(s figures.Store, p place) error {
	ttl := 10 * time.Second // the shortest without a warning
	if p.name == "file" {
		ttl = 0
	}
	var all figures.Series
	var mu sync.Mutex
	var failed error
	var group sync.WaitGroup
	for i := range takeovers {
		group.Go(func() {
			took, err := s.Takeover(fmt.Sprint("takeover-", i), ttl)
			mu.Lock()
			defer mu.Unlock()
			all.Samples = append(all.Samples, took)
			if err != nil {
				failed = err
			}
		})
	}
	group.Wait()
	r.Takeovers = append(r.Takeovers, takeover{p.name, ms(ttl), len(all.Samples), ms(all.Median()), ms(all.Quantile(1))})
	return failed
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (r result) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	ratio := func(f float64) string {
		if f == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f", f)
	}
	fmt.Fprintf(w, "%d starts\tstore\tmin ms\tquiet ms\tmedian ms\tp99 ms\tto flock\tto the tool\t\n", r.Samples)
	for _, s := range r.Starts {
		fmt.Fprintf(w, "%s\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t%s\t%s\t\n", s.Name, s.Store, s.Min, s.Quiet, s.Median, s.P99, ratio(s.ToFlock), ratio(s.ToPeer))
	}
	fmt.Fprintf(w, "\t\t\t\t\t\t\t\t\nbuild\tMB\tguardian inits\t\n")
	for _, b := range r.Builds {
		fmt.Fprintf(w, "%s\t%.1f\t%d in %.2f ms\t\n", filepath.Base(b.Path), mb(b.Size), b.Inits, b.InitTime)
	}
	if len(r.Profiles) > 0 {
		part := func(f float64) string {
			if f == 0 {
				return "-"
			}
			return fmt.Sprintf("%.2f", f)
		}
		fmt.Fprintf(w, "\t\t\t\t\t\t\t\t\t\t\t\nwhere the time of a run goes, ms\tasks after\tgrant\tcommand begins\tcommand\tafter it\trelease\texit\ttotal\tthe store's part\trequests\tcommand alone\t\n")
		for _, p := range r.Profiles {
			fmt.Fprintf(w, "%s\t%s\t%s\t%.2f\t%.2f\t%.2f\t%s\t%s\t%.2f\t%s\t%.1f\t%.2f\t\n", p.Store,
				part(p.Ask), part(p.Grant), p.Begin, p.Command, p.End, part(p.Release), part(p.Exit), p.Total, part(p.Server), p.Asked, p.Bare)
		}
	}
	if len(r.Memory) > 0 {
		fmt.Fprintf(w, "\t\t\t\nheld on\twrapper PSS MB\tguardian PSS MB\ttogether\t\n")
		for _, m := range r.Memory {
			fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.1f\t\n", m.Store, mb(m.WrapperPSS), mb(m.GuardianPSS), mb(m.WrapperPSS+m.GuardianPSS))
		}
		fmt.Fprintf(w, "\t\t\t\t\nhandover on\twaiting\thandovers\tmedian ms\tp99 ms\tmax ms\t\n")
		for _, h := range r.Handovers {
			fmt.Fprintf(w, "%s\t%d\t%d\t%.1f\t%.1f\t%.1f\t\n", h.Store, h.Waiters, h.Samples, h.Median, h.P99, h.Max)
		}
		fmt.Fprintf(w, "\t\t\t\t\t\t\ntakeover on\tttl s\tkilled\tmedian s\tmax s\t\n")
		for _, t := range r.Takeovers {
			fmt.Fprintf(w, "%s\t%s\t%d\t%.2f\t%.2f\t\n", t.Store, ratio(t.TTL/1000), t.Samples, t.Median/1000, t.Max/1000)
		}
	}
	for _, a := range r.Absent {
		fmt.Fprintf(w, "not measured: %s\n", a)
	}
	return w.Flush()
}

func mb(n int64) float64 { return float64(n) / (1 << 20) }

func (r result) save(path string) error {
	b, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
