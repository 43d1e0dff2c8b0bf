package redis

import (
	"context"
	"crypto/sha1" // as Redis names scripts
	"crypto/sha256"
	_ "embed" // the scripts
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/underlease/underlease/backends"
)

// Client is a client of a store. It makes connections when it needs them.
type Client struct {
	settings settings
	address  string
	route    route

	mu      sync.Mutex
	closed  bool
	nodes   map[string]*node    // by address
	waiting map[string]*waiting // by handle
}

var (
	_ backends.Backend = (*Client)(nil)
	_ backends.Waiter  = (*Client)(nil)
	_ backends.Leaver  = (*Client)(nil)
)

// script is what one operation sends.
type script struct {
	own  string // the function main
	once sync.Once
	text string
	sha  string // by which a server that has run it knows it
}

// whole returns the script with what stands before and after each. No run needs them all.
func (s *script) whole() string {
	s.once.Do(func() {
		s.text = startLua + "local function main()\n" + s.own + "end\n" + stopLua
		sum := sha1.Sum([]byte(s.text))
		s.sha = hex.EncodeToString(sum[:])
	})
	return s.text
}

var (
	//go:embed scripts/start.lua
	startLua string
	//go:embed scripts/stop.lua
	stopLua string

	//go:embed scripts/acquire.lua
	acquireLua string
	//go:embed scripts/renew.lua
	renewLua string
	//go:embed scripts/release.lua
	releaseLua string
	//go:embed scripts/ask.lua
	askLua string
	//go:embed scripts/wait.lua
	waitLua string
	//go:embed scripts/inspect.lua
	inspectLua string
	//go:embed scripts/record_put.lua
	recordPutLua string
	//go:embed scripts/record_get.lua
	recordGetLua string
	//go:embed scripts/record_list.lua
	recordListLua string
	//go:embed scripts/record_delete.lua
	recordDeleteLua string

	toAcquire      = &script{own: acquireLua}
	toRenew        = &script{own: renewLua}
	toRelease      = &script{own: releaseLua}
	toAsk          = &script{own: askLua}
	toWait         = &script{own: waitLua}
	toInspect      = &script{own: inspectLua}
	toPutRecord    = &script{own: recordPutLua}
	toGetRecord    = &script{own: recordGetLua}
	toListRecords  = &script{own: recordListLua}
	toDeleteRecord = &script{own: recordDeleteLua}
)

// eval runs a script. Over these connections its text goes once, and then its hash: the first request must not need a second
// one, as it would with a hash that a server does not know, because it was started or promoted just now.
func (l *link) eval(ctx context.Context, s *script, key string, args []any) (any, error) {
	text := s.whole()
	if _, sent := l.sent.Load(s); sent {
		got, err := l.EvalSha(ctx, s.sha, []string{key}, args...).Result()
		if e, ok := errors.AsType[goredis.Error](err); !ok || !strings.HasPrefix(e.Error(), "NOSCRIPT") {
			return got, err
		}
	}
	got, err := l.Eval(ctx, text, []string{key}, args...).Result()
	if err == nil {
		l.sent.Store(s, true)
	}
	return got, err
}

// keyOf returns the key of a lease.
func keyOf(namespace, lease string) string {
	return keysOf(namespace) + backends.Key(namespace, lease) + "}"
}

// keysOf returns what the keys of a namespace begin with. No byte of it means anything in a pattern of SCAN.
func keysOf(namespace string) string {
	if namespace == "" {
		return "ul:{_/"
	}
	return "ul:{" + backends.Key("", namespace) + "/"
}

// mostRedirections is how often a cluster may send a request on.
const mostRedirections = 5

// eval runs a script on the server that has the lease. Acknowledged says that the replicas have to have it where the URL asks
// for that. The answer's first word is its kind.
func (c *Client) eval(ctx context.Context, s *script, namespace, lease string, acknowledged bool, args ...any) ([]string, error) {
	key := keyOf(namespace, lease)
	args = append([]any{namespace + "\x00" + lease}, args...)
	addr, err := c.route.to(ctx, key)
	if err != nil {
		return nil, c.classify(err, key)
	}
	asking := false
	for range mostRedirections {
		var got any
		got, err = c.node(addr).do(ctx, func(ctx context.Context, l *link) (any, error) {
			if !asking && (c.settings.replicas == 0 || !acknowledged) {
				return l.eval(ctx, s, key, args)
			}
			return c.together(ctx, l, asking, acknowledged, s.whole(), key, args)
		})
		if err == nil {
			return c.understand(got, key)
		}
		next, ask := redirection(err, addr)
		if next == "" || !ask && !c.route.moved(key, next) {
			break
		}
		addr, asking = next, ask
	}
	if failure := c.classify(err, key); !errors.Is(failure, backends.ErrDenied) {
		c.route.failed(key, addr)
		return nil, failure
	}
	return nil, c.classify(err, key)
}

