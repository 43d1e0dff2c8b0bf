package etcd

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/quorum"
)

// driver is etcd as package quorum wants it.
type driver struct {
	settings settings
	address  string

	mu     sync.Mutex
	client *clientv3.Client // nil: the next call makes one
	making chan struct{}    // closed when a client that is being made is there, or failed; nil: nobody makes one
	closed bool
	why    error // the last client was dropped

	answered atomic.Bool // some server has
}

var (
	_ quorum.Store   = (*driver)(nil)
	_ quorum.Peeker  = (*driver)(nil)
	_ quorum.Adviser = (*driver)(nil)
)

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

// buffer is for requests and answers of a few hundred bytes.
const buffer = 4 << 10

// defaultTimeout limits what has no limit of its own.
const defaultTimeout = 5 * time.Second

// connected returns a client. It asks for a token where a user is given, which is the only traffic.
func (d *driver) connected(ctx context.Context) (*clientv3.Client, error) {
	for {
		d.mu.Lock()
		switch {
		case d.closed:
			d.mu.Unlock()
			return nil, backends.Unavailable(nil, "%s: the client is closed", d.address)
		case d.client != nil:
			c := d.client
			d.mu.Unlock()
			return c, nil
		case d.making == nil:
			done := make(chan struct{})
			d.making = done
			d.mu.Unlock()
			c, err := d.dial(ctx)
			d.mu.Lock()
			d.making = nil
			closed := d.closed
			if err == nil && !closed {
				d.client = c
			}
			d.mu.Unlock()
			close(done)
			if err == nil && closed {
				_ = c.Close() // nobody uses it
				continue
			}
			return c, err
		default:
			wait := d.making
			d.mu.Unlock()
			select {
			case <-wait:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}

func (d *driver) dial(ctx context.Context) (*clientv3.Client, error) {
	limit := defaultTimeout
	if deadline, ok := ctx.Deadline(); ok {
		limit = max(time.Until(deadline), time.Millisecond)
	}
	life, end := context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, end)
	scheme := "http://"
	if d.settings.tls != nil {
		scheme = "https://"
	}
	var endpoints []string
	for _, host := range d.settings.hosts {
		endpoints = append(endpoints, scheme+host)
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, DialTimeout: limit, TLS: d.settings.tls, Username: d.settings.user, Password: d.settings.password,
		Context: life, Logger: zap.NewNop(),
		MaxUnaryRetries: 2, // a token that has expired, or a member that is gone: more is the matter of the caller
		// A member that is gone without a word is found out where only a watch is under way.
		// Source: etcd refuses pings that come more often than every 5 s (grpc-keepalive-min-time).
		DialKeepAliveTime: 6 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		DialOptions: []grpc.DialOption{
			grpc.WithDefaultCallOptions(grpc.ForceCodecV2(newCodec())),
			grpc.WithReadBufferSize(buffer), grpc.WithWriteBufferSize(buffer),
		},
	})
	if err == nil && !stop() {
		_ = c.Close()
		err = ctx.Err()
	}
	if err != nil {
		stop()
		end()
		return nil, err
	}
	return c, nil
}

// do runs a request. A client that got no answer is not used again.
func (d *driver) do(ctx context.Context, f func(context.Context, *clientv3.Client) error) error {
	if err := ctx.Err(); err != nil {
		return d.classify(err)
	}
	c, err := d.connected(ctx)
	if err != nil {
		return d.classify(err)
	}
	// A member that has no leader then says so, instead of saying nothing.
	err = f(clientv3.WithRequireLeader(ctx), c)
	if err == nil {
		d.answered.Store(true)
		return nil
	}
	_, said := errors.AsType[rpctypes.EtcdError](rpctypes.Error(err))
	silent := errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Unavailable
	if silent && !said && !errors.Is(ctx.Err(), context.Canceled) {
		d.drop(c, err)
	}
	if ctx.Err() == nil && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled) {
		err = d.cause(err) // another call has closed the client meanwhile
	}
	return d.classify(err)
}

