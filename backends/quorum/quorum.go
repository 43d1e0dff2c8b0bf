// Package quorum keeps leases in stores that have transactions over keys, and keys that end together with a session: etcd and
// Consul. What such stores have in common is here, once; a [Store] is what differs.
//
// # The promise
//
// A slot is taken while its key exists, and its key exists while its session does. The store alone ends sessions, by its own
// count of the ttl: no clock of a host decides who holds a lease. Every change of a lease is one transaction that compares what
// it was made from, so that of two that come at once one is made and the other looks again.
//
// # The keys
//
// Below a root, for a lease whose namespace and name have the keys N and L (see [backends.Key]; the empty namespace is `_`):
//
//	lease/N/L/doc            the last term, and of every slot its last holder and how he ended; it outlives sessions
//	lease/N/L/slot/I/grant   slot I is taken; under the holder's session
//	lease/N/L/slot/I/ask     what is asked of the holder; under his session, too
//	lease/N/L/hold/I         slot I stays taken until the end of a hold; under a session of its own, which nobody keeps
//	end/N/L/J                the last 50 ends, J being their count modulo 50
//	queue/N/L/T              somebody waits; under a short session of his own
//	record/N/L/K             a record: when it was written, and its bytes
//	high/N                   the largest term of the leases of a namespace that were deleted because nobody used them
//
// Values are JSON, but for records. A grant carries a digest of its handle, not the handle: who can read the store cannot take a
// lease over.
//
// # The rules
//
//   - The term is max(last + 1, milliseconds of the client's clock), in the transaction that takes the slot. Neither store has a
//     clock that it shows. A client's clock that is wrong makes terms jump forward, never back: a lease that has no doc goes on from the
//     largest term of those that were deleted. Only when the store has lost everything, or somebody deleted keys by hand, a clock that is
//     behind can give a term again.
//
//   - A renewal counts the session anew and reads the slot at the same time; both have to succeed, because a key can be deleted
//     while its session lives.
//
//   - What is changed for a holder is compared by version and by session: after the loss of everything a store counts its versions anew,
//     and a key of before and one of after may have the same.
//
//   - An abandoned acquisition ends its sessions: a transaction that is still on its way then finds none. One that was sent together with
//     its session finds another version of the doc.
//
//   - Who waits has a key in the queue, and watches the one before it: what a handover costs does not grow with the number of
//     those that wait. Who stands first watches the lease. The place is a hint: a run that does not wait may come between.
//
//   - A lease that was not used for 7 days, and has no records, is deleted by the next list of its namespace (`underlease list`), a
//     hundred of them at a time. How long that is says the clock of who lists: one that is ahead makes a lease forget too early how its
//     last runs ended, and nothing else.
//
// # The limits
//
// A renewal asks for the ttl and for what is asked of its holder at the same time: the one that learns that its lease was broken has counted
// the ttl once more. The session is not ended then, for the command may still run: the slot is free when its holder gives it back,
// or that ttl later.
//
// Instants that are shown (since when a lease is held, how old a record is) come from the clocks of clients.
package quorum

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/underlease/underlease/backends"
)

// Store is a key-value store. Its methods return errors of package backends; they may be called at the same time.
type Store interface {
	// Address is for people: a URL without credentials.
	Address() string
	// Check returns a [*backends.ConfigError] for durations that the store cannot keep. Hold may be zero.
	Check(ttl, hold time.Duration) error

	// Read returns the keys that begin with prefix, as they are at one moment after the call began.
	Read(ctx context.Context, prefix string) (View, error)
	// Commit makes all writes if all checks hold, and none otherwise. Version is that of what was written. An error that is
	// [ErrGone] says that a session of the writes has ended, and that nothing was written.
	Commit(ctx context.Context, t Txn) (version int64, ok bool, err error)
	// Await returns nil when something below prefix may have changed after a version, and the context's error when that ends
	// first.
	Await(ctx context.Context, prefix string, after int64) error

	// Name returns the session that [Store.Begin] makes for a seed, or nothing where the store chooses.
	Name(seed string) string
	// Begin makes a session that ends, with its keys, when it was not kept for ttl or a little longer. Where [Store.Name]
	// names it, one that exists already is kept.
	Begin(ctx context.Context, seed string, ttl time.Duration) (Session, error)
	// Keep counts the ttl of a session anew. [ErrGone] says that it has ended.
	Keep(ctx context.Context, id string) error
	// End ends a session and deletes its keys. It returns nil if there is none.
	End(ctx context.Context, id string) error
	// Left returns how long a session lasts unless kept. Stated is what its maker asked for.
	Left(ctx context.Context, id string, stated time.Duration) (time.Duration, error)

	Close() error
}

