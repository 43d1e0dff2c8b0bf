//go:build linux

package redis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// limits of the calls of a run.
var limits = faults.Limits{Acquire: time.Second, Renew: 500 * time.Millisecond, Calm: 10 * time.Second, Armed: 3 * time.Second}

var (
	request = faults.Request
	acquire = limits.TryAcquire
	granted = limits.Granted
	heard   = limits.Answered
	renew   = limits.TryRenew
	renewed = limits.Renewed
)

// confirmed is heard where the word of replicas is waited for: for three quarters of the limit, or of the 5 s after which no answer is read.
func confirmed(t *testing.T, s *backends.Store, r backends.Request) (backends.Grant, error) {
	t.Helper()
	return faults.Try(t, confirming, func(ctx context.Context) (backends.Grant, error) { return s.Acquire(ctx, r) })
}

const confirming = 8 * time.Second

// The budget: one exchange to greet, with user and password where there are any, and one for the lease.
func TestAGrantTakesTwoRoundTrips(t *testing.T) {
	certificates := servers.MakeCertificates(t)
	for name, c := range map[string]struct {
		o     servers.RedisOptions
		url   string
		trips int
	}{
		"plain":    {servers.RedisOptions{}, "redis://%s", 2},
		"user":     {servers.RedisOptions{User: "u", Password: "p"}, "redis://u:p@%s", 2},
		"password": {servers.RedisOptions{Password: "p"}, "redis://:p@%s", 2},
		"database": {servers.RedisOptions{}, "redis://%s/1", 3},
		"replicas": {servers.RedisOptions{}, "redis://%s?replicas=0", 2},
	} {
		r := servers.StartRedis(t, c.o)
		p := proxy.New(t, r.Addr())
		s := opened(t, fmt.Sprintf(c.url, p.Addr()))
		if got := p.Made(); got != 0 {
			t.Errorf("%s: %d connections by opening, want none", name, got)
		}
		g := granted(t, s, request("l"))
		if got := p.Trips(); got != c.trips {
			t.Errorf("%s: %d round trips to the grant, want %d", name, got, c.trips)
		}
		if err := renewed(t, s, g); err != nil {
			t.Errorf("%s: Renew: %v", name, err)
		}
		if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
			t.Errorf("%s: Release: %v", name, err)
		}
		if got := p.Trips(); got != 2 {
			t.Errorf("%s: %d round trips for a renewal and a release, want 2", name, got)
		}
		if got := p.Made(); got != 1 {
			t.Errorf("%s: %d connections, want 1", name, got)
		}
	}
	// A script that the server has not seen yet costs no more, and neither does TLS, but for its own handshake.
	r := servers.StartRedis(t, servers.RedisOptions{TLS: certificates})
	p := proxy.New(t, r.Addr())
	q := url.Values{"ca": {certificates.CA}, "cert": {certificates.ClientCert}, "key": {certificates.ClientKey}}
	s := opened(t, fmt.Sprintf("rediss://%s?%s", p.Addr(), q.Encode()))
	granted(t, s, request("l"))
	if got := p.Trips(); got > 4 {
		t.Errorf("TLS: %d round trips to the grant, want at most 2 of the handshake and 2", got)
	}
}

// C05, C08: whatever becomes of an answer, the next attempt of the same handle goes on from what the store did.
func TestALostAnswerIsSettledByTheHandle(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	words := faults.Words{ // which the script of one operation alone has
		OfAcquire: "-- ARGV: name, handle, holder, slots", OfRenew: "-- ARGV: name, handle, slot, term\n", OfRelease: "-- ARGV: name, handle, slot, term (both",
	}
	limits.LostAnswers(t, r.Addr(), func(addr string) *backends.Store { return opened(t, "redis://"+addr) }, words)
}

// After a black hole all connections are made anew, and no call lasts longer than its limit.
func TestABlackHoleCostsEachCallItsLimitAndNoMore(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	p := proxy.New(t, r.Addr())
	s := opened(t, "redis://"+p.Addr())
	limits.BlackHole(t, p, r, s)
}

