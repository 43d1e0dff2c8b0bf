//go:build linux

package packaging

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// image is what a Dockerfile says of its last stage.
type image struct {
	from       string
	copies     [][2]string // from, to
	user       string
	entrypoint []string
	cmd        []string
	build      []string // what is run in the stages before it
}

// dockerfile reads the few instructions that ours have, and fails the test for any other.
func dockerfile(t *testing.T, path string) (i image) {
	t.Helper()
	list := func(text string) (all []string) {
		if err := json.Unmarshal([]byte(text), &all); err != nil {
			t.Fatalf("%s: %s is not in the exec form: %v", path, text, err)
		}
		return all
	}
	for line := range strings.Lines(read(t, path)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "FROM":
			i = image{from: rest, build: i.build}
		case "COPY":
			f := strings.Fields(rest)
			i.copies = append(i.copies, [2]string{f[len(f)-2], f[len(f)-1]})
		case "RUN":
			i.build = append(i.build, rest)
		case "USER":
			i.user = rest
		case "ENTRYPOINT":
			i.entrypoint = list(rest)
		case "CMD":
			i.cmd = list(rest)
		case "WORKDIR":
		default:
			t.Fatalf("%s: the test does not know %q", path, line)
		}
	}
	return i
}

// program is a command that needs nothing but a kernel. It does what its arguments say, one after another.
const program = `package main

import (
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	for _, arg := range os.Args[1:] {
		switch arg {
		case "say":
			fmt.Println(os.Getpid(), os.Getppid(), os.Getuid(), os.Getenv("UNDERLEASE_NAME"))
		case "sleep":
			time.Sleep(time.Hour)
		case "term": // waits for TERM, and ends well
			c := make(chan os.Signal, 1)
			signal.Notify(c, syscall.SIGTERM)
			fmt.Println("ready")
			<-c
			fmt.Println("terminated")
		case "orphan": // leaves a grandchild behind, in a session of its own
			os.StartProcess("/proc/self/exe", []string{"program", "parent"}, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
		case "parent":
			p, err := os.StartProcess("/proc/self/exe", []string{"program", "sleep"}, &os.ProcAttr{
				Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: true}})
			if err != nil {
				panic(err)
			}
			fmt.Println("orphan", p.Pid)
		case "die":
			syscall.Kill(os.Getpid(), syscall.SIGHUP)
			time.Sleep(time.Hour)
		default:
			n, err := strconv.Atoi(arg)
			if err != nil {
				panic(arg)
			}
			os.Exit(n)
		}
	}
}
`

// scratch makes a root directory with what an image from scratch has, and with /program beside it.
func scratch(t *testing.T, i image, built string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, c := range i.copies {
		from := c[0]
		if rest, ok := strings.CutPrefix(from, "/src/"); ok {
			from = filepath.Join(built, rest)
		}
		b, err := os.ReadFile(from)
		if strings.HasPrefix(c[0], "/etc/") && err != nil {
			continue // of the stage golang, which has it
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, c[1])), 0o755); err != nil {
			t.Fatal(err)
		}
		servers.WriteProgram(t, filepath.Join(dir, c[1]), b)
	}
	source := t.TempDir()
	write(t, source, map[string]string{"main.go": program})
	c := exec.Command("go", "build", "-o", filepath.Join(dir, "program"), "main.go")
	c.Dir, c.Env = source, append(os.Environ(), "CGO_ENABLED=0", "GO111MODULE=off")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	// What a runtime mounts: /proc and nothing else.
	if err := os.Mkdir(filepath.Join(dir, "proc"), 0o555); err != nil {
		t.Fatal(err)
	}
	return dir
}

