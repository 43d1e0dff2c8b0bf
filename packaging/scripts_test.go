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
	"testing"

	"github.com/underlease/underlease/backends/backendtest/servers"
)

// stage is a directory with the scripts in bin, beside programs that a test gives.
func stage(t *testing.T, files map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	paths, err := filepath.Glob("scripts/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if filepath.Ext(path) == "" {
			write(t, dir, map[string]string{"bin/" + filepath.Base(path): read(t, path)})
		}
	}
	write(t, dir, files)
	return dir
}

// script prepares a command line in a directory with its bin in PATH and, unless env has another, a store of its own.
func script(dir, line string, env ...string) *exec.Cmd {
	c := exec.Command("sh", "-c", line)
	c.Dir = dir
	c.Env = append([]string{"PATH=" + dir + "/bin:" + filepath.Dir(underlease) + ":/usr/bin:/bin", "HOME=" + dir}, env...)
	if !slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, "UNDERLEASE_BACKEND") }) {
		c.Env = append(c.Env, "UNDERLEASE_BACKEND=file://"+dir+"/store")
	}
	return c
}

func TestTheScriptsAreWhatShTakes(t *testing.T) {
	for _, name := range []string{"start-instance", "start-instance-checked", "schema-applied", "daily"} {
		path := filepath.Join("scripts", name)
		if out, err := exec.Command("sh", "-n", path).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("sh -n %s: %v: %s", name, err, out)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm()&0o111 != 0o111 {
			t.Errorf("%s: got %v, want a file that can be executed", name, err)
		}
	}
}

// together runs so many of a command line at once and returns their ends, sorted, as "code last line of stderr".
func together(t *testing.T, n int, dir, line string, env ...string) (ends []string) {
	t.Helper()
	all := make([]*exec.Cmd, n)
	errs := make([]bytes.Buffer, n)
	for i := range all {
		all[i] = script(dir, line, env...)
		all[i].Stderr = &errs[i]
		if err := all[i].Start(); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range all {
		c.Wait()
		words := strings.Split(strings.TrimSpace(errs[i].String()), "\n")
		last := regexp.MustCompile(` (by|is held by) .*| in [0-9.]+m?s`).ReplaceAllString(words[len(words)-1], "")
		ends = append(ends, fmt.Sprint(code(c), " ", last))
	}
	slices.Sort(ends)
	return ends
}

func TestThreeInstancesStartAtOnceAndOneMigrates(t *testing.T) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	backend := "UNDERLEASE_BACKEND=redis://" + redis.Addr()
	dir := stage(t, map[string]string{
		"bin/migrate": "#!/bin/sh\necho m >> migrated\nsleep 0.5\nexit $(cat fail 2>/dev/null || echo 0)\n",
		// An instance that starts before the schema is there would say so.
		"bin/server": "#!/bin/sh\n[ -s migrated ] || echo too early >> early\necho \"$*\" >> served\n",
	})
	const line = "exec start-instance server --port 8080"
	env := []string{backend, "MIGRATE=migrate"}

	want := []string{"0 underlease: already applied: \"schema-v3\"", "0 underlease: already applied: \"schema-v3\"", "0 underlease: migrated: \"schema-v3\""}
	if got := together(t, 3, dir, line, env...); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := read(t, dir+"/migrated"); got != "m\n" {
		t.Errorf("got %q, want one migration", got)
	}
	if got := read(t, dir+"/served"); got != strings.Repeat("--port 8080\n", 3) {
		t.Errorf("got %q, want three instances", got)
	}
	if _, err := os.Stat(dir + "/early"); err == nil {
		t.Error("an instance has started before the migration")
	}

	t.Log("a migration that fails starts nothing, and each instance has tried")
	write(t, dir, map[string]string{"fail": "4\n", "migrated": "", "served": ""})
	for _, got := range together(t, 3, dir, line, append(env, "SCHEMA=schema-v4")...) {
		if !strings.HasPrefix(got, "4 underlease: failed: \"schema-v4\"") {
			t.Errorf("got %q, want a failure with 4", got)
		}
	}
	if got := read(t, dir+"/served"); got != "" {
		t.Errorf("got %q, want no instance", got)
	}
	if got := read(t, dir+"/migrated"); got != "m\nm\nm\n" {
		t.Errorf("got %q, want three tries", got)
	}

	t.Log("without a store nothing starts")
	redis.Kill()
	if got := together(t, 1, dir, line, append(env, "SCHEMA=schema-v5", "WAIT=1s")...); !strings.HasPrefix(got[0], "69 ") {
		t.Errorf("got %q, want 69", got)
	}
}

