//go:build linux

package figures

import (
	"bytes"
	"cmp"
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

// Store is where leases are taken, and by which programs.
type Store struct {
	Underlease, Job string // paths; Job is proof/job
	URL             string
}

// settle is how long those who wait are given after the last of them has started: whether one waits at the store, only the store knows.
func settle(waiters int) time.Duration {
	return time.Second + time.Duration(waiters)*20*time.Millisecond
}

// limit is how long anything may take before a measurement is given up.
const limit = 2 * time.Minute

// party is a holder, those who wait for its lease, and the stamps of their commands.
type party struct {
	dir     string
	holder  *exec.Cmd
	waiters []*exec.Cmd
	words   bytes.Buffer // of the holder
}

// gather starts a holder and those who wait, and returns when all of them have settled. Flags are of all of them.
func (s Store) gather(lease string, waiters int, flags ...string) (p *party, err error) {
	p = &party{}
	if p.dir, err = os.MkdirTemp("", "underlease-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.end()
		}
	}()
	run := func(more []string, job ...string) *exec.Cmd {
		args := slices.Concat([]string{"run", "--backend", s.URL, "--log-level", "error"}, flags, more, []string{lease, "--", s.Job, p.dir}, job)
		c := &exec.Cmd{Path: s.Underlease, Args: append([]string{s.Underlease}, args...), Env: []string{"PATH=/usr/bin:/bin"}}
		// Whatever ends the bench ends it.
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
		return c
	}
	p.holder = run(nil, "10m", "obedient")
	p.holder.Stderr = &p.words
	if err := p.holder.Start(); err != nil {
		return nil, err
	}
	if !within(limit, func() bool { lives, err := stamps.Read(p.dir); return err == nil && len(lives) > 0 }) {
		return nil, fmt.Errorf("the holder's command did not begin: %s", &p.words)
	}
	for range waiters {
		c := run([]string{"--wait", "5m"}, "0s")
		if err := c.Start(); err != nil {
			return nil, err
		}
		p.waiters = append(p.waiters, c)
	}
	for _, c := range p.waiters {
		if !within(limit, func() bool { return len(children(c.Process.Pid)) > 0 }) {
			return nil, errors.New("one that waits has no guardian")
		}
	}
	pause(settle(waiters))
	return p, nil
}

// await waits for all who waited, and returns the commands' lives in the order of their begin.
func (p *party) await() ([]stamps.Life, error) {
	for _, c := range p.waiters {
		if err := c.Wait(); err != nil {
			return nil, fmt.Errorf("one that has waited: %w", err)
		}
	}
	lives, err := stamps.Read(p.dir)
	if err != nil {
		return nil, err
	}
	if len(lives) != len(p.waiters)+1 {
		return nil, fmt.Errorf("%d commands have run, and not %d", len(lives), len(p.waiters)+1)
	}
	slices.SortFunc(lives, func(a, b stamps.Life) int { return cmp.Compare(a.At[0], b.At[0]) })
	return lives, stamps.Check(lives, stamps.Limits{}).Err()
}

// end ends what is left.
func (p *party) end() {
	for _, c := range append(slices.Clone(p.waiters), p.holder) {
		if c != nil && c.Process != nil && c.ProcessState == nil {
			_ = c.Process.Signal(syscall.SIGTERM) // it may have ended
			_ = c.Wait()                          // by that signal
		}
	}
	_ = os.RemoveAll(p.dir)
}

// Handovers ends a holder while so many wait, and returns, for each that has waited, the time from the last stamp of the command before, which
// ends well, to the first stamp of its own.
func (s Store) Handovers(lease string, waiters int) (gaps []time.Duration, err error) {
	p, err := s.gather(lease, waiters)
	if err != nil {
		return nil, err
	}
	defer p.end()
	if err := p.holder.Process.Signal(syscall.SIGTERM); err != nil {
		return nil, err
	}
	_ = p.holder.Wait()
	lives, err := p.await()
	if err != nil {
		return nil, err
	}
	for i := 1; i < len(lives); i++ {
		before := lives[i-1].At
		gaps = append(gaps, time.Duration(lives[i].At[0]-before[len(before)-1]))
	}
	return gaps, nil
}

// Takeover kills everything of a holder in one instant while another waits, and returns the time from there to the first stamp of the
// other's command. A ttl of zero is none.
func (s Store) Takeover(lease string, ttl time.Duration) (took time.Duration, err error) {
	var flags []string
	if ttl > 0 {
		flags = []string{"--ttl", ttl.String()}
	}
	p, err := s.gather(lease, 1, flags...)
	if err != nil {
		return 0, err
	}
	defer p.end()
	all := descendants(p.holder.Process.Pid)
	// Stopped first, so that none of them notices another's death.
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
		for _, pid := range append(slices.Clone(all), p.holder.Process.Pid) {
			_ = syscall.Kill(pid, sig) // it may have gone with another one
		}
	}
	killed := stamps.Now()
	_ = p.holder.Wait() // killed
	lives, err := p.await()
	if err != nil {
		return 0, err
	}
	return time.Duration(lives[1].At[0] - killed), nil
}

// within polls until f is true, and returns false if it is not in time.
func within(d time.Duration, f func() bool) bool {
	for end := stamps.Now() + int64(d); ; pause(5 * time.Millisecond) {
		if f() {
			return true
		}
		if stamps.Now() > end {
			return false
		}
	}
}

func pause(d time.Duration) { <-time.NewTimer(d).C }

// children lists the children of all threads of a process.
func children(pid int) (all []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is well formed
	for _, path := range tasks {
		b, _ := os.ReadFile(path) // of a thread that has ended: nothing
		for f := range strings.FieldsSeq(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				all = append(all, n)
			}
		}
	}
	return all
}

func descendants(pid int) (all []int) {
	for _, c := range children(pid) {
		all = append(append(all, c), descendants(c)...)
	}
	return all
}