// container is a process 1 in a read-only root, of the image's user, with the network of the test.
func container(root, user string, args ...string) *exec.Cmd {
	const enter = `root=$1 user=$2; shift 2
mount --bind "$root" "$root" && mount -o remount,ro,bind "$root" && mount -t proc proc "$root/proc" && cd "$root" &&
exec env -i PATH=/bin "$(PATH=$PATH:/usr/sbin:/sbin command -v chroot)" --userspec="$user" --groups= "$root" "$@"`
	c := exec.Command("unshare", append([]string{
		"--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--propagation", "private", "sh", "-c", enter, "sh", root, user,
	}, args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

// tracked copies the files of the repository.
func tracked(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	out, err := exec.Command("git", "-C", "..", "ls-files", "-z").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		info, err := os.Stat(filepath.Join("..", name))
		if err != nil {
			continue // removed, and not yet committed
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(read(t, filepath.Join("..", name))), info.Mode().Perm()|fs.FileMode(0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The image that the Dockerfile describes, without a shell, /tmp, /etc (but the certificates), /dev, HOME or anybody's name, read-only.
func TestTheImageFromScratch(t *testing.T) {
	t.Parallel()
	servers.Require(t, "namespaces", root())
	i := dockerfile(t, "container/Dockerfile")
	if i.from != "scratch" || i.user == "" || strings.HasPrefix(i.user, "0") || strings.HasPrefix(i.user, "root") {
		t.Fatalf("got an image from %q with the user %q, want one from scratch, and not root", i.from, i.user)
	}
	source := tracked(t)
	for _, line := range i.build {
		c := exec.Command("sh", "-c", line)
		c.Dir = source
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("RUN %s: %v: %s", line, err, out)
		}
	}
	root := scratch(t, i, source)
	redis := servers.StartRedis(t, servers.RedisOptions{})
	backend := "redis://" + redis.Addr()
	start := func(args ...string) (*exec.Cmd, *words) {
		t.Helper()
		var out words
		c := container(root, i.user, append(append([]string{}, i.entrypoint...), args...)...)
		c.Stdout, c.Stderr = &out, &out
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill(); c.Wait() })
		return c, &out
	}
	ends := func(c *exec.Cmd) int { c.Wait(); return code(c) }

	t.Run("the command runs under the lease, as the image's user", func(t *testing.T) {
		c, out := start("run", "--backend", backend, "x", "--", "/program", "say", "7")
		got := ends(c)
		// Process 1 is underlease, and its guardian is the parent of the command.
		if want := regexp.MustCompile(`\A[0-9]+ [0-9]+ 65532 x\n\z`); got != 7 || !want.MatchString(out.String()) || strings.HasPrefix(out.String(), "1 ") {
			t.Errorf("got %d and %q, want 7 and %v", got, out, want)
		}
	})
	t.Run("check needs no file", func(t *testing.T) {
		c, out := start("run", "--backend", backend, "x", "--", "/underlease", "check", "--for", "1s", "--print")
		if got := ends(c); got != 0 || !regexp.MustCompile(`\A[0-9]+\n\z`).MatchString(out.String()) {
			t.Errorf("got %d and %q, want 0 and the seconds left", got, out)
		}
	})
	t.Run("a stop reaches the command, and the lease is given back", func(t *testing.T) {
		c, out := start("run", "--backend", backend, "x", "--", "/program", "term")
		if !within(patience, func() bool { return status(t, backend, "x") == 75 }) {
			t.Fatalf("got %q, want a command that holds the lease", out)
		}
		pid := first(t, c)
		// The runtime signals process 1 from outside, which is how a signal with no handler reaches it at all.
		waitFor(t, out, "ready\n")
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if got := ends(c); got != 0 || out.String() != "ready\nterminated\n" {
			t.Errorf("got %d and %q, want a command that has ended well after TERM", got, out)
		}
		if got := status(t, backend, "x"); got != 0 {
			t.Errorf("got %d of status, want 0: free", got)
		}
	})
	t.Run("process 1 cannot die by a signal, so the code says it", func(t *testing.T) {
		c, out := start("run", "--backend", backend, "x", "--", "/program", "die")
		if got, want := ends(c), 128+int(syscall.SIGHUP); got != want {
			t.Errorf("got %d and %q, want %d", got, out, want)
		}
	})
	t.Run("orphans are killed and collected before the lease is free", func(t *testing.T) {
		c, out := start("run", "--backend", backend, "x", "--", "/program", "orphan", "term")
		waitFor(t, out, "orphan ", "ready\n")
		if err := syscall.Kill(first(t, c), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if got := ends(c); got != 0 || !strings.Contains(out.String(), "underlease: ") {
			t.Errorf("got %d and %q, want 0 and a word about what was left", got, out)
		}
	})
	t.Run("skipped", func(t *testing.T) {
		defer holder(t, backend, "x")()
		c, out := start("run", "--backend", backend, "x", "--", "/program", "say")
		if got := ends(c); got != 75 || !strings.HasPrefix(out.String(), `underlease: busy: "x" is held by `) {
			t.Errorf("got %d and %q, want 75 and who", got, out)
		}
	})
	t.Run("the store of one host has no place here, and says so", func(t *testing.T) {
		c, out := start("run", "x", "--", "/program", "say")
		if got := ends(c); got != 78 || !strings.Contains(out.String(), "HOME") {
			t.Errorf("got %d and %q, want 78 and that HOME is not set", got, out)
		}
	})
	t.Run("gate and marker", func(t *testing.T) {
		for _, want := range []string{`migrated: "schema"`, `already applied: "schema"`} {
			c, out := start("gate", "--backend", backend, "schema", "--", "/program", "0")
			if got := ends(c); got != 0 || !strings.Contains(out.String(), want) {
				t.Errorf("got %d and %q, want 0 and %q", got, out, want)
			}
		}
	})
	t.Run("a wrapper that is killed takes everything along", func(t *testing.T) {
		c, out := start("run", "--backend", backend, "--ttl", "10s", "x", "--", "/program", "term")
		waitFor(t, out, "ready\n")
		pid := first(t, c)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		ends(c)
		if !within(patience, func() bool { return status(t, backend, "x") == 0 }) {
			t.Error("the lease is still held")
		}
	})
}

// words is what a process has written so far.
type words struct {
	mu   sync.Mutex
	text []byte
}

func (w *words) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, b...)
	return len(b), nil
}

func (w *words) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.text)
}

