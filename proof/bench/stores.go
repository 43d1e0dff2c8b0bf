//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/proof/figures"
)

// place is a store that runs here, and the tool that is usual with it.
type place struct {
	name, url string
	addr      string // of the server, as the URL has it; empty: there is none
	quorum    bool   // it frees a lease after up to twice the ttl, and has no shorter one than 10 s
	peer      *figures.Subject
}

// kit is what the servers of tests are started with outside a test. What has no method here is not called by them.
type kit struct {
	testing.TB
	dir      string
	n        int
	cleanups []func()
}

// refusal is what a server that cannot be started panics with.
type refusal struct{ error }

func (k *kit) Helper()                        {}
func (k *kit) Cleanup(f func())               { k.cleanups = append(k.cleanups, f) }
func (k *kit) Name() string                   { return "bench" }
func (k *kit) Failed() bool                   { return false }
func (k *kit) Log(...any)                     {}
func (k *kit) Logf(string, ...any)            {}
func (k *kit) Error(a ...any)                 { k.Fatal(a...) }
func (k *kit) Errorf(format string, a ...any) { k.Fatal(fmt.Sprintf(format, a...)) }
func (k *kit) Fatalf(format string, a ...any) { k.Fatal(fmt.Sprintf(format, a...)) }
func (k *kit) Skipf(format string, a ...any)  { k.Fatal(fmt.Sprintf(format, a...)) }
func (k *kit) Fatal(a ...any)                 { panic(refusal{errors.New(fmt.Sprint(a...))}) }

func (k *kit) TempDir() string {
	k.n++
	dir := filepath.Join(k.dir, fmt.Sprint("server", k.n))
	if err := os.Mkdir(dir, 0o755); err != nil {
		k.Fatal(err)
	}
	return dir
}

func (k *kit) end() {
	for _, f := range slices.Backward(k.cleanups) {
		f()
	}
}

// start starts a store, or says why it is not here.
func (k *kit) start(f func() place) (p place, missing error) {
	defer func() {
		if r, ok := recover().(refusal); ok {
			missing = r.error
		}
	}()
	return f(), nil
}

// known are the stores in the order of the tables.
var known = []struct {
	name  string
	start func(k *kit) place
}{
	{"file", func(k *kit) place {
		p := place{url: "file://" + filepath.Join(k.TempDir(), "store")}
		if path, err := exec.LookPath("flock"); err == nil {
			p.peer = &figures.Subject{Name: "flock", Args: []string{path, "-n", filepath.Join(k.TempDir(), "f"), "true"}}
		}
		return p
	}},
	{"redis", func(k *kit) place {
		r := servers.StartRedis(k, servers.RedisOptions{})
		p := place{url: "redis://" + r.Addr(), addr: r.Addr()}
		if path, err := exec.LookPath("cronlock"); err == nil {
			p.peer = &figures.Subject{Name: "cronlock", Args: []string{path, "true"}, Env: []string{
				"CRONLOCK_HOST=127.0.0.1", fmt.Sprintf("CRONLOCK_PORT=%d", r.Port), "CRONLOCK_GRACE=0",
			}}
		}
		return p
	}},
	{"postgres", func(k *kit) place {
		p := servers.StartPostgres(k, servers.PostgresOptions{Config: []string{"max_connections = 300"}})
		return place{url: "postgres://lease@" + p.Addr() + "/lease", addr: p.Addr()}
	}},
	{"mysql", func(k *kit) place {
		m := servers.StartMariaDB(k, servers.MariaDBOptions{Args: []string{"--max-connections=300"}})
		return place{url: "mysql://lease@" + m.Addr() + "/lease", addr: m.Addr()}
	}},
	{"etcd", func(k *kit) place {
		addr := servers.StartEtcd(k, 1, servers.EtcdOptions{}).Nodes[0].Addr()
		return place{url: "etcd://" + addr, addr: addr, quorum: true, peer: &figures.Subject{
			Name: "etcdctl lock", Args: []string{servers.Etcdctl(k), "--endpoints", addr, "lock", "theirs", "true"},
		}}
	}},
	{"consul", func(k *kit) place {
		addr := servers.StartConsul(k, 1, servers.ConsulOptions{}).Nodes[0].Addr()
		return place{url: "consul://" + addr, addr: addr, quorum: true, peer: &figures.Subject{
			Name: "consul lock", Args: []string{servers.ConsulProgram(k), "lock", "-http-addr=" + addr, "-shell=false", "theirs", "true"},
		}}
	}},
}

// startStores starts the named stores, or all if none is named, and says which are not here.
func startStores(k *kit, names string) (places []place, absent []string, err error) {
	for _, s := range known {
		if names != "" && !slices.Contains(strings.Split(names, ","), s.name) {
			continue
		}
		p, missing := k.start(func() place { return s.start(k) })
		if missing != nil {
			absent = append(absent, fmt.Sprintf("%s: %v", s.name, missing))
			continue
		}
		p.name = s.name
		if p.peer != nil {
			p.peer.Env = append(p.peer.Env, environ...)
			// One that does not work here is said, and not measured.
			if _, err := figures.Starts([]figures.Subject{*p.peer}, 1); err != nil {
				absent = append(absent, err.Error())
				p.peer = nil
			}
		}
		places = append(places, p)
	}
	if len(places) == 0 {
		return nil, nil, fmt.Errorf("none of the stores is here: %v", absent)
	}
	return places, absent, nil
}
