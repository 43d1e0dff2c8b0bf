package file

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// longestDoor is how long mu is waited for where the context sets no shorter limit. It is held for microseconds and an
// fsync, so that this long means a stopped process or a disk that hangs.
const longestDoor = 5 * time.Second

// largestRecord bounds what is read into memory: far more than [backends.HistoryLength] ends and any sane records.
const largestRecord = 256 << 20

// door is one lease while its mu is held.
type door struct {
	c               *Client
	namespace, name string
	dir, path       string // of the lease and of its record
	mu              int
	id              inode // of mu
	closed          bool  // mu was not there and is not locked: slots must not be probed
	rec             *record
	replaces        bool // there is a record in place
}

// lease returns the directory of a lease.
func (c *Client) lease(namespace, name string) string {
	return filepath.Join(c.dir, "v1", namespaceKey(namespace), backends.Key(namespace, name)+suffix)
}

const (
	suffix         = ".d"
	emptyNamespace = "_"
)

func namespaceKey(namespace string) string {
	if namespace == "" {
		return emptyNamespace
	}
	return backends.Key("", namespace)
}

func slotPath(dir string, number int) string {
	return dir + "/slot." + strconv.Itoa(number)
}

// purpose is what somebody enters a lease for.
type purpose int

const (
	toLook   purpose = iota // and make nothing
	toChange                // what is there
	toMake                  // what is not there
)

// enter locks the lease's mu and reads the record. Unless it is to be made, it returns nil for a lease that has no directory; to
// look, also for one without mu.
func (c *Client) enter(ctx context.Context, namespace, name string, why purpose) (*door, error) {
	dir := c.lease(namespace, name)
	for {
		d, err := c.knock(ctx, dir, why)
		if err != nil || d == nil {
			return nil, err
		}
		if d.mu < 0 {
			continue // the directory was made, or mu was replaced before it was locked
		}
		d.namespace, d.name = namespace, name
		if d.rec, err = readRecord(d.path); err == nil && d.rec != nil {
			err, d.replaces = d.rec.belongs(d.path, namespace, name), true
		}
		if err != nil {
			d.leave()
			return nil, err
		}
		return d, nil
	}
}

// peek returns a door to a lease whose mu is not there, or nil where there is no lease either. Nothing is made, and nobody is kept out.
func (c *Client) peek(namespace, name string) (*door, error) {
	d := &door{c: c, namespace: namespace, name: name, dir: c.lease(namespace, name), mu: -1, closed: true}
	d.path = d.dir + "/rec"
	var err error
	if d.rec, err = readRecord(d.path); err == nil && d.rec != nil {
		err = d.rec.belongs(d.path, namespace, name)
	}
	if err != nil {
		return nil, err
	}
	if there, err := at(d.dir); err != nil || there == (inode{}) {
		return nil, classify(err)
	}
	return d, nil
}

// knock opens and locks mu. It returns nil where there is nothing, and a door without mu where it has to be tried again.
func (c *Client) knock(ctx context.Context, dir string, why purpose) (*door, error) {
	path := dir + "/mu"
	// Looked at before anything is done, so that a call whose context has ended does nothing.
	if err := ctx.Err(); err != nil {
		return nil, backends.Unavailable(err, "%s", path)
	}
	if err := c.safe(dir); err != nil {
		return nil, err
	}
	again := &door{mu: -1}
	flags := c.probe | unix.O_CREAT
	if why == toLook {
		flags = c.probe
	}
	fd, id, err := open(path, flags)
	if isNotExist(err) {
		if why != toMake {
			return nil, nil
		}
		return again, makeAll(dir)
	}
	if err != nil {
		return nil, classify(err)
	}
	if err := c.await(ctx, fd, id, path); err != nil {
		shut(fd)
		return nil, err
	}
	// Again, for it may have been made meanwhile; and in this order: the tree is proven, and then that our mu is the one in it.
	if err := c.safe(dir); err != nil {
		shut(fd)
		return nil, err
	}
	there, err := at(path)
	if err != nil {
		shut(fd)
		return nil, classify(err)
	}
	if there != id {
		shut(fd)
		return again, nil
	}
	return &door{c: c, dir: dir, path: dir + "/rec", mu: fd, id: id}, nil
}

// await locks mu, trying again after short pauses until the context ends.
func (c *Client) await(ctx context.Context, fd int, id inode, path string) error {
	const shortest, longest = 50 * time.Microsecond, 4 * time.Millisecond
	until := c.clock.boot() + int64(longestDoor)
	for wait := shortest; ; wait = min(wait+wait/2, longest) {
		busy, err := lock(fd, path)
		if err != nil {
			return classify(err)
		}
		if !busy {
			return nil
		}
		if alive := pause(ctx, wait); !alive || c.clock.boot() > until {
			who := "another process"
			if pid := locker(id); pid != 0 {
				who = "process " + strconv.Itoa(pid)
			}
			return backends.WithHint(backends.Unavailable(ctx.Err(), "%s is locked by %s", path, who),
				"it is held for a moment only: see whether that process is stopped or its disk hangs")
		}
	}
}

