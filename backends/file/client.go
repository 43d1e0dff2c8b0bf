package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
)

// Client is a client of one directory. It holds the locks of its grants: closing it ends them, as the end of the process
// does, unless another process has copies of their descriptors ([Client.Pins]).
type Client struct {
	dir     string
	network bool               // on a network file system, where nothing notifies
	sync    func(fd int) error // fsync
	ordered bool               // see [ordered]
	probe   int                // how files are opened to be locked only
	clock   clock
	trust   *trust // whether directories may be used; nil for all

	mu   sync.Mutex
	held map[key]*holding
}

// key names a grant: one handle may serve for several leases.
type key struct{ dir, handle string }

// holding is a grant of this client.
type holding struct {
	dir   string // of the lease
	fd    int
	id    inode // of the slot's file; nobody else can get the number while fd is open
	grant backends.Grant
}

var (
	_ backends.Backend = (*Client)(nil)
	_ backends.Waiter  = (*Client)(nil)
	_ backends.Walker  = (*Client)(nil)
	_ backends.Watcher = (*Client)(nil)
	_ backends.Pinner  = (*Client)(nil)
)

func newClient(dir string, network, ordered bool) *Client {
	c := &Client{dir: dir, network: network, ordered: ordered, sync: unix.Fsync, probe: unix.O_RDONLY, clock: hostClock(), held: map[key]*holding{}}
	if network {
		// Source: flock(2), NOTES: on NFS an exclusive lock needs a descriptor that can write.
		c.probe = unix.O_RDWR
	}
	return c
}

// safe refuses a directory that others could change, see [trust].
func (c *Client) safe(dir string) error {
	if c.trust == nil {
		return nil
	}
	return c.trust.check(dir)
}

func isNotExist(err error) bool { return errors.Is(err, unix.ENOENT) }

// Acquire implements [backends.Backend]. A handle that this client does not hold is a new acquisition: the grant it had
// ended with its descriptor.
func (c *Client) Acquire(ctx context.Context, req backends.Request) (backends.Grant, error) {
	if err := req.Check(true); err != nil {
		return backends.Grant{}, err
	}
	self() // asks /proc once, and not while others wait for mu
	for {
		g, done, err := c.acquire(ctx, req)
		if done || err != nil {
			return g, err
		}
	}
}

