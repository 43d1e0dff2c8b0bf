package signals_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/signals"
)

// slack is how late the last instruction of a killed process may be, beside what the machine was too busy for (see stalls). On a quiet
// machine it is below 5 ms.
const slack = 40 * time.Millisecond

// Q01, C22
func TestTheTreeIsDeadAtItsKillInstantWithoutTheWrappersHelp(t *testing.T) {
	p := endless(tree(true)...)
	// So far apart that no hiccup covers both: a guardian that comes too late for the stop kills without it.
	p.StopIn, p.KillIn, p.Grace, p.Told = 200*time.Millisecond, 3*time.Second, 10*time.Second, true
	r := launch(t, p)
	r.beats(treeNames...)
	d := r.due()
	kill := d.KillAt
	r.wantSignal(syscall.SIGKILL)
	r.wantSilent(kill, slack, treeNames...)
	want := []signals.EventKind{signals.Stopping, signals.Killing, signals.Exited, signals.Gone}
	if got := r.kinds(); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
	if ev, _ := r.event(signals.Stopping); ev.Why != signals.WhyLease || ev.At < d.StopAt || ev.At >= kill {
		t.Errorf("stopping: %+v, want because of the lease, at %d", ev, d.StopAt)
	}
	if ev, _ := r.event(signals.Killing); ev.Why != signals.WhyLease || ev.At < kill || ev.At > kill+int64(slack+r.stall.most()) {
		t.Errorf("killing: %+v, want because of the lease, at %d", ev, kill)
	}
}

// C26
func TestMaxRunStopsAndThenKills(t *testing.T) {
	p := endless("sh", "-c", `trap "" TERM; echo > "$D/ready"; sleep 99`)
	p.RunStopIn, p.RunKillIn, p.Grace, p.Told = 200*time.Millisecond, 3*time.Second, 10*time.Second, true
	r := launch(t, p)
	eventually(t, "trap", func() bool { return r.read("ready") != "" })
	d := r.due()
	r.wantSignal(syscall.SIGKILL)
	stop, _ := r.event(signals.Stopping)
	kill, _ := r.event(signals.Killing)
	if stop.Why != signals.WhyMaxRun || kill.Why != signals.WhyMaxRun {
		t.Errorf("stopped for %v, killed for %v, want %v for both", stop.Why, kill.Why, signals.WhyMaxRun)
	}
	most := slack + r.stall.most()
	if late := time.Duration(stop.At - d.RunStopAt); late < 0 || late > most {
		t.Errorf("stopped %v after that was due, want at once, at most %v", late, most)
	}
	if late := time.Duration(kill.At - d.RunKillAt); late < 0 || late > most {
		t.Errorf("killed %v after that was due, want at once, at most %v", late, most)
	}
}

func TestDrainKillsWithoutASignalBefore(t *testing.T) {
	p := endless(tree(false)...)
	p.DrainKillIn = 500 * time.Millisecond
	r := launch(t, p)
	r.wantSignal(syscall.SIGKILL)
	if got, want := r.kinds(), []signals.EventKind{signals.Killing, signals.Exited, signals.Gone}; !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
	if kill, _ := r.event(signals.Killing); kill.Why != signals.WhyDrain {
		t.Errorf("killed because of %v, want %v", kill.Why, signals.WhyDrain)
	}
}

// Q16
func TestTheStopSignalGoesToTheCommandAlone(t *testing.T) {
	p := endless("sh", "-c", `UL_TEST_MODE=count "$EXE" "$D/worker" & UL_TEST_MODE=count exec "$EXE" "$D/leader"`)
	p.StopIn, p.KillIn, p.Grace, p.Told = 200*time.Millisecond, 3*time.Second, 10*time.Second, true
	r := launch(t, p)
	eventually(t, "two counters", func() bool { return r.read("leader") == "ready\n" && r.read("worker") == "ready\n" })
	r.due()
	r.wantSignal(syscall.SIGKILL)
	// Two signals that are pending together are not taken in order.
	if got := r.read("leader"); got != "ready\n15\n18\n" && got != "ready\n18\n15\n" {
		t.Errorf("the command got %q, want TERM and CONT", got)
	}
	if got := r.read("worker"); got != "ready\n" {
		t.Errorf("the worker got %q, want nothing", got)
	}
}

