//go:build linux

// Package figures measures what a run costs, side by side with what it replaces.
//
// # Promise
//
// Figures that are compared were taken in one run: one sample of each in turn, so that a machine that is slow for a while is
// slow for all of them. A sample is a whole process, from before its fork to after it was collected.
// [Quietest] leaves out the rounds in which it was busy, by a subject that is not compared.
//
// # Limits
//
// Milliseconds are of this machine at this hour. Only ratios are worth a limit.
package figures

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/underlease/underlease/proof/stamps"
)

// Subject is a command whose time is taken.
type Subject struct {
	Name string
	Args []string // the first one is a path
	Env  []string
}

// Series are the samples of one subject, one of each round.
type Series struct {
	Name    string
	Samples []time.Duration
}

// Quantile returns the q-th quantile, 0 to 1.
func (s Series) Quantile(q float64) time.Duration {
	if len(s.Samples) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s.Samples))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// Median returns the median.
func (s Series) Median() time.Duration { return s.Quantile(0.5) }

// Starts takes so many samples of each subject in turn, after a few that do not count.
func Starts(subjects []Subject, rounds int) ([]Series, error) {
	const warm = 3
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	all := make([]Series, len(subjects))
	for round := range rounds + warm {
		for i, s := range subjects {
			took, err := start(s, null.Fd())
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.Name, err)
			}
			if all[i].Name = s.Name; round >= warm {
				all[i].Samples = append(all[i].Samples, took)
			}
		}
	}
	return all, nil
}

// Quietest returns what was measured in the given share of the rounds, those in which the first subject was fastest: the moments at which
// the machine was least busy with something else. The first subject alone decides, so that the others cannot be flattered.
func Quietest(all []Series, share float64) []Series {
	limit := all[0].Quantile(share)
	quiet := make([]Series, len(all))
	for i, s := range all {
		quiet[i].Name = s.Name
		for round, took := range s.Samples {
			if all[0].Samples[round] <= limit {
				quiet[i].Samples = append(quiet[i].Samples, took)
			}
		}
	}
	return quiet
}

// start is one sample: fork, exec, end.
func start(s Subject, null uintptr) (time.Duration, error) {
	var ws syscall.WaitStatus
	begun := stamps.Now()
	pid, err := syscall.ForkExec(s.Args[0], s.Args, &syscall.ProcAttr{Env: s.Env, Files: []uintptr{null, null, 2}})
	if err != nil {
		return 0, err
	}
	for {
		if _, err = syscall.Wait4(pid, &ws, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	took := time.Duration(stamps.Now() - begun)
	if err == nil && ws != 0 {
		err = fmt.Errorf("wait status %#x", uint32(ws))
	}
	return took, err
}

// Usual are the subjects that a run is compared with: nothing at all, and flock(1), on files in dir.
func Usual(underlease, dir string) ([]Subject, error) {
	path := func(name string) (string, error) { return exec.LookPath(name) }
	none, err := path("true")
	if err != nil {
		return nil, err
	}
	flock, err := path("flock")
	if err != nil {
		return nil, err
	}
	env := []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent"}
	return []Subject{
		{"true", []string{none}, env},
		{"flock", []string{flock, "-n", filepath.Join(dir, "f"), none}, env},
		{"underlease", []string{underlease, "run", "--backend", "file://" + filepath.Join(dir, "store"), "x", "--", none}, env},
	}, nil
}

// Holding is a run that holds its lease, with a command that does nothing.
type Holding struct {
	Wrapper, Guardian int // pids
	command           *exec.Cmd
}

// Hold starts a run on files in dir and returns once its command runs.
func Hold(underlease, dir string) (*Holding, error) {
	return HoldOn(underlease, "file://"+filepath.Join(dir, "held"))
}

// HoldOn is [Hold] on a store.
func HoldOn(underlease, url string) (*Holding, error) {
	c := exec.CommandContext(context.Background(), underlease, "run", "--backend", url, "x", "--", "sh", "-c", "echo; exec sleep 600")
	c.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin"}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	h := &Holding{Wrapper: c.Process.Pid, command: c}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		return nil, errors.Join(fmt.Errorf("the command did not begin: %w", err), h.End())
	}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", h.Wrapper))
	if err != nil {
		return nil, errors.Join(err, h.End())
	}
	for _, path := range tasks {
		b, _ := os.ReadFile(path) // of a thread that has ended: nothing
		for f := range strings.FieldsSeq(string(b)) {
			h.Guardian, err = strconv.Atoi(f)
		}
	}
	if err != nil || h.Guardian == 0 {
		return nil, errors.Join(errors.New("the guardian was not found"), err, h.End())
	}
	return h, nil
}

// End ends the run.
func (h *Holding) End() error {
	err := h.command.Process.Signal(syscall.SIGTERM)
	_ = h.command.Wait() // ended by the signal
	return err
}

// PSS returns the proportional set size of a process in bytes.
func PSS(pid int) (int64, error) {
	path := fmt.Sprintf("/proc/%d/smaps_rollup", pid)
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("%s has no Pss", path)
}

// Switches returns how often the threads of a process have gone to sleep, and how often they were interrupted.
func Switches(pid int) (voluntary, involuntary int64, err error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		return 0, 0, errors.Join(err, fmt.Errorf("pid %d has no threads", pid))
	}
	for _, path := range tasks {
		b, err := os.ReadFile(path)
		if err != nil {
			return 0, 0, err
		}
		for line := range strings.Lines(string(b)) {
			name, text, _ := strings.Cut(line, ":")
			n, _ := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
			switch name {
			case "voluntary_ctxt_switches":
				voluntary += n
			case "nonvoluntary_ctxt_switches":
				involuntary += n
			}
		}
	}
	return voluntary, involuntary, nil
}

// Inits returns the packages that a guardian initialises before it is one, in order, and how long that takes.
func Inits(underlease string) (packages []string, took time.Duration, err error) {
	c := &exec.Cmd{Path: underlease, Args: []string{"ul-guard"}, Env: []string{"GODEBUG=inittrace=1"}}
	var words bytes.Buffer
	c.Stderr = &words
	_ = c.Run() // a guardian without a wrapper refuses
	for line := range strings.Lines(words.String()) {
		f := strings.Fields(line) // init PACKAGE @0.1 ms, 0.01 ms clock, 0 bytes, 0 allocs
		if len(f) < 6 || f[0] != "init" {
			continue
		}
		ms, err := strconv.ParseFloat(f[4], 64)
		if err != nil {
			return nil, 0, fmt.Errorf("%q: %w", line, err)
		}
		packages = append(packages, f[1])
		took += time.Duration(ms * float64(time.Millisecond))
	}
	if len(packages) == 0 {
		return nil, 0, fmt.Errorf("no trace of the initialisation in %q", &words)
	}
	return packages, took, nil
}
