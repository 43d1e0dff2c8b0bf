package backendtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/underlease/underlease/backends"
)

var cases = []clause{
	{"OneHolderAtATime", oneHolder},
	{"EightContendersNeverOverlap", contenders},
	{"TermsGrowOverReleaseAndExpiry", termsGrow},
	{"TermsGrowOverDeletion", termsGrowOverDeletion},
	{"AcquireIsIdempotentPerHandle", idempotent},
	{"AbandonFreesWhateverCarriesTheHandle", abandonFrees},
	{"AbandonOfAnUnknownHandleDoesNothing", abandonUnknown},
	{"ReleaseSparesLaterHolders", releaseSpares},
	{"ReleaseTwiceIsNoError", releaseTwice},
	{"RenewNeverRevives", renewNeverRevives},
	{"RenewKeepsTheGrantBeyondItsTTL", renewKeeps},
	{"RenewOfADeletedLeaseIsLost", renewDeleted},
	{"ExpiryFreesTheLease", expiryFrees},
	{"HoldKeepsTheSlotAfterARelease", holdKeeps},
	{"HoldOutlivesItsHolder", holdOutlives},
	{"HoldIsDroppedWhenNothingStarted", holdDropped},
	{"HoldIsDroppedAlsoAfterTheEnd", holdDroppedLate},
	{"SlotsAdmitNoMoreThanAskedFor", slotsAdmit},
	{"MixedSlotsAndTTLsNeverExceedTheLargerN", mixedSlots},
	{"TermsAreUniqueOverSlots", termsOverSlots},
	{"NamesAreIndependent", namesIndependent},
	{"BadRequestsAreRefused", badRequests},
	{"BusyTellsWhoAndWhatIsLeft", busyTells},
	{"PreviousTellsHowTheLastHolderEnded", previousTells},
	{"AskReachesTheHolder", askReaches},
	{"AskOfAFreeSlotDoesNothing", askFree},
	{"BreakRefusesRenewals", breakRefuses},
	{"BreakNowFreesAtOnce", breakNow},
	{"InspectShowsWhatIsThere", inspectShows},
	{"ListIsOrderedAndComplete", listComplete},
	{"HistoryKeepsTheLastFifty", historyKeeps},
	{"RecordsCompareVersions", recordsCompare},
	{"RecordsOutliveTheLease", recordsOutlive},
	{"RecordsWhileHeld", recordsWhile},
	{"RecordsAreWrittenWithTheRelease", recordsAtRelease},
	{"RecordsKeepEveryByte", recordsBytes},
	{"CancelledContextReturns", cancelledReturns},
	{"NothingIsLeftBehind", nothingLeft},
	{"WaitFreeWakesAtARelease", waitFreeRelease},
	{"WaitFreeWakesAtTheEndOfAHold", waitFreeHold},
	{"WaitFreeEndsWithItsContext", waitFreeEnds},
	{"WhoLeavesIsNotCounted", leaves},
	{"EightWaitersAreAllServed", waitersServed},
	{"WaitChangeWakesAtAnAsk", waitChangeAsk},
	{"WaitChangeWakesAtALoss", waitChangeLoss},
	{"WaitChangeEndsWithItsContext", waitChangeEnds},
	{"GrantsArePinned", pinned},
	{"ErrorsCarryNoSecret", noSecret},
}

func oneHolder(e *env) {
	a, b := e.client(), e.client()
	r := a.request("one")
	g := a.acquire(r)
	if g.Lease != "one" || g.Namespace != e.namespace || g.Holder != r.Holder || g.Handle != r.Handle || g.Slot != 0 || g.Term <= 0 {
		e.Errorf("grant: got %+v, want the request's own words, slot 0 and a term", g)
	}
	if g.TTL != r.TTL {
		e.Errorf("ttl of the grant: got %v, want %v", g.TTL, r.TTL)
	}
	b.taken(b.request("one"))
	a.taken(a.request("one")) // the same client is a stranger too: only the handle counts
	a.release(g, "ok")
	b.acquire(b.request("one"))
}

