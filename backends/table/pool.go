package table

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Conn is a connection to a server.
type Conn interface {
	// Usable reports whether another statement may be sent. It costs no round trip.
	Usable() bool
	// Fresh is Usable for a connection on which nothing was sent for a while: it looks whether the server has closed it.
	Fresh() bool
	// Close closes the connection, and does not wait for the server for long.
	Close()
}

// lately is for how long a connection needs no look.
const lately = time.Second

// ErrClosed says that the client was closed.
var ErrClosed = errors.New("the client was closed")

// Pool keeps the connections that nobody uses. One that gave no answer is closed with all others: whatever became of the
// server or the way to it, the next attempt begins anew.
type Pool[C Conn] struct {
	Dial func(ctx context.Context) (C, error)

	mu     sync.Mutex
	closed bool
	round  int // of connections; raised by each failure
	idle   []idle[C]
}

type idle[C Conn] struct {
	conn  C
	since time.Time
}

// Do calls f with a connection that is f's alone while it lasts: the one that was used last, or a new one.
func (p *Pool[C]) Do(ctx context.Context, f func(C) error) error {
	conn, round, err := p.take(ctx)
	if err != nil {
		return err
	}
	returned := false
	defer func() {
		if !returned {
			conn.Close() // f has panicked
		}
	}()
	err = f(conn)
	returned = true
	if !conn.Usable() {
		conn.Close()
		p.failed(round)
		return err
	}
	p.mu.Lock()
	keep := !p.closed && p.round == round
	if keep {
		p.idle = append(p.idle, idle[C]{conn, time.Now()})
	}
	p.mu.Unlock()
	if !keep {
		conn.Close()
	}
	return err
}

func (p *Pool[C]) take(ctx context.Context) (conn C, round int, err error) {
	for {
		p.mu.Lock()
		round = p.round
		if p.closed {
			p.mu.Unlock()
			return conn, round, ErrClosed
		}
		if err := ctx.Err(); err != nil {
			p.mu.Unlock()
			return conn, round, err
		}
		last := len(p.idle) - 1
		if last < 0 {
			p.mu.Unlock()
			conn, err = p.Dial(ctx)
			return conn, round, err
		}
		one := p.idle[last]
		p.idle = p.idle[:last]
		p.mu.Unlock()
		if time.Since(one.since) < lately || one.conn.Fresh() {
			return one.conn, round, nil
		}
		one.conn.Close()
		p.failed(round)
	}
}

// failed closes what is idle of a round.
func (p *Pool[C]) failed(round int) {
	p.mu.Lock()
	var all []idle[C]
	if p.round == round {
		p.round++
		all, p.idle = p.idle, nil
	}
	p.mu.Unlock()
	for _, one := range all {
		one.conn.Close()
	}
}

// Close closes all connections that nobody uses; the others are closed when their use ends.
func (p *Pool[C]) Close() {
	p.mu.Lock()
	p.closed = true
	all := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, one := range all {
		one.conn.Close()
	}
}