// acquire tries once. It is not done where the directory was deleted under it.
func (c *Client) acquire(ctx context.Context, req backends.Request) (g backends.Grant, done bool, err error) {
	d, err := c.enter(ctx, req.Namespace, req.Lease, toMake)
	if err != nil {
		return g, false, err
	}
	defer d.leave()
	if h := c.holds(d.dir, req.Handle); h != nil {
		// Before anything new is asked for: the answer to an earlier attempt was lost.
		g, err := h.look()
		if err == nil || !errors.Is(err, backends.ErrLost) || h.broken(d.rec) {
			return g, true, err
		}
		c.drop(h)
	}
	rec := d.record()
	busy := busiest{c: c}
	for number := range req.Slots {
		if s := rec.slot(number); s != nil {
			if left := c.clock.left(s); left > 0 {
				held, id, err := d.locked(number)
				if err != nil {
					return g, false, err
				}
				busy.add(s, held, id, number)
				continue
			}
		}
		fd, id, taken, err := d.take(number)
		if err != nil {
			return g, false, err
		}
		if taken {
			busy.add(rec.slot(number), true, id, number)
			continue
		}
		g, err := d.grant(ctx, req, number)
		standing := true
		if err == nil {
			standing, err = d.standing()
		}
		if err != nil || !standing {
			shut(fd)
			return g, false, err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.held[key{d.dir, req.Handle}] = &holding{dir: d.dir, fd: fd, id: id, grant: g}
		return g, true, nil
	}
	return g, false, busy.error(req)
}

// grant writes the new holder of a slot whose lock we have.
func (d *door) grant(ctx context.Context, req backends.Request, number int) (backends.Grant, error) {
	c, rec := d.c, d.rec
	last := rec.last
	if last == 0 {
		// Nothing is known: the record may have been deleted in this very millisecond, with a term of the same.
		last = backends.Term(c.clock.wall() / int64(time.Millisecond))
	}
	term, err := c.next(ctx, last)
	if err != nil {
		return backends.Grant{}, err
	}
	s := rec.make(number)
	rec.settle(s)
	previous := s.end
	if previous.Outcome == "" {
		previous.Outcome = backends.OutcomeNone
	}
	rec.last = term
	*s = slot{
		number: number, term: term, since: c.clock.wall(), ttl: req.TTL, handle: req.Handle, holder: req.Holder,
		kept: c.clock.hold(req.Hold), by: self(), end: s.end,
	}
	if err := d.write(true); err != nil {
		return backends.Grant{}, err
	}
	return backends.Grant{
		Namespace: req.Namespace, Lease: req.Lease, Holder: req.Holder, Handle: req.Handle,
		Slot: number, Term: term, TTL: req.TTL, Previous: previous,
	}, nil
}

// next returns the term after last. It waits until the clock has passed last, so that the clock alone is above every
// term, also when the record is gone. That takes less than a millisecond unless the clock was set back, and then the
// terms go on without it.
func (c *Client) next(ctx context.Context, last backends.Term) (backends.Term, error) {
	const most = 50
	for {
		wall := c.clock.wall()
		now := wall / int64(time.Millisecond)
		if ahead := int64(last) - now; ahead < 0 || ahead > most {
			return last.Next(now)
		}
		if wait := time.Duration((int64(last)+1)*int64(time.Millisecond) - wall); !pause(ctx, min(wait, 900*time.Microsecond)) {
			return 0, backends.Unavailable(ctx.Err(), "%s", c.dir)
		}
	}
}

// busiest collects the slots that are taken and keeps the one that will be free first.
type busiest struct {
	c     *Client
	found bool
	err   backends.BusyError
}

func (b *busiest) add(s *slot, held bool, id inode, number int) {
	e := backends.BusyError{Slot: number, Left: backends.Forever}
	if s != nil {
		e.Holder, e.Term, e.Since = s.holder, s.term, time.Unix(0, s.since)
		e.Left = b.c.left(s, held)
		e.Kept = !held
	}
	if held && (s == nil || s.handle == "") {
		e.Holder = stranger(id)
	}
	if !b.found || e.Left < b.err.Left {
		b.found, b.err = true, e
	}
}

func (b *busiest) error(req backends.Request) error {
	b.err.Namespace, b.err.Lease = req.Namespace, req.Lease
	return &b.err
}

// stranger names whoever locked a slot without a word in the record: it was deleted, or it is not one of us.
func stranger(id inode) string {
	if pid := locker(id); pid != 0 {
		return "a process that the record does not name (pid " + strconv.Itoa(pid) + ")"
	}
	return "a process that the record does not name"
}

// left returns how long a taken slot stays so unless renewed.
func (c *Client) left(s *slot, held bool) time.Duration {
	kept := c.clock.left(s)
	switch {
	case !held:
		return kept
	case s.ttl == 0 || s.handle == "":
		return backends.Forever
	default:
		// Renewals are not written, so that the whole ttl may be left.
		return max(s.ttl, kept)
	}
}

func (c *Client) holds(dir, handle string) *holding {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.held[key{dir, handle}]
}

// drop closes a grant's lock, once.
func (c *Client) drop(h *holding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := (key{h.dir, h.grant.Handle}); c.held[k] == h {
		delete(c.held, k)
		shut(h.fd)
	}
}

// Renew implements [backends.Backend]. It writes nothing: it looks whether the slot's file is still ours and whether the
// record still names us.
func (c *Client) Renew(ctx context.Context, g backends.Grant) (backends.Grant, error) {
	if err := ctx.Err(); err != nil {
		return backends.Grant{}, backends.Unavailable(err, "%s", c.dir)
	}
	h := c.holds(c.lease(g.Namespace, g.Lease), g.Handle)
	if h == nil {
		return backends.Grant{}, backends.Lost(nil, "the slot's lock is no longer held by this process")
	}
	return h.look()
}

// look returns the grant with what is asked of its holder, or [backends.ErrLost].
func (h *holding) look() (backends.Grant, error) {
	path := slotPath(h.dir, h.grant.Slot)
	there, err := at(path)
	if err != nil {
		return backends.Grant{}, classify(err)
	}
	if there != h.id {
		how := "replaced"
		if there == (inode{}) {
			how = "deleted"
		}
		return backends.Grant{}, backends.Lost(nil, "%s was %s", path, how)
	}
	path = h.dir + "/rec"
	rec, err := readRecord(path)
	switch {
	case errors.Is(err, backends.ErrBroken):
		return backends.Grant{}, backends.Lost(nil, "%v", err)
	case err != nil:
		return backends.Grant{}, err
	case rec == nil:
		return backends.Grant{}, backends.Lost(nil, "%s was deleted", path)
	}
	s := rec.carrying(h.grant.Handle)
	switch {
	case s == nil || s.number != h.grant.Slot || s.term != h.grant.Term ||
		rec.namespace != h.grant.Namespace || rec.lease != h.grant.Lease:
		return backends.Grant{}, backends.Lost(nil, "%s names this holder no more", path)
	case s.ask.kind == string(backends.AskBreak):
		return backends.Grant{}, backends.Lost(nil, "broken by %s", s.ask.text())
	}
	g := h.grant
	g.Ask = s.ask.request()
	return g, nil
}

// broken reports whether the slot is still ours and its renewals are refused.
func (h *holding) broken(r *record) bool {
	if r == nil {
		return false
	}
	s := r.carrying(h.grant.Handle)
	there, err := at(slotPath(h.dir, h.grant.Slot))
	return err == nil && there == h.id && s != nil && s.ask.kind == string(backends.AskBreak)
}

func (a ask) text() string {
	by := a.by
	if by == "" {
		by = "an operator"
	}
	if a.reason != "" {
		return by + ": " + a.reason
	}
	return by
}

func (a ask) request() *backends.Ask {
	if a == (ask{}) {
		return nil
	}
	return &backends.Ask{Kind: backends.AskKind(a.kind), Reason: a.reason, By: a.by, At: time.Unix(0, a.at)}
}

// Release implements [backends.Backend]. Where the end cannot be written the lock stays, so that it can be tried again;
// it ends with the process.
func (c *Client) Release(ctx context.Context, g backends.Grant, end backends.End) error {
	if err := backends.CheckNames(g.Namespace, g.Lease); err != nil {
		return err
	}
	for _, p := range end.Puts {
		if err := p.Check(); err != nil {
			return err
		}
	}
	freed, err := c.release(ctx, g, end)
	if freed {
		c.prune(ctx, c.lease(g.Namespace, g.Lease))
	}
	return err
}

func (c *Client) release(ctx context.Context, g backends.Grant, end backends.End) (freed bool, err error) {
	h := c.holds(c.lease(g.Namespace, g.Lease), g.Handle)
	d, err := c.enter(ctx, g.Namespace, g.Lease, toChange)
	if d != nil {
		defer d.leave()
	}
	if err != nil {
		if h != nil && errors.Is(err, backends.ErrBroken) {
			c.drop(h) // there is nothing left that could be released
		}
		return false, err
	}
	if h != nil {
		defer func() {
			if err == nil {
				c.drop(h) // before mu, so that whoever is next finds both free
			}
		}()
		there, err := at(slotPath(h.dir, h.grant.Slot))
		if err != nil {
			return false, classify(err)
		}
		if there != h.id {
			return false, nil // ended already; the slot is another's
		}
	}
	if d == nil || d.rec == nil {
		return false, nil
	}
	abandon := g.Term == 0
	s := d.rec.carrying(g.Handle)
	if s == nil || !abandon && (s.term != g.Term || s.number != g.Slot) {
		return false, nil
	}
	if h == nil {
		locked, _, err := d.locked(s.number)
		if err != nil || !locked && !abandon {
			return false, err // its process is gone, and the grant with it
		}
	}
	for _, p := range end.Puts {
		if _, err := d.rec.put(p, c.clock.wall()); err != nil {
			return false, fmt.Errorf("%w: %q of %q", err, p.Key, backends.Display(g.Namespace, g.Lease))
		}
	}
	if abandon && end.Outcome == "" {
		end.Outcome = backends.OutcomeNotStarted
	}
	d.rec.finish(s, end)
	if abandon || end.Outcome == backends.OutcomeNotStarted {
		s.kept = kept{}
	}
	return true, d.write(len(end.Puts) > 0)
}

// Inspect implements [backends.Backend].
func (c *Client) Inspect(ctx context.Context, namespace, lease string) (backends.State, error) {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return backends.State{}, err
	}
	state := backends.State{Namespace: namespace, Lease: lease}
	d, err := c.enter(ctx, namespace, lease, toLook)
	if err == nil && d == nil {
		if d, err = c.peek(namespace, lease); err == nil && d != nil {
			return d.state()
		}
	}
	if err != nil || d == nil {
		return state, err
	}
	defer d.leave()
	return d.state()
}

