//go:build linux

package file

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/internal/needed"
)

// fake is a host with an environment of its own.
func fake(uid int, env map[string]string) system {
	s := host()
	s.uid, s.getenv = uid, func(name string) string { return env[name] }
	return s
}

func parse1(t *testing.T, raw string) *url.URL {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestTheURLNamesTheDirectory(t *testing.T) {
	home := map[string]string{"HOME": "/home/alice"}
	state := map[string]string{"HOME": "/home/alice", "XDG_STATE_HOME": "/state"}
	for _, c := range []struct {
		raw     string
		uid     int
		env     map[string]string
		dir     string
		network bool
	}{
		{"file:", 0, nil, "/var/lib/underlease", false},
		{"file:", 0, state, "/var/lib/underlease", false},
		{"file://", 1000, home, "/home/alice/.local/state/underlease", false},
		{"file:", 1000, home, "/home/alice/.local/state/underlease", false},
		{"file:", 1000, state, "/state/underlease", false},
		{"file:", 1000, map[string]string{"HOME": "/h", "XDG_STATE_HOME": "relative"}, "/h/.local/state/underlease", false},
		{"file:?network=1", 0, nil, "/var/lib/underlease", true},
		{"file:///srv/leases", 1000, nil, "/srv/leases", false},
		{"file:/srv/leases", 1000, nil, "/srv/leases", false},
		{"file:///srv/with%20blank%23%3F%C3%A9", 1000, nil, "/srv/with blank#?é", false},
		{"file:///srv/leases?network=1", 1000, nil, "/srv/leases", true},
	} {
		dir, network, err := fake(c.uid, c.env).settings(parse1(t, c.raw))
		if err != nil || dir != c.dir || network != c.network {
			t.Errorf("%s: got %q, network %v, %v, want %q, network %v", c.raw, dir, network, err, c.dir, c.network)
		}
	}
}

func TestAURLThatCannotWorkIsRefusedWithTheRightForm(t *testing.T) {
	for _, c := range []struct {
		raw        string
		env        map[string]string
		text, hint string
	}{
		{"file:leases", nil, `"leases" of the file store is not absolute`, "file:///dir"},
		{"file:./leases", nil, "not absolute", "file:///dir"},
		{"file://leases", nil, `names "leases"`, "file:///dir"},
		{"file://localhost/srv", nil, `names "localhost"`, "file:///dir"},
		{"file://u:secret@/srv", nil, "no user", "file:///dir"},
		{"file:///srv#x", nil, `fragment "x"`, "%23"},
		{"file:///srv%00x", nil, "zero byte", "file:///dir"},
		{"file:///", nil, "root directory", "file:///dir"},
		{"file:///..", nil, "root directory", "file:///dir"},
		{"file:///srv?netwrk=1", nil, `no parameter "netwrk"`, "network=1"},
		{"file:///srv?network=yes", nil, `cannot be "yes"`, "network=1"},
		{"file:///srv?network=1&network=0", nil, `cannot be "0"`, "network=1"},
		{"file:///srv?network=%zz", nil, "cannot be read", "network=1"},
		{"file:", nil, "HOME is not set", "file:///dir"},
		{"file:", map[string]string{"HOME": "x"}, "HOME is not an absolute path", "file:///dir"},
	} {
		_, err := fake(1000, c.env).open(t.Context(), parse1(t, c.raw))
		var config *backends.ConfigError
		if !errors.As(err, &config) || !strings.Contains(config.Text, c.text) || !strings.Contains(config.Hint, c.hint) {
			t.Errorf("%s: got %v (hint %q), want a *ConfigError with %q and %q", c.raw, err, backends.Hint(err), c.text, c.hint)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error shows the password: %v", c.raw, err)
		}
	}
}

func TestNetworkFileSystemsAreRefused(t *testing.T) {
	dir := t.TempDir()
	for magic, name := range networks {
		s := host()
		s.kind = func(string) (int64, error) { return magic, nil }
		_, err := s.open(t.Context(), &url.URL{Scheme: "file", Path: dir})
		var config *backends.ConfigError
		if !errors.As(err, &config) || !strings.Contains(config.Text, name) || !strings.Contains(config.Text, dir) || !strings.Contains(config.Hint, "?network=1") {
			t.Errorf("%s: got %v, want a *ConfigError that names it, the directory and ?network=1", name, err)
		}
		// The kernel's numbers are signed on some architectures.
		s.kind = func(string) (int64, error) { return int64(int32(magic)), nil } //nolint:gosec // as the kernel does
		if _, err := s.open(t.Context(), &url.URL{Scheme: "file", Path: dir}); !errors.As(err, &config) {
			t.Errorf("%s, signed: got %v, want a *ConfigError", name, err)
		}
		store, err := s.open(t.Context(), &url.URL{Scheme: "file", Path: dir, RawQuery: "network=1"})
		if err != nil {
			t.Errorf("%s with ?network=1: got %v, want the store", name, err)
			continue
		}
		c := store.Backend.(*Client)
		g := acquire(t, c, "l", 1)
		if _, err := c.Acquire(t.Context(), backends.Request{Lease: "l", Handle: "h", Slots: 1}); !errors.Is(err, backends.ErrBusy) {
			t.Errorf("%s with ?network=1: got %v, want busy", name, err)
		}
		release(t, c, g)
		_ = store.Close()
	}
	for _, want := range []string{"nfs", "smb", "cifs", "fuse", "9p"} {
		found := false
		for _, name := range networks {
			found = found || name == want
		}
		if !found {
			t.Errorf("%s is not refused", want)
		}
	}
}

func TestADirectoryThatOthersCanWriteToIsRefused(t *testing.T) {
	for _, c := range []struct {
		mode fs.FileMode
		want bool
	}{{0o700, true}, {0o755, true}, {0o500, true}, {0o770, false}, {0o777, false}, {0o702, false}, {0o777 | fs.ModeSticky, false}} {
		dir := t.TempDir()
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		_, err := host().open(t.Context(), &url.URL{Scheme: "file", Path: dir})
		if c.want != (err == nil) {
			t.Errorf("a directory of mode %v: got %v, want good=%v", c.mode, err, c.want)
		}
		if err != nil && (!strings.Contains(err.Error(), dir) || !strings.Contains(backends.Hint(err), "chmod go-w")) {
			t.Errorf("a directory of mode %v: got %v (hint %q), want the directory and what to do", c.mode, err, backends.Hint(err))
		}
	}
	dir := t.TempDir()
	stranger := host()
	stranger.uid = os.Geteuid() + 1
	_, err := stranger.open(t.Context(), &url.URL{Scheme: "file", Path: dir})
	if os.Geteuid() == 0 {
		if err != nil {
			t.Errorf("root's directory for another user: got %v, want the store", err)
		}
		if err := os.Chown(dir, 4711, -1); err != nil {
			t.Fatal(err)
		}
		_, err = host().open(t.Context(), &url.URL{Scheme: "file", Path: dir})
	}
	var config *backends.ConfigError
	if !errors.As(err, &config) || !strings.Contains(config.Text, "belongs to the user") {
		t.Errorf("another user's directory: got %v, want a *ConfigError", err)
	}
}

// The whole tree may be another's work, between Open and the first use: in a directory that all may write to, its owner is whoever was first.
func TestATreeThatAnotherMadeFirstIsRefused(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, c *Client, lease string) error{
		"the directory is writable for others": func(_ *testing.T, c *Client, _ string) error { return os.Chmod(c.dir, 0o777) },
		"v1 is writable for its group":         func(_ *testing.T, c *Client, _ string) error { return os.Chmod(c.dir+"/v1", 0o770) },
		"the namespace is writable for others": func(_ *testing.T, c *Client, _ string) error { return os.Chmod(c.dir+"/v1/_", 0o702) },
		"the lease is writable for others":     func(_ *testing.T, _ *Client, lease string) error { return os.Chmod(lease, 0o777) },
		"the directory is another's":           func(t *testing.T, c *Client, _ string) error { return give(t, c.dir) },
		"v1 is another's":                      func(t *testing.T, c *Client, _ string) error { return give(t, c.dir+"/v1") },
		"the namespace is another's":           func(t *testing.T, c *Client, _ string) error { return give(t, c.dir+"/v1/_") },
		"the lease is another's":               func(t *testing.T, _ *Client, lease string) error { return give(t, lease) },
		"v1 is a link": func(t *testing.T, c *Client, _ string) error {
			aside := t.TempDir()
			if err := os.Rename(c.dir+"/v1", aside+"/v1"); err != nil {
				return err
			}
			return os.Symlink(aside+"/v1", c.dir+"/v1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir() + "/a/store"
			c := openAt(t, dir)
			lease := c.lease("", "l")
			if err := os.MkdirAll(lease, 0o700); err != nil {
				t.Fatal(err)
			}
			other := openAt(t, dir)
			other.trust = nil // there is a record that could be believed
			release(t, other, acquire(t, other, "l", 1))
			if err := spoil(t, c, lease); err != nil {
				t.Fatal(err)
			}
			for call, f := range map[string]func() error{
				"Acquire":  func() error { _, err := c.Acquire(t.Context(), request("l")); return err },
				"Inspect":  func() error { _, err := c.Inspect(t.Context(), "", "l"); return err },
				"Get":      func() error { _, err := c.Records().Get(t.Context(), "", "l", "k"); return err },
				"Put":      func() error { _, err := c.Records().Put(t.Context(), "", "l", backends.Put{Key: "k"}, nil); return err },
				"WaitFree": func() error { return c.WaitFree(t.Context(), request("l")) },
				"List":     func() error { _, err := c.List(t.Context(), ""); return err },
			} {
				err := f()
				if _, ok := errors.AsType[*backends.ConfigError](err); !ok || !strings.Contains(err.Error(), dir) {
					t.Errorf("%s: got %v, want a *ConfigError that names the directory", call, err)
				}
			}
		})
	}
}

