//go:build linux

package packaging

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// block is what stands between two fences of a page.
type block struct {
	line       int
	kind, text string
}

func blocks(t *testing.T, page string) (all []block) {
	t.Helper()
	in := false
	for i, line := range strings.Split(read(t, page), "\n") {
		switch fence, ok := strings.CutPrefix(line, "```"); {
		case ok && !in:
			all = append(all, block{line: i + 1, kind: fence})
			in = true
		case ok:
			in = false
		case in:
			all[len(all)-1].text += line + "\n"
		}
	}
	if in {
		t.Fatalf("%s: a fence is not closed", page)
	}
	return all
}

// runner says how a block of a page is run that has these words.
type runner struct {
	words string
	run   func(t *testing.T, b block) // nil: with another one, or there is nothing to run
}

// runners are those of the front page; the first one whose words are in a block counts.
var runners = []runner{
	{"UNDERLEASE_HELD_BY=", runWhatACommandSees},
	{"make build && sudo make install", runFiveMinutes}, // with the two after it, in one place
	{"export UNDERLEASE_BACKEND=redis:", nil},
	{"} | crontab -", nil},
	{"go build -o underlease .", runBuild},
	{"make test", runMakeTest},
	{"sent                            stop at", nil}, // a drawing
	{"underlease gate --wait 5m schema-v3", runGates},
	{"# /etc/underlease.yaml", runSettings},
	{"$ underlease list", runList},
	{"underlease schema print", runSchema},
	{"ACL SETUSER lease", runRedisRights},
	{"etcdctl role add lease", runRights},
	{"GRANT SELECT", nil},            // with the schema
	{"SELECT underlease_guard", nil}, // with the schema
	{"SELECT underlease_mark", nil},  // with the schema
}

// Whoever copies a block of the front page copies what has run.
func TestEveryBlockOfTheFrontPageIsRun(t *testing.T) {
	used := map[string]bool{}
	for _, b := range blocks(t, "../README.md") {
		i := slices.IndexFunc(runners, func(r runner) bool { return strings.Contains(b.text, r.words) })
		if i < 0 {
			t.Errorf("README.md:%d: nothing runs this block:\n%s", b.line, b.text)
			continue
		}
		used[runners[i].words] = true
		if runners[i].run != nil {
			t.Run(fmt.Sprintf("line %d", b.line), func(t *testing.T) { runners[i].run(t, b) })
		}
	}
	for _, r := range runners {
		if !used[r.words] {
			t.Errorf("no block of README.md has %q any more", r.words)
		}
	}
}

// after returns the block of the front page with these words.
func after(t *testing.T, words string) block {
	t.Helper()
	for _, b := range blocks(t, "../README.md") {
		if strings.Contains(b.text, words) {
			return b
		}
	}
	t.Fatalf("no block of README.md has %q", words)
	return block{}
}

func runWhatACommandSees(t *testing.T, b block) {
	cron := regexp.MustCompile(`(?m)^0 3 \* \* \*  root  (.*)$`).FindStringSubmatch(b.text)
	if cron == nil {
		t.Fatal("there is no line of cron")
	}
	dir := stage(t, map[string]string{"bin/backup.sh": "#!/bin/sh\nenv | grep ^UNDERLEASE_ | grep -v ^UNDERLEASE_BACKEND=\n"})
	line := replaced(t, replaced(t, cron[1], "/usr/local/bin/underlease", "underlease"), "/usr/local/bin/backup.sh", "backup.sh")
	out, err := script(dir, line).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
	names := func(text string) (all []string) {
		for _, m := range regexp.MustCompile(`(?m)^(UNDERLEASE_[A-Z_]+)=`).FindAllStringSubmatch(text, -1) {
			all = append(all, m[1])
		}
		slices.Sort(all)
		return all
	}
	if got, want := names(string(out)), names(b.text); !slices.Equal(got, want) {
		t.Errorf("got the variables %q, want those of the page, %q", got, want)
	}
	defer holder(t, "file://"+dir+"/store", "nightly-backup")()
	out, _ = script(dir, line).CombinedOutput()
	shape := regexp.MustCompile(`held by \S+ \(pid \d+\) since [\d:]+`)
	if want := shape.ReplaceAllString(string(out), "held by db1 (pid 4711) since 03:00:02"); !strings.Contains(b.text, want) || want == "" {
		t.Errorf("got %q, want the page to show it", want)
	}
}

