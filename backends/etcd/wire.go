package etcd

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/underlease/underlease/backends/network"
)

// wire speaks gRPC with one of the members, over the HTTP/2 of the standard library: a request is a POST whose body is one message
// behind five bytes, its outcome stands in the trailer.
//
// Source: gRPC over HTTP2, the protocol.
//
// The client library of etcd does the same, and half of what it costs is spent before main: it reads descriptions of all messages of
// etcd, and of what they are described with. A dozen messages are needed here (see messages.go).
type wire struct {
	scheme         string // http or https
	hosts          []string
	user, password string
	tls            *tls.Config

	mu     sync.Mutex
	at     int // of hosts: who is asked
	now    *line
	token  string
	closed bool

	tokenless bool // the servers have said that they ask for no token
}

// line is what connections are made with. It is given up as a whole.
type line struct {
	transport *http.Transport

	mu    sync.Mutex
	conns map[net.Conn]bool
	ended bool
}

func newWire(s settings) *wire {
	w := &wire{scheme: "http", hosts: s.hosts, user: s.user, password: s.password, tls: s.tls, at: rand.IntN(len(s.hosts))}
	if s.tls != nil {
		w.scheme = "https"
	}
	return w
}

// A host that is gone without a word is found out where only a watch is under way. TCP asks for it: pings of HTTP/2 would go on while
// there is no watch, and etcd closes the connection of who sends them then. A member that is frozen on a host that lives is found out by
// whoever asks it something: who holds renews, and who waits looks every few seconds.
// Source: grpc-go, keepalive.EnforcementPolicy, whose PermitWithoutStream etcd leaves out.
var alive = net.KeepAliveConfig{Enable: true, Idle: 6 * time.Second, Interval: time.Second, Count: 3}

// dialLimit is the key under which a request says how long a connection may take to be made.
type dialLimit struct{}

func (w *wire) newLine() *line {
	l := &line{conns: map[net.Conn]bool{}}
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	l.transport = &http.Transport{
		Protocols: &protocols, TLSClientConfig: w.tls, DisableCompression: true,
		MaxConnsPerHost: 1, // all requests share one; without a limit each of those that begin at once would make its own
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			d := net.Dialer{KeepAliveConfig: alive}
			d.Timeout, _ = ctx.Value(dialLimit{}).(time.Duration)
			c, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return l.keep(c)
		},
	}
	return l
}

// conn is a connection that is known until it is closed.
type conn struct {
	net.Conn
	line *line
}

func (c *conn) Close() error {
	c.line.mu.Lock()
	delete(c.line.conns, c)
	c.line.mu.Unlock()
	return c.Conn.Close()
}

func (l *line) keep(c net.Conn) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		_ = c.Close()
		return nil, net.ErrClosed
	}
	known := &conn{c, l}
	l.conns[known] = true
	return known, nil
}

// end closes all connections, also those that are in use.
func (l *line) end() {
	l.mu.Lock()
	l.ended = true
	conns := l.conns
	l.conns = nil
	l.mu.Unlock()
	for c := range conns {
		_ = c.(*conn).Conn.Close()
	}
	l.transport.CloseIdleConnections()
}

// line returns the one in use.
func (w *wire) line() (*line, int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, 0, errClosed
	}
	if w.now == nil {
		w.now = w.newLine()
	}
	return w.now, w.at, nil
}

var errClosed = errors.New("the client is closed")

// leave gives a line up, and asks the next member from then on.
func (w *wire) leave(l *line, at int) {
	w.mu.Lock()
	mine := w.now == l
	if mine {
		w.now = nil
	}
	if w.at == at {
		w.at = (at + 1) % len(w.hosts)
	}
	w.mu.Unlock()
	if mine {
		l.end()
	}
}

func (w *wire) close() {
	w.mu.Lock()
	l := w.now
	w.now, w.closed = nil, true
	w.mu.Unlock()
	if l != nil {
		l.end()
	}
}

// refusal is what a server says in the place of an answer.
type refusal struct {
	code   int // of gRPC
	text   string
	status int // of HTTP, where it is not gRPC that was answered
}

func (r *refusal) Error() string { return r.text }

// Codes of gRPC.
const (
	codeCanceled      = 1
	codeUnknown       = 2
	codeDeadline      = 4
	codeDenied        = 7
	codeExhausted     = 8
	codeUnimplemented = 12
	codeInternal      = 13
	codeUnavailable   = 14
	codeDataLoss      = 15
	codeNobody        = 16
)

// refused makes a refusal of an answer that is not gRPC. Source: gRPC, HTTP to gRPC status code mapping.
func refused(status int, text string) *refusal {
	code := codeUnknown
	switch status {
	case http.StatusBadRequest:
		code = codeInternal
	case http.StatusUnauthorized:
		code = codeNobody
	case http.StatusForbidden:
		code = codeDenied
	case http.StatusNotFound:
		code = codeUnimplemented
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		code = codeUnavailable
	}
	return &refusal{code, text, status}
}

