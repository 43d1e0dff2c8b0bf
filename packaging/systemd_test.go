//go:build linux

package packaging

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

const (
	needSystemd    = "systemd"
	installSystemd = "apt-get install -y --no-install-recommends systemd"
	systemd        = "/lib/systemd/systemd"
)

// units are the files that are copied to /etc/systemd/system.
func units(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, kind := range []string{"service", "timer"} {
		found, err := filepath.Glob("systemd/*." + kind)
		if err != nil || len(found) == 0 {
			t.Fatalf("got %d units .%s and %v, want some", len(found), kind, err)
		}
		all = append(all, found...)
	}
	return all
}

// analyze runs systemd-analyze where the program and the jobs of the units are in /usr/local/bin.
func analyze(t *testing.T, args ...string) (out string, failed error) {
	t.Helper()
	program := servers.Programs(t, needSystemd, installSystemd, nil, "systemd-analyze")["systemd-analyze"]
	servers.Require(t, needSystemd, root())
	bin := filepath.Join(t.TempDir(), "bin")
	install(t, bin)
	job := "#!/bin/sh\n"
	write(t, bin+"/..", map[string]string{"bin/nightly-backup": job, "bin/scheduler": job, "bin/report": job})
	c := exec.Command("unshare", append([]string{
		"--mount", "--propagation", "private", "sh", "-c",
		`mount --bind "$1" /usr/local/bin && shift && exec "$@"`, "sh", bin, program,
	}, args...)...)
	b, err := c.CombinedOutput()
	return string(b), err
}

// instances are the units as systemd sees them: a template has an instance.
func instances(t *testing.T) (dir string, names []string) {
	t.Helper()
	dir = t.TempDir()
	for _, unit := range units(t) {
		name := strings.Replace(filepath.Base(unit), "@.", "@report.", 1)
		write(t, dir, map[string]string{name: read(t, unit)})
		names = append(names, name)
	}
	return dir, names
}

func TestSystemdFindsNothingWrongWithTheUnits(t *testing.T) {
	dir, names := instances(t)
	args := []string{"verify", "--man=no", "--recursive-errors=no"}
	for _, name := range names {
		args = append(args, filepath.Join(dir, name))
	}
	if out, err := analyze(t, args...); err != nil || out != "" {
		t.Errorf("got %v and\n%swant no word", err, out)
	}
	// It does find what is wrong.
	unit := filepath.Join(dir, "nightly-backup.service")
	write(t, dir, map[string]string{"nightly-backup.service": replaced(t, read(t, unit), "KillMode=mixed", "KilMode=mixed")})
	if out, err := analyze(t, "verify", "--man=no", unit); !strings.Contains(out, "KilMode") {
		t.Errorf("got %v and %q of a misspelt unit, want it named", err, out)
	}
}

// systemd counts what a unit leaves open from 0 to 10. The template leaves that to its user.
func TestTheUnitsLeaveLittleOpen(t *testing.T) {
	dir, _ := instances(t)
	for _, unit := range []string{"nightly-backup.service", "scheduler.service"} {
		out, err := analyze(t, "security", "--offline=yes", "--no-pager", "--threshold=35", filepath.Join(dir, unit))
		exposure := regexp.MustCompile(`Overall exposure level for \S+: (\S+)`).FindStringSubmatch(out)
		if err != nil || exposure == nil {
			t.Errorf("%s: got %v, want at most 3.5 of\n%s", unit, err, out)
			continue
		}
		t.Logf("%s: %s", unit, exposure[1])
	}
}

// What systemd does with a unit has an order of times in it: ours come first.
func TestSystemdWaitsLongerThanTheDrain(t *testing.T) {
	for _, unit := range units(t) {
		text := read(t, unit)
		drain := regexp.MustCompile(`(?m)^(?:ExecStart=.*--drain |Environment=UNDERLEASE_DRAIN=)(\S+)`).FindStringSubmatch(text)
		stop := regexp.MustCompile(`(?m)^TimeoutStopSec=(.+)$`).FindStringSubmatch(text)
		if strings.HasSuffix(unit, ".timer") {
			continue
		}
		if drain == nil || stop == nil {
			t.Errorf("%s: got no drain or no TimeoutStopSec", unit)
			continue
		}
		d, err := time.ParseDuration(drain[1])
		if err != nil {
			t.Fatal(err)
		}
		s, err := time.ParseDuration(strings.NewReplacer(" ", "", "min", "m").Replace(stop[1]))
		if err != nil {
			t.Fatal(err)
		}
		// 10 s is what the longest grace is.
		if s < d+10*time.Second {
			t.Errorf("%s: got TimeoutStopSec=%v and a drain of %v, want 10s between them", unit, s, d)
		}
	}
}