// together sends a script with what has to come before and after it, in one round trip.
func (c *Client) together(ctx context.Context, l *link, asking, acknowledged bool, script, key string, args []any) (any, error) {
	pipe := l.Pipeline()
	if asking {
		pipe.Do(ctx, "asking")
	}
	got := pipe.Eval(ctx, script, []string{key}, args...)
	var wait *goredis.Cmd
	if acknowledged && c.settings.replicas > 0 {
		limit := defaultTimeout // after which no answer is read any more
		if deadline, ok := ctx.Deadline(); ok {
			limit = min(limit, time.Until(deadline))
		}
		// The rest is for the answer. Zero would be for ever.
		wait = pipe.Do(ctx, "wait", c.settings.replicas, max(limit*3/4, time.Millisecond).Milliseconds()+1)
	}
	_, err := pipe.Exec(ctx)
	if got.Err() != nil {
		return nil, got.Err()
	}
	if err != nil {
		return nil, err
	}
	if wait != nil {
		n, err := wait.Int()
		if err != nil {
			return nil, err
		}
		if n < c.settings.replicas {
			return nil, backends.WithHint(backends.Unavailable(nil, "%s: %d of %d replicas have it", c.address, n, c.settings.replicas),
				"the parameter replicas asks for them")
		}
	}
	return got.Val(), nil
}

// redirection returns where a cluster sends a request, and whether for this once only.
//
// Source: Redis Cluster specification: MOVED SLOT HOST:PORT and ASK SLOT HOST:PORT.
func redirection(err error, told string) (addr string, once bool) {
	e, ok := errors.AsType[goredis.Error](err)
	if !ok {
		return "", false
	}
	words := strings.Fields(e.Error())
	if len(words) != 3 || words[0] != "MOVED" && words[0] != "ASK" {
		return "", false
	}
	return absolute(words[2], told), words[0] == "ASK"
}

// understand turns the answer of a script into strings, or into the error that it is on any lease.
func (c *Client) understand(got any, key string) ([]string, error) {
	list, ok := got.([]any)
	if !ok || len(list) == 0 {
		return nil, backends.Broken(nil, "%s: the answer of a script cannot be read", c.address)
	}
	words := make([]string, len(list))
	for i, w := range list {
		if words[i], ok = w.(string); !ok {
			return nil, backends.Broken(nil, "%s: the answer of a script cannot be read", c.address)
		}
	}
	switch words[0] {
	case "broken":
		return nil, backends.WithHint(backends.Broken(nil, "%s: the key %s is damaged: %s", c.address, key, at(words, 1)),
			"look at it, then rename or delete it: the next term starts from the clock")
	case "foreign":
		return nil, c.foreign(key)
	case "newer":
		return nil, backends.WithHint(backends.Broken(nil, "%s: the key %s has the form %q of a newer version", c.address, key, at(words, 1)),
			"update underlease on this host: nothing was changed")
	case "lost":
		return nil, backends.Lost(nil, "%s", at(words, 1))
	case "conflict":
		return nil, fmt.Errorf("%w: %q", backends.ErrConflict, at(words, 1))
	}
	return words, nil
}

func at(words []string, i int) string {
	if i < len(words) {
		return words[i]
	}
	return ""
}

// ticket names a waiter without giving his handle away.
func ticket(handle string) string {
	sum := sha256.Sum256([]byte(handle))
	return hex.EncodeToString(sum[:12])
}

// Acquire implements [backends.Backend].
func (c *Client) Acquire(ctx context.Context, req backends.Request) (backends.Grant, error) {
	if err := req.Check(false); err != nil {
		return backends.Grant{}, err
	}
	ttl := req.TTL.Milliseconds()
	if ttl == 0 {
		return backends.Grant{}, backends.Configf("", "the ttl %v is shorter than a millisecond", req.TTL)
	}
	hold := (req.Hold + time.Millisecond - 1).Milliseconds()
	words, err := c.eval(ctx, toAcquire, req.Namespace, req.Lease, true, req.Handle, req.Holder, req.Slots, ttl, hold, ticket(req.Handle))
	if err != nil {
		return backends.Grant{}, err
	}
	if words[0] == "busy" {
		return backends.Grant{}, c.busy(req, words)
	}
	g, ahead, err := c.granted(backends.Grant{Namespace: req.Namespace, Lease: req.Lease, Handle: req.Handle}, words)
	if err != nil {
		return backends.Grant{}, err
	}
	c.stopWaiting(req.Handle)
	if err := pass(ctx, min(ahead, longestAhead)); err != nil {
		return backends.Grant{}, c.classify(err, "")
	}
	return g, nil
}

