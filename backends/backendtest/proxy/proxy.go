//go:build linux

// Package proxy stands between a client and a server and does to their connections what networks do.
//
// # Promise
//
// What is armed happens to exactly the requests that it was armed for, and the proxy says how often it did: a test that
// meant to lose an answer can see that one was lost. Without a fault bytes pass unchanged, in order, and a side that closes is
// closed on the other side too.
//
// # How
//
// Bytes from the client, until the server answers, are one request. Where a fault waits for a certain request, a
// request is read as a whole before any of it is forwarded: until nothing has come for [quiet].
//
// # Limits
//
// A black hole holds bytes back and lets them through when it is healed, as retransmission does, also those of a client that
// has given up by then; but a connection can still be made, and hangs afterwards. Of encrypted connections no request can be told
// from another.
package proxy

import (
	"bytes"
	"net"
	"sync"
	"testing"
	"time"
)

// quiet is how long nothing has to come from a client before what came counts as a whole request.
const quiet = 3 * time.Millisecond

// Kind is what happens to one request.
type Kind int

// What happens to a request.
const (
	ResetBefore Kind = iota + 1 // the connection is reset, and the server never sees the request
	ResetAfter                  // the server does it, and the connection is reset in the place of the answer
	Lose                        // the server does it, and there is no answer, on this connection ever
	Late                        // the answer comes late
)

// Fault is what happens to some requests.
type Fault struct {
	Kind  Kind
	Match string        // only requests that contain these bytes; empty: all
	Count int           // how many of them; zero: one
	Delay time.Duration // of Late
}

// Direction is where bytes go.
type Direction int

// The directions; both is Requests | Answers.
const (
	Requests Direction = 1 << iota
	Answers
)

// Proxy is a listener on loopback, and what goes through it.
type Proxy struct {
	t        testing.TB
	listener net.Listener
	target   string

	mu     sync.Mutex
	change *sync.Cond
	held   Direction
	delay  time.Duration
	faults []Fault
	conns  map[*conn]bool
	done   map[Kind]int
	trips  int
	made   int
	cuts   int
	closed bool
	stop   chan struct{} // of CutEvery; nil: none
	all    sync.WaitGroup
}

// conn is a pair of connections.
type conn struct {
	client, server *net.TCPConn
	waits          bool // for an answer
	resets         bool // in the place of the next answer
	mute           bool // no answer any more
	late           time.Duration
}

// New starts a proxy in front of a server at host:port. It ends with the test.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{t: t, listener: l, target: target, conns: map[*conn]bool{}, done: map[Kind]int{}}
	p.change = sync.NewCond(&p.mu)
	p.all.Go(p.accept)
	t.Cleanup(func() {
		p.Heal()
		p.mu.Lock()
		p.closed = true
		p.mu.Unlock()
		_ = l.Close()
		p.cut()
		p.all.Wait()
	})
	return p
}

// Addr returns host:port of the proxy.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Inject arms a fault. Faults are tried in the order in which they were armed; one request has one at most.
func (p *Proxy) Inject(f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.Count = max(f.Count, 1)
	p.faults = append(p.faults, f)
}

// Done returns to how many requests something of that kind has happened.
func (p *Proxy) Done(k Kind) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done[k]
}

// BlackHole holds back all bytes in these directions, until [Proxy.Heal].
func (p *Proxy) BlackHole(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held |= d
}

// Delay makes every answer late, until [Proxy.Heal].
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Cut resets every connection.
func (p *Proxy) Cut() { p.cut() }

// CutEvery resets every connection again and again, until [Proxy.Heal].
func (p *Proxy) CutEvery(d time.Duration) {
	stop := make(chan struct{})
	p.mu.Lock()
	p.stop = stop
	p.mu.Unlock()
	p.all.Go(func() {
		tick := time.NewTicker(d)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				p.mu.Lock()
				if p.stop == stop { // a tick of before Heal may be seen after it
					p.reset()
				}
				p.mu.Unlock()
			case <-stop:
				return
			}
		}
	})
}

// Cuts returns how many connections were reset by [Proxy.Cut] and [Proxy.CutEvery].
func (p *Proxy) Cuts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