// host is a systemd that is process 1 of namespaces of its own: of processes, mounts, names and control groups. It has the network of the
// test, a directory /etc of its own with our units, and nothing in /usr/lib/systemd/system but empty targets.
type host struct {
	t   *testing.T
	dir string // bin is /usr/local/bin, etc is what /etc gets beside the accounts
	pid int
}

const bootScript = `set -e
dir=$1
mount --make-rprivate /
mount --make-rshared / # as systemd finds it on a machine: credentials are handed on by propagation
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd /run/lock
mount --bind "$dir/bin" /usr/local/bin
mount --bind "$dir/lib" /usr/lib/systemd/system
mount -t tmpfs -o mode=755 tmpfs /var/lib
mkdir "$dir/accounts"
cp -a /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.* "$dir/accounts"
mount -t tmpfs -o mode=755 tmpfs /etc
cp -a "$dir/accounts/." "$dir/etc/." /etc
chown -R 0:0 /etc
hostname db1
exec env -i container=proof PATH=/usr/local/bin:/usr/bin:/bin ` + systemd + ` --system --unit=proof.target --log-level=notice --log-target=console --show-status=false
`

// boot starts systemd with our units and further files below /etc.
func boot(t *testing.T, backend string, files map[string]string) *host {
	t.Helper()
	servers.Programs(t, needSystemd, installSystemd, nil, "systemctl", "systemd-notify", "nsenter")
	servers.Require(t, needSystemd, root())
	if _, err := os.Stat(systemd); err != nil {
		servers.Require(t, needSystemd, err)
	}
	group, err := newGroup(t)
	servers.Require(t, needSystemd, err)

	h := &host{t: t, dir: t.TempDir()}
	install(t, filepath.Join(h.dir, "bin"))
	all := map[string]string{
		"etc/underlease/backend":                   backend + "\n",
		"etc/os-release":                           "ID=proof\n",
		"etc/systemd/system/service.d/10-log.conf": "[Service]\nStandardOutput=append:" + h.dir + "/log\nStandardError=append:" + h.dir + "/log\n",
		"lib/proof.target":                         "[Unit]\nDefaultDependencies=no\n",
	}
	for _, target := range []string{"sysinit", "basic", "shutdown", "timers", "multi-user", "network-online", "network", "time-set", "time-sync", "paths", "sockets", "exit"} {
		all["lib/"+target+".target"] = "[Unit]\nDefaultDependencies=no\n"
	}
	for _, unit := range units(t) {
		all["etc/systemd/system/"+filepath.Base(unit)] = read(t, unit)
	}
	maps.Copy(all, files)
	write(t, h.dir, all)
	if err := os.Chmod(filepath.Join(h.dir, "etc/underlease/backend"), 0o600); err != nil {
		t.Fatal(err)
	}

	c := exec.Command("unshare", "--cgroup", "sh", "-c", bootScript, "sh", h.dir)
	var words bytes.Buffer
	c.Stdout, c.Stderr, c.WaitDelay = &words, &words, time.Second
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		UseCgroupFD: true, CgroupFD: int(group.Fd()),
		Pdeathsig: syscall.SIGKILL,
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	h.pid = c.Process.Pid
	t.Cleanup(func() {
		c.Process.Kill() // and with process 1 all others
		c.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(h.dir, "log"))
			t.Logf("the units said:\n%s\nsystemd said:\n%s", b, &words)
		}
	})
	if !within(patience, func() bool {
		out, _ := h.try("systemctl", "is-active", "proof.target")
		return out == "active\n"
	}) {
		out, err := h.try("systemctl", "is-active", "proof.target")
		t.Fatalf("systemd has not come up: %q, %v; it said %s", out, err, &words)
	}
	return h
}

// newGroup makes a control group of version 2, which is removed with all that is below it.
func newGroup(t *testing.T) (*os.File, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	mount := regexp.MustCompile(`(?m)^\S+ \S+ \S+ / (\S+) .* - cgroup2 `).FindSubmatch(mounts)
	if mount == nil {
		return nil, errors.New("no control groups of version 2")
	}
	dir := fmt.Sprintf("%s/ulsystemd-%d-%d", mount[1], os.Getpid(), time.Now().UnixNano())
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	t.Cleanup(func() {
		if !within(patience, func() bool {
			var all []string
			filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					all = append(all, path)
				}
				return nil
			})
			for _, path := range slices.Backward(all) {
				os.Remove(path)
			}
			_, err := os.Stat(dir)
			return errors.Is(err, os.ErrNotExist)
		}) {
			t.Errorf("the control group %s is still there", dir)
		}
	})
	f, err := os.Open(dir)
	if err == nil {
		t.Cleanup(func() { f.Close() })
	}
	return f, err
}

