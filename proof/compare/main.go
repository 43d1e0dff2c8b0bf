//go:build linux

// Command compare does the same four things to a command under `etcdctl lock`, `consul lock` and `underlease`, and prints what became of
// it as a table.
//
//	compare [-patience D] [-ttl D] -etcd PATH -etcdctl PATH -consul PATH -underlease PATH
//
// It starts three servers of etcd and three of Consul on this host, and ends them. The ttl is 3 s, unless another one is asked for, where the
// tool has one: etcdctl lock and underlease; a session of consul lock lasts 15 s, and its lock stays taken for 15 s more. While the command
// runs, a second run of the same name waits, by way of another server.
//
//   - The lease is revoked, or the session destroyed.
//   - The server that the run talks to, one that follows, is frozen (SIGSTOP); the other two go on.
//   - The tool itself is paused (SIGSTOP); its command is not.
//   - The command fails: it exits with 3, or ends itself by SIGTERM.
//
// The witness is the command, which writes the time into a file every 5 ms.
package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/underlease/underlease/proof/stamps"
)

const (
	beatEvery = 5 * time.Millisecond
	// silence is how long a command must not have written anything to count as stopped, on a machine that is busy.
	silence = 500 * time.Millisecond
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("compare: ")
	if len(os.Args) == 3 && os.Args[1] == "beat" {
		log.Fatal(beat(os.Args[2]))
	}
	var c comparison
	flag.StringVar(&c.etcd, "etcd", "", "the `program` etcd")
	flag.StringVar(&c.etcdctl, "etcdctl", "", "the `program` etcdctl")
	flag.StringVar(&c.consul, "consul", "", "the `program` consul")
	flag.StringVar(&c.underlease, "underlease", "", "the `program` underlease")
	flag.DurationVar(&c.patience, "patience", 60*time.Second, "how long each fault lasts, and what comes of it is watched")
	flag.DurationVar(&c.ttl, "ttl", 3*time.Second, "of etcdctl lock and underlease, in whole seconds")
	flag.Parse()
	if c.etcd == "" || c.etcdctl == "" || c.consul == "" || c.underlease == "" || flag.NArg() > 0 {
		log.Fatal("name the four programs: compare -etcd PATH -etcdctl PATH -consul PATH -underlease PATH")
	}
	if err := c.run(os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// beat writes the time into a file until it is stopped, or cannot.
func beat(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	for {
		if _, err := fmt.Fprintln(f, stamps.Now()); err != nil {
			return err
		}
		time.Sleep(beatEvery)
	}
}

// beats returns the first and the last instant in a file, or zeros.
func beats(path string) (first, last int64) {
	b, _ := os.ReadFile(path) // it may not be there yet
	for line := range bytes.Lines(b) {
		if n, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 10, 64); err == nil && bytes.HasSuffix(line, []byte("\n")) {
			if first == 0 {
				first = n
			}
			last = n
		}
	}
	return first, last
}

// comparison is the whole of it.
type comparison struct {
	etcd, etcdctl, consul, underlease string
	patience, ttl                     time.Duration

	dir     string
	servers []*exec.Cmd
	etcds   []*server
	consuls []*server
}

// server is one of a cluster.
type server struct {
	addr  string
	cmd   *exec.Cmd
	leads bool
}

// tool is what runs a command under a lease.
type tool struct {
	name string
	args func(addr, lease string) []string // before the command
	here *server                           // a server that follows
	away *server                           // another one
	lose func(lease string) error
}

func (c *comparison) run(out io.Writer) (err error) {
	if c.dir, err = os.MkdirTemp("", "underlease-compare-"); err != nil {
		return err
	}
	defer os.RemoveAll(c.dir)
	defer func() {
		for _, s := range c.servers {
			_ = s.Process.Signal(syscall.SIGCONT)
			_ = s.Process.Kill()
			_ = s.Wait()
		}
	}()
	if err := errors.Join(c.startEtcd(), c.startConsul()); err != nil {
		return err
	}
	tools := c.tools()
	rows := [][]string{{"", "`etcdctl lock`", "`consul lock`", "`underlease`, etcd", "`underlease`, Consul"}}
	for _, f := range []struct {
		name string
		do   func(t tool, r *running) error
		undo func(t tool, r *running)
	}{
		{"the lease is revoked", func(t tool, r *running) error { return t.lose(r.lease) }, nil},
		{
			"the tool is paused",
			func(_ tool, r *running) error { return r.cmd.Process.Signal(syscall.SIGSTOP) },
			func(_ tool, r *running) { _ = r.cmd.Process.Signal(syscall.SIGCONT) },
		},
		{
			"its server is frozen, the others are not",
			func(t tool, _ *running) error { return t.here.cmd.Process.Signal(syscall.SIGSTOP) },
			func(t tool, _ *running) { _ = t.here.cmd.Process.Signal(syscall.SIGCONT) },
		},
	} {
		row := make([]string, len(tools))
		errs := make([]error, len(tools))
		var all sync.WaitGroup
		for i, t := range tools {
			lease := fmt.Sprintf("compare-%d-%d", len(rows), i)
			all.Go(func() { row[i], errs[i] = c.fault(t, lease, f.do, f.undo) })
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		rows = append(rows, append([]string{f.name}, row...))
	}
	for _, f := range []struct{ name, script string }{
		{"the command exits with 3", "exit 3"},
		{"the command ends by SIGTERM", "kill -TERM $$"},
	} {
		row := []string{f.name}
		for i, t := range tools {
			cmd := exec.Command(t.args(t.here.addr, "x")[0], append(t.args(t.here.addr, fmt.Sprintf("code-%d-%d", len(rows), i))[1:], "sh", "-c", f.script)...)
			cmd.Env = environ
			_ = cmd.Run() // how it ended is what is asked
			row = append(row, ended(cmd.ProcessState))
		}
		rows = append(rows, row)
	}
	for i, row := range rows {
		fmt.Fprintln(out, "| "+strings.Join(row, " | ")+" |")
		if i == 0 {
			fmt.Fprintln(out, strings.Repeat("|---", len(row))+"|")
		}
	}
	return nil
}

var environ = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/nonexistent", "ETCDCTL_API=3"}

func (c *comparison) tools() []tool {
	follower := func(all []*server) (here, away *server) {
		for _, s := range all {
			switch {
			case here == nil && !s.leads:
				here = s
			case away == nil || s.leads:
				away = s
			}
		}
		return here, away
	}
	ours := func(scheme, query string) func(addr, lease string) []string {
		return func(addr, lease string) []string {
			return []string{
				c.underlease, "run", "--backend", scheme + "://" + addr + query, "--ttl", c.ttl.String(), "--wait", "forever", "--log-level", "error", lease, "--",
			}
		}
	}
	key := func(lease string) string { return "ul/lease/_/" + lease + "/slot/0/grant" }
	etcd, etcdAway := follower(c.etcds)
	consul, consulAway := follower(c.consuls)
	return []tool{
		{
			"etcdctl lock", func(addr, lease string) []string {
				return []string{c.etcdctl, "--endpoints", addr, "lock", "--ttl", strconv.Itoa(int(c.ttl.Seconds())), lease}
			}, etcd, etcdAway, func(lease string) error { return revoke(etcdAway, lease+"/") },
		},
		{
			"consul lock", func(addr, lease string) []string {
				return []string{c.consul, "lock", "-http-addr=" + addr, "-shell=false", lease}
			}, consul, consulAway, func(lease string) error { return destroy(consulAway, lease+"/.lock") },
		},
		{"underlease", ours("etcd", ""), etcd, etcdAway, func(lease string) error { return revoke(etcdAway, key(lease)) }},
		{"underlease", ours("consul", "?session-ttl-min=1s"), consul, consulAway, func(lease string) error { return destroy(consulAway, key(lease)) }},
	}
}

// running is a run that is under way.
type running struct {
	lease, file string
	cmd         *exec.Cmd
	over        chan struct{}
}

func (c *comparison) start(t tool, addr, lease, who string) (*running, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r := &running{lease: lease, file: filepath.Join(c.dir, lease+"-"+who), over: make(chan struct{})}
	args := append(t.args(addr, lease), self, "beat", r.file)
	r.cmd = exec.Command(args[0], args[1:]...)
	r.cmd.Env = environ
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that nothing of it outlives this program
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(r.over)
		_ = r.cmd.Wait() // how it ended is in its state
	}()
	return r, nil
}

// end ends a run with its command, at once.
func (r *running) end() {
	_ = syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
	<-r.over
	for { // a command of underlease is in the group of its guardian, which ends it
		_, before := beats(r.file)
		time.Sleep(silence)
		if _, last := beats(r.file); last == before {
			return
		}
	}
}

// fault makes one run, a second one that waits, does something to the first, and says what came of it.
func (c *comparison) fault(t tool, lease string, do func(tool, *running) error, undo func(tool, *running)) (string, error) {
	first, err := c.start(t, t.here.addr, lease, "first")
	if err != nil {
		return "", err
	}
	defer first.end()
	if err := await("the command of "+t.name, func() bool { at, _ := beats(first.file); return at != 0 }); err != nil {
		return "", err
	}
	second, err := c.start(t, t.away.addr, lease, "second")
	if err != nil {
		return "", err
	}
	defer second.end()
	time.Sleep(time.Second) // so that it waits
	if undo != nil {
		defer undo(t, first)
	}
	if err := do(t, first); err != nil {
		return "", fmt.Errorf("%s: %w", t.name, err)
	}
	begun := stamps.Now()
	for stamps.Now()-begun < int64(c.patience) {
		time.Sleep(silence)
		_, last := beats(first.file)
		next, _ := beats(second.file)
		if stamps.Now()-last > int64(2*silence) && next != 0 {
			break // nothing more comes
		}
	}
	now := stamps.Now()
	_, last := beats(first.file)
	next, nextLast := beats(second.file)
	var words []string
	stopped := now-last > int64(silence)
	if stopped {
		words = append(words, fmt.Sprintf("stopped after %s", span(last-begun)))
	} else {
		words = append(words, fmt.Sprintf("**ran on**, for all of %s", c.patience))
	}
	switch both := min(last, nextLast) - next; {
	case next == 0:
		words = append(words, "no second one came")
	case both > int64(100*time.Millisecond):
		words = append(words, fmt.Sprintf("**two ran for %s**", span(both)))
	case both > 0: // until the first was told
		words = append(words, fmt.Sprintf("two ran for %d ms", time.Duration(both).Milliseconds()))
	default:
		words = append(words, fmt.Sprintf("the second one ran after %s", span(next-begun)))
	}
	if undo != nil {
		undo(t, first)
	}
	if stopped {
		select {
		case <-first.over:
			words = append(words, ended(first.cmd.ProcessState))
		case <-time.After(10 * time.Second):
			words = append(words, "the tool did not end")
		}
	}
	return strings.Join(words, "; "), nil
}

// ended says how a process ended, as a shell sees it.
func ended(s *os.ProcessState) string {
	ws := s.Sys().(syscall.WaitStatus)
	if ws.Signaled() {
		return strconv.Itoa(128 + int(ws.Signal()))
	}
	return strconv.Itoa(ws.ExitStatus())
}

func span(ns int64) string {
	return fmt.Sprintf("%.1f s", max(0, time.Duration(ns).Seconds()))
}

const patience = 30 * time.Second

func await(what string, ok func() bool) error {
	for begun := time.Now(); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > patience {
			return fmt.Errorf("%s: nothing within %v", what, patience)
		}
	}
	return nil
}