// first returns the process 1 of a container.
func first(t *testing.T, c *exec.Cmd) int {
	t.Helper()
	var pid int
	if !within(patience, func() bool {
		all := children(c.Process.Pid)
		if len(all) != 1 {
			return false
		}
		fmt.Sscan(all[0], &pid)
		b, _ := os.ReadFile("/proc/" + all[0] + "/comm")
		return strings.TrimSpace(string(b)) == "underlease"
	}) {
		t.Fatal("there is no process 1")
	}
	return pid
}

// waitFor waits until all of these were written.
func waitFor(t *testing.T, out *words, texts ...string) {
	t.Helper()
	if !within(patience, func() bool {
		for _, text := range texts {
			if !strings.Contains(out.String(), text) {
				return false
			}
		}
		return true
	}) {
		t.Fatalf("got %q, want %q", out, texts)
	}
}

// Another image has one line of ours, and an entrypoint.
func TestTheImageOfAJob(t *testing.T) {
	i := dockerfile(t, "container/Dockerfile.job")
	if want := [2]string{"/underlease", "/usr/local/bin/underlease"}; i.copies[0] != want {
		t.Errorf("got %q copied, want %q", i.copies[0], want)
	}
	dir := stage(t, map[string]string{"bin/report": "#!/bin/sh\necho \"$UNDERLEASE_NAME $*\"\n"})
	for args, want := range map[string]string{"": "nightly-report \n", "report --all": "nightly-report --all\n"} {
		command := i.cmd
		if args != "" {
			command = strings.Fields(args)
		}
		c := exec.CommandContext(t.Context(), "env", append(append([]string{"-i", "PATH=" + dir + "/bin:" + filepath.Dir(underlease) + ":/usr/bin:/bin", "UNDERLEASE_BACKEND=file://" + dir + "/store"}, i.entrypoint...), command...)...)
		if out, err := c.CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("%q: got %v and %q, want %q", args, err, out, want)
		}
	}
}