// try runs a command on the host.
func (h *host) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	in := []string{"-t", strconv.Itoa(h.pid), "-m", "-p", "-u", "-i", "-C"}
	b, err := exec.CommandContext(ctx, "nsenter", append(in, args...)...).CombinedOutput()
	return string(b), err
}

func (h *host) systemctl(args ...string) {
	h.t.Helper()
	if out, err := h.try(append([]string{"systemctl"}, args...)...); err != nil {
		h.t.Fatalf("systemctl %q: %v: %s", args, err, out)
	}
}

// show returns properties of a unit, as "A=x B=y".
func (h *host) show(unit string, properties ...string) string {
	h.t.Helper()
	out, err := h.try("systemctl", "show", unit, "-p", strings.Join(properties, ","))
	if err != nil {
		h.t.Fatalf("systemctl show %s: %v: %s", unit, err, out)
	}
	lines := strings.Fields(out)
	slices.SortFunc(lines, func(a, b string) int {
		order := func(line string) int { name, _, _ := strings.Cut(line, "="); return slices.Index(properties, name) }
		return order(a) - order(b)
	})
	return strings.Join(lines, " ")
}

// becomes waits until properties of a unit are as wanted.
func (h *host) becomes(unit, want string) {
	h.t.Helper()
	var names []string
	for f := range strings.FieldsSeq(want) {
		name, _, _ := strings.Cut(f, "=")
		names = append(names, name)
	}
	var got string
	if !within(patience, func() bool { got = h.show(unit, names...); return got == want }) {
		h.t.Fatalf("%s: got %s, want %s", unit, got, want)
	}
}

// file is a file of the host.
func (h *host) file(path string) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", h.pid, path))
	return string(b)
}

func (h *host) job(name, script string) {
	h.t.Helper()
	write(h.t, h.dir, map[string]string{"bin/" + name: "#!/bin/sh\n" + script})
}

// holder is a run on another host, which holds a lease until it is ended.
func holder(t *testing.T, backend, lease string, flags ...string) (end func()) {
	t.Helper()
	c := exec.Command(underlease, append(append([]string{"run", "--backend", backend}, flags...), lease, "--", "sh", "-c", "echo; exec sleep 600")...)
	c.Env = environ()
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end = func() {
		if !ended {
			ended = true
			c.Process.Signal(syscall.SIGTERM)
			c.Wait()
		}
	}
	t.Cleanup(end)
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("nobody holds %s: %v", lease, err)
	}
	return end
}

