//go:build linux

package file

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
)

// walked is what Walk showed.
type walked struct {
	states []backends.State
	errs   map[string]error // by lease, or "" where that is not known
}

func walk(t *testing.T, c *Client, namespace string) walked {
	t.Helper()
	w := walked{errs: map[string]error{}}
	if err := c.Walk(t.Context(), namespace, func(s backends.State, err error) bool {
		if err != nil {
			w.errs[s.Lease] = err
		} else {
			w.states = append(w.states, s)
		}
		return true
	}); err != nil {
		t.Fatalf("Walk: got %v, want the leases", err)
	}
	return w
}

func (w walked) names() []string {
	var names []string
	for _, s := range w.states {
		names = append(names, s.Lease)
	}
	return names
}

// snapshot returns everything below dir with what any change would change.
func snapshot(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		all = append(all, fmt.Sprintf("%s %v %d %v", path, info.Mode(), info.Size(), info.ModTime().UnixNano()))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestALookMakesNothing(t *testing.T) {
	dir := t.TempDir()
	looks := func(c *Client) {
		t.Helper()
		for _, namespace := range []string{"", "team", "no such"} {
			if _, err := c.List(t.Context(), namespace); err != nil {
				t.Errorf("List of %q: got %v, want what is there", namespace, err)
			}
			walk(t, c, namespace)
			for _, lease := range []string{"held", "free", "no/such"} {
				if _, err := c.Inspect(t.Context(), namespace, lease); err != nil {
					t.Errorf("Inspect of %q in %q: got %v, want what is there", lease, namespace, err)
				}
			}
		}
	}
	empty := snapshot(t, dir)
	looks(openAt(t, filepath.Join(dir, "not/made")))
	if now := snapshot(t, dir); !slices.Equal(now, empty) {
		t.Fatalf("after looks at a store that is not there: got %q, want %q", now, empty)
	}

	c := openAt(t, filepath.Join(dir, "store"))
	acquire(t, c, "held", 1)
	release(t, c, acquire(t, c, "free", 1))
	before := snapshot(t, dir)
	looks(openAt(t, filepath.Join(dir, "store")))
	if now := snapshot(t, dir); !slices.Equal(now, before) {
		t.Errorf("after looks: got %q, want %q", now, before)
	}
	for _, lease := range []string{"held", "free"} {
		if err := os.Remove(c.lease("", lease) + "/mu"); err != nil {
			t.Fatal(err)
		}
	}
	before = snapshot(t, dir)
	looks(openAt(t, filepath.Join(dir, "store")))
	if now := snapshot(t, dir); !slices.Equal(now, before) {
		t.Errorf("after looks at leases without mu: got %q, want %q", now, before)
	}
}

func TestALeaseWithoutMuIsShownAsItIs(t *testing.T) {
	c := openAt(t, t.TempDir())
	g := acquire(t, c, "held", 1)
	release(t, c, acquire(t, c, "free", 1))
	for _, lease := range []string{"held", "free"} {
		if err := os.Remove(c.lease("", lease) + "/mu"); err != nil {
			t.Fatal(err)
		}
	}
	w := walk(t, c, "")
	if got := w.names(); !slices.Equal(got, []string{"free", "held"}) || len(w.errs) != 0 {
		t.Fatalf("got %q and %v, want both leases", got, w.errs)
	}
	if s := w.states[0].Slots[0]; s.Taken() || s.Last.Outcome != "ok" {
		t.Errorf("free: got %+v, want a free slot whose last holder ended well", s)
	}
	if s := w.states[1].Slots[0]; !s.Held || s.Term != g.Term {
		t.Errorf("held: got %+v, want it held with term %d", s, g.Term)
	}
}

func TestWalkNamesWhatItCannotShowAndShowsTheOthers(t *testing.T) {
	c := openAt(t, t.TempDir())
	for _, lease := range []string{"a", "b", "C/c", "D/d", "e"} {
		release(t, c, acquire(t, c, lease, 1))
	}
	for _, lease := range []string{"b", "C/c"} {
		if err := os.WriteFile(c.lease("", lease)+"/rec", []byte("torn"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w := walk(t, c, "")
	if got, want := w.names(), []string{"D/d", "a", "e"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	// The name of C/c stood in its record alone; its error has the path.
	for lease, of := range map[string]string{"b": "b", "": "C/c"} {
		err := w.errs[lease]
		if path := c.lease("", of) + "/rec"; !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), path) || !strings.Contains(backends.Hint(err), path) {
			t.Errorf("%q: got %v (hint %q), want ErrBroken with %s", of, err, backends.Hint(err), path)
		}
	}
	list, err := c.List(t.Context(), "")
	if len(list) != 3 || !errors.Is(err, backends.ErrBroken) || strings.Count(err.Error(), "/rec") != 2 {
		t.Errorf("List: got %d leases and %v, want 3 and both records", len(list), err)
	}
}

// Whoever is stopped while it has the mu of one lease hides that one, and for a second.
func TestAProcessThatHangsInOneLeaseDoesNotHideTheOthers(t *testing.T) {
	c := openAt(t, t.TempDir())
	for _, lease := range []string{"a", "b", "c"} {
		release(t, c, acquire(t, c, lease, 1))
	}
	d, err := c.enter(t.Context(), "", "b", toLook)
	if err != nil || d == nil {
		t.Fatalf("got %v and %v, want a door", d, err)
	}
	defer d.leave()
	begin := time.Now()
	w := walk(t, openAt(t, c.dir), "")
	if took := time.Since(begin); took < longestLook || took > longestLook+5*time.Second {
		t.Errorf("it took %v, want %v and little more", took, longestLook)
	}
	if got := w.names(); !slices.Equal(got, []string{"a", "c"}) {
		t.Errorf("got %q, want the others", got)
	}
	if err := w.errs["b"]; !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("got %v, want ErrUnavailable that names this process", err)
	}
}

// A contender that comes while somebody looks again and again is not refused.
func TestLooksDoNotMakeALeaseBusy(t *testing.T) {
	dir := memory(t)
	looker, c := openAt(t, dir), openAt(t, dir)
	release(t, c, acquire(t, c, "l", 1))
	stop := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
				if _, err := looker.Inspect(background, "", "l"); err != nil {
					ended <- err
					return
				}
			}
		}
	}()
	for range 200 {
		release(t, c, acquire(t, c, "l", 1)) // fails unless it is free
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Errorf("Inspect: got %v, want the state", err)
	}
}
