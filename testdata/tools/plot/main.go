// Command plot draws what proof/bench has measured: how long a run of `true` takes, and how long a handover, by store.
//
//	plot FIGURES.json PICTURE.svg
package main

import (
	"encoding/json"
	"fmt"
	"image/color"
	"os"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// figures are those of the JSON, version 2, that are drawn.
type figures struct {
	Version int
	Samples int
	Starts  []struct {
		Name, Store string
		Quiet       float64 `json:"quiet_median_ms"`
	}
	Handovers []struct {
		Store   string
		Waiters int
		Median  float64 `json:"median_ms"`
		P99     float64 `json:"p99_ms"`
	}
}

var (
	ours   = color.RGBA{R: 0x1f, G: 0x6f, B: 0xb4, A: 0xff}
	theirs = color.RGBA{R: 0xa8, G: 0xa8, B: 0xa8, A: 0xff}
	shades = []color.Color{color.RGBA{R: 0xb5, G: 0xd3, B: 0xe9, A: 0xff}, color.RGBA{R: 0x5f, G: 0xa2, B: 0xd2, A: 0xff}, ours}
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: plot FIGURES.json PICTURE.svg")
		os.Exit(64)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		os.Exit(1)
	}
}

func run(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var f figures
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	if f.Version != 2 || len(f.Handovers) == 0 {
		return fmt.Errorf("%s: no figures of stores, version 2", from)
	}
	starts, err := f.starts()
	if err != nil {
		return err
	}
	handovers, err := f.handovers()
	if err != nil {
		return err
	}
	canvas := vgsvg.New(22*vg.Centimeter, 20*vg.Centimeter)
	whole := draw.New(canvas)
	tiles := draw.Tiles{Rows: 2, Cols: 1, PadY: vg.Centimeter, PadTop: 2 * vg.Millimeter, PadBottom: 2 * vg.Millimeter, PadLeft: 2 * vg.Millimeter, PadRight: 6 * vg.Millimeter}
	for row, p := range []*plot.Plot{starts, handovers} {
		p.Draw(tiles.At(whole, 0, row))
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	if _, err := canvas.WriteTo(out); err != nil {
		return err
	}
	return out.Close()
}

// starts are horizontal bars, ours in a colour.
func (f figures) starts() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("A whole run of true: median of the quiet quarter of %d", f.Samples)
	p.X.Label.Text = "ms"
	p.X.Min = 0
	p.Y.Padding = 8 * vg.Millimeter // whoever looks at it may have wider letters
	var names []string
	mine, others := plotter.Values{}, plotter.Values{}
	for _, s := range slices.Backward(f.Starts) {
		name := s.Name
		if s.Name == "underlease" {
			name += ", " + s.Store
			mine, others = append(mine, s.Quiet), append(others, 0)
		} else {
			mine, others = append(mine, 0), append(others, s.Quiet)
		}
		names = append(names, name)
	}
	for _, part := range []struct {
		values plotter.Values
		colour color.Color
	}{{mine, ours}, {others, theirs}} {
		bars, err := plotter.NewBarChart(part.values, 5*vg.Millimeter)
		if err != nil {
			return nil, err
		}
		bars.Horizontal, bars.Color, bars.LineStyle.Width = true, part.colour, 0
		p.Add(bars)
	}
	p.NominalY(names...)
	p.Y.Min, p.Y.Max = -0.5, float64(len(names))-0.5
	return p, nil
}

// handovers are groups of bars up to the 99th percentile, one of each number of those that wait.
func (f figures) handovers() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = "From the end of one command to the begin of the next: 99th percentile"
	p.Y.Label.Text = "ms"
	p.Y.Min = 0
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Millimeter
	var stores []string
	var waiters []int
	for _, h := range f.Handovers {
		if !slices.Contains(stores, h.Store) {
			stores = append(stores, h.Store)
		}
		if !slices.Contains(waiters, h.Waiters) {
			waiters = append(waiters, h.Waiters)
		}
	}
	const width = 6 * vg.Millimeter
	for i, n := range waiters {
		values := make(plotter.Values, len(stores))
		for _, h := range f.Handovers {
			if h.Waiters == n {
				values[slices.Index(stores, h.Store)] = h.P99
			}
		}
		bars, err := plotter.NewBarChart(values, width)
		if err != nil {
			return nil, err
		}
		bars.Color, bars.LineStyle.Width = shades[i%len(shades)], 0
		bars.Offset = width * vg.Length(float64(i)-float64(len(waiters)-1)/2)
		p.Add(bars)
		p.Legend.Add(fmt.Sprintf("%d waiting", n), bars)
	}
	p.NominalX(stores...)
	p.X.Min, p.X.Max = -0.5, float64(len(stores))-0.5
	p.Y.Max *= 1.25 // for the legend
	return p, nil
}