// Adviser is an optional interface of a [Store] that may know why a grant was lost.
type Adviser interface {
	// Advice returns what a person can do about a loss, or nothing.
	Advice(ctx context.Context) string
}

// Peeker is an optional interface of a [Store] that names sessions, and in which one that turns out not to be needed costs little.
type Peeker interface {
	// Peek is [Store.Read] by what the server that is asked knows. That may be old, and is there sooner.
	Peek(ctx context.Context, prefix string) (View, error)
}

// ErrGone says that there is no such session.
var ErrGone = errors.New("the session has ended")

// Session is what keys live by.
type Session struct {
	ID  string
	TTL time.Duration // granted
}

// Pair is a key.
type Pair struct {
	Key     string
	Value   []byte
	Version int64  // of the last write of this key: it grows over all writes of the store
	Created int64  // of the write that made it
	Session string // empty: none
}

// View is what was read.
type View struct {
	Pairs   []Pair // ordered by key
	Version int64  // of the whole store, or of what was read, at that moment
}

// Txn is a transaction.
type Txn struct {
	Checks []Check
	Writes []Write
}

// Check is a condition: the key has that version. Zero says that there is no such key. With a session it also hangs on that one:
// a store that was started without what it knew counts versions anew, and then another key may have that of this one.
type Check struct {
	Key     string
	Version int64
	Session string
}

// Write puts a key, under a session where one is given, or deletes it.
type Write struct {
	Key     string
	Value   []byte
	Session string
	Delete  bool
}

func (t *Txn) check(key string, version int64) {
	t.Checks = append(t.Checks, Check{Key: key, Version: version})
}

// same is the condition that a key which hangs on a session is the one that was read.
func (t *Txn) same(p Pair) { t.Checks = append(t.Checks, Check{p.Key, p.Version, p.Session}) }

// put replaces an earlier write of the same key: no store takes two in one transaction.
func (t *Txn) put(key string, value []byte, session string) {
	w := Write{Key: key, Value: value, Session: session}
	for i := range t.Writes {
		if t.Writes[i].Key == key {
			t.Writes[i] = w
			return
		}
	}
	t.Writes = append(t.Writes, w)
}

func (t *Txn) delete(key string) { t.Writes = append(t.Writes, Write{Key: key, Delete: true}) }

// Options are how a [Client] uses its store.
type Options struct {
	Root string           // of all keys, without a slash at its end
	Now  func() time.Time // the clock of this host; nil is [time.Now]
}

// Client keeps leases in a store.
type Client struct {
	store   Store
	options Options

	mu      sync.Mutex
	closed  bool
	hands   map[string]hand     // by digest of the handle
	waiting map[string]*waiting // by digest of the handle
	high    map[string]high     // by key; what is not here was not seen yet
}

var (
	_ backends.Backend = (*Client)(nil)
	_ backends.Waiter  = (*Client)(nil)
	_ backends.Leaver  = (*Client)(nil)
	_ backends.Watcher = (*Client)(nil)
	_ backends.Walker  = (*Client)(nil)
)

// New returns a client of a store, which it closes in the end.
func New(s Store, o Options) *Client {
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Client{store: s, options: o, hands: map[string]hand{}, waiting: map[string]*waiting{}, high: map[string]high{}}
}

// hand is what this client knows of one handle. It saves requests and decides nothing.
type hand struct {
	made          time.Time
	ttl           time.Duration
	holds         bool    // a hold was asked for
	loose         bool    // a transaction was sent together with its session, and not answered: it may come yet
	session, hold Session // without an ID: not begun by us

	lease *lease // as it was after our own last write; nil: not known
	slot  int
}

