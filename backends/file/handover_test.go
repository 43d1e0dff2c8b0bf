//go:build linux

package file

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
)

// TestAHandoverTakesMilliseconds measures from a release to the grant of one of eight waiters. The limit is far above
// what is seen on a quiet machine: it finds a lost notification, which costs a second.
func TestAHandoverTakesMilliseconds(t *testing.T) {
	const waiters, rounds = 8, 30
	dir := memory(t)
	type got struct {
		at    time.Time
		grant backends.Grant
		c     *Client
	}
	grants := make(chan got)
	stop := make(chan struct{})
	ended := make(chan error, waiters)
	for range waiters {
		c := openAt(t, dir)
		go func() {
			ended <- func() error {
				for {
					req := request("l")
					g, err := c.Acquire(t.Context(), req)
					switch {
					case err == nil:
						select {
						case grants <- got{time.Now(), g, c}:
						case <-stop:
							return c.Release(t.Context(), g, backends.End{Outcome: "ok"})
						}
					case !errors.Is(err, backends.ErrBusy):
						return err
					}
					select {
					case <-stop:
						return nil
					default:
					}
					if err := c.WaitFree(t.Context(), req); err != nil {
						return err
					}
				}
			}()
		}()
	}
	var took []time.Duration
	now := <-grants
	for range rounds {
		released := time.Now()
		if err := now.c.Release(t.Context(), now.grant, backends.End{Outcome: "ok"}); err != nil {
			t.Fatal(err)
		}
		now = <-grants
		took = append(took, now.at.Sub(released))
	}
	close(stop)
	release(t, now.c, now.grant)
	for range waiters {
		if err := <-ended; err != nil {
			t.Errorf("waiter: got %v, want nil", err)
		}
	}
	slices.Sort(took)
	t.Logf("handover among %d waiters: median %v, longest %v", waiters, took[rounds/2], took[rounds-1])
	if took[rounds/2] > 250*time.Millisecond {
		t.Errorf("handover: got a median of %v, want milliseconds", took[rounds/2])
	}
}
