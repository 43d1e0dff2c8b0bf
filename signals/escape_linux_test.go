package signals_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Q03 with Q05: what forks and ends all the time is never taken for gone, also by a wrapper whose guardian was killed.
func TestAProcessThatRunsAwayIsCaughtWithoutTheGuardian(t *testing.T) {
	for range 8 {
		r := launch(t, endless("sh", "-c", `h() { [ "$1" = 0 ] && exit; h $(($1-1)) & exit; }
			trap "" TERM; h 20000 & h 20000 & h 20000 & echo up > "$D/up"; sleep 99`))
		r.entry("started")
		eventually(t, "the processes that run away", func() bool { _, err := os.Stat(filepath.Join(r.dir, "up")); return err == nil })
		if err := syscall.Kill(r.guardian(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		r.wait()
		if left := r.survivors(); len(left) > 0 {
			t.Fatalf("the wrapper ended, and %d processes of the tree run on", len(left))
		}
	}
}