// leave gives up mu.
func (d *door) leave() { shut(d.mu) }

// makeAll makes a directory and those above it, for the owner alone. Others may be making them at the same time, with a
// directory of their own in a place that all may write to: whoever uses it checks it first.
func makeAll(dir string) error { return classify(os.MkdirAll(dir, 0o700)) }

// readRecord returns the record at path, or nil when there is none. It needs no lock: records are replaced as a whole.
func readRecord(path string) (*record, error) {
	fd, _, err := open(path, unix.O_RDONLY)
	if isNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, classify(err)
	}
	defer shut(fd)
	b, err := readAll(fd, path, largestRecord)
	if err != nil {
		return nil, classify(err)
	}
	r, err := decode(b)
	if err != nil {
		return nil, unreadable(path, err)
	}
	return r, nil
}

// belongs returns an error unless r is the record of that lease: two names never share one, whatever their keys.
func (r *record) belongs(path, namespace, name string) error {
	if r.namespace == namespace && r.lease == name {
		return nil
	}
	return unreadable(path, damage("belongs to the lease "+strconv.Quote(backends.Display(r.namespace, r.lease))))
}

// write puts the record in place. With durable it is on the disk before this returns.
//
// What a crash of the host leaves is the old record or the new one, as a whole: the new one is on the disk before it gets the
// name. Where the file system sees to that by itself, a record that replaces another is not waited for, or once only: see [ordered].
func (d *door) write(durable bool) error {
	if d.rec.namespace == "" && d.rec.lease == "" {
		d.rec.namespace, d.rec.lease = d.namespace, d.name
	}
	tmp := d.path + ".new"
	// What a crash left behind is written over: only the holder of mu writes here.
	fd, _, err := open(tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC)
	if err != nil {
		return classify(err)
	}
	defer shut(fd)
	ordered := d.c.ordered && d.replaces
	if err = writeAll(fd, tmp, d.rec.encode()); err == nil && !ordered {
		err = d.c.flush(fd, tmp)
	}
	if err == nil {
		err = fault("rename", d.path, again(func() error { return unix.Rename(tmp, d.path) }))
	}
	if err != nil {
		_ = unix.Unlink(tmp) // the record in place is whole, and the next writer would write over this one
		return classify(err)
	}
	d.replaces = true
	switch {
	case !durable:
		return nil
	case ordered:
		return classify(d.c.flush(fd, d.path))
	}
	return classify(d.syncName())
}

// flush puts a file on the disk.
func (c *Client) flush(fd int, path string) error {
	return fault("fsync", path, again(func() error { return c.sync(fd) }))
}

// syncName puts the record's name on the disk.
func (d *door) syncName() error {
	var fd int
	err := again(func() (err error) {
		fd, err = unix.Open(d.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return fault("open", d.dir, err)
	}
	defer shut(fd)
	return d.c.flush(fd, d.dir)
}

// record returns the record, and an empty one when there was none.
func (d *door) record() *record {
	if d.rec == nil {
		d.rec = &record{namespace: d.namespace, lease: d.name}
	}
	return d.rec
}

// locked reports whether a slot's lock is held by anybody, and by which file. Without mu it asks the kernel's list, which does not
// show locks of processes that this one cannot see.
//
// The look takes the lock, if it is free, until the descriptor is closed. A child that is forked in between would have a
// copy of the descriptor until it executes its program, and everybody else would see the slot taken; so nothing is forked.
func (d *door) locked(number int) (bool, inode, error) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	path := slotPath(d.dir, number)
	fd, id, err := open(path, d.c.probe)
	if isNotExist(err) {
		return false, inode{}, nil
	}
	if err != nil {
		return false, inode{}, classify(err)
	}
	defer shut(fd)
	if d.closed {
		return locker(id) != 0, id, nil
	}
	busy, err := lock(fd, path)
	return busy, id, classify(err)
}

// take locks a slot, or reports that it is busy.
func (d *door) take(number int) (fd int, id inode, busy bool, err error) {
	// The probe first: closing a descriptor that could write would tell every waiter that the slot is free.
	if busy, id, err = d.locked(number); busy || err != nil {
		return -1, id, busy, err
	}
	path := slotPath(d.dir, number)
	for {
		if fd, id, err = open(path, unix.O_RDWR|unix.O_CREAT); err != nil {
			return -1, id, false, classify(err)
		}
		if busy, err = lock(fd, path); busy || err != nil {
			shut(fd)
			return -1, id, busy, classify(err)
		}
		there, err := at(path)
		if err == nil && there == id {
			return fd, id, false, nil
		}
		shut(fd)
		if err != nil {
			return -1, id, false, classify(err)
		}
	}
}

// standing reports whether mu is still the one at its path: whoever deletes the directory while we are inside lets
// others in.
func (d *door) standing() (bool, error) {
	there, err := at(d.dir + "/mu")
	return there == d.id, classify(err)
}