// state returns what there is to show. It changes nothing on the disk.
func (d *door) state() (backends.State, error) {
	state := backends.State{Namespace: d.namespace, Lease: d.name}
	rec := d.record()
	if err := d.strangers(rec); err != nil {
		return state, err
	}
	for i := range rec.slots {
		s := &rec.slots[i]
		held, id, err := d.locked(s.number)
		if err != nil {
			return state, err
		}
		if !held {
			rec.settle(s)
		}
		left := d.c.left(s, held)
		shown := backends.SlotState{Slot: s.number, Term: s.term, Held: held, Kept: !held && left > 0, Last: s.end}
		if shown.Last.Outcome == "" {
			shown.Last.Outcome = backends.OutcomeNone
		}
		if shown.Taken() {
			shown.Holder, shown.Since, shown.Left = s.holder, time.Unix(0, s.since), left
		}
		if held {
			shown.Ask = s.ask.request()
			if s.handle == "" {
				shown.Holder, shown.Since = stranger(id), time.Time{}
			}
		}
		state.Slots = append(state.Slots, shown)
	}
	state.History = slices.Clone(rec.past)
	return state, nil
}

// strangers adds the slots that are locked although the record does not know them.
func (d *door) strangers(rec *record) error {
	entries, err := os.ReadDir(d.dir)
	if err != nil && !isNotExist(err) {
		return classify(err)
	}
	for _, e := range entries {
		text, ok := strings.CutPrefix(e.Name(), "slot.")
		number, err := strconv.Atoi(text)
		if !ok || err != nil || number < 0 || rec.slot(number) != nil {
			continue
		}
		if busy, _, err := d.locked(number); err != nil {
			return err
		} else if busy {
			rec.make(number)
		}
	}
	return nil
}