// The service of the pages, hardened as it is, under a real systemd.
func TestTheServiceUnderSystemd(t *testing.T) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	backend := "redis://" + redis.Addr()
	h := boot(t, backend, map[string]string{
		"bin/nightly-backup": `#!/bin/sh
underlease check --for 1s; echo "check=$? run=$UNDERLEASE_RUN_ID group=$(sed -n s/^0:://p /proc/self/cgroup)" >> $STATE_DIRECTORY/ran
`,
		// The time of day is what the test does not wait for.
		"etc/systemd/system/nightly-backup.timer.d/now.conf": "[Timer]\nOnCalendar=\nOnActiveSec=1ms\n",
	})
	const unit, ran = "nightly-backup.service", "/var/lib/nightly-backup/ran"

	t.Log("the timer starts it, and it has what it needs: /proc, the guardian's socket, the store, a control group of its own")
	h.systemctl("start", "nightly-backup.timer")
	if !within(patience, func() bool { return strings.HasSuffix(h.file(ran), "\n") }) {
		t.Fatalf("it has not run: %s", h.show(unit, "Result", "ExecMainStatus"))
	}
	h.becomes(unit, "ActiveState=inactive Result=success ExecMainStatus=0")
	today := time.Now().UTC().Format("2006-01-02")
	want := regexp.MustCompile(`\Acheck=0 run=nightly-backup/` + today + `T00:00:00Z group=/system.slice/nightly-backup.service/underlease-\S+\n\z`)
	if got := h.file(ran); !want.MatchString(got) {
		t.Errorf("got %q of the command, want %v", got, want)
	}

	t.Log("not due: 75, nothing has run, and nothing has failed")
	h.systemctl("restart", unit)
	h.becomes(unit, "ActiveState=inactive Result=success ExecMainStatus=75")
	if got := strings.Count(h.file(ran), "\n"); got != 1 {
		t.Errorf("got %d runs, want the first alone", got)
	}

	t.Log("held by another host: the same")
	redis.Do("FLUSHALL")
	end := holder(t, backend, "nightly-backup")
	h.systemctl("restart", unit)
	h.becomes(unit, "ActiveState=inactive Result=success ExecMainStatus=75")
	end()

	t.Log("the command fails: so does the unit, with its code")
	h.job("nightly-backup", "exit 3\n")
	h.systemctl("restart", unit)
	h.becomes(unit, "ActiveState=failed Result=exit-code ExecMainStatus=3")

	t.Log("a stop is passed on, and the lease is kept until the command has ended")
	h.job("nightly-backup", `trap 'echo stopping >> $STATE_DIRECTORY/ran; while ! [ -e $STATE_DIRECTORY/go ]; do sleep 0.05; done; trap - TERM; kill -TERM $$' TERM
echo started >> $STATE_DIRECTORY/ran
while :; do sleep 0.05; done
`)
	h.systemctl("reset-failed", unit)
	h.systemctl("restart", unit)
	within(patience, func() bool { return strings.HasSuffix(h.file(ran), "started\n") })
	h.systemctl("stop", "--no-block", unit)
	if !within(patience, func() bool { return strings.HasSuffix(h.file(ran), "stopping\n") }) {
		t.Fatalf("got %q, want a command that is stopping", h.file(ran))
	}
	if got := status(t, backend, "nightly-backup"); got != 75 {
		t.Errorf("got %d of status while the command is stopping, want 75: held", got)
	}
	if out, err := h.try("touch", "/var/lib/nightly-backup/go"); err != nil {
		t.Fatalf("touch: %v: %s", err, out)
	}
	h.becomes(unit, "ActiveState=inactive Result=success")
	if got := status(t, backend, "nightly-backup"); got != 0 {
		t.Errorf("got %d of status after the stop, want 0: free", got)
	}

	t.Log("the store is away: nothing has run, and systemd starts it again later")
	redis.Kill()
	h.job("nightly-backup", "echo not this >> $STATE_DIRECTORY/ran\n")
	h.systemctl("start", unit)
	h.becomes(unit, "ActiveState=activating SubState=auto-restart ExecMainStatus=69")
	if strings.Contains(h.file(ran), "not this") {
		t.Error("it has run without a lease")
	}
	h.systemctl("stop", unit)
}

// What a careful administrator adds does not stand in the way.
func TestTheServiceWithMoreTakenAway(t *testing.T) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	for _, c := range []struct{ lines, user string }{
		{"DynamicUser=yes", `6[1-5]\d\d\d`},
		{"User=nobody", "65534"},
		{"PrivateUsers=yes", "0"},
		{"ProcSubset=pid", "0"},
		{"RestrictNamespaces=yes", "0"},
		{"ProtectControlGroups=yes", "0"},
	} {
		h := boot(t, "redis://"+redis.Addr(), map[string]string{
			"bin/nightly-backup": "#!/bin/sh\nunderlease check --for 1s; echo \"check=$? user=$(id -u)\" >> $STATE_DIRECTORY/ran\n",
			"etc/systemd/system/nightly-backup.service.d/more.conf": "[Service]\n" + c.lines + "\n",
		})
		redis.Do("FLUSHALL")
		h.systemctl("start", "nightly-backup.service")
		h.becomes("nightly-backup.service", "ActiveState=inactive Result=success ExecMainStatus=0")
		want := regexp.MustCompile(`\Acheck=0 user=` + c.user + `\n\z`)
		if got := h.file("/var/lib/nightly-backup/ran"); !want.MatchString(got) {
			t.Errorf("%s: got %q of the command, want %v", c.lines, got, want)
		}
	}
}

// status returns the exit code of `underlease status`.
func status(t *testing.T, backend, lease string) int {
	t.Helper()
	c := exec.Command(underlease, "status", "-q", "--backend", backend, lease)
	c.Env = environ()
	if out, err := c.CombinedOutput(); c.ProcessState == nil {
		t.Fatalf("underlease status: %v: %s", err, out)
	}
	return code(c)
}

