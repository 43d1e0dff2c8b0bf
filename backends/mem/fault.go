package mem

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
)

// fault is what happens to some calls of a client.
type fault struct {
	op          string
	first, last int
	what        string
	delay       time.Duration
}

var (
	operations = []string{"any", "acquire", "renew", "release", "inspect", "list", "ask", "break", "get", "put"}
	whats      = []string{"hang", "delay", "delay!", "lose", "reset-after", "reset-before", "unavailable", "lost", "denied", "broken", "busy", "wipe", "stop", "break"}
)

// configure reads the URL of a client.
func (c *Client) configure(u *url.URL) error {
	if u.Opaque != "" || u.Host != "" || u.Path != "" {
		return backends.Configf("write mem: or mem:?fault=renew:2:hang", "the memory store has neither host nor path")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return backends.Configf("", "the parameters of the memory store cannot be read: %v", err)
	}
	for key, values := range query {
		switch key {
		case "fault":
			for _, v := range values {
				f, err := parseFault(v)
				if err != nil {
					return backends.Configf("see the documentation of package mem", "the fault %q: %v", v, err)
				}
				c.faults = append(c.faults, f)
			}
		case "trace":
			c.trace = values[0]
		default:
			return backends.Configf("", "the memory store has no parameter %q", key)
		}
	}
	return nil
}

func parseFault(s string) (f fault, err error) {
	parts := strings.SplitN(s, ":", 3)
	if len(parts) != 3 {
		return f, errors.New("it is not OPERATION:CALLS:WHAT")
	}
	f.op = parts[0]
	if !slices.Contains(operations, f.op) {
		return f, fmt.Errorf("no operation is called %q", f.op)
	}
	if f.first, f.last, err = parseCalls(parts[1]); err != nil {
		return f, err
	}
	what, delay, delayed := strings.Cut(parts[2], "=")
	f.what = what
	if !slices.Contains(whats, what) || delayed != strings.HasPrefix(what, "delay") {
		return f, fmt.Errorf("nothing is called %q", parts[2])
	}
	if delayed {
		if f.delay, err = time.ParseDuration(delay); err != nil {
			return f, err
		}
	}
	return f, nil
}

func parseCalls(s string) (first, last int, err error) {
	from, to, ranged := strings.Cut(s, "-")
	open := strings.HasSuffix(s, "+")
	if first, err = strconv.Atoi(strings.TrimSuffix(from, "+")); err != nil {
		return 0, 0, err
	}
	last = first
	if open {
		last = math.MaxInt
	} else if ranged {
		if last, err = strconv.Atoi(to); err != nil {
			return 0, 0, err
		}
	}
	if first < 1 || last < first {
		return 0, 0, errors.New("calls are counted from 1")
	}
	return first, last, nil
}

// call does work under the server's lock, with the faults that this call of this client has.
func (c *Client) call(ctx context.Context, op string, of id, handle string, work func() error) (err error) {
	c.mu.Lock()
	c.calls[op]++
	number := c.calls[op]
	c.mu.Unlock()
	if err := c.write(op, number, handle, "begin"); err != nil {
		return err
	}
	defer func() {
		if failed := c.write(op, number, handle, result(err)); failed != nil {
			err = errors.Join(err, failed)
		}
	}()

	if err := ctx.Err(); err != nil {
		return backends.Unavailable(err, "mem:")
	}
	done := false
	do := func() error {
		if done {
			return nil
		}
		done = true
		c.server.mu.Lock()
		defer c.server.mu.Unlock()
		return work()
	}
	for _, f := range c.faults {
		if f.op != op && f.op != "any" || number < f.first || number > f.last {
			continue
		}
		switch f.what {
		case "hang":
			<-c.server.freed
			return backends.Unavailable(nil, "mem: hung")
		case "delay", "delay!":
			if err := do(); err != nil {
				return err
			}
			cancelled := ctx.Done()
			if f.what == "delay!" {
				cancelled = nil
			}
			t := time.NewTimer(f.delay)
			select {
			case <-t.C:
			case <-cancelled:
				t.Stop()
				return backends.Unavailable(ctx.Err(), "mem:")
			}
		case "lose", "reset-after":
			if err := do(); err != nil {
				return err
			}
			return backends.Unavailable(nil, "mem: connection reset")
		case "reset-before", "unavailable":
			return backends.Unavailable(nil, "mem: connection reset")
		case "lost":
			return backends.Lost(nil, "mem: as told")
		case "denied":
			return backends.Denied(nil, "mem: as told")
		case "broken":
			return backends.Broken(nil, "mem: as told")
		case "busy":
			return &backends.BusyError{Namespace: of.namespace, Lease: of.name, Holder: "another", Since: time.Now(), Left: time.Second}
		case "wipe":
			c.server.Wipe(of.namespace, of.name)
		case "stop", "break":
			c.server.ask(of, backends.Ask{Kind: backends.AskKind(f.what), Reason: "as told", By: "mem"})
		}
	}
	return do()
}

// result is the last word of a line of the trace.
func result(err error) string {
	for _, k := range []struct {
		kind error
		word string
	}{
		{nil, "ok"},
		{backends.ErrBusy, "busy"},
		{backends.ErrLost, "lost"},
		{backends.ErrUnavailable, "unavailable"},
		{backends.ErrDenied, "denied"},
		{backends.ErrBroken, "broken"},
		{backends.ErrNoRecord, "no-record"},
		{backends.ErrConflict, "conflict"},
	} {
		if errors.Is(err, k.kind) {
			return k.word
		}
	}
	return "error"
}

// write appends a line to the trace.
func (c *Client) write(op string, number int, handle, word string) error {
	if c.trace == "" {
		return nil
	}
	name := "-"
	if handle != "" {
		sum := sha256.Sum256([]byte(handle))
		name = hex.EncodeToString(sum[:4])
	}
	f, err := os.OpenFile(c.trace, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s %d %s %s\n", op, number, name, word)
	return errors.Join(err, f.Close())
}
