// Package table keeps leases in a database, one row each: what stores of this kind have in common, whatever their SQL.
//
// # The promise
//
// To acquire, to renew and to release a lease is one statement each, which commits by itself: no transaction stays open while
// this process is stopped, and no lock outlives a statement. The database's clock alone decides expiry. Whatever a statement
// did before its answer was lost, the next attempt with the same handle finds and continues.
//
// # How
//
// A row has the lease's names as bytes, the last term, and three documents in JSON: slots, ends and records. A [Database] brings
// the statements that have to be one; everything else (asks, breaks, records, an abandon, a release with records) is read,
// changed here and written under the condition that the row is still at the same revision, again and again until it is.
// Instants are whole numbers of milliseconds since 1970, so that no session's time zone takes part.
//
//	slots    a list by number, of objects: h the handle's digest, w holder, t term, b since, l ttl, e expiry, d hold, k kept
//	         until, p how the last holder ended, q what is asked
//	ends     the last 66, newest first, 50 of which are shown; h is the digest of a handle that was given back
//	records  by their key in hexadecimal: version, when it was written, bytes in base64
//
// A statement whose sender has gone may wait for the row in the server and come to its turn later. So who gives up an acquisition whose
// answer did not come writes the handle's digest into the row, as a release does: a late acquisition either comes before that and is
// found, or comes after it and gets nothing.
//
// A job may write the marker of a gate in its own transaction, by a function of the schema. It does not touch the lease's row for
// that, which would keep renewals waiting until it commits: it writes a row of another table, which whoever looks for the marker
// moves into the lease's row.
//
// A table that is not there is created by the first statement that has something to write; nobody looks before. A row goes when eight
// whole days have passed since its last use, by the release of a lease that was new; a row with records stays.
//
// # The limits
//
// A server's clock that is set forward frees leases early by as much; set back, it delays them by one ttl at most. What an
// operator deletes, or a fail-over forgets, is free at once; the old holder is told by its next renewal.
package table

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
)

// Form is what the rows look like. A row of another one was written by another version, and is left alone.
const Form = 1

// Never is [Row.Gone] of a row that is not pruned.
const Never = 1<<31 - 1

// Ends is how many ends a row keeps: those of the history, and some for handles that were given back without a grant.
const Ends = backends.HistoryLength + 16

const (
	dayMillis     = 24 * 3600 * 1000
	retentionDays = 8 // of which the first may be almost over
)

// Gone returns the day (UTC, since 1970) after which a row may go that was taken until then.
func Gone(until int64) int64 { return until/dayMillis + retentionDays }

// Key names a lease.
type Key struct{ Namespace, Lease string }

// Row is a lease's row.
type Row struct {
	Key

	Micros int64 // the database's clock when it answered, in microseconds
	Form   int64

	Revision int64 // grows with every write
	Term     int64 // the last one
	Version  int64 // the last one of a record

	Slots   []byte // JSON
	Ends    []byte // JSON; nil where it was not asked for
	Records []byte // JSON; nil where it was not asked for
}

// Take is what an acquisition writes.
type Take struct {
	Key
	Digest, Holder string
	Slots          int
	TTL, Hold      int64 // milliseconds
}

// Held is a grant as a row knows it.
type Held struct {
	Key
	Slot   int
	Digest string
	Term   int64
}

// Change is what a row becomes. Nil documents stay as they are.
type Change struct {
	Revision int64 // that has to be there
	Before   int64 // the clock has to be before; zero: no matter
	Version  int64
	Gone     int64
	Slots    []byte
	Ends     []byte
	Records  []byte
	Wake     bool // waiters are told that a slot may be free
}

// Mark is a marker that a job has written in its own transaction.
type Mark struct {
	Version, Written int64  // as those of a record
	Value            []byte // of the form that package runner gives the record of a gate
}

// MarkerKey is the key of the record that a gate writes, under which a [Mark] counts.
const MarkerKey = "marker"

