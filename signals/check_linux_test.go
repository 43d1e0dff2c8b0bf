package signals_test

import (
	"errors"
	"math"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/signals"
)

// standing asks the guardian of a run. Whoever asks waits for a second; a machine that stands still for as long has no answer to give.
func (r *run) standing(socket string) signals.Standing {
	r.t.Helper()
	r.stall.forget()
	s, err := signals.Ask(socket)
	if err != nil && r.stall.most() > 500*time.Millisecond {
		s, err = signals.Ask(socket)
	}
	if err != nil {
		r.t.Fatalf("asked for the time that is left: %v", err)
	}
	return s
}

func TestTheGuardianAnswersAlsoWhileTheWrapperIsStopped(t *testing.T) {
	p := endless("sleep", "99")
	p.Socket, p.StopIn, p.KillIn = signals.NewSocket(), 20*time.Second, 30*time.Second
	r := launch(t, p)
	r.entry("started")
	guardian := r.guardian()
	r.cmd.Process.Signal(syscall.SIGSTOP)
	first := r.standing(p.Socket)
	if first.Stage != signals.StageHolding || first.Term != "42" || first.Left > 20*time.Second || first.Left < 5*time.Second {
		t.Errorf("got %+v, want some 20s that are left of term 42", first)
	}
	eventually(t, "later answer", func() bool { return r.standing(p.Socket).Left <= first.Left-10*time.Millisecond })
	r.cmd.Process.Kill()
	r.wait()
	eventually(t, "end of the guardian", func() bool { return !alive(guardian) }) // which answers until its very end
	var ask *signals.AskError
	if s, err := signals.Ask(p.Socket); !errors.As(err, &ask) {
		t.Errorf("after the end: got %+v and %v, want an AskError", s, err)
	}
}

func TestASignalFromOutsideAndAStopOfOursLeaveNoTime(t *testing.T) {
	p := endless("sh", "-c", `trap "" TERM HUP; echo > "$D/ready"; while :; do sleep 0.02; done`)
	// Time enough to see each stage of it; the end comes by order.
	p.Socket, p.Listens, p.RunStopIn, p.RunKillIn, p.Told = signals.NewSocket(), true, 1500*time.Millisecond, time.Minute, true
	p.Grace, p.KillOn = time.Minute, syscall.SIGUSR1
	r := launch(t, p)
	eventually(t, "command that is ready", func() bool { return r.read("ready") != "" })
	if s := r.standing(p.Socket); s.Stage != signals.StageHolding {
		t.Errorf("got %+v, want that it holds", s)
	}
	forwarded := func(n int) {
		eventually(t, "signal that is passed on", func() bool { return strings.Count(r.logged(), `"forwarded"`) == n })
	}
	r.cmd.Process.Signal(syscall.SIGHUP)
	forwarded(1)
	if s := r.standing(p.Socket); s.Stage != signals.StageHolding {
		t.Errorf("after HUP: got %+v, want that it still holds: HUP asks nobody to finish", s)
	}
	r.cmd.Process.Signal(syscall.SIGTERM)
	forwarded(2)
	if s := r.standing(p.Socket); s.Stage != signals.StageDraining {
		t.Errorf("after TERM: got %+v, want that it drains", s)
	}
	r.due()
	if s := r.standing(p.Socket); s.Left > 1500*time.Millisecond || s.Stage != signals.StageDraining && s.Stage != signals.StageStopping {
		t.Errorf("got %+v, want at most what --max-run leaves", s)
	}
	eventually(t, "stop of ours", func() bool { return r.standing(p.Socket).Stage == signals.StageStopping })
	r.cmd.Process.Signal(syscall.SIGUSR1)
	r.wantSignal(syscall.SIGKILL)
}

func TestWithoutADeadlineThereIsAlwaysTime(t *testing.T) {
	p := endless("sleep", "99")
	p.Socket = signals.NewSocket()
	r := launch(t, p)
	r.entry("started")
	if s := r.standing(p.Socket); s.Left != math.MaxInt64 || s.Stage != signals.StageHolding {
		t.Errorf("got %+v, want forever", s)
	}
	r.cmd.Process.Kill()
	r.wait()
	eventually(t, "end of the tree", func() bool { return len(r.survivors()) == 0 })
}

func TestClientsThatSayNothingDelayNoKillAndWakeNobody(t *testing.T) {
	p := endless(tree(true)...)
	p.Socket, p.StopIn, p.KillIn, p.Told = signals.NewSocket(), 500*time.Millisecond, 800*time.Millisecond, true
	r := launch(t, p)
	r.beats(treeNames...)
	connect := func() int {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		syscall.Connect(fd, &syscall.SockaddrUnix{Name: p.Socket}) // EAGAIN where the queue is full
		return fd
	}
	for range 200 { // and never read
		fd := connect()
		defer syscall.Close(fd)
	}
	eventually(t, "answer in spite of them", func() bool { _, err := signals.Ask(p.Socket); return err == nil })
	guardian := r.guardian()
	calm := func() string {
		b, _ := os.ReadFile("/proc/" + strconv.Itoa(guardian) + "/schedstat")
		return string(b)
	}
	eventually(t, "guardian that sleeps beside open connections", func() bool {
		before := calm()
		<-time.After(20 * time.Millisecond)
		return calm() == before
	})
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // a flood while the kill is due
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				syscall.Close(connect())
				runtime.Gosched()
			}
		}
	}()
	kill := r.due().KillAt
	r.wantSignal(syscall.SIGKILL)
	close(stop)
	<-done
	r.wantSilent(kill, slack, treeNames...)
}

func TestAStoppedGuardianIsNotWaitedForLongerThanASecond(t *testing.T) {
	p := endless("sleep", "99")
	p.Socket = signals.NewSocket()
	r := launch(t, p)
	r.entry("started")
	guardian := r.guardian()
	halt(t, guardian)
	begun := time.Now()
	if s, err := signals.Ask(p.Socket); err == nil {
		t.Errorf("got %+v from a stopped guardian", s)
	}
	if took := time.Since(begun); took < 900*time.Millisecond || took > 3*time.Second+2*r.stall.most() {
		t.Errorf("waited for %v, want a second", took)
	}
	syscall.Kill(guardian, syscall.SIGCONT)
	r.cmd.Process.Kill()
	r.wait()
	eventually(t, "end of the tree", func() bool { return len(r.survivors()) == 0 })
}

func TestStrangersGetNoAnswerAndDescendantsOfAnotherUserDo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user")
	}
	p := endless("sh", "-c", `UL_TEST_MODE=ask UL_TEST_UID=65534 "$EXE" > "$D/inside"; sleep 99`)
	p.Socket = signals.NewSocket()
	t.Setenv("UL_TEST_SOCKET", p.Socket)
	r := launch(t, p)
	eventually(t, "answer to a descendant", func() bool { return strings.HasSuffix(r.read("inside"), "\n") })
	if got := r.read("inside"); got != "1 <nil>\n" {
		t.Errorf("a descendant that became another user got %q, want an answer", got)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), "UL_TEST_MODE=ask", "UL_TEST_UID=65534")
	out, err := cmd.Output()
	if err != nil || string(out) != "0 the guardian does not answer this user\n" {
		t.Errorf("a stranger got %q and %v, want no answer", out, err)
	}
	r.cmd.Process.Kill()
	r.wait()
	eventually(t, "end of the tree", func() bool { return len(r.survivors()) == 0 })
}
