//go:build linux

package packaging

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// cronHost is a cron with the name of a host, and with crontabs, programs and mails of its own.
type cronHost struct {
	name, dir string
	cmd       *exec.Cmd
	words     bytes.Buffer
}

const cronScript = `set -e
hostname "$2"
mount --bind "$1/cron.d" /etc/cron.d
[ ! -e /etc/crontab ] || mount --bind "$1/none" /etc/crontab
mount --bind "$1/crontabs" /var/spool/cron/crontabs
mount --bind "$1/run" /run
mount --bind "$1/bin" /usr/local/bin
mount --bind "$1/sbin" /usr/sbin
exec /usr/sbin/cron -f -L 0
`

func startCron(t *testing.T, name string, files map[string]string) *cronHost {
	t.Helper()
	h := &cronHost{name: name, dir: filepath.Join(t.TempDir(), name)}
	write(t, h.dir, files)
	write(t, h.dir, map[string]string{
		"none": "", "run/.none": "", "mails/.none": "",
		// A mail has its name when it is whole.
		"sbin/sendmail": "#!/bin/sh\ncat > " + h.dir + "/mails/part.$$\nmv " + h.dir + "/mails/part.$$ " + h.dir + "/mails/mail.$$\n",
		// cron does not show how a line ended.
		"bin/noting-sh": "#!/bin/sh\n/bin/sh \"$@\"\ncode=$?\necho \"$code $2\" >> " + h.dir + "/codes\nexit $code\n",
	})
	if err := os.Chmod(filepath.Join(h.dir, "crontabs/root"), 0o600); err != nil { // cron passes over one that others can read
		t.Fatal(err)
	}
	install(t, filepath.Join(h.dir, "bin"))
	cron, err := os.ReadFile("/usr/sbin/cron")
	if err != nil {
		t.Fatal(err)
	}
	servers.WriteProgram(t, filepath.Join(h.dir, "sbin/cron"), cron)
	h.cmd = exec.Command("unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", cronScript, "sh", h.dir, name)
	h.cmd.Stdout, h.cmd.Stderr, h.cmd.WaitDelay = &h.words, &h.words, time.Second
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := h.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.cmd.Process.Kill()
		h.cmd.Wait()
	})
	return h
}

// lines are the lines of a file of the host.
func (h *cronHost) lines(name string) []string {
	b, _ := os.ReadFile(filepath.Join(h.dir, name))
	return strings.FieldsFunc(string(b), func(r rune) bool { return r == '\n' })
}

// mail is what cron has sent about one line.
type mail struct{ host, whole, subject, body string }

func (h *cronHost) mails(t *testing.T) (all []mail) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(h.dir, "mails/mail.*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		m := mail{host: h.name, whole: read(t, path)}
		head, body, _ := strings.Cut(m.whole, "\n\n")
		m.body = body
		if s := regexp.MustCompile(`(?m)^Subject: (.*)$`).FindStringSubmatch(head); s != nil {
			m.subject = s[1]
		}
		all = append(all, m)
	}
	return all
}

// whatIsMailed are the lines of which the page shows the mails. The lines are the same on both hosts.
const whatIsMailed = `SHELL=/usr/local/bin/noting-sh
PATH=/usr/local/bin:/usr/bin:/bin
UNDERLEASE_BACKEND=%s
* * * * * root underlease run skipped -- slow
* * * * * root underlease run -q --busy-exit 0 skipped-q -- slow
* * * * * root underlease run --min-hold 50s failing -- fail
* * * * * root underlease run -q --busy-exit 0 --min-hold 50s failing-q -- fail
* * * * * root underlease run --ttl 12s lost -- endless
* * * * * root underlease run -q --busy-exit 0 --ttl 12s lost-q -- endless
UNDERLEASE_BACKEND=redis://127.0.0.1:%d
* * * * * root underlease run no-store -- slow
* * * * * root underlease run -q --busy-exit 0 no-store-q -- slow
`

// minutely are the lines of a crontab, every minute, on another store.
func minutely(t *testing.T, text, backend string) string {
	t.Helper()
	text = replaced(t, text, "redis://cache.internal:6379", backend)
	line := regexp.MustCompile(`(?m)^[*0-9]\S*( +\S+){4} `)
	if !line.MatchString(text) {
		t.Fatalf("got no line of cron in\n%s", text)
	}
	return line.ReplaceAllString(text, "* * * * * ")
}