// A call whose context is cancelled while the server is silent returns at once.
func TestACancelledCallReturnsAtOnce(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	limits.Cancelled(t, r, opened(t, "redis://"+r.Addr()), 4*time.Second) // less than the 5 s of a call without a limit
}

// C15: terms grow over the loss of everything, and over a server that starts without what it knew.
func TestTermsGrowOverALostStore(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	s := opened(t, "redis://"+r.Addr())
	last := backends.Term(0)
	for i, lose := range []func(){
		func() {},
		func() { r.Do("FLUSHALL") },
		func() { r.Kill(); r.Restart() },
		func() { r.Do("DEL", keyOf("", "l")) },
	} {
		lose()
		req := request("l") // of all attempts: one whose answer came too late may have it
		servers.Within(t, 30*time.Second, "a grant", func() error {
			g, err := acquire(t, s, req)
			if err == nil && g.Term <= last {
				t.Errorf("loss %d: term: got %d, want more than %d", i, g.Term, last)
			}
			last = max(last, g.Term)
			return err
		})
	}
	// A store that keeps everything keeps the lease, too.
	r = servers.StartRedis(t, servers.RedisOptions{Durable: true})
	s = opened(t, "redis://"+r.Addr())
	g := granted(t, s, request("l"))
	r.Kill()
	r.Restart()
	servers.Within(t, 30*time.Second, "a renewal", func() error { return renew(t, s, g) })
	if _, err := heard(t, s, request("l")); !errors.Is(err, backends.ErrBusy) {
		t.Errorf("Acquire of another: got %v, want busy", err)
	}
}

// Somebody's own key, a damaged and a newer one are left as they are.
func TestWhatIsNotOursIsNotTouched(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	s := opened(t, "redis://"+r.Addr())
	for name, c := range map[string]struct {
		do         []string
		text, hint string
	}{
		"string":  {[]string{"SET", "KEY", "v"}, "holds something else", "rename"},
		"hash":    {[]string{"HSET", "KEY", "a", "b"}, "holds something else", "rename"},
		"newer":   {[]string{"HSET", "KEY", "f", "2", "n", "\x00newer"}, `the form "2" of a newer version`, "update underlease"},
		"other":   {[]string{"HSET", "KEY", "f", "1", "n", "\x00another"}, "of another lease", "the next term starts from the clock"},
		"counter": {[]string{"HSET", "KEY", "f", "1", "n", "\x00counter", "t", "x"}, "counters cannot be read", "look at it"},
		"slot":    {[]string{"HSET", "KEY", "f", "1", "n", "\x00slot", "t", "1", "c", "1", "m", "0", "v", "0", "s0", "{"}, "slot 0 cannot be read", "look at it"},
		"empty":   {[]string{"HSET", "KEY", "f", "1", "n", "\x00empty", "t", "1", "c", "1", "m", "0", "v", "0", "s0", "{}"}, "slot 0 cannot be read", "look at it"},
		"largest": {[]string{"HSET", "KEY", "f", "1", "n", "\x00largest", "t", "9007199254740991", "c", "0", "m", "0", "v", "0"}, "no room for a larger one", "look at it"},
	} {
		key := keyOf("", name)
		for i := range c.do {
			c.do[i] = strings.ReplaceAll(c.do[i], "KEY", key)
		}
		r.Do(c.do...)
		before := r.Do("DUMP", key)
		_, err := heard(t, s, request(name))
		if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), key) || !strings.Contains(backends.Hint(err), c.hint) {
			t.Errorf("%s: Acquire: got %v with the hint %q, want broken with %q, the key and %q", name, err, backends.Hint(err), c.text, c.hint)
		}
		if _, err := s.Renew(t.Context(), backends.Grant{Lease: name, Handle: "h", Term: 1}); name != "largest" && !errors.Is(err, backends.ErrBroken) {
			t.Errorf("%s: Renew: got %v, want broken", name, err)
		}
		if got := r.Do("DUMP", key); got != before {
			t.Errorf("%s: the key was changed", name)
		}
	}
	granted(t, s, request("good"))
	states, err := s.List(t.Context(), "")
	if !slices.ContainsFunc(states, func(s backends.State) bool { return s.Lease == "good" }) {
		t.Errorf("List: got %v, want the lease that can be shown among them", states)
	}
	for _, name := range []string{"string", "hash", "newer", "other", "counter", "slot"} {
		if key := keyOf("", name); !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), key) {
			t.Errorf("List: got the error %v, want broken with %s", err, key)
		}
	}
}