// give makes a file another user's, which only root can.
func give(t *testing.T, path string) error {
	t.Helper()
	if os.Geteuid() != 0 {
		needed.Require(t, "root", unix.EPERM)
	}
	return os.Chown(path, 12345, 12345)
}

func TestADirectoryThatAnotherCanRenameIsRefused(t *testing.T) {
	for _, c := range []struct {
		mode       fs.FileMode
		uid, group int
		want       bool
	}{
		{0o755, -1, -1, true},
		{0o777, -1, -1, false},
		{0o777 | fs.ModeSticky, -1, -1, true}, // as /tmp
		{0o775, -1, 12345, false},
		{0o775 | fs.ModeSticky, -1, 12345, true},
		{0o775, -1, 0, true}, // the group of root, which here is also the user's own
		{0o755, 12345, -1, false},
		{0o777 | fs.ModeSticky, 12345, -1, false},
	} {
		base := t.TempDir() + "/a"
		for _, made := range []bool{false, true} { // before the store is opened, and between that and the first use
			if err := os.MkdirAll(base+"/b/store", 0o700); err != nil {
				t.Fatal(err)
			}
			if c.uid >= 0 || c.group >= 0 {
				if os.Geteuid() != 0 {
					needed.Require(t, "root", unix.EPERM)
				}
			}
			spoil := func() {
				if err := os.Chown(base, c.uid, c.group); err != nil {
					t.Fatal(err)
				}
				if err := os.Chmod(base, c.mode); err != nil {
					t.Fatal(err)
				}
			}
			if made {
				spoil()
			}
			store, err := host().open(t.Context(), &url.URL{Scheme: "file", Path: base + "/b/store"})
			if err == nil {
				if !made {
					// Nothing is known of what did not exist.
					client := store.Backend.(*Client)
					client.trust = &trust{system: client.trust.system, dir: client.dir}
					spoil()
				}
				_, err = store.Acquire(t.Context(), request("l"))
				_ = store.Close()
			}
			_, config := errors.AsType[*backends.ConfigError](err)
			if c.want != (err == nil) || !c.want && (!config || !strings.Contains(err.Error(), base+", above ")) {
				t.Errorf("a directory of mode %v, user %d, group %d above the store (at Open: %v): got %v, want good=%v",
					c.mode, c.uid, c.group, made, err, c.want)
			}
			if err := os.RemoveAll(base); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestWhatIsNoDirectoryIsRefused(t *testing.T) {
	base := t.TempDir()
	if err := os.WriteFile(base+"/f", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", base+"/dangling"); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{base + "/f", base + "/f/x", base + "/dangling", base + "/dangling/x"} {
		_, err := host().open(t.Context(), &url.URL{Scheme: "file", Path: path})
		var config *backends.ConfigError
		if !errors.As(err, &config) || !strings.Contains(config.Text, base) {
			t.Errorf("%s: got %v, want a *ConfigError that names it", path, err)
		}
	}
}

func TestOneDirectoryHasOneIdentity(t *testing.T) {
	base := t.TempDir()
	if err := os.Symlink(base, base+"/link"); err != nil {
		t.Fatal(err)
	}
	open := func(path string) *backends.Store {
		t.Helper()
		s, err := host().open(t.Context(), &url.URL{Scheme: "file", Path: path})
		if err != nil {
			t.Fatalf("open %s: %v", path, err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	before := open(base + "/a b/c")
	release(t, before.Backend.(*Client), acquire(t, before.Backend.(*Client), "l", 1))
	for _, path := range []string{base + "/a b/c", base + "/link/a b/c", base + "/link/link/./a b//c/", base + "/x/../a b/c"} {
		s := open(path)
		if s.Identity != before.Identity || s.Address != before.Address {
			t.Errorf("%s: got identity %q and address %q, want %q and %q", path, s.Identity, s.Address, before.Identity, before.Address)
		}
	}
	if want := "file://" + base + "/a%20b/c"; before.Address != want || before.Scheme != "file" || !before.Endless {
		t.Errorf("store: got address %q, scheme %q, endless %v, want %q, file, true", before.Address, before.Scheme, before.Endless, want)
	}
	if other := open(base + "/other"); other.Identity == before.Identity {
		t.Errorf("two directories have the identity %q", other.Identity)
	}
}

func TestDirectoriesAndFilesAreForTheirOwnerAlone(t *testing.T) {
	base := t.TempDir()
	old := unix.Umask(0)
	defer unix.Umask(old)
	c := openAt(t, base+"/not/there/yet")
	g := acquire(t, c, "l", 2)
	release(t, c, acquire(t, c, "l", 2))
	release(t, c, g)
	files := 0
	err := filepath.WalkDir(base+"/not", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		want := fs.FileMode(0o600)
		if d.IsDir() {
			want = 0o700 | fs.ModeDir
		} else {
			files++
		}
		if info.Mode() != want {
			t.Errorf("%s: got mode %v, want %v", path, info.Mode(), want)
		}
		return nil
	})
	if err != nil || files < 4 {
		t.Errorf("files: got %d, %v, want mu, rec and two slots at least", files, err)
	}
}

func TestOpeningALeaseStoreMakesNothing(t *testing.T) {
	dir := t.TempDir() + "/not/there"
	c := openAt(t, dir)
	if _, err := c.Inspect(t.Context(), "", "l"); err != nil {
		t.Errorf("Inspect: got %v, want nothing", err)
	}
	if list, err := c.List(t.Context(), ""); err != nil || len(list) != 0 {
		t.Errorf("List: got %v, %v, want nothing", list, err)
	}
	if _, err := c.Records().Get(t.Context(), "", "l", "k"); !errors.Is(err, backends.ErrNoRecord) {
		t.Errorf("Get: got %v, want ErrNoRecord", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("looking made %s: %v", dir, err)
	}
}

func TestEveryErrorOfTheSystemHasAKind(t *testing.T) {
	for _, c := range []struct {
		number syscall.Errno
		kind   error
	}{
		{syscall.EACCES, backends.ErrDenied},
		{syscall.EPERM, backends.ErrDenied},
		{syscall.EROFS, backends.ErrDenied},
		{syscall.ENOSPC, backends.ErrUnavailable},
		{syscall.EDQUOT, backends.ErrUnavailable},
		{syscall.EIO, backends.ErrUnavailable},
		{syscall.EMFILE, backends.ErrUnavailable},
		{syscall.ENFILE, backends.ErrUnavailable},
		{syscall.ENOMEM, backends.ErrUnavailable},
		{syscall.ENOLCK, backends.ErrUnavailable},
		{syscall.ENODEV, backends.ErrUnavailable},
		{syscall.ESTALE, backends.ErrUnavailable},
		{syscall.ENOENT, backends.ErrUnavailable},
		{syscall.ENOTDIR, backends.ErrBroken},
		{syscall.EISDIR, backends.ErrBroken},
		{syscall.ELOOP, backends.ErrBroken},
		{syscall.ENXIO, backends.ErrBroken},
	} {
		for _, err := range []error{fault("open", "/d/rec", c.number), fmt.Errorf("x: %w", fault("write", "/d/rec", c.number))} {
			got := classify(err)
			for _, kind := range []error{backends.ErrBusy, backends.ErrLost, backends.ErrUnavailable, backends.ErrDenied, backends.ErrBroken} {
				if errors.Is(got, kind) != errors.Is(c.kind, kind) {
					t.Errorf("%v: got %v is %v: %v, want %v", c.number, got, kind, errors.Is(got, kind), c.kind)
				}
			}
			if !strings.Contains(got.Error(), "/d/rec") || !errors.Is(got, c.number) {
				t.Errorf("%v: got %v, want a text that names the file and says why", c.number, got)
			}
		}
	}
	if err := classify(nil); err != nil {
		t.Errorf("classify(nil): got %v", err)
	}
	if err := classify(errors.New("odd")); !errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("an error without a number: got %v, want ErrUnavailable", err)
	}
	// What has a kind keeps it.
	if err := classify(unreadable("/d/rec", damage("is empty"))); !errors.Is(err, backends.ErrBroken) || errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("a damaged record: got %v, want ErrBroken", err)
	}
}
