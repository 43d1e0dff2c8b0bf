package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/underlease/underlease/backends"
)

// route tells which server has a key. Its methods may be called at the same time.
type route interface {
	// to returns the address of the server to ask.
	to(ctx context.Context, key string) (addr string, err error)
	// moved says that another server has the key. It returns false where there can be none.
	moved(key, addr string) bool
	// failed says that the server at addr gave no usable answer about a key.
	failed(key, addr string)
	// primaries returns all servers that have keys.
	primaries(ctx context.Context) ([]string, error)
}

// single is one server, at host:port or at the path of a socket.
type single string

func (s single) to(context.Context, string) (string, error)  { return string(s), nil }
func (s single) moved(string, string) bool                   { return false }
func (s single) failed(string, string)                       {}
func (s single) primaries(context.Context) ([]string, error) { return []string{string(s)}, nil }

// watched is the primary that sentinels name. It is asked for when it is not known, after each failure, and again before a request when the
// last answer has an age: a holder that can still reach a primary which was replaced would else renew there for ever.
type watched struct {
	client *Client

	mu      sync.Mutex
	primary string
	asked   time.Time // when the sentinels were asked for it
	next    int       // the sentinel to ask first
}

// sentinelAge is how old the word of a sentinel may be. A run renews less often, with the ttl of most.
const sentinelAge = time.Second

// sentinelShare is the part of the time left that one sentinel gets, so that a dead one does not use up an attempt.
const sentinelShare = 3

func (w *watched) to(ctx context.Context, _ string) (string, error) {
	w.mu.Lock()
	primary, next := w.primary, w.next
	young := time.Since(w.asked) < sentinelAge
	w.mu.Unlock()
	hosts := w.client.settings.hosts
	if primary != "" {
		if young {
			return primary, nil
		}
		// One is asked. Where it does not answer, the primary that is known is as good as before, and another one is asked next time.
		addr, err := w.ask(ctx, hosts[next%len(hosts)])
		w.mu.Lock()
		defer w.mu.Unlock()
		w.asked = time.Now()
		if err != nil {
			w.next++
			return primary, nil
		}
		w.primary = addr
		return addr, nil
	}
	var failures []error
	for i := range hosts {
		at := (next + i) % len(hosts)
		addr, err := w.ask(ctx, hosts[at])
		if err == nil {
			w.mu.Lock()
			w.primary, w.next, w.asked = addr, at, time.Now()
			w.mu.Unlock()
			return addr, nil
		}
		failures = append(failures, err)
		if ctx.Err() != nil {
			break
		}
	}
	// A sentinel that answers knows more than one that does not.
	for _, err := range failures {
		if errors.Is(err, errNoPrimary) || errors.Is(err, backends.ErrDenied) {
			return "", err
		}
	}
	return "", failures[len(failures)-1]
}

// errNoPrimary says that a sentinel does not know the primary's name.
var errNoPrimary = errors.New("the sentinels know no primary of this name")

func (w *watched) ask(ctx context.Context, host string) (string, error) {
	limit := defaultTimeout
	if deadline, ok := ctx.Deadline(); ok {
		limit = time.Until(deadline)
	}
	ctx, cancel := context.WithTimeout(ctx, limit/sentinelShare)
	defer cancel()
	n := w.client.newNode(host)
	n.user, n.password, n.database = w.client.settings.sentinelUser, w.client.settings.sentinelPassword, 0
	defer n.close()
	got, err := n.do(ctx, func(ctx context.Context, l *link) (any, error) {
		return l.Do(ctx, "sentinel", "get-master-addr-by-name", w.client.settings.primary).Result()
	})
	if errors.Is(err, goredis.Nil) {
		return "", backends.WithHint(backends.Unavailable(errNoPrimary, "%s", w.client.address),
			"the URL ends with it: redis+sentinel://host1,host2/primary")
	}
	if err != nil {
		err = w.client.classify(err, "")
		if errors.Is(err, backends.ErrDenied) {
			err = backends.WithHint(err, "sentinels have a password of their own: the parameter sentinel-password, and sentinel-user where they have users")
		}
		return "", err
	}
	pair, ok := got.([]any)
	if !ok || len(pair) != 2 {
		return "", backends.Broken(nil, "%s: the sentinel's answer cannot be read", w.client.address)
	}
	name, _ := pair[0].(string)
	port, _ := pair[1].(string)
	return net.JoinHostPort(name, port), nil
}

func (w *watched) moved(string, string) bool { return false }