// List implements [backends.Backend].
func (c *Client) List(ctx context.Context, namespace string) ([]backends.State, error) {
	return backends.Collect(ctx, c, namespace)
}

// longestLook is how long Walk waits for the mu of one lease: whoever stops in there must not hide all the others.
const longestLook = time.Second

// Walk implements [backends.Walker]. It holds no more than names: each lease is entered, read and left before the next one.
func (c *Client) Walk(ctx context.Context, namespace string, show func(backends.State, error) bool) error {
	if err := backends.CheckNamespace(namespace); err != nil {
		return &backends.ConfigError{Text: err.Error()}
	}
	names, err := c.names(namespace)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := ctx.Err(); err != nil {
			return backends.Unavailable(err, "%s", c.dir)
		}
		state := backends.State{Namespace: namespace, Lease: n.lease}
		err := n.err
		if err == nil {
			state, err = c.glance(ctx, namespace, n.lease)
			if err == nil && state.Lease == "" {
				continue // removed meanwhile, or never held
			}
		}
		if !show(state, err) {
			return nil
		}
	}
	return nil
}

// named is a lease of a directory, or why it cannot be told which one.
type named struct {
	lease string
	err   error
}

// names returns the leases of a namespace in order. A name that cannot be its own key stands in the record alone.
func (c *Client) names(namespace string) ([]named, error) {
	dir := filepath.Join(c.dir, "v1", namespaceKey(namespace))
	if err := c.safe(dir); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if isNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, classify(err)
	}
	var all []named
	for _, e := range entries {
		key, ok := strings.CutSuffix(e.Name(), suffix)
		switch {
		case !ok || strings.HasPrefix(key, "."):
		case backends.Key(namespace, key) == key:
			all = append(all, named{lease: key})
		default:
			path := filepath.Join(dir, e.Name())
			rec, err := readRecord(path + "/rec")
			if err == nil && rec != nil && (rec.namespace != namespace || c.lease(namespace, rec.lease) != path) {
				err = rec.belongs(path+"/rec", namespace, "")
			}
			if err != nil {
				all = append(all, named{err: err})
			} else if rec != nil {
				all = append(all, named{lease: rec.lease})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b named) int { return strings.Compare(a.lease, b.lease) })
	return all, nil
}

