//go:build linux

package proof

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
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

// cronTree is the size of what the job packs.
const cronTree = 100 << 20

// crontab is what a user writes: two lines for one minute, as two hosts or a late run make them; and two that are to be quiet. The shell
// notes the exit codes, which cron itself does not show.
const crontab = `SHELL=/usr/local/bin/noting-sh
PATH=/usr/local/bin:/usr/bin:/bin
UNDERLEASE_BACKEND=file://%[1]s/store
* * * * * root underlease run nightly -- backup.sh
* * * * * root underlease run nightly -- backup.sh
* * * * * root underlease run -q --busy-exit 0 quiet -- quiet.sh
* * * * * root underlease run -q --busy-exit 0 quiet -- quiet.sh
`

var cronFiles = map[string]string{
	"bin/noting-sh": `#!/bin/sh
/bin/sh "$@"
code=$?
echo "$code $2" >> %[1]s/codes
exit $code
`,
	"bin/backup.sh": `#!/bin/sh
echo "$UNDERLEASE_NAME" >> %[1]s/runs
exec tar -czf %[1]s/archive.tgz -C %[1]s/tree .
`,
	"bin/quiet.sh": `#!/bin/sh
echo "$UNDERLEASE_NAME" >> %[1]s/runs
exec sleep 8
`,
	// Every mail in a file of its own, which has its name only when it is whole.
	"sbin/sendmail": `#!/bin/sh
cat > %[1]s/mails/part.$$
mv %[1]s/mails/part.$$ %[1]s/mails/mail.$$
`,
	"cron.d/proof":    crontab,
	"crontab":         "",
	"crontabs/.empty": "",
	"run/.empty":      "",
	"mails/.empty":    "",
}

// mounts hide the system's crontabs, and whom its cron would mail, from ours. It is one exec in the end, so that the
// process that was started is cron.
const mounts = `set -e
mount --bind "$1/cron.d" /etc/cron.d
[ ! -e /etc/crontab ] || mount --bind "$1/crontab" /etc/crontab
mount --bind "$1/crontabs" /var/spool/cron/crontabs
mount --bind "$1/run" /run
mount --bind "$1/bin" /usr/local/bin
mount --bind "$1/sbin" /usr/sbin
exec /usr/sbin/cron -f -L 0
`

// cronable says what a private cron needs and this machine has not.
func cronable() (cron string, missing error) {
	if os.Geteuid() != 0 {
		return "", errors.New("not root: there can be no mounts of our own")
	}
	for _, path := range []string{"/usr/sbin/cron", "/etc/cron.d", "/var/spool/cron/crontabs", "/usr/local/bin"} {
		if _, err := os.Stat(path); err != nil {
			return "", err
		}
	}
	if out, err := exec.Command("unshare", "--mount", "mount", "--bind", "/usr/local/bin", "/usr/local/bin").CombinedOutput(); err != nil {
		return "", fmt.Errorf("no mount namespace: %w: %s", err, bytes.TrimSpace(out))
	}
	return "/usr/sbin/cron", nil
}