func TestTheDatabaseSaysWhetherItIsMigrated(t *testing.T) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	// The database is a directory of tables; psql answers as psql does.
	dir := stage(t, map[string]string{
		"bin/psql": `#!/bin/sh
[ -d database ] || { echo 'psql: error: connection to server failed' >&2; exit 2; }
for a; do case $a in table=*) table=${a#table=} ;; esac; done
grep -q "to_regclass(:'table')" || exit 3
if [ -e "database/$table" ]; then echo t; else echo f; fi
`,
		"bin/migrate":    "#!/bin/sh\necho m >> migrated\nsleep 0.3\ntouch database/orders_v3\n",
		"bin/server":     "#!/bin/sh\necho s >> served\n",
		"database/.none": "",
	})
	env := []string{"UNDERLEASE_BACKEND=redis://" + redis.Addr(), "MIGRATE=migrate"}
	const line = "exec start-instance-checked server"
	for _, got := range together(t, 3, dir, line, env...) {
		if !strings.HasPrefix(got, "0 ") {
			t.Errorf("got %q, want 0", got)
		}
	}
	if got := read(t, dir+"/migrated"); got != "m\n" {
		t.Errorf("got %q, want one migration", got)
	}

	t.Log("restored from a backup: it is migrated again")
	if err := os.Remove(dir + "/database/orders_v3"); err != nil {
		t.Fatal(err)
	}
	if got := together(t, 1, dir, line, env...); !strings.HasPrefix(got[0], "0 underlease: migrated") {
		t.Errorf("got %q, want it migrated", got)
	}

	t.Log("a database that does not answer is not one without the table")
	if err := os.Rename(dir+"/database", dir+"/gone"); err != nil {
		t.Fatal(err)
	}
	if got := together(t, 1, dir, line, env...); !strings.HasPrefix(got[0], "69 ") {
		t.Errorf("got %q, want 69", got)
	}
	if got := read(t, dir+"/migrated"); got != "m\nm\n" {
		t.Errorf("got %q, want no further migration", got)
	}
	if got := together(t, 1, dir, line, append(env, "TABLE=x; touch pwned")...); !strings.HasPrefix(got[0], "64 ") {
		t.Errorf("got %q of a table with a command in it, want 64", got)
	}
}

// The query is one that a real server takes, and its answers are told apart.
func TestSchemaAppliedAsksARealDatabase(t *testing.T) {
	p := servers.StartPostgres(t, servers.PostgresOptions{})
	host, port, _ := strings.Cut(p.Addr(), ":")
	dir := stage(t, nil)
	env := []string{"PGHOST=" + host, "PGPORT=" + port, "PGUSER=lease", "PGDATABASE=lease"}
	p.Do("CREATE TABLE orders_v3 (n int)")
	for line, want := range map[string]int{
		"schema-applied orders_v3":                 0,
		"schema-applied public.orders_v3":          0,
		"schema-applied orders_v4":                 1,
		"schema-applied \"o'; DROP TABLE x\"":      2,
		"schema-applied":                           2,
		"PGPORT=1 schema-applied orders_v3":        2,
		"PGDATABASE=none schema-applied orders_v3": 2,
	} {
		c := script(dir, line, env...)
		if out, _ := c.CombinedOutput(); code(c) != want {
			t.Errorf("%s: got %d and %s, want %d", line, code(c), out, want)
		}
	}
}