// glance returns the state of one lease of many. It has no name where nothing is known of the lease.
func (c *Client) glance(ctx context.Context, namespace, lease string) (backends.State, error) {
	ctx, cancel := context.WithTimeout(ctx, longestLook)
	defer cancel()
	state, err := c.Inspect(ctx, namespace, lease)
	known := len(state.Slots) > 0 || len(state.History) > 0
	state.History = nil
	if err == nil && !known {
		rec, err := readRecord(c.lease(namespace, lease) + "/rec")
		if err != nil || rec == nil {
			return backends.State{}, err
		}
	}
	return state, err
}

// Ask implements [backends.Backend].
func (c *Client) Ask(ctx context.Context, namespace, lease string, number int, a backends.Ask) error {
	return c.mark(ctx, namespace, lease, number, ask{kind: string(a.Kind), reason: a.Reason, by: a.By}, false)
}

// Break implements [backends.Backend]. With now the slot gets a new file, so that the lock on the old one excludes nobody
// any more. The holder sees that at once and kills its command; where the holder's process is stopped and cannot see it,
// it is killed, and its guardian then ends the command. Nothing is killed whose identity the record does not prove.
func (c *Client) Break(ctx context.Context, namespace, lease string, number int, reason string, now bool) error {
	return c.mark(ctx, namespace, lease, number, ask{kind: string(backends.AskBreak), reason: reason}, now)
}

// mark writes what is asked of the holder of a slot.
func (c *Client) mark(ctx context.Context, namespace, lease string, number int, a ask, now bool) error {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return err
	}
	d, err := c.enter(ctx, namespace, lease, toChange)
	if err != nil || d == nil {
		return err
	}
	defer d.leave()
	s := d.record().slot(number)
	locked, _, err := d.locked(number)
	if err != nil {
		return err
	}
	if now {
		return d.free(s, number, locked)
	}
	if s == nil || s.handle == "" || !locked || s.ask.kind == string(backends.AskBreak) {
		return nil
	}
	a.at = c.clock.wall()
	s.ask = a
	return d.write(false)
}

// free takes a slot from its holder and drops its hold.
func (d *door) free(s *slot, number int, locked bool) error {
	var by process
	if s != nil && (s.handle != "" || s.kept != (kept{})) {
		by = s.by
		d.rec.settle(s)
		s.kept = kept{}
		if err := d.write(true); err != nil {
			return err
		}
	}
	if !locked {
		return nil
	}
	path := slotPath(d.dir, number)
	if err := again(func() error { return unix.Unlink(path) }); err != nil && !isNotExist(err) {
		return classify(fault("unlink", path, err))
	}
	by.endIfStopped()
	return nil
}

// Records implements [backends.Backend].
func (c *Client) Records() backends.Records { return values{c} }

// Pins implements [backends.Pinner]: the descriptor of the slot's lock.
func (c *Client) Pins(g backends.Grant) ([]int, error) {
	h := c.holds(c.lease(g.Namespace, g.Lease), g.Handle)
	if h == nil {
		return nil, backends.Lost(nil, "the slot's lock is no longer held by this process")
	}
	return []int{h.fd}, nil
}

// Close implements [backends.Backend]. It closes the locks of all grants: they end, unless they are pinned elsewhere.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, h := range c.held {
		delete(c.held, k)
		shut(h.fd)
	}
	return nil
}
