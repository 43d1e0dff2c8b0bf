//go:build linux

package etcd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest/proxy"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/quorum"
)

// A server that was started again knows no token: another is asked for, and the call that found out succeeds.
func TestATokenThatTheServerHasForgottenIsRenewed(t *testing.T) {
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{Password: "kit", Args: []string{"--bcrypt-cost", "4"}})
	s := opened(t, "etcd://root:kit@"+c.Nodes[0].Addr())
	g, err := acquire(t, s, "l")
	if err != nil {
		t.Fatal(err)
	}
	c.Restart()
	servers.Within(t, 30*time.Second, "a renewal", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := s.Renew(ctx, g)
		return err
	})
	if err := s.Release(t.Context(), g, backends.End{Outcome: "ok"}); err != nil {
		t.Errorf("Release: got %v, want nil", err)
	}
}

// Where a user is given and the server knows none, nothing is asked for.
func TestAUserWhereNoneIsAskedFor(t *testing.T) {
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	if _, err := acquire(t, opened(t, "etcd://somebody:secret@"+c.Nodes[0].Addr()), "l"); err != nil {
		t.Errorf("Acquire: got %v, want a grant", err)
	}
}

// Of several members one that cannot be reached costs nothing but the look, and one that does not answer costs one call.
func TestOneMemberThatAnswersIsEnough(t *testing.T) {
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it takes connections, and that is all
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed := fmt.Sprintf("127.0.0.1:%d", servers.FreePort(t, 0))
	for _, others := range []string{closed, closed + "," + closed, silent.Addr().String(), silent.Addr().String() + "," + closed} {
		for range 6 { // who is asked first is by chance
			s := opened(t, "etcd://"+others+","+c.Nodes[0].Addr())
			var got error
			for range 1 + strings.Count(others, silent.Addr().String()) {
				ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
				if _, got = s.List(ctx, ""); got == nil {
					cancel()
					break
				}
				cancel()
			}
			if got != nil {
				t.Errorf("%s: got %v, want an answer", others, got)
			}
		}
	}
}

// What is no answer of etcd is an error that says so, whatever it is.
func TestWhatIsNoAnswerIsAnError(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"a page":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") },
		"nothing":     func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Type", "application/grpc") },
		"half":        func(w http.ResponseWriter, _ *http.Request) { answer(w, []byte{0, 0, 0, 0, 9, 1}) },
		"compressed":  func(w http.ResponseWriter, _ *http.Request) { answer(w, []byte{1, 0, 0, 0, 0}) },
		"too large":   func(w http.ResponseWriter, _ *http.Request) { answer(w, []byte{0, 0xff, 0, 0, 0}) },
		"no message":  func(w http.ResponseWriter, _ *http.Request) { answer(w, frame([]byte{0x0a, 0xff})) },
		"no header":   func(w http.ResponseWriter, _ *http.Request) { answers200(w, nil) },
		"no revision": func(w http.ResponseWriter, _ *http.Request) { answers200(w, []byte{0x0a, 0x02, 0x08, 0x01}) },
		"no outcome": func(w http.ResponseWriter, _ *http.Request) {
			answer(w, frame([]byte{0x0a, 0x02, 0x18, 0x2a}))
		},
		"no status": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Grpc-Status", "many")
			answer(w, nil)
		},
	} {
		server := httptest.NewUnstartedServer(handler)
		server.Config.Protocols = new(http.Protocols)
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		server.Start()
		s := opened(t, "etcd://"+server.Listener.Addr().String())
		_, err := acquire(t, s, "l")
		t.Logf("%s: %v", name, err)
		_, inspectErr := s.Inspect(t.Context(), "", "l")
		_, renewErr := s.Renew(t.Context(), backends.Grant{Lease: "l", Handle: "h", Term: 1, TTL: time.Minute})
		releaseErr := s.Release(t.Context(), backends.Grant{Lease: "l", Handle: "h", Term: 1}, backends.End{Outcome: "ok"})
		for call, err := range map[string]error{"Acquire": err, "Inspect": inspectErr, "Renew": renewErr, "Release": releaseErr} {
			if !errors.Is(err, backends.ErrUnavailable) && !errors.Is(err, backends.ErrBroken) {
				t.Errorf("%s: %s: got %v, want unavailable or broken", name, call, err)
			}
		}
		server.Close()
	}
}

