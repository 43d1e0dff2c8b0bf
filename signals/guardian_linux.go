package signals

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/underlease/underlease/signals/guard"
)

// errGuardian is what Pin and Start return when there is no guardian to ask.
var errGuardian = errors.New("the guardian has ended or does not answer")

// Guardian is the wrapper's view of the process that is the parent of the command. It implements runner.Tree.
//
// The guardian does what is due by itself. The wrapper is its backup: it ends a guardian that does not begin a kill within 50 ms of the
// order, and where the guardian is gone, the orphans of the tree have become the wrapper's own children (it is a subreaper
// too) and are killed by it.
type Guardian struct {
	opt    Options
	pid    int
	sock   *os.File // used through raw; Go's poller waits for what comes
	fd     int
	page   *guard.Page
	shared bool // the command is in our process group

	strangers map[int]bool // children of this process that were there before the first guardian

	answers chan guard.Report // to Pin and Start; closed with the guardian
	events  chan Event
	gone    chan struct{} // closed when the tree is gone, or there never was one
	dead    chan struct{} // closed when the guardian was collected

	box    *box // the control group of the tree, or nil
	inside bool // the tree is in a namespace, and dies with the guardian

	last       Deadlines      // published; used by the caller's goroutine alone, as is what follows
	where      *where         // nil for not looked at yet
	stopSignal syscall.Signal // of the command
	started    atomic.Int64
	command    atomic.Int64 // pid
	shot       atomic.Bool  // we ended the guardian ourselves
	ours       atomic.Bool  // we, or the guardian by itself, have begun to end the command
	keeps      atomic.Bool  // the guardian keeps something until it ends: a lock, a control group, a namespace
	backup     sync.Once
	modes      modes      // of the terminal
	halt       sync.Mutex // held while this process is stopped because the command is
	halts      atomic.Int32

	mu        sync.Mutex
	collected bool // pid may be somebody else's
	exited    bool // the command's end was reported
	fate      Status
}

// Launch starts a guardian, or takes the one that was started while this program was initialised. It takes a few milliseconds until it
// listens, which pass beside whatever the caller does next.
func Launch(opt Options) (*Guardian, error) {
	g := &Guardian{
		opt:     opt,
		answers: make(chan guard.Report, 4),
		events:  make(chan Event, 64),
		gone:    make(chan struct{}),
		dead:    make(chan struct{}),
		last:    Deadlines{Never, Never, Never, Never, Never},
	}
	family.Lock()
	l, early := guard.Early() // the first one; it had no strangers beside it
	if early && opt.OwnGroup && l.Shared {
		l.Discard()
		early = false
	}
	var err error
	if !early {
		if len(family.guardians) == 0 && !guard.Childless() {
			g.strangers = make(map[int]bool)
			children, _ := guard.Children(os.Getpid())
			for _, pid := range children {
				g.strangers[pid] = true
			}
			family.strangers = g.strangers
		}
		l, err = guard.Launch(!opt.OwnGroup && Terminal())
	}
	g.strangers = family.strangers
	if err == nil {
		g.pid, g.fd, g.page, g.shared = l.Pid, l.Sock, l.Page, l.Shared
		family.guardians[g.pid] = g
	}
	family.Unlock()
	if err != nil {
		return nil, err
	}
	g.sock = os.NewFile(uintptr(g.fd), "guardian")
	runtime.AddCleanup(g, (*guard.Page).Unmap, g.page)
	go g.watch()
	if os.Getpid() == 1 {
		go collectStrangers()
	}
	return g, nil
}

// family is what this process knows of its children: the kernel hands orphans to the process, not to a guardian.
var family = struct {
	sync.Mutex
	guardians map[int]*Guardian
	strangers map[int]bool
}{guardians: make(map[int]*Guardian)}

// Wanted says whether a command line, without the program's name, will want a guardian: it was started already while the program was
// initialised, and [Launch] takes it.
func Wanted(args []string) bool { return guard.Wanted(args) }

// Terminal says whether this process has a controlling terminal: see [guard.Terminal].
func Terminal() bool { return guard.Terminal() }