// Heal ends black holes, delays and cuts, and forgets faults that were armed. What was held back goes on.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held, p.delay, p.faults = 0, 0, nil
	if p.stop != nil {
		close(p.stop)
		p.stop = nil
	}
	p.change.Broadcast()
}

// Trips returns how many requests were seen since the last call: each of them waits for an answer of the server.
func (p *Proxy) Trips() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.trips
	p.trips = 0
	return n
}

// Idle reports whether no connection waits for an answer of the server.
func (p *Proxy) Idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		if c.waits {
			return false
		}
	}
	return true
}

// Made returns how many connections were made since the last call.
func (p *Proxy) Made() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.made
	p.made = 0
	return n
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp4", p.target)
		if err != nil {
			reset(client.(*net.TCPConn)) // as a host without the server would
			continue
		}
		c := &conn{client: client.(*net.TCPConn), server: server.(*net.TCPConn)}
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			c.reset()
			return
		}
		p.conns[c] = true
		p.made++
		p.mu.Unlock()
		p.all.Go(func() { p.requests(c) })
		p.all.Go(func() { p.answers(c) })
	}
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // then close sends RST; one that is closed already needs none
	_ = c.Close()
}

func (c *conn) reset() {
	reset(c.client)
	reset(c.server)
}

func (p *Proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reset()
}

// reset is cut for who has the mutex.
func (p *Proxy) reset() {
	for c := range p.conns {
		c.reset()
		p.cuts++
	}
	clear(p.conns)
	p.change.Broadcast()
}

// requests copies from client to server.
func (p *Proxy) requests(c *conn) {
	defer func() {
		_ = c.server.CloseWrite() // or it is closed already
	}()
	b := make([]byte, 256<<10)
	for {
		n, err := c.client.Read(b)
		if n == 0 || err != nil {
			return
		}
		if p.armed() {
			n = c.whole(b, n)
		}
		if p.request(c, b[:n]) == ResetBefore {
			c.reset()
			return
		}
		if !p.pass(c, Requests) {
			return
		}
		if _, err := c.server.Write(b[:n]); err != nil {
			_ = c.client.Close() // the server has gone
			return
		}
	}
}

// whole reads what else belongs to a request.
func (c *conn) whole(b []byte, n int) int {
	for n < len(b) {
		_ = c.client.SetReadDeadline(time.Now().Add(quiet))
		more, err := c.client.Read(b[n:])
		n += more
		if err != nil {
			break // nothing came, or the next read says what it is
		}
	}
	_ = c.client.SetReadDeadline(time.Time{})
	return n
}

func (p *Proxy) armed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.faults) > 0
}

// request takes down a request and returns what has to happen to it, or zero.
func (p *Proxy) request(c *conn, b []byte) Kind {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !c.waits {
		c.waits = true
		p.trips++
	}
	for i := range p.faults {
		f := &p.faults[i]
		if f.Count == 0 || !bytes.Contains(b, []byte(f.Match)) {
			continue
		}
		f.Count--
		p.done[f.Kind]++
		switch f.Kind {
		case ResetAfter:
			c.resets = true
		case Lose:
			c.mute = true
		case Late:
			c.late = f.Delay
		case ResetBefore:
			delete(p.conns, c)
		}
		return f.Kind
	}
	return 0
}

// pass waits until bytes may go in a direction. It returns false when the connection was cut meanwhile.
func (p *Proxy) pass(c *conn, d Direction) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.held&d != 0 && p.conns[c] {
		p.change.Wait()
	}
	return p.conns[c]
}

// answers copies from server to client.
func (p *Proxy) answers(c *conn) {
	defer func() {
		p.mu.Lock()
		delete(p.conns, c)
		p.mu.Unlock()
		_ = c.client.Close()
		_ = c.server.Close()
	}()
	b := make([]byte, 256<<10)
	for {
		n, err := c.server.Read(b)
		if n == 0 || err != nil {
			return
		}
		p.mu.Lock()
		resets, mute, late := c.resets, c.mute, max(p.delay, c.late)
		c.waits, c.late = false, 0
		p.mu.Unlock()
		switch {
		case resets:
			c.reset()
			return
		case mute:
			continue
		case late > 0:
			time.Sleep(late) // the fault itself
		}
		if !p.pass(c, Answers) {
			return
		}
		if _, err := c.client.Write(b[:n]); err != nil {
			return
		}
	}
}
