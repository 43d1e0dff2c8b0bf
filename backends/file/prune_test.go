//go:build linux

package file

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
)

// age lets a lease look as if nobody had used it for that long.
func age(t *testing.T, dir string, by time.Duration) {
	t.Helper()
	then := time.Now().Add(-by)
	if err := os.Chtimes(dir, then, then); err != nil {
		t.Fatal(err)
	}
}

const day = 24 * time.Hour

// pass waits until the clock is above every term that was given: before that nothing is removed.
func pass(t *testing.T) {
	t.Helper()
	begun := time.Now().UnixMilli()
	waitFor(t, "the clock has gone on", func() bool { return time.Now().UnixMilli() > begun })
}

// leases counts the directories of leases in all namespaces.
func leases(t *testing.T, c *Client) int {
	t.Helper()
	all, err := filepath.Glob(c.dir + "/v1/*/*" + suffix)
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestNamesThatAreUsedOnceDoNotPileUp is C62, scaled down: the steps of a release do not depend on how many there are.
func TestNamesThatAreUsedOnceDoNotPileUp(t *testing.T) {
	for name, namespace := range map[string]func(i int) string{
		"one namespace":   func(int) string { return "" },
		"many namespaces": func(i int) string { return fmt.Sprintf("ns-%d", i%40) },
	} {
		t.Run(name, func(t *testing.T) {
			const old, young = 400, 100
			c := openAt(t, memory(t))
			use := func(i int, name string) backends.Term {
				t.Helper()
				g, err := c.Acquire(t.Context(), backends.Request{Namespace: namespace(i), Lease: name, Handle: backends.NewHandle(), Slots: 1})
				if err != nil {
					t.Fatal(err)
				}
				release(t, c, g)
				return g.Term
			}
			var last backends.Term
			for i := range old {
				last = use(i, fmt.Sprintf("old %d", i))
			}
			for i := range young {
				use(i, fmt.Sprintf("young %d", i))
			}
			for i := range old {
				age(t, c.lease(namespace(i), fmt.Sprintf("old %d", i)), 8*day)
			}
			releases := 0
			for before := leases(t, c); before > young+1; releases++ {
				if releases > 10*old {
					t.Fatalf("after %d releases there are still %d leases, want %d", releases, before, young+1)
				}
				use(0, "worker")
				now := leases(t, c)
				if releases > 0 && before-now > removals {
					t.Fatalf("one release removed %d leases, want at most %d", before-now, removals)
				}
				before = now
			}
			// Enough that the storage stays bounded: each release adds at most one name.
			if releases > old {
				t.Errorf("%d leases took %d releases, want at most one each", old, releases)
			}
			if again := use(1, "old 1"); again <= last {
				t.Errorf("term after the removal: got %d, want more than %d", again, last)
			}
			if gone, _ := filepath.Glob(c.dir + "/v1/*/.gone*"); len(gone) != 0 {
				t.Errorf("left behind: %q", gone)
			}
		})
	}
}

func TestWhatIsOfUseIsNotRemoved(t *testing.T) {
	c := openAt(t, memory(t))
	ctx := t.Context()
	acquire(t, c, "held", 1)
	for _, lease := range []string{"record", "broken", "stray", "young", "ahead", "entered"} {
		release(t, c, acquire(t, c, lease, 1))
	}
	kept, err := c.Acquire(ctx, backends.Request{Lease: "kept", Handle: "h", Slots: 1, Hold: 30 * day})
	if err != nil {
		t.Fatal(err)
	}
	release(t, c, kept)
	if _, err := c.Records().Put(ctx, "", "record", backends.Put{Key: "schema-v3", Value: []byte("applied")}, nil); err != nil {
		t.Fatal(err)
	}
	for path, b := range map[string][]byte{
		c.lease("", "broken") + "/rec":   []byte("underlease rec"),
		c.lease("", "stray") + "/notes":  nil,
		c.lease("", "ahead") + "/rec":    (&record{lease: "ahead", last: backends.Term(time.Now().Add(time.Hour).UnixMilli())}).encode(),
		c.dir + "/v1/_/not-ours/file":    nil,
		c.dir + "/v1/_/a-file" + suffix:  nil,
		c.dir + "/v1/.hidden/x.d/slot.0": nil,
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, lease := range []string{"held", "record", "broken", "stray", "ahead", "entered", "kept"} {
		age(t, c.lease("", lease), 8*day)
	}
	age(t, c.lease("", "young"), 6*day)
	d, err := c.enter(ctx, "", "entered", toChange)
	if err != nil {
		t.Fatal(err)
	}
	walk := func() (all []string) {
		all, err := filepath.Glob(c.dir + "/v1/*/*/*")
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	before := walk()
	pass(t)
	for range 10 {
		c.prune(ctx, "")
	}
	if after := walk(); strings.Join(after, "\n") != strings.Join(before, "\n") {
		t.Errorf("files: got\n%s\nwant\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
	d.leave()
	pass(t)
	for range 10 {
		c.prune(ctx, "")
	}
	if _, err := os.Stat(c.lease("", "entered")); err == nil {
		t.Error("a lease that nobody uses or enters any more was not removed")
	}
}

// TestARemovedLeaseIsNoTrap lets a contender open its files before the removal and go on after it.
func TestARemovedLeaseIsNoTrap(t *testing.T) {
	dir := memory(t)
	c := openAt(t, dir)
	first := acquire(t, c, "l", 1)
	release(t, c, first)
	lease := c.lease("", "l")
	// What a contender has open that was interrupted between open and flock.
	mu, id, err := open(lease+"/mu", c.probe)
	if err != nil {
		t.Fatal(err)
	}
	defer shut(mu)
	age(t, lease, 8*day)
	pass(t)
	if !c.consider(t.Context(), filepath.Dir(lease), filepath.Base(lease), "") {
		t.Fatal("the lease was not removed")
	}
	if busy, err := lock(mu, "mu"); busy || err != nil {
		t.Fatalf("lock: got %v, %v", busy, err)
	}
	if there, err := at(lease + "/mu"); err != nil || there == id {
		t.Errorf("mu: got %v, %v, want another file than the one that was opened", there, err)
	}
	if g := acquire(t, c, "l", 1); g.Term <= first.Term || g.Previous.Outcome != backends.OutcomeNone {
		t.Errorf("grant after the removal: got %+v, want a larger term than %d", g, first.Term)
	}
}

// TestAContenderThatWaitsInARemovedLeaseGoesOn removes the lease while a contender waits for the lock of its record.
func TestAContenderThatWaitsInARemovedLeaseGoesOn(t *testing.T) {
	c := openAt(t, t.TempDir())
	release(t, c, acquire(t, c, "l", 1))
	d, err := c.enter(t.Context(), "", "l", toChange)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	var g backends.Grant
	go func() {
		var err error
		g, err = c.Acquire(t.Context(), request("l"))
		done <- err
	}()
	waitFor(t, "the contender has mu open too", func() bool { return opened(t, d.dir+"/mu") == 2 })
	if err := os.Rename(d.dir, d.dir+".aside"); err != nil {
		t.Fatal(err)
	}
	d.leave()
	if err := <-done; err != nil {
		t.Fatalf("Acquire: got %v, want a grant", err)
	}
	if _, err := c.Renew(t.Context(), g); err != nil {
		t.Errorf("Renew: got %v, want the grant", err)
	}
	if _, err := c.Acquire(t.Context(), request("l")); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire of another: got %v, want busy", err)
	}
}

// opened counts the descriptors of this process that lead to a path.
func opened(t *testing.T, path string) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to == path {
			n++
		}
	}
	return n
}

func TestAnInterruptedRemovalIsFinished(t *testing.T) {
	c := openAt(t, t.TempDir())
	release(t, c, acquire(t, c, "l", 1))
	left := c.dir + "/v1/_/" + gone + "abc"
	if err := os.MkdirAll(left, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(left+"/slot.0", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	release(t, c, acquire(t, c, "l", 1))
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: got %v, want it gone", left, err)
	}
	if list, err := c.List(t.Context(), ""); err != nil || len(list) != 1 {
		t.Errorf("List: got %v, %v, want one lease", list, err)
	}
}

func TestADamagedCursorStartsTheWalkAnew(t *testing.T) {
	c := openAt(t, memory(t))
	for i := range 40 {
		release(t, c, acquire(t, c, fmt.Sprintf("l%d", i), 1))
	}
	for _, text := range []string{"", "x", "/../../.. 1 1\n", "/_ -5 9999999999999999999\n", "/_ 9223372036854775807 9223372036854775807\n", "/none 3 3\n"} {
		if err := os.WriteFile(c.dir+"/v1/.cursor", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		age(t, c.lease("", "l7"), 8*day)
		pass(t)
		for range 20 {
			c.prune(t.Context(), "")
		}
		if _, err := os.Stat(c.lease("", "l7")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("cursor %q: the old lease is still there: %v", text, err)
		}
		release(t, c, acquire(t, c, "l7", 1))
	}
}

// C62: a name a run, as of people who put a date into it. Its full size, with UNDERLEASE_TEST_SOAK, takes two minutes.
func TestNamesWithADateLeaveTheStoreSmall(t *testing.T) {
	names, inUse := 5_000, 500
	if os.Getenv("UNDERLEASE_TEST_SOAK") != "" {
		names = 100_000
	}
	c := openAt(t, memory(t))
	var last backends.Term
	most := 0
	for i := range names {
		g, err := c.Acquire(t.Context(), backends.Request{Lease: fmt.Sprintf("job %d", i), Handle: backends.NewHandle(), Slots: 1})
		if err != nil {
			t.Fatal(err)
		}
		release(t, c, g)
		if i >= inUse {
			age(t, c.lease("", fmt.Sprintf("job %d", i-inUse)), 8*day)
		}
		if i%1000 == 0 {
			most = max(most, leases(t, c))
			// A name comes back whose lease is long gone: its terms go on.
			g, err := c.Acquire(t.Context(), backends.Request{Lease: "job 0", Handle: backends.NewHandle(), Slots: 1})
			if err != nil {
				t.Fatal(err)
			}
			if g.Term <= last {
				t.Fatalf("after %d names: got the term %d, want more than %d", i, g.Term, last)
			}
			last = g.Term
			release(t, c, g)
		}
	}
	t.Logf("at most %d leases of %d names were there at once", most, names)
	if most > 4*inUse {
		t.Errorf("%d leases were there at once, want at most %d", most, 4*inUse)
	}
}
