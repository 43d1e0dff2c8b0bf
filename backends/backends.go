// Package backends is the contract between the runner and the stores that keep leases.
//
// A [Backend] is a set of functions over a [Grant], which is a plain value. It tries once, never renews by itself,
// keeps no deadline and leaves no goroutine behind: retrying, waiting and the deadline belong to the runner, and are
// written once for every store.
//
// # Rules for every backend
//
//   - Only the store's clock or the store's sessions decide expiry. Hosts whose clocks are an hour apart must not run
//     the same lease twice.
//   - The term of a new grant is max(last term + 1, the store's clock in milliseconds): one counter per lease, shared
//     by its slots. It therefore grows over release, expiry, crash, deletion and restart.
//   - Acquire, Renew and Release compare the handle. A renewal never brings a dead lease back, and a release spares
//     every later holder.
//   - An Acquire whose answer was lost is settled by its handle: the next Acquire with the same handle finds the grant
//     and renews it, with the same term; or a Release that carries only the handle abandons it.
//   - Credentials never reach an error, a log line or a [Store.Address].
//
// The conformance suite in package backendtest holds every backend to these rules on its real server.
package backends

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/url"
	"strconv"
	"time"
)

// Term is the fencing number of a grant. It is positive and only grows for a lease name: over release, expiry, crash,
// deletion, restart and fail-over of the store, because it is never below the store's clock in milliseconds.
type Term int64

// MaxTerm is the largest term that a backend may hand out. It is 2^53-1, the largest integer that every JSON reader
// and every Lua number holds exactly; milliseconds reach it in the year 287396.
const MaxTerm Term = 1<<53 - 1

// Next returns the term that follows t at a store whose clock says now, in milliseconds since 1970 (UTC).
// It returns [ErrBroken] where no larger term is left.
func (t Term) Next(nowMillis int64) (Term, error) {
	if t >= MaxTerm || nowMillis > int64(MaxTerm) {
		return 0, Broken(nil, "the term %d leaves no room for a larger one", t)
	}
	return max(t+1, Term(nowMillis)), nil
}

// String returns the term in decimal.
func (t Term) String() string { return strconv.FormatInt(int64(t), 10) }

// Request is what one acquisition asks for.
type Request struct {
	Namespace, Lease string // valid by [CheckNamespace] and [CheckLease]
	Holder           string // a label for people; it proves nothing
	Handle           string // secret, from [NewHandle]; retries of one acquisition carry the same one
	Slots            int    // at least 1; a contender looks only at the slots 0..Slots-1

	// TTL is how long the store keeps the grant without a renewal. Zero is legal only for a store that [Scheme.Endless]
	// marks: the grant then lasts until it is released or its processes are gone.
	TTL time.Duration

	// Hold is how long the slot stays taken at least, counted from the acquisition by the store, whatever becomes of
	// the holder. It is written at Acquire, and it does not lengthen the grant's validity. Zero asks for none.
	Hold time.Duration
}

// Grant is what the store promised.
type Grant struct {
	Namespace, Lease, Holder, Handle string

	Slot     int
	Term     Term
	TTL      time.Duration // counted by the store from when it handled the request; zero where it never expires
	Previous End           // how the last holder of this slot ended; Outcome is [OutcomeUnknown] if it never said
	Ask      *Ask          // somebody asks this holder to stop, or nil; carried by Acquire and Renew
}

// LogValue hides the handle.
func (g Grant) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("lease", Display(g.Namespace, g.Lease)),
		slog.Int("slot", g.Slot),
		slog.Int64("term", int64(g.Term)),
	)
}

// The outcomes that a backend itself has to know. Every other outcome is a word of the runner.
const (
	OutcomeNone       = "none"        // nobody held this slot before
	OutcomeUnknown    = "unknown"     // the last holder never said how it ended
	OutcomeNotStarted = "not-started" // the command was never forked: the hold is dropped, for it counts from a start
)

// End is how a holder ended.
type End struct {
	Outcome  string        // one of the words of the runner, such as "ok", "failed", "lost-expired"
	ExitCode int           // as a shell would see it: 0 to 255
	Took     time.Duration // from the start of the command to the end of its tree
	Puts     []Put         // records written in the same atomic step as the release
}

