package etcd

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/quorum"
)

// driver is etcd as package quorum wants it.
type driver struct {
	settings settings
	address  string
	wire     *wire

	answered atomic.Bool // some server has
}

var (
	_ quorum.Store   = (*driver)(nil)
	_ quorum.Peeker  = (*driver)(nil)
	_ quorum.Adviser = (*driver)(nil)
)

func newDriver(s settings) *driver {
	return &driver{settings: s, address: s.address(), wire: newWire(s)}
}

// Address implements [quorum.Store].
func (d *driver) Address() string { return d.address }

// longestTTL is what a lease of etcd can last. Source: etcd, server/lease/lessor.go, MaxLeaseTTL.
const longestTTL = 9_000_000_000 * time.Second

// Check implements [quorum.Store].
func (d *driver) Check(ttl, hold time.Duration) error {
	if max(ttl, hold) > min(longestTTL, math.MaxInt64) {
		return backends.Configf("", "etcd keeps no lease longer than %d s", int64(longestTTL/time.Second))
	}
	return nil
}

// defaultTimeout limits what has no limit of its own.
const defaultTimeout = 5 * time.Second

// ask sends a request and hands its answer to f.
func (d *driver) ask(ctx context.Context, method string, request []byte, f func([]byte) error) error {
	if err := ctx.Err(); err != nil {
		return d.classify(err)
	}
	err := d.wire.call(ctx, method, request, f)
	if err == nil {
		d.answered.Store(true)
	}
	return d.classify(err)
}

// Read implements [quorum.Store].
func (d *driver) Read(ctx context.Context, prefix string) (quorum.View, error) {
	return d.read(ctx, prefix, false)
}

// Peek implements [quorum.Peeker].
func (d *driver) Peek(ctx context.Context, prefix string) (quorum.View, error) {
	return d.read(ctx, prefix, true)
}

func (d *driver) read(ctx context.Context, prefix string, old bool) (v quorum.View, err error) {
	err = d.ask(ctx, methodRange, rangeRequest(prefix, old), func(b []byte) (err error) {
		v, err = rangeResponse(b)
		return err
	})
	return v, err
}

// Commit implements [quorum.Store].
func (d *driver) Commit(ctx context.Context, t quorum.Txn) (version int64, ok bool, err error) {
	request, err := txnRequest(t)
	if err != nil {
		return 0, false, err
	}
	err = d.ask(ctx, methodTxn, request, func(b []byte) (err error) {
		version, ok, err = txnResponse(b)
		return err
	})
	return version, ok, err
}