// A real cron, two lines for one minute: one runs, one is skipped, and the skipped one is mailed unless it is to be quiet.
func TestTwoCrontabLines(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED in a short run: it waits for the next minute")
	}
	cron, missing := cronable()
	servers.Require(t, "cron", missing)
	nothingLeft(t, patience)
	dir := t.TempDir()
	for name, text := range cronFiles {
		path := filepath.Join(dir, name)
		if strings.Contains(text, "%") {
			text = fmt.Sprintf(text, dir)
		}
		mode := fs.FileMode(0o644)
		if strings.HasSuffix(filepath.Dir(path), "bin") {
			mode = 0o755
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	copyFile(t, cron, filepath.Join(dir, "sbin/cron"))
	copyFile(t, bin.underlease, filepath.Join(dir, "bin/underlease"))
	tree := plant(t, filepath.Join(dir, "tree"))

	c := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", mounts, "sh", dir)
	var words bytes.Buffer
	c.Stdout, c.Stderr = &words, &words
	c.WaitDelay = patience
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var once bool
	end := func() {
		if !once {
			once = true
			c.Process.Signal(syscall.SIGTERM)
			c.Wait()
		}
	}
	defer end()
	lines := func(name string) []string {
		b, _ := os.ReadFile(filepath.Join(dir, name))
		return strings.FieldsFunc(string(b), func(r rune) bool { return r == '\n' })
	}
	if !within(90*time.Second, func() bool { return len(lines("runs")) >= 2 }) {
		t.Fatalf("got the runs %q, want one of each pair within a minute; cron said %q", lines("runs"), &words)
	}
	if !within(45*time.Second, func() bool { return len(lines("codes")) >= 4 }) {
		t.Fatalf("got the exit codes %q, want four", lines("codes"))
	}
	// cron mails when the command has ended; then its child ends.
	left := []string{}
	if !within(patience, func() bool {
		left = left[:0]
		for _, pid := range descendants(c.Process.Pid) {
			left = append(left, fmt.Sprintf("%d %s", pid, name(pid)))
		}
		return len(left) == 0
	}) {
		t.Errorf("got the processes %q under cron, want none", left)
	}
	end()
	nothingLeft(t, patience)

	runs, codes := lines("runs"), lines("codes")
	slices.Sort(runs)
	slices.Sort(codes)
	if want := []string{"nightly", "quiet"}; !slices.Equal(runs, want) {
		t.Errorf("got the runs %q, want %q", runs, want)
	}
	wantCodes := []string{
		"0 underlease run -q --busy-exit 0 quiet -- quiet.sh", "0 underlease run -q --busy-exit 0 quiet -- quiet.sh",
		"0 underlease run nightly -- backup.sh", "75 underlease run nightly -- backup.sh",
	}
	if !slices.Equal(codes, wantCodes) {
		t.Errorf("got the exit codes\n%s\nwant\n%s", strings.Join(codes, "\n"), strings.Join(wantCodes, "\n"))
	}
	mails, err := filepath.Glob(filepath.Join(dir, "mails/mail.*"))
	if err != nil || len(mails) != 1 {
		t.Fatalf("got %d mails (%v), want one: of the skipped run that is not quiet", len(mails), err)
	}
	mail, err := os.ReadFile(mails[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the mail:\n%s", mail)
	head, body, _ := strings.Cut(string(mail), "\n\n")
	busy := regexp.MustCompile(`\Aunderlease: busy: "nightly" is held by \S+ \(pid \d+\) since \d\d:\d\d:\d\d\n\z`)
	if !busy.MatchString(body) || !strings.Contains(head, "underlease run nightly -- backup.sh") {
		t.Errorf("got the mail %q, want one about the line of nightly with the busy line alone: %v", mail, busy)
	}
	if got := unpack(t, filepath.Join(dir, "archive.tgz")); !equal(t, got, tree) {
		t.Errorf("got an archive of %d files, want the %d of the tree", len(got), len(tree))
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	servers.WriteProgram(t, to, b)
}

type sums map[string][sha256.Size]byte

// plant makes a tree of files that cannot be compressed, and returns their sums.
func plant(t *testing.T, dir string) sums {
	t.Helper()
	const files = 200
	all := sums{}
	random := rand.NewChaCha8([32]byte{1})
	for i := range files {
		name := fmt.Sprintf("d%d/f%d", i%10, i)
		b := make([]byte, cronTree/files)
		random.Read(b)
		all[name] = sha256.Sum256(b)
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// unpack returns the sums of what is in an archive.
func unpack(t *testing.T, path string) sums {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all := sums{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("the archive: %v", err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, r); err != nil {
			t.Fatalf("the archive: %s: %v", h.Name, err)
		}
		name := strings.TrimPrefix(h.Name, "./")
		if _, twice := all[name]; twice {
			t.Errorf("%s is in the archive twice", name)
		}
		all[name] = [sha256.Size]byte(sum.Sum(nil))
	}
}

func equal(t *testing.T, got, want sums) bool {
	t.Helper()
	for name := range want {
		if got[name] != want[name] {
			t.Errorf("the archive does not have %s as it is", name)
			return false
		}
	}
	return len(got) == len(want)
}
