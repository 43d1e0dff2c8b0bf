package guard

import (
	"runtime"
	"syscall"
	"unsafe"
)

const (
	passEvery   = 2_000_000      // between two walks of a kill
	passSlowest = 100_000_000    // between two walks once a second has passed
	walkAfter   = 50_000_000     // from the kill of a control group to the walk, at most
	stuckAfter  = 1_000_000_000  // from the first SIGKILL to the first report
	stuckEvery  = 10_000_000_000 // between two reports
	sameSignal  = 50_000_000     // two deliveries of one signal within this are one act of its sender
	holdSignal  = 10_000_000     // for the sender of a signal to all to be done
	rouseAgain  = 50_000_000     // a wrapper that sees its command stopped has stopped itself by then
	collectMost = 64             // children that one turn takes in, so that the clock is looked at however fast they end
	exitRefused = 70
)

// guardian is the state of the loop.
type guardian struct {
	wrapper   int // pid
	wrapperFd int // pidfd, or -1
	sock      int // -1 once the wrapper is gone
	page      *Page
	shared    bool // the command is in the caller's process group
	timer     int
	signals   int       // pipe of Capture
	got       [65]int64 // when a signal came to us, or to the canary, that its sender meant for all
	ignored   uint64    // when we were started, as far as the runtime has kept that
	canary    int       // pid, or 0
	song      int       // pipe of the canary, or -1
	held      []heldSignal
	checks    int // socket of those who ask how much time is left, or -1

	command   Command
	pid       int // of the command; 0 before the start
	pidFd     int // pidfd of the command, or -1
	settled   bool
	exited    bool
	halted    bool // the command is stopped, and the wrapper was told, where both are in the caller's process group
	stops     int32
	rouseAt   int64 // when a wrapper that was woken is looked at once more
	stayAt    int64 // when the pages are kept in memory
	childless bool
	more      bool // a turn took in as many children as it may: there may be others
	pins      []int
	box       Cgroup // of the tree, or NoCgroup
	boxEvents int    // its cgroup.events, or -1
	in        inside // the namespace of the tree

	stopped bool  // the stop signal was sent
	decided bool  // by us: ownKill counts from it
	ownKill int64 // grace after a stop that we decided, or after the wrapper's end
	ownWhy  Why
	orphan  bool

	killing       bool
	killWhy       Why
	killedAt      int64
	nextPass, gap int64
	nextStuck     int64

	queue    []*Report // not yet sent
	ended    bool      // the last report is in the queue
	finished bool
	walk     Walk
	armed    int64 // for when the timer is set
}

// heldSignal waits to be passed on until it is known who else got it.
type heldSignal struct {
	sig     syscall.Signal
	at, due int64
}

// run is the guardian's life. It returns its exit code, which nobody but the wrapper sees.
func run() int {
	runtime.LockOSThread() // PR_SET_PDEATHSIG of the command is about this thread
	setName(Name)
	g := &guardian{wrapper: syscall.Getppid(), pidFd: -1, wrapperFd: -1, song: -1, checks: -1, armed: Never, ownKill: Never, rouseAt: Never, stayAt: Never}
	g.box, g.boxEvents, g.in.sock = NoCgroup, -1, -1
	hello, fds, ok, orphan := g.find()
	if orphan {
		return exitRefused // the run was over before we were ready: there is nothing to guard, and nothing to say
	}
	if !ok || hello.Op != OpHello || len(fds) != 1 {
		say("underlease: " + Name + " is started by underlease itself, not by people\n")
		return exitRefused
	}
	g.shared = hello.Arg == 1
	var e syscall.Errno
	if g.page, e = mapPage(fds[0]); e != 0 {
		return exitRefused
	}
	syscall.Close(fds[0])
	if g.timer, e = NewTimer(); e != 0 {
		return exitRefused
	}
	if g.signals, e = Capture(); e != 0 {
		return exitRefused
	}
	g.ignored = ignoredNow()
	g.capture()
	if e = Subreaper(); e != 0 {
		return exitRefused
	}
	// Who has stopped this process shall not stop the end of an orphaned tree: the kernel lets it go on when the wrapper ends. At any other
	// moment the signal means nothing here.
	syscall.RawSyscall6(syscall.SYS_PRCTL, prSetPdeathsig, uintptr(syscall.SIGCONT), 0, 0, 0, 0)
	if g.wrapperFd, e = PidfdOpen(g.wrapper); e != 0 {
		g.wrapperFd = -1 // before 5.3: the end of the connection says it too
	}
	if syscall.Getppid() != g.wrapper {
		return exitRefused
	}
	g.walk = Walk{
		Root:   syscall.Getpid(),
		Except: func(pid int) bool { return pid == g.canary },
		Beat:   func() { g.page.beat.Store(Now()) },
	}
	for !g.finished {
		g.step()
	}
	return 0
}

