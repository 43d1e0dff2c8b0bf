//go:build linux

package servers

import (
	_ "embed" // the library
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// NeedCompiler is the need of a C compiler, for [Require]: by a small library a server's wall clock can be set.
const NeedCompiler = "gcc"

//go:embed shift.c.txt
var shift []byte

// fakeClock makes the file that holds a clock's shift, and returns the environment of a program, linked to the C library, that
// follows it.
func fakeClock(t testing.TB, file string) []string {
	t.Helper()
	gcc := Programs(t, NeedCompiler, "apt-get install -y --no-install-recommends gcc libc6-dev", nil, "gcc")["gcc"]
	dir := filepath.Dir(file) // which the program's user can read
	source, library := filepath.Join(dir, "shift.c"), filepath.Join(dir, "shift.so")
	if err := os.WriteFile(source, shift, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(gcc, "-O1", "-shared", "-fPIC", "-o", library, source).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	setClock(t, file, 0)
	return []string{"LD_PRELOAD=" + library, "UL_CLOCK=" + file}
}

// setClock writes in place: the program has the file mapped. Eight bytes at an aligned offset are read whole or not at all.
func setClock(t testing.TB, file string, ahead time.Duration) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(ahead)), 0); err != nil {
		t.Fatal(err)
	}
}