func TestAStoppedCommandIsContinuedToHeedTheStopSignal(t *testing.T) {
	p := endless("sh", "-c", `trap 'exit 7' TERM; kill -STOP $$; sleep 99`)
	p.StopIn, p.KillIn, p.Grace, p.Told = 100*time.Millisecond, 20*time.Second, 20*time.Second, true
	r := launch(t, p)
	command := r.entry("started").Pid
	eventually(t, "stopped command", func() bool { return stopped(command) })
	r.due()
	r.wantCode(7)
}

// Q19
func TestAKillIsNotTakenBackByALaterDeadline(t *testing.T) {
	p := endless("sh", "-c", `trap "" TERM; echo > "$D/ready"; while :; do sleep 1; done`)
	p.StopIn, p.KillIn = 200*time.Millisecond, 400*time.Millisecond
	p.Renew, p.Told = 450*time.Millisecond, true // each of them comes too late
	r := launch(t, p)
	eventually(t, "trap", func() bool { return r.read("ready") != "" })
	r.due()
	r.wantSignal(syscall.SIGKILL)
}

func TestARenewedDeadlineKeepsTheCommandAlive(t *testing.T) {
	p := endless("sleep", "5")
	p.StopIn, p.KillIn = 3500*time.Millisecond, 4*time.Second // a hiccup of the machine is none of the deadline's business
	p.Renew = 100 * time.Millisecond
	r := launch(t, p)
	r.wantCode(0)
}

func TestTooLateToStartStartsNothing(t *testing.T) {
	p := endless("sh", "-c", `echo > "$D/ran"`)
	p.StopIn, p.KillIn, p.Wait = 0, 300*time.Millisecond, 300*time.Millisecond
	r := launch(t, p)
	r.wantTooLate()
	if _, err := os.Stat(filepath.Join(r.dir, "ran")); err == nil {
		t.Error("the command ran")
	}
}

// wantTooLate wants that the wrapper found too little time to start. It waits for the guardian's word for 50ms; where a start takes longer, or
// the machine stands still, it may have none.
func (r *run) wantTooLate() {
	r.t.Helper()
	code := r.wait().ExitStatus()
	if slow := raceDetector || r.stall.most() > 10*time.Millisecond; code != rcNoTime && (code != rcSystem || !slow) {
		r.t.Errorf("exit code %d, want %d; log:\n%s", code, rcNoTime, r.logged())
	}
}

// Q02, C20
func TestWithoutTheWrapperTheTreeIsStoppedAtOnceAndDeadAfterTheGrace(t *testing.T) {
	for _, stubborn := range []bool{false, true} {
		for _, left := range []signals.Leftovers{signals.LeftoversKill, signals.LeftoversWait, signals.LeftoversIgnore} {
			t.Run(fmt.Sprintf("stubborn=%v,leftovers=%s", stubborn, left), func(t *testing.T) {
				p := endless(tree(stubborn)...)
				p.Leftovers = left
				r := launch(t, p)
				r.beats(treeNames...)
				g := r.guardian()
				r.cmd.Process.Kill()
				r.wait()
				at := signals.Now() // a busy machine needs its time to end all threads of the wrapper, and only then is it gone
				eventually(t, "end of the guardian", func() bool { return !alive(g) })
				r.wantSilent(at, p.Grace+slack, treeNames...)
				if !stubborn {
					r.wantSilent(at, slack, "main") // it heeds the signal that came at once
				}
				if want := "underlease: the wrapper was killed"; !strings.Contains(r.said(), want) {
					t.Errorf("said %q, want %q", r.said(), want)
				}
			})
		}
	}
}

