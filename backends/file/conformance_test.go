//go:build linux

package file

import (
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
)

func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Place: func(t *testing.T) backendtest.Place {
			dir := t.TempDir()
			return backendtest.Place{
				Open: func() *backends.Store {
					s, err := Scheme().Open(t.Context(), &url.URL{Scheme: "file", Path: dir})
					if err != nil {
						t.Fatalf("open %s: %v", dir, err)
					}
					return s
				},
				Wipe: func(namespace, lease string) {
					c := &Client{dir: dir}
					if err := os.RemoveAll(c.lease(namespace, lease)); err != nil {
						t.Fatal(err)
					}
				},
			}
		},
		TTL:   400 * time.Millisecond,
		Slack: 500 * time.Millisecond,
	})
}
