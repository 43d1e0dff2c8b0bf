//go:build linux

package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/underlease/underlease/internal/needed"
)

// packagesVar names the directory with what .ci/run release has made: dist of goreleaser.
const packagesVar = "UNDERLEASE_TEST_PACKAGES"

// packaged returns the paths of the files of a release that match a pattern, or ends the test where nothing was built.
func packaged(t *testing.T, pattern string) []string {
	t.Helper()
	dir := os.Getenv(packagesVar)
	var missing error
	if dir == "" {
		missing = errors.New(packagesVar + " names no directory: .ci/run release makes one")
	}
	needed.Require(t, "packages", missing)
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) == 0 {
		t.Fatalf("got %d files %s and %v, want some", len(found), pattern, err)
	}
	return found
}

// inPackages are the files that every package has, less the two whose place is another in each.
func inPackages(t *testing.T, kind string) []string {
	t.Helper()
	want := []string{
		"/usr/bin/underlease",
		"/usr/share/bash-completion/completions/underlease",
		"/usr/share/fish/vendor_completions.d/underlease.fish",
		"/usr/share/doc/underlease/copyright",
		"/usr/share/doc/underlease/THIRD-PARTY-LICENCES",
		"/usr/share/doc/underlease/README.md",
		"/usr/share/doc/underlease/CHANGELOG.md",
		"/usr/share/doc/underlease/examples/underlease.yaml",
		"/usr/share/doc/underlease/examples/systemd/nightly-backup.service",
		"/usr/share/doc/underlease/examples/cron/crontab",
	}
	if kind != "apk" { // Alpine has no systemd
		want = append(want, "/usr/lib/systemd/system/underlease@.service", "/usr/lib/systemd/system/underlease@.timer")
	}
	pages, err := filepath.Glob("packaging/man/*.[0-9]")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		want = append(want, "/usr/share/man/man"+page[len(page)-1:]+"/"+filepath.Base(page)+".gz")
	}
	return want
}

func TestEveryPackageHasEveryFile(t *testing.T) {
	t.Parallel()
	for kind, zsh := range map[string]string{
		"deb": "/usr/share/zsh/vendor-completions/_underlease",
		"rpm": "/usr/share/zsh/site-functions/_underlease",
		"apk": "/usr/share/zsh/site-functions/_underlease",
	} {
		files := packaged(t, "*."+kind)
		if len(files) != 3 {
			t.Errorf("got the packages %q, want one for each of amd64, arm64 and armv7", files)
		}
		for _, file := range files {
			t.Run(filepath.Base(file), func(t *testing.T) {
				list := map[string]func(*testing.T, string) map[string]string{"deb": debFiles, "rpm": rpmFiles, "apk": apkFiles}[kind](t, file)
				for _, want := range append(inPackages(t, kind), zsh) {
					mode, ok := list[want]
					wantMode := "-rw-r--r--"
					if want == "/usr/bin/underlease" {
						wantMode = "-rwxr-xr-x"
					}
					if !ok || mode != wantMode+" root root" {
						t.Errorf("%s: got %q, want %q", want, mode, wantMode+" root root")
					}
				}
				for path := range list {
					if strings.HasPrefix(path, "/etc/") || strings.HasPrefix(path, "/var/") {
						t.Errorf("got %s: what an administrator or a run makes is not the package's", path)
					}
				}
			})
		}
	}
}

// fileLine is a line of ls -l, as dpkg-deb and rpm print it.
var fileLine = regexp.MustCompile(`(?m)^(-\S{9}) +(?:\d+ +)?(\S+?)(?:/| +)(\S+) .*? \.?(/\S+)$`)

func listed(t *testing.T, c *exec.Cmd) map[string]string {
	t.Helper()
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%q: %v", c.Args, err)
	}
	files := map[string]string{}
	for _, m := range fileLine.FindAllStringSubmatch(string(out), -1) {
		files[m[4]] = m[1] + " " + m[2] + " " + m[3]
	}
	return files
}

func debFiles(t *testing.T, file string) map[string]string {
	needed.Require(t, "dpkg", program("dpkg-deb")())
	return listed(t, exec.Command("dpkg-deb", "--contents", file))
}

