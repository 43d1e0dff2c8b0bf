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