// contenders is C64 for one process: what the holders wrote down tells, not what the store says.
func contenders(e *env) {
	const each, rounds = 8, 12
	var (
		inside atomic.Int32
		last   atomic.Int64
		wg     sync.WaitGroup
	)
	for range each {
		c := e.client()
		wg.Go(func() {
			for range rounds {
				r := c.request("contended")
				if r.TTL > 0 {
					r.TTL = max(r.TTL, 10*time.Second) // nobody may expire here
				}
				var g backends.Grant
				for begun := time.Now(); ; {
					var err error
					if g, err = c.try(r); err == nil {
						break
					}
					if !errors.Is(err, backends.ErrBusy) || time.Since(begun) > time.Minute {
						e.Errorf("Acquire: got %v, want a grant or busy within a minute", err)
						return
					}
					time.Sleep(time.Millisecond) // the pace of the polling
				}
				if n := inside.Add(1); n != 1 {
					e.Errorf("%d holders at one time, want 1", n)
				}
				if before := last.Swap(int64(g.Term)); before >= int64(g.Term) {
					e.Errorf("term %d came after %d", g.Term, before)
				}
				inside.Add(-1)
				if err := c.Release(e.Context(), g, backends.End{Outcome: "ok"}); err != nil {
					e.Errorf("Release: got %v, want nil", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func termsGrow(e *env) {
	last := backends.Term(0)
	step := func(how string, g backends.Grant) {
		e.Helper()
		if g.Term <= last {
			e.Errorf("term after %s: got %d, want more than %d", how, g.Term, last)
		}
		if g.Term > backends.MaxTerm {
			e.Errorf("term after %s: got %d, want at most %d", how, g.Term, backends.MaxTerm)
		}
		last = g.Term
	}
	c := e.client()
	for i := range 5 {
		g := c.acquire(c.request("terms"))
		step(fmt.Sprintf("%d releases", i), g)
		c.release(g, "ok")
	}
	step("a release", c.acquire(c.brief("terms")))
	e.expire(c)
	c = e.client()
	r := c.request("terms")
	g := c.acquire(r)
	step("an end without a word", g)
	c.abandon(r)
	step("an abandon", c.acquire(c.request("terms")))
}

func termsGrowOverDeletion(e *env) {
	if e.place.Wipe == nil {
		e.Skip("nothing can be deleted behind the clients' back here")
	}
	c := e.client()
	last := backends.Term(0)
	for range 20 {
		g := c.acquire(c.request("wiped"))
		if g.Term <= last {
			e.Fatalf("term: got %d, want more than %d", g.Term, last)
		}
		last = g.Term
		c.release(g, "ok")
	}
	e.place.Wipe(e.namespace, "wiped")
	// Terms of acquisitions that came faster than one a millisecond are ahead of the store's clock.
	time.Sleep(50 * time.Millisecond)
	if g := c.acquire(c.request("wiped")); g.Term <= last {
		e.Errorf("term after the deletion: got %d, want more than %d", g.Term, last)
	}
}

func idempotent(e *env) {
	c := e.client()
	c.release(c.acquire(c.request("twice")), "failed")
	r := c.request("twice")
	r.Slots = 3
	first := c.acquire(r)
	for range 3 {
		again := c.acquire(r)
		if again.Term != first.Term || again.Slot != first.Slot || again.Previous.Outcome != first.Previous.Outcome {
			e.Errorf("the same handle again: got %+v, want %+v", again, first)
		}
	}
	held := 0
	for _, s := range c.inspect("twice").Slots {
		if s.Held {
			held++
		}
	}
	if held != 1 {
		e.Errorf("slots held after four acquires with one handle: got %d, want 1", held)
	}
	c.renew(first)
	// The handle belongs to its lease: with another name it asks for another one.
	r.Lease = "twice-too"
	if other := c.acquire(r); other.Lease != "twice-too" {
		e.Errorf("the same handle for another lease: got a grant of %q", other.Lease)
	}
	c.renew(first)
	c.release(first, "ok")
	c.abandon(r)
}

func abandonFrees(e *env) {
	c := e.client()
	r := c.request("abandoned")
	r.Slots = 2
	other := c.acquire(func() backends.Request { o := c.request("abandoned"); o.Slots = 2; return o }())
	g := c.acquire(r)
	c.abandon(r)
	c.lost(g)
	c.renew(other)
	if got := c.acquire(func() backends.Request { o := c.request("abandoned"); o.Slots = 2; return o }()); got.Slot != g.Slot {
		e.Errorf("slot after the abandon: got %d, want %d", got.Slot, g.Slot)
	}
}

func abandonUnknown(e *env) {
	c := e.client()
	c.abandon(c.request("never-used"))
	g := c.acquire(c.request("used"))
	c.abandon(c.request("used"))
	c.renew(g)
	empty := backends.Grant{Namespace: e.namespace, Lease: "used"}
	if err := c.Release(e.Context(), empty, backends.End{}); err != nil {
		e.Errorf("Release without a handle: got %v, want nil", err)
	}
	c.renew(g)
}

func releaseSpares(e *env) {
	a, b := e.client(), e.client()
	old := a.acquire(a.request("spared"))
	a.release(old, "ok")
	now := b.acquire(b.request("spared"))
	a.release(old, "failed")
	if _, err := a.Renew(e.Context(), old); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Renew of the old grant: got %v, want ErrLost", err)
	}
	b.renew(now)
	if s := b.slot("spared", 0); !s.Held || s.Term != now.Term || s.Last.Outcome != "ok" {
		e.Errorf("slot after a late release: got %+v, want it held with term %d after ok", s, now.Term)
	}
	// With the right place and the wrong handle.
	forged := now
	forged.Handle = backends.NewHandle()
	a.release(forged, "ok")
	a.lost(forged)
	b.renew(now)
}

func releaseTwice(e *env) {
	c := e.client()
	g := c.acquire(c.request("twice"))
	c.release(g, "ok")
	c.release(g, "failed")
	if s := c.slot("twice", 0); s.Held || s.Last.Outcome != "ok" {
		e.Errorf("slot: got %+v, want it free and ended by the first release", s)
	}
	if n := len(c.inspect("twice").History); n != 1 {
		e.Errorf("history: got %d ends, want 1", n)
	}
}

func renewNeverRevives(e *env) {
	a, b := e.client(), e.client()
	g := a.acquire(a.brief("dead"))
	e.expire(a)
	a.lost(g)
	b.acquire(b.request("dead"))
	a.lost(g)
	released := b.acquire(b.request("released"))
	b.release(released, "ok")
	b.lost(released)
	if s := b.slot("released", 0); s.Taken() {
		e.Errorf("slot after the renewal of a released grant: got %+v, want it free", s)
	}
}

func renewKeeps(e *env) {
	a, b := e.client(), e.client()
	r, pace := a.request("kept"), e.h.TTL/3
	if !a.Endless {
		r.TTL = max(e.h.TTL, hiccup) // so that a renewal that comes late is in time
		pace = r.TTL / 5
	}
	rounds := 6
	if e.h.Ticks {
		rounds = 11 // a server's tick may let a grant live for twice its ttl
	}
	g := a.acquire(r)
	for range rounds {
		time.Sleep(pace)
		if got := a.renew(g); got.Term != g.Term || got.Slot != g.Slot || got.TTL != g.TTL || got.Handle != g.Handle || got.Ask != nil {
			e.Errorf("renewed grant: got %+v, want %+v", got, g)
		}
	}
	b.taken(b.request("kept"))
}

func renewDeleted(e *env) {
	if e.place.Wipe == nil {
		e.Skip("nothing can be deleted behind the clients' back here")
	}
	c := e.client()
	g := c.acquire(c.request("gone"))
	e.place.Wipe(e.namespace, "gone")
	c.lost(g)
	c.lost(g) // and the first renewal did not bring it back
	if s := e.client().inspect("gone"); slices.ContainsFunc(s.Slots, backends.SlotState.Taken) {
		e.Errorf("state after the renewal: got %+v, want nothing taken", s)
	}
	later := e.client()
	next := later.acquire(later.request("gone"))
	c.release(g, "ok")
	later.renew(next)
}

func expiryFrees(e *env) {
	a, b := e.client(), e.client()
	begun := time.Now() // before: what it takes to look whether it is taken counts, too
	a.acquire(a.brief("expiring"))
	if a.Endless {
		b.taken(b.request("expiring")) // else the first of the attempts below may come when it has expired
		e.expire(a)
	}
	g := b.eventually(b.request("expiring"), e.h.TTL+e.h.Slack)
	if took := time.Since(begun); !a.Endless && took < e.h.TTL {
		e.Errorf("free %v after it was asked for, want not before the ttl of %v", took, e.h.TTL)
	}
	if g.Previous.Outcome != backends.OutcomeUnknown {
		e.Errorf("previous end: got %q, want %q", g.Previous.Outcome, backends.OutcomeUnknown)
	}
}

// holds is C65: each of them has to keep the slot for the hold, counted from the acquisition.
func (e *env) holds(lease string, end func(*client, backends.Grant)) {
	e.Helper()
	a, b := e.client(), e.client()
	r := a.brief(lease)
	r.Hold = max(2*e.h.TTL, hiccup) // so that it is looked at before its end
	begun := time.Now()
	g := a.acquire(r)
	end(a, g)
	busy := b.busy(b.request(lease))
	if !busy.Kept && a.Endless {
		e.Errorf("busy error: got Kept false, want true")
	}
	if busy.Left <= 0 || busy.Left > r.Hold {
		e.Errorf("left of the hold: got %v, want at most %v", busy.Left, r.Hold)
	}
	if s := b.slot(lease, 0); !s.Taken() || s.Left <= 0 || s.Left > r.Hold {
		e.Errorf("slot: got %+v, want it taken for at most %v", s, r.Hold)
	}
	next := b.eventually(b.request(lease), r.Hold+e.h.Slack)
	if took := time.Since(begun); took < r.Hold*9/10 {
		e.Errorf("free after %v, want not before the hold of %v", took, r.Hold)
	}
	if next.Term <= g.Term {
		e.Errorf("term: got %d, want more than %d", next.Term, g.Term)
	}
}

func holdKeeps(e *env) {
	e.holds("held", func(c *client, g backends.Grant) { c.release(g, "ok") })
	c := e.client()
	r := c.request("failed")
	r.Hold = time.Hour
	c.release(c.acquire(r), "failed")
	if busy := c.busy(c.request("failed")); !busy.Kept || busy.Holder != r.Holder {
		e.Errorf("busy error: got %+v, want a kept slot of %q", busy, r.Holder)
	}
}

func holdOutlives(e *env) {
	e.holds("crashed", func(c *client, _ backends.Grant) {
		if c.Endless {
			e.expire(c)
		}
	})
}

func holdDropped(e *env) {
	c := e.client()
	r := c.request("dropped")
	r.Hold = time.Hour
	c.release(c.acquire(r), backends.OutcomeNotStarted)
	r = c.request("dropped")
	r.Hold = time.Hour
	c.acquire(r)
	c.abandon(r)
	c.acquire(c.request("dropped"))
}

// holdDroppedLate: a start that came too late has started nothing, whether its grant was seen or not, and whoever looked meanwhile.
func holdDroppedLate(e *env) {
	c, other := e.client(), e.client()
	if c.Endless {
		e.Skip("a grant ends with its process, which then gives nothing back")
	}
	for lease, seen := range map[string]bool{"late": false, "late and seen": true} {
		r := c.brief(lease)
		r.Hold = time.Hour
		g := c.acquire(r)
		e.expire(c)
		if seen {
			other.taken(other.request(lease)) // by the hold
		}
		c.release(g, backends.OutcomeNotStarted)
		other.release(other.acquire(other.request(lease)), "ok")

		r = c.brief(lease)
		r.Hold = time.Hour
		c.acquire(r)
		e.expire(c)
		if seen {
			other.taken(other.request(lease))
		}
		c.abandon(r)
		other.release(other.acquire(other.request(lease)), "ok")
	}
}

func slotsAdmit(e *env) {
	c := e.client()
	slots := map[int]backends.Grant{}
	for range 3 {
		r := c.request("three")
		r.Slots = 3
		g := c.acquire(r)
		if _, ok := slots[g.Slot]; ok || g.Slot < 0 || g.Slot > 2 {
			e.Errorf("slot: got %d, want another one of 0 to 2", g.Slot)
		}
		slots[g.Slot] = g
	}
	r := c.request("three")
	r.Slots = 3
	c.taken(r)
	c.release(slots[1], "ok")
	if g := c.acquire(r); g.Slot != 1 {
		e.Errorf("slot after a release: got %d, want 1", g.Slot)
	}
	for i := range 3 {
		if i != 1 {
			c.renew(slots[i])
		}
	}
}

// mixedSlots is C66: during a rollout some ask for two slots and some for three, with long and short ttls.
func mixedSlots(e *env) {
	var (
		inside atomic.Int32
		wg     sync.WaitGroup
	)
	for i := range 8 {
		c := e.client()
		wg.Go(func() {
			for range 6 {
				r := c.request("mixed")
				r.Slots = 2 + i%2
				if r.TTL > 0 {
					r.TTL = 10*time.Second + time.Duration(i%2)*50*time.Second
				}
				var g backends.Grant
				for begun := time.Now(); ; {
					var err error
					if g, err = c.try(r); err == nil {
						break
					}
					if !errors.Is(err, backends.ErrBusy) || time.Since(begun) > time.Minute {
						e.Errorf("Acquire: got %v, want a grant or busy within a minute", err)
						return
					}
					time.Sleep(time.Millisecond) // the pace of the polling
				}
				if g.Slot >= r.Slots {
					e.Errorf("slot: got %d, want one below %d", g.Slot, r.Slots)
				}
				if n := inside.Add(1); n > 3 {
					e.Errorf("%d holders, want at most 3", n)
				}
				time.Sleep(time.Millisecond) // so that holders meet
				inside.Add(-1)
				if err := c.Release(e.Context(), g, backends.End{Outcome: "ok"}); err != nil {
					e.Errorf("Release: got %v, want nil", err)
				}
			}
		})
	}
	wg.Wait()
	// A short ttl beside a long one ends alone.
	long, short := e.client(), e.client()
	r := long.request("mixed-ttl")
	if r.Slots = 2; r.TTL > 0 {
		r.TTL = time.Minute
	}
	kept := long.acquire(r)
	r = short.brief("mixed-ttl")
	r.Slots = 2
	gone := short.acquire(r)
	e.expire(short)
	next := e.client()
	r = next.request("mixed-ttl")
	r.Slots = 3
	if g := next.acquire(r); g.Slot != gone.Slot {
		e.Errorf("slot: got %d, want that of the short ttl, %d", g.Slot, gone.Slot)
	}
	long.renew(kept)
	r = next.request("mixed-ttl")
	r.Slots = 2
	next.taken(r)
	r.Slots = 3
	if g := next.acquire(r); g.Slot != 2 {
		e.Errorf("slot with a larger N: got %d, want 2", g.Slot)
	}
}

func termsOverSlots(e *env) {
	c := e.client()
	last := backends.Term(0)
	for i := range 12 {
		r := c.request("slots")
		r.Slots = 4
		g := c.acquire(r)
		if g.Term <= last {
			e.Errorf("term of slot %d: got %d, want more than %d", g.Slot, g.Term, last)
		}
		last = g.Term
		if i >= 3 {
			c.release(g, "ok")
		}
	}
}

// namesIndependent is C60.
func namesIndependent(e *env) {
	c := e.client()
	start := strings.Repeat("s", 64)
	ns := e.namespace
	held := map[[2]string]backends.Grant{}
	for _, n := range [][2]string{
		{ns, "plain"},
		{ns, "Plain"},
		{ns, strings.Repeat("n", backends.MaxLease)},
		{ns, strings.Repeat("é", backends.MaxLease/2)},
		{ns, "名前 mit Lücke"},
		{ns, start},
		{ns, start + "a"},
		{ns, start + "b"},
		{ns, "plumless"}, // these two have one CRC-32
		{ns, "buckeroo"},
		{ns, "a/b"},
		{ns, "a:b"},
		{ns, "a%2Fb"},
		{ns, "a_b"},
		{ns, "a'b\"c\\d$e`f{g}h*i?j"},
		{ns, "..."},
		{ns, "-"},
		{ns, backends.Key(ns, "a/b")}, // a name that looks like the key of another
		{ns, "x-ul-"},
		{ns + "a", "b/c"}, // no glue between namespace and name
		{ns + "a/b", "c"},
		{ns + "a", "b:c"},
		{ns + "a:b", "c"},
		{ns + "A", "b/c"},
		{ns + "é", "plain"},
	} {
		r := c.request(n[1])
		r.Namespace = n[0]
		g, err := c.try(r)
		if err != nil {
			e.Errorf("Acquire of %q in %q beside the others: got %v, want a grant", n[1], n[0], err)
			continue
		}
		if g.Lease != n[1] || g.Namespace != n[0] {
			e.Errorf("grant of %q in %q: got %q in %q", n[1], n[0], g.Lease, g.Namespace)
		}
		r.Handle = backends.NewHandle()
		if _, err := c.try(r); !errors.Is(err, backends.ErrBusy) {
			e.Errorf("Acquire of %q in %q again: got %v, want busy", n[1], n[0], err)
		}
		held[n] = g
	}
	for n, g := range held {
		if _, err := c.Renew(e.Context(), g); err != nil && c.Endless {
			e.Errorf("Renew of %q in %q: got %v, want the grant", n[1], n[0], err)
		}
		if err := c.Release(e.Context(), g, backends.End{Outcome: "ok"}); err != nil {
			e.Errorf("Release of %q in %q: got %v, want nil", n[1], n[0], err)
		}
	}
	list, err := c.List(e.Context(), ns)
	if err != nil {
		e.Fatalf("List: got %v, want the leases", err)
	}
	want := 0
	for n := range held {
		if n[0] == ns {
			want++
		}
	}
	if len(list) != want {
		e.Errorf("List of one namespace: got %d leases, want %d", len(list), want)
	}
}

func badRequests(e *env) {
	c := e.client()
	for name, spoil := range map[string]func(*backends.Request){
		"an empty name":        func(r *backends.Request) { r.Lease = "" },
		"two dots":             func(r *backends.Request) { r.Lease = ".." },
		"a comma":              func(r *backends.Request) { r.Lease = "a,b" },
		"a long name":          func(r *backends.Request) { r.Lease = strings.Repeat("n", backends.MaxLease+1) },
		"a bad namespace":      func(r *backends.Request) { r.Namespace = "a\x00b" },
		"no slots":             func(r *backends.Request) { r.Slots = 0 },
		"no handle":            func(r *backends.Request) { r.Handle = "" },
		"a negative hold":      func(r *backends.Request) { r.Hold = -time.Second },
		"a negative ttl":       func(r *backends.Request) { r.TTL = -time.Second },
		"decomposed character": func(r *backends.Request) { r.Lease = "e\u0301" },
	} {
		r := c.request("good")
		spoil(&r)
		var config *backends.ConfigError
		if _, err := c.try(r); !errors.As(err, &config) {
			e.Errorf("Acquire with %s: got %v, want a *ConfigError", name, err)
		}
	}
	if !c.Endless {
		r := c.request("good")
		r.TTL = 0
		var config *backends.ConfigError
		if _, err := c.try(r); !errors.As(err, &config) {
			e.Errorf("Acquire without a ttl: got %v, want a *ConfigError", err)
		}
	}
	if list, err := c.List(e.Context(), e.namespace); err != nil || len(list) != 0 {
		e.Errorf("List after nothing but refusals: got %d leases, %v, want none", len(list), err)
	}
}

// busyTells is C45.
func busyTells(e *env) {
	a, b := e.client(), e.client()
	r := a.request("busy")
	r.Holder = "db1 „quoted“ (pid 4711)"
	r.TTL = max(2*e.h.TTL, 30*time.Second)
	before := time.Now()
	g := a.acquire(r)
	busy := b.busy(b.request("busy"))
	if busy.Lease != "busy" || busy.Namespace != e.namespace || busy.Holder != r.Holder || busy.Slot != g.Slot || busy.Term != g.Term || busy.Kept {
		e.Errorf("busy error: got %+v, want holder %q, slot %d and term %d", busy, r.Holder, g.Slot, g.Term)
	}
	if busy.Left <= 0 || busy.Left > r.TTL {
		e.Errorf("left: got %v, want at most %v", busy.Left, r.TTL)
	}
	if since := busy.Since.Sub(before); since < -time.Minute || since > time.Minute {
		e.Errorf("since: got %v, want about %v", busy.Since, before)
	}
	if strings.Contains(busy.Error(), r.Handle) {
		e.Error("the busy error carries the handle")
	}
	if a.Endless {
		r := a.request("endless")
		a.acquire(r)
		if busy := b.busy(b.request("endless")); busy.Left != backends.Forever {
			e.Errorf("left of a grant without a ttl: got %v, want Forever", busy.Left)
		}
	}
	// Of several, the one that will be free first.
	for _, ttl := range []time.Duration{time.Hour, max(2*e.h.TTL, 30*time.Second), time.Hour} {
		r := a.request("three")
		r.Slots, r.TTL, r.Holder = 3, ttl, ttl.String()
		a.acquire(r)
	}
	next := b.request("three")
	next.Slots = 3
	if busy := b.busy(next); busy.Slot != 1 || busy.Left > time.Minute {
		e.Errorf("busy error: got slot %d of %q with %v left, want slot 1, which ends first", busy.Slot, busy.Holder, busy.Left)
	}
}

func previousTells(e *env) {
	c := e.client()
	r := c.request("previous")
	g := c.acquire(r)
	if g.Previous.Outcome != backends.OutcomeNone {
		e.Errorf("previous of the first: got %q, want %q", g.Previous.Outcome, backends.OutcomeNone)
	}
	if err := c.Release(e.Context(), g, backends.End{Outcome: "failed", ExitCode: 17, Took: 1500 * time.Millisecond}); err != nil {
		e.Fatalf("Release: got %v, want nil", err)
	}
	g = c.acquire(c.request("previous"))
	if p := g.Previous; p.Outcome != "failed" || p.ExitCode != 17 || p.Took != 1500*time.Millisecond || len(p.Puts) != 0 {
		e.Errorf("previous: got %+v, want failed, 17 and 1.5s", p)
	}
	c.release(g, "ok")
	if g = c.acquire(c.brief("previous")); g.Previous.Outcome != "ok" {
		e.Errorf("previous: got %q, want ok", g.Previous.Outcome)
	}
	e.expire(c)
	c = e.client()
	if g = c.acquire(c.request("previous")); g.Previous.Outcome != backends.OutcomeUnknown {
		e.Errorf("previous after an end without a word: got %q, want %q", g.Previous.Outcome, backends.OutcomeUnknown)
	}
	if h := c.inspect("previous").History; len(h) != 3 || h[0].End.Outcome != backends.OutcomeUnknown || h[1].End.Outcome != "ok" || h[2].End.ExitCode != 17 {
		e.Errorf("history: got %+v, want unknown, ok and failed", h)
	}
}

func askReaches(e *env) {
	a, b := e.client(), e.client()
	r := a.request("asked")
	g := a.acquire(r)
	if err := b.Ask(e.Context(), e.namespace, "asked", 0, backends.Ask{Kind: backends.AskStop, Reason: "deploy of „v2“", By: "alice@ops"}); err != nil {
		e.Fatalf("Ask: got %v, want nil", err)
	}
	for range 2 {
		ask := a.renew(g).Ask
		if ask == nil || ask.Kind != backends.AskStop || ask.Reason != "deploy of „v2“" || ask.By != "alice@ops" {
			e.Fatalf("what is asked: got %+v, want a stop by alice@ops", ask)
		}
	}
	if again := a.acquire(r); again.Ask == nil || again.Term != g.Term {
		e.Errorf("the same handle again: got %+v, want the ask and term %d", again, g.Term)
	}
	if s := b.slot("asked", 0); s.Ask == nil || s.Ask.Kind != backends.AskStop {
		e.Errorf("slot: got %+v, want the ask", s)
	}
	a.release(g, "stopped")
	if next := b.acquire(b.request("asked")); next.Ask != nil {
		e.Errorf("ask of the next holder: got %+v, want none", next.Ask)
	}
}

func askFree(e *env) {
	c := e.client()
	ask := backends.Ask{Kind: backends.AskStop}
	if err := c.Ask(e.Context(), e.namespace, "never-used", 0, ask); err != nil {
		e.Errorf("Ask of a lease that was never used: got %v, want nil", err)
	}
	c.release(c.acquire(c.request("free")), "ok")
	for _, slot := range []int{0, 7} {
		if err := c.Ask(e.Context(), e.namespace, "free", slot, ask); err != nil {
			e.Errorf("Ask of the free slot %d: got %v, want nil", slot, err)
		}
		if err := c.Break(e.Context(), e.namespace, "free", slot, "why", true); err != nil {
			e.Errorf("Break of the free slot %d: got %v, want nil", slot, err)
		}
	}
	if g := c.acquire(c.request("free")); g.Ask != nil {
		e.Errorf("ask of the next holder: got %+v, want none", g.Ask)
	}
}

func breakRefuses(e *env) {
	a, b := e.client(), e.client()
	g := a.acquire(a.request("broken"))
	if err := b.Break(e.Context(), e.namespace, "broken", 0, "it hangs", false); err != nil {
		e.Fatalf("Break: got %v, want nil", err)
	}
	b.taken(b.request("broken")) // not free before its expiry or its release
	a.lost(g)
	if err := b.Ask(e.Context(), e.namespace, "broken", 0, backends.Ask{Kind: backends.AskStop}); err != nil {
		e.Errorf("Ask after a break: got %v, want nil", err)
	}
	a.lost(g) // an ask does not take the break back
	if s := b.slot("broken", 0); s.Held && (s.Ask == nil || s.Ask.Kind != backends.AskBreak || s.Ask.Reason != "it hangs") {
		e.Errorf("slot: got %+v, want the break with its reason", s)
	}
	a.release(g, "lost-taken")
	next := b.acquire(b.request("broken"))
	if next.Term <= g.Term || next.Previous.Outcome != "lost-taken" {
		e.Errorf("next grant: got %+v, want a larger term than %d and the end of the last holder", next, g.Term)
	}
	b.renew(next)
}

func breakNow(e *env) {
	a, b := e.client(), e.client()
	r := a.request("broken")
	r.Hold = time.Hour
	g := a.acquire(r)
	if err := b.Break(e.Context(), e.namespace, "broken", 0, "it hangs", true); err != nil {
		e.Fatalf("Break: got %v, want nil", err)
	}
	next := b.acquire(b.request("broken"))
	if next.Term <= g.Term {
		e.Errorf("term: got %d, want more than %d", next.Term, g.Term)
	}
	a.lost(g)
	a.release(g, "lost-taken")
	b.renew(next)
	a.taken(a.request("broken"))
}

func inspectShows(e *env) {
	a, b := e.client(), e.client()
	if s := a.inspect("never-used"); s.Lease != "never-used" || s.Namespace != e.namespace || len(s.Slots) != 0 || len(s.History) != 0 {
		e.Errorf("state of a lease that was never used: got %+v, want nothing but its name", s)
	}
	r := a.request("shown")
	r.Slots, r.TTL = 2, time.Hour
	g := a.acquire(r)
	s := b.slot("shown", g.Slot)
	if !s.Held || s.Kept || s.Holder != r.Holder || s.Term != g.Term || s.Left <= 0 || s.Left > r.TTL || s.Last.Outcome != backends.OutcomeNone || s.Since.IsZero() {
		e.Errorf("held slot: got %+v, want holder, term, since and time left", s)
	}
	a.release(g, "ok")
	s = b.slot("shown", g.Slot)
	if s.Taken() || s.Holder != "" || s.Term != g.Term || s.Left != 0 || s.Last.Outcome != "ok" {
		e.Errorf("free slot: got %+v, want no holder and how the last one ended", s)
	}
	if shown := fmt.Sprintf("%+v", b.inspect("shown")); strings.Contains(shown, r.Handle) {
		e.Error("the state carries the handle")
	}
	// Looking takes nothing and frees nothing.
	g = a.acquire(a.request("shown"))
	for range 5 {
		b.inspect("shown")
	}
	a.renew(g)
	a.release(g, "ok")
	b.inspect("shown")
	a.acquire(a.request("shown"))
}

func listComplete(e *env) {
	c := e.client()
	if list, err := c.List(e.Context(), e.namespace); err != nil || len(list) != 0 {
		e.Fatalf("List of a namespace that was never used: got %d leases, %v, want none", len(list), err)
	}
	var want []string
	for i := range 100 {
		name := fmt.Sprintf("list/%03d", (i*37)%100)
		want = append(want, name)
		r := c.request(name)
		if r.TTL > 0 {
			r.TTL = time.Hour
		}
		g := c.acquire(r)
		if i%2 == 0 {
			c.release(g, "ok")
		}
	}
	other := c.request("elsewhere")
	other.Namespace += "-other"
	c.acquire(other)
	slices.Sort(want)
	list, err := c.List(e.Context(), e.namespace)
	if err != nil {
		e.Fatalf("List: got %v, want the leases", err)
	}
	var got []string
	held := 0
	for _, s := range list {
		got = append(got, s.Lease)
		if len(s.History) != 0 {
			e.Errorf("List of %q: got a history of %d, want none", s.Lease, len(s.History))
		}
		if len(s.Slots) == 1 && s.Slots[0].Held {
			held++
		}
	}
	if !slices.Equal(got, want) {
		e.Errorf("List: got %q, want %q", got, want)
	}
	if held != 50 {
		e.Errorf("List: got %d held, want 50", held)
	}
	w, ok := c.Backend.(backends.Walker)
	if !ok {
		return
	}
	got = nil
	if err := w.Walk(e.Context(), e.namespace, func(s backends.State, err error) bool {
		if err != nil || len(s.Slots) != 1 || len(s.History) != 0 {
			e.Errorf("Walk: got %+v and %v, want one slot and no history", s, err)
		}
		got = append(got, s.Lease)
		return len(got) < 70
	}); err != nil || !slices.Equal(got, want[:70]) {
		e.Errorf("Walk: got %q and %v, want the first 70 of %q", got, err, want)
	}
}

func historyKeeps(e *env) {
	c := e.client()
	var last backends.Grant
	for i := range backends.HistoryLength + 5 {
		last = c.acquire(c.request("history"))
		if err := c.Release(e.Context(), last, backends.End{Outcome: "failed", ExitCode: i, Took: time.Duration(i) * time.Second}); err != nil {
			e.Fatalf("Release: got %v, want nil", err)
		}
	}
	h := c.inspect("history").History
	if len(h) != backends.HistoryLength {
		e.Fatalf("history: got %d ends, want %d", len(h), backends.HistoryLength)
	}
	for i, p := range h {
		want := backends.HistoryLength + 4 - i
		if p.End.ExitCode != want || p.End.Took != time.Duration(want)*time.Second || p.Holder == "" || p.Since.IsZero() {
			e.Errorf("history[%d]: got %+v, want the end with code %d", i, p, want)
		}
	}
	if h[0].Term != last.Term {
		e.Errorf("newest end: got term %d, want %d", h[0].Term, last.Term)
	}
}

func recordsCompare(e *env) {
	c := e.client()
	records, ctx := c.Records(), e.Context()
	put := func(lease, key, v string, version int64) (int64, error) {
		return records.Put(ctx, e.namespace, lease, backends.Put{Key: key, Value: []byte(v), Version: version}, nil)
	}
	if _, err := records.Get(ctx, e.namespace, "l", "k"); !errors.Is(err, backends.ErrNoRecord) {
		e.Errorf("Get of nothing: got %v, want ErrNoRecord", err)
	}
	if _, err := put("l", "k", "x", 5); !errors.Is(err, backends.ErrConflict) {
		e.Errorf("Put over a version that is not there: got %v, want ErrConflict", err)
	}
	v1, err := put("l", "k", "one", 0)
	if err != nil || v1 <= 0 {
		e.Fatalf("Put of a new record: got version %d, %v, want a positive one", v1, err)
	}
	if _, err := put("l", "k", "other", 0); !errors.Is(err, backends.ErrConflict) {
		e.Errorf("Put of a new record where one is: got %v, want ErrConflict", err)
	}
	v2, err := put("l", "k", "two", v1)
	if err != nil || v2 <= v1 {
		e.Errorf("Put over version %d: got %d, %v, want a larger one", v1, v2, err)
	}
	if _, err := put("l", "k", "late", v1); !errors.Is(err, backends.ErrConflict) {
		e.Errorf("Put over an old version: got %v, want ErrConflict", err)
	}
	v3, err := put("l", "k", "three", backends.AnyVersion)
	if err != nil || v3 <= v2 {
		e.Errorf("Put over any version: got %d, %v, want a larger one than %d", v3, err, v2)
	}
	r, err := records.Get(ctx, e.namespace, "l", "k")
	if err != nil || string(r.Value) != "three" || r.Version != v3 || r.Key != "k" || r.Lease != "l" || r.Namespace != e.namespace || r.Age < 0 || r.Age > time.Minute {
		e.Errorf("Get: got %+v, %v, want three with version %d", r, err, v3)
	}
	for _, key := range []string{"b/c", "a", "é"} {
		if _, err := put("l", key, key, 0); err != nil {
			e.Errorf("Put of %q: got %v, want nil", key, err)
		}
	}
	if _, err := put("other", "k", "elsewhere", 0); err != nil {
		e.Errorf("Put of the same key at another lease: got %v, want nil", err)
	}
	list, err := records.List(ctx, e.namespace, "l")
	var keys []string
	for _, r := range list {
		keys = append(keys, r.Key)
	}
	if want := []string{"a", "b/c", "k", "é"}; err != nil || !slices.Equal(keys, want) {
		e.Errorf("List: got %q, %v, want %q", keys, err, want)
	}
	for range 2 {
		if err := records.Delete(ctx, e.namespace, "l", "k"); err != nil {
			e.Errorf("Delete: got %v, want nil", err)
		}
	}
	if _, err := records.Get(ctx, e.namespace, "l", "k"); !errors.Is(err, backends.ErrNoRecord) {
		e.Errorf("Get after Delete: got %v, want ErrNoRecord", err)
	}
	if v4, err := put("l", "k", "again", 0); err != nil || v4 <= v3 {
		e.Errorf("Put after Delete: got version %d, %v, want a larger one than %d", v4, err, v3)
	}
	var config *backends.ConfigError
	for _, p := range []backends.Put{{Key: ""}, {Key: "a,b"}, {Key: "large", Value: make([]byte, backends.MaxRecord+1)}} {
		if _, err := records.Put(ctx, e.namespace, "l", p, nil); !errors.As(err, &config) {
			e.Errorf("Put of a bad record: got %v, want a *ConfigError", err)
		}
	}
}

func recordsOutlive(e *env) {
	a := e.client()
	if _, err := a.Records().Put(e.Context(), e.namespace, "l", backends.Put{Key: "k", Value: []byte("v")}, nil); err != nil {
		e.Fatalf("Put: got %v, want nil", err)
	}
	a.release(a.acquire(a.request("l")), "ok")
	a.acquire(a.brief("l"))
	e.expire(a)
	b := e.client()
	b.acquire(b.request("l"))
	if r, err := b.Records().Get(e.Context(), e.namespace, "l", "k"); err != nil || string(r.Value) != "v" {
		e.Errorf("Get: got %q, %v, want v", r.Value, err)
	}
}

func recordsWhile(e *env) {
	a, b := e.client(), e.client()
	put := func(c *client, g backends.Grant, v string) error {
		_, err := c.Records().Put(e.Context(), e.namespace, "l", backends.Put{Key: "k", Value: []byte(v), Version: backends.AnyVersion}, &g)
		return err
	}
	r := a.request("l")
	g := a.acquire(r)
	if err := put(a, g, "held"); err != nil {
		e.Errorf("Put while held: got %v, want nil", err)
	}
	forged := g
	forged.Handle = backends.NewHandle()
	if err := put(b, forged, "forged"); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Put with another handle: got %v, want ErrLost", err)
	}
	a.release(g, "ok")
	if err := put(a, g, "released"); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Put after the release: got %v, want ErrLost", err)
	}
	g = a.acquire(a.brief("l"))
	e.expire(a)
	if err := put(b, g, "expired"); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Put after the expiry: got %v, want ErrLost", err)
	}
	next := b.acquire(b.request("l"))
	if err := put(b, g, "taken"); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Put after another has taken it: got %v, want ErrLost", err)
	}
	if r, err := b.Records().Get(e.Context(), e.namespace, "l", "k"); err != nil || string(r.Value) != "held" {
		e.Errorf("Get: got %q, %v, want held", r.Value, err)
	}
	b.renew(next)
	nowhere := backends.Grant{Namespace: e.namespace, Lease: "never-used", Handle: "h", Term: 5}
	if _, err := b.Records().Put(e.Context(), e.namespace, "never-used", backends.Put{Key: "k"}, &nowhere); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Put at a lease that was never used: got %v, want ErrLost", err)
	}
}

func recordsAtRelease(e *env) {
	c := e.client()
	records, ctx := c.Records(), e.Context()
	g := c.acquire(c.request("l"))
	version, err := records.Put(ctx, e.namespace, "l", backends.Put{Key: "count", Value: []byte("1")}, nil)
	if err != nil {
		e.Fatalf("Put: got %v, want nil", err)
	}
	conflict := backends.End{Outcome: "ok", Puts: []backends.Put{
		{Key: "done", Value: []byte("yes")},
		{Key: "count", Value: []byte("2"), Version: version + 1},
	}}
	if err := c.Release(ctx, g, conflict); !errors.Is(err, backends.ErrConflict) {
		e.Fatalf("Release with a conflict: got %v, want ErrConflict", err)
	}
	if _, err := records.Get(ctx, e.namespace, "l", "done"); !errors.Is(err, backends.ErrNoRecord) {
		e.Errorf("record of a release that was refused: got %v, want ErrNoRecord", err)
	}
	c.renew(g) // refused as a whole
	good := conflict
	good.Puts = []backends.Put{{Key: "done", Value: []byte("yes")}, {Key: "count", Value: []byte("2"), Version: version}}
	if err := c.Release(ctx, g, good); err != nil {
		e.Fatalf("Release: got %v, want nil", err)
	}
	for key, want := range map[string]string{"done": "yes", "count": "2"} {
		if r, err := records.Get(ctx, e.namespace, "l", key); err != nil || string(r.Value) != want {
			e.Errorf("Get %s: got %q, %v, want %q", key, r.Value, err, want)
		}
	}
	late := backends.End{Outcome: "ok", Puts: []backends.Put{{Key: "late", Version: backends.AnyVersion}}}
	if err := c.Release(ctx, g, late); err != nil {
		e.Errorf("Release of an ended grant: got %v, want nil", err)
	}
	if _, err := records.Get(ctx, e.namespace, "l", "late"); !errors.Is(err, backends.ErrNoRecord) {
		e.Errorf("record of a late release: got %v, want ErrNoRecord", err)
	}
}

func recordsBytes(e *env) {
	c := e.client()
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	for key, v := range map[string][]byte{
		"none": {}, "every": every, "large": bytes.Repeat(every, backends.MaxRecord/256), "text": []byte("a\n\"b\" \\ 'c' é \u2028"),
	} {
		if _, err := c.Records().Put(e.Context(), e.namespace, "l", backends.Put{Key: key, Value: v}, nil); err != nil {
			e.Errorf("Put of %s: got %v, want nil", key, err)
		}
		if r, err := c.Records().Get(e.Context(), e.namespace, "l", key); err != nil || !bytes.Equal(r.Value, v) {
			e.Errorf("Get of %s: got %d bytes, %v, want the %d that were put", key, len(r.Value), err, len(v))
		}
	}
}

func cancelledReturns(e *env) {
	c := e.client()
	g := c.acquire(c.request("l"))
	ctx := e.cancelled()
	for name, f := range map[string]func() error{
		"Acquire":     func() error { _, err := c.Acquire(ctx, c.request("other")); return err },
		"Renew":       func() error { _, err := c.Renew(ctx, g); return err },
		"Release":     func() error { return c.Release(ctx, g, backends.End{Outcome: "ok"}) },
		"Inspect":     func() error { _, err := c.Inspect(ctx, e.namespace, "l"); return err },
		"Ask":         func() error { return c.Ask(ctx, e.namespace, "l", 0, backends.Ask{Kind: backends.AskStop}) },
		"Break":       func() error { return c.Break(ctx, e.namespace, "l", 0, "why", true) },
		"Records.Get": func() error { _, err := c.Records().Get(ctx, e.namespace, "l", "k"); return err },
		"Records.Put": func() error {
			_, err := c.Records().Put(ctx, e.namespace, "l", backends.Put{Key: "k"}, nil)
			return err
		},
		"Records.Delete": func() error { return c.Records().Delete(ctx, e.namespace, "l", "k") },
	} {
		err := e.within(10*time.Second, name, f)
		for _, kind := range []error{backends.ErrBusy, backends.ErrLost, backends.ErrDenied, backends.ErrBroken, backends.ErrNoRecord} {
			if err == nil || errors.Is(err, kind) {
				e.Errorf("%s with a context that has ended: got %v, want an error that is none of the answers", name, err)
			}
		}
	}
	if got := c.renew(g); got.Ask != nil {
		e.Errorf("grant after calls whose context had ended: got the ask %+v, want none", got.Ask)
	}
}

func nothingLeft(e *env) {
	use := func() {
		c := e.client()
		r := c.request("l")
		g := c.acquire(r)
		c.taken(c.request("l"))
		c.renew(g)
		ctx, cancel := context.WithTimeout(e.Context(), 20*time.Millisecond)
		defer cancel()
		if w, ok := c.Backend.(backends.Waiter); ok {
			_ = w.WaitFree(ctx, c.request("l"))
		}
		if w, ok := c.Backend.(backends.Watcher); ok {
			_ = w.WaitChange(ctx, g)
		}
		c.inspect("l")
		c.release(g, "ok")
		c.abandon(r)
		if err := c.Close(); err != nil {
			e.Errorf("Close: got %v, want nil", err)
		}
		if err := c.Close(); err != nil {
			e.Errorf("Close again: got %v, want nil", err)
		}
	}
	use() // what is made once and kept
	before := descriptors()
	for range 5 {
		use()
	}
	if e.h.Bubble {
		return // the bubble itself finds goroutines that stay
	}
	if !until(10*time.Second, func() bool { return descriptors() <= before }) {
		e.Errorf("open files: got %d, want %d as before", descriptors(), before)
	}
	if !until(10*time.Second, func() bool { return goroutines() == "" }) {
		e.Errorf("goroutines that stay:\n%s", goroutines())
	}
}

// waiting calls WaitFree or ends the case.
func (c *client) waiting() backends.Waiter {
	w, ok := c.Backend.(backends.Waiter)
	if !ok {
		c.e.Skip("the store cannot tell when a lease becomes free")
	}
	return w
}

func (c *client) watching() backends.Watcher {
	w, ok := c.Backend.(backends.Watcher)
	if !ok {
		c.e.Skip("the store cannot tell when a grant changes")
	}
	return w
}

func waitFreeRelease(e *env) {
	a, b := e.client(), e.client()
	w := b.waiting()
	r := a.request("l")
	if r.TTL > 0 {
		r.TTL = time.Minute
	}
	g := a.acquire(r)
	done := make(chan error, 1)
	next := b.request("l")
	go func() { done <- w.WaitFree(e.Context(), next) }()
	select {
	case err := <-done:
		// Too early is allowed, but a hint that always is saves nothing.
		if err != nil {
			e.Fatalf("WaitFree: got %v, want nil", err)
		}
		go func() { done <- w.WaitFree(e.Context(), next) }()
	case <-time.After(min(e.h.Slack/2, 200*time.Millisecond) + 20*time.Millisecond): // so that his own look is more than a wake away
	}
	a.release(g, "ok")
	if err := e.within(e.wake(), "WaitFree after the release", func() error { return <-done }); err != nil {
		e.Fatalf("WaitFree: got %v, want nil", err)
	}
	b.eventually(next, e.wake())
}

func waitFreeHold(e *env) {
	a, b := e.client(), e.client()
	w := b.waiting()
	r := a.request("l")
	r.Hold = e.h.TTL
	a.release(a.acquire(r), "ok")
	begun := time.Now()
	next := b.request("l")
	for {
		if err := e.within(r.Hold+e.h.Slack+e.wake(), "WaitFree", func() error { return w.WaitFree(e.Context(), next) }); err != nil {
			e.Fatalf("WaitFree: got %v, want nil", err)
		}
		if _, err := b.try(next); err == nil {
			break
		}
		if time.Since(begun) > r.Hold+e.h.Slack+e.wake() {
			e.Fatalf("not free %v after a hold of %v", time.Since(begun), r.Hold)
		}
		time.Sleep(time.Millisecond) // the pace of the polling
	}
}

func waitFreeEnds(e *env) {
	a, b := e.client(), e.client()
	w := b.waiting()
	g := a.acquire(a.request("l"))
	ctx, cancel := context.WithTimeout(e.Context(), e.h.TTL/4)
	defer cancel()
	next := b.request("l")
	for ctx.Err() == nil {
		err := e.within(e.h.TTL/4+10*time.Second, "WaitFree", func() error { return w.WaitFree(ctx, next) })
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			e.Fatalf("WaitFree: got %v, want the context's error", err)
		}
	}
	// C47: a waiter that gave up leaves the holder alone and blocks nobody.
	a.renew(g)
	a.release(g, "ok")
	c := e.client()
	c.eventually(c.request("l"), 10*time.Second)
}