func rpmFiles(t *testing.T, file string) map[string]string {
	needed.Require(t, "rpm", program("rpm")())
	out, err := exec.Command("rpm", "-qp", "--nosignature", "--queryformat", "%{NAME}|%{LICENSE}|%{BUILDHOST}|%{POSTUN}", file).Output()
	if got := string(out); err != nil || !strings.HasPrefix(got, "underlease|Apache-2.0|localhost|") || !strings.Contains(got, "/var/lib/underlease is kept") {
		t.Errorf("got the header %q and %v", out, err)
	}
	return listed(t, exec.Command("rpm", "-qp", "--nosignature", "-lv", file))
}

// apkFiles reads a package of Alpine: three packed archives in a row, without ends between them.
func apkFiles(t *testing.T, file string) map[string]string {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	unpacked, err := gzip.NewReader(bufio.NewReader(f))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(unpacked); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case h.Name == ".PKGINFO":
			info, err := io.ReadAll(r)
			if err != nil || !bytes.Contains(info, []byte("pkgname = underlease\n")) || !bytes.Contains(info, []byte("license = Apache-2.0\n")) {
				t.Errorf("got .PKGINFO %q and %v", info, err)
			}
		case h.Typeflag == tar.TypeReg && !strings.HasPrefix(h.Name, "."):
			files["/"+strings.TrimPrefix(h.Name, "/")] = h.FileInfo().Mode().String() + " " + h.Uname + " " + h.Gname
		}
	}
}

func TestEveryArchiveHasEveryFileAndEveryBinaryItsListOfModules(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("packaging/man/*.[0-9]")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"underlease", "LICENSE", "README.md", "CHANGELOG.md", "THIRD-PARTY-LICENCES", "examples/underlease.yaml", "examples/systemd/underlease@.service", "examples/cron/crontab", "completions/_underlease", "completions/underlease.bash", "completions/underlease.fish"}
	for _, page := range pages {
		want = append(want, "man/"+filepath.Base(page)+".gz")
	}
	archives := packaged(t, "*.tar.gz")
	if len(archives) != 6 {
		t.Errorf("got the archives %q, want six", archives)
	}
	for _, archive := range archives {
		out, err := exec.Command("tar", "-tzf", archive).Output()
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(archive), ".tar.gz")
		lines := strings.Fields(string(out))
		for _, w := range want {
			if !slices.Contains(lines, name+"/"+w) {
				t.Errorf("%s has no %s", filepath.Base(archive), w)
			}
		}
		text, err := os.ReadFile(filepath.Join(filepath.Dir(archive), name+".cdx.json"))
		if err != nil {
			t.Error(err)
			continue
		}
		var bom struct {
			BomFormat    string
			SerialNumber string
			Components   []struct{ Name, Version string }
		}
		if err := json.Unmarshal(text, &bom); err != nil || bom.BomFormat != "CycloneDX" || bom.SerialNumber != "" {
			t.Errorf("%s: got %v, %q and the serial number %q", name, err, bom.BomFormat, bom.SerialNumber)
		}
		if !slices.ContainsFunc(bom.Components, func(c struct{ Name, Version string }) bool {
			return c.Name == "github.com/spf13/cobra" && c.Version != ""
		}) {
			t.Errorf("%s: got %d modules, want cobra among them", name, len(bom.Components))
		}
	}
	sums, err := os.ReadFile(filepath.Join(filepath.Dir(archives[0]), "checksums.txt"))
	if err != nil || bytes.Count(sums, []byte("\n")) < len(archives)+9 {
		t.Errorf("got %v and %d sums", err, bytes.Count(sums, []byte("\n")))
	}
}

func TestTheCaskNamesEveryPage(t *testing.T) {
	t.Parallel()
	cask, err := os.ReadFile(packaged(t, "homebrew/Casks/underlease.rb")[0])
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob("packaging/man/*.[0-9]")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if want := "man/" + filepath.Base(page) + ".gz"; !bytes.Contains(cask, []byte(want)) {
			t.Errorf("the cask has no %s", want)
		}
	}
}