// undone reports whether certainly nothing was done. Behind what says 502 there may be a server that did something.
func (r *refusal) undone() bool {
	switch r.text {
	case saysNoLeader, saysNotLeader, saysLearner, saysTooMany, saysFull, saysCorrupt:
		return true
	}
	return r.status != 0 && r.status < http.StatusInternalServerError ||
		r.code == codeExhausted || r.code == codeUnimplemented || r.code == codeDataLoss
}

// elsewhere reports whether another member may have another answer.
func (r *refusal) elsewhere() bool {
	switch r.code {
	case codeUnknown, codeDeadline, codeInternal, codeUnavailable:
		return true
	}
	return r.status != 0 || r.undone()
}

// call sends a request, and hands the first message of the answer to f. Where a connection cannot be made, another member is asked; one
// that has no leader, or is no member at all, does nothing, and another may have one.
func (w *wire) call(ctx context.Context, method string, request []byte, f func([]byte) error) error {
	again := false
	for {
		token, err := w.login(ctx)
		if err != nil {
			return err
		}
		err = w.each(ctx, method, request, token, f)
		if again || !w.stale(err, token) {
			return err
		}
		again = true // once
	}
}

// stale reports whether an error says that what is known about the token is old, and forgets it then.
func (w *wire) stale(err error, token string) bool {
	r, refused := errors.AsType[*refusal](err)
	if !refused || w.user == "" {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch r.text {
	case saysToken, saysOldRevision:
	case saysNoUser: // they ask for one now
		if token != "" {
			return false
		}
	default:
		return false
	}
	if w.tokenless = false; w.token == token {
		w.token = ""
	}
	return true
}

// login returns a token, or nothing where none is needed.
func (w *wire) login(ctx context.Context) (string, error) {
	w.mu.Lock()
	token, tokenless := w.token, w.tokenless
	w.mu.Unlock()
	if w.user == "" || token != "" || tokenless {
		return token, nil
	}
	err := w.each(ctx, methodAuthenticate, authenticateRequest(w.user, w.password), "", func(b []byte) (err error) {
		token, err = authenticateResponse(b)
		return err
	})
	if r, ok := errors.AsType[*refusal](err); ok && r.text == saysNoAuth {
		w.mu.Lock()
		w.tokenless = true
		w.mu.Unlock()
		return "", nil
	}
	if err != nil {
		return "", err
	}
	w.mu.Lock()
	w.token = token
	w.mu.Unlock()
	return token, nil
}

// each asks one member after another as long as nothing can have been done, or what was done may be done again: a transaction alone
// cannot, for what it compares with may be what it has changed.
func (w *wire) each(ctx context.Context, method string, request []byte, token string, f func([]byte) error) (err error) {
	repeats := method != methodTxn
	broke := false
	for left := len(w.hosts); left > 0; left-- {
		l, at, lineErr := w.line()
		if lineErr != nil {
			return lineErr
		}
		var answer []byte
		if answer, err = w.one(ctx, l, w.hosts[at], method, request, token, left); err == nil {
			err = f(answer)
		}
		if err == nil {
			return nil
		}
		r, refused := errors.AsType[*refusal](err)
		switch {
		case ctx.Err() != nil:
			// Whether it was done is not known, and what these connections are good for.
			if !errors.Is(ctx.Err(), context.Canceled) {
				w.leave(l, at)
			}
			return err
		case refused && !r.elsewhere():
			return err
		}
		w.next(at)
		if undone := refused && r.undone() || network.Unconnected(err); !undone && !repeats {
			return err
		}
		if !refused && !network.Unconnected(err) && !broke {
			broke = true // the server closed a connection that nothing went over for long: another is made
			left++
		}
	}
	return err
}

// next asks the next member from now on.
func (w *wire) next(at int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.at == at {
		w.at = (at + 1) % len(w.hosts)
	}
}

// shortestDial is how long a connection may take at least.
const shortestDial = 50 * time.Millisecond

func (w *wire) one(ctx context.Context, l *line, host, method string, request []byte, token string, left int) ([]byte, error) {
	body, err := w.open(ctx, l, host, method, bytes.NewReader(frame(request)), token, left)
	if err != nil {
		return nil, err
	}
	defer body.end()
	answer, err := body.message()
	if err == nil {
		_, err = body.message() // what became of it stands behind it
	} else if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: it is empty", errMessage)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return answer, nil
}

// open sends the begin of a request, and returns the answer as soon as it begins.
func (w *wire) open(ctx context.Context, l *line, host, method string, request io.Reader, token string, left int) (*answers, error) {
	limit := defaultTimeout
	if deadline, ok := ctx.Deadline(); ok {
		limit = time.Until(deadline)
	}
	limit = max(shortestDial, limit/time.Duration(left))
	u := &url.URL{Scheme: w.scheme, Host: host, Path: method}
	req, err := http.NewRequestWithContext(context.WithValue(ctx, dialLimit{}, limit), http.MethodPost, u.String(), request)
	if err != nil {
		return nil, err
	}
	req.Header = http.Header{
		"Content-Type": {"application/grpc"}, "Te": {"trailers"},
		"User-Agent": {"underlease"},
		"Hasleader":  {"true"}, // a member that has no leader then says so, instead of saying nothing
	}
	if token != "" {
		req.Header.Set("Token", token)
	}
	res, err := l.transport.RoundTrip(req) //nolint:bodyclose // answers.end closes it
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK || !strings.HasPrefix(res.Header.Get("Content-Type"), "application/grpc") {
		_ = res.Body.Close()
		return nil, refused(res.StatusCode, res.Status)
	}
	if err := outcome(res.Header); err != nil { // no message at all
		_ = res.Body.Close()
		return nil, err
	}
	return &answers{ReadCloser: res.Body, trailer: func() http.Header {
		if res.Trailer.Get(status) == "" {
			return res.Header // where there is no message, both are one
		}
		return res.Trailer
	}}, nil
}

// status is the field of a trailer that every answer ends with. One without it was cut short.
const status = "Grpc-Status"

// outcome is what a header or a trailer says.
func outcome(h http.Header) error {
	text := h.Get(status)
	if text == "" || text == "0" {
		return nil
	}
	code, err := strconv.Atoi(text)
	if err != nil {
		return fmt.Errorf("%w: it has the status %q", errMessage, text)
	}
	words, err := url.PathUnescape(h.Get("Grpc-Message"))
	if err != nil {
		words = h.Get("Grpc-Message")
	}
	return &refusal{code: code, text: plain(words)}
}

// plain takes off what a server of gRPC writes before the words of another, or of its own where it puts them into a message.
// Source: grpc-go, internal/status, Error.
func plain(words string) string {
	if strings.HasPrefix(words, "rpc error: code = ") {
		if _, said, ok := strings.Cut(words, " desc = "); ok {
			return plain(said)
		}
	}
	return words
}

// answers are the messages of one request.
type answers struct {
	io.ReadCloser
	trailer func() http.Header
}

// end gives up what was not read.
func (a *answers) end() { _ = a.Close() }

// largest bounds a message. Source: etcd takes and gives 1.5 MiB of a key, and a list is as large as what is in it.
const largest = 256 << 20

// message returns the next one, or [io.EOF] where the server has ended the answer without a complaint.
func (a *answers) message() ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(a, head[:]); err != nil {
		if errors.Is(err, io.EOF) {
			h := a.trailer()
			if said := outcome(h); said != nil {
				return nil, said
			}
			if h.Get(status) == "" {
				return nil, &refusal{code: codeUnknown, text: "the answer was cut short"}
			}
		}
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[1:])
	if head[0] != 0 || size > largest {
		return nil, fmt.Errorf("%w: %d bytes, compressed or too many", errMessage, size)
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(a, b); err != nil {
		return nil, err
	}
	return b, nil
}

// frame puts a message behind its length.
func frame(message []byte) []byte {
	b := make([]byte, 5, 5+len(message))
	binary.BigEndian.PutUint32(b[1:], uint32(len(message)))
	return append(b, message...)
}

// watch sends a request and calls f with each message of the answer until f says that it has seen enough.
func (w *wire) watch(ctx context.Context, request []byte, f func([]byte) (bool, error)) error {
	again := false
	for {
		token, err := w.login(ctx)
		if err != nil {
			return err
		}
		err = w.stream(ctx, request, token, f)
		if again || !w.stale(err, token) {
			return err
		}
		again = true // once
	}
}

func (w *wire) stream(ctx context.Context, request []byte, token string, f func([]byte) (bool, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l, at, err := w.line()
	if err != nil {
		return err
	}
	// The request stays open: its end would be ours. While it is, its context ends nothing, but an error where it is read does.
	from, into := io.Pipe()
	defer func() { _ = into.Close() }()
	defer context.AfterFunc(ctx, func() { _ = into.CloseWithError(context.Canceled) })()
	go func() { _, _ = into.Write(frame(request)) }() // it ends with the pipe
	body, err := w.open(ctx, l, w.hosts[at], methodWatch, from, token, 1)
	if err == nil {
		defer body.end()
		for {
			var b []byte
			if b, err = body.message(); err != nil {
				break
			}
			if enough, err := f(b); enough || err != nil {
				return err
			}
		}
	}
	if ctx.Err() == nil {
		w.next(at) // what else goes over this connection may be well
	}
	return err
}