// leaves is that a waiter whose time is over is counted no longer.
func leaves(e *env) {
	a, b := e.client(), e.client()
	w := b.waiting()
	l, ok := w.(backends.Leaver)
	if !ok {
		e.Skip("the store keeps no place for who does not wait")
	}
	g := a.acquire(a.request("l"))
	next := b.request("l")
	waiters := func(want int) {
		e.Helper()
		got := -1
		if !until(10*time.Second, func() bool {
			ctx, cancel := context.WithTimeout(e.Context(), time.Second)
			defer cancel()
			if s, err := a.Inspect(ctx, next.Namespace, next.Lease); err == nil && s.Waiters != nil {
				got = *s.Waiters
			}
			return got == want
		}) {
			e.Fatalf("got %d that wait, want %d", got, want)
		}
	}
	for range 2 { // a place that was given up can be taken again
		ctx, cancel := context.WithTimeout(e.Context(), 10*time.Second)
		done := make(chan error, 1)
		go func() { done <- w.WaitFree(ctx, next) }()
		waiters(1)
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			e.Errorf("WaitFree: got %v, want the context's error", err)
		}
		ctx, cancel = context.WithTimeout(e.Context(), time.Second)
		_ = w.WaitFree(ctx, next) // the time to wait is over
		cancel()
		if err := l.Leave(e.Context(), next); err != nil {
			e.Fatalf("Leave: got %v, want nil", err)
		}
		waiters(0)
	}
	if err := l.Leave(e.Context(), next); err != nil {
		e.Errorf("Leave without a place: got %v, want nil", err)
	}
	a.renew(g)
	a.release(g, "ok")
}