// find looks for the control socket: the wrapper put it on a free number of its choice, and its first message is waiting. Orphan says
// that it was found, and that the one who made it is our parent no more.
func (g *guardian) find() (o Order, fds []int, ok, orphan bool) {
	for fd, limit := 3, openLimit(); fd < limit; fd++ {
		maker, packets := makerOf(fd)
		if !packets {
			continue
		}
		var b [orderSize]byte
		n, e := peekMessage(fd, b[:])
		if _, ours := parseOrder(b[:n]); e != 0 || !ours {
			continue
		}
		if maker != g.wrapper {
			return o, nil, false, true
		}
		syscall.CloseOnExec(fd)
		n, fds, _ = receive(fd, b[:])
		g.sock = fd
		o, ok = parseOrder(b[:n])
		return o, fds, ok, false
	}
	return o, nil, false, false
}

// makerOf returns the process that made the pair of fd, if that is a packet socket.
func makerOf(fd int) (pid int, packets bool) {
	var kind int32
	size := uint32(4)
	_, _, e := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.SOL_SOCKET, soType,
		uintptr(unsafe.Pointer(&kind)), uintptr(unsafe.Pointer(&size)), 0)
	if e != 0 || kind != syscall.SOCK_SEQPACKET {
		return 0, false
	}
	var cred syscall.Ucred
	size = syscall.SizeofUcred
	_, _, e = syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.SOL_SOCKET, soPeercred,
		uintptr(unsafe.Pointer(&cred)), uintptr(unsafe.Pointer(&size)), 0)
	return int(cred.Pid), e == 0
}

// capture takes all signals that could end or stop the guardian: a signal to every process of a job or a control group must not take the
// command's guardian away. Faults stay with the runtime.
func (g *guardian) capture() {
	var old sigaction
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		switch sig {
		case syscall.SIGKILL, syscall.SIGSTOP, // cannot be taken
			syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGSYS, // faults
			syscall.SIGURG, syscall.SIGPROF: // the runtime's own
		default:
			_ = captureSignal(sig, &old) // a signal that cannot be taken cannot be helped
		}
	}
}

// step is one turn of the loop: decide by the clock and the page, collect children, send what is queued, wait.
func (g *guardian) step() {
	if g.pid != 0 {
		g.collect()
		g.decide()
	}
	g.flush()
	if g.finished {
		return
	}
	if g.pid != 0 && !g.settled {
		g.settle()
	}
	g.wait()
}

// decide acts on what is due.
func (g *guardian) decide() {
	if g.ended {
		return
	}
	now, d := Now(), g.page.Read()
	g.release(now)
	g.rouseStopped(now)
	if at, why := g.killAt(d); !g.killing && now >= at {
		g.kill(why, now)
	}
	if g.killing {
		g.pass(now)
		return
	}
	if at, why := stopAt(d); !g.decided && now >= at {
		g.stopNow(why, now)
	}
	if at, _ := g.killAt(d); now >= g.stayAt && at-now > stayAfter {
		g.stay()
	} else if now >= g.stayAt {
		g.stayAt = Never // a kill is near, and nothing may stand in its way
	}
}