// runFiveMinutes does what the page says from the first line on, on a host without Redis and without us: with a network of its own, /usr/local/bin
// and the crontabs empty, and a real make, crontab and Redis.
func runFiveMinutes(t *testing.T, install block) {
	redis := servers.Programs(t, servers.NeedRedis, "apt-get install -y redis-server", nil, "redis-server")["redis-server"]
	servers.Programs(t, "cron", "apt-get install -y cron", nil, "crontab")
	servers.Require(t, "namespaces", root())
	source := tracked(t)
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"stub-bin/sudo":    "#!/bin/sh\nexec \"$@\"\n",
		"stub-bin/apt-get": "#!/bin/sh\n[ \"$*\" = 'install -y redis-server' ] || exit 100\nexec " + redis + " --bind 127.0.0.1 --port 6379 --dir " + dir + " --save '' --daemonize yes --pidfile " + dir + "/pid\n",
		"tabs/root":        "5 4 * * * important-old-job\n",
		"bin/.none":        "", "share/.none": "", "run/.none": "",
		"blocks": install.text + "\nwhile ! redis-cli ping >/dev/null 2>&1; do sleep 0.05; done\necho == tried\n" + after(t, "export UNDERLEASE_BACKEND=redis:").text +
			"\necho == crontab\n" + after(t, "} | crontab -").text + "\ncrontab -l\n",
	})
	const enter = `set -e
mount --bind "$1/bin" /usr/local/bin
mount --bind "$1/share" /usr/local/share
mount --bind "$1/tabs" /var/spool/cron/crontabs
ip link set lo up
cd "$2"
PATH=$1/stub-bin:/usr/local/bin:$3 sh -e "$1/blocks"
`
	goDir := filepath.Dir(goProgram(t))
	c := exec.Command("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "--propagation", "private", "sh", "-c", enter, "sh", dir, source,
		goDir+":/usr/bin:/bin:/usr/sbin:/sbin")
	c.Env = append(inherited(), "GOPROXY=off")
	b, err := c.CombinedOutput()
	out := string(b)
	if err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	_, tried, _ := strings.Cut(out, "== tried\n")
	tried, tab, _ := strings.Cut(tried, "== crontab\n")
	want := regexp.MustCompile(`\Aunderlease: busy: "nightly-backup" is held by \S+ \(pid \d+\) since [\d:]+, .* left\nit ended with 75\nLEASE +SLOT.*\nnightly-backup +0 +held .*\n\z`)
	if !want.MatchString(tried) {
		t.Errorf("got\n%s\nwant %v", tried, want)
	}
	if !strings.HasPrefix(tab, "5 4 * * * important-old-job\n") {
		t.Errorf("got the crontab\n%s\nwant the line first that was there", tab)
	}
	line := regexp.MustCompile(`(?m)^10 3 \* \* \* +(underlease run .*)$`).FindStringSubmatch(tab)
	if line == nil || !strings.Contains(tab, "\nUNDERLEASE_BACKEND=") && !strings.HasPrefix(tab, "UNDERLEASE_BACKEND=") {
		t.Fatalf("got the crontab\n%s\nwant the lines of the page", tab)
	}
}

// inherited is the environment of the test, without what the tests themselves are told.
func inherited() []string {
	return slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "UNDERLEASE_") })
}

func goProgram(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func runBuild(t *testing.T, b block) {
	c := exec.Command("sh", "-e", "-c", b.text)
	c.Dir, c.Env = tracked(t), append(inherited(), "HOME="+t.TempDir(), "UNDERLEASE_BACKEND=file://"+t.TempDir()+"/store", "GOCACHE="+goEnv(t, "GOCACHE"), "GOMODCACHE="+goEnv(t, "GOMODCACHE"))
	if out, err := c.CombinedOutput(); err != nil || string(out) != "hello\n" {
		t.Errorf("got %v and %q, want hello", err, out)
	}
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// runMakeTest looks at what it would do: this is one of the tests.
func runMakeTest(t *testing.T, b block) {
	out, err := exec.Command("make", append([]string{"-n", "-C", ".."}, strings.Fields(strings.TrimPrefix(b.text, "make"))...)...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "go test") {
		t.Errorf("got %v and %s, want tests", err, out)
	}
}

func runGates(t *testing.T, b block) {
	dir := stage(t, map[string]string{
		"bin/migrate.sh": "#!/bin/sh\necho \"$UNDERLEASE_NAME\" >> ran\n",
		"bin/psql":       "#!/bin/sh\nif grep -q orders ran; then echo t; else echo f; fi\n",
	})
	if err := os.Symlink("bin/migrate.sh", dir+"/migrate.sh"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if out, err := script(dir, "set -e\n"+b.text).CombinedOutput(); err != nil || !strings.Contains(string(out), "schema-v3") {
			t.Fatalf("got %v and %s", err, out)
		}
	}
	if got := read(t, dir+"/ran"); got != "schema-v3\norders-v3\n" {
		t.Errorf("got the migrations %q, want each once", got)
	}
}

func runSettings(t *testing.T, b block) {
	dir := stage(t, map[string]string{"settings.yaml": b.text})
	out, err := script(dir, "underlease config --config settings.yaml nightly-backup").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{`(?m)^max-run +2h`, `(?m)^min-hold +30s`, `(?m)^busy-exit +0 `} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("got %s, want %s", out, want)
		}
	}
}