// Nodes can disagree for a moment, in a fail-over or while slots are moved. The URL is not to blame.
func TestNodesThatSendARequestToEachOtherAreUnavailable(t *testing.T) {
	var nodes [2]atomic.Value
	for i := range nodes {
		nodes[i].Store(standIn(t, func(command string) string {
			if command == "eval" || command == "evalsha" {
				return fmt.Sprintf("-MOVED 1 %s\r\n", nodes[1-i].Load())
			}
			return "+OK\r\n"
		}))
	}
	s := opened(t, fmt.Sprintf("redis+cluster://%s,%s", nodes[0].Load(), nodes[1].Load()))
	_, err := heard(t, s, request("moved"))
	if !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(backends.Hint(err), "do not agree") {
		t.Errorf("Acquire: got %v with the hint %q, want unavailable", err, backends.Hint(err))
	}
}

// A primary that was replaced does not know it while it is cut off from the sentinels. Its holder may still reach both.
func TestAHolderFollowsTheSentinelsAndNotItsPrimary(t *testing.T) {
	old, promoted := servers.StartRedis(t, servers.RedisOptions{}), servers.StartRedis(t, servers.RedisOptions{})
	var primary atomic.Pointer[servers.Redis]
	primary.Store(old)
	sentinel := standIn(t, func(command string) string {
		if command == "sentinel" {
			port := strconv.Itoa(primary.Load().Port)
			return fmt.Sprintf("*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%s\r\n", len(port), port)
		}
		return "+OK\r\n"
	})
	s := opened(t, "redis+sentinel://"+sentinel+"/mymaster")
	g := granted(t, s, request("replaced"))
	primary.Store(promoted)
	for begun := time.Now(); ; {
		err := renewed(t, s, g)
		if errors.Is(err, backends.ErrLost) {
			break
		}
		if err != nil || time.Since(begun) > 10*sentinelAge {
			t.Fatalf("Renew: got %v, want lost within %v: the new primary does not know the grant", err, sentinelAge)
		}
		time.Sleep(sentinelAge / 10) // nothing tells how old the word of a sentinel is
	}
}

// standIn listens, greets as Redis 7 does, and says what answer returns for every other command, by its first word.
func standIn(t *testing.T, answer func(command string) string) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				converse(conn, answer)
			}()
		}
	}()
	return l.Addr().String()
}

func converse(conn net.Conn, answer func(command string) string) {
	in := bufio.NewReader(conn)
	number := func() int {
		line, err := in.ReadString('\n')
		if err != nil || len(line) < 2 {
			return -1
		}
		n, err := strconv.Atoi(strings.TrimSpace(line[1:]))
		if err != nil {
			return -1
		}
		return n
	}
	for {
		words := number()
		if words <= 0 {
			return
		}
		command := ""
		for i := range words {
			word := make([]byte, number()+2)
			if _, err := io.ReadFull(in, word); err != nil {
				return
			}
			if i == 0 {
				command = strings.ToLower(strings.TrimSpace(string(word)))
			}
		}
		said := "*4\r\n$7\r\nversion\r\n$6\r\n7.0.15\r\n$5\r\nproto\r\n:2\r\n"
		if command != "hello" {
			said = answer(command)
		}
		if _, err := io.WriteString(conn, said); err != nil {
			return
		}
	}
}