// inRoot is what happens to the deb, as a user would do it: each step says its name, and what it prints is looked at. It runs in a root
// of its own: this system with everything of /usr/local, and so Go, taken away, and every change kept in memory.
const inRoot = `
set -eu
step() { echo "== $1"; }
cd /
rm -rf /etc/underlease.yaml /var/lib/underlease /etc/dpkg/dpkg.cfg.d/* # images leave pages out
export HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin MANPAGER=cat MANWIDTH=80 LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
if command -v go; then exit 3; fi
step install
dpkg -i /package.deb
step run
underlease run demo -- echo hello
underlease run demo -- sh -c 'exit 7' || echo "exit code $?"
underlease list
step man
man underlease-run | grep -c .
man -w underlease underlease-gate underlease.yaml underlease-backends underlease-operating
man underlease-operating | grep EXAMPLES
step completion
bash -c '
  source /usr/share/bash-completion/bash_completion
  _completion_loader underlease || [ $? = 124 ]
  complete -p underlease
  COMP_WORDS=(underlease run --on-lo) COMP_CWORD=2 COMP_LINE="underlease run --on-lo" COMP_POINT=22 COMP_TYPE=9
  __start_underlease 2> /dev/null # compopt has nothing to act on here
  echo "completed: ${COMPREPLY[*]}"'
step units
printf '#!/bin/sh\n' > /usr/local/bin/demo
chmod 755 /usr/local/bin/demo
systemd-analyze verify /usr/lib/systemd/system/underlease@demo.service /usr/lib/systemd/system/underlease@demo.timer && echo verified
systemctl enable underlease@demo.timer
step remove
dpkg -L underlease | sort > /before
dpkg -r underlease
step left
while read -r f; do
  if [ ! -d "$f" ] && [ -e "$f" ] || [ "$f" = /usr/share/doc/underlease ] && [ -e "$f" ]; then echo "left: $f"; fi
done < /before
ls -d /var/lib/underlease
step purge
dpkg -P underlease
ls -d /var/lib/underlease
dpkg -s underlease 2>&1 | head -1
step end
`

// around makes the root of inRoot, in a mount namespace: nothing of it is left at its end.
const around = `
set -eu
root=$1/root
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$root"
mount -t tmpfs tmpfs "$root/usr/local"
mkdir "$root/usr/local/bin"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/root"
mount -t proc proc "$root/proc"
mount -t devtmpfs devtmpfs "$root/dev" || mount --rbind /dev "$root/dev"
cat "$2" > "$root/package.deb"
exec env -i "$(PATH=$PATH:/usr/sbin:/sbin; command -v chroot)" "$root" /bin/sh -c "$3"
`

func TestTheDebIsInstalledUsedAndRemovedWithoutGo(t *testing.T) {
	t.Parallel()
	needed.Require(t, "root", needs["root"]())
	needed.Require(t, "unshare", program("unshare")())
	needed.Require(t, "man", program("man")())
	var missing error
	if _, err := os.Stat("/usr/share/bash-completion/bash_completion"); err != nil {
		missing = err
	}
	needed.Require(t, "bash-completion", missing)
	needed.Require(t, "dpkg", program("dpkg")())
	needed.Require(t, "systemd-analyze", program("systemd-analyze")())
	var deb string
	for _, file := range packaged(t, "*.deb") {
		if strings.HasSuffix(file, "_"+runtime.GOARCH+".deb") {
			deb = file
		}
	}
	if deb == "" {
		t.Fatalf("there is no deb for %s", runtime.GOARCH)
	}
	c := exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-c", around, "sh", t.TempDir(), deb, inRoot)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("got %v\n%s", err, out)
	}
	steps := map[string]string{}
	now := ""
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(line, "== "); ok {
			now = strings.TrimSpace(name)
			continue
		}
		steps[now] += line
	}
	const kept = "underlease: /var/lib/underlease is kept: "
	for step, want := range map[string]string{
		"run":        `^hello\nexit code 7\nLEASE .*\ndemo .* failed \(7\)`,
		"man":        `^\d{3,}\n/usr/share/man/man1/underlease\.1\.gz\n(/usr/share/man/man\d/underlease.*\n){4}EXAMPLES\n$`,
		"completion": `__start_underlease underlease\ncompleted: --on-lost`,
		"units":      `^verified\nCreated symlink .*underlease@demo\.timer`,
		"remove":     regexp.QuoteMeta(kept) + `.*\n.*underlease: /etc/systemd/system/timers\.target\.wants/underlease@demo\.timer is kept`,
		"left":       `^/var/lib/underlease\n$`,
		"purge":      regexp.QuoteMeta("/var/lib/underlease") + `\n.*not installed`,
	} {
		if !regexp.MustCompile(want).MatchString(steps[step]) {
			t.Errorf("step %s: got %q, want %s", step, steps[step], want)
		}
	}
	if _, ok := steps["end"]; !ok && !strings.Contains(string(out), "== end\n") {
		t.Errorf("it did not come to its end:\n%s", out)
	}
}