func (w *watched) failed(_, addr string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.primary == addr {
		w.primary = ""
		w.next++ // another one may know better
	}
}

func (w *watched) primaries(ctx context.Context) ([]string, error) {
	addr, err := w.to(ctx, "")
	return []string{addr}, err
}

// sharded is a cluster. Who has a key is learned from the servers themselves: any of them says it when it has not.
type sharded struct {
	client *Client

	mu    sync.Mutex
	known map[string]string // addresses by key
	next  int               // the host to begin with
}

func (s *sharded) to(_ context.Context, key string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if addr := s.known[key]; addr != "" {
		return addr, nil
	}
	return s.client.settings.hosts[s.next%len(s.client.settings.hosts)], nil
}

func (s *sharded) moved(key, addr string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[key] = addr
	return true
}

func (s *sharded) failed(key, addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known[key] == addr {
		delete(s.known, key)
	}
	hosts := s.client.settings.hosts
	if hosts[s.next%len(hosts)] == addr {
		s.next++
	}
}

func (s *sharded) primaries(ctx context.Context) ([]string, error) {
	first, err := s.to(ctx, "")
	if err != nil {
		return nil, err
	}
	got, err := s.client.node(first).do(ctx, func(ctx context.Context, l *link) (any, error) {
		return l.Do(ctx, "cluster", "slots").Result() // CLUSTER SHARDS came with 7.0
	})
	if err != nil {
		s.failed("", first)
		return nil, s.client.classify(err, "")
	}
	var all []string
	for _, addr := range owners(got) {
		if addr = absolute(addr, first); !slices.Contains(all, addr) {
			all = append(all, addr)
		}
	}
	return all, nil
}

// owners reads an answer to CLUSTER SLOTS: who has each range of slots.
//
// Source: Redis, CLUSTER SLOTS: first slot, last slot, the primary (host or null, port, ...), its replicas.
func owners(answer any) (addrs []string) {
	ranges, _ := answer.([]any)
	for _, r := range ranges {
		part, _ := r.([]any)
		if len(part) < 3 {
			continue
		}
		primary, _ := part[2].([]any)
		if len(primary) < 2 {
			continue
		}
		host, _ := primary[0].(string)
		port, _ := primary[1].(int64)
		addr := ":" + strconv.FormatInt(port, 10)
		if host != "" {
			addr = net.JoinHostPort(host, strconv.FormatInt(port, 10))
		}
		addrs = append(addrs, addr)
	}
	return addrs
}

// absolute fills in the host of an address that has none: it is that of the server that told it.
//
// Source: Redis, CLUSTER SLOTS and redirections with cluster-preferred-endpoint-type unknown-endpoint.
func absolute(addr, told string) string {
	if port, ok := strings.CutPrefix(addr, ":"); ok {
		if host, _, err := net.SplitHostPort(told); err == nil {
			return net.JoinHostPort(host, port)
		}
	}
	return addr
}

// node is a server, and the library's client of it.
type node struct {
	addr           string
	network        string
	tls            *tls.Config
	user, password string
	database       int

	mu     sync.Mutex
	link   *link
	closed bool
}

// link is one generation of connections to a server. They are closed together.
type link struct {
	*goredis.Client
	cut  context.CancelFunc // ends attempts to connect
	sent sync.Map           // the scripts whose text the server has
}

func (l *link) close() {
	l.cut()
	_ = l.Close() // what it could fail to close is not used any more
}

const (
	// defaultTimeout limits what has no limit of its own.
	defaultTimeout = 5 * time.Second
	// A run has one call under way, perhaps one more that was left behind, and waits on a connection of its own.
	mostConnections = 8
	bufferSize      = 8 << 10
)

func (c *Client) newNode(addr string) *node {
	s := &c.settings
	n := &node{addr: addr, network: "tcp", tls: s.tls, user: s.user, password: s.password, database: s.database}
	if s.kind == socket {
		n.network = "unix"
	}
	return n
}

// node returns the server at an address.
func (c *Client) node(addr string) *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[addr]
	if n == nil {
		n = c.newNode(addr)
		n.closed = c.closed
		c.nodes[addr] = n
	}
	return n
}

