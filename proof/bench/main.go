//go:build linux

// Command bench measures a build of underlease beside true(1) and flock(1), and prints a table, and JSON on request.
//
//	bench [-n SAMPLES] [-json FILE] UNDERLEASE...
//
// With more than one binary they are compared with each other as well, in the same run.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/underlease/underlease/proof/figures"
)

// result is the JSON, version 1. Times are in milliseconds, sizes in bytes.
type result struct {
	Version int     `json:"version"`
	Samples int     `json:"samples"`
	Starts  []times `json:"starts"`
	Builds  []build `json:"builds"`
}

type times struct {
	Name    string  `json:"name"`
	Min     float64 `json:"min_ms"`
	Quiet   float64 `json:"quiet_median_ms"` // of the quarter of the rounds in which true(1) was fastest
	Median  float64 `json:"median_ms"`
	P99     float64 `json:"p99_ms"`
	ToFlock float64 `json:"quiet_median_to_flock"`
}

type build struct {
	Path        string  `json:"path"`
	Size        int64   `json:"size"`
	WrapperPSS  int64   `json:"wrapper_pss"`
	GuardianPSS int64   `json:"guardian_pss"`
	Inits       int     `json:"guardian_inits"`
	InitTime    float64 `json:"guardian_init_ms"`
}

func main() {
	log.SetFlags(0)
	n := flag.Int("n", 300, "samples of each")
	file := flag.String("json", "", "write the figures there too")
	flag.Parse()
	if flag.NArg() == 0 {
		log.Fatal("bench: name a binary of underlease")
	}
	r, err := measure(flag.Args(), *n)
	if err == nil {
		err = r.print(os.Stdout)
	}
	if err == nil && *file != "" {
		err = r.save(*file)
	}
	if err != nil {
		log.Fatal("bench: ", err)
	}
}

func measure(builds []string, n int) (r result, err error) {
	r = result{Version: 1, Samples: n}
	dir, err := os.MkdirTemp("", "underlease-bench-")
	if err != nil {
		return r, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var subjects []figures.Subject
	for i, path := range builds {
		if builds[i], err = filepath.Abs(path); err != nil {
			return r, err
		}
		s, err := figures.Usual(builds[i], filepath.Join(dir, fmt.Sprint(i)))
		if err != nil {
			return r, err
		}
		if err := os.Mkdir(filepath.Join(dir, fmt.Sprint(i)), 0o700); err != nil {
			return r, err
		}
		run := s[len(s)-1]
		if len(builds) > 1 {
			run.Name = path
		}
		if i == 0 {
			subjects = s[:len(s)-1]
		}
		subjects = append(subjects, run)
	}
	series, err := figures.Starts(subjects, n)
	if err != nil {
		return r, err
	}
	quiet := figures.Quietest(series, 0.25)
	flock := quiet[1].Median()
	for i, s := range series {
		q := quiet[i].Median()
		r.Starts = append(r.Starts, times{s.Name, ms(s.Quantile(0)), ms(q), ms(s.Median()), ms(s.Quantile(0.99)), float64(q) / float64(flock)})
	}
	for _, path := range builds {
		b, err := weigh(path, dir)
		if err != nil {
			return r, err
		}
		r.Builds = append(r.Builds, b)
	}
	return r, nil
}

func weigh(path, dir string) (b build, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return b, err
	}
	h, err := figures.Hold(path, dir)
	if err != nil {
		return b, err
	}
	defer func() { _ = h.End() }()
	b = build{Path: path, Size: info.Size()}
	if b.WrapperPSS, err = figures.PSS(h.Wrapper); err != nil {
		return b, err
	}
	if b.GuardianPSS, err = figures.PSS(h.Guardian); err != nil {
		return b, err
	}
	inits, took, err := figures.Inits(path)
	b.Inits, b.InitTime = len(inits), ms(took)
	return b, err
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (r result) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%d starts\tmin ms\tquiet ms\tmedian ms\tp99 ms\tquiet to flock\t\n", r.Samples)
	for _, s := range r.Starts {
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", s.Name, s.Min, s.Quiet, s.Median, s.P99, s.ToFlock)
	}
	fmt.Fprintf(w, "\t\t\t\t\t\t\nbuild\tMB\twrapper PSS MB\tguardian PSS MB\tguardian inits\t\n")
	for _, b := range r.Builds {
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.1f\t%d in %.2f ms\t\n", filepath.Base(b.Path), mb(b.Size), mb(b.WrapperPSS), mb(b.GuardianPSS), b.Inits, b.InitTime)
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