// Two hosts with the same lines, those that are there to be copied among them, for one minute.
func TestTheLinesOfCron(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED in a short run: it waits for the next minute")
	}
	t.Parallel()
	missing := root()
	for _, path := range []string{"/usr/sbin/cron", "/etc/cron.d", "/var/spool/cron/crontabs"} {
		if _, err := os.Stat(path); err != nil && missing == nil {
			missing = err
		}
	}
	servers.Require(t, "cron", missing)
	redis := servers.StartRedis(t, servers.RedisOptions{})
	backend := "redis://" + redis.Addr()
	nobody := servers.FreePort(t, 0)

	shared := t.TempDir()
	note := func(then string) string {
		return "#!/bin/sh\necho \"$(hostname) $UNDERLEASE_NAME\" >> " + shared + "/runs\n" + then + "\n"
	}
	files := map[string]string{
		"cron.d/example-jobs": minutely(t, read(t, "cron/cron.d/example-jobs"), backend),
		"cron.d/mails":        fmt.Sprintf(whatIsMailed, backend, nobody),
		"crontabs/root":       minutely(t, read(t, "cron/crontab"), backend),
		// Whoever comes second comes while they run, also where all lines of two hosts start slowly.
		"bin/slow":           note("exec sleep 15"),
		"bin/fail":           note("sleep 15; echo 'no space left on /srv' >&2; exit 3"),
		"bin/endless":        note("exec sleep 600"),
		"bin/queue-report":   note(""),
		"bin/nightly-backup": note(""),
		"bin/reindex":        note("exec sleep 15"),
		"bin/fetch-mail":     note(""),
		"bin/photos":         note(""),
	}
	// Both have to be up before one minute begins: the first one would have a minute of its own.
	if left := time.Until(time.Now().Truncate(time.Minute).Add(time.Minute)); left < 15*time.Second {
		time.Sleep(left + time.Second)
	}
	hosts := []*cronHost{startCron(t, "db1", files), startCron(t, "db2", files)}
	runs := func() []string {
		b, _ := os.ReadFile(shared + "/runs")
		return strings.FieldsFunc(string(b), func(r rune) bool { return r == '\n' })
	}
	// A cron reads its tables when it wakes: until both have, they stay.
	for _, h := range hosts {
		if !within(90*time.Second, func() bool { return len(h.lines("codes")) > 0 }) {
			t.Fatalf("%s: nothing has run within a minute; cron said %q", h.name, &h.words)
		}
	}
	// One minute is enough.
	for _, h := range hosts {
		for _, path := range []string{"cron.d/example-jobs", "cron.d/mails", "crontabs/root"} {
			if err := os.Remove(filepath.Join(h.dir, path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The run that lost is known when the other host has been told that the lease is taken.
	codes := func(line string) (all []string) {
		for _, h := range hosts {
			for _, c := range h.lines("codes") {
				if code, l, _ := strings.Cut(c, " "); l == line {
					all = append(all, code)
				}
			}
		}
		slices.Sort(all)
		return all
	}
	for line, name := range map[string]string{
		"underlease run --ttl 12s lost -- endless":                    "lost",
		"underlease run -q --busy-exit 0 --ttl 12s lost-q -- endless": "lost-q",
	} {
		if !within(patience, func() bool { return len(codes(line)) == 1 }) {
			t.Fatalf("%s: got the codes %q, want one of the two hosts skipped", line, codes(line))
		}
		deleted := 0
		for key := range strings.FieldsSeq(redis.Do("KEYS", "*")) {
			if strings.HasSuffix(key, "/"+name+"}") {
				redis.Do("DEL", key)
				deleted++
			}
		}
		if deleted == 0 {
			t.Fatalf("got the keys %q, want one of %s", redis.Do("KEYS", "*"), name)
		}
	}
	wantCodes := map[string][]string{
		"underlease run skipped -- slow":                                   {"0", "75"},
		"underlease run -q --busy-exit 0 skipped-q -- slow":                {"0", "0"},
		"underlease run --min-hold 50s failing -- fail":                    {"3", "75"},
		"underlease run -q --busy-exit 0 --min-hold 50s failing-q -- fail": {"0", "3"},
		"underlease run --ttl 12s lost -- endless":                         {"74", "75"},
		"underlease run -q --busy-exit 0 --ttl 12s lost-q -- endless":      {"0", "74"},
		"underlease run no-store -- slow":                                  {"69", "69"},
		"underlease run -q --busy-exit 0 no-store-q -- slow":               {"69", "69"},
	}
	for line, want := range wantCodes {
		if !within(patience, func() bool { return len(codes(line)) >= 2 }) || !slices.Equal(codes(line), want) {
			t.Errorf("%s: got the codes %q, want %q", line, codes(line), want)
		}
	}
	// Whatever is to be mailed is mailed when the child of cron has ended.
	for _, h := range hosts {
		if !within(patience, func() bool { return len(children(h.cmd.Process.Pid)) == 0 }) {
			t.Errorf("%s: cron still has the children %v", h.name, children(h.cmd.Process.Pid))
		}
	}

	count := map[string]int{}
	for _, run := range runs() {
		_, name, _ := strings.Cut(run, " ")
		count[name]++
	}
	for _, name := range []string{
		"skipped", "skipped-q", "failing", "failing-q", "lost", "lost-q", // one each
		"queue-report", "nightly-backup", "reindex", "fetch-mail", "photos",
	} {
		if count[name] != 1 {
			t.Errorf("%s: got %d runs on two hosts, want 1", name, count[name])
		}
	}
	if n := count["no-store"] + count["no-store-q"]; n != 0 {
		t.Errorf("got %d runs without a store, want none", n)
	}

	var mails []mail
	for _, h := range hosts {
		mails = append(mails, h.mails(t)...)
	}
	got := map[string][]mail{} // by the line
	for _, m := range mails {
		_, line, _ := strings.Cut(m.subject, "> ")
		line = strings.TrimSpace(line)
		got[line] = append(got[line], m)
	}
	wantMails := map[string]int{
		"underlease run skipped -- slow":                                   1,
		"underlease run --min-hold 50s failing -- fail":                    2,
		"underlease run -q --busy-exit 0 --min-hold 50s failing-q -- fail": 1,
		"underlease run --ttl 12s lost -- endless":                         2,
		"underlease run -q --busy-exit 0 --ttl 12s lost-q -- endless":      1,
		"underlease run no-store -- slow":                                  2,
		"underlease run -q --busy-exit 0 no-store-q -- slow":               2,
		"underlease run --max-run 2h reindex -- reindex":                   1,
	}
	for line, m := range got {
		if len(m) != wantMails[line] {
			t.Errorf("%s: got %d mails, want %d: %q", line, len(m), wantMails[line], m)
		}
	}
	for line, n := range wantMails {
		if len(got[line]) == 0 {
			t.Errorf("%s: got no mail, want %d", line, n)
		}
	}
	if t.Failed() {
		return
	}

	// What the page shows. The hosts are told apart by what they did: db1 is the one that ran.
	page := read(t, "cron/README.md")
	shown := func(text string) {
		t.Helper()
		if !strings.Contains(page, text) {
			t.Errorf("got a mail that cron/README.md does not show:\n%s", text)
		}
	}
	plain := func(m mail, text string) string {
		other := map[string]string{"db1": "db2", "db2": "db1"}[m.host]
		first, second := m.host, other
		if strings.Contains(m.body, "held by") || strings.Contains(m.body, "kept") {
			first, second = other, m.host
		}
		text = strings.NewReplacer(first, "db1", second, "db2",
			backend, "redis://cache.internal:6379", fmt.Sprintf("127.0.0.1:%d", nobody), "10.0.0.7:6379").Replace(text)
		text = regexp.MustCompile(`pid \d+`).ReplaceAllString(text, "pid 4711")
		text = regexp.MustCompile(`\d\d:\d\d:\d\d`).ReplaceAllString(text, "03:10:00")
		text = regexp.MustCompile(`\b[\dms]+ left`).ReplaceAllString(text, "50s left")
		return text
	}
	skip := got["underlease run skipped -- slow"][0]
	shown(plain(skip, skip.whole))
	for _, name := range []string{"--min-hold 50s failing -- fail", "--ttl 12s lost -- endless", "no-store -- slow"} {
		for _, m := range got["underlease run "+name] {
			shown(plain(m, "Subject: "+m.subject+"\n\n"+m.body))
		}
		quiet := "underlease run -q --busy-exit 0 " + strings.Replace(name, " -- ", "-q -- ", 1)
		for _, m := range got[quiet] {
			loud := false
			for _, l := range got["underlease run "+name] {
				loud = loud || plain(l, l.body) == strings.ReplaceAll(plain(m, m.body), "-q", "")
			}
			if !loud {
				t.Errorf("%s: got the mail %q, want the one that is sent without -q", quiet, m.body)
			}
		}
	}
}

// children lists the children of all threads of a process.
func children(pid int) (all []string) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, path := range tasks {
		b, _ := os.ReadFile(path)
		all = append(all, strings.Fields(string(b))...)
	}
	return all
}