func TestTheTemplateUnderSystemd(t *testing.T) {
	h := boot(t, "", map[string]string{
		"bin/report": "#!/bin/sh\necho \"$UNDERLEASE_NAME\" > /var/lib/underlease/ran\n",
		"bin/hang":   "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.05; done\n",
		"etc/systemd/system/underlease@report.timer.d/now.conf":      "[Timer]\nOnCalendar=\nOnActiveSec=1ms\n",
		"etc/systemd/system/underlease@limited.service.d/limit.conf": "[Service]\nRuntimeMaxSec=5s\n",
		"etc/default/underlease-hang":                                "UNDERLEASE_MAX_RUN=500ms\nUNDERLEASE_GRACE=500ms\n",
		"etc/default/underlease-limited":                             "UNDERLEASE_DRAIN=500ms\n",
		"bin/limited":                                                "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.05; done\n",
	})
	h.systemctl("start", "underlease@report.timer")
	if !within(patience, func() bool { return h.file("/var/lib/underlease/ran") != "" }) {
		t.Fatalf("it has not run: %s", h.show("underlease@report.service", "Result", "ExecMainStatus"))
	}
	h.becomes("underlease@report.service", "ActiveState=inactive Result=success ExecMainStatus=0")
	if got := h.file("/var/lib/underlease/ran"); got != "report\n" {
		t.Errorf("got the lease %q, want report", got)
	}

	t.Log("--max-run ends a command that takes too long with a code of its own")
	h.systemctl("start", "underlease@hang.service")
	h.becomes("underlease@hang.service", "ActiveState=failed Result=exit-code ExecMainStatus=124")

	t.Log("RuntimeMaxSec is a signal from outside: --drain counts, and systemd says timeout")
	h.systemctl("start", "underlease@limited.service")
	h.becomes("underlease@limited.service", "ActiveState=failed Result=timeout ExecMainStatus=9")
}

// Two hosts with one role: the other one has it, then this one.
func TestAStandbyBecomesReadyWhenItHasTheLease(t *testing.T) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	backend := "redis://" + redis.Addr()
	h := boot(t, backend, map[string]string{
		"bin/scheduler": "#!/bin/sh\nsystemd-notify --ready --status=\"term $UNDERLEASE_TERM\"\nexec sleep 600\n",
	})
	end := holder(t, backend, "scheduler", "--ttl", "15s")
	h.systemctl("start", "--no-block", "scheduler.service")
	// It stands in the store's queue.
	if !within(patience, func() bool { return strings.Contains(redis.Do("CLIENT", "LIST"), "sub=1") }) {
		t.Fatalf("nobody waits at the store: %s", redis.Do("CLIENT", "LIST"))
	}
	if got, want := h.show("scheduler.service", "ActiveState", "SubState"), "ActiveState=activating SubState=start"; got != want {
		t.Errorf("got %s of a standby, want %s", got, want)
	}
	end()
	h.becomes("scheduler.service", "ActiveState=active SubState=running")
	if out, err := h.try("systemctl", "show", "scheduler.service", "-p", "StatusText"); !regexp.MustCompile(`=term \d+\n`).MatchString(out) {
		t.Errorf("got %q and %v, want the status that the command has sent", out, err)
	}
	h.systemctl("stop", "scheduler.service")
	if got := status(t, backend, "scheduler"); got != 0 {
		t.Errorf("got %d of status after the stop, want 0: free", got)
	}
}

// The message of a Type=notify service comes from the command itself, whole and once, and underlease sends none.
func TestNotificationsPassThrough(t *testing.T) {
	servers.Programs(t, needSystemd, installSystemd, nil, "systemd-notify")
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(underlease, "run", "--backend", "file://"+t.TempDir()+"/store", "x", "--",
		"sh", "-c", `systemd-notify --no-block READY=1 STATUS=serving; systemd-notify --no-block STOPPING=1`)
	c.Env = environ("NOTIFY_SOCKET=" + path)
	out, err := c.CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Fatalf("got %v and %q of the run, want no word", err, out)
	}
	var got []string
	for range 2 {
		b, oob := make([]byte, 4096), make([]byte, 4096)
		conn.SetReadDeadline(time.Now().Add(patience))
		n, oobn, _, _, err := conn.ReadMsgUnix(b, oob)
		if err != nil {
			t.Fatalf("got %q and then %v, want two messages", got, err)
		}
		got = append(got, strings.TrimSpace(string(b[:n])))
		all, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil || len(all) == 0 {
			t.Fatalf("got no credentials with %q: %v", got, err)
		}
		cred, err := unix.ParseUnixCredentials(&all[0])
		if err != nil {
			t.Fatal(err)
		}
		if int(cred.Pid) == c.Process.Pid {
			t.Errorf("got %q from underlease itself, want it from the command", got)
		}
	}
	if want := []string{"READY=1\nSTATUS=serving", "STOPPING=1"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, _, err := conn.ReadFrom(make([]byte, 4096)); err == nil {
		t.Errorf("got %d bytes more, want none: underlease has nothing to tell systemd", n)
	}
}
