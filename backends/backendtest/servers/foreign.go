//go:build linux

package servers

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// as returns a user that a server runs as which refuses to run as root, and a directory of this user's own. A test that does not
// run as root keeps its user.
func as(t testing.TB, need, name string) (*syscall.Credential, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "ul-"+name+"-") //nolint:usetesting // the test's own is closed to others, and its path too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if os.Getuid() != 0 {
		return nil, dir
	}
	u, err := user.Lookup(name)
	if err != nil {
		Require(t, need, err)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err1 != nil || err2 != nil {
		t.Fatalf("user %s: %v, %v", name, err1, err2)
	}
	own(t, dir, int(uid), int(gid))
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, dir
}

func own(t testing.TB, path string, uid, gid int) {
	t.Helper()
	if err := os.Chown(path, uid, gid); err != nil {
		t.Fatal(err)
	}
}

// family signals a process and its descendants, which may be in sessions of their own, and returns them.
func (p *Process) family(sig syscall.Signal) []int {
	p.t.Helper()
	p.signal(sig) // the parent first: a stopped one makes no more
	if sig == syscall.SIGSTOP {
		Within(p.t, patience, p.command.Name+" is stopped", func() error {
			if !p.still() {
				return errors.New("it is not")
			}
			return nil
		})
	}
	all := descendants(p.Pid())
	for _, pid := range all {
		_ = syscall.Kill(pid, sig) // it may have ended; its parent is stopped or gone, and numbers are not given again so soon
	}
	return append(all, p.Pid())
}

// freezeAll stops a server of several processes.
func (p *Process) freezeAll() {
	p.t.Helper()
	all := p.family(syscall.SIGSTOP)
	Within(p.t, patience, p.command.Name+" is stopped", func() error {
		for _, pid := range all {
			if s := status(pid); s != 'T' && s != 'Z' && s != 0 {
				return fmt.Errorf("the state of %d is %c", pid, s)
			}
		}
		return nil
	})
}

// still tells that the process that was started makes no children any more: it has stopped, or ended.
func (p *Process) still() bool {
	s := status(p.Pid())
	return s == 'T' || s == 'Z' || s == 0
}

// killAll kills a server of several processes and returns when all are gone.
func (p *Process) killAll() {
	p.t.Helper()
	// A child that is made after the look would outlive its parent for a moment, with all that a server which is started again wants to have.
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err == nil {
		for end := time.Now().Add(patience); !p.still() && time.Now().Before(end); time.Sleep(pace) {
			// If it does not stop, it is killed all the same.
		}
	}
	all := append(descendants(p.Pid()), p.Pid())
	for _, pid := range all {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	p.end(syscall.SIGKILL)
	Within(p.t, patience, p.command.Name+" is gone", func() error {
		for _, pid := range all {
			if s := status(pid); s != 0 && s != 'Z' {
				return fmt.Errorf("the state of %d is %c", pid, s)
			}
		}
		return nil
	})
}

// soon is how long a question of the kit itself may take, on a machine that is busy with other things.
const soon = 15 * time.Second