// C62: what was used once goes away by itself, and what has records stays.
func TestAKeyLivesForSevenDaysAfterItsLastUse(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	s := opened(t, "redis://"+r.Addr())
	lives := func(lease string) time.Duration {
		n, err := strconv.ParseInt(r.Do("PTTL", keyOf("", lease)), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(n) * time.Millisecond
	}
	const week = 7 * 24 * time.Hour
	req := request("l")
	req.TTL, req.Hold = time.Hour, 2*time.Hour
	g := granted(t, s, req)
	if got := lives("l"); got > week+req.Hold || got < week+req.Hold-time.Minute {
		t.Errorf("life of a held lease: got %v, want 7 days after its hold", got)
	}
	if err := s.Release(t.Context(), g, backends.End{Outcome: backends.OutcomeNotStarted}); err != nil {
		t.Fatal(err)
	}
	if got := lives("l"); got > week || got < week-time.Minute {
		t.Errorf("life of a free lease: got %v, want 7 days", got)
	}
	if _, err := s.Records().Put(t.Context(), "", "l", backends.Put{Key: "k"}, nil); err != nil {
		t.Fatal(err)
	}
	granted(t, s, request("l"))
	if got := lives("l"); got >= 0 {
		t.Errorf("life of a lease with a record: got %v, want no end", got)
	}
	for range 2 {
		if err := s.Records().Delete(t.Context(), "", "l", "k"); err != nil {
			t.Fatal(err)
		}
	}
	if got := lives("l"); got < week-time.Minute {
		t.Errorf("life after the record was deleted: got %v, want 7 days", got)
	}
	if keys := r.Do("DBSIZE"); keys != "1" {
		t.Errorf("keys: got %s, want 1", keys)
	}
}

// A server that has forgotten the scripts is told again.
func TestAForgottenScriptIsSentAgain(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	p := proxy.New(t, r.Addr())
	s := opened(t, "redis://"+p.Addr())
	g := granted(t, s, request("l"))
	for i, want := range []int{1, 1, 2, 1} { // its text, its hash, both, its hash
		if i == 2 {
			r.Do("SCRIPT", "FLUSH", "SYNC")
		}
		p.Trips()
		if err := renewed(t, s, g); err != nil {
			t.Errorf("Renew %d: got %v, want the grant", i, err)
		}
		if got := p.Trips(); got != want {
			t.Errorf("Renew %d: got %d round trips, want %d", i, got, want)
		}
	}
	if got := r.Info("cmdstat_evalsha"); !strings.HasPrefix(got, "calls=3,") {
		t.Errorf("calls by hash: got %q, want 3", got)
	}
}

// What each mistake in a URL, and each state of a server, is called.
func TestEachTroubleHasItsOwnWords(t *testing.T) {
	const secret = "s3cr3t-pass"
	plain := servers.StartRedis(t, servers.RedisOptions{})
	closed := servers.StartRedis(t, servers.RedisOptions{User: "u", Password: secret, ACL: "~other:* -@all +hello +eval +time +hmget +exists"})
	encrypted := servers.StartRedis(t, servers.RedisOptions{TLS: servers.MakeCertificates(t)})
	replica := servers.StartRedis(t, servers.RedisOptions{Config: []string{fmt.Sprintf("replicaof 127.0.0.1 %d", plain.Port), "replica-serve-stale-data yes"}})
	full := servers.StartRedis(t, servers.RedisOptions{Config: []string{"maxmemory-policy noeviction"}})
	lonely := servers.StartRedis(t, servers.RedisOptions{Config: []string{"min-replicas-to-write 1"}})
	down := servers.StartRedis(t, servers.RedisOptions{Config: []string{"cluster-enabled yes"}}) // no slot is served
	shards := servers.StartCluster(t, servers.RedisOptions{})
	watched := servers.StartRedis(t, servers.RedisOptions{})
	free := servers.FreePort(t, 0)

	held := granted(t, opened(t, "redis://"+full.Addr()), request("held"))
	full.Do("CONFIG", "SET", "maxmemory", "1")

	elsewhere := "a"
	for shards.Owner(keyOf("", elsewhere)) == shards.Nodes[0] {
		elsewhere += "a"
	}
	for name, c := range map[string]struct {
		url        string
		lease      string
		kind       error // nil: a *ConfigError
		text, hint string
	}{
		"port":          {url: fmt.Sprintf("redis://127.0.0.1:%d", free), kind: backends.ErrUnavailable, text: "connection refused"},
		"host":          {url: "redis://host.invalid", kind: backends.ErrUnavailable, text: "host.invalid", hint: ""},
		"no password":   {url: "redis://" + closed.Addr(), kind: backends.ErrDenied, text: "asks for a password", hint: ":PASSWORD@"},
		"password":      {url: "redis://u:" + secret + "x@" + closed.Addr(), kind: backends.ErrDenied, text: "refused user or password"},
		"user":          {url: "redis://v:" + secret + "@" + closed.Addr(), kind: backends.ErrDenied, text: "refused user or password"},
		"rights":        {url: "redis://u:" + secret + "@" + closed.Addr(), kind: backends.ErrDenied, text: "NOPERM", hint: "ul:*"},
		"database":      {url: "redis://" + plain.Addr() + "/99", text: "no such database", hint: "databases"},
		"replica":       {url: "redis://" + replica.Addr(), kind: backends.ErrUnavailable, text: "is a replica", hint: "redis+sentinel"},
		"memory":        {url: "redis://" + full.Addr(), kind: backends.ErrUnavailable, text: "OOM", hint: "maxmemory"},
		"replicas":      {url: "redis://" + lonely.Addr(), kind: backends.ErrUnavailable, text: "NOREPLICAS"},
		"acknowledged":  {url: "redis://" + plain.Addr() + "?replicas=2", kind: backends.ErrUnavailable, text: "1 of 2 replicas"},
		"cluster down":  {url: "redis+cluster://" + down.Addr(), kind: backends.ErrUnavailable, text: "CLUSTERDOWN", hint: "CLUSTER INFO"},
		"cluster":       {url: "redis://" + shards.Nodes[0].Addr(), lease: elsewhere, text: "belongs to a cluster", hint: "redis+cluster://"},
		"no TLS":        {url: "rediss://" + plain.Addr(), kind: backends.ErrUnavailable, text: ""},
		"TLS":           {url: "redis://" + encrypted.Addr(), kind: backends.ErrUnavailable, text: ""},
		"authority":     {url: "rediss://" + encrypted.Addr(), kind: backends.ErrUnavailable, text: "authority", hint: "the parameter ca"},
		"no sentinel":   {url: "redis+sentinel://" + watched.Addr() + "/x", kind: backends.ErrUnavailable, text: "SENTINEL"},
		"dead sentinel": {url: fmt.Sprintf("redis+sentinel://127.0.0.1:%d/x", free), kind: backends.ErrUnavailable, text: "connection refused"},
	} {
		s := opened(t, c.url)
		lease := c.lease
		if lease == "" {
			lease = "trouble"
		}
		_, err := confirmed(t, s, request(lease))
		var config *backends.ConfigError
		switch {
		case c.kind == nil && !errors.As(err, &config):
			t.Errorf("%s: got %v, want a *ConfigError", name, err)
		case c.kind != nil && !errors.Is(err, c.kind):
			t.Errorf("%s: got %v, want %v", name, err, c.kind)
		case !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(c.text)) || !strings.Contains(backends.Hint(err), c.hint):
			t.Errorf("%s: got %q with the hint %q, want %q and %q", name, err, backends.Hint(err), c.text, c.hint)
		}
		if shown := fmt.Sprint(err, backends.Hint(err), s.Address); strings.Contains(shown, secret) || c.kind != nil && !strings.Contains(err.Error(), s.Address) {
			t.Errorf("%s: got %q, want the address %q and no secret", name, shown, s.Address)
		}
	}
	// A replica must not even say busy.
	granted(t, opened(t, "redis://"+plain.Addr()), request("busy"))
	servers.Within(t, 30*time.Second, "the replica has it", func() error {
		if replica.Do("EXISTS", keyOf("", "busy")) != "1" {
			return errors.New("not yet")
		}
		return nil
	})
	if _, err := heard(t, opened(t, "redis://"+replica.Addr()), request("busy")); !errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("Acquire of a held lease on a replica: got %v, want unavailable", err)
	}
	// Out of memory, a lease that is held is kept and given back.
	s := opened(t, "redis://"+full.Addr())
	if err := renewed(t, s, held); err != nil {
		t.Errorf("Renew out of memory: got %v, want the grant", err)
	}
	if err := s.Release(t.Context(), held, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release out of memory: got %v, want nil", err)
	}
}

