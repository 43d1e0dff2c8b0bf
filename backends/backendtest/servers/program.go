package servers

import (
	"os"
	"syscall"
	"testing"
)

// WriteProgram writes a file that the test, or what it starts, executes at once. A process that another test forks meanwhile would have the
// file open for writing until it executes something itself, and as long as anybody has, nobody can execute it: ETXTBSY. So nothing is
// forked meanwhile.
func WriteProgram(t testing.TB, path string, content []byte) {
	t.Helper()
	syscall.ForkLock.RLock()
	err := os.WriteFile(path, content, 0o755)
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
}