// Ask is a request to a holder to finish. It sees it at its next renewal.
type Ask struct {
	Kind   AskKind
	Reason string    // for people; may be empty
	By     string    // a label for people: who asks
	At     time.Time // by the store's clock, or zero where it has none
}

// AskKind says what is asked of a holder.
type AskKind string

const (
	// AskStop asks the holder to drain and to release.
	AskStop AskKind = "stop"
	// AskBreak says that further renewals are refused. The slot is free at its store-side expiry or at its release.
	AskBreak AskKind = "break"
)

// SlotState is one slot of a lease as the store shows it. It never carries the handle.
type SlotState struct {
	Slot   int
	Holder string // empty when free
	Term   Term   // of the present or, when free, the last holder
	Since  time.Time
	Held   bool          // a grant is in force
	Kept   bool          // not held, but taken until the end of a hold
	Left   time.Duration // until the slot is free unless renewed; [Forever] where only its holder's end frees it
	Ask    *Ask
	Last   End // how the last holder that ended did so
}

// Taken reports whether a contender would find the slot taken.
func (s SlotState) Taken() bool { return s.Held || s.Kept }

// Forever is the time left of a grant that does not run out by itself.
const Forever time.Duration = math.MaxInt64

// Past is one entry of a lease's history.
type Past struct {
	Slot   int
	Term   Term
	Holder string
	Since  time.Time
	End    End
}

// HistoryLength is how many ends stay with a lease.
const HistoryLength = 50

// State is a lease as the store shows it.
type State struct {
	Namespace, Lease string
	Slots            []SlotState // those that were ever used, in order
	Waiters          *int        // how many stand in the store's queue; nil where it has none, or does not know
	History          []Past      // newest first, at most [HistoryLength]
}

// Backend is a store's client. Its methods may be called at the same time from several goroutines; each tries once,
// returns soon after its context ends, and returns an error that is one of [ErrBusy], [ErrLost], [ErrUnavailable],
// [ErrDenied] and [ErrBroken] by [errors.Is], or none. An error that is none of these counts as unavailable.
type Backend interface {
	// Acquire asks once for a slot. It is idempotent per handle: finding it, it renews the grant and returns it with
	// the same term. [*BusyError] tells who holds the lease and what is left.
	Acquire(ctx context.Context, req Request) (Grant, error)

	// Renew counts the ttl anew, in one request. [ErrLost] says that the grant is not in force any more; no other error
	// says so. Where the store has no expiry it looks whether the grant still stands.
	Renew(ctx context.Context, g Grant) (Grant, error)

	// Release ends the grant in one request and writes how it ended. It returns nil if the grant has ended already, and
	// it spares later holders. A grant with only Namespace, Lease and Handle set abandons whatever carries that handle.
	// An abandon, and an end whose outcome is [OutcomeNotStarted], also drop the hold.
	Release(ctx context.Context, g Grant, end End) error

	// Inspect returns what the store shows about one lease. A lease that was never used has no slots.
	Inspect(ctx context.Context, namespace, lease string) (State, error)

	// List returns the leases of a namespace, ordered by name, without their history. Where some cannot be shown it returns
	// the others together with the error.
	List(ctx context.Context, namespace string) ([]State, error)

	// Ask leaves a request for the holder of a slot, or does nothing when it is free.
	Ask(ctx context.Context, namespace, lease string, slot int, a Ask) error

	// Break refuses further renewals of the slot's grant: the slot is free at its store-side expiry or its release. With
	// now it is free at once, and the old command may still run.
	Break(ctx context.Context, namespace, lease string, slot int, reason string, now bool) error

	// Records returns the durable records kept with the leases.
	Records() Records

	// Close frees what the client holds. Grants stay as they are in the store.
	Close() error
}

// Record is a durable value that outlives the lease: a marker, a count, the last success.
type Record struct {
	Namespace, Lease, Key string

	Value   []byte
	Version int64         // positive; grows with every write of this key
	Age     time.Duration // since it was written, by the store's clock; below zero where that was set back since; never so in a store without a clock
}

// Put is a write of one record of a lease.
type Put struct {
	Key   string // 1 to 200 bytes, by the rule of lease names
	Value []byte // at most [MaxRecord]

	// Version is the version that must be there: zero says that there must be none, and [AnyVersion] does not compare.
	Version int64
}

// AnyVersion as [Put.Version] writes whatever is there.
const AnyVersion int64 = -1

// MaxRecord is the largest value of a record in bytes.
const MaxRecord = 64 << 10