// An old server is played: HELLO is answered as Redis before 6.0 does it, with the arguments repeated, or with an old version.
func TestAnOldServerIsRefused(t *testing.T) {
	const secret = "s3cr3t-pass"
	for name, c := range map[string]struct {
		answer, text string
	}{
		"5.0": {"-ERR unknown command `HELLO`, with args beginning with: `2`, `auth`, `u`, `" + secret + "`, \r\n", "before 6.0"},
		"6.0": {"*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.0.20\r\n", "6.0.20"},
	} {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		var asked atomic.Int32
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer conn.Close()
					in := bufio.NewReader(conn)
					for {
						line, err := in.ReadString('\n')
						if err != nil {
							return
						}
						if strings.EqualFold(strings.TrimSpace(line), "hello") {
							asked.Add(1)
							_, _ = io.WriteString(conn, c.answer)
						}
					}
				}()
			}
		}()
		_, err = heard(t, opened(t, "redis://u:"+secret+"@"+l.Addr().String()), request("l"))
		if !errors.Is(err, backends.ErrBroken) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "6.2 is needed") {
			t.Errorf("%s: got %v, want broken with %q and what is needed", name, err, c.text)
		}
		if strings.Contains(fmt.Sprint(err, backends.Hint(err)), secret) {
			t.Errorf("%s: the secret is shown: %v", name, err)
		}
		if asked.Load() != 1 {
			t.Errorf("%s: asked %d times, want once", name, asked.Load())
		}
	}
}

