package file

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// What one release does for tidiness. It removes more than it can have added, so that names which are used once do not
// pile up, and it looks at so little that nobody has to wait for it.
const (
	unused   = 7 * 24 * time.Hour
	removals = 2  // leases
	looks    = 16 // at leases
	spaces   = 4  // namespaces
)

const gone = ".gone-" // what is being removed

// cursor is where the walk over all leases stands. It is kept in a file without a lock: it is only a hint, and a lost
// or torn one starts the walk anew.
type cursor struct {
	space   string // the namespace that is being walked, or empty
	lease   int64  // position in it
	spaceAt int64  // position in the list of namespaces
}

// prune removes leases that nobody used for long. Errors are of no consequence: the next release tries again.
func (c *Client) prune(ctx context.Context, own string) {
	root := c.dir + "/v1"
	before := readCursor(root)
	now := before
	removed, looked := 0, 0
	for range spaces {
		if now.space == "" {
			space, at, ok := firstSpace(root, now.spaceAt)
			if !ok {
				now = cursor{}
				break
			}
			now = cursor{space: space, spaceAt: at}
		}
		dir := root + "/" + now.space
		end := entries(dir, now.lease, func(name string, next int64) bool {
			now.lease = next
			looked++
			if c.consider(ctx, dir, name, own) {
				removed++
			}
			return removed < removals && looked < looks
		})
		if end {
			if looked == 0 || removed > 0 {
				_ = unix.Rmdir(dir) // refused unless it is empty
			}
			now.space, now.lease = "", 0
		}
		if removed >= removals || looked >= looks {
			break
		}
	}
	if now != before {
		now.write(root)
	}
}

func readCursor(root string) (c cursor) {
	b, err := readSmall(root + "/.cursor")
	f := strings.Fields(string(b))
	if err != nil || len(f) != 3 {
		return cursor{}
	}
	c.space = strings.TrimPrefix(f[0], "/")
	if strings.ContainsRune(c.space, '/') || strings.HasPrefix(c.space, ".") {
		return cursor{}
	}
	c.lease, _ = strconv.ParseInt(f[1], 10, 64)
	c.spaceAt, _ = strconv.ParseInt(f[2], 10, 64)
	return c
}

func (c cursor) write(root string) {
	path := root + "/.cursor"
	fd, _, err := open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC)
	if err != nil {
		return
	}
	defer shut(fd)
	_ = writeAll(fd, path, []byte("/"+c.space+" "+strconv.FormatInt(c.lease, 10)+" "+strconv.FormatInt(c.spaceAt, 10)+"\n"))
}

// firstSpace returns the first namespace at or after a position, and the position after it.
func firstSpace(root string, from int64) (space string, after int64, ok bool) {
	entries(root, from, func(name string, next int64) bool {
		if strings.HasPrefix(name, ".") {
			return true
		}
		space, after, ok = name, next, true
		return false
	})
	return space, after, ok
}

// entries calls f with the names in a directory from a position on, each with the position after it, until f returns
// false. It reports whether it came to the end. A position of getdents64(2) stays good while entries come and go.
func entries(dir string, from int64, f func(name string, next int64) bool) (end bool) {
	var fd int
	err := again(func() (err error) {
		fd, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return true
	}
	defer shut(fd)
	if from != 0 {
		if _, err := unix.Seek(fd, from, 0); err != nil {
			return true // a position from another file system: the walk starts anew
		}
	}
	b := make([]byte, 2048)
	for {
		n, err := unix.ReadDirent(fd, b)
		if err != nil || n <= 0 {
			return true
		}
		// Source: getdents(2): d_ino 8 bytes, d_off 8, d_reclen 2, d_type 1, then the name and a zero byte.
		for e := b[:n]; len(e) > 19; {
			next, length := int64(binary.NativeEndian.Uint64(e[8:])), int(binary.NativeEndian.Uint16(e[16:]))
			name, _, _ := strings.Cut(string(e[19:length]), "\x00")
			e = e[length:]
			if name != "." && name != ".." && !f(name, next) {
				return false
			}
		}
	}
}

// consider removes what stands under that name in a namespace if it is of no use any more.
func (c *Client) consider(ctx context.Context, space, name, own string) bool {
	dir := space + "/" + name
	if strings.HasPrefix(name, gone) {
		return remove(dir) // somebody was interrupted while removing it
	}
	if dir == own || !strings.HasSuffix(name, suffix) || !c.old(dir) {
		return false
	}
	d, err := c.tryEnter(dir)
	if d == nil || err != nil {
		return false
	}
	defer d.leave()
	if !c.old(dir) || !c.useless(d) {
		return false
	}
	locks, ok := d.lockAll()
	defer func() {
		for _, fd := range locks {
			shut(fd)
		}
	}()
	if standing, err := d.standing(); !ok || !standing || err != nil || ctx.Err() != nil {
		return false
	}
	var random [8]byte
	_, _ = rand.Read(random[:])
	aside := space + "/" + gone + strconv.FormatUint(binary.NativeEndian.Uint64(random[:]), 36)
	if unix.Rename(dir, aside) != nil {
		return false
	}
	// Who opened a file in there before finds, when it has the lock, that the path leads elsewhere.
	return remove(aside)
}

// old reports whether nobody has written to the lease for long: every use puts a new record into its directory.
func (c *Client) old(dir string) bool {
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return false
	}
	return c.clock.wall()-st.Mtim.Nano() > int64(unused)
}

// tryEnter enters a lease unless somebody else is inside.
func (c *Client) tryEnter(dir string) (*door, error) {
	if err := c.safe(dir); err != nil {
		return nil, err
	}
	path := dir + "/mu"
	fd, id, err := open(path, c.probe|unix.O_CREAT)
	if err != nil {
		return nil, err
	}
	busy, err := lock(fd, path)
	if err == nil && !busy {
		d := &door{c: c, dir: dir, path: dir + "/rec", mu: fd, id: id}
		if d.rec, err = readRecord(d.path); err == nil {
			return d, nil
		}
	}
	shut(fd)
	return nil, err
}

// useless reports whether nothing is lost with the record: it keeps no values and no hold, and the clock is above its terms.
func (c *Client) useless(d *door) bool {
	if d.rec == nil {
		return true
	}
	for i := range d.rec.slots {
		if c.clock.left(&d.rec.slots[i]) > 0 {
			return false
		}
	}
	return len(d.rec.values) == 0 && d.rec.last < backends.Term(c.clock.wall()/int64(time.Millisecond))
}

// lockAll locks every slot. It is not ok where one is held, or where there is a file that is not ours.
func (d *door) lockAll() (locks []int, ok bool) {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return nil, false
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == "mu" || name == "rec" || name == "rec.new":
		case strings.HasPrefix(name, "slot."):
			path := filepath.Join(d.dir, name)
			fd, _, err := open(path, d.c.probe)
			if err != nil {
				return locks, false
			}
			locks = append(locks, fd)
			if busy, err := lock(fd, path); busy || err != nil {
				return locks, false
			}
		default:
			return locks, false
		}
	}
	return locks, true
}

func remove(dir string) bool { return os.RemoveAll(dir) == nil }