func TestWithoutTheWrapperTheDeadlineStillHolds(t *testing.T) {
	p := endless(tree(true)...)
	p.Grace = 10 * time.Second
	p.StopIn, p.KillIn, p.Told = 800*time.Millisecond, time.Second, true
	r := launch(t, p)
	r.beats(treeNames...)
	g := r.guardian()
	kill := r.due().KillAt
	r.cmd.Process.Kill()
	r.wait()
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	r.wantSilent(kill, slack, treeNames...)
}

// C13
func TestAStderrThatNobodyReadsDelaysNoKill(t *testing.T) {
	p := endless("sh", "-c", `export UL_TEST_MODE=beat
(trap "" TERM; yes >&2) & exec "$EXE" "$D/main" stubborn`)
	r := prepare(t, p)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	r.cmd.Stderr = write
	r.start()
	write.Close()
	r.beats("main")
	g := r.guardian()
	r.cmd.Process.Kill()
	r.wait()
	at := signals.Now()
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	r.wantSilent(at, p.Grace+slack, "main")
}

// Q03, C20
func TestWithoutTheGuardianTheWrapperKillsTheTree(t *testing.T) {
	r := launch(t, endless(tree(true)...))
	r.beats(treeNames...)
	g := r.guardian()
	syscall.Kill(g, syscall.SIGKILL)
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	at := signals.Now() // only when the kernel has ended all threads of the guardian is it gone
	r.wantSignal(syscall.SIGKILL)
	r.wantSilent(at, slack, treeNames...)
	if got, want := r.kinds(), []signals.EventKind{signals.GuardianLost, signals.Exited, signals.Gone}; !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

func TestTheWrapperSparesChildrenThatItHadBefore(t *testing.T) {
	r := prepare(t, endless(tree(true)...))
	// A shell that becomes the wrapper leaves it its own background job.
	plan := r.cmd.Env
	r.cmd.Path, r.cmd.Args = "/bin/sh", []string{"sh", "-c", `env -u UL_TEST_MARKER sleep 321 & exec "$EXE"`}
	r.cmd.Env = plan
	r.start()
	r.beats(treeNames...)
	var job int
	eventually(t, "background job", func() bool { // which starts beside the wrapper
		for _, pid := range children(r.cmd.Process.Pid) {
			if cmdline(pid) == "sleep 321" {
				job = pid
			}
		}
		return job != 0
	})
	defer syscall.Kill(job, syscall.SIGKILL)
	syscall.Kill(r.guardian(), syscall.SIGKILL)
	r.wantSignal(syscall.SIGKILL)
	if !alive(job) {
		t.Error("the shell's own job was killed")
	}
}

// Q04
func TestKillingTheWrapperAtAnyMomentOfItsStartLeavesNothing(t *testing.T) {
	rounds := 300
	if brief() {
		rounds = 30
	}
	span := startTime(t)
	var runs []*run
	for range rounds {
		p := endless("sh", "-c", `setsid sleep 60 & sleep 60`)
		p.Grace = 100 * time.Millisecond
		r := prepare(t, p)
		r.many = true
		r.start()
		<-time.After(rand.N(2 * span))
		r.cmd.Process.Kill()
		r.wait()
		r.stall.stop()
		runs = append(runs, r)
	}
	started := 0
	for _, r := range runs {
		if strings.Contains(r.logged(), "started") {
			started++
		}
	}
	t.Logf("%d of %d commands had been started", started, rounds)
	if started == 0 || started == rounds {
		t.Errorf("%d of %d commands had been started: the moments were not spread over the start", started, rounds)
	}
	last := time.Now()
	all := *runs[0]
	all.marker = "UL_TEST_MARKER=" + filepath.Dir(runs[0].dir)
	eventually(t, "end of all", func() bool { return len(guardians()) == 0 && len(all.survivors()) == 0 })
	if took := time.Since(last); took > 10*time.Second { // three hundred of them end at once
		t.Errorf("something was alive %v after the last wrapper", took)
	}
}

// startTime is how long it takes here and now from the start of a wrapper to that of its command: the median of some, so that it is not the
// length of a hiccup.
func startTime(t *testing.T) time.Duration {
	t.Helper()
	var took []time.Duration
	for range 5 {
		begun := signals.Now()
		r := launch(t, endless("sleep", "0.1"))
		took = append(took, time.Duration(r.entry("started").At-begun))
		r.wantCode(0)
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// Q05
func TestAProcessThatRunsAwayIsCaught(t *testing.T) {
	p := endless("sh", "-c", `trap "" TERM; for i in 1 2 3; do UL_TEST_MODE=hop setsid "$EXE" "$D/hop$i" & done; sleep 99`)
	p.StopIn, p.KillIn, p.Told = time.Second, 1200*time.Millisecond, true
	r := launch(t, p)
	r.beats("hop1", "hop2", "hop3")
	kill := r.due().KillAt
	r.wantSignal(syscall.SIGKILL)
	if late := time.Duration(signals.Now() - kill); late > 500*time.Millisecond+r.room() {
		t.Errorf("caught %v after the kill was due", late)
	}
	r.wantSilent(kill, 50*time.Millisecond+slack, "hop1", "hop2", "hop3")
}

// Q06, C23
func TestLeftoversAreKilledByDefault(t *testing.T) {
	r := launch(t, endless("sh", "-c", `setsid sleep 60 & sleep 60 & exit 5`))
	r.wantCode(5)
	ev, ok := r.event(signals.Leftover)
	if !ok || ev.Count != 2 || len(ev.Pids) != 2 || !ev.Killed {
		t.Errorf("leftovers: %+v, want two, killed", ev)
	}
	want := []signals.EventKind{signals.Exited, signals.Leftover, signals.Killing, signals.Gone}
	if got := r.kinds(); !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

func TestLeftoversAreWaitedFor(t *testing.T) {
	p := endless("sh", "-c", `(until [ -e "$D/go" ]; do sleep 0.01; done; echo done > "$D/background") & exit 5`)
	p.Leftovers = signals.LeftoversWait
	r := launch(t, p)
	eventually(t, "word of the leftovers", func() bool { _, ok := r.event(signals.Leftover); return ok })
	if err := os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.wantCode(5)
	if got := r.read("background"); got != "done\n" {
		t.Error("the background process had not finished")
	}
	if ev, ok := r.event(signals.Leftover); !ok || ev.Count < 1 || ev.Killed {
		t.Errorf("leftovers: %+v, want at least one, not killed", ev)
	}
}

func TestLeftoversThatAreWaitedForDieAtTheDeadline(t *testing.T) {
	p := endless("sh", "-c", `UL_TEST_MODE=beat setsid "$EXE" "$D/session" & exit 0`)
	p.Leftovers, p.StopIn, p.KillIn, p.Told = signals.LeftoversWait, 500*time.Millisecond, 700*time.Millisecond, true
	r := launch(t, p)
	r.beats("session")
	kill := r.due().KillAt
	r.wantCode(0)
	r.wantSilent(kill, slack, "session")
}

func TestLeftoversAreLetGo(t *testing.T) {
	p := endless("sh", "-c", `UL_TEST_MODE=beat setsid "$EXE" "$D/session" & until [ -s "$D/session" ]; do sleep 0.01; done; exit 5`)
	p.Leftovers = signals.LeftoversIgnore
	r := launch(t, p)
	r.wantCode(5)
	left := r.survivors()
	if len(left) != 1 {
		t.Fatalf("alive: %v, want one process", left)
	}
	before := r.last("session")
	eventually(t, "another beat", func() bool { return r.last("session") > before })
	syscall.Kill(left[0], syscall.SIGKILL)
	eventually(t, "its end", func() bool { return !alive(left[0]) })
	if ev, ok := r.event(signals.Leftover); !ok || ev.Count != 1 || ev.Killed {
		t.Errorf("leftovers: %+v, want one, not killed", ev)
	}
	if n := len(guardians()); n != 0 {
		t.Errorf("%d guardians are left", n)
	}
}

// Q07
func TestThreadsThatEndInTheWrapperDoNotEndTheCommand(t *testing.T) {
	p := endless("sleep", "0.7")
	p.Threads = 2000
	launch(t, p).wantCode(0)
}

// Q09
func TestAStoppedWrapperDoesNotDelayTheKill(t *testing.T) {
	p := endless(tree(true)...)
	// Far enough away that no hiccup makes the wrapper, before it is stopped, order the kill itself.
	p.StopIn, p.KillIn = 2800*time.Millisecond, 3*time.Second
	p.Diligent, p.Renew, p.Told = true, 100*time.Millisecond, true
	r := launch(t, p)
	r.beats(treeNames...)
	g := r.guardian()
	r.due()
	r.cmd.Process.Signal(syscall.SIGSTOP)
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	due := r.last("main")
	if s := r.survivors(); len(s) > 0 {
		t.Errorf("alive while the wrapper is stopped: %v", s)
	}
	r.cmd.Process.Signal(syscall.SIGCONT)
	r.wantSignal(syscall.SIGKILL)
	kill, _ := r.event(signals.Killing)
	if kill.Why != signals.WhyLease {
		t.Errorf("killing: %+v, want because of the lease", kill)
	}
	if late := time.Duration(due - kill.At); late > slack+r.room() {
		t.Errorf("the command beat %v after the kill", late)
	}
}

// Q15
func TestAStoppedGuardianIsReplacedByTheWrapper(t *testing.T) {
	p := endless(tree(true)...)
	p.StopIn, p.KillIn, p.Diligent, p.Told = 700*time.Millisecond, 900*time.Millisecond, true, true
	r := launch(t, p)
	r.beats(treeNames...)
	g := r.guardian()
	kill := r.due().KillAt
	syscall.Kill(g, syscall.SIGSTOP)
	r.wantSignal(syscall.SIGKILL)
	r.wantSilent(kill, 50*time.Millisecond+slack, treeNames...)
	if _, lost := r.event(signals.GuardianLost); lost {
		t.Error("the wrapper ended the guardian itself, but says that it was lost")
	}
}

// Somebody stops the guardian, and then the wrapper is killed: the one that is left goes on.
func TestAStoppedGuardianGoesOnWhenItsWrapperIsKilled(t *testing.T) {
	p := endless(tree(true)...)
	p.Grace = 200 * time.Millisecond
	r := launch(t, p)
	r.beats(treeNames...)
	g := r.guardian()
	halt(t, g)
	r.cmd.Process.Kill()
	r.wait()
	at := signals.Now()
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	r.wantSilent(at, p.Grace+slack, treeNames...)
}

func TestAStoppedGuardianDelaysNoStartForEver(t *testing.T) {
	p := endless("sh", "-c", `echo > "$D/ran"; sleep 60`)
	p.StopIn, p.KillIn, p.Wait = 600*time.Millisecond, 800*time.Millisecond, 3*time.Second
	r := launch(t, p)
	syscall.Kill(r.guardian(), syscall.SIGSTOP)
	r.wantCode(rcSystem)
	if r.read("ran") != "" {
		t.Error("the command ran")
	}
}

// Q36
func TestTheGuardianDoesNotWaitForAStoppedWrapper(t *testing.T) {
	r := prepare(t, endless("sh", "-c", `echo > "$D/ready"; read x < "$D/fifo"; exit 9`))
	fifo := filepath.Join(r.dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	r.start()
	g := r.guardian()
	eventually(t, "command", func() bool { return r.read("ready") != "" })
	r.cmd.Process.Signal(syscall.SIGSTOP)
	if err := os.WriteFile(fifo, []byte("go\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	r.cmd.Process.Signal(syscall.SIGCONT)
	r.wantCode(9)
}

// Q44: in the scheduling group of its caller. In one of its own a wrapper of the lowest priority may wait for longer than any default
// margin, which README says.
func TestTheKillIsInTimeOnABusyMachine(t *testing.T) {
	if brief() {
		t.Skip("makes load")
	}
	var hogs []*exec.Cmd
	for range 12 {
		hog := exec.CommandContext(t.Context(), "nice", "-n", "19", "sh", "-c", "while :; do :; done")
		if err := hog.Start(); err != nil {
			t.Fatal(err)
		}
		defer hog.Wait()
		defer hog.Process.Kill()
		hogs = append(hogs, hog)
	}
	p := endless(tree(true)...)
	p.StopIn, p.KillIn, p.Grace, p.Told = 3*time.Second, 4*time.Second, time.Second, true // the start is slow too, and is not meant here
	r := prepare(t, p)
	r.cmd.Path, r.cmd.Args = "/usr/bin/nice", []string{"nice", "-n", "19", exe}
	r.start()
	r.beats(treeNames...)
	r.stall.forget() // the start of twelve loops is none of the kill's business
	kill := r.due().KillAt
	<-time.After(time.Duration(kill-signals.Now()) + time.Second)
	// To take in the dead, the kernel waits until each has left its processor: minutes were seen among such loops, and nothing is claimed of that.
	for _, hog := range hogs {
		hog.Process.Kill()
	}
	r.wantSignal(syscall.SIGKILL)
	ev, _ := r.event(signals.Killing)
	late := time.Duration(ev.At - kill)
	t.Logf("the kill began %v late", late)
	if most := 50*time.Millisecond + r.stall.most(); late > most { // it needs to be given a processor once
		t.Errorf("the kill began %v late, want at most %v", late, most)
	}
	r.wantSilent(kill, 250*time.Millisecond, treeNames...)
}

func TestAStoppedGuardianDoesNotKeepASignalFromTheCommand(t *testing.T) {
	p := endless(tree(false)...)
	p.Listens = true
	r := launch(t, p)
	r.beats(treeNames...)
	g := r.guardian()
	halt(t, g)
	r.cmd.Process.Signal(syscall.SIGTERM)
	r.wantSignal(syscall.SIGTERM)
}

// Q45
func TestAThousandProcessesDieWithinTheMargin(t *testing.T) {
	n := 1000
	if brief() {
		n = 100
	}
	p := endless("sh", "-c", fmt.Sprintf(`trap "" TERM
i=0; while [ $i -lt %d ]; do setsid sleep 60 & i=$((i+1)); done; echo > "$D/all"; wait`, n))
	p.Listens, p.KillOn = true, syscall.SIGUSR1
	r := launch(t, p)
	eventually(t, "all processes", func() bool { return r.read("all") != "" })
	at := signals.Now()
	r.cmd.Process.Signal(syscall.SIGUSR1)
	r.wantSignal(syscall.SIGKILL)
	took := time.Duration(signals.Now() - at)
	t.Logf("%d processes were dead after %v", n, took)
	each := 3 * time.Millisecond
	if raceDetector {
		each *= 5 // whoever walks is that much slower
	}
	if limit := 250*time.Millisecond + time.Duration(n)*each + r.room(); took > limit {
		t.Errorf("took %v, want at most %v", took, limit)
	}
}

// Q45
func TestAProcessOfFourGigabytesIsSilentAtItsKillInstantAndWaitedFor(t *testing.T) {
	size := int64(4 << 30)
	if brief() {
		size = 64 << 20
	}
	if free := int64(available(t)); free < 3*size/2 {
		t.Skipf("%d MiB of memory are free, and the test wants %d", free>>20, 3*size/2>>20)
	}
	p := endless("sh", "-c", fmt.Sprintf(`UL_TEST_MODE=large "$EXE" "$D/main" %d & wait`, size))
	p.Listens, p.KillOn = true, syscall.SIGUSR1
	r := launch(t, p)
	r.beats("main")
	at, limit := signals.Now(), 50*time.Millisecond+slack
	r.cmd.Process.Signal(syscall.SIGUSR1)
	r.wantSignal(syscall.SIGKILL)
	if ev, ok := r.event(signals.Killing); ok { // else the machine stood still: the wrapper has waited for the guardian in vain, and killed
		at, limit = ev.At, slack
	} else if r.stall.most() < 10*time.Millisecond {
		t.Errorf("the guardian did not kill, and the machine stood still for %v at most", r.stall.most())
	}
	gone, _ := r.event(signals.Gone)
	t.Logf("gone %v after the kill", time.Duration(gone.At-at))
	r.wantSilent(at, limit, "main")
	if left := r.survivors(); len(left) != 0 {
		t.Errorf("the wrapper ended before %v", left)
	}
}

// available returns the bytes of memory that can be had.
func available(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "MemAvailable:")
	var kb int
	if _, err := fmt.Sscan(after, &kb); err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

// Q48
func TestWrapperAndGuardianKilledTogetherTakeTheCommandWithThem(t *testing.T) {
	r := launch(t, endless(tree(true)...))
	r.beats(treeNames...)
	g := r.guardian()
	at := signals.Now()
	syscall.Kill(g, syscall.SIGSTOP) // so that it cannot act in between
	r.cmd.Process.Kill()
	syscall.Kill(g, syscall.SIGKILL)
	r.wait()
	eventually(t, "end of the guardian", func() bool { return !alive(g) })
	if late := time.Duration(r.last("main") - at); late > slack+r.room() {
		t.Errorf("the command beat %v after both were killed", late)
	}
	for _, pid := range r.survivors() { // the documented hole: what the command had started
		syscall.Kill(pid, syscall.SIGKILL)
	}
	eventually(t, "end of the rest", func() bool { return len(r.survivors()) == 0 })
}

// Q08
func TestAProcessOfAnotherUserIsReportedAsStuckAndNeverAsGone(t *testing.T) {
	needRoot(t)
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, b, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(other, 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	p := endless("sh", "-c", `UL_TEST_MODE=root "`+other+`" "$D/main"; exit 0`)
	// The shell heeds the stop signal; what it leaves is killed at once.
	p.StopIn, p.KillIn, p.Grace, p.Told = 200*time.Millisecond, 20*time.Second, 20*time.Second, true
	r := prepare(t, p)
	for _, d := range []string{r.dir, filepath.Dir(r.dir), dir} {
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	plain := filepath.Join(dir, "wrapper") // where the other user can execute it
	if err := os.WriteFile(plain, b, 0o755); err != nil {
		t.Fatal(err)
	}
	r.cmd.Path, r.cmd.Args = "/usr/bin/setpriv", []string{"setpriv", "--reuid=54321", "--clear-groups", plain}
	r.start()
	r.beats("main")
	r.due()
	var stuck entry
	eventually(t, "report of a stuck kill", func() bool {
		for _, e := range r.entries() {
			if e.What == "event" && e.Ev.Kind == signals.Stuck {
				stuck = e
				return true
			}
		}
		return false
	})
	if stuck.Err != syscall.EPERM.Error() || stuck.Ev.Count != 1 || len(stuck.Ev.Pids) != 1 {
		t.Fatalf("stuck: %+v, want one process, not permitted", stuck)
	}
	if _, gone := r.event(signals.Gone); gone {
		t.Error("the tree counts as gone")
	}
	before := r.last("main")
	eventually(t, "another beat", func() bool { return r.last("main") > before })
	syscall.Kill(stuck.Ev.Pids[0], syscall.SIGKILL)
	r.wantSignal(syscall.SIGTERM) // so the shell had ended
	if _, gone := r.event(signals.Gone); !gone {
		t.Error("the tree does not count as gone although it is")
	}
}
