//go:build linux

package figures

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/underlease/underlease/proof/stamps"
)

// Phases says where the time of a run goes, in parts that follow each other, so that they add up to the whole.
type Phases struct {
	Ask     time.Duration // until the first byte for the store: the program and its packages start, the guardian is started
	Grant   time.Duration // from there to the last byte of the grant
	Begin   time.Duration // from there to the first stamp of the command
	Command time.Duration // from there to its last stamp
	End     time.Duration // from there to the first byte of the release: the command's exit, the look whether all of its tree is gone
	Release time.Duration // from there to the answer
	Exit    time.Duration // from there until wrapper and guardian were collected

	// Server is the part of Grant and Release in which the store had a request and had not answered: its work, its disk, and one hop more
	// than usual.
	Server time.Duration
	// Asked is how often that was the case.
	Asked int
}

// Total is the whole run.
func (p Phases) Total() time.Duration {
	return p.Ask + p.Grant + p.Begin + p.Command + p.End + p.Release + p.Exit
}

// Bare is what the command itself takes when nothing is around it: until its first stamp, from there to its last one, and until it was
// collected. The parts of a run that hold these are Begin, Command and End.
type Bare struct{ Begin, Command, Exit time.Duration }

// Profile takes the phases of so many runs on the store, one after the other, each beside a bare command. What it looks at comes from
// outside: the instants of fork and end, the command's stamps, and a relay between the run and the store, which notes when bytes pass.
// A store without a server has no relay: there Ask and Grant are one, and so are End, Release and Exit. Address is the server's, as the
// URL has it.
func (s Store) Profile(lease, address string, rounds int) (runs []Phases, bare []Bare, err error) {
	const warm = 3
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer null.Close()
	url, r := s.URL, (*relay)(nil)
	if address != "" {
		if r, err = newRelay(address); err != nil {
			return nil, nil, err
		}
		defer r.close()
		if url, err = elsewhere(url, address, r.Addr().String()); err != nil {
			return nil, nil, err
		}
	}
	dir, err := os.MkdirTemp("", "underlease-bench-")
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	env := []string{"PATH=/usr/bin:/bin", "HOME=/nonexistent"}
	for i := range rounds + warm {
		r.reset()
		own := fmt.Sprintf("%s/%d", dir, i)
		life, from, to, err := lived(own+"-run", null.Fd(), env, s.Underlease, "run", "--backend", url, "--log-level", "error", lease, "--", s.Job, own+"-run", "0s")
		if err != nil {
			return nil, nil, err
		}
		p, err := r.phases(from, to, life)
		if err != nil {
			return nil, nil, err
		}
		alone, from, to, err := lived(own+"-bare", null.Fd(), append(env, "UNDERLEASE_TERM=1"), s.Job, own+"-bare", "0s")
		if err != nil {
			return nil, nil, err
		}
		if i < warm {
			continue
		}
		first, last := alone.At[0], alone.At[len(alone.At)-1]
		runs = append(runs, p)
		bare = append(bare, Bare{time.Duration(first - from), time.Duration(last - first), time.Duration(to - last)})
	}
	return runs, bare, nil
}