// runList makes the three leases that the page shows, and compares what is printed but for hosts, numbers and times.
func runList(t *testing.T, b block) {
	dir := stage(t, nil)
	backend := "file://" + dir + "/store"
	env := "UNDERLEASE_BACKEND=" + backend
	for line, want := range map[string]int{"underlease run weekly -- sh -c 'sleep 0.1; exit 3'": 3, "underlease run nightly-backup -- sleep 0.1": 0, "underlease run --min-hold 1m reindex -- sleep 0.1": 0} {
		c := script(dir, line, env)
		if out, err := c.CombinedOutput(); code(c) != want {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	defer holder(t, backend, "nightly-backup")()
	shape := func(text string) string {
		text = regexp.MustCompile(`\d+m\d+s|[\d.]+m?s|\d+m\b`).ReplaceAllString(text, "D")
		text = regexp.MustCompile(`\S+ \(pid \d+\)`).ReplaceAllString(text, "HOST")
		text = regexp.MustCompile(`\d\d:\d\d:\d\d`).ReplaceAllString(text, "TIME")
		text = regexp.MustCompile(`\d{13}`).ReplaceAllString(text, "TERM")
		return regexp.MustCompile(` +`).ReplaceAllString(text, " ")
	}
	ran := 0
	parts := regexp.MustCompile(`(?m)^\$ `).Split(b.text, -1)
	for _, part := range parts[1:] {
		line, want, _ := strings.Cut(part, "\n")
		out, err := script(dir, line, env).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", line, err, out)
		}
		if want = strings.TrimSpace(want); want != "" {
			ran++
			if shape(strings.TrimSpace(string(out))) != shape(want) {
				t.Errorf("%s: got\n%s\nwant the page's\n%s", line, shape(string(out)), shape(want))
			}
		}
	}
	if ran == 0 {
		t.Error("nothing was compared")
	}
}

// runRights gives the rights of the page, and runs with them and no others.
func runRights(t *testing.T, b block) {
	etcd := servers.StartEtcd(t, 1, servers.EtcdOptions{Password: "roots"}).Nodes[0].Addr()
	consul := servers.StartConsul(t, 1, servers.ConsulOptions{Token: "4c1c29b7-8b3f-4d0c-9b35-6b8b5b7c6a01"}).Nodes[0].Addr()
	dir := stage(t, nil)
	for name, path := range map[string]string{"etcdctl": servers.Etcdctl(t), "consul": servers.ConsulProgram(t)} {
		if err := os.Symlink(path, dir+"/bin/"+name); err != nil {
			t.Fatal(err)
		}
	}
	more := `
etcdctl user add job:jobs && etcdctl user grant-role job lease
consul acl token create -policy-name=lease -secret=9a1f6f4e-5a53-4dc7-8b0c-3e6f0a1d2b02
`
	operator := []string{"ETCDCTL_ENDPOINTS=" + etcd, "ETCDCTL_USER=root:roots", "CONSUL_HTTP_ADDR=" + consul, "CONSUL_HTTP_TOKEN=4c1c29b7-8b3f-4d0c-9b35-6b8b5b7c6a01"}
	if out, err := script(dir, "set -e\n"+b.text+more, operator...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, env := range [][]string{
		{"UNDERLEASE_BACKEND=etcd://job:jobs@" + etcd},
		{"UNDERLEASE_BACKEND=consul://" + consul, "CONSUL_HTTP_TOKEN=9a1f6f4e-5a53-4dc7-8b0c-3e6f0a1d2b02"},
	} {
		for _, line := range []string{"underlease run --once-per 1d nightly -- true", "underlease gate schema-v3 -- true", "underlease list"} {
			if out, err := script(dir, line, env...).CombinedOutput(); err != nil {
				t.Errorf("%s, %s: %v: %s", env[0], line, err, out)
			}
		}
	}
}

// runRedisRights makes the user of the page, and runs as that one.
func runRedisRights(t *testing.T, b block) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	redis.Do(strings.Fields(replaced(t, b.text, "PASSWORD", "its-password"))...)
	dir := stage(t, nil)
	for _, line := range []string{"underlease run --once-per 1d nightly -- true", "underlease gate schema-v3 -- true", "underlease list"} {
		if out, err := script(dir, line, "UNDERLEASE_BACKEND=redis://lease:its-password@"+redis.Addr()).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", line, err, out)
		}
	}
}

