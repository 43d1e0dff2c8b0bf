package guard

import (
	"sync"
	"syscall"
	"testing"
)

func TestAReaderSeesWholeSetsOfDeadlinesOnly(t *testing.T) {
	p, fd, e := NewPage()
	if e != 0 {
		t.Fatal(e)
	}
	defer syscall.Close(fd)
	other, e := mapPage(fd) // as the other process has it
	if e != 0 {
		t.Fatal(e)
	}
	if d := other.Read(); d != (Deadlines{Never, Never, Never, Never, Never}) {
		t.Errorf("a new page has %v, want never", d)
	}
	p.Write(Deadlines{})
	var done sync.WaitGroup
	stop := make(chan struct{})
	done.Go(func() {
		for i := int64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
				p.Write(Deadlines{i, i, i, i, i})
			}
		}
	})
	last := int64(0)
	for range 200_000 {
		d := other.Read()
		if d != (Deadlines{d.StopAt, d.StopAt, d.StopAt, d.StopAt, d.StopAt}) {
			t.Fatalf("read parts of two sets: %v", d)
		}
		if d.StopAt < last {
			t.Fatalf("read %d after %d", d.StopAt, last)
		}
		last = d.StopAt
	}
	close(stop)
	done.Wait()
}

func TestAWriterThatStoppedHalfWayDoesNotHoldTheReader(t *testing.T) {
	p, fd, e := NewPage()
	if e != 0 {
		t.Fatal(e)
	}
	defer syscall.Close(fd)
	want := Deadlines{1, 2, 3, 4, 5}
	p.Write(want)
	g := p.generation.Load() + 1 // the next Write, stopped before its last step
	p.copies[g&1][0].Store(99)
	if got := p.Read(); got != want {
		t.Errorf("read %v, want %v", got, want)
	}
}

func TestTheOrderToKillIsNotTakenBack(t *testing.T) {
	p, fd, e := NewPage()
	if e != 0 {
		t.Fatal(e)
	}
	defer syscall.Close(fd)
	p.Order(5)
	p.Order(7)
	g := guardian{page: p, ownKill: Never}
	if at, why := g.killAt(p.Read()); at != 5 || why != WhyOrder {
		t.Errorf("kill at %d because of %d, want 5 and the order", at, why)
	}
}

func TestTheNearestReasonDecidesTheKill(t *testing.T) {
	p, fd, e := NewPage()
	if e != 0 {
		t.Fatal(e)
	}
	defer syscall.Close(fd)
	for _, c := range []struct {
		d   Deadlines
		own int64
		at  int64
		why Why
	}{
		{Deadlines{KillAt: 9, RunKillAt: Never, DrainKillAt: Never}, Never, 9, WhyLease},
		{Deadlines{KillAt: 9, RunKillAt: 8, DrainKillAt: Never}, Never, 8, WhyMaxRun},
		{Deadlines{KillAt: 9, RunKillAt: 8, DrainKillAt: 7}, Never, 7, WhyDrain},
		{Deadlines{KillAt: 9, RunKillAt: 8, DrainKillAt: 7}, 6, 6, WhyOrphan},
	} {
		g := guardian{page: p, ownKill: c.own, ownWhy: WhyOrphan}
		if at, why := g.killAt(c.d); at != c.at || why != c.why {
			t.Errorf("%+v: kill at %d because of %d, want %d and %d", c.d, at, why, c.at, c.why)
		}
	}
}

func TestACommandPassesSealedMemoryUnchanged(t *testing.T) {
	c := Command{
		Path: "/bin/\xff", Args: []string{"", "a b", "\x01"}, Env: []string{"A=", "noequals", "B=\n"}, StopSignal: 3, Grace: 77,
		Leftovers: LeftoversIgnore,
	}
	fd, e := c.Seal()
	if e != 0 {
		t.Fatal(e)
	}
	defer syscall.Close(fd)
	if _, err := syscall.Write(fd, []byte("x")); err != syscall.EPERM {
		t.Errorf("writing to it: %v, want EPERM", err)
	}
	got, mapped, ok := unseal(fd)
	if !ok {
		t.Fatal("cannot be read")
	}
	defer syscall.Munmap(mapped)
	if got.Path != c.Path || got.StopSignal != c.StopSignal || got.Grace != c.Grace || got.Leftovers != c.Leftovers {
		t.Errorf("got %+v, want %+v", got, c)
	}
	for i := range c.Args {
		if got.Args[i] != c.Args[i] || got.Env[i] != c.Env[i] {
			t.Errorf("got %q %q, want %q %q", got.Args, got.Env, c.Args, c.Env)
		}
	}
}

func TestTheScanOfAllProcessesFindsTheSameTree(t *testing.T) {
	w := Walk{Root: syscall.Getpid()}
	attr := &syscall.ProcAttr{Env: []string{"PATH=/usr/bin:/bin"}}
	pid, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", "sleep 60 & exec sleep 60"}, attr)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Wait4(pid, nil, 0, nil)
	defer syscall.Kill(pid, syscall.SIGKILL)
	for w.Count().Count < 2 {
	}
	with := w.Count()
	w.scanAlways = true
	without := w.Count()
	if with.Count != without.Count {
		t.Errorf("by the kernel's lists %v, by scanning %v", with, without)
	}
	for w.Kill().Count > 1 {
	}
}