// Database is one kind of database. Every method but Create sends one statement, or one request of several, and commits. Its
// errors are those of the library.
type Database interface {
	// Acquire takes the first slot that is free, or renews the one that carries the digest, and returns the row: with the
	// grant in it or what is in its way. Nil and a row that explains nothing say that it has to be asked for again. A digest
	// that the ends have as given back takes no slot, and is looked for under the row's lock.
	Acquire(ctx context.Context, t Take) (*Row, error)
	// Renew returns ok if the grant was in force and counts anew, and asked if something is asked of its holder.
	Renew(ctx context.Context, h Held) (ok, asked bool, err error)
	// Release ends a grant that is in force, with the given end in JSON. Drop drops its hold.
	Release(ctx context.Context, h Held, end []byte, drop bool) error
	// Read returns the row, or nil.
	Read(ctx context.Context, k Key) (*Row, error)
	// Look is Read without ends and records.
	Look(ctx context.Context, k Key) (*Row, error)
	// List returns the rows of a namespace after a name, so many at most, ordered by name, without ends and records.
	List(ctx context.Context, namespace, after string, most int) ([]*Row, error)
	// Insert makes a row without slots, if there is none.
	Insert(ctx context.Context, k Key) error
	// Write changes a row, and returns false where the conditions do not hold.
	Write(ctx context.Context, k Key, c Change) (bool, error)
	// Prune deletes a few rows that have gone, and no row that somebody works on.
	Prune(ctx context.Context) error
	// Mark returns the marker that a job has written for a lease in its own transaction, or nil.
	Mark(ctx context.Context, k Key) (*Mark, error)
	// Unmark deletes it, if it has this version or an older one.
	Unmark(ctx context.Context, k Key, version int64) error

	// Create makes the tables, safely beside others that do the same.
	Create(ctx context.Context) error
	// Missing reports whether an error says that a table is not there.
	Missing(err error) bool
	// Again reports whether an error says that nothing was done because of others' statements at the same time.
	Again(err error) bool
	// Classify gives an error its kind.
	Classify(ctx context.Context, err error) error
	// Address is the store's for people.
	Address() string
	// Close frees what the client holds.
	Close() error
}

// Client is a [backends.Backend] on a database.
type Client struct{ db Database }

var (
	_ backends.Backend = (*Client)(nil)
	_ backends.Waiter  = (*Client)(nil)
	_ backends.Walker  = (*Client)(nil)
)

// New returns a client of a database, which it closes.
func New(db Database) *Client { return &Client{db} }

// tries bounds what is tried again because of others, beside the end of the context.
const tries = 50

// errOthers says that others were always faster.
var errOthers = errors.New("others change the same row all the time")

// run runs a statement; creates the tables where they are missing; and runs it again where nothing was done because of others.
func run[T any](ctx context.Context, db Database, f func(context.Context) (T, error)) (got T, err error) {
	created := false
	for n := range tries {
		got, err = f(ctx)
		switch {
		case err == nil:
			return got, nil
		case db.Missing(err) && !created:
			created = true
			if failed := db.Create(ctx); failed != nil && !db.Again(failed) {
				// Somebody else may have made them meanwhile, with more rights than ours.
				if got, err = f(ctx); err == nil {
					return got, nil
				}
				if db.Missing(err) {
					err = failed
				}
				return got, db.Classify(ctx, err)
			}
		case db.Again(err):
			if pause(ctx, jitter(min(time.Millisecond<<min(n, 5), 20*time.Millisecond))) != nil {
				return got, db.Classify(ctx, err)
			}
		default:
			return got, db.Classify(ctx, err)
		}
	}
	return got, db.Classify(ctx, err)
}

// look is run for what only reads: a table that is missing is empty, and is not created.
func look[T any](ctx context.Context, db Database, f func(context.Context) (T, error)) (T, error) {
	return run(ctx, db, func(ctx context.Context) (got T, err error) {
		if got, err = f(ctx); err != nil && db.Missing(err) {
			err = nil
		}
		return got, err
	})
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// jitter returns d, less or more up to a half by chance.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.5 + rand.Float64()))
}