// runSchema makes the tables as the page says, gives the rights of the page, and runs its two jobs with them.
func runSchema(t *testing.T, b block) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	servers.Programs(t, "postgres", "apt-get install -y postgresql", nil, "psql")
	p.Do("CREATE ROLE runs LOGIN")
	p.Do("CREATE ROLE jobs LOGIN")
	p.Do("CREATE TABLE accounts (n int); GRANT ALL ON accounts TO jobs; INSERT INTO accounts VALUES (1);")
	url := func(role string) string { return fmt.Sprintf("postgres://%s@%s/%s", role, p.Addr(), "lease") }
	dir := stage(t, map[string]string{"v3.sql": "CREATE TEMPORARY TABLE v3 (n int); UPDATE accounts SET n = n + 100;\n"})
	line := replaced(t, b.text, "postgres://host/db", url("postgres")) // for both programs
	line = replaced(t, line, "psql ", "psql -X -q -v ON_ERROR_STOP=1 ")
	if out, err := script(dir, line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
	for grant := range strings.Lines(after(t, "GRANT SELECT").text) {
		if !strings.Contains(grant, "-- MySQL") {
			p.Do(grant)
		}
	}
	job := replaced(t, after(t, "SELECT underlease_guard").text, "UPDATE accounts SET ...;", "UPDATE accounts SET n = n + 1;")
	write(t, dir, map[string]string{
		"job.sql":        job,
		"bin/job":        "#!/bin/sh\npsql -X -q -v ON_ERROR_STOP=1 -v lease=\"$UNDERLEASE_NAME\" -v term=\"${OLD:-$UNDERLEASE_TERM}\" -f job.sql " + url("jobs") + "\n",
		"bin/migrate.sh": "#!/bin/sh\n" + replaced(t, after(t, "SELECT underlease_mark").text, "postgres://db/app", url("jobs")),
	})
	env := "UNDERLEASE_BACKEND=" + url("runs")
	run := func(want int, line string, env ...string) {
		t.Helper()
		c := script(dir, line, env...)
		if out, _ := c.CombinedOutput(); code(c) != want {
			t.Errorf("%s: got %d and %s, want %d", line, code(c), out, want)
		}
	}
	run(0, "underlease run nightly -- job", env)
	run(3, "underlease run nightly -- job", env, "OLD=1") // an older term is refused: psql ends with 3
	run(0, "underlease gate --wait 5m schema-v3 -- migrate.sh", env)
	run(0, "underlease gate --wait 5m schema-v3 -- false", env)
	if got := strings.TrimSpace(p.Do("SELECT n FROM accounts")); got != "102" {
		t.Errorf("got %s, want 102: the job once, the migration once", got)
	}
}

// The rows of the comparison are what its script prints, for whichever tools are here.
func TestTheTableOfWrappersIsWhatItsScriptPrints(t *testing.T) {
	t.Parallel()
	servers.Programs(t, "flock", "apt-get install -y util-linux", nil, "flock")
	c := exec.Command("sh", "../proof/compare/wrappers.sh", underlease)
	c.Env = environ()
	var absent words
	c.Stderr = &absent
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &absent)
	}
	t.Logf("%s", &absent)
	page := read(t, "../README.md")
	rows := 0
	for row := range strings.Lines(string(out)) {
		if rows++; !strings.Contains(page, row) {
			t.Errorf("got the row\n%swhich README.md does not have", row)
		}
	}
	if want := 5; rows < want { // the head is two
		t.Errorf("got %d rows, want at least %d", rows, want)
	}
}