// stopNow stops the command because of a deadline, and limits the time that it has from here on.
func (g *guardian) stopNow(why Why, now int64) {
	g.decided = true
	if at := now + g.command.Grace; at < g.ownKill {
		g.ownKill, g.ownWhy = at, why
	}
	if g.stop() {
		g.report(&Report{Kind: Stopping, Why: why, At: now})
	}
}

func stopAt(d Deadlines) (int64, Why) {
	if d.RunStopAt < d.StopAt {
		return d.RunStopAt, WhyMaxRun
	}
	return d.StopAt, WhyLease
}

// killAt is the instant of the kill as things stand.
func (g *guardian) killAt(d Deadlines) (int64, Why) {
	at, why := d.KillAt, WhyLease
	if d.RunKillAt < at {
		at, why = d.RunKillAt, WhyMaxRun
	}
	if d.DrainKillAt < at {
		at, why = d.DrainKillAt, WhyDrain
	}
	if g.ownKill < at {
		at, why = g.ownKill, g.ownWhy
	}
	if ordered := g.page.ordered.Load(); ordered != 0 {
		at, why = ordered, WhyOrder
	}
	return at, why
}

// kill begins the kill. There is no way back.
func (g *guardian) kill(why Why, now int64) {
	g.dismiss()
	g.killing, g.killWhy, g.killedAt = true, why, now
	g.nextPass, g.gap, g.nextStuck = now, passEvery, now+stuckAfter
	g.page.beat.Store(now)
	g.page.killing.Store(now)
	g.report(&Report{Kind: Killing, Why: why, At: now})
}

// pass is one attempt to kill everything, if it is due.
func (g *guardian) pass(now int64) {
	g.page.beat.Store(now)
	if now < g.nextPass {
		return
	}
	if g.box != NoCgroup {
		g.box.Kill()
		// What is in the group is dead, and only has to be collected. The walk is for what has left it, and need not visit the rest.
		if first := g.nextPass == g.killedAt; first || g.more && now < g.killedAt+walkAfter {
			g.nextPass = now + g.gap
			return
		}
	}
	g.shootGroup()
	s := g.walk.Kill()
	now = Now()
	if now >= g.killedAt+stuckAfter {
		g.gap = min(2*g.gap, passSlowest)
	}
	if now >= g.nextStuck {
		g.nextStuck = now + stuckEvery
		r := &Report{Kind: Stuck, Why: g.killWhy, At: now, Errno: s.Denied}
		r.name(s)
		g.report(r)
	}
	g.nextPass = now + g.gap
}

// shootGroup kills the command's process group and the command. The group is ours as long as the command, its leader, is not collected:
// until then its number cannot pass to strangers.
func (g *guardian) shootGroup() {
	if g.in.pid != 0 {
		syscall.Kill(g.in.pid, syscall.SIGKILL) // not collected; the namespace goes with it
	}
	if g.exited {
		return
	}
	if !g.shared && g.in.pid == 0 {
		syscall.Kill(-g.pid, syscall.SIGKILL)
	}
	g.signal(syscall.SIGKILL)
}

// signal reaches the command alone, and nobody once it was collected.
func (g *guardian) signal(sig syscall.Signal) {
	switch {
	case g.pid == 0 || g.exited:
	case g.pidFd >= 0:
		_ = PidfdSignal(g.pidFd, sig) // ESRCH where it has ended; a kill is repeated
	case g.in.pid != 0: // collected by another
	default:
		syscall.Kill(g.pid, sig) // not collected, therefore still its number
	}
}

// stop sends the stop signal, once. A stopped command has to run to heed it.
func (g *guardian) stop() bool {
	if g.stopped || g.exited {
		return false
	}
	g.stopped = true
	g.signal(g.command.StopSignal)
	g.signal(syscall.SIGCONT)
	return true
}

