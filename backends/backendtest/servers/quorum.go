//go:build linux

package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Member is one server of a [Quorum], as far as all kinds of them are alike.
type Member struct {
	*Process
	Name string
	Dir  string // of the test; the data are below it
	Port int    // of clients
}

func (m *Member) member() *Member { return m }

// Data is where a server keeps what it knows.
func (m *Member) Data() string { return filepath.Join(m.Dir, "data") }

// Addr returns host:port.
func (m *Member) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(m.Port)) }

// Quorum is one server, or several of which a majority decides.
type Quorum[M interface{ member() *Member }] struct {
	Nodes []M

	t     testing.TB
	taken map[int]bool                // ports
	leads func(M) (bool, error)       // whether a server is the leader
	works func(context.Context) error // whether the cluster serves, beyond what each of its servers says; or nil
}

// freePort returns a port that no server of the cluster has.
func (c *Quorum[M]) freePort() int {
	c.t.Helper()
	for {
		if port := FreePort(c.t, 0); !c.taken[port] {
			c.taken[port] = true
			return port
		}
	}
}

// Addrs returns host:port of every server.
func (c *Quorum[M]) Addrs() []string {
	var all []string
	for _, n := range c.Nodes {
		all = append(all, n.member().Addr())
	}
	return all
}

// launch starts every server, and returns when the cluster serves.
func (c *Quorum[M]) launch() {
	c.t.Helper()
	for _, n := range c.Nodes {
		n.member().Launch()
	}
	c.AwaitReady()
}

// AwaitReady waits until every server is ready, and the cluster serves.
func (c *Quorum[M]) AwaitReady() {
	c.t.Helper()
	for _, n := range c.Nodes {
		p := n.member().Process
		Within(c.t, patience, p.command.Name+" is ready", func() error {
			select {
			case <-p.done():
				return fmt.Errorf("it ended (%v)\n%s", p.state(), p.tail())
			default:
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			return p.ready(ctx)
		})
	}
	if c.works == nil {
		return
	}
	Within(c.t, patience, "the cluster serves", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		return c.works(ctx)
	})
}

// Lose ends every server and starts it again without what it knew.
func (c *Quorum[M]) Lose() { c.again(true) }

// Restart ends every server and starts it again with what it knows.
func (c *Quorum[M]) Restart() { c.again(false) }

func (c *Quorum[M]) again(without bool) {
	c.t.Helper()
	for _, n := range c.Nodes {
		n.member().Kill()
		if without {
			if err := os.RemoveAll(n.member().Data()); err != nil {
				c.t.Fatal(err)
			}
		}
	}
	c.launch()
}

// Leader returns the server that leads, and the others.
func (c *Quorum[M]) Leader() (leader M, others []M) {
	c.t.Helper()
	Within(c.t, patience, "the cluster has a leader", func() error {
		found := false
		others = nil
		for _, n := range c.Nodes {
			if leads, err := c.leads(n); err == nil && leads {
				leader, found = n, true
			} else {
				others = append(others, n)
			}
		}
		if !found {
			return errors.New("none yet")
		}
		return nil
	})
	return leader, others
}

// asked sends a request over HTTP, encrypted where there are certificates. An answer that is not 200 is an error, which begins with its status.
func asked(ctx context.Context, tls *Certificates, method, addr, path string, body []byte, header map[string]string) ([]byte, error) {
	scheme := "http"
	transport := &http.Transport{DisableKeepAlives: true}
	if tls != nil {
		config, err := tls.client()
		if err != nil {
			return nil, err
		}
		scheme, transport.TLSClientConfig = "https", config
	}
	req, err := http.NewRequestWithContext(ctx, method, scheme+"://"+addr+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for name, value := range header {
		req.Header.Set(name, value)
	}
	answer, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, got)
	}
	return got, err
}

// steady asks again while the servers say that it is their fault: three of them lose their leader where the machine stands still for as long
// as an election takes.
func steady(ask func(context.Context) ([]byte, error)) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	for {
		got, err := ask(ctx)
		if err == nil || !strings.HasPrefix(err.Error(), "50") || ctx.Err() != nil {
			return got, err
		}
		time.Sleep(pace)
	}
}