// Await implements [quorum.Store].
func (d *driver) Await(ctx context.Context, prefix string, after int64) error {
	err := d.wire.watch(ctx, watchRequest(prefix, after+1), func(b []byte) (bool, error) {
		h, err := watchResponse(b)
		switch {
		case err != nil:
			return false, err
		case h.canceled && !h.compacted:
			return false, &refusal{code: codeUnavailable, text: plain(h.reason)}
		}
		// A watch from a revision that has passed is served with others of its kind every 100 ms, whatever it is of: look what it would tell.
		// Source: etcd, server/storage/mvcc/watchable_store.go, syncWatchersLoop.
		if h.created && h.revision > after && !h.events && d.changed(ctx, prefix, after, h.revision) {
			return true, nil
		}
		return h.events || h.compacted, nil // what happened since may be gone: look
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, io.EOF) {
		return backends.Unavailable(nil, "%s: the watch has ended", d.address)
	}
	return d.classify(err)
}

// changed tells that a key was written after a revision, or that all are gone, by what a server knows that knows as much as the one that
// watches. One that was deleted while others stay it does not see.
func (d *driver) changed(ctx context.Context, prefix string, after, known int64) bool {
	v, err := d.Peek(ctx, prefix)
	return err == nil && v.Version >= known && (len(v.Pairs) == 0 || slices.ContainsFunc(v.Pairs, func(p quorum.Pair) bool { return p.Version > after }))
}

// Name implements [quorum.Store].
func (d *driver) Name(seed string) string { return name(leaseID(seed)) }

// leaseID derives the number of an etcd lease. It is positive.
func leaseID(seed string) int64 {
	sum := sha256.Sum256([]byte("underlease/" + seed))
	return int64(max(1, binary.BigEndian.Uint64(sum[:8])>>1))
}

// name is a session as etcdctl writes it.
func name(id int64) string {
	if id == 0 {
		return ""
	}
	return strconv.FormatInt(id, 16)
}

// number is the etcd lease of a session; zero: none.
func number(session string) (int64, error) {
	if session == "" {
		return 0, nil
	}
	return strconv.ParseInt(session, 16, 64)
}

// seconds rounds up: a ttl is never cut short.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// Begin implements [quorum.Store].
func (d *driver) Begin(ctx context.Context, seed string, ttl time.Duration) (quorum.Session, error) {
	id, granted := leaseID(seed), int64(0)
	err := d.ask(ctx, methodGrant, grantRequest(id, seconds(ttl)), func(b []byte) (err error) {
		granted, err = ttlResponse(b)
		return err
	})
	if errors.Is(err, errExists) { // an answer was lost
		granted, err = d.keep(ctx, id)
	}
	if err != nil {
		return quorum.Session{}, err
	}
	return quorum.Session{ID: name(id), TTL: time.Duration(granted) * time.Second}, nil
}

// keep counts the ttl of an etcd lease anew, and returns it.
func (d *driver) keep(ctx context.Context, id int64) (ttl int64, err error) {
	err = d.ask(ctx, methodKeepAlive, leaseRequest(id), func(b []byte) (err error) {
		ttl, err = ttlResponse(b)
		return err
	})
	if err == nil && ttl <= 0 {
		err = quorum.ErrGone
	}
	return ttl, err
}

// Keep implements [quorum.Store].
func (d *driver) Keep(ctx context.Context, session string) error {
	id, err := number(session)
	if err != nil || id == 0 {
		return quorum.ErrGone
	}
	_, err = d.keep(ctx, id)
	return err
}

// End implements [quorum.Store].
func (d *driver) End(ctx context.Context, session string) error {
	id, err := number(session)
	if err != nil || id == 0 {
		return nil //nolint:nilerr // there is no such session
	}
	err = d.ask(ctx, methodRevoke, leaseRequest(id), func([]byte) error { return nil })
	if errors.Is(err, quorum.ErrGone) {
		return nil
	}
	return err
}

// Left implements [quorum.Store].
func (d *driver) Left(ctx context.Context, session string, stated time.Duration) (left time.Duration, err error) {
	id, err := number(session)
	if err != nil || id == 0 {
		return stated, nil //nolint:nilerr // a key that somebody took out of its session
	}
	err = d.ask(ctx, methodLeft, leaseRequest(id), func(b []byte) error {
		n, err := ttlResponse(b)
		left = min(time.Duration(n+1)*time.Second, stated) // it rounds down
		return err
	})
	return left, err
}

// Advice implements [quorum.Adviser]: the server that is asked may be one that revokes leases that are kept.
func (d *driver) Advice(ctx context.Context) (advice string) {
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond) // a loss is acted on first
	defer cancel()
	_ = d.ask(ctx, methodStatus, nil, func(b []byte) error { // without an answer there is no advice
		version, err := statusResponse(b)
		if err == nil && revokesWhatIsKept(version) {
			advice = "etcd " + version + " may revoke leases that are kept when its leader was slow (etcd-io/etcd#15247): update to 3.5.13 or newer, or to 3.4.31"
		}
		return err
	})
	return advice
}

// revokesWhatIsKept tells the versions with etcd-io/etcd#15247.
//
// Source: etcd, CHANGELOG-3.5, 3.5.13 (#17425), and CHANGELOG-3.4, 3.4.31 (#17465).
func revokesWhatIsKept(version string) bool {
	var major, minor, patch int
	if n, _ := fmt.Sscanf(version, "%d.%d.%d", &major, &minor, &patch); n != 3 {
		return false
	}
	switch {
	case major != 3 || minor > 5:
		return major < 3
	case minor == 5:
		return patch < 13
	case minor == 4:
		return patch < 31
	default:
		return true
	}
}

// Close implements [quorum.Store].
func (d *driver) Close() error {
	d.wire.close()
	return nil
}