// The picture shows what the program prints, but for hosts, numbers and times.
func TestThePictureIsWhatTheProgramPrints(t *testing.T) {
	c := exec.Command("sh", "demo/record", underlease)
	c.Env = environ()
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	shape := func(text string) string {
		for _, r := range [][2]string{
			{`by \S+ \(pid \d+\)`, "by HOST"},
			{`pids \[\d+\]`, "pids"},
			{`\d\d:\d\d:\d\d`, "TIME"},
			{`\d{13}`, "TERM"},
			{`(in|after) [\d.]+m?s`, "$1 D"},
			{`(width|height)="\d+"|viewBox="[^"]*"`, ""},
		} {
			text = regexp.MustCompile(r[0]).ReplaceAllString(text, r[1])
		}
		return text
	}
	if got, want := shape(string(out)), shape(read(t, "demo/demo.svg")); got != want {
		t.Errorf("got\n%s\nwant the picture that is there:\n%s\nRun sh packaging/demo/record bin/underlease > packaging/demo/demo.svg", got, want)
	}
}

// pageRunners are those of the pages below packaging.
var pageRunners = []runner{
	{"systemctl enable --now nightly-backup.timer", runEnableTimer},
	{"install -m 644 cron.d/example-jobs", runInstallCron},
	{"./start-instance ./server", runStartInstance},
	{"./daily photos rsync", runDaily},
}

func TestEveryShellBlockOfTheOtherPagesIsRun(t *testing.T) {
	pages, err := filepath.Glob("*/README.md")
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	for _, page := range pages {
		for _, b := range blocks(t, page) {
			if b.kind != "sh" {
				continue
			}
			i := slices.IndexFunc(pageRunners, func(r runner) bool { return strings.Contains(b.text, r.words) })
			if i < 0 {
				t.Errorf("%s:%d: nothing runs this block:\n%s", page, b.line, b.text)
				continue
			}
			ran++
			t.Run(fmt.Sprintf("%s line %d", page, b.line), func(t *testing.T) { pageRunners[i].run(t, b) })
		}
	}
	if ran != len(pageRunners) {
		t.Errorf("got %d blocks, want %d", ran, len(pageRunners))
	}
}

// runEnableTimer copies the files as the page says, on a host with a systemd that does not have them.
func runEnableTimer(t *testing.T, b block) {
	h := boot(t, "", nil)
	if out, err := h.try("sh", "-c", "rm -r /etc/systemd/system/nightly-backup.* /etc/underlease && systemctl daemon-reload"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	from, err := filepath.Abs("systemd")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := h.try("sh", "-e", "-c", "cd '"+from+"'\n"+b.text); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	h.becomes("nightly-backup.timer", "ActiveState=active UnitFileState=enabled")
	if out, err := h.try("stat", "-c", "%a %U", "/etc/underlease", "/etc/underlease/backend"); err != nil || out != "700 root\n600 root\n" {
		t.Errorf("got %v and %q, want files of root alone", err, out)
	}
}

func runInstallCron(t *testing.T, b block) {
	dir := t.TempDir()
	line := "cd cron && " + replaced(t, b.text, "/etc/cron.d/", dir+"/")
	if out, err := exec.Command("sh", "-e", "-c", line).CombinedOutput(); err != nil || read(t, dir+"/example-jobs") != read(t, "cron/cron.d/example-jobs") {
		t.Errorf("got %v and %s", err, out)
	}
}

func runStartInstance(t *testing.T, b block) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	dir := stage(t, map[string]string{"bin/migrate": "#!/bin/sh\necho m >> ran\n", "bin/server": "#!/bin/sh\necho \"$*\" >> ran\n"})
	for range 2 {
		line := "set -e\ncp bin/* .\n" + replaced(t, b.text, "redis://cache.internal:6379", "redis://"+redis.Addr())
		if out, err := script(dir, line).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	if got, want := read(t, dir+"/ran"), "m\n--port 8080\n--port 8080\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func runDaily(t *testing.T, b block) {
	dir := stage(t, map[string]string{"bin/rsync": "#!/bin/sh\necho \"$*\" >> ran\n"})
	for range 2 {
		if out, err := script(dir, "set -e\ncp bin/daily .\n"+b.text).CombinedOutput(); err != nil || len(out) > 0 {
			t.Fatalf("%v: %s", err, out)
		}
	}
	if got, want := read(t, dir+"/ran"), "-a Pictures/ nas:Pictures/\n"; got != want {
		t.Errorf("got %q, want one run: %q", got, want)
	}
}
