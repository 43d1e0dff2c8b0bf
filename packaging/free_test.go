//go:build linux

package packaging

import (
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// What underlease-operating(7) says to type where a lease has to be freed at once: it is free, its holder is stopped, and neither terms nor
// markers are lost.
func TestTheCommandsThatFreeALeaseDoSo(t *testing.T) {
	page := read(t, "man/underlease-operating.7")
	command := func(store string) string {
		found := regexp.MustCompile(`(?m)^\.It Cm ` + store + ` :\n\.Li "?(.*?)"?$`).FindStringSubmatch(page)
		if found == nil || !strings.Contains(found[1], "NAME") {
			t.Fatalf("the page has no command for %s", store)
		}
		return strings.ReplaceAll(found[1], "NAME", "nightly")
	}
	// shell runs a command that begins with a program, as another one with some arguments.
	shell := func(t *testing.T, program, stands, text string) {
		t.Helper()
		rest, ok := strings.CutPrefix(text, program+" ")
		if !ok {
			t.Fatalf("got the command %q, want one of %s", text, program)
		}
		if out, err := exec.Command("sh", "-c", stands+" "+rest).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", text, err, out)
		}
	}
	for name, start := range map[string]func(t *testing.T) (url string, free func(text string)){
		"redis": func(t *testing.T) (string, func(string)) {
			cli := servers.Programs(t, servers.NeedRedis, "apt-get install -y redis-tools", nil, "redis-cli")["redis-cli"]
			r := servers.StartRedis(t, servers.RedisOptions{})
			return "redis://" + r.Addr(), func(text string) { shell(t, "redis-cli", cli+" -p "+strconv.Itoa(r.Port), text) }
		},
		"etcd": func(t *testing.T) (string, func(string)) {
			addr := servers.StartEtcd(t, 1, servers.EtcdOptions{}).Nodes[0].Addr()
			return "etcd://" + addr, func(text string) { shell(t, "etcdctl", servers.Etcdctl(t)+" --endpoints "+addr, text) }
		},
		"consul": func(t *testing.T) (string, func(string)) {
			addr := servers.StartConsul(t, 1, servers.ConsulOptions{}).Nodes[0].Addr()
			return "consul://" + addr, func(text string) { shell(t, "consul", "CONSUL_HTTP_ADDR="+addr+" "+servers.ConsulProgram(t), text) }
		},
		"postgres": func(t *testing.T) (string, func(string)) {
			p := servers.StartPostgres(t, servers.PostgresOptions{})
			return "postgres://lease@" + p.Addr() + "/lease", func(text string) { p.Do(text) }
		},
		"mysql": func(t *testing.T) (string, func(string)) {
			m := servers.StartMariaDB(t, servers.MariaDBOptions{})
			return "mysql://lease@" + m.Addr() + "/lease", func(text string) { m.Do(text) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			of := name
			if name == "mysql" {
				of = "postgres" // "the same"
			}
			text := command(of)
			url, free := start(t)
			do := func(args ...string) string {
				t.Helper()
				c := exec.Command(underlease, append([]string{args[0], "--backend", url}, args[1:]...)...)
				c.Env = environ()
				out, err := c.Output()
				if err != nil {
					t.Fatalf("%q: %v", args, err)
				}
				return strings.TrimSpace(string(out))
			}
			marker := func(args ...string) {
				t.Helper()
				c := exec.Command(underlease, append([]string{"marker", args[0], "--backend", url}, args[1:]...)...)
				c.Env = environ()
				if out, err := c.CombinedOutput(); err != nil {
					t.Fatalf("marker %q: %v: %s", args, err, out)
				}
			}
			marker("set", "nightly", "--reason", "a test")
			// Its ttl is not over before the next one has waited.
			c := exec.Command(underlease, "run", "--backend", url, "--ttl", "2m", "nightly", "--", "sh", "-c", "echo $UNDERLEASE_TERM; exec sleep 600")
			c.Env = environ()
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Process.Kill() })
			var b [32]byte
			n, _ := out.Read(b[:])
			before, err := strconv.ParseInt(strings.TrimSpace(string(b[:n])), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			from := time.Now()
			free(text)
			after, err := strconv.ParseInt(do("run", "--wait", "60s", "nightly", "--", "sh", "-c", "echo $UNDERLEASE_TERM"), 10, 64)
			if err != nil || after <= before {
				t.Errorf("got the term %d and %v after %d, want a greater one", after, err, before)
			}
			t.Logf("the next one ran after %v", time.Since(from))
			marker("show", "nightly")
			err = c.Wait()
			if code := c.ProcessState.ExitCode(); code != 74 {
				t.Errorf("the holder: got %v, want 74", err)
			}
			t.Logf("the holder ended after %v", time.Since(from))
		})
	}
}