// longestAhead is how far the clock may lie behind a term that is handed out. More than a few milliseconds mean that it was
// set back: then the terms go on without it.
const longestAhead = 50 * time.Millisecond

// pass lets the clock pass a term, so that the same one cannot be given again when the lease is deleted.
func pass(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
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

func (c *Client) busy(req backends.Request, words []string) error {
	if len(words) != 7 {
		return c.unreadable(nil)
	}
	var d digits
	b := &backends.BusyError{
		Namespace: req.Namespace, Lease: req.Lease, Holder: words[2],
		Slot: int(d.read(words[1])), Term: backends.Term(d.read(words[3])),
		Since: instant(d.read(words[4])), Left: millis(d.read(words[5])), Kept: words[6] == "1",
	}
	if d.err != nil {
		return c.unreadable(d.err)
	}
	return b
}

// granted fills in what a script says about a grant. Ahead is when the store's clock will have passed its term.
func (c *Client) granted(g backends.Grant, words []string) (_ backends.Grant, ahead time.Duration, _ error) {
	if words[0] != "ok" || len(words) != 8 {
		return backends.Grant{}, 0, c.unreadable(nil)
	}
	var (
		d    digits
		last end
		asks *ask
	)
	g.Slot, g.Term, g.TTL, g.Holder = int(d.read(words[1])), backends.Term(d.read(words[2])), millis(d.read(words[3])), words[4]
	ahead = time.Duration(d.read(words[7])) * time.Microsecond
	err := errors.Join(d.err, json.Unmarshal([]byte(words[5]), &last))
	if words[6] != "" {
		err = errors.Join(err, json.Unmarshal([]byte(words[6]), &asks))
	}
	if err != nil {
		return backends.Grant{}, 0, c.unreadable(err)
	}
	g.Previous, g.Ask = last.end(), asks.ask()
	return g, ahead, nil
}

func (c *Client) unreadable(err error) error {
	return backends.Broken(err, "%s: the answer of a script cannot be read", c.address)
}

// digits reads numbers and keeps the first error.
type digits struct{ err error }

func (d *digits) read(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if d.err == nil {
		d.err = err
	}
	return n
}

func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func instant(n int64) time.Time { return time.UnixMilli(n) }

// Renew implements [backends.Backend].
func (c *Client) Renew(ctx context.Context, g backends.Grant) (backends.Grant, error) {
	words, err := c.eval(ctx, toRenew, g.Namespace, g.Lease, true, g.Handle, g.Slot, int64(g.Term))
	if err != nil {
		return backends.Grant{}, err
	}
	g, _, err = c.granted(g, words)
	return g, err
}

// Release implements [backends.Backend].
func (c *Client) Release(ctx context.Context, g backends.Grant, e backends.End) error {
	for _, p := range e.Puts {
		if err := p.Check(); err != nil {
			return err
		}
	}
	slot, term := strconv.Itoa(g.Slot), g.Term.String()
	if g.Term == 0 {
		slot, term = "", ""
		if e.Outcome == "" {
			e.Outcome = backends.OutcomeNotStarted
		}
	}
	if e.Outcome == "" {
		e.Outcome = backends.OutcomeUnknown
	}
	args := []any{g.Handle, slot, term, ticket(g.Handle), e.Outcome, e.ExitCode, e.Took.Milliseconds()}
	for _, p := range e.Puts {
		args = append(args, p.Key, p.Version, p.Value)
	}
	c.stopWaiting(g.Handle)
	_, err := c.eval(ctx, toRelease, g.Namespace, g.Lease, false, args...)
	return err
}

// Ask implements [backends.Backend].
func (c *Client) Ask(ctx context.Context, namespace, lease string, slot int, a backends.Ask) error {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return err
	}
	_, err := c.eval(ctx, toAsk, namespace, lease, false, slot, string(a.Kind), a.Reason, a.By, "0")
	return err
}

// Break implements [backends.Backend].
func (c *Client) Break(ctx context.Context, namespace, lease string, slot int, reason string, now bool) error {
	if err := backends.CheckNames(namespace, lease); err != nil {
		return err
	}
	at := "0"
	if now {
		at = "1"
	}
	_, err := c.eval(ctx, toAsk, namespace, lease, false, slot, string(backends.AskBreak), reason, "", at)
	return err
}

// Close implements [backends.Backend].
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	var handles []string
	for handle := range c.waiting {
		handles = append(handles, handle)
	}
	nodes := c.nodes
	c.nodes = map[string]*node{}
	c.mu.Unlock()
	for _, handle := range handles {
		c.stopWaiting(handle)
	}
	for _, n := range nodes {
		n.close()
	}
	return nil
}
