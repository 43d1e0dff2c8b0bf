//go:build linux

package file

import (
	"net/url"
	"strconv"
	"testing"

	"github.com/underlease/underlease/backends"
)

// openAt opens a store in a directory.
func openAt(tb testing.TB, dir string) *Client {
	tb.Helper()
	u := &url.URL{Scheme: "file", Path: dir}
	s, err := Scheme().Open(tb.Context(), u)
	if err != nil {
		tb.Fatalf("open %s: %v", u, err)
	}
	tb.Cleanup(func() { _ = s.Close() })
	return s.Backend.(*Client)
}

// places are a directory on the disk and one in memory, where there is such a file system.
func places(b *testing.B, f func(b *testing.B, dir string)) {
	b.Run("disk", func(b *testing.B) { f(b, b.TempDir()) })
	b.Run("memory", func(b *testing.B) {
		b.Setenv("TMPDIR", "/dev/shm")
		f(b, b.TempDir())
	})
}

func BenchmarkAcquireAndRelease(b *testing.B) {
	places(b, func(b *testing.B, dir string) {
		c := openAt(b, dir)
		for i := 0; b.Loop(); i++ {
			// Many leases, because terms of one lease are a millisecond apart.
			req := backends.Request{Lease: "bench-" + strconv.Itoa(i%64), Holder: "h", Handle: backends.NewHandle(), Slots: 1}
			g, err := c.Acquire(b.Context(), req)
			if err != nil {
				b.Fatal(err)
			}
			if err := c.Release(b.Context(), g, backends.End{Outcome: "ok"}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkRenew(b *testing.B) {
	places(b, func(b *testing.B, dir string) {
		c := openAt(b, dir)
		for range backends.HistoryLength {
			g, err := c.Acquire(b.Context(), backends.Request{Lease: "bench", Holder: "host (pid 4711)", Handle: backends.NewHandle(), Slots: 1})
			if err != nil {
				b.Fatal(err)
			}
			if err := c.Release(b.Context(), g, backends.End{Outcome: "ok"}); err != nil {
				b.Fatal(err)
			}
		}
		g, err := c.Acquire(b.Context(), backends.Request{Lease: "bench", Holder: "h", Handle: backends.NewHandle(), Slots: 1})
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := c.Renew(b.Context(), g); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkWalk looks at ten thousand leases, every tenth of them held.
func BenchmarkWalk(b *testing.B) {
	const leases = 10000
	places(b, func(b *testing.B, dir string) {
		c := openAt(b, dir)
		populate(b, c, leases)
		b.ReportAllocs()
		for b.Loop() {
			n := 0
			if err := c.Walk(b.Context(), "", func(_ backends.State, err error) bool {
				n++
				return err == nil
			}); err != nil || n != leases {
				b.Fatalf("got %d leases and %v, want %d", n, err, leases)
			}
		}
	})
}

// populate uses leases once each, without waiting for the disk. Every tenth stays held, and every second has a name that is no key.
func populate(tb testing.TB, c *Client, leases int) {
	tb.Helper()
	sync := c.sync
	defer func() { c.sync = sync }()
	c.sync = func(int) error { return nil }
	for i := range leases {
		name := "lease-" + strconv.Itoa(i)
		if i%2 == 1 {
			name = "lease/" + strconv.Itoa(i)
		}
		g, err := c.Acquire(tb.Context(), backends.Request{Lease: name, Holder: "host/4711/0badcafe", Handle: backends.NewHandle(), Slots: 1})
		if err == nil && i%10 != 0 {
			err = c.Release(tb.Context(), g, backends.End{Outcome: "ok"})
		}
		if err != nil {
			tb.Fatal(err)
		}
	}
}