func answer(w http.ResponseWriter, body []byte) {
	w.Header().Set("Content-Type", "application/grpc")
	_, _ = w.Write(body)
}

// answers200 is an answer with a message and the outcome that all is well.
func answers200(w http.ResponseWriter, message []byte) {
	answer(w, frame(message))
	w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
}

// A refusal comes in a header where there is no message, else in a trailer, with special characters as in a URL.
func TestARefusalIsReadWhereItStands(t *testing.T) {
	for _, trailer := range []bool{false, true} {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/grpc")
			prefix := ""
			if trailer {
				w.WriteHeader(http.StatusOK)
				_ = http.NewResponseController(w).Flush()
				prefix = http.TrailerPrefix
			}
			w.Header().Set(prefix+"Grpc-Status", "14")
			w.Header().Set(prefix+"Grpc-Message", "etcdserver: 100%25 full%3A sorry")
		}))
		server.Config.Protocols = new(http.Protocols)
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		server.Start()
		_, err := acquire(t, opened(t, "etcd://"+server.Listener.Addr().String()), "l")
		if !errors.Is(err, backends.ErrUnavailable) || !strings.HasSuffix(err.Error(), ": 100% full: sorry") {
			t.Errorf("trailer %t: got %v, want unavailable and the words", trailer, err)
		}
		server.Close()
	}
}

func TestBehindAPrefix(t *testing.T) {
	for prefix, want := range map[string]string{"ul/": "ul0", "a": "b", "a\xff": "b", "\xff\xff": "\x00", "": "\x00"} {
		if got := behind(prefix); got != want {
			t.Errorf("%q: got %q, want %q", prefix, got, want)
		}
	}
}

