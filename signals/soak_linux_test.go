package signals_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/internal/churn"
	"github.com/underlease/underlease/signals"
)

// Q07. The command is forked with a parent-death signal, which is about a thread and not about a process: whatever the runtime does with
// its threads, in wrapper and guardian, the command lives. Ten seconds of that, or as long as UNDERLEASE_TEST_SOAK says.
func TestTheCommandOutlivesEveryThreadOfItsGuardian(t *testing.T) {
	long := 10 * time.Second
	if brief() {
		long = 2 * time.Second
	}
	if text, ok := os.LookupEnv("UNDERLEASE_TEST_SOAK"); ok {
		var err error
		if long, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	p := endless(tree(false)...)
	// As in a run: renewals that keep the deadline a moment away, and signals that are passed on.
	p.StopIn, p.KillIn, p.Renew, p.Listens = 20*time.Second, 21*time.Second, 100*time.Millisecond, true
	r := prepare(t, p)
	r.cmd.Env = append(r.cmd.Env, churn.Variable)
	r.start()
	r.beats(treeNames...)
	command, wrapper, guardian := r.entry("started").Pid, r.cmd.Process.Pid, r.guardian()
	churned := map[int]map[int]bool{wrapper: {}, guardian: {}} // threads that were seen
	end := time.NewTimer(long)
	defer end.Stop()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	begun := signals.Now()
	for over := false; !over; {
		select {
		case <-end.C:
			over = true
		case <-look.C:
		}
		for pid, seen := range churned {
			for _, tid := range threadsOf(pid) {
				seen[tid] = true
			}
		}
		if !alive(command) {
			break
		}
	}
	took := time.Duration(signals.Now() - begun)
	t.Logf("%v: at least %d threads of the wrapper and %d of the guardian have ended; CPU time %v and %v",
		took.Round(time.Second), len(churned[wrapper]), len(churned[guardian]), cpuTime(wrapper), cpuTime(guardian))
	for pid, seen := range churned {
		if least := int(took / (100 * time.Millisecond)); len(seen) < least {
			t.Errorf("%s: got %d threads, want at least %d: there is no churn", cmdline(pid), len(seen), least)
		}
	}
	if _, exited := r.event(signals.Exited); exited || !alive(command) {
		t.Fatalf("the command has ended after %v, want it alive; log:\n%s", took, r.logged())
	}
	for _, n := range treeNames {
		if r.last(n) < begun+int64(took)-int64(5*time.Second) {
			t.Errorf("%s has not beaten for 5s", n)
		}
	}
	r.cmd.Process.Signal(syscall.SIGTERM)
	r.wantSignal(syscall.SIGTERM)
}

func threadsOf(pid int) (all []int) {
	tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*")
	for _, task := range tasks {
		if tid, err := strconv.Atoi(filepath.Base(task)); err == nil {
			all = append(all, tid)
		}
	}
	return all
}

// cpuTime is what a process has used, user and system.
//
// Source: proc_pid_stat(5), utime and stime, in ticks of 1/100 s.
func cpuTime(pid int) time.Duration {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	_, rest, _ := strings.Cut(string(b), ") ")
	ticks := 0
	for i, f := range strings.Fields(rest) {
		if i == 11 || i == 12 {
			n, _ := strconv.Atoi(f)
			ticks += n
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
