package guard

import (
	"os"
	"strings"
	"syscall"
	"testing"
)

// zombies starts processes that end at once, and waits until they have.
func zombies(t *testing.T, n int) {
	t.Helper()
	for range n {
		pid, err := syscall.ForkExec("/bin/true", []string{"true"}, &syscall.ProcAttr{Env: []string{}})
		if err != nil {
			t.Fatal(err)
		}
		WaitEnded(pid)
	}
}

// However fast the children of a tree end, the clock is looked at in between.
func TestATurnTakesInSoManyChildrenAndNoMore(t *testing.T) {
	g := &guardian{sock: -1, walk: Walk{Root: os.Getpid()}}
	zombies(t, 2*collectMost)
	for turn, want := range []bool{true, true, false} {
		g.collect()
		if g.more != want {
			t.Fatalf("turn %d: more is %v, want %v", turn, g.more, want)
		}
		if left, _ := Children(os.Getpid()); turn == 0 && len(left) != collectMost {
			t.Errorf("after the first turn %d children are left, want %d", len(left), collectMost)
		}
	}
	if !g.childless {
		t.Error("children are left after the last turn")
	}
}

func TestACountEndsWhenThereIsSomethingBetterToDo(t *testing.T) {
	for range 3 {
		pid, err := syscall.ForkExec("/bin/sleep", []string{"sleep", "60"}, &syscall.ProcAttr{Env: []string{}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			syscall.Kill(pid, syscall.SIGKILL)
			syscall.Wait4(pid, nil, 0, nil)
		}()
	}
	w := Walk{Root: os.Getpid()}
	asked := 0
	if s := w.CountUntil(func() bool { asked++; return asked > 2 }); s.Count != 2 {
		t.Errorf("counted %d, want the 2 that were seen before the end", s.Count)
	}
	s := w.CountUntil(func() bool { return false })
	if s.Count != 3 || len(s.States) != 3 || strings.Trim(string(s.States), "SRD") != "" {
		t.Errorf("counted %+v, want 3 and the state of each", s)
	}
	if s := w.Count(); s.Count != 3 {
		t.Errorf("counted %d afterwards, want 3", s.Count)
	}
}