// collect takes in the children that have ended, and leaves some for the next turn where they are many.
func (g *guardian) collect() {
	g.more = false
	for n := 0; !g.childless; n++ {
		if n == collectMost {
			g.more = true
			break
		}
		pid, e := peek()
		if e == syscall.ECHILD {
			g.childless = true
			break
		}
		if pid == 0 {
			break
		}
		if pid == g.pid && !g.exited && g.in.pid == 0 {
			g.commandEnded()
			continue
		}
		if pid == g.in.pid {
			g.insideEnded()
			continue
		}
		Reap(pid)
		if pid == g.canary {
			g.canaryGone()
		}
	}
	if g.shared && !g.exited {
		g.follow()
	}
	if g.exited && !g.ended {
		g.afterExit()
	}
}

// follow makes the wrapper do what the command does: be stopped, and go on. A shell knows of its own child alone, which is the wrapper.
func (g *guardian) follow() {
	for {
		sig, news := halt(g.pid)
		if !news {
			return
		}
		g.halts(sig)
	}
}

// halts heeds that the command was stopped by a signal, or, with none, that it goes on.
func (g *guardian) halts(sig syscall.Signal) {
	if sig == 0 {
		g.wake()
		return
	}
	g.halted = true
	g.stops++
	g.report(&Report{Kind: Halted, Status: stoppedBy(sig), Count: g.stops, At: Now()})
}

// stoppedBy is the wait status of a process that is stopped by a signal.
func stoppedBy(sig syscall.Signal) syscall.WaitStatus { return syscall.WaitStatus(0x7f | int(sig)<<8) }

// wake lets a wrapper go on that was stopped because the command was. It may be about to stop itself, having seen the command stopped a moment
// ago, so it is looked at once more.
func (g *guardian) wake() {
	if g.halted {
		g.rouse()
		g.rouseAt = Now() + rouseAgain
	}
	g.halted = false
}

func (g *guardian) rouse() {
	if g.wrapperFd >= 0 {
		_ = PidfdSignal(g.wrapperFd, syscall.SIGCONT) // ESRCH where it has ended
	}
}

// rouseStopped wakes a wrapper that has stopped itself after its command went on.
func (g *guardian) rouseStopped(now int64) {
	if now < g.rouseAt {
		return
	}
	g.rouseAt = Never
	if st, ok := g.walk.stat(g.wrapper); ok && st.state == 'T' && !g.halted && !g.orphan {
		g.rouse()
	}
}

// commandEnded is called while the command is a zombie: its process group is still its own.
func (g *guardian) commandEnded() {
	now := Now()
	g.dismiss()
	g.wake()
	var left Survey
	if others, known := g.others(g.pid); !g.killing && (others || !known) {
		left = g.walk.CountUntil(g.killDue)
		g.addBoxed(&left)
	}
	if g.killing || g.command.Leftovers == LeftoversKill && !g.orphan {
		if !g.shared {
			syscall.Kill(-g.pid, syscall.SIGKILL)
		}
	}
	ws, _ := Reap(g.pid)
	g.told(ws, left, now)
}

// told reports the command's end, and what it left.
func (g *guardian) told(ws syscall.WaitStatus, left Survey, now int64) {
	g.exited = true
	if g.pidFd >= 0 {
		syscall.Close(g.pidFd)
		g.pidFd = -1
	}
	g.report(&Report{Kind: Exited, Status: ws, At: now})
	if left.Count > 0 {
		killed := uint32(0)
		if g.command.Leftovers == LeftoversKill && !g.orphan {
			killed = 1
		}
		r := &Report{Kind: Leftover, Why: WhyLeftover, At: now, Killed: killed}
		r.name(left)
		g.report(r)
	}
}

// killDue says that the instant of the kill has come.
func (g *guardian) killDue() bool {
	at, _ := g.killAt(g.page.Read())
	return Now() >= at
}

// others says whether there are children beside the canary and one process, which may be zero. It is not known where the kernel has no list
// of children, or this is not our own /proc. Orphans come to the first thread.
func (g *guardian) others(pid int) (some, known bool) {
	self := g.walk.Root
	for _, child := range g.walk.childrenOf(self, self) {
		if child == pid || child == g.canary {
			known = true
		} else {
			some = true
		}
	}
	return some && known, known
}