// waitersServed is C49: eight that wait, jobs that take no time.
func waitersServed(e *env) {
	first := e.client()
	first.waiting()
	r := first.request("l")
	if r.TTL > 0 {
		r.TTL = time.Minute
	}
	g := first.acquire(r)
	var wg sync.WaitGroup
	var served atomic.Int32
	ctx, cancel := context.WithTimeout(e.Context(), 30*time.Second)
	defer cancel()
	for range 8 {
		c := e.client()
		wg.Go(func() {
			r := c.request("l")
			if r.TTL > 0 {
				r.TTL = time.Minute
			}
			for {
				g, err := c.Acquire(ctx, r)
				if err == nil {
					served.Add(1)
					if err := c.Release(ctx, g, backends.End{Outcome: "ok"}); err != nil {
						e.Errorf("Release: got %v, want nil", err)
					}
					return
				}
				if !errors.Is(err, backends.ErrBusy) {
					e.Errorf("Acquire: got %v, want a grant or busy", err)
					return
				}
				if err := c.Backend.(backends.Waiter).WaitFree(ctx, r); err != nil {
					e.Errorf("WaitFree: got %v, want nil", err)
					return
				}
				time.Sleep(time.Millisecond) // a hint may come a moment too early
			}
		})
	}
	time.Sleep(100 * time.Millisecond) // so that most of them wait; it does not matter whether all do
	begun := time.Now()
	first.release(g, "ok")
	wg.Wait()
	if n := served.Load(); n != 8 {
		e.Errorf("served: got %d, want 8", n)
	}
	if took, limit := time.Since(begun), 2*time.Second+8*e.h.Slack+hiccup; took > limit {
		e.Errorf("eight waiters took %v, want at most %v", took, limit)
	}
}