// Records are the durable records kept with leases. None of them expires. Every method names the lease that the record
// belongs to, which need not be held.
type Records interface {
	// Get returns the record. [ErrNoRecord] says that there is none.
	Get(ctx context.Context, namespace, lease, key string) (Record, error)
	// Put writes p and returns the new version. [ErrConflict] says that another version is there. With while set it
	// writes only while that grant is in force, atomically, and returns [ErrLost] where it is not.
	Put(ctx context.Context, namespace, lease string, p Put, while *Grant) (version int64, err error)
	// List returns all records of a lease, ordered by key.
	List(ctx context.Context, namespace, lease string) ([]Record, error)
	// Delete removes the record. It returns nil if there is none.
	Delete(ctx context.Context, namespace, lease, key string) error
}

// Waiter is an optional interface of a [Backend]: a hint that saves polling, never a decision. It may keep a place in
// the store's queue while the call lasts.
type Waiter interface {
	// WaitFree returns nil when the lease may have become free for req, and the context's error when that ends first.
	// It may return too early: the caller tries to acquire either way. It looks by itself now and then, within a few seconds, so that
	// nothing that it was not told keeps it waiting.
	WaitFree(ctx context.Context, req Request) error
}

// Leaver is a [Waiter] whose places in the queue last for a while without those who wait.
type Leaver interface {
	// Leave gives up the place that [Waiter.WaitFree] has taken for req's handle, if there is one.
	Leave(ctx context.Context, req Request) error
}

// Watcher is an optional interface of a [Backend]: a hint that the grant may have been taken away or that somebody asks
// its holder to stop. The caller renews at once and decides by the answer.
type Watcher interface {
	// WaitChange returns nil when something may have changed, and the context's error when that ends first.
	WaitChange(ctx context.Context, g Grant) error
}

// Walker is an optional interface of a [Backend] that can show the leases of a namespace one after the other, for where there
// are more than one wants to wait for.
type Walker interface {
	// Walk calls show for each lease that List returns, in the same order, as soon as it has looked at it. One that cannot be
	// shown comes with its error, and with its name where that is known, and the walk goes on. It ends when show returns
	// false, which is no error. Nothing in the store is locked while show runs, and nothing is made or changed there, but that what
	// is kept no longer may be removed.
	Walk(ctx context.Context, namespace string, show func(State, error) bool) error
}

// Collect is List of a [Backend] for its [Walker]. Leases that cannot be shown are in the error alone.
func Collect(ctx context.Context, w Walker, namespace string) (states []State, err error) {
	var failed []error
	err = w.Walk(ctx, namespace, func(s State, err error) bool {
		if err != nil {
			failed = append(failed, err)
		} else {
			states = append(states, s)
		}
		return true
	})
	switch {
	case err != nil || len(failed) == 0:
		return states, err
	case len(failed) == 1:
		return states, failed[0]
	}
	return states, errors.Join(failed...)
}

// Pinner is an optional interface of a [Backend] whose grant lives as long as descriptors of this process do.
type Pinner interface {
	// Pins returns the descriptors that keep the grant. A second process that holds copies of them keeps the grant when
	// this one dies. They stay owned by the backend.
	Pins(g Grant) ([]int, error)
}

// Scheme is how one kind of store is opened.
type Scheme struct {
	// Endless marks a store whose grants need no ttl, because the kernel ends them together with their processes.
	Endless bool

	// Open checks the URL and returns a client. It may check that the store can work here at all, but it makes no network
	// traffic: a server that is away is found by the first call. A URL that cannot work is a [*ConfigError].
	Open func(ctx context.Context, u *url.URL) (*Store, error)

	// Schema returns the SQL that makes what the store needs, for people whose role may not make it. It asks nothing of the
	// server, and what it returns may be run again. Nil for stores that need nothing to be made.
	Schema func(u *url.URL) (string, error)

	// Apply makes what the store needs and brings it up to date, and returns what it did, in words. Nil with Schema.
	Apply func(ctx context.Context, u *url.URL) (string, error)
}

// Store is an opened backend and what has to be known about it.
type Store struct {
	Backend
	Scheme   string // "file"
	Address  string // for people and reports: a URL without credentials
	Identity string // equal for two URLs that name one store, as far as that can be told without asking it
	Endless  bool   // see [Scheme.Endless]
}
