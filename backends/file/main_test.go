//go:build linux

package file

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// roles are what the test binary does when it is started by a test: a process of its own that uses the store.
var roles = map[string]func(c *Client, args []string) error{
	"contend": contend,
	"hold":    hold,
	"once":    once,
	"starve":  starve,
}

const roleVariable = "UNDERLEASE_FILE_TEST_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	if err := play(role, os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func play(role, dir string, args []string) error {
	s, err := Scheme().Open(background, &url.URL{Scheme: "file", Path: dir})
	if err != nil {
		return err
	}
	return roles[role](s.Backend.(*Client), args)
}

// actor is a process that plays a role.
type actor struct {
	*exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	ended sync.Once
}

// start starts a process. It is killed at the end of the test, if it lives.
func start(t *testing.T, role, dir string, args ...string) *actor {
	t.Helper()
	return startAs(t, nil, role, dir, args...)
}

func startAs(t *testing.T, who *syscall.Credential, role, dir string, args ...string) *actor {
	t.Helper()
	// Killed by the test itself, and not before its clean-up: t.Context ends earlier.
	a := &actor{Cmd: exec.CommandContext(context.Background(), "/proc/self/exe", append([]string{dir}, args...)...)}
	a.Env = append(os.Environ(), roleVariable+"="+role)
	a.Stderr = os.Stderr
	a.SysProcAttr = &syscall.SysProcAttr{Credential: who, Pdeathsig: syscall.SIGKILL}
	in, err := a.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := a.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.in, a.out = in, bufio.NewReader(out)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.kill)
	return a
}

// line returns the next line that the process prints.
func (a *actor) line(t *testing.T) string {
	t.Helper()
	s, err := a.out.ReadString('\n')
	if err != nil {
		t.Fatalf("process %d: got %v, want a line", a.Process.Pid, err)
	}
	return strings.TrimSuffix(s, "\n")
}

func (a *actor) kill() {
	a.ended.Do(func() {
		_ = a.Process.Kill()
		_ = a.Wait()
	})
}

// finish lets the process end by itself and returns what is left of its output.
func (a *actor) finish(t *testing.T) string {
	t.Helper()
	_ = a.in.Close()
	rest, err := io.ReadAll(a.out)
	if err != nil {
		t.Fatal(err)
	}
	a.ended.Do(func() {
		if err := a.Wait(); err != nil {
			t.Errorf("process %d: got %v, want it to end well", a.Process.Pid, err)
		}
	})
	return string(rest)
}

func bootTime() int64 { return hostClock().boot() }

// contend acquires and releases a lease for some rounds, and prints term, begin and end of each.
func contend(c *Client, args []string) error {
	slots, rounds := 1, 0
	if _, err := fmt.Sscan(args[1], &slots); err != nil {
		return err
	}
	if _, err := fmt.Sscan(args[2], &rounds); err != nil {
		return err
	}
	out := bufio.NewWriter(os.Stdout)
	for range rounds {
		req := backends.Request{Lease: args[0], Holder: "pid " + strconv.Itoa(os.Getpid()), Handle: backends.NewHandle(), Slots: slots}
		var g backends.Grant
		for {
			var err error
			if g, err = c.Acquire(background, req); err == nil {
				break
			}
			if !errors.Is(err, backends.ErrBusy) {
				return err
			}
			if err := c.WaitFree(background, req); err != nil {
				return err
			}
		}
		begin := bootTime()
		if _, err := c.Renew(background, g); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, g.Term, g.Slot, begin, bootTime()); err != nil {
			return err
		}
		if err := c.Release(background, g, backends.End{Outcome: "ok"}); err != nil {
			return err
		}
	}
	return out.Flush()
}

// hold acquires a lease, prints its term, and keeps it until its input ends.
func hold(c *Client, args []string) error {
	length, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	g, err := c.Acquire(background, backends.Request{
		Lease: args[0], Holder: "pid " + strconv.Itoa(os.Getpid()), Handle: backends.NewHandle(), Slots: 1, Hold: length,
	})
	if err != nil {
		return err
	}
	fmt.Println(g.Term)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// once acquires and releases once and prints the kind of what went wrong.
func once(c *Client, args []string) error {
	req := backends.Request{Lease: args[0], Handle: backends.NewHandle(), Slots: 1}
	g, err := c.Acquire(background, req)
	if err == nil {
		err = c.Release(background, g, backends.End{Outcome: "ok"})
	}
	fmt.Println(kind(err), err, "hint:", backends.Hint(err))
	return nil
}

// starve acquires while there is no free descriptor, then with one, then with two, until it can.
func starve(c *Client, args []string) error {
	<-time.NewTimer(time.Millisecond).C // the runtime needs descriptors of its own for the first timer
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
		return err
	}
	var all []int
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		all = append(all, fd)
	}
	for _, fd := range all {
		_, err := c.Acquire(background, backends.Request{Lease: args[0], Handle: backends.NewHandle(), Slots: 1})
		fmt.Println(kind(err), err)
		if err == nil {
			return nil
		}
		shut(fd)
	}
	return nil
}

func kind(err error) string {
	for word, k := range map[string]error{
		"busy": backends.ErrBusy, "lost": backends.ErrLost, "unavailable": backends.ErrUnavailable, "denied": backends.ErrDenied, "broken": backends.ErrBroken,
	} {
		if errors.Is(err, k) {
			return word
		}
	}
	if err != nil {
		return "error"
	}
	return "ok"
}