func waitChangeAsk(e *env) {
	a, b := e.client(), e.client()
	w := a.watching()
	r := a.request("l")
	if r.TTL > 0 {
		r.TTL = time.Minute
	}
	g := a.acquire(r)
	change := func(what string, f func() error) {
		e.Helper()
		done := make(chan error, 1)
		go func() { done <- w.WaitChange(e.Context(), g) }()
		if err := f(); err != nil {
			e.Fatalf("%s: got %v, want nil", what, err)
		}
		if err := e.within(e.wake(), "WaitChange after "+what, func() error { return <-done }); err != nil {
			e.Errorf("WaitChange after %s: got %v, want nil", what, err)
		}
	}
	change("Ask", func() error {
		return b.Ask(e.Context(), e.namespace, "l", 0, backends.Ask{Kind: backends.AskStop, Reason: "r"})
	})
	if g = a.renew(g); g.Ask == nil {
		e.Fatal("Renew after the hint: got no ask")
	}
	change("Break", func() error { return b.Break(e.Context(), e.namespace, "l", 0, "r", false) })
	a.lost(g)
}

func waitChangeLoss(e *env) {
	for _, how := range []string{"break", "wipe"} {
		a, b := e.client(), e.client()
		w := a.watching()
		r := a.request(how)
		if r.TTL > 0 {
			r.TTL = time.Minute
		}
		g := a.acquire(r)
		done := make(chan error, 1)
		go func() { done <- w.WaitChange(e.Context(), g) }()
		switch {
		case how == "break":
			if err := b.Break(e.Context(), e.namespace, how, 0, "r", true); err != nil {
				e.Fatalf("Break: got %v, want nil", err)
			}
		case e.place.Wipe != nil:
			e.place.Wipe(e.namespace, how)
		default:
			a.release(g, "ok")
		}
		if err := e.within(e.wake(), "WaitChange after a "+how, func() error { return <-done }); err != nil {
			e.Errorf("WaitChange after a %s: got %v, want nil", how, err)
		}
		a.lost(g)
	}
}

