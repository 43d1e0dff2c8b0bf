//go:build linux

package file

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// synced is one fsync: of what, and which record was in place then.
type synced struct {
	name   string // rec.new, or the directory's
	record []byte
}

// disk watches what a client puts on the disk; the fsync of a file of the name in broken fails.
type disk struct {
	dir    string // of the lease
	broken string
	done   []synced
}

func watchDisk(t *testing.T, c *Client, lease string) *disk {
	t.Helper()
	d := &disk{dir: c.lease("", lease)}
	c.sync = func(fd int) error {
		path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
		if err != nil {
			return err
		}
		name := filepath.Base(path)
		if name == d.broken {
			return unix.EIO
		}
		d.done = append(d.done, synced{name, d.record()})
		return unix.Fsync(fd)
	}
	return d
}

func (d *disk) record() []byte {
	b, _ := os.ReadFile(d.dir + "/rec")
	return b
}

// A crash at any moment leaves a whole record, and none after which a grant was given is forgotten.
func TestARecordIsOnTheDiskBeforeItGetsItsName(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprintf("ordered=%v", ordered), func(t *testing.T) { testDurable(t, ordered) })
	}
}

func testDurable(t *testing.T, ordered bool) {
	c := openAt(t, t.TempDir())
	c.ordered = ordered // as on ext4: what need not be durable is not waited for
	d := watchDisk(t, c, "l")
	dir := filepath.Base(d.dir)
	var g backends.Grant
	var put int64
	for _, s := range []struct {
		call    string
		f       func() error
		durable bool
	}{
		{"the first Acquire", func() error { g = acquire(t, c, "l", 1); return nil }, true},
		{"Ask", func() error {
			return c.Ask(t.Context(), "", "l", 0, backends.Ask{Kind: backends.AskStop})
		}, false},
		{"Put", func() error {
			var err error
			put, err = c.Records().Put(t.Context(), "", "l", backends.Put{Key: "k", Value: []byte("v")}, nil)
			return err
		}, true},
		{"Release", func() error { return c.Release(t.Context(), g, backends.End{Outcome: "ok"}) }, false},
		{"the next Acquire", func() error { g = acquire(t, c, "l", 1); return nil }, true},
		{"Release with a record", func() error {
			return c.Release(t.Context(), g, backends.End{Outcome: "ok", Puts: []backends.Put{{Key: "k", Value: []byte("w"), Version: put}}})
		}, true},
	} {
		before := d.record()
		d.done = nil
		if err := s.f(); err != nil {
			t.Fatalf("%s: %v", s.call, err)
		}
		after := d.record()
		var want []synced
		switch {
		case !ordered || len(before) == 0: // nothing keeps the first one's order
			want = append(want, synced{"rec.new", before})
			if s.durable {
				want = append(want, synced{dir, after})
			}
		case s.durable:
			want = append(want, synced{"rec", after})
		}
		if !slices.EqualFunc(d.done, want, func(a, b synced) bool { return a.name == b.name && bytes.Equal(a.record, b.record) }) {
			t.Errorf("%s: synced %q, want %q", s.call, d.done, want)
		}
	}
}

func TestWithoutADurableTermThereIsNoGrant(t *testing.T) {
	t.Run("ordered=false", func(t *testing.T) { testNoGrant(t, false, "rec.new", "l.d", "rec.new") })
	t.Run("ordered=true", func(t *testing.T) { testNoGrant(t, true, "rec", "rec") })
}

func testNoGrant(t *testing.T, ordered bool, broken ...string) {
	c := openAt(t, t.TempDir())
	c.ordered = ordered
	d := watchDisk(t, c, "l")
	release(t, c, acquire(t, c, "l", 1))
	old := d.record()
	last := backends.Term(0)
	for _, name := range broken {
		d.broken = name
		_, err := c.Acquire(t.Context(), request("l"))
		if !errors.Is(err, backends.ErrUnavailable) || !errors.Is(err, unix.EIO) {
			t.Errorf("Acquire where %s cannot be synced: got %v, want ErrUnavailable", name, err)
		}
		rec, err := readRecord(d.dir + "/rec")
		if err != nil {
			t.Fatalf("the record after an fsync of %s that failed: %v", name, err)
		}
		if same := bytes.Equal(d.record(), old); same != (name == "rec.new") {
			t.Errorf("after an fsync of %s that failed: the record is the old one: %v", name, same)
		}
		last, old = rec.last, d.record()
		if _, err := os.Stat(d.dir + "/rec.new"); err == nil {
			t.Errorf("rec.new was left behind after an fsync of %s that failed", name)
		}
	}
	d.broken = ""
	other := openAt(t, c.dir) // the lock is free, too
	g := acquire(t, other, "l", 1)
	if g.Term <= last {
		t.Errorf("the next term: got %d, want one above %d, which a crash may or may not have kept", g.Term, last)
	}
	release(t, other, g)
	if ordered {
		return // a release waits for no disk
	}

	mine := acquire(t, c, "l", 1)
	d.broken = "rec.new"
	if err := c.Release(t.Context(), mine, backends.End{Outcome: "ok"}); !errors.Is(err, unix.EIO) {
		t.Errorf("Release where the record cannot be synced: got %v, want EIO", err)
	}
	if _, err := c.Renew(t.Context(), mine); err != nil {
		t.Errorf("Renew after a release that failed: got %v, want the grant", err)
	}
	d.broken = ""
	release(t, c, mine)
}
