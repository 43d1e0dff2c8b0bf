//go:build linux

package redis

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// C14: a promoted replica that missed the grant gives the lease to another; the old holder is told by its next renewal, and
// terms grow all the same. One that has it keeps it.
func TestAFailoverIsFollowed(t *testing.T) {
	set := servers.StartSentinel(t, servers.RedisOptions{Durable: true})
	downAfter(set, 10*time.Second) // not before it is killed
	url := "redis+sentinel://" + strings.Join(set.Addrs(), ",") + "/" + set.Name
	s := opened(t, url)
	kept := granted(t, s, request("kept"))
	servers.Within(t, 30*time.Second, "the replica has it", func() error {
		if set.Replica.Do("EXISTS", keyOf("", "kept")) != "1" {
			return errors.New("not yet")
		}
		return nil
	})
	set.Replica.Kill() // what comes now it misses
	missed := granted(t, s, request("missed"))
	strict := opened(t, url+"?replicas=1")
	if _, err := confirmed(t, strict, request("acknowledged")); !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), "0 of 1 replicas") {
		t.Errorf("Acquire with replicas=1 while there is none: got %v, want unavailable", err)
	}
	downAfter(set, time.Second)
	set.Primary.Kill()
	set.Replica.Restart()
	begun := time.Now()
	set.AwaitFailover()
	other := opened(t, url)
	servers.Within(t, 30*time.Second, "the old client finds the new primary", func() error { return renew(t, s, kept) })
	t.Logf("renewed %v after the death of the primary", time.Since(begun))
	g := granted(t, other, request("missed"))
	if g.Term <= missed.Term {
		t.Errorf("term after the failover: got %d, want more than %d", g.Term, missed.Term)
	}
	if err := renewed(t, s, missed); !errors.Is(err, backends.ErrLost) {
		t.Errorf("Renew of the grant that was forgotten: got %v, want ErrLost", err)
	}
	if err := renewed(t, other, g); err != nil {
		t.Errorf("Renew of the new one: got %v, want the grant", err)
	}
	if _, err := heard(t, other, request("kept")); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire of the one that was kept: got %v, want busy", err)
	}
	// A dead sentinel is passed over.
	set.Sentinels[0].Kill()
	set.Sentinels[1].Freeze()
	third := opened(t, url)
	if _, err := heard(t, third, request("free")); err != nil {
		t.Errorf("Acquire with one dead and one frozen sentinel: got %v, want a grant", err)
	}
	set.Sentinels[1].Resume()
	if _, err := heard(t, opened(t, "redis+sentinel://"+set.Sentinels[2].Addr()+"/unknown"), request("l")); !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), "no primary of this name") {
		t.Errorf("a name that no sentinel knows: got %v, want unavailable that says so", err)
	}
}

// A cluster moves slots while leases of them are held, waited for and looked at.
func TestAMovedSlotIsFollowed(t *testing.T) {
	c := servers.StartCluster(t, servers.RedisOptions{})
	s := opened(t, "redis+cluster://"+strings.Join(c.Addrs(), ","))
	lease := "l"
	key := keyOf("", lease)
	from := c.Owner(key)
	to := c.Nodes[0]
	if to == from {
		to = c.Nodes[1]
	}
	slot := from.Do("CLUSTER", "KEYSLOT", key)
	g := granted(t, s, request(lease))
	works := func(when string) {
		t.Helper()
		if err := renewed(t, s, g); err != nil {
			t.Errorf("Renew %s: got %v, want the grant", when, err)
		}
		if _, err := heard(t, opened(t, "redis+cluster://"+to.Addr()), request(lease)); !errors.Is(err, backends.ErrBusy) {
			t.Errorf("Acquire by another %s: got %v, want busy", when, err)
		}
		list, err := s.List(t.Context(), "")
		if err != nil || len(list) != 1 || !list[0].Slots[0].Held {
			t.Errorf("List %s: got %v, %v, want one that is held", when, list, err)
		}
	}
	works("before")
	id := func(r *servers.Redis) string { return r.Do("CLUSTER", "MYID") }
	to.Do("CLUSTER", "SETSLOT", slot, "IMPORTING", id(from))
	from.Do("CLUSTER", "SETSLOT", slot, "MIGRATING", id(to))
	works("while the slot is about to move")
	from.Do("MIGRATE", "127.0.0.1", strconv.Itoa(to.Port), key, "0", "5000")
	works("when its key has moved")
	for _, n := range []*servers.Redis{to, from} {
		n.Do("CLUSTER", "SETSLOT", slot, "NODE", id(to))
	}
	works("when the slot has moved")
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release: got %v, want nil", err)
	}
	// A node that is gone takes its leases along, and no others.
	to.Kill()
	servers.Within(t, 30*time.Second, "the cluster sees it", func() error {
		_, err := acquire(t, s, request(lease))
		if !errors.Is(err, backends.ErrUnavailable) {
			return errors.Join(errors.New("not unavailable"), err)
		}
		return nil
	})
}