// hand returns what is known of a handle.
func (c *Client) hand(digest string) (h hand, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h, known = c.hands[digest]
	return h, known
}

// knows keeps what a call has learned of a handle.
func (c *Client) knows(digest string, h hand) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hands[digest] = h
}

// newHand returns what is known of a handle, or begins to know it.
func (c *Client) newHand(digest string, req backends.Request) hand {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h, known := c.hands[digest]; known {
		return h
	}
	now := time.Now()
	for d, old := range c.hands { // those of acquisitions that were given up
		if old.lease == nil && now.Sub(old.made) > 2*old.ttl {
			delete(c.hands, d)
		}
	}
	h := hand{made: now, ttl: req.TTL, holds: req.Hold > 0}
	c.hands[digest] = h
	return h
}

func (c *Client) forget(digest string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.hands, digest)
}

// digest names a handle of one lease without giving it away.
func digest(namespace, name, handle string) string {
	sum := sha256.Sum256([]byte(namespace + "\x00" + name + "\x00" + handle))
	return hex.EncodeToString(sum[:16])
}

// Seeds of the sessions of a handle.
func grantSeed(digest string) string { return "grant/" + digest }
func holdSeed(digest string) string  { return "hold/" + digest }
func queueSeed(digest string) string { return "queue/" + digest }

// place is where the keys of a lease are.
type place struct{ root, namespace, name string }

func (c *Client) place(namespace, name string) place { return place{c.options.Root, namespace, name} }

func (c *Client) namespaces(kind, namespace string) string {
	n := "_"
	if namespace != "" {
		n = backends.Key("", namespace)
	}
	return c.options.Root + "/" + kind + "/" + n + "/"
}

func (p place) of(kind string) string {
	n := "_"
	if p.namespace != "" {
		n = backends.Key("", p.namespace)
	}
	return p.root + "/" + kind + "/" + n + "/" + backends.Key(p.namespace, p.name) + "/"
}

// high is the key of the mark of the namespace.
func (p place) high() string {
	n := "_"
	if p.namespace != "" {
		n = backends.Key("", p.namespace)
	}
	return p.root + "/high/" + n
}

func (p place) lease() string      { return p.of("lease") }
func (p place) doc() string        { return p.lease() + "doc" }
func (p place) slot(i int) string  { return p.lease() + "slot/" + strconv.Itoa(i) + "/" }
func (p place) grant(i int) string { return p.slot(i) + "grant" }
func (p place) ask(i int) string   { return p.slot(i) + "ask" }
func (p place) hold(i int) string  { return p.lease() + "hold/" + strconv.Itoa(i) }
func (p place) ends() string       { return p.of("end") }
func (p place) end(count int64) string {
	return p.ends() + strconv.FormatInt(count%backends.HistoryLength, 10)
}
func (p place) queue() string               { return p.of("queue") }
func (p place) ticket(digest string) string { return p.queue() + digest }
func (p place) records() string             { return p.of("record") }
func (p place) record(key string) string    { return p.records() + escape(key) }

// escape makes any key a part of a path: it stays as it is where it could be the key of a lease, and is hexadecimal else.
func escape(key string) string {
	if backends.Key("", key) == key && !strings.HasPrefix(key, escaped) {
		return key
	}
	return escaped + hex.EncodeToString([]byte(key))
}

const escaped = "x-"

func unescape(part string) (string, error) {
	if rest, ok := strings.CutPrefix(part, escaped); ok {
		b, err := hex.DecodeString(rest)
		return string(b), err
	}
	return part, nil
}

// together runs functions at the same time and waits for all.
func together(fs ...func()) {
	var all sync.WaitGroup
	for _, f := range fs[1:] {
		all.Go(f)
	}
	fs[0]()
	all.Wait()
}

// millis is the clock of this host, for terms and for what people see.
func (c *Client) millis() int64 { return c.options.Now().UnixMilli() }

// Close implements [backends.Backend].
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	return c.store.Close()
}