// afterExit decides how it goes on without the command.
func (g *guardian) afterExit() {
	now := Now()
	switch {
	case g.childless && !g.box.Populated():
		g.end(now)
	case g.killing || g.orphan:
	case g.awaitsCanary(): // it was sent SIGKILL a moment ago, and its end wakes us up
	case g.command.Leftovers == LeftoversKill:
		g.kill(WhyLeftover, now)
	case g.command.Leftovers == LeftoversIgnore:
		g.end(now)
	}
}

// awaitsCanary says that nothing is to be done after the command's end before the canary is collected.
func (g *guardian) awaitsCanary() bool {
	if g.canary == 0 {
		return false
	}
	others, _ := g.others(0)
	return !others || g.command.Leftovers != LeftoversKill
}

// end reports that nothing is left that we wait for. The locks go first, so that the next holder finds them free.
func (g *guardian) end(now int64) {
	for _, fd := range g.pins {
		syscall.Close(fd)
	}
	g.pins = nil
	if g.box != NoCgroup && g.orphan {
		g.box.Remove() // else the wrapper does it
	}
	g.deafen()
	g.ended = true
	g.report(&Report{Kind: Gone, At: now})
}

// report queues a message; the newest report of a stuck kill replaces an older one that has not been read.
func (g *guardian) report(r *Report) {
	if g.sock < 0 {
		return
	}
	if n := len(g.queue); r.Kind == Stuck && n > 0 && g.queue[n-1].Kind == Stuck {
		g.queue[n-1] = r
		return
	}
	g.queue = append(g.queue, r)
}

// flush sends what is queued as far as the wrapper reads, and ends the guardian after its last message.
func (g *guardian) flush() {
	for g.sock >= 0 && len(g.queue) > 0 {
		e := send(g.sock, g.queue[0].bytes())
		if e == syscall.EAGAIN || e == syscall.ENOBUFS || e == syscall.ENOMEM {
			return
		}
		if e != 0 {
			g.wrapperGone()
			break
		}
		g.queue = g.queue[1:]
	}
	if g.ended {
		g.finished = true
	}
}

// wait arms the timer for the next instant at which something is due, and sleeps until then or until something happens.
func (g *guardian) wait() {
	next, d := Never, g.page.Read()
	if g.pid != 0 && !g.ended {
		if g.killing {
			next = g.nextPass
		} else {
			next, _ = g.killAt(d)
			if at, _ := stopAt(d); !g.decided && at < next {
				next = at
			}
		}
		if len(g.held) > 0 && g.held[0].due < next {
			next = g.held[0].due
		}
		next = min(next, g.rouseAt, g.stayAt)
	}
	if next != g.armed {
		_ = SetTimer(g.timer, next) // a timer of ours cannot be refused
		g.armed = next
	}
	var fds [9]pollfd
	n := 0
	add := func(fd int, events int16) *pollfd {
		fds[n] = pollfd{fd: int32(fd), events: events} // a negative number is passed over
		n++
		return &fds[n-1]
	}
	timer := add(g.timer, pollIn)
	sigs := add(g.signals, pollIn)
	song := add(g.song, pollIn)
	wrapper := add(-1, 0)
	if !g.orphan {
		wrapper.fd, wrapper.events = int32(g.wrapperFd), pollIn
	}
	sock := add(g.sock, pollIn)
	if len(g.queue) > 0 {
		sock.events |= pollOut
	}
	below := add(g.in.sock, pollIn)
	box := add(-1, pollPri)
	if g.childless && g.exited && !g.ended {
		box.fd = int32(g.boxEvents) // processes that are not below us keep it populated
	}
	checks := add(g.checks, pollIn)
	limit := int64(-1)
	if g.more {
		limit = 0
	}
	poll(fds[:n], limit)
	if below.revents != 0 {
		g.listen()
	}
	if box.revents != 0 {
		populated(g.boxEvents) // read: the next poll waits for the next change
	}
	if timer.revents != 0 {
		var b [8]byte
		syscall.Read(g.timer, b[:])
		g.armed = 0 // fired: arm again
	}
	if sigs.revents != 0 || song.revents != 0 {
		g.takeSignals()
	}
	if sock.revents != 0 {
		g.obey()
	}
	if wrapper.revents != 0 {
		g.wrapperGone()
	}
	if checks.revents != 0 {
		g.answer()
	}
}