// open returns the connections to the server, and makes them where there are none.
func (n *node) open() (*link, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, goredis.ErrClosed
	}
	if n.link == nil {
		alive, cut := context.WithCancel(context.Background())
		client := goredis.NewClient(&goredis.Options{
			Network: n.network, Addr: n.addr, Username: n.user, Password: n.password, DB: n.database,
			Protocol: 2, DisableIdentity: true,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
			MaxRetries:               -1, DialerRetries: 1,
			ContextTimeoutEnabled: true, DialTimeout: defaultTimeout, ReadTimeout: defaultTimeout, WriteTimeout: defaultTimeout,
			PoolSize: mostConnections, PipelinePoolSize: -1, ReadBufferSize: bufferSize, WriteBufferSize: bufferSize,
			Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
				return n.dial(ctx, alive, network, addr)
			},
		})
		client.AddHook(greeting{})
		n.link = &link{Client: client, cut: cut}
	}
	return n.link, nil
}

func (n *node) dial(ctx, alive context.Context, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(alive, cancel)()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil || n.tls == nil {
		return conn, err
	}
	config := n.tls
	if config.ServerName == "" {
		config = config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	encrypted := tls.Client(conn, config)
	if err := encrypted.HandshakeContext(ctx); err != nil {
		_ = conn.Close() // the first error is the one to tell
		return nil, &notEncrypted{err}
	}
	return encrypted, nil
}

// unmet is why a server could not be greeted. Nothing else was sent to it.
type unmet struct{ error }

func (e *unmet) Unwrap() error { return e.error }

// notEncrypted is why a connection could not be encrypted.
type notEncrypted struct{ error }

func (e *notEncrypted) Unwrap() error { return e.error }

// drop closes a generation of connections, so that the next call makes new ones.
func (n *node) drop(l *link) {
	n.mu.Lock()
	if n.link == l {
		n.link = nil
	}
	n.mu.Unlock()
	l.close()
}

func (n *node) close() {
	n.mu.Lock()
	l := n.link
	n.link, n.closed = nil, true
	n.mu.Unlock()
	if l != nil {
		l.close()
	}
}

// do makes one call. When its context ends it returns at once. Where the server gave no answer, all connections to it are
// closed: one that hangs is seldom alone.
func (n *node) do(ctx context.Context, call func(context.Context, *link) (any, error)) (any, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l, err := n.open()
	if err != nil {
		return nil, err
	}
	// The library looks at a deadline, but a read that waits does not see the end of a context.
	stop := context.AfterFunc(ctx, func() { n.drop(l) })
	got, err := call(ctx, l)
	stop()
	if err != nil && !answered(err) {
		n.drop(l)
		if ctx.Err() != nil && !unconnected(err) {
			err = ctx.Err()
		}
	}
	return got, err
}

// answered reports whether an error is the server's own word.
func answered(err error) bool {
	_, ok := errors.AsType[goredis.Error](err)
	return ok
}

// greeting looks at the first exchange on a connection.
type greeting struct{}

// DialHook implements [goredis.Hook].
func (greeting) DialHook(next goredis.DialHook) goredis.DialHook { return next }

// ProcessPipelineHook implements [goredis.Hook].
func (greeting) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}

// ProcessHook implements [goredis.Hook].
func (greeting) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook {
	return func(ctx context.Context, cmd goredis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() != "hello" {
			return err
		}
		if err != nil {
			e, ok := errors.AsType[goredis.Error](err)
			switch {
			case !ok:
				return &unmet{err}
			case strings.HasPrefix(e.Error(), "WRONGPASS"), strings.HasPrefix(e.Error(), "NOAUTH"):
				// The library would try the same password once more, or go on without one.
				return &refused{e.Error()}
			case strings.HasPrefix(e.Error(), "ERR unknown command"):
				// Source: Redis 6.0 release notes: HELLO is new.
				return &tooOld{"before 6.0"}
			}
			return err
		}
		if hello, ok := cmd.(*goredis.MapStringInterfaceCmd); ok {
			if v, _ := hello.Val()["version"].(string); older(v, 6, 2) {
				return &tooOld{v}
			}
		}
		return nil
	}
}

// older reports whether a version is below another one. One that cannot be read is not.
func older(version string, major, minor int) bool {
	first, rest, _ := strings.Cut(version, ".")
	second, _, _ := strings.Cut(rest, ".")
	a, err1 := number(first)
	b, err2 := number(second)
	return err1 == nil && err2 == nil && (a < major || a == major && b < minor)
}

// refused is a server's refusal of user or password, or of a client that has none.
type refused struct{ text string }

func (r *refused) Error() string { return r.text }

// tooOld is a server that lacks what the scripts need.
type tooOld struct{ version string }

func (o *tooOld) Error() string { return "the server is Redis " + o.version + ", and 6.2 is needed" }