// lived runs a command that stamps into dir, and returns what it wrote, and when it was forked and collected.
func lived(dir string, null uintptr, env []string, args ...string) (l stamps.Life, from, to int64, err error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return l, 0, 0, err
	}
	from = stamps.Now()
	pid, err := syscall.ForkExec(args[0], args, &syscall.ProcAttr{Env: env, Files: []uintptr{null, null, 2}})
	if err != nil {
		return l, 0, 0, err
	}
	var ws syscall.WaitStatus
	for {
		if _, err = syscall.Wait4(pid, &ws, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	to = stamps.Now()
	if err == nil && ws != 0 {
		err = fmt.Errorf("%v: wait status %#x", args, uint32(ws))
	}
	if err != nil {
		return l, 0, 0, err
	}
	lives, err := stamps.Read(dir)
	if err == nil && len(lives) != 1 {
		err = fmt.Errorf("%d commands have written stamps, and not one", len(lives))
	}
	if err != nil {
		return l, 0, 0, err
	}
	return lives[0], from, to, nil
}

// elsewhere puts another address into a URL.
func elsewhere(url, address, other string) (string, error) {
	for i := range len(url) - len(address) + 1 {
		if url[i:i+len(address)] == address {
			return url[:i] + other + url[i+len(address):], nil
		}
	}
	return "", fmt.Errorf("the URL %s has no %s", url, address)
}

// passage is some bytes that went through a relay.
type passage struct {
	at     int64
	conn   int
	answer bool
}

// relay is a listener that passes everything on and notes when.
type relay struct {
	net.Listener
	target string

	mu    sync.Mutex
	conns int
	seen  []passage
	all   sync.WaitGroup
}

func newRelay(target string) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it is closed
	if err != nil {
		return nil, err
	}
	r := &relay{Listener: l, target: target}
	r.all.Go(r.serve)
	return r, nil
}

func (r *relay) close() {
	_ = r.Close()
	r.all.Wait()
}

func (r *relay) reset() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = r.seen[:0]
}

func (r *relay) serve() {
	for {
		client, err := r.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", r.target) //nolint:noctx // on loopback
		if err != nil {
			_ = client.Close()
			continue
		}
		r.mu.Lock()
		r.conns++
		conn := r.conns
		r.mu.Unlock()
		r.all.Go(func() { r.pass(server, client, conn, false) })
		r.all.Go(func() { r.pass(client, server, conn, true) })
	}
}

func (r *relay) pass(to, from net.Conn, conn int, answer bool) {
	defer func() { _ = to.Close() }()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			r.mu.Lock()
			r.seen = append(r.seen, passage{stamps.Now(), conn, answer})
			r.mu.Unlock()
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				_ = from.Close()
			}
			return
		}
	}
}

// phases makes the phases of a run of what has passed.
func (r *relay) phases(from, to int64, l stamps.Life) (p Phases, err error) {
	first, last := l.At[0], l.At[len(l.At)-1]
	p.Command = time.Duration(last - first)
	if r == nil {
		p.Begin, p.End = time.Duration(first-from), time.Duration(to-last)
		return p, nil
	}
	r.mu.Lock()
	seen := slices.Clone(r.seen)
	r.mu.Unlock()
	var ask, grant, release, answer int64
	for _, s := range seen {
		switch before := s.at <= first; {
		case before && !s.answer && ask == 0:
			ask = s.at
		case before && s.answer:
			grant = s.at
		case s.at < last:
		case !s.answer && release == 0:
			release = s.at
		case s.answer && release != 0:
			answer = s.at
		}
	}
	if ask == 0 || grant == 0 || release == 0 || answer == 0 {
		return p, fmt.Errorf("a request or an answer has not passed: %+v", seen)
	}
	p.Ask, p.Grant, p.Begin = time.Duration(ask-from), time.Duration(grant-ask), time.Duration(first-grant)
	p.End, p.Release, p.Exit = time.Duration(release-last), time.Duration(answer-release), time.Duration(to-answer)
	for _, part := range [][2]int64{{ask, grant}, {release, answer}} {
		took, asked := due(seen, part[0], part[1])
		p.Server, p.Asked = p.Server+took, p.Asked+asked
	}
	return p, nil
}

// due is for how long, between two instants, an answer was due on any connection, and how often that was over.
func due(seen []passage, from, to int64) (took time.Duration, asked int) {
	open := map[int]bool{}
	var since int64 // the first of them is due
	for _, s := range seen {
		switch {
		case s.at < from || s.at > to:
		case s.answer && open[s.conn]:
			if delete(open, s.conn); len(open) == 0 {
				took += time.Duration(s.at - since)
				asked++
			}
		case !s.answer && !open[s.conn]:
			if len(open) == 0 {
				since = s.at
			}
			open[s.conn] = true
		}
	}
	return took, asked
}