// Messages byte for byte, as protoc-gen-go writes them.
func TestMessagesAreThoseOfProtocolBuffers(t *testing.T) {
	txn, err := txnRequest(quorum.Txn{
		Checks: []quorum.Check{{Key: "a", Version: 300}, {Key: "b"}, {Key: "d", Version: 5, Session: "7f"}},
		Writes: []quorum.Write{{Key: "a", Value: []byte("v"), Session: "7f"}, {Key: "b", Value: []byte("w")}, {Key: "c", Delete: true}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct{ got, want []byte }{
		"txn": {txn, []byte("\x0a\x08\x10\x02\x1a\x01a\x30\xac\x02" + "\x0a\x07\x10\x01\x1a\x01b\x28\x00" +
			"\x0a\x07\x10\x02\x1a\x01d\x30\x05" + "\x0a\x07\x10\x04\x1a\x01d\x40\x7f" +
			"\x12\x0a\x12\x08\x0a\x01a\x12\x01v\x18\x7f" + "\x12\x08\x12\x06\x0a\x01b\x12\x01w" + "\x12\x05\x1a\x03\x0a\x01c")},
		"range":        {rangeRequest("ul/", true), []byte("\x0a\x03ul/\x12\x03ul0\x38\x01")},
		"grant":        {grantRequest(1<<62, 60), []byte("\x08\x3c\x10\x80\x80\x80\x80\x80\x80\x80\x80\x40")},
		"watch":        {watchRequest("k", 5), []byte("\x0a\x08\x0a\x01k\x12\x01l\x18\x05")},
		"authenticate": {authenticateRequest("u", "p"), []byte("\x0a\x01u\x12\x01p")},
		"keep":         {leaseRequest(-1), []byte("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")},
	} {
		if !bytes.Equal(c.got, c.want) {
			t.Errorf("%s: got %q, want %q", what, c.got, c.want)
		}
	}
	view, err := rangeResponse([]byte("\x0a\x02\x18\x2a" + "\x12\x0e\x0a\x01k\x10\x03\x18\x04\x20\x01\x2a\x01v\x30\x7f" + "\x20\x01" + "\xfa\x3f\x03new" + "\xf9\x3f12345678" + "\xfd\x3f1234"))
	if err != nil || view.Version != 42 || len(view.Pairs) != 1 {
		t.Fatalf("range: got %+v, %v, want one key at 42", view, err)
	}
	if p := view.Pairs[0]; p.Key != "k" || p.Created != 3 || p.Version != 4 || string(p.Value) != "v" || p.Session != "7f" {
		t.Errorf("range: got %+v, want the key", p)
	}
	if ttl, err := ttlResponse([]byte("\x0a\x02\x18\x2a\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")); err != nil || ttl != -1 {
		t.Errorf("ttl: got %d, %v, want -1", ttl, err)
	}
}

// Bytes that nobody can read are an error, and nothing worse.
func FuzzAnswersAreRead(f *testing.F) {
	f.Add([]byte("\x0a\x02\x18\x2a\x12\x0e\x0a\x01k\x10\x03\x18\x04\x20\x01\x2a\x01v\x30\x7f\x20\x01"))
	f.Add([]byte("\x5a\x04\x12\x02\x0a\x00\x20\x01\x28\x07\x32\x03why"))
	f.Add([]byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01})
	f.Fuzz(func(t *testing.T, b []byte) {
		view, err := rangeResponse(b)
		size := 0
		for _, p := range view.Pairs {
			size += len(p.Key) + len(p.Value)
		}
		if size > len(b) {
			t.Errorf("got %d bytes out of %d", size, len(b))
		}
		if _, _, err2 := txnResponse(b); err == nil && err2 != nil {
			t.Errorf("got %v for what is a message", err2)
		}
		_, _ = watchResponse(b)
		_, _ = ttlResponse(b)
		_, _ = statusResponse(b)
	})
}

// http2 serves HTTP/2 without TLS, as a member of etcd does.
func http2(t *testing.T, h http.HandlerFunc) (addr string) {
	t.Helper()
	server := httptest.NewUnstartedServer(h)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// says is an answer of gRPC without a message.
func says(code int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", strconv.Itoa(code))
		w.Header().Set("Grpc-Message", text)
	}
}

// C11: an endpoint that answers, but not as a member that works does, costs no call, or one at most where something may have been done;
// then another is asked, for good.
func TestAnEndpointThatAnswersWronglyIsLeft(t *testing.T) {
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	code := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
	}
	for name, bad := range map[string]struct {
		h     http.HandlerFunc
		costs int // of transactions
	}{
		"429":        {code(429), 0},
		"502":        {code(502), 1},
		"503":        {code(503), 1},
		"504":        {code(504), 1},
		"404":        {code(404), 0},
		"403":        {code(403), 0},
		"a page":     {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }, 0},
		"exhausted":  {says(8, "too many"), 0},
		"requests":   {says(8, saysTooMany), 0},
		"not leader": {says(9, saysNotLeader), 0},
		"learner":    {says(9, saysLearner), 0},
		"data loss":  {says(15, saysCorrupt), 0},
		"unknown":    {says(2, "?"), 1},
		"internal":   {says(13, "?"), 1},
		"no leader":  {says(14, saysNoLeader), 0},
		"away":       {says(14, "connection refused"), 1},
	} {
		var asked atomic.Int32
		addr := http2(t, func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			bad.h(w, r)
		})
		d := driven(t, "etcd://"+addr+","+c.Nodes[0].Addr())
		try := func(what string, costs int, f func(context.Context) error) {
			t.Helper()
			d.wire.mu.Lock()
			d.wire.at = 0
			d.wire.mu.Unlock()
			asked.Store(0)
			for range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				err := f(ctx)
				cancel()
				if err == nil {
					break
				}
				if costs--; costs < 0 || !errors.Is(err, backends.ErrUnavailable) {
					t.Errorf("%s: %s: got %v, want an answer of the other one", name, what, err)
				}
			}
			if costs > 0 {
				t.Errorf("%s: %s: got an answer at once, want that nothing is done twice", name, what)
			}
			if n := asked.Load(); n != 1 {
				t.Errorf("%s: %s: asked %d times, want once", name, what, n)
			}
		}
		try("Read", 0, func(ctx context.Context) error { _, err := d.Read(ctx, "ul/"); return err })
		try("Begin", 0, func(ctx context.Context) error { _, err := d.Begin(ctx, name, time.Minute); return err })
		try("Keep", 0, func(ctx context.Context) error { return d.Keep(ctx, d.Name(name)) })
		try("Commit", bad.costs, func(ctx context.Context) error {
			_, _, err := d.Commit(ctx, quorum.Txn{Writes: []quorum.Write{{Key: "ul/x", Value: []byte("v")}}})
			return err
		})
		try("End", 0, func(ctx context.Context) error { return d.End(ctx, d.Name(name)) })
	}
}