// takeSignals empties the pipes of signals. SIGCHLD has done its duty by waking us; others are remembered, see forward.
func (g *guardian) takeSignals() {
	g.take(g.signals, true)
	if g.canary != 0 && g.take(g.song, g.together()) == 0 { // somebody killed it; collect takes it in
		syscall.Close(g.song)
		g.song = -1
	}
}

// together says that the command is in the canary's process group, as far as is known: it may have left for one of its own, as an
// interactive shell does, and does not get what the group gets.
func (g *guardian) together() bool {
	canary, _ := syscall.Getpgid(g.canary)
	command, err := syscall.Getpgid(g.pid)
	return err != nil || command == canary
}

// take empties one pipe, and remembers what came unless it says nothing about the command. It returns what the last read did.
func (g *guardian) take(pipe int, heed bool) int {
	var b [64 * CapturedSize]byte
	for {
		n, err := syscall.Read(pipe, b[:])
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return n
		}
		now := Now()
		for r := b[:n]; len(r) >= CapturedSize; r = r[CapturedSize:] {
			if c := ParseCaptured(r); heed && c.Signal > 0 && int(c.Signal) < len(g.got) && !c.FromKernel() {
				g.got[c.Signal] = now
			}
		}
	}
}

// obey does what the wrapper asks.
func (g *guardian) obey() {
	for g.sock >= 0 && !g.finished {
		var b [orderSize]byte
		n, fds, e := receive(g.sock, b[:])
		if e == syscall.EAGAIN {
			return
		}
		o, ok := parseOrder(b[:n])
		if e != 0 || n == 0 || !ok {
			g.wrapperGone()
			return
		}
		switch o.Op {
		case OpPin:
			g.pins = append(g.pins, fds...)
			g.report(&Report{Kind: Pinned, At: Now()})
			g.flush()
		case OpStart:
			g.start(fds)
		case OpForward:
			g.forward(syscall.Signal(o.Arg))
		case OpStop:
			g.stop()
		case OpClose:
			if g.pid == 0 {
				g.finished = true
			}
		case OpResume: // what goes on with the group needs no word of ours, and a stop that is newer stays
			g.follow()
			g.listen()
			if g.halted && g.stops == o.Arg {
				g.signal(syscall.SIGCONT)
			}
		case OpLook, OpHello: // every turn looks
		}
	}
}

// forward passes a signal on to the command, unless its sender has reached the command already: a signal that came to us as well, at the same
// moment, went to every process of our control group, and one that came to the canary to every process of the caller's
// group. Whoever sends to many is not done with all of them when the wrapper passes it on, so there is a short wait.
func (g *guardian) forward(sig syscall.Signal) {
	now := Now()
	g.held = append(g.held, heldSignal{sig, now, now + holdSignal})
	g.release(now)
}

// release passes on what has been held for long enough.
func (g *guardian) release(now int64) {
	for len(g.held) > 0 && now >= g.held[0].due {
		h := g.held[0]
		g.held = g.held[1:]
		g.takeSignals()
		g.more = true // as in settle
		if h.sig > 0 && int(h.sig) < len(g.got) {
			at := g.got[h.sig]
			g.got[h.sig] = 0
			if at != 0 && max(at-h.at, h.at-at) < sameSignal {
				continue
			}
		}
		if g.exited && !g.ended {
			g.walk.Send(h.sig) // what it left is waited for, and somebody has to hear that it is time to go
			continue
		}
		g.signal(h.sig)
	}
}