// cause returns why the last client was dropped.
func (d *driver) cause(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.why != nil {
		return d.why
	}
	return err
}

func (d *driver) drop(c *clientv3.Client, why error) {
	d.mu.Lock()
	mine := d.client == c
	if mine {
		d.client, d.why = nil, why
	}
	d.mu.Unlock()
	if mine {
		_ = c.Close() // its connections are of no use
	}
}

// Read implements [quorum.Store].
func (d *driver) Read(ctx context.Context, prefix string) (quorum.View, error) {
	return d.read(ctx, prefix)
}

// Peek implements [quorum.Peeker].
func (d *driver) Peek(ctx context.Context, prefix string) (quorum.View, error) {
	return d.read(ctx, prefix, clientv3.WithSerializable())
}

func (d *driver) read(ctx context.Context, prefix string, how ...clientv3.OpOption) (v quorum.View, err error) {
	err = d.do(ctx, func(ctx context.Context, c *clientv3.Client) error {
		got, err := c.Get(ctx, prefix, append(how, clientv3.WithPrefix())...)
		if err != nil {
			return err
		}
		v = quorum.View{Version: got.Header.Revision, Pairs: make([]quorum.Pair, len(got.Kvs))}
		for i, kv := range got.Kvs {
			v.Pairs[i] = quorum.Pair{Key: string(kv.Key), Value: kv.Value, Version: kv.ModRevision, Created: kv.CreateRevision, Session: name(kv.Lease)}
		}
		return nil
	})
	return v, err
}

// Commit implements [quorum.Store].
func (d *driver) Commit(ctx context.Context, t quorum.Txn) (version int64, ok bool, err error) {
	var checks []clientv3.Cmp
	for _, check := range t.Checks {
		if check.Version == 0 {
			checks = append(checks, clientv3.Compare(clientv3.CreateRevision(check.Key), "=", 0))
		} else {
			checks = append(checks, clientv3.Compare(clientv3.ModRevision(check.Key), "=", check.Version))
		}
	}
	var writes []clientv3.Op
	for _, w := range t.Writes {
		if w.Delete {
			writes = append(writes, clientv3.OpDelete(w.Key))
			continue
		}
		id, err := number(w.Session)
		if err != nil {
			return 0, false, quorum.ErrGone
		}
		writes = append(writes, clientv3.OpPut(w.Key, string(w.Value), clientv3.WithLease(id)))
	}
	err = d.do(ctx, func(ctx context.Context, c *clientv3.Client) error {
		got, err := c.Txn(ctx).If(checks...).Then(writes...).Commit()
		if err != nil {
			return err
		}
		version, ok = got.Header.Revision, got.Succeeded
		return nil
	})
	return version, ok, err
}