// watch reads what the guardian reports until its end, and sees to the tree afterwards.
func (g *Guardian) watch() {
	var b [guard.ReportSize]byte
	over, gone := false, Instant(0)
	for {
		n, err := g.sock.Read(b[:])
		if errors.Is(err, syscall.ECONNRESET) {
			// The guardian ended with an order of ours unread, such as that of a kill which it had begun by itself. The kernel tells
			// that once, before what the guardian had sent: its last reports are still to be read.
			// Source: Linux, net/core/datagram.c, __skb_try_recv_datagram takes the socket's error first.
			continue
		}
		if err != nil || n == 0 {
			break
		}
		r, ok := guard.ParseReport(b[:n])
		switch {
		case !ok:
		case r.Kind == guard.Halted:
			g.halts.Store(r.Count)
			go g.follow(r.Status.StopSignal(), r.Count)
		case r.Kind >= guard.Pinned:
			if r.Kind == guard.Started {
				g.command.Store(int64(r.Pid)) // before anything that is told of it
			}
			g.answers <- r
		case r.Kind == guard.Gone:
			over, gone = true, r.At // this process may have been stopped since
		default:
			if (r.Kind == guard.Stopping || r.Kind == guard.Killing) && r.Why != guard.WhyLeftover {
				g.ours.Store(true)
			}
			g.report(event(r))
		}
		if over {
			break
		}
	}
	close(g.answers)
	// Nobody has to wait until a guardian has ended that says that the tree is gone and keeps nothing else: to end takes it half a millisecond.
	ran := g.command.Load() != 0 || g.started.Load() != 0
	told := over && ran && !g.keeps.Load() && !g.ours.Load()
	if told {
		g.report(Event{Kind: Gone, At: gone})
		// One that somebody has stopped meanwhile has nothing more to see to, and would outlive us.
		defer time.AfterFunc(aliveWithin, g.shoot).Stop()
	}
	g.collect()
	g.sock.Close()
	if ran && !told {
		if !over {
			g.ours.Store(true)
			g.takeOver()
			gone = Now()
		}
		if g.ours.Load() && g.bySignal() {
			g.modes.restore()
		}
		g.unbox()
		g.report(Event{Kind: Gone, At: gone})
	}
	family.Lock()
	delete(family.guardians, g.pid)
	family.Unlock()
	close(g.gone)
	close(g.events)
}

// collect waits for the guardian, whose connection has ended. It is collected before the events end, so that the time that the command used
// is accounted to us.
func (g *Guardian) collect() {
	var ws syscall.WaitStatus
	for {
		// Not to be collected before the flag says so: until then its number is its own.
		g.mu.Lock()
		pid, err := syscall.Wait4(g.pid, &ws, syscall.WNOHANG, nil)
		if pid == g.pid || err == syscall.ECHILD {
			g.collected = true
			g.mu.Unlock()
			close(g.dead)
			return
		}
		g.mu.Unlock()
		guard.WaitEnded(g.pid)
	}
}

func event(r guard.Report) Event {
	ev := Event{Kind: EventKind(r.Kind), At: r.At, Why: Why(r.Why), Count: int(r.Count), Killed: r.Killed != 0}
	for _, pid := range r.Pids[:r.Named] {
		ev.Pids = append(ev.Pids, int(pid))
	}
	ev.States = string(r.States[:r.Named])
	if r.Errno != 0 {
		ev.Err = r.Errno
	}
	if ev.Kind == Exited {
		ev.Status = status(r.Status)
	}
	return ev
}

func status(ws syscall.WaitStatus) Status {
	if ws.Signaled() {
		return Status{Code: 128 + int(ws.Signal()), Signal: ws.Signal(), Core: ws.CoreDump()}
	}
	return Status{Code: ws.ExitStatus()}
}

// report delivers an event. Only reports of a stuck kill, which repeat, are dropped when nobody reads.
func (g *Guardian) report(ev Event) {
	if ev.Kind == Stuck {
		select {
		case g.events <- ev:
		default:
		}
		return
	}
	if ev.Kind == Exited {
		g.mu.Lock()
		again := g.exited
		if !again {
			g.exited, g.fate = true, ev.Status
		}
		g.mu.Unlock()
		if again {
			return
		}
	}
	g.events <- ev
}

// bySignal says that the command did not end by itself, as far as it is known.
func (g *Guardian) bySignal() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.exited || g.fate.Signal != 0
}

// Events delivers what happens after Start, whatever that returned, and has to be read until it is closed: after [Gone], when no process of
// the tree is left and what the guardian kept beside it is free. It is closed when the guardian is collected; also without a command that has
// no descriptor open any more by then, so that a pinned lock is free unless this process holds it itself.
func (g *Guardian) Events() <-chan Event { return g.events }