// start forks the command if there is time for it.
func (g *guardian) start(fds []int) {
	if g.pid != 0 || len(fds) < 1 || len(fds) > 2 {
		g.report(&Report{Kind: Refused, Errno: syscall.EINVAL, At: Now()})
		return
	}
	if len(fds) == 2 {
		g.box = Cgroup(fds[1])
	}
	c, mapped, ok := unseal(fds[0])
	if !ok {
		syscall.Close(fds[0])
		g.report(&Report{Kind: Refused, Errno: syscall.ENOMEM, At: Now()})
		return
	}
	g.hear(c.Socket)
	var (
		pid             int
		e               syscall.Errno
		isolation, late bool
	)
	if c.Isolation == IsolatePidns {
		pid, e, isolation, late = g.enter(fds[0])
	} else {
		pid, e, isolation, late = g.fork(&c)
	}
	syscall.Close(fds[0])
	note := uint32(0)
	if isolation || pid != 0 && g.box != NoCgroup {
		note = 1
	}
	// Before anything is sent: a wrapper that is gone shows there, and then these decide.
	g.command = Command{StopSignal: c.StopSignal, Grace: c.Grace, Leftovers: c.Leftovers, Term: string([]byte(c.Term))}
	switch {
	case late:
		g.report(&Report{Kind: Refused, At: Now()})
	case e != 0:
		g.report(&Report{Kind: Refused, Errno: e, Note: note, At: Now()})
	default:
		g.pid = pid
		g.page.top.Store(int64(g.in.pid))
		g.report(&Report{Kind: Started, Pid: int32(pid), Note: note, At: Now()})
	}
	g.flush()
	syscall.Munmap(mapped)
	if g.pid == 0 {
		g.deafen()
		return
	}
	if g.in.pid == 0 {
		if fd, e := PidfdOpen(pid); e == 0 {
			g.pidFd = fd
		}
	}
	if g.box != NoCgroup {
		g.boxEvents, _ = g.box.open("cgroup.events", syscall.O_RDONLY)
		populated(g.boxEvents) // what it says from now on is new
	}
}

// settle is what remains to be done once there is a command, and need not be done for one that has ended already.
func (g *guardian) settle() {
	g.settled = true
	if g.shared && !g.exited {
		if pid, pipe, e := hatch(); e == 0 {
			g.canary, g.song = pid, pipe
			g.page.canary.Store(int64(pid))
		}
	}
	leave(g.shared)
	// What came until now reached us as a member of the caller's process group, or before there was a command.
	g.takeSignals()
	g.more = true // what says that a child has ended may have been among it
	g.got = [65]int64{}
	CloseInherited()
	if syscall.Geteuid() == 0 {
		protect()
		g.stayAt = Now() + stayAfter
	}
}

// stayAfter is how long a command has to run before the guardian keeps its pages in memory: the kernel takes a millisecond for that, and a
// short command would pay for it.
const stayAfter = 250_000_000 // nanoseconds

// stay keeps the pages in memory that the guardian has used and those that a kill needs: one that had to read its own code from the disk, again
// and again where the memory of the group is used up, was two seconds late.
func (g *guardian) stay() {
	g.stayAt = Never
	_ = syscall.Mlockall(syscall.MCL_CURRENT | mclOnFault) // before 4.4 there is no such flag, and all goes on as it was
	g.walk.Count()                                         // for its code alone
}

// leave takes the guardian, or the first process of a namespace, out of the process group of its caller, so that what is meant for that
// group does not reach it. It leaves the session as well, so that no terminal can hang up on it or stop it for writing, and because a
// session is a scheduling group of its own (autogroup, sched(7)): the guardian gets its share however many processes its caller's session
// has, or sessions the tree. That does not hold for one that is nice and has no terminal: alone in a group a sleeper of niceness 19 was woken
// up to half a second late beside groups that are busy, and at most some milliseconds late among its caller's processes. It stays.
//
// A real-time priority is no way out: wait4 spins in the kernel until the dead process has left its processor, and one that spins at such
// a priority never lets it leave its own (seen on 6.18, for up to a second). Nor is a low niceness, for the same reason.
func leave(shared bool) {
	if shared || niceness() <= 0 {
		_, _ = syscall.Setsid() // as a member of its caller's group it cannot be refused
	} else {
		_ = syscall.Setpgid(0, 0)
	}
}

