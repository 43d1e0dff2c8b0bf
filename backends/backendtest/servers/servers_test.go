//go:build linux

package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func sleeper(t *testing.T) *Process {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	return Start(t, Command{Name: "sleeper", Path: sleep, Args: []string{"600"}, Dir: t.TempDir()})
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil && status(pid) != 'Z' }

func TestAServerIsFrozenResumedKilledAndStartedAgain(t *testing.T) {
	p := sleeper(t)
	first := p.Pid()
	p.Freeze()
	if got := status(first); got != 'T' {
		t.Errorf("state of a frozen server: got %c, want T", got)
	}
	p.Resume()
	Within(t, patience, "it runs again", func() error {
		if s := status(first); s != 'S' && s != 'R' {
			return fmt.Errorf("its state is %c", s)
		}
		return nil
	})
	p.Kill()
	if alive(first) {
		t.Errorf("pid %d is alive after Kill returned", first)
	}
	p.Restart()
	if second := p.Pid(); second == first || !alive(second) {
		t.Errorf("after Restart: got pid %d, want another one than %d, alive", second, first)
	}
	p.Freeze()
	p.Kill() // also what is frozen
}

func TestAServerEndsWithItsTest(t *testing.T) {
	pid := 0
	t.Run("a test", func(t *testing.T) { pid = sleeper(t).Pid() })
	if alive(pid) {
		t.Errorf("pid %d is alive after its test", pid)
	}
}

// The kernel does it: the test's process is killed, and has no time to clean up.
func TestNothingOutlivesAKilledTest(t *testing.T) {
	if file := os.Getenv("SERVERS_TEST_ORPHAN"); file != "" {
		p := sleeper(t)
		if err := os.WriteFile(file+".tmp", []byte(strconv.Itoa(p.Pid())), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".tmp", file); err != nil {
			t.Fatal(err)
		}
		<-p.done() // until this process is killed
		t.Fatal("the server ended by itself")
	}
	file := filepath.Join(t.TempDir(), "pid")
	c := exec.Command(os.Args[0], "-test.run=^TestNothingOutlivesAKilledTest$")
	c.Env = append(os.Environ(), "SERVERS_TEST_ORPHAN="+file)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	Within(t, patience, "a server runs", func() error {
		b, err := os.ReadFile(file)
		if err == nil {
			pid, err = strconv.Atoi(string(b))
		}
		return err
	})
	if !alive(pid) {
		t.Fatalf("pid %d is not alive, want a server", pid)
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // killed
	Within(t, patience, "the server is gone", func() error {
		if alive(pid) {
			return fmt.Errorf("pid %d is alive", pid)
		}
		return nil
	})
}

func TestAPortOfAnotherProcessIsNotTaken(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	if err := owns([]int{os.Getpid()}, port); err != nil {
		t.Errorf("a port of our own: got %v, want nil", err)
	}
	if err := owns([]int{sleeper(t).Pid()}, port); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a port of another: got %v, want an error that says so", err)
	}
	free := FreePort(t, 0)
	if err := owns([]int{os.Getpid()}, free); err == nil || !strings.Contains(err.Error(), "nobody listens") {
		t.Errorf("a free port: got %v, want an error that says so", err)
	}
}

// A server that cannot start is not waited for.
func TestAServerThatEndsIsNotReady(t *testing.T) {
	no, err := exec.LookPath("false")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := &Process{t: t, command: Command{
		Name: "none", Path: no, Dir: dir, Log: filepath.Join(dir, "log"),
		Ready: func(context.Context) error { return errors.New("no answer") },
	}}
	begun := time.Now()
	if err := p.restart(); err == nil || !strings.Contains(err.Error(), "it ended (exit status 1)") {
		t.Errorf("start: got %v, want an error that says that it ended", err)
	}
	if took := time.Since(begun); took > patience/2 {
		t.Errorf("it took %v to find out", took)
	}
}

// fake is a test that notes how it was ended.
type fake struct {
	testing.TB
	skipped, failed string
}

type ended struct{}

func (f *fake) Helper() {}
func (f *fake) Skipf(format string, args ...any) {
	f.skipped = fmt.Sprintf(format, args...)
	panic(ended{})
}

func (f *fake) Fatalf(format string, args ...any) {
	f.failed = fmt.Sprintf(format, args...)
	panic(ended{})
}

func TestWhatIsMissingSkipsOrFails(t *testing.T) {
	for require, fails := range map[string]bool{"": false, "etcd": false, "rediss": false, "redis": true, "etcd,redis": true, "all": true} {
		t.Setenv("UNDERLEASE_TEST_REQUIRE", require)
		f := &fake{TB: t}
		func() {
			defer func() { _ = recover() }()
			Programs(f, "redis", "install it so", nil, "sh", "no-such-program")
		}()
		got := f.skipped
		if fails {
			got = f.failed
		}
		if !strings.Contains(got, "no-such-program") || !strings.Contains(got, "install it so") || f.skipped != "" == fails {
			t.Errorf("required %q: got skipped %q and failed %q, want failed: %v, with what is missing", require, f.skipped, f.failed, fails)
		}
	}
	if got := Programs(&fake{TB: t}, "shell", "", nil, "sh")["sh"]; got == "" {
		t.Error("sh was not found")
	}
	if got := Programs(&fake{TB: t}, "shell", "", []string{"/bin"}, "sh")["sh"]; got == "" {
		t.Error("sh was not found in /bin")
	}
}

func TestRedisAnswersAloneInASetAndInACluster(t *testing.T) {
	certificates := MakeCertificates(t)
	for name, o := range map[string]RedisOptions{
		"plain":    {},
		"durable":  {Durable: true},
		"password": {Password: "p"},
		"user":     {User: "u", Password: "p"},
		"tls":      {TLS: certificates},
		"socket":   {Socket: true},
	} {
		r := StartRedis(t, o)
		if got := r.Info("redis_version"); got == "" {
			t.Errorf("%s: got no version", name)
		}
		if r.Do("SET", "k", "v"); r.Do("GET", "k") != "v" {
			t.Errorf("%s: the value is not kept", name)
		}
	}
	s := StartSentinel(t, RedisOptions{})
	s.Primary.Kill()
	s.AwaitFailover()
	c := StartCluster(t, RedisOptions{})
	c.Owner("ul:{x}").Do("SET", "ul:{x}", "v")
}