func waitChangeEnds(e *env) {
	c := e.client()
	w := c.watching()
	g := c.acquire(c.request("l"))
	ctx, cancel := context.WithTimeout(e.Context(), e.h.TTL/4)
	defer cancel()
	err := e.within(e.h.TTL/4+10*time.Second, "WaitChange", func() error { return w.WaitChange(ctx, g) })
	if !errors.Is(err, context.DeadlineExceeded) {
		e.Errorf("WaitChange: got %v, want the context's error", err)
	}
	c.renew(g)
}

func pinned(e *env) {
	c := e.client()
	p, ok := c.Backend.(backends.Pinner)
	if !ok {
		e.Skip("no descriptor keeps a grant here")
	}
	g := c.acquire(c.request("l"))
	fds, err := p.Pins(g)
	if err != nil || len(fds) == 0 {
		e.Fatalf("Pins: got %v, %v, want descriptors", fds, err)
	}
	c.release(g, "ok")
	if fds, err := p.Pins(g); !errors.Is(err, backends.ErrLost) {
		e.Errorf("Pins of a released grant: got %v, %v, want ErrLost", fds, err)
	}
}

func noSecret(e *env) {
	c := e.client()
	r := c.request("l")
	g := c.acquire(r)
	errs := []error{}
	_, err := c.try(c.request("l"))
	errs = append(errs, err)
	c.release(g, "ok")
	_, err = c.Renew(e.Context(), g)
	errs = append(errs, err)
	_, err = c.Records().Put(e.Context(), e.namespace, "l", backends.Put{Key: "k"}, &g)
	errs = append(errs, err)
	_, err = c.Acquire(e.cancelled(), r)
	errs = append(errs, err)
	for _, err := range errs {
		if text := fmt.Sprintf("%v %+v %s", err, err, backends.Hint(err)); strings.Contains(text, r.Handle) {
			e.Errorf("the error %q carries the handle", text)
		}
	}
}