// niceness returns that of this thread.
func niceness() int {
	const least = 20 // the system call returns 20 minus the niceness, so that it is not taken for an error
	r, _, e := syscall.RawSyscall(syscall.SYS_GETPRIORITY, syscall.PRIO_PROCESS, 0, 0)
	if e != 0 {
		return 0
	}
	return least - int(r)
}

// tooLate says that the stop instant has passed, or that the wrapper has ordered the kill.
func (g *guardian) tooLate() bool {
	at, _ := stopAt(g.page.Read())
	return Now() >= at || g.page.ordered.Load() != 0
}

// fork runs the command, in its control group if it has one. Isolation says that an error is about that.
func (g *guardian) fork(c *Command) (pid int, e syscall.Errno, isolation, late bool) {
	sys := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: !g.shared}
	if g.box != NoCgroup {
		sys.UseCgroupFD, sys.CgroupFD = true, int(g.box)
	}
	if g.tooLate() {
		return 0, 0, false, true
	}
	pid, e = execute(c, g.ignored, sys)
	if e == 0 || g.box == NoCgroup {
		return pid, e, false, false
	}
	if c.Isolation == IsolateCgroup {
		if refused := g.box.Startable(); refused != 0 {
			return 0, refused, true, false
		}
		return 0, e, false, false
	}
	// Whether the error is about the file or about the group shows when the group is left out.
	syscall.Close(int(g.box))
	g.box = NoCgroup
	return g.fork(c)
}

// execute runs the command, as execvp does where the file has a format that the kernel does not know.
func execute(c *Command, ignored uint64, sys *syscall.SysProcAttr) (pid int, e syscall.Errno) {
	attr := &syscall.ProcAttr{Env: c.Env, Files: []uintptr{0, 1, 2}, Sys: sys}
	pid, e = forkExec(&c.Entry, ignored, c.Path, c.Args, attr)
	if e == syscall.ENOEXEC {
		args := []string{"/bin/sh", c.Path}
		if len(c.Args) > 1 {
			args = append(args, c.Args[1:]...)
		}
		pid, e = forkExec(&c.Entry, ignored, "/bin/sh", args, attr)
	}
	return pid, e
}

// protect takes the guardian out of the kernel's choice when memory runs out. The command has what it inherited.
func protect() {
	if fd, err := syscall.Open("/proc/self/oom_score_adj", syscall.O_WRONLY|syscall.O_CLOEXEC, 0); err == nil {
		syscall.Write(fd, []byte("-1000"))
		syscall.Close(fd)
	}
}

// wrapperGone makes the guardian act alone: the stop signal at once, the kill after the grace at the latest.
func (g *guardian) wrapperGone() {
	if g.orphan {
		return
	}
	g.orphan = true
	syscall.Close(g.sock)
	g.sock, g.queue = -1, nil
	if g.pid == 0 || g.ended {
		g.finished = true
		return
	}
	now := Now()
	if !g.killing {
		if at := now + g.command.Grace; at < g.ownKill {
			g.ownKill, g.ownWhy = at, WhyOrphan
		}
		g.decided = true
		g.stop()
	}
	go say("underlease: the wrapper was killed: stopping the command and everything it started\n")
}

// say writes one line to people, if that does not block. It runs beside the loop: the descriptor is shared with the command, so it cannot be made
// non-blocking, and another writer may take the room that was seen.
func say(line string) {
	fds := []pollfd{{fd: 2, events: pollOut}}
	poll(fds, 0)
	if fds[0].revents&pollOut != 0 && fds[0].revents&(pollErr|pollHup) == 0 {
		syscall.Write(2, []byte(line))
	}
}