// Pin hands copies of descriptors to the guardian, which holds them until the tree is empty, and returns when it has acknowledged them.
func (g *Guardian) Pin(fds []int) error {
	g.keeps.Store(true)
	for len(fds) > 0 {
		n := min(len(fds), 16)
		if e := g.order(guard.Order{Op: guard.OpPin}, fds[:n]...); e != 0 {
			return fmt.Errorf("cannot hand the lock to the guardian: %w", e)
		}
		fds = fds[n:]
		g.looked() // while the guardian answers
		if _, err := g.answer(answerWithin, guard.Pinned); err != nil {
			return err
		}
	}
	return nil
}

// Start runs the command and returns its pid. It waits for the guardian until the stop instant has passed, 10 s at most; a guardian that
// has not answered by then is ended, and so is what it may have started: with any error but *StartError, which says why there is no command,
// the tree is over when [Guardian.Events] is closed, and not before.
func (g *Guardian) Start(c Command, d Deadlines) (int, error) {
	g.last, g.stopSignal = d, c.StopSignal
	g.page.Write(guard.Deadlines(d))
	sealed := guard.Command{
		Path: c.Path, Args: c.Args, Env: c.Env, StopSignal: c.StopSignal, Grace: int64(c.Grace),
		Socket: c.Socket, Term: c.Term, Entry: guard.AtEntry(),
	}
	switch c.Leftovers {
	case LeftoversKill:
		sealed.Leftovers = guard.LeftoversKill
	case LeftoversWait:
		sealed.Leftovers = guard.LeftoversWait
	case LeftoversIgnore:
		sealed.Leftovers = guard.LeftoversIgnore
	}
	fds, err := g.isolate(c, &sealed)
	if err != nil {
		return 0, &StartError{Path: c.Path, Isolate: err}
	}
	if g.box != nil || g.inside {
		g.keeps.Store(true)
	}
	fd, e := sealed.Seal()
	if e != 0 {
		g.unbox()
		return 0, &StartError{Path: c.Path, Errno: e, Fork: true}
	}
	defer syscall.Close(fd)
	if g.shared {
		g.modes.save()
	}
	g.started.Store(Now())
	if e := g.order(guard.Order{Op: guard.OpStart}, append([]int{fd}, fds...)...); e != 0 {
		g.started.Store(0)
		g.unbox()
		return 0, errGuardian
	}
	within := answerWithin
	if stop := min(d.StopAt, d.RunStopAt); stop != Never {
		within = min(within, max(0, time.Duration(stop-Now()))+confirmWithin)
	}
	r, err := g.answer(within, guard.Started, guard.Refused)
	if err != nil {
		g.shoot()
		return 0, err
	}
	if r.Kind != guard.Started {
		g.started.Store(0)
		g.unbox()
		if r.Note == 1 {
			return 0, &StartError{Path: c.Path, Errno: r.Errno, Isolate: cannot(c.Isolate, r.Errno)}
		}
		return 0, &StartError{Path: c.Path, Errno: r.Errno, TooLate: r.Errno == 0, Fork: refused(r.Errno)}
	}
	if r.Note == 0 {
		g.unbox() // the guardian did without
	}
	g.started.Store(r.At)
	if g.opt.DropInherited {
		guard.CloseInherited()
	}
	g.sweep()
	return int(r.Pid), nil
}

// answer waits for an answer of one of the kinds. Another one is the late answer to an order that was given up.
func (g *Guardian) answer(within time.Duration, kinds ...guard.Kind) (guard.Report, error) {
	t := time.NewTimer(within)
	defer t.Stop()
	for {
		select {
		case r, ok := <-g.answers:
			if !ok {
				return guard.Report{}, errGuardian
			}
			if slices.Contains(kinds, r.Kind) {
				return r, nil
			}
		case <-t.C:
			return guard.Report{}, errGuardian
		}
	}
}

// order sends without waiting.
func (g *Guardian) order(o guard.Order, fds ...int) syscall.Errno {
	e := syscall.EPIPE
	if raw, err := g.sock.SyscallConn(); err == nil {
		if err := raw.Control(func(fd uintptr) { e = guard.Send(int(fd), o, fds...) }); err != nil {
			e = syscall.EPIPE
		}
	}
	runtime.KeepAlive(g)
	return e
}

