package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/internal/needed"
	"github.com/underlease/underlease/signals"
)

// exact builds the program as a release is built, with its own entry.
var exact = sync.OnceValues(func() (string, error) {
	dir, err := filepath.Abs(".")
	if err != nil {
		return "", err
	}
	beside, err := exec.LookPath("started") // testscript removes this directory at the end
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(beside), "exact")
	cmd := exec.Command("go", "build", "-ldflags", "-s -w -E ulentry", "-o", path, dir)
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", &exec.Error{Name: string(out), Err: err}
	}
	return path, nil
})

func exactOrSkip(t *testing.T) string {
	t.Helper()
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("there is no entry of ours on " + runtime.GOARCH)
	}
	path, err := exact()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// eachIsolation runs a test in every isolation that this machine has: a command starts in the same way in all of them.
func eachIsolation(t *testing.T, f func(t *testing.T, i signals.Isolation)) {
	for _, i := range []signals.Isolation{signals.IsolateTree, signals.IsolateCgroup, signals.IsolatePidns} {
		t.Run(string(i), func(t *testing.T) {
			needed.Require(t, string(i), i.Possible())
			f(t, i)
		})
	}
}

// both runs a command that is started as flags say, without us and with us, and returns what it wrote.
func both(t *testing.T, i signals.Isolation, program string, flags []string, command ...string) (without, with string) {
	t.Helper()
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "started", args...)
		cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+t.TempDir())
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		var out, said bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &said
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v: %v\n%s%s", args, err, out.String(), said.String())
		}
		return out.String()
	}
	flags = append(flags, "--")
	without = run(slices.Concat(flags, command)...)
	with = run(slices.Concat(flags, []string{program, "run", "--isolate", string(i), "x", "--"}, command)...)
	return without, with
}

// nothingOfOurs is the environment of the tests without the variables that are theirs.
func nothingOfOurs() []string {
	return slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "UNDERLEASE_") })
}

// shows says whether a line of /proc/PID/status has all the bits of another one. It may have more: whoever started the tests
// may ignore signals, too.
func shows(t *testing.T, status, line string) bool {
	t.Helper()
	name, bits, _ := strings.Cut(line, "\t")
	want, err := strconv.ParseUint(bits, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(status) {
		if n, b, _ := strings.Cut(strings.TrimSpace(l), "\t"); n == name {
			got, err := strconv.ParseUint(b, 16, 64)
			return err == nil && got&want == want
		}
	}
	return false
}

// Q37
func TestSignalsThatWereIgnoredOrBlockedReachTheCommandSo(t *testing.T) {
	program := exactOrSkip(t)
	show := []string{"grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"}
	everything := "1,2,3,4,5,6,7,8,10,11,12,13,14,15,16,17,18,20,21,22,23,24,25,26,27,28,29,30,31,34,35,50,64"
	for _, c := range []struct {
		name  string
		flags []string
		has   string // in what the command sees
	}{
		{"nothing", nil, ""},
		{"nohup", []string{"-ignore", "1"}, "SigIgn:\t0000000000000001"},
		{"trap '' TERM INT QUIT", []string{"-ignore", "15,2,3"}, "SigIgn:\t0000000000004006"},
		{"a service of systemd", []string{"-ignore", "13"}, "SigIgn:\t0000000000001000"},
		{"a parent that does not wait", []string{"-ignore", "17"}, "SigIgn:\t0000000000010000"},
		{"ignored: everything", []string{"-ignore", everything}, "SigIgn:\t8002000000000000"},
		{"blocked: what ends", []string{"-block", "15,2,3,1"}, "SigBlk:\t0000000000004007"},
		{"blocked: everything", []string{"-block", everything}, "SigBlk:\t8002000000000000"},
		{"both", []string{"-ignore", "10,15", "-block", "12,14,34,40"}, "SigBlk:\t0000008200002800"},
	} {
		test := func(t *testing.T, i signals.Isolation) {
			without, with := both(t, i, program, c.flags, show...)
			if with != without {
				t.Errorf("the command sees\n%swant, as without us,\n%s", with, without)
			}
			if c.has != "" && !shows(t, with, c.has) {
				t.Errorf("the command sees\n%swant %q in it: the test does not do what it says", with, c.has)
			}
		}
		t.Run(c.name, func(t *testing.T) { eachIsolation(t, test) })
	}
}

// Without the entry there is what the Go runtime respects: nohup works.
func TestWithoutTheEntryHangUpInterruptAndJobControlStayIgnored(t *testing.T) {
	eachIsolation(t, func(t *testing.T, i signals.Isolation) {
		without, with := both(t, i, "underlease", []string{"-ignore", "1,2,20,21,22"}, "grep", "^SigIgn", "/proc/self/status")
		if with != without || !shows(t, with, "SigIgn:\t0000000000380003") {
			t.Errorf("the command sees %q, want %q as without us", with, without)
		}
	})
}

// The wrapper does not act on a signal either that was ignored when it was started.
func TestAnIgnoredSignalStaysIgnoredForTheWrapper(t *testing.T) {
	program := exactOrSkip(t)
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "started", "-ignore", "15,10", "--",
		program, "run", "x", "--", "sh", "-c", `echo > ready; while ! [ -e end ]; do sleep 0.01; done`)
	cmd.Dir = dir
	cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+dir+"/state")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitForFile(t, filepath.Join(dir, "ready"))
	cmd.Process.Signal(syscall.SIGTERM)
	cmd.Process.Signal(syscall.SIGUSR1)
	write(t, filepath.Join(dir, "end"), "")
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended with %v, want 0: nothing heeds these signals", err)
	}
}