// A server closes the connection of a client that pings while nothing is asked. Source: grpc-go, keepalive.EnforcementPolicy, as etcd
// sets it. A run that renews every now and then keeps its one connection.
func TestAnIdleConnectionStays(t *testing.T) {
	notOnceMore(t)
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{})
	p := proxy.New(t, c.Nodes[0].Addr())
	s := opened(t, "etcd://"+p.Addr())
	g, err := acquire(t, s, "l")
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-time.After(32 * time.Second): // five of the pings that there were once
	case <-t.Context().Done():
	}
	if _, err := s.Renew(t.Context(), g); err != nil {
		t.Errorf("Renew: got %v, want the grant", err)
	}
	if n := p.Made(); n != 1 {
		t.Errorf("%d connections were made, want one", n)
	}
}

// A server that says GOAWAY ends a connection in good order: what was asked is answered, and what comes next goes over another one, also
// while a watch is still open.
func TestAConnectionThatTheServerGivesUpIsMadeAnew(t *testing.T) {
	header := []byte{0x0a, 0x02, 0x18, 0x2a}
	watching := make(chan struct{}, 1)
	addr := http2(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == methodWatch {
			answer(w, frame(nil))
			_ = http.NewResponseController(w).Flush()
			watching <- struct{}{}
			<-r.Context().Done()
			return
		}
		w.Header().Set("Connection", "close") // in HTTP/2: GOAWAY
		answers200(w, header)
	})
	d := driven(t, "etcd://"+addr)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Await(ctx, "ul/", 1) }()
	<-watching
	for i := range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if _, err := d.Read(ctx, "ul/"); err != nil {
			t.Errorf("Read %d: got %v, want an answer", i, err)
		}
		cancel()
	}
	select {
	case err := <-ended:
		t.Errorf("the watch: got %v, want that it goes on", err)
	default:
	}
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the watch: got %v, want that it ends with its context", err)
	}
}

// A watch that fails ends nothing but itself: a transaction that is under way at the same time gets its answer.
func TestAWatchThatFailsEndsItselfAlone(t *testing.T) {
	asked, failed := make(chan struct{}), make(chan struct{})
	addr := http2(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == methodWatch {
			answer(w, frame(nil))
			_ = http.NewResponseController(w).Flush()
			<-asked
			panic(http.ErrAbortHandler) // the stream is reset
		}
		close(asked)
		<-failed
		answers200(w, []byte{0x0a, 0x02, 0x18, 0x2a, 0x10, 0x01})
	})
	d := driven(t, "etcd://"+addr)
	done := make(chan error, 1)
	go func() {
		_, _, err := d.Commit(t.Context(), quorum.Txn{Writes: []quorum.Write{{Key: "ul/x"}}})
		done <- err
	}()
	if err := d.Await(t.Context(), "ul/", 1); !errors.Is(err, backends.ErrUnavailable) {
		t.Errorf("the watch: got %v, want unavailable", err)
	}
	close(failed)
	if err := <-done; err != nil {
		t.Errorf("Commit: got %v, want nil", err)
	}
}

