package cmd

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
)

// The fields are a contract with whoever reads reports: this is the whole object, byte for byte.
func TestTheReportSaysHowARunEnded(t *testing.T) {
	w := newWorld(t)
	w.result = runner.Result{
		Outcome: runner.OutcomeFailed, ExitCode: 143, Signal: syscall.SIGTERM, Started: true,
		Grant:  backends.Grant{Namespace: "blue", Lease: "n", Handle: "secret", Slot: 1, Term: 1796040300776, Previous: backends.End{Outcome: "lost-taken"}},
		Waited: 1500 * time.Millisecond, Held: 2 * time.Second, Ran: 1999 * time.Millisecond, Renewals: 3, Released: true,
	}
	path := filepath.Join(t.TempDir(), "report.json")
	code, out, errs := w.do("run", "--report", path, "--namespace=blue", "--holder=me", "--backend=mem://u:hunter2@h", "--ttl=60s", "n", "--", "true")
	if code != 143 || out != "" || errs != "" {
		t.Fatalf("got %d, %q and %q, want 143 and silence", code, out, errs)
	}
	want := `{"version":1,"outcome":"failed","reason":"","exit_code":143,"signal":"TERM",` +
		`"lease":"n","namespace":"blue","slot":1,"term":1796040300776,"run_id":"blue/n/1796040300776","holder":"me","store":"mem://u:xxxxx@h",` +
		`"started":true,"waited_ms":1500,"held_ms":2000,"ran_ms":1999,"renewals":3,"released":true,"busy":null,"done":null,"previous":"failed"}` + "\n"
	if got := read(t, path); got != want {
		t.Errorf("got\n%s want\n%s", got, want)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("got mode %v and %v, want 0600", info.Mode(), err)
	}
	onlyFile(t, path)
}

func onlyFile(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("got %v beside the report and %v, want nothing", entries, err)
	}
}

func TestTheReportSaysWhoWasInTheWay(t *testing.T) { // C45
	w := newWorld(t)
	w.result = runner.Result{Outcome: runner.OutcomeBusy, ExitCode: runner.ExitBusy, Reason: "in the runner's words", Busy: &backends.BusyError{
		Lease: "n", Holder: "db1/4711/00c0ffee", Slot: 2, Term: 7, Since: time.Date(2026, 11, 30, 3, 0, 2, 0, time.UTC), Left: 41 * time.Second,
	}}
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, []byte(strings.Repeat("an older report ", 1000)), 0o644); err != nil {
		t.Fatal(err)
	}
	if code, _, _ := w.do("run", "-q", "--report", path, "--busy-exit=0", "n", "--", "true"); code != 0 {
		t.Errorf("got %d, want 0", code)
	}
	var got report
	if err := json.Unmarshal([]byte(read(t, path)), &got); err != nil {
		t.Fatal(err)
	}
	if b := got.Busy; b == nil || b.Holder != "db1/4711/00c0ffee" || b.Slot != 2 || b.Term != 7 || *b.LeftMs != 41000 || b.Since.Unix() != 1796007602 || b.Kept {
		t.Errorf("got busy %+v, want the holder in the way", b)
	}
	if got.Reason != `busy: "n" is held by db1 (pid 4711) since 03:00:02, 41s left` || got.ExitCode != 0 || got.Term != nil || got.Slot != nil {
		t.Errorf("got %+v, want the busy line, code 0 and no grant", got)
	}
}

func TestAReportIsWrittenOfWhatWasRefusedToo(t *testing.T) {
	for _, args := range [][]string{
		{"--ttl=soon", "--report", "PATH"}, // the flag that cannot be read comes first
		{"--report=PATH", "--nope"},
		{"--report=PATH", "--grace=40s", "--ttl=30s"},
		{"--report=PATH", "m"},
	} {
		w := newWorld(t)
		path := filepath.Join(t.TempDir(), "report.json")
		line := []string{"run"}
		for _, a := range args {
			line = append(line, strings.ReplaceAll(a, "PATH", path))
		}
		code, _, errs := w.do(append(line, "n", "--", "true")...)
		var got report
		if err := json.Unmarshal([]byte(read(t, path)), &got); err != nil {
			t.Fatal(err)
		}
		if got.Outcome != runner.OutcomeInvalid || got.ExitCode != code || !strings.HasPrefix(errs, "underlease: "+got.Reason+"\n") {
			t.Errorf("%q: got %+v after %d and %q, want the same", args, got, code, errs)
		}
	}
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "report.json")
	w.setenv("UNDERLEASE_REPORT=" + path)
	w.file("nope: 1\n")
	if code, _, _ := w.do("run", "n", "--", "true"); code != 78 || !strings.Contains(read(t, path), `"outcome":"invalid"`) {
		t.Errorf("got %d and %s, want 78 and a report", code, read(t, path))
	}
}

