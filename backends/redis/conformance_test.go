//go:build linux

package redis

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/backendtest"
	"github.com/underlease/underlease/backends/backendtest/servers"
)

// opened opens a URL, or ends the test.
func opened(t testing.TB, raw string) *backends.Store {
	t.Helper()
	return backendtest.Open(t, Schemes(), raw)
}

func conforms(t *testing.T, raw string, owner func(key string) *servers.Redis) {
	t.Helper()
	backendtest.Run(t, backendtest.Harness{
		Place: func(t *testing.T) backendtest.Place {
			return backendtest.Place{
				Open: func() *backends.Store { return opened(t, raw) },
				Wipe: func(namespace, lease string) {
					key := keyOf(namespace, lease)
					if got := owner(key).Do("DEL", key); got != "1" {
						t.Fatalf("DEL %s: got %s, want 1", key, got)
					}
				},
			}
		},
		TTL:   400 * time.Millisecond,
		Slack: 200 * time.Millisecond,
	})
}

func alone(r *servers.Redis) func(string) *servers.Redis {
	return func(string) *servers.Redis { return r }
}

func TestConformance(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	conforms(t, "redis://"+r.Addr(), alone(r))
}

// The user has no other right than those that the documentation names.
func TestConformanceWithTheLeastRights(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{User: "lease", Password: "p/w", ACL: "resetchannels ~ul:* &ul:* -@all +" + strings.Join(Commands, " +")})
	conforms(t, "redis://lease:p%2Fw@"+r.Addr()+"/3", func(string) *servers.Redis { return inDatabase(t, r, 3) })
}

// A right that the user does not have is one that it is denied, also where a script is told so, which has no code for it: who takes that for a
// store that is away tries for ever, or runs without a lease.
func TestARightThatIsMissingIsNamed(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{})
	r.Do("ACL", "SETUSER", "lease", "on", ">pw", "resetchannels", "~ul:*", "&ul:*", "-@all")
	for _, command := range Commands {
		r.Do("ACL", "SETUSER", "lease", "+"+command)
	}
	missed := 0
	for _, command := range Commands {
		r.Do("ACL", "SETUSER", "lease", "-"+command)
		s := opened(t, "redis://lease:pw@"+r.Addr())
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		var errs []error
		req := backends.Request{Lease: command, Holder: "h", Handle: backends.NewHandle(), TTL: time.Minute, Hold: time.Second, Slots: 1}
		g, err := s.Acquire(ctx, req)
		errs = append(errs, err)
		if err == nil {
			_, err := s.Renew(ctx, g)
			errs = append(errs, err, s.Release(ctx, g, backends.End{Outcome: "ok"}))
		}
		_, err = s.Inspect(ctx, "", command)
		errs = append(errs, err)
		cancel()
		for _, err := range errs {
			if err == nil {
				continue
			}
			missed++
			if !errors.Is(err, backends.ErrDenied) || !strings.Contains(backends.Hint(err), "ul:*") {
				t.Errorf("without %s: got %v with the hint %q, want it denied, and what the user needs", command, err, backends.Hint(err))
			}
		}
		_ = s.Close()
		r.Do("ACL", "SETUSER", "lease", "+"+command)
	}
	if missed < 8 { // of those that each lease needs
		t.Errorf("%d operations missed a right, want more", missed)
	}
}

// Who copies the line of the README has what the suite had.
func TestTheReadmeNamesTheLeastRights(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if want := "~ul:* &ul:* +" + strings.Join(Commands, " +") + "\n"; !strings.Contains(string(readme), want) {
		t.Errorf("README.md does not have %q", want)
	}
}

// inDatabase makes a server's own Do look at a database by its number.
func inDatabase(t *testing.T, r *servers.Redis, number int) *servers.Redis {
	t.Helper()
	other := *r
	other.Database = number
	return &other
}

func TestConformanceEncrypted(t *testing.T) {
	c := servers.MakeCertificates(t)
	r := servers.StartRedis(t, servers.RedisOptions{TLS: c})
	q := url.Values{"ca": {c.CA}, "cert": {c.ClientCert}, "key": {c.ClientKey}}
	conforms(t, fmt.Sprintf("rediss://%s?%s", r.Addr(), q.Encode()), alone(r))
}

func TestConformanceOverASocket(t *testing.T) {
	r := servers.StartRedis(t, servers.RedisOptions{Socket: true})
	conforms(t, "redis+unix://"+r.SocketPath, alone(r))
}

func TestConformanceWithSentinels(t *testing.T) {
	s := servers.StartSentinel(t, servers.RedisOptions{})
	downAfter(s, 10*time.Second) // a machine that stands still for a second is no reason for a fail-over
	conforms(t, "redis+sentinel://"+strings.Join(s.Addrs(), ",")+"/"+s.Name+"?replicas=1", alone(s.Primary))
}

// downAfter says for how long a server has to be silent until a sentinel takes it for dead.
func downAfter(s *servers.Sentinel, silent time.Duration) {
	for _, one := range s.Sentinels {
		one.Do("SENTINEL", "SET", s.Name, "down-after-milliseconds", strconv.FormatInt(silent.Milliseconds(), 10))
	}
}

func TestConformanceInACluster(t *testing.T) {
	c := servers.StartCluster(t, servers.RedisOptions{})
	conforms(t, "redis+cluster://"+strings.Join(c.Addrs(), ","), c.Owner)
}