// C41
func TestClosedDescriptorsStayClosed(t *testing.T) {
	program := exactOrSkip(t)
	eachIsolation(t, func(t *testing.T, i signals.Isolation) {
		for _, flags := range [][]string{nil, {"-close", "0"}, {"-close", "2"}, {"-close", "0,2"}} {
			// The shell's own descriptor for the directory comes after 2, because the shell has moved it there.
			without, with := both(t, i, program, flags, "sh", "-c",
				`for n in 0 1 2; do if [ -e /proc/$$/fd/$n ]; then echo $n open; else echo $n closed; fi; done`)
			if with != without {
				t.Errorf("started with %v the command has\n%swant, as without us,\n%s", flags, with, without)
			}
		}
	})
}

func TestTheLimitOfOpenFilesIsTheCallers(t *testing.T) {
	program := exactOrSkip(t)
	eachIsolation(t, func(t *testing.T, i signals.Isolation) {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", `ulimit -Sn 300; "$0" run --isolate "$1" x -- sh -c 'ulimit -Sn'`, program, string(i))
		cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil || string(out) != "300\n" {
			t.Errorf("got %q and %v, want a limit of 300", out, err)
		}
	})
}

func TestSocketActivationThatCannotBePassedOnIsSaid(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "started", "-listen", "--", "underlease", "run", "x", "--", "true")
	cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "underlease: warning: LISTEN_PID names this process and not the command") {
		t.Errorf("got %q and %v, want a warning", out, err)
	}
}

// Q42
func TestSocketActivationNamesTheCommand(t *testing.T) {
	program := exactOrSkip(t)
	eachIsolation(t, func(t *testing.T, i signals.Isolation) {
		_, with := both(t, i, program, []string{"-listen"}, "sh", "-c",
			`[ $LISTEN_PID = $$ ] && [ $WATCHDOG_PID = $$ ] && echo its own${LISTEN_PIDFDID+ of old}; echo $LISTEN_FDS $NOTIFY_SOCKET; readlink /proc/self/fd/3`)
		if !strings.HasPrefix(with, "its own\n1 /run/none\nsocket:[") {
			t.Errorf("the command sees %q, want its own pid and the socket as descriptor 3", with)
		}
		// The numbers of somebody else are left alone.
		t.Setenv("LISTEN_PID", "1")
		t.Setenv("WATCHDOG_PID", "12345678")
		without, with := both(t, i, program, nil, "sh", "-c", `echo $LISTEN_PID $WATCHDOG_PID`)
		if with != without || with != "1 12345678\n" {
			t.Errorf("the command sees %q, want %q as it was", with, without)
		}
	})
}

func TestWhatExecRefusesIsFoundWithTheEntryToo(t *testing.T) {
	program := exactOrSkip(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "dangling"), "#!/nonexistent\n")
	write(t, filepath.Join(dir, "plain"), "echo script $1\n")
	eachIsolation(t, func(t *testing.T, i signals.Isolation) {
		for _, c := range []struct {
			args []string
			code int
			out  string
		}{
			{[]string{"./dangling"}, 127, ""},
			{[]string{"./plain", "a"}, 0, "script a\n"},
			{[]string{"sh", "-c", "exit 7"}, 7, ""},
		} {
			cmd := exec.CommandContext(t.Context(), program, append([]string{"run", "--isolate", string(i), "x", "--"}, c.args...)...)
			cmd.Dir = dir
			cmd.Env = append(nothingOfOurs(), "UNDERLEASE_BACKEND=file://"+dir+"/state")
			out, _ := cmd.Output()
			if got := cmd.ProcessState.ExitCode(); got != c.code || string(out) != c.out {
				t.Errorf("%.40q: got %d and %q, want %d and %q", c.args, got, out, c.code, c.out)
			}
		}
	})
}

func TestVersionTellsWhetherTheEntryIsThere(t *testing.T) {
	program := exactOrSkip(t)
	for path, want := range map[string]string{program: "inherited signals: exact\n", "underlease": "inherited signals: as Go leaves them\n"} {
		out, err := exec.CommandContext(t.Context(), path, "version").Output()
		if err != nil || !strings.HasSuffix(string(out), want) {
			t.Errorf("%s version: got %q and %v, want %q", path, out, err, want)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	servers.WriteProgram(t, path, []byte(text))
}

func waitForFile(t *testing.T, path string) {
	t.Helper()
	limit := signals.Now() + int64(patience)
	for !there(path) {
		if signals.Now() > limit {
			t.Fatalf("no %s after %v", path, patience)
		}
		time.Sleep(2 * time.Millisecond) // the pace of the looks
	}
}

func there(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