func TestWhereAReportGoes(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.WriteFile(target, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	dangling := filepath.Join(dir, "dangling")
	if err := os.Symlink(filepath.Join(dir, "none"), dangling); err != nil {
		t.Fatal(err)
	}

	f, err := openReport(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.write(report{Version: 1}); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink == 0 || !strings.HasPrefix(read(t, target), `{"version":1`) {
		t.Errorf("got link %v, %v and target %q, want the report behind the link", info.Mode(), err, read(t, target))
	}

	for path, want := range map[string]string{
		fifo:           fifo + ": no such device or address", // nobody reads it
		dangling:       dangling + " is a link to nothing",
		dir:            dir + " is a directory: name a file",
		target + "/x":  target + "/x: not a directory",
		"/dev/fd/9999": "/dev/fd/9999: bad file descriptor",
	} {
		if _, err := openReport(path); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", path, err, want)
		}
	}

	r, err := os.OpenFile(fifo, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f, err = openReport(fifo)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.write(report{Version: 1}); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !strings.HasPrefix(string(got), `{"version":1`) {
		t.Errorf("got %q and %v from the pipe, want the report", got, err)
	}
}

// A report to /dev/stdout follows what the command has written, though standard output is a file.
func TestAReportToADescriptorIsAppended(t *testing.T) {
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if _, err := out.WriteString("of the command\n"); err != nil {
		t.Fatal(err)
	}
	f, err := openReport("/dev/fd/" + itoa(out.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.write(report{Version: 1}); err != nil {
		t.Fatal(err)
	}
	if got := read(t, out.Name()); !strings.HasPrefix(got, "of the command\n{\"version\":1") {
		t.Errorf("got %q, want both", got)
	}
	in, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if _, err := openReport("/dev/fd/" + itoa(in.Fd())); err == nil || !strings.HasSuffix(err.Error(), "is not open for writing") {
		t.Errorf("got %v for a descriptor to read from, want a refusal", err)
	}
}

// A monitoring agent reads the report: it must not lose that right with the first run.
func TestAReportKeepsModeAndOwnerOfTheFileThatIsThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, []byte(strings.Repeat("an older report ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o4644); err != nil {
		t.Fatal(err)
	}
	wantUID, wantGID := os.Geteuid(), os.Getegid()
	if wantUID == 0 {
		wantUID, wantGID = 77, 78
		if err := os.Chown(path, wantUID, wantGID); err != nil {
			t.Fatal(err)
		}
	}
	before := inode(t, path)
	writeReport(t, path)
	st := inode(t, path)
	if st.Mode&0o7777 != 0o644 || int(st.Uid) != wantUID || int(st.Gid) != wantGID {
		t.Errorf("got mode %o of %d:%d, want 644 of %d:%d", st.Mode&0o7777, st.Uid, st.Gid, wantUID, wantGID)
	}
	if st.Ino == before.Ino {
		t.Error("got the same file, want one that has replaced it in one step")
	}
	onlyFile(t, path)
}

func TestAReportKeepsTheAccessControlListOfTheFileThatIsThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// Version 2: user::rw-, user 77:r--, group::---, mask::r--, other::---. Source: Linux, posix_acl_xattr.h.
	acl := "\x02\x00\x00\x00" + "\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\x4d\x00\x00\x00" +
		"\x04\x00\x00\x00\xff\xff\xff\xff" + "\x10\x00\x04\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"
	const name = "system.posix_acl_access"
	if err := unix.Setxattr(path, name, []byte(acl), 0); errors.Is(err, unix.ENOTSUP) {
		acl = "" // nothing to be kept here, and nothing to fail because of it
	} else if err != nil {
		t.Fatal(err)
	}
	writeReport(t, path)
	b := make([]byte, 1000)
	n, _ := unix.Getxattr(path, name, b)
	if got := string(b[:max(n, 0)]); got != acl {
		t.Errorf("got the list %q, want %q", got, acl)
	}
}

func TestAReportIsWrittenInPlaceWhereTheDirectoryMayNotBeWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, []byte(strings.Repeat("an older report ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := locate(path)
	if err != nil {
		t.Fatal(err)
	}
	before := inode(t, path)
	old, err := p.open(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := overwrite(old, []byte("new\n")); err != nil {
		t.Fatal(err)
	}
	if got := read(t, path); got != "new\n" || inode(t, path).Ino != before.Ino {
		t.Errorf("got %.20q, want the new report alone, in the same file", got)
	}
	for err, want := range map[error]bool{unix.EACCES: true, unix.EROFS: true, unix.EPERM: true, unix.ENOSPC: false, unix.ENOENT: false} {
		if got := isDenied(&pathError{"x", err}); got != want {
			t.Errorf("%v: got denied %t, want %t", err, got, want)
		}
	}
}

func inode(t *testing.T, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st
}

func writeReport(t *testing.T, path string) {
	t.Helper()
	f, err := openReport(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.write(report{Version: 1}); err != nil {
		t.Fatal(err)
	}
	if got := read(t, path); !strings.HasPrefix(got, `{"version":1,`) || !strings.HasSuffix(got, "}\n") {
		t.Errorf("got %.40q, want a report", got)
	}
}

// The command may make the directory of its output anew.
func TestAReportGoesToWhatIsThereAtItsEnd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	path := filepath.Join(dir, "report.json")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := openReport(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(dir), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := f.write(report{Version: 1}); err != nil || !strings.HasPrefix(read(t, path), `{"version":1`) {
		t.Errorf("got %v and %q, want the report", err, read(t, path))
	}
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	r, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := f.write(report{Version: 1}); err == nil || err.Error() != path+" is not the regular file that it was" {
		t.Errorf("got %v for a pipe in its place, want a refusal", err)
	}
}

func TestLinksAreFollowedAsAShellDoes(t *testing.T) {
	top := t.TempDir()
	t.Chdir(top)
	if err := errors.Join(os.MkdirAll("a/b", 0o700), os.Symlink("a", "to-a"), os.Symlink("../to-a/b/./report", "a/relative"),
		os.Symlink(top+"/a/b/report", "absolute"), os.Symlink("loop", "loop"), os.Symlink("to-a//b/", "to-b"), os.WriteFile("a/b/report", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{
		"a/b/report", "./a//b/report", "a/../to-a/b/report", "to-a/relative", "absolute", "to-b/report", top + "/absolute",
		"/proc/self/cwd/absolute", "a/b/../b/report",
	} {
		if err := os.Truncate("a/b/report", 0); err != nil {
			t.Fatal(err)
		}
		writeReport(t, path)
		if got := read(t, "a/b/report"); got == "" {
			t.Errorf("%s: got nothing in the file behind the links", path)
		}
	}
	writeReport(t, "to-b/fresh") // a link on the way to what is not there yet
	for path, want := range map[string]string{
		"loop":             "loop: too many levels of symbolic links",
		"to-b":             "to-b is a directory: name a file",
		"to-b/":            "to-b/ is a directory: name a file",
		"/":                "/ is a directory: name a file",
		"absolute/":        "absolute/: not a directory",
		"absolute/x":       "absolute/x: not a directory",
		"a/b/fresher/":     "cannot write into the directory of a/b/fresher/: no such file or directory",
		"to-a/none/report": "cannot write into the directory of to-a/none/report: no such file or directory",
	} {
		if _, err := openReport(path); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", path, err, want)
		}
	}
}

// Standard output of the first process of a container is where its log is read from.
func TestAReportGoesToADescriptorOfAnotherProcess(t *testing.T) {
	r, w := pipe(t)
	file, err := os.OpenFile(filepath.Join(t.TempDir(), "log"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteString("a log\n"); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{w, file} {
		to, err := openReport("/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + itoa(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		if err := to.write(report{Version: 1}); err != nil {
			t.Fatal(err)
		}
	}
	_ = w.Close()
	if got, err := io.ReadAll(r); err != nil || !strings.HasPrefix(string(got), `{"version":1`) {
		t.Errorf("got %q and %v from the pipe, want the report", got, err)
	}
	if got := read(t, file.Name()); !strings.HasPrefix(got, "a log\n{\"version\":1") {
		t.Errorf("got %q, want the report after what was there", got)
	}
}