func TestOnceADay(t *testing.T) {
	dir := stage(t, map[string]string{"bin/job": "#!/bin/sh\necho \"$*\" >> ran\nexit $(cat fail 2>/dev/null || echo 0)\n"})
	run := func(env ...string) int {
		t.Helper()
		c := script(dir, "exec daily photos job a 'b c'", env...)
		out, err := c.CombinedOutput()
		if c.ProcessState == nil {
			t.Fatal(err)
		}
		if len(out) > 0 {
			t.Errorf("got the words %q, want none", out)
		}
		return code(c)
	}
	write(t, dir, map[string]string{"fail": "5\n"})
	if got := run(); got != 5 {
		t.Errorf("got %d, want the job's 5", got)
	}
	write(t, dir, map[string]string{"fail": "0\n"})
	for range 3 {
		if got := run(); got != 0 {
			t.Errorf("got %d, want 0", got)
		}
	}
	if got := read(t, dir+"/ran"); got != "a b c\na b c\n" {
		t.Errorf("got the runs %q, want the failure and one success", got)
	}
	if got := run("EVERY=1ms"); got != 0 || read(t, dir+"/ran") != "a b c\na b c\na b c\n" {
		t.Errorf("got %d and %q, want a third run after its interval", got, read(t, dir+"/ran"))
	}
}

// The lines of pipelines are run as their runners do: by sh, one after another, with the variables of the file.
func TestTheLinesOfPipelines(t *testing.T) {
	redis := servers.StartRedis(t, servers.RedisOptions{})
	backend := "redis://" + redis.Addr()
	for file, c := range map[string]struct {
		line *regexp.Regexp
		n    int
		env  []string
	}{
		"gitlab-ci.yml":       {regexp.MustCompile(`(?m)^    - (.*)$`), 2, []string{"SCHEMA_VERSION=v3", "UNDERLEASE_BACKEND=" + backend}},
		"github-workflow.yml": {regexp.MustCompile(`(?m)^      - run: (.*)$`), 2, []string{"SCHEMA_VERSION=v3", "UNDERLEASE_BACKEND=" + backend}},
		"ansible.yml":         {regexp.MustCompile(`(?m)^        cmd: (.*)$`), 2, nil},
	} {
		t.Run(file, func(t *testing.T) {
			redis.Do("FLUSHALL")
			dir := stage(t, nil)
			write(t, dir, map[string]string{"backend": backend + "\n"})
			for _, name := range []string{"migrate", "deploy", "restart"} {
				write(t, dir, map[string]string{"bin/" + name: "#!/bin/sh\necho " + name + " >> ran\n"})
				if err := os.Symlink("bin/"+name, filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			text := read(t, "scripts/"+file)
			if file == "ansible.yml" {
				c.env = []string{"UNDERLEASE_BACKEND_FILE=" + dir + "/backend"}
				if err := os.Chmod(dir+"/backend", 0o600); err != nil {
					t.Fatal(err)
				}
			}
			lines := c.line.FindAllStringSubmatch(text, -1)
			if len(lines) != c.n {
				t.Fatalf("got %d lines of a script, want %d", len(lines), c.n)
			}
			for range 2 { // two deployments
				for _, m := range lines {
					if !strings.HasPrefix(m[1], "underlease ") {
						t.Errorf("got the line %q, want one of underlease", m[1])
					}
					out, err := script(dir, m[1], c.env...).CombinedOutput()
					if err != nil {
						t.Errorf("%s: %v: %s", m[1], err, out)
					}
				}
			}
			got := strings.Fields(read(t, dir+"/ran"))
			if want := "migrate"; got[0] != want || slices.Contains(got[1:], want) || len(got) != 3 {
				t.Errorf("got %q, want one migration and two deployments", got)
			}
		})
	}
}