// tell gives an order that needs no answer. Where it cannot be given, the guardian has ended or does not read: what it has to know stands in
// the page, and a kill has a second way, see [Guardian.Kill].
func (g *Guardian) tell(o guard.Order) { _ = g.order(o) }

// Publish tells the guardian new deadlines. It reads them when it wakes up; only one that came closer is worth waking it for.
func (g *Guardian) Publish(d Deadlines) {
	closer := d.StopAt < g.last.StopAt || d.KillAt < g.last.KillAt || d.RunStopAt < g.last.RunStopAt ||
		d.RunKillAt < g.last.RunKillAt || d.DrainKillAt < g.last.DrainKillAt
	g.last = d
	g.page.Write(guard.Deadlines(d))
	if closer {
		g.tell(guard.Order{Op: guard.OpLook})
	}
}

// Forward sends a signal to the command alone, unless the command has got it already, with us: from the terminal, or as a member of our control group.
func (g *Guardian) Forward(sig syscall.Signal) {
	if Ends(sig) || sig == g.stopSignal {
		g.page.Drain(Now())
	}
	if g.shared && reached(sig, g.started.Load()) && g.together() {
		return
	}
	g.tell(guard.Order{Op: guard.OpForward, Arg: int32(sig)})
	g.thaw()
}

// Tend lets a guardian go on that somebody has stopped, when the command has ended: it alone can tell how, and until then the lease would be kept.
func (g *Guardian) Tend() {
	if command := int(g.command.Load()); command > 0 && g.runs() {
		if state := stateOf(command); state == 0 || state == 'Z' {
			g.thaw()
		}
	}
}

// thaw lets a guardian go on that somebody has stopped: it alone passes signals on, and a run that cannot be ended is worse than one that
// does not stay stopped.
func (g *Guardian) thaw() {
	if !stopped(g.pid) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.collected {
		_ = syscall.Kill(g.pid, syscall.SIGCONT) // our child, and not collected: the number is its own
	}
}

// together says that the command is still in our process group, or has ended. An interactive shell, for one, makes a group of its own.
func (g *Guardian) together() bool {
	group, err := syscall.Getpgid(int(g.command.Load()))
	return err != nil || group == syscall.Getpgrp()
}

// Stop sends the stop signal to the command alone, at most once, and SIGCONT.
func (g *Guardian) Stop() {
	g.ours.Store(true)
	g.tell(guard.Order{Op: guard.OpStop})
}

// Kill sends SIGKILL to the whole tree until it is empty, also where the guardian does not react. There is no way back.
func (g *Guardian) Kill() {
	g.ours.Store(true)
	g.page.Order(Now())
	g.tell(guard.Order{Op: guard.OpLook})
	g.backup.Do(func() { go g.second() })
}

// second watches a kill that was ordered: a guardian that does not begin it, or goes silent in it, is ended, and the wrapper kills.
func (g *Guardian) second() {
	for wait := confirmWithin; ; wait = aliveWithin / 2 {
		select {
		case <-g.gone:
			return
		case <-g.dead:
			return
		case <-time.After(wait):
		}
		since, beat := g.page.Killing()
		if since == 0 || time.Duration(Now()-beat) > aliveWithin {
			g.shoot()
			return
		}
	}
}

// shoot ends the guardian.
func (g *Guardian) shoot() {
	g.shot.Store(true)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.collected {
		_ = syscall.Kill(g.pid, syscall.SIGKILL) // ours, and not collected: it cannot fail
	}
}

// Close ends a guardian that has started no command, and does nothing to another. Events is closed when it has ended; a guardian that does
// not end by itself is ended: there is nothing that it has to see to.
func (g *Guardian) Close() {
	g.tell(guard.Order{Op: guard.OpClose})
	time.AfterFunc(aliveWithin, func() {
		if g.started.Load() == 0 {
			g.shoot()
		}
	})
}

// Descendants counts the living processes of the tree.
func (g *Guardian) Descendants() int {
	select {
	case <-g.dead:
		return 0
	default:
	}
	if n, ok := g.boxed(); ok {
		return n
	}
	w := guard.Walk{Root: g.pid, Except: func(pid int) bool { return pid == g.page.Canary() }}
	if top := g.page.Top(); top != 0 {
		w = guard.Walk{Root: top}
	}
	return w.Count().Count
}