// Await implements [quorum.Store].
func (d *driver) Await(ctx context.Context, prefix string, after int64) error {
	c, err := d.connected(ctx)
	if err != nil {
		return d.classify(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for got := range c.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(after+1)) {
		switch err := got.Err(); {
		case errors.Is(err, rpctypes.ErrCompacted):
			return nil // what happened since is gone: look
		case err != nil:
			return d.classify(err)
		case len(got.Events) > 0:
			return nil
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return backends.Unavailable(nil, "%s: the watch has ended", d.address)
}

// Name implements [quorum.Store].
func (d *driver) Name(seed string) string { return name(int64(leaseID(seed))) }

// leaseID derives the number of an etcd lease. It is positive.
func leaseID(seed string) clientv3.LeaseID {
	sum := sha256.Sum256([]byte("underlease/" + seed))
	return clientv3.LeaseID(max(1, binary.BigEndian.Uint64(sum[:8])>>1))
}

// name is a session as etcdctl writes it.
func name(id int64) string {
	if id == 0 {
		return ""
	}
	return strconv.FormatInt(id, 16)
}

func number(session string) (clientv3.LeaseID, error) {
	if session == "" {
		return clientv3.NoLease, nil
	}
	n, err := strconv.ParseInt(session, 16, 64)
	return clientv3.LeaseID(n), err
}

// seconds rounds up: a ttl is never cut short.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// Begin implements [quorum.Store].
func (d *driver) Begin(ctx context.Context, seed string, ttl time.Duration) (quorum.Session, error) {
	id := leaseID(seed)
	granted := int64(0)
	err := d.do(ctx, func(ctx context.Context, c *clientv3.Client) error {
		// The library's own Grant cannot choose the number.
		got, err := pb.NewLeaseClient(c.ActiveConnection()).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: int64(id), TTL: seconds(ttl)})
		err = rpctypes.Error(err)
		if errors.Is(err, rpctypes.ErrLeaseExist) {
			granted, err = keep(ctx, c, id) // an answer was lost
			return err
		}
		if err == nil {
			granted = got.TTL
		}
		return err
	})
	if err != nil {
		return quorum.Session{}, err
	}
	return quorum.Session{ID: name(int64(id)), TTL: time.Duration(granted) * time.Second}, nil
}

// keep sends one keep-alive. The library's own KeepAliveOnce asks again without a pause while no server answers.
func keep(ctx context.Context, c *clientv3.Client, id clientv3.LeaseID) (ttl int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewLeaseClient(c.ActiveConnection()).LeaseKeepAlive(ctx)
	if err != nil {
		return 0, rpctypes.Error(err)
	}
	if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(id)}); err != nil {
		return 0, rpctypes.Error(err)
	}
	got, err := stream.Recv()
	if err != nil {
		return 0, rpctypes.Error(err)
	}
	if got.TTL <= 0 {
		return 0, rpctypes.ErrLeaseNotFound
	}
	return got.TTL, nil
}

// Keep implements [quorum.Store].
func (d *driver) Keep(ctx context.Context, session string) error {
	id, err := number(session)
	if err != nil || id == clientv3.NoLease {
		return quorum.ErrGone
	}
	return d.do(ctx, func(ctx context.Context, c *clientv3.Client) error {
		_, err := keep(ctx, c, id)
		return err
	})
}

// End implements [quorum.Store].
func (d *driver) End(ctx context.Context, session string) error {
	id, err := number(session)
	if err != nil || id == clientv3.NoLease {
		return nil //nolint:nilerr // there is no such session
	}
	err = d.do(ctx, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.Revoke(ctx, id)
		return err
	})
	if errors.Is(err, quorum.ErrGone) {
		return nil
	}
	return err
}

// Left implements [quorum.Store].
func (d *driver) Left(ctx context.Context, session string, stated time.Duration) (left time.Duration, err error) {
	id, err := number(session)
	if err != nil || id == clientv3.NoLease {
		return stated, nil //nolint:nilerr // a key that somebody took out of its session
	}
	err = d.do(ctx, func(ctx context.Context, c *clientv3.Client) error {
		got, err := c.TimeToLive(ctx, id)
		if err == nil {
			left = min(time.Duration(got.TTL+1)*time.Second, stated) // it rounds down
		}
		return err
	})
	return left, err
}

// Advice implements [quorum.Adviser]: the server that is asked may be one that revokes leases that are kept.
func (d *driver) Advice(ctx context.Context) (advice string) {
	ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond) // a loss is acted on first
	defer cancel()
	_ = d.do(ctx, func(ctx context.Context, c *clientv3.Client) error { // without an answer there is no advice
		got, err := pb.NewMaintenanceClient(c.ActiveConnection()).Status(ctx, &pb.StatusRequest{})
		if err == nil && revokesWhatIsKept(got.Version) {
			advice = "etcd " + got.Version + " may revoke leases that are kept when its leader was slow (etcd-io/etcd#15247): update to 3.5.13 or newer, or to 3.4.31"
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

// Close implements [quorum.Store]. The connections are closed beside: a process that ends need not wait until each has said so.
func (d *driver) Close() error {
	d.mu.Lock()
	c := d.client
	d.client, d.closed = nil, true
	d.mu.Unlock()
	if c != nil {
		go func() { _ = c.Close() }() // it says that its context was cancelled
	}
	return nil
}
