//go:build linux

package redis

import (
	"errors"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// late is how late a busy machine may be. What is looked for is an hour, or for ever.
const late = 5 * time.Second

// C63: the server's clock alone decides, and what it says may be an hour away from that of the hosts.
func TestAServerAnHourAwayKeepsLeasesAsLong(t *testing.T) {
	for _, ahead := range []time.Duration{time.Hour, -time.Hour} {
		r := servers.StartRedis(t, servers.RedisOptions{Clock: true})
		r.SetClock(ahead)
		s := opened(t, "redis://"+r.Addr())
		req := request("l")
		req.TTL = 3 * time.Second // so that it is looked at, and renewed, before its end
		begun := time.Now()
		g := granted(t, s, req)
		if by := time.UnixMilli(int64(g.Term)).Sub(begun) - ahead; by < -time.Minute || by > time.Minute {
			t.Errorf("%v ahead: term: got %d, want the server's clock", ahead, g.Term)
		}
		_, err := heard(t, s, request("l"))
		if busy, ok := errors.AsType[*backends.BusyError](err); !ok || busy.Left <= 0 || busy.Left > req.TTL {
			t.Errorf("%v ahead: Acquire: got %v, want busy for at most %v", ahead, err, req.TTL)
		}
		begun = time.Now()
		if err := renewed(t, s, g); err != nil {
			t.Errorf("%v ahead: Renew: got %v, want the grant", ahead, err)
		}
		next := request("l") // of all attempts: one whose answer came too late may have it
		servers.Within(t, 30*time.Second, "the lease is free", func() error {
			_, err := acquire(t, s, next)
			return err
		})
		if took := time.Since(begun); took < req.TTL-5*time.Millisecond || took > req.TTL+late {
			t.Errorf("%v ahead: free after %v, want the ttl of %v", ahead, took, req.TTL)
		}
	}
}

// A clock that is set back delays a lease by one ttl; one that is set forward frees it early, and its holder is told.
func TestAServersClockIsSetWhileALeaseIsHeld(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{Clock: true})
	s := opened(t, "redis://"+r.Addr())
	const ttl = 3 * time.Second // so that it is renewed before its end
	req := request("l")
	req.TTL = ttl
	g := granted(t, s, req)
	r.SetClock(-time.Hour)
	begun := time.Now()
	for range 3 {
		if err := renewed(t, s, g); err != nil {
			t.Errorf("Renew after the clock was set back: got %v, want the grant", err)
		}
	}
	var next backends.Grant
	req = request("l") // of all attempts
	servers.Within(t, 30*time.Second, "the lease is free", func() (err error) {
		next, err = acquire(t, s, req)
		return err
	})
	if took := time.Since(begun); took < ttl-5*time.Millisecond || took > ttl+late {
		t.Errorf("free %v after the clock was set back, want the ttl of %v", took, ttl)
	}
	if next.Term <= g.Term {
		t.Errorf("term: got %d, want more than %d", next.Term, g.Term)
	}
	r.SetClock(time.Hour)
	last := granted(t, s, request("l"))
	if last.Term <= next.Term {
		t.Errorf("term: got %d, want more than %d", last.Term, next.Term)
	}
	if err := renewed(t, s, next); !errors.Is(err, backends.ErrLost) {
		t.Errorf("Renew of the grant that the clock has ended: got %v, want ErrLost", err)
	}
}
