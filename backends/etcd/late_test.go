//go:build linux

package etcd

import (
	"slices"
	"testing"
	"time"

	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/quorum"
)

// What happens between a look and the watch that begins behind it is told at once, and not by what etcd does every 100 ms for watches from
// the past. A watch that sees nothing waits, also where other keys are written.
func TestAWatchThatBeginsLateIsToldAtOnce(t *testing.T) {
	n := servers.StartEtcd(t, 1, servers.EtcdOptions{}).Nodes[0]
	d := driven(t, "etcd://"+n.Addr())
	write := func(change func(t *quorum.Txn)) {
		var x quorum.Txn
		change(&x)
		if _, ok, err := d.Commit(t.Context(), x); err != nil || !ok {
			t.Fatalf("Commit: got %v and %v", ok, err)
		}
	}
	put := func(key string) func(*quorum.Txn) {
		return func(x *quorum.Txn) { x.Writes = append(x.Writes, quorum.Write{Key: key, Value: []byte("v")}) }
	}
	gone := func(key string) func(*quorum.Txn) {
		return func(x *quorum.Txn) { x.Writes = append(x.Writes, quorum.Write{Key: key, Delete: true}) }
	}
	for name, change := range map[string]func(*quorum.Txn){"written": put("late/a"), "gone": gone("late/a")} {
		var took []time.Duration
		for range 9 {
			write(put("late/a"))
			v, err := d.Read(t.Context(), "late/")
			if err != nil {
				t.Fatal(err)
			}
			write(change)
			begun := time.Now()
			if err := d.Await(t.Context(), "late/", v.Version); err != nil {
				t.Fatalf("%s: Await: %v", name, err)
			}
			took = append(took, time.Since(begun))
		}
		slices.Sort(took)
		t.Logf("%s: told after %v in the middle, %v at most", name, took[4], took[8])
		if took[4] > 20*time.Millisecond {
			t.Errorf("%s: told after %v in the middle, want at once", name, took)
		}
	}
	write(put("late/a"))
	v, err := d.Read(t.Context(), "late/")
	if err != nil {
		t.Fatal(err)
	}
	write(put("other"))
	told := make(chan error, 1)
	go func() { told <- d.Await(t.Context(), "late/", v.Version) }()
	select {
	case err := <-told:
		t.Fatalf("Await: got %v after a write of another key, want no answer", err)
	case <-time.After(300 * time.Millisecond):
	}
	write(put("late/a"))
	if err := <-told; err != nil {
		t.Errorf("Await: got %v", err)
	}
}