// ports returns free ports. They lie below those that the kernel gives to outgoing connections, which could otherwise take one before the
// server does, and above those that the servers of tests are asked for at.
func ports(n int) (all []int, err error) {
	const first, last = 22000, 32000
	for tries := 0; len(all) < n; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", first+rand.IntN(last-first)))
		switch {
		case err == nil:
			defer l.Close() // when all are known, so that they differ
			all = append(all, l.Addr().(*net.TCPAddr).Port)
		case tries > 100:
			return nil, err
		}
	}
	return all, nil
}

const nodes = 3

// launch starts a server, which ends with this program.
func (c *comparison) launch(name, program string, args ...string) (*exec.Cmd, error) {
	f, err := os.Create(filepath.Join(c.dir, name+".log"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, f, c.dir
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c.servers = append(c.servers, cmd)
	return cmd, nil
}

func (c *comparison) startEtcd() error {
	p, err := ports(2 * nodes)
	if err != nil {
		return err
	}
	var initial []string
	for i := range nodes {
		initial = append(initial, fmt.Sprintf("m%d=http://127.0.0.1:%d", i, p[nodes+i]))
	}
	for i := range nodes {
		client, peer := fmt.Sprintf("http://127.0.0.1:%d", p[i]), fmt.Sprintf("http://127.0.0.1:%d", p[nodes+i])
		cmd, err := c.launch(fmt.Sprintf("etcd-%d", i), c.etcd,
			"--name", fmt.Sprintf("m%d", i), "--data-dir", fmt.Sprintf("etcd-%d", i), "--log-level", "error", "--unsafe-no-fsync",
			"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(initial, ","))
		if err != nil {
			return err
		}
		c.etcds = append(c.etcds, &server{addr: fmt.Sprintf("127.0.0.1:%d", p[i]), cmd: cmd})
	}
	return await("etcd", func() bool {
		leaders := 0
		for _, s := range c.etcds {
			var status struct {
				Leader string
				Header struct {
					Member string `json:"member_id"`
				}
			}
			if ask("POST", s.addr, "/v3/maintenance/status", map[string]any{}, &status) != nil || status.Leader == "" {
				return false
			}
			if s.leads = status.Leader == status.Header.Member; s.leads {
				leaders++
			}
		}
		return leaders == 1
	})
}

func (c *comparison) startConsul() error {
	p, err := ports(3 * nodes)
	if err != nil {
		return err
	}
	for i := range nodes {
		config, err := json.Marshal(map[string]any{
			"node_name": fmt.Sprintf("s%d", i), "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1", "server": true, "bootstrap_expect": nodes,
			"data_dir": filepath.Join(c.dir, fmt.Sprintf("consul-%d", i)), "retry_join": []string{fmt.Sprintf("127.0.0.1:%d", p[nodes])}, "retry_interval": "500ms",
			"ports":           map[string]int{"dns": -1, "grpc": -1, "grpc_tls": -1, "serf_wan": -1, "http": p[i], "serf_lan": p[nodes+i], "server": p[2*nodes+i]},
			"session_ttl_min": "1s", "log_level": "WARN", "disable_update_check": true, "performance": map[string]any{"raft_multiplier": 1},
			"connect": map[string]any{"enabled": false},
		})
		if err != nil {
			return err
		}
		file := filepath.Join(c.dir, fmt.Sprintf("consul-%d.json", i))
		if err := os.WriteFile(file, config, 0o600); err != nil {
			return err
		}
		cmd, err := c.launch(fmt.Sprintf("consul-%d", i), c.consul, "agent", "-config-file="+file)
		if err != nil {
			return err
		}
		c.consuls = append(c.consuls, &server{addr: fmt.Sprintf("127.0.0.1:%d", p[i]), cmd: cmd})
	}
	return await("Consul", func() bool {
		leaders := 0
		for _, s := range c.consuls {
			var leader string
			var self struct {
				Stats struct{ Consul struct{ Leader string } }
			}
			if ask("GET", s.addr, "/v1/status/leader", nil, &leader) != nil || leader == "" || ask("GET", s.addr, "/v1/agent/self", nil, &self) != nil {
				return false
			}
			if s.leads = self.Stats.Consul.Leader == "true"; s.leads {
				leaders++
			}
		}
		return leaders == 1
	})
}

// revoke revokes the etcd lease of the first key below a prefix: who waits has a later one.
func revoke(s *server, prefix string) error {
	end := []byte(prefix)
	end[len(end)-1]++
	b64 := base64.StdEncoding.EncodeToString
	var got struct{ Kvs []struct{ Lease string } }
	if err := ask("POST", s.addr, "/v3/kv/range", map[string]any{
		"key": b64([]byte(prefix)), "range_end": b64(end), "sort_order": "ASCEND", "sort_target": "CREATE", "limit": 1,
	}, &got); err != nil {
		return err
	}
	if len(got.Kvs) == 0 {
		return fmt.Errorf("there is no key below %s", prefix)
	}
	return ask("POST", s.addr, "/v3/lease/revoke", map[string]any{"ID": got.Kvs[0].Lease}, nil)
}

// destroy destroys the session that has locked a key.
func destroy(s *server, key string) error {
	var got []struct{ Session string }
	if err := ask("GET", s.addr, "/v1/kv/"+key+"?consistent", nil, &got); err != nil {
		return err
	}
	if len(got) == 0 || got[0].Session == "" {
		return fmt.Errorf("nobody has locked %s", key)
	}
	return ask("PUT", s.addr, "/v1/session/destroy/"+got[0].Session, nil, nil)
}

// ask sends a request with a body of JSON, and reads the answer.
func ask(method, addr, path string, body map[string]any, into any) error {
	var b []byte
	if body != nil {
		var err error
		if b, err = json.Marshal(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequest(method, "http://"+addr+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	answer, err := (&http.Client{Timeout: 5 * time.Second}).Do(req)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, answer.Status, bytes.TrimSpace(got))
	}
	if err == nil && into != nil {
		err = json.Unmarshal(got, into)
	}
	return err
}