// driven opens a URL below package quorum.
func driven(t *testing.T, raw string) *driver {
	t.Helper()
	u, err := backends.ParseURL(raw)
	if err != nil {
		t.Fatal(err)
	}
	s, err := parse(u)
	if err != nil {
		t.Fatal(err)
	}
	d := newDriver(s)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// A watch that is refused for a token which the servers know no more asks for another, in whatever words it is refused.
func TestAWatchAsksForAnotherToken(t *testing.T) {
	header := []byte{0x0a, 0x02, 0x18, 0x2a}
	var logins atomic.Int32
	addr := http2(t, func(w http.ResponseWriter, r *http.Request) {
		token := r.Header.Get("Token")
		switch {
		case r.URL.Path == methodAuthenticate:
			answers200(w, appendBytes(slices.Clip(header), 2, fmt.Sprint("token ", logins.Add(1))))
		case r.URL.Path == methodWatch && token == "token 1": // canceled, and why
			answers200(w, appendBytes(appendInt(nil, 4, 1), 6, "rpc error: code = Unauthenticated desc = "+saysToken))
		case r.URL.Path == methodWatch && token == "token 2":
			says(16, "rpc error: code = Unauthenticated desc = "+saysToken)(w, r)
		default:
			answers200(w, appendPart(nil, 11, "")) // an event
		}
	})
	d := driven(t, "etcd://u:p@"+addr)
	if err := d.Await(t.Context(), "ul/", 1); !errors.Is(err, backends.ErrUnavailable) { // it tries once more, not for ever
		t.Errorf("Await with two old tokens: got %v, want unavailable", err)
	}
	if err := d.Await(t.Context(), "ul/", 1); err != nil || logins.Load() != 3 {
		t.Errorf("Await: got %v after %d logins, want nil after three", err, logins.Load())
	}
}

// That the servers ask for no user is asked once. When they do from some time on, the call that finds out succeeds.
func TestWhetherAUserIsAskedForIsAskedOnce(t *testing.T) {
	c := servers.StartEtcd(t, 1, servers.EtcdOptions{Args: []string{"--bcrypt-cost", "4"}})
	n := c.Nodes[0]
	to, err := url.Parse("http://" + n.Addr())
	if err != nil {
		t.Fatal(err)
	}
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	through := httputil.NewSingleHostReverseProxy(to)
	through.Transport = &http.Transport{Protocols: &protocols}
	var logins, reads atomic.Int32
	d := driven(t, "etcd://root:kit@"+http2(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case methodAuthenticate:
			logins.Add(1)
		case methodRange:
			reads.Add(1)
		}
		through.ServeHTTP(w, r)
	}))
	costs := func(when string, wantLogins, wantReads int32) {
		t.Helper()
		if _, err := d.Read(t.Context(), "ul/"); err != nil {
			t.Fatalf("Read %s: got %v, want nil", when, err)
		}
		if l, r := logins.Swap(0), reads.Swap(0); l != wantLogins || r != wantReads {
			t.Errorf("Read %s: %d logins and %d reads, want %d and %d", when, l, r, wantLogins, wantReads)
		}
	}
	costs("at first", 1, 1)
	costs("once more", 0, 1)
	n.Post("/v3/auth/user/add", map[string]any{"name": "root", "password": "kit"})
	n.Post("/v3/auth/user/grant", map[string]any{"user": "root", "role": "root"})
	n.Post("/v3/auth/enable", map[string]any{})
	costs("when a user is asked for", 1, 2)
	costs("with the token", 0, 1)
}

// A holder that lost its lease on a server which revokes what is kept is told what to do about it. On another version
// nobody is.
func TestALossOnAServerThatRevokesWhatIsKeptSaysSo(t *testing.T) {
	for version, wants := range map[string]bool{"3.5.9": true, "3.4.30": true, "3.5.13": false, "3.6.1": false, "": false} {
		lost := false
		var held []byte
		addr := http2(t, func(w http.ResponseWriter, r *http.Request) {
			header := appendPart(nil, 1, appendInt(nil, 3, 42))
			switch r.URL.Path {
			case methodStatus:
				answers200(w, appendBytes(header, 2, version))
			case methodRange:
				if !lost {
					header = appendPart(header, 2, held)
				}
				answers200(w, header)
			case methodKeepAlive:
				if !lost {
					header = appendInt(header, 3, 60)
				}
				answers200(w, header)
			default:
				says(12, "unknown")(w, r)
			}
		})
		d := driven(t, "etcd://"+addr)
		c := quorum.New(d, quorum.Options{Root: "ul"})
		g := backends.Grant{Lease: "l", Handle: "h", Term: 7, TTL: time.Minute}
		sum := sha256.Sum256([]byte("\x00l\x00h"))
		digest := hex.EncodeToString(sum[:16])
		held = appendBytes(appendBytes(nil, 1, "ul/lease/_/l/slot/0/grant"), 5, fmt.Sprintf(`{"h":%q,"w":"somebody","t":7,"l":60000}`, digest))
		held = appendInt(appendInt(held, 3, 42), 6, leaseID("grant/"+digest))
		if _, err := c.Renew(t.Context(), g); err != nil {
			t.Fatalf("%q: Renew: got %v, want the grant", version, err)
		}
		lost = true
		_, err := c.Renew(t.Context(), g)
		if !errors.Is(err, backends.ErrLost) {
			t.Errorf("%q: Renew after the loss: got %v, want lost", version, err)
		}
		if hint := backends.Hint(err); strings.Contains(hint, "etcd "+version+" may revoke") != wants || wants != strings.Contains(hint, "update to 3.5.13") {
			t.Errorf("%q: got the hint %q, want advice: %t", version, hint, wants)
		}
	}
}