// A request that was held back on its way, as a network does to one whose sender has given up, comes when its acquisition is over.
func TestWhatWasGivenBackIsNotGrantedLate(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	c, other := opened(t, "redis://"+r.Addr()), opened(t, "redis://"+r.Addr())
	for _, lease := range []string{"abandoned", "released", "never granted"} {
		req := request(lease)
		req.Hold = time.Hour
		back := backends.Grant{Lease: lease, Handle: req.Handle}
		switch lease {
		case "abandoned":
			granted(t, c, req)
		case "released":
			req.Hold = 0
			back = granted(t, c, req)
		}
		if err := c.Release(t.Context(), back, backends.End{}); err != nil {
			t.Fatal(err)
		}
		if g, err := heard(t, other, req); !errors.Is(err, backends.ErrLost) {
			t.Errorf("%s: got %+v and %v for a handle that was given back, want lost", lease, g, err)
		}
		granted(t, other, request(lease))
	}
}

// The terms of a clock that was ahead are kept until they have passed, and no use is needed for that.
func TestATermAheadOfTheClockIsRemembered(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{Clock: true})
	s := opened(t, "redis://"+r.Addr())
	const ahead = 400 * 24 * time.Hour
	r.SetClock(ahead)
	g := granted(t, s, request("ahead"))
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Fatal(err)
	}
	r.SetClock(0)
	g = granted(t, s, request("ahead"))
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Fatal(err)
	}
	left, err := strconv.Atoi(r.Do("PTTL", keyOf("", "ahead")))
	if want := ahead + 6*24*time.Hour; err != nil || time.Duration(left)*time.Millisecond < want {
		t.Errorf("the key lives for %v and %v, want more than %v", time.Duration(left)*time.Millisecond, err, want)
	}
}

// A marker that a fail-over would forget is none: the gate says so, and runs again.
func TestARecordCountsWhenTheReplicasHaveIt(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	s := opened(t, "redis://"+r.Addr()+"?replicas=1")
	_, err := faults.Try(t, confirming, func(ctx context.Context) (int64, error) {
		return s.Records().Put(ctx, "", "marked", backends.Put{Key: "k", Value: []byte("v")}, nil)
	})
	if !errors.Is(err, backends.ErrUnavailable) || !strings.Contains(err.Error(), "0 of 1 replicas") {
		t.Errorf("Put: got %v, want unavailable, for no replica has it", err)
	}
}