// Digest is what of a handle is stored: whoever may read the table cannot act for a holder.
func Digest(handle string) string {
	if handle == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(handle))
	return hex.EncodeToString(sum[:16])
}

// clean makes a text that every database takes: valid UTF-8 without a zero character.
//
// Source: PostgreSQL, JSON types: \u0000 is rejected.
func clean(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// Acquire implements [backends.Backend].
func (c *Client) Acquire(ctx context.Context, req backends.Request) (backends.Grant, error) {
	if err := req.Check(false); err != nil {
		return backends.Grant{}, err
	}
	t := Take{
		Key: Key{req.Namespace, req.Lease}, Digest: Digest(req.Handle), Holder: clean(req.Holder), Slots: req.Slots,
		TTL: req.TTL.Milliseconds(), Hold: (req.Hold + time.Millisecond - 1).Milliseconds(),
	}
	if t.TTL == 0 {
		return backends.Grant{}, backends.Configf("", "the ttl %v is shorter than a millisecond", req.TTL)
	}
	for range tries {
		row, err := run(ctx, c.db, func(ctx context.Context) (*Row, error) { return c.db.Acquire(ctx, t) })
		if err == nil && row == nil {
			// It was made or deleted at that very moment.
			row, err = run(ctx, c.db, func(ctx context.Context) (*Row, error) { return c.db.Look(ctx, t.Key) })
		}
		if err != nil {
			return backends.Grant{}, err
		}
		if row == nil {
			continue
		}
		l, err := c.read(row)
		if err != nil {
			return backends.Grant{}, err
		}
		g, err := l.answer(req, t)
		if err != nil || g.Term != 0 {
			if err == nil {
				err = c.passes(ctx, l, g)
			} else if errors.Is(err, backends.ErrBusy) {
				c.mend(ctx, l)
			}
			return g, err
		}
		if err := c.checkBack(ctx, t); err != nil {
			return backends.Grant{}, err
		}
	}
	return backends.Grant{}, c.db.Classify(ctx, errOthers)
}

// checkBack returns [backends.ErrLost] for a handle that was given back: no slot is ever free for it.
func (c *Client) checkBack(ctx context.Context, t Take) error {
	row, err := look(ctx, c.db, func(ctx context.Context) (*Row, error) { return c.db.Read(ctx, t.Key) })
	if err != nil || row == nil {
		return err
	}
	l, err := c.read(row)
	if err == nil && l.givenBack(t.Digest) {
		err = backends.Lost(nil, "it was given back")
	}
	return err
}

// longestAhead is how far the clock may lie behind a term that is handed out. More than a few milliseconds mean that it was
// set back: then the terms go on without it.
const longestAhead = 50 * time.Millisecond

// passes lets the clock reach a term that is ahead of it, as the one after a short run of another is: else a lower one could be given when
// the row is deleted. In the millisecond of the term itself nobody can have learned of the grant, deleted the row and asked anew.
func (c *Client) passes(ctx context.Context, l *lease, g backends.Grant) error {
	ahead := time.Duration(int64(g.Term)*1000-l.row.Micros) * time.Microsecond
	if ahead <= 0 {
		return nil
	}
	if err := pause(ctx, min(ahead, longestAhead)); err != nil {
		return c.db.Classify(ctx, err)
	}
	return nil
}

// mend writes back what ends later than it can, since the clock was set back. Else it would be looked at that way for ever.
func (c *Client) mend(ctx context.Context, l *lease) {
	if !l.moved {
		return
	}
	_, _ = c.db.Write(ctx, l.row.Key, l.change()) // the next one that looks does it
}

// Renew implements [backends.Backend].
func (c *Client) Renew(ctx context.Context, g backends.Grant) (backends.Grant, error) {
	h := heldBy(g)
	type answer struct{ ok, asked bool }
	got, err := run(ctx, c.db, func(ctx context.Context) (answer, error) {
		ok, asked, err := c.db.Renew(ctx, h)
		if err != nil && c.db.Missing(err) {
			return answer{}, nil // so is the lease
		}
		return answer{ok, asked}, err
	})
	if err != nil {
		return backends.Grant{}, err
	}
	if g.Ask = nil; got.ok && !got.asked {
		return g, nil
	}
	row, err := c.db.Look(ctx, h.Key)
	if err != nil && !c.db.Missing(err) {
		return backends.Grant{}, c.db.Classify(ctx, err)
	}
	if row == nil {
		return backends.Grant{}, backends.Lost(nil, "it was deleted")
	}
	l, err := c.read(row)
	if err != nil {
		return backends.Grant{}, err
	}
	s, why := l.force(h)
	switch {
	case why != "":
		return backends.Grant{}, backends.Lost(nil, "%s", why)
	case !got.ok:
		// By the clock that the row was locked under it was not in force; since then the clock was set back.
		return backends.Grant{}, backends.Unavailable(nil, "%s: the lease was not renewed, and seems to be held", c.db.Address())
	}
	g.Ask = s.Ask.ask()
	return g, nil
}

func heldBy(g backends.Grant) Held {
	return Held{Key{g.Namespace, g.Lease}, g.Slot, Digest(g.Handle), int64(g.Term)}
}

// Release implements [backends.Backend].
func (c *Client) Release(ctx context.Context, g backends.Grant, e backends.End) error {
	for _, p := range e.Puts {
		if err := p.Check(); err != nil {
			return err
		}
	}
	if e.Outcome == "" {
		e.Outcome = backends.OutcomeUnknown
		if g.Term == 0 {
			e.Outcome = backends.OutcomeNotStarted
		}
	}
	h, last := heldBy(g), asEnd(e)
	drop := g.Term == 0 || e.Outcome == backends.OutcomeNotStarted
	var err error
	if g.Term != 0 && len(e.Puts) == 0 {
		_, err = run(ctx, c.db, func(ctx context.Context) (struct{}, error) {
			err := c.db.Release(ctx, h, encode(last), drop)
			if err != nil && c.db.Missing(err) {
				err = nil
			}
			return struct{}{}, err
		})
		if err == nil && drop {
			err = c.change(ctx, h.Key, false, func(l *lease) error {
				s := l.ofTerm(h)
				if s == nil || s.Kept <= l.now {
					return errNothing
				}
				s.Kept, l.wake = 0, true // the grant has ended, and its hold has not
				return nil
			})
		}
	} else {
		// Nobody knows what becomes of an acquisition whose answer did not come: there has to be a row that refuses it.
		err = c.change(ctx, h.Key, g.Term == 0, func(l *lease) error {
			s, why := l.force(h)
			if g.Term == 0 {
				s, why = l.carrying(h.Digest), ""
				if s == nil && !l.givenBack(h.Digest) {
					l.giveBack(h.Digest)
					return nil
				}
			}
			if s == nil || why != "" && !s.broken() {
				return errNothing
			}
			if g.Term != 0 {
				l.before = s.Expiry
			}
			for _, p := range e.Puts {
				if _, err := l.put(p); err != nil {
					return err
				}
			}
			l.finish(s, last)
			if drop {
				s.Kept = 0
			}
			l.wake = true
			return nil
		})
	}
	if err == nil && g.Previous.Outcome == backends.OutcomeNone {
		_ = c.db.Prune(ctx) // the next one that makes a row does it
	}
	return err
}

// errNothing says that there is nothing to write.
var errNothing = errors.New("nothing to write")

// change reads a row, lets f change it, and writes it, until no other write came between. Make makes a row that is not there.
func (c *Client) change(ctx context.Context, k Key, makes bool, f func(*lease) error) error {
	for n := range tries {
		row, err := look(ctx, c.db, func(ctx context.Context) (*Row, error) { return c.db.Read(ctx, k) })
		if err != nil {
			return err
		}
		if row == nil {
			if !makes {
				return nil
			}
			if _, err := run(ctx, c.db, func(ctx context.Context) (struct{}, error) { return struct{}{}, c.db.Insert(ctx, k) }); err != nil {
				return err
			}
			continue
		}
		l, err := c.read(row)
		if err != nil {
			return err
		}
		if err := f(l); err != nil {
			if errors.Is(err, errNothing) {
				return nil
			}
			return err
		}
		written, err := run(ctx, c.db, func(ctx context.Context) (bool, error) { return c.db.Write(ctx, k, l.change()) })
		if err != nil || written {
			return err
		}
		if err := pause(ctx, jitter(min(time.Millisecond<<min(n, 5), 20*time.Millisecond))); err != nil {
			return c.db.Classify(ctx, err)
		}
	}
	return c.db.Classify(ctx, errOthers)
}

// Ask implements [backends.Backend].
func (c *Client) Ask(ctx context.Context, namespace, name string, slot int, a backends.Ask) error {
	return c.ask(ctx, namespace, name, slot, a, false)
}

// Break implements [backends.Backend].
func (c *Client) Break(ctx context.Context, namespace, name string, slot int, reason string, now bool) error {
	return c.ask(ctx, namespace, name, slot, backends.Ask{Kind: backends.AskBreak, Reason: reason}, now)
}

func (c *Client) ask(ctx context.Context, namespace, name string, slot int, a backends.Ask, now bool) error {
	if err := backends.CheckNames(namespace, name); err != nil {
		return err
	}
	return c.change(ctx, Key{namespace, name}, false, func(l *lease) error {
		if slot < 0 || slot >= len(l.slots) {
			return errNothing
		}
		s := &l.slots[slot]
		switch {
		case now:
			if s.Digest != "" {
				l.finish(s, unknown)
			}
			s.Kept, l.wake = 0, true
		case l.held(s) && !s.broken():
			s.Ask = &ask{Kind: string(a.Kind), Reason: clean(a.Reason), By: clean(a.By), At: l.now}
		default:
			return errNothing
		}
		return nil
	})
}

// Inspect implements [backends.Backend].
func (c *Client) Inspect(ctx context.Context, namespace, name string) (backends.State, error) {
	if err := backends.CheckNames(namespace, name); err != nil {
		return backends.State{}, err
	}
	row, err := look(ctx, c.db, func(ctx context.Context) (*Row, error) { return c.db.Read(ctx, Key{namespace, name}) })
	if err != nil {
		return backends.State{}, err
	}
	if row == nil {
		return backends.State{Namespace: namespace, Lease: name}, nil
	}
	l, err := c.read(row)
	if err != nil {
		return backends.State{}, err
	}
	return l.state(), nil
}

// List implements [backends.Backend].
func (c *Client) List(ctx context.Context, namespace string) ([]backends.State, error) {
	return backends.Collect(ctx, c, namespace)
}

// page is how many rows one statement reads.
const page = 500

// Walk implements [backends.Walker].
func (c *Client) Walk(ctx context.Context, namespace string, show func(backends.State, error) bool) error {
	if err := backends.CheckNamespace(namespace); err != nil {
		return &backends.ConfigError{Text: err.Error()}
	}
	for after := ""; ; {
		rows, err := look(ctx, c.db, func(ctx context.Context) ([]*Row, error) { return c.db.List(ctx, namespace, after, page) })
		if err != nil {
			return err
		}
		for _, row := range rows {
			after = row.Lease
			state := backends.State{Namespace: namespace, Lease: row.Lease}
			l, err := c.read(row)
			if err == nil {
				state = l.state()
				state.History = nil
			}
			if !show(state, err) {
				return nil
			}
		}
		if len(rows) < page {
			return nil
		}
	}
}

// Records implements [backends.Backend].
func (c *Client) Records() backends.Records { return records{c} }

// Close implements [backends.Backend].
func (c *Client) Close() error { return c.db.Close() }
