//go:build unix && (!linux || portable)

package signals

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	ossignal "os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This is the guardian for the systems that have neither pidfds nor subreapers nor sealed memory: one process beside the wrapper
// as on Linux, with the same promises as far as the system allows (the README has the table), but made of sockets and
// ordinary means. It learns the deadlines by messages instead of a shared page: one that has not arrived leaves an earlier
// deadline in force, never a later one.
//
// It is compiled on Linux with the build tag portable, so that its logic can be tested there.

const (
	portableName = "ul-guard" + portableSuffix
	portableVar  = "UL_GUARD" // numbers of its two sockets: orders, and descriptors to hold

	scanEvery    = 250 * time.Millisecond // between two looks for new descendants, where the system does not hand orphans over
	longestSleep = time.Second            // before a deadline: timers may stand still in a suspend
)

func init() {
	if len(os.Args) == 1 && os.Args[0] == portableName {
		os.Exit(portableGuard())
	}
}

// portOrder is a message to the guardian.
type portOrder struct {
	Op        string // pin, start, deadlines, forward, stop, kill, close
	Deadlines Deadlines
	Count     int // of descriptors
	Signal    syscall.Signal
	Command   *portCommand
}

// portCommand is a [Command] whose strings keep every byte.
type portCommand struct {
	Path       []byte
	Args, Env  [][]byte
	StopSignal syscall.Signal
	Grace      time.Duration
	Leftovers  Leftovers
	OwnGroup   bool
}

// portReport is a message from the guardian: an answer, or an event.
type portReport struct {
	Answer string // pinned, started, refused
	Pid    int
	At     Instant
	Errno  syscall.Errno
	Event  *Event
	Why    syscall.Errno // of Event.Err
}

// outbox writes messages in their order without ever blocking who posts them.
type outbox struct {
	mu    sync.Mutex
	queue []any
	more  chan struct{}
	shut  bool
	done  chan struct{} // closed when all is written, or nobody reads any more
}

func newOutbox(f *os.File) *outbox {
	b := &outbox{more: make(chan struct{}, 1), done: make(chan struct{})}
	go func() {
		defer close(b.done)
		enc := json.NewEncoder(f)
		for {
			b.mu.Lock()
			if len(b.queue) == 0 {
				shut := b.shut
				b.mu.Unlock()
				if shut {
					return
				}
				<-b.more
				continue
			}
			m := b.queue[0]
			b.queue = b.queue[1:]
			b.mu.Unlock()
			if enc.Encode(m) != nil {
				return
			}
		}
	}()
	return b
}

func (b *outbox) post(m any) {
	b.mu.Lock()
	b.queue = append(b.queue, m)
	b.mu.Unlock()
	b.wake()
}

func (b *outbox) wake() {
	select {
	case b.more <- struct{}{}:
	default:
	}
}

// close ends the outbox after what was posted.
func (b *outbox) close() {
	b.mu.Lock()
	b.shut = true
	b.mu.Unlock()
	b.wake()
}

// portGuardian is the state of the guardian process.
type portGuardian struct {
	out     *outbox
	rights  *os.File
	orders  chan portOrder // closed with the wrapper
	d       Deadlines
	command *portCommand
	pid     int
	tree    *tracker
	pins    []int

	exited, stopped, decided, orphan, killing bool

	ownKill   Instant
	ownWhy    Why
	killWhy   Why
	killedAt  Instant
	nextPass  Instant
	nextStuck Instant
	nextScan  Instant
	gap       time.Duration
}

// portableGuard is the guardian's life.
func portableGuard() int {
	var fds [2]int
	numbers := strings.Split(os.Getenv(portableVar), ",")
	if len(numbers) != len(fds) {
		return 70
	}
	for i, n := range numbers {
		var err error
		if fds[i], err = strconv.Atoi(n); err != nil {
			return 70
		}
		syscall.CloseOnExec(fds[i])
	}
	wrapper := os.Getppid()
	// Signals to all processes of a job must not take the guardian away; being handled, they are at their default in the command.
	ossignal.Notify(make(chan os.Signal, 1), portCaught...)
	child := make(chan os.Signal, 1)
	ossignal.Notify(child, syscall.SIGCHLD)
	adoptOrphans()
	sock := os.NewFile(uintptr(fds[0]), "wrapper")
	g := &portGuardian{
		out: newOutbox(sock), rights: os.NewFile(uintptr(fds[1]), "rights"), orders: make(chan portOrder),
		d: Deadlines{Never, Never, Never, Never, Never}, ownKill: Never,
	}
	go func() {
		defer close(g.orders)
		dec := json.NewDecoder(sock)
		for {
			var o portOrder
			if dec.Decode(&o) != nil {
				return
			}
			g.orders <- o
		}
	}()
	timer := time.NewTimer(time.Hour)
	for {
		select {
		case o, ok := <-g.orders:
			if !ok {
				g.orders = nil
				if g.pid == 0 {
					return 0
				}
				g.wrapperGone()
			} else if o.Op == "close" && g.pid == 0 {
				return 0
			} else {
				g.obey(o)
			}
		case <-child:
		case <-timer.C:
		}
		if g.pid == 0 {
			if os.Getppid() != wrapper {
				return 0
			}
			continue
		}
		g.collect()
		if g.over() {
			break
		}
		timer.Reset(g.decide())
	}
	for _, fd := range g.pins {
		syscall.Close(fd)
	}
	if !g.orphan {
		g.report(Event{Kind: Gone, At: Now()})
		g.out.close()
		<-g.out.done
	}
	return 0
}

func (g *portGuardian) report(ev Event) {
	if g.orphan {
		return
	}
	r := portReport{Event: &ev}
	if e, ok := ev.Err.(syscall.Errno); ok {
		r.Why, ev.Err = e, nil
	}
	g.out.post(r)
}

func (g *portGuardian) obey(o portOrder) {
	switch o.Op {
	case "pin":
		g.pins = append(g.pins, receiveRights(g.rights, o.Count)...)
		g.out.post(portReport{Answer: "pinned"})
	case "start":
		g.start(o)
	case "deadlines":
		g.d = o.Deadlines
	case "forward":
		g.signal(o.Signal)
	case "stop":
		g.stop()
	case "kill":
		if g.pid != 0 && !g.killing {
			g.kill(WhyOrder, Now())
		}
	}
}

func (g *portGuardian) start(o portOrder) {
	c := o.Command
	g.d = o.Deadlines
	if at, _ := portStopAt(g.d); g.pid != 0 || Now() >= at {
		g.out.post(portReport{Answer: "refused", At: Now()})
		return
	}
	attr := &syscall.ProcAttr{Files: []uintptr{0, 1, 2}, Env: texts(c.Env), Sys: childAttr(c.OwnGroup)}
	args := texts(c.Args)
	pid, err := syscall.ForkExec(string(c.Path), args, attr)
	if err == syscall.ENOEXEC { // as execvp does
		pid, err = syscall.ForkExec("/bin/sh", append([]string{"/bin/sh", string(c.Path)}, args[min(1, len(args)):]...), attr)
	}
	if err != nil {
		e, ok := err.(syscall.Errno)
		if !ok {
			e = syscall.EINVAL
		}
		g.out.post(portReport{Answer: "refused", Errno: e, At: Now()})
		return
	}
	g.command, g.pid = c, pid
	g.command.Args, g.command.Env = nil, nil
	g.tree = newTracker(pid, c.OwnGroup)
	g.out.post(portReport{Answer: "started", Pid: pid, At: Now()})
	syscall.Setsid() // only now: the command stays where the shell has put it
	dropInherited()
}

func texts(all [][]byte) []string {
	s := make([]string, len(all))
	for i, b := range all {
		s[i] = string(b)
	}
	return s
}

func bytesOf(all []string) [][]byte {
	b := make([][]byte, len(all))
	for i, s := range all {
		b[i] = []byte(s)
	}
	return b
}

// signal reaches the command alone. It is not collected, and therefore still has its number.
func (g *portGuardian) signal(sig syscall.Signal) {
	if g.pid != 0 && !g.exited {
		syscall.Kill(g.pid, sig)
	}
}

func (g *portGuardian) stop() bool {
	if g.stopped || g.exited || g.pid == 0 {
		return false
	}
	g.stopped = true
	g.signal(g.command.StopSignal)
	g.signal(syscall.SIGCONT)
	return true
}

func (g *portGuardian) wrapperGone() {
	g.orphan, g.decided = true, true
	if at := Now() + int64(g.command.Grace); !g.killing && at < g.ownKill {
		g.ownKill, g.ownWhy = at, WhyOrphan
	}
	g.stop()
}

// collect takes in children that have ended.
func (g *portGuardian) collect() {
	var left []int
	if !g.exited && !g.killing {
		left = g.tree.list()
	}
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 {
			return
		}
		if pid != g.pid || g.exited {
			continue
		}
		if g.command.OwnGroup && (g.killing || g.command.Leftovers == LeftoversKill) {
			syscall.Kill(-g.pid, syscall.SIGKILL) // nobody else can have got its number yet
		}
		g.exited = true
		now := Now()
		g.report(Event{Kind: Exited, At: now, Status: portStatus(ws)})
		kills := g.command.Leftovers == LeftoversKill
		if n := without(left, g.pid); len(n) > 0 {
			g.report(Event{Kind: Leftover, At: now, Why: WhyLeftover, Count: len(n), Pids: n[:min(16, len(n))], Killed: kills && !g.orphan})
		}
		if !g.killing && (kills || g.orphan) {
			g.kill(WhyLeftover, now)
		}
	}
}

func without(pids []int, pid int) (rest []int) {
	for _, p := range pids {
		if p != pid {
			rest = append(rest, p)
		}
	}
	return rest
}

func portStatus(ws syscall.WaitStatus) Status {
	if ws.Signaled() {
		return Status{Code: 128 + int(ws.Signal()), Signal: ws.Signal(), Core: ws.CoreDump()}
	}
	return Status{Code: ws.ExitStatus()}
}

// over says that nothing is left that is waited for.
func (g *portGuardian) over() bool {
	if !g.exited {
		return false
	}
	if g.command.Leftovers == LeftoversIgnore && !g.killing {
		return true
	}
	return len(g.tree.list()) == 0
}

func portStopAt(d Deadlines) (Instant, Why) {
	if d.RunStopAt < d.StopAt {
		return d.RunStopAt, WhyMaxRun
	}
	return d.StopAt, WhyLease
}

func (g *portGuardian) killAt() (Instant, Why) {
	at, why := g.d.KillAt, WhyLease
	if g.d.RunKillAt < at {
		at, why = g.d.RunKillAt, WhyMaxRun
	}
	if g.d.DrainKillAt < at {
		at, why = g.d.DrainKillAt, WhyDrain
	}
	if g.ownKill < at {
		at, why = g.ownKill, g.ownWhy
	}
	return at, why
}

// decide acts on what is due and returns how long to sleep.
func (g *portGuardian) decide() time.Duration {
	now := Now()
	if at, why := g.killAt(); !g.killing && now >= at {
		g.kill(why, now)
	}
	if g.killing {
		g.pass(now)
		return g.gap
	}
	stop, why := portStopAt(g.d)
	if !g.decided && now >= stop {
		g.decided = true
		if at := now + int64(g.command.Grace); at < g.ownKill {
			g.ownKill, g.ownWhy = at, why
		}
		if g.stop() {
			g.report(Event{Kind: Stopping, Why: why, At: now})
		}
	}
	next, _ := g.killAt()
	if !g.decided {
		next = min(next, stop)
	}
	sleep := time.Hour
	if next != Never {
		sleep = min(time.Duration(next-now), longestSleep)
	}
	if tracksByLooking {
		if now >= g.nextScan {
			g.tree.list()
			g.nextScan = now + int64(scanEvery)
		}
		sleep = min(sleep, scanEvery)
	}
	return max(sleep, 0)
}

// kill begins the kill. There is no way back.
func (g *portGuardian) kill(why Why, now Instant) {
	g.killing, g.killWhy, g.killedAt = true, why, now
	g.nextPass, g.gap, g.nextStuck = now, passEvery, now+int64(stuckAfter)
	if why != WhyLeftover {
		g.report(Event{Kind: Killing, Why: why, At: now})
	}
}

func (g *portGuardian) pass(now Instant) {
	if !g.exited {
		if g.command.OwnGroup {
			syscall.Kill(-g.pid, syscall.SIGKILL)
		}
		g.signal(syscall.SIGKILL)
	}
	left, denied := g.tree.kill()
	if now >= g.killedAt+int64(stuckAfter) {
		g.gap = min(2*g.gap, passSlowest)
	}
	if now >= g.nextStuck {
		g.nextStuck = now + int64(stuckEvery)
		ev := Event{Kind: Stuck, Why: g.killWhy, At: now, Count: len(left), Pids: left[:min(16, len(left))]}
		if denied != 0 {
			ev.Err = denied
		}
		g.report(ev)
	}
}

// portableGuardian is the wrapper's side. It implements runner.Tree.
type portableGuardian struct {
	opt    Options
	shared bool
	pid    int
	sock   *os.File
	out    *outbox
	rights *os.File

	answers chan portReport
	events  chan Event
	gone    chan struct{}

	command atomic.Int64 // pid
	killing atomic.Bool
	shot    atomic.Bool
	backup  sync.Once
	last    Deadlines

	mu        sync.Mutex
	collected bool
	tree      *tracker // for the end of the guardian, and to count
}

// launchPortable starts a guardian.
func launchPortable(opt Options) (*portableGuardian, error) {
	adoptOrphans()
	pair, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("cannot make the guardian's socket: %w", err)
	}
	rights, err := socketPair()
	if err != nil {
		syscall.Close(pair[0])
		syscall.Close(pair[1])
		return nil, fmt.Errorf("cannot make the guardian's socket: %w", err)
	}
	defer syscall.Close(pair[1])
	defer syscall.Close(rights[1])
	g := &portableGuardian{
		opt: opt, shared: !opt.OwnGroup && Terminal(),
		answers: make(chan portReport, 4), events: make(chan Event, 64), gone: make(chan struct{}),
	}
	files := make([]uintptr, max(pair[1], rights[1])+1)
	for fd := range files {
		files[fd] = uintptr(fd)
		if fd > 2 && fd != pair[1] && fd != rights[1] && !inherited(fd) {
			files[fd] = ^uintptr(0)
		}
	}
	self, err := os.Executable()
	if err == nil {
		g.pid, err = syscall.ForkExec(self, []string{portableName}, &syscall.ProcAttr{
			Env: []string{fmt.Sprintf("%s=%d,%d", portableVar, pair[1], rights[1])}, Files: files,
		})
	}
	if err != nil {
		syscall.Close(pair[0])
		syscall.Close(rights[0])
		return nil, fmt.Errorf("cannot start the guardian: %w", err)
	}
	for _, fd := range []int{pair[0], rights[0]} {
		syscall.SetNonblock(fd, true) // so that a Close ends a Read
	}
	g.sock, g.rights = os.NewFile(uintptr(pair[0]), "guardian"), os.NewFile(uintptr(rights[0]), "rights")
	g.out = newOutbox(g.sock)
	go g.watch()
	return g, nil
}

func socketPair() (pair [2]int, err error) {
	syscall.ForkLock.RLock() // not every system can make them close-on-exec at once
	defer syscall.ForkLock.RUnlock()
	if pair, err = syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0); err == nil {
		syscall.CloseOnExec(pair[0])
		syscall.CloseOnExec(pair[1])
	}
	return pair, err
}

func (g *portableGuardian) watch() {
	over := false
	dec := json.NewDecoder(g.sock)
	for !over {
		var r portReport
		if dec.Decode(&r) != nil {
			break
		}
		switch {
		case r.Event == nil:
			g.answers <- r
		case r.Event.Kind == Gone:
			over = true
		default:
			if r.Why != 0 {
				r.Event.Err = r.Why
			}
			g.killing.Store(g.killing.Load() || r.Event.Kind == Killing)
			g.report(*r.Event)
		}
	}
	close(g.answers)
	for {
		_, err := syscall.Wait4(g.pid, nil, 0, nil)
		if err != syscall.EINTR {
			break
		}
	}
	g.mu.Lock()
	g.collected = true
	g.mu.Unlock()
	g.out.close()
	g.sock.Close()
	g.rights.Close()
	if g.command.Load() != 0 {
		if !over {
			g.takeOver()
		}
		g.report(Event{Kind: Gone, At: Now()})
	}
	close(g.gone)
	close(g.events)
}

// takeOver kills what can be found of the tree of a guardian that has ended before it.
func (g *portableGuardian) takeOver() {
	if !g.shot.Load() {
		g.report(Event{Kind: GuardianLost, At: Now()})
	}
	g.mu.Lock()
	tree := g.tree
	tree.inherit(g.pid)
	g.mu.Unlock()
	begun, nextStuck, gap := time.Now(), stuckAfter, passEvery
	for {
		left, denied := tree.kill()
		for {
			var ws syscall.WaitStatus
			if pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil); pid <= 0 && err != syscall.EINTR {
				break
			} else if int64(pid) == g.command.Load() {
				g.report(Event{Kind: Exited, At: Now(), Status: portStatus(ws)})
			}
		}
		if len(left) == 0 {
			return
		}
		if past := time.Since(begun); past >= nextStuck {
			nextStuck, gap = past+stuckEvery, passSlowest
			ev := Event{Kind: Stuck, At: Now(), Count: len(left), Pids: left[:min(16, len(left))]}
			if denied != 0 {
				ev.Err = denied
			}
			g.report(ev)
		}
		time.Sleep(gap)
	}
}

func (g *portableGuardian) report(ev Event) {
	if ev.Kind == Stuck {
		select {
		case g.events <- ev:
		default:
		}
		return
	}
	g.events <- ev
}

// Events delivers what happens after Start. It is closed after [Gone], or, without a command, with the guardian.
func (g *portableGuardian) Events() <-chan Event { return g.events }

// Pin hands copies of descriptors to the guardian, which holds them until the tree is empty, and returns when it has acknowledged them.
func (g *portableGuardian) Pin(fds []int) error {
	if len(fds) == 0 {
		return nil
	}
	if err := sendRights(g.rights, fds); err != nil {
		return fmt.Errorf("cannot hand the lock to the guardian: %w", err)
	}
	g.out.post(portOrder{Op: "pin", Count: len(fds)})
	_, err := g.answer(answerWithin)
	return err
}

func (g *portableGuardian) answer(within time.Duration) (portReport, error) {
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case r, ok := <-g.answers:
		if ok {
			return r, nil
		}
	case <-t.C:
	}
	return portReport{}, errors.New("the guardian has ended or does not answer")
}

// possiblePortable says why an isolation cannot be had on these systems. They have neither control groups nor PID namespaces.
func possiblePortable(i Isolation) error {
	switch i {
	case IsolateCgroup:
		return errors.New("control groups are of Linux alone")
	case IsolatePidns:
		return errors.New("PID namespaces are of Linux alone")
	default:
		return nil
	}
}

// Start runs the command and returns its pid. *StartError says why there is no command.
func (g *portableGuardian) Start(c Command, d Deadlines) (int, error) {
	if err := possiblePortable(c.Isolate); err != nil {
		return 0, &StartError{Path: c.Path, Isolate: err}
	}
	g.last = d
	g.out.post(portOrder{Op: "start", Deadlines: d, Command: &portCommand{
		Path: []byte(c.Path), Args: bytesOf(c.Args), Env: bytesOf(c.Env),
		StopSignal: c.StopSignal, Grace: c.Grace, Leftovers: c.Leftovers, OwnGroup: !g.shared,
	}})
	within := answerWithin
	if stop := min(d.StopAt, d.RunStopAt); stop != Never {
		within = min(within, max(0, time.Duration(stop-Now()))+confirmWithin)
	}
	r, err := g.answer(within)
	if err != nil {
		g.shoot()
		return 0, err
	}
	if r.Answer != "started" {
		return 0, &StartError{Path: c.Path, Errno: r.Errno, TooLate: r.Errno == 0, Fork: refused(r.Errno)}
	}
	g.mu.Lock()
	g.tree = newTracker(r.Pid, !g.shared)
	g.mu.Unlock()
	g.command.Store(int64(r.Pid))
	if tracksByLooking {
		go g.look()
	}
	if g.opt.DropInherited {
		dropInherited()
	}
	return r.Pid, nil
}

// look keeps what is known of the tree, for the case that its guardian is lost.
func (g *portableGuardian) look() {
	t := time.NewTicker(scanEvery)
	defer t.Stop()
	for {
		select {
		case <-g.gone:
			return
		case <-t.C:
			g.Descendants()
		}
	}
}

// Publish tells the guardian new deadlines.
func (g *portableGuardian) Publish(d Deadlines) {
	if d != g.last {
		g.last = d
		g.out.post(portOrder{Op: "deadlines", Deadlines: d})
	}
}

// Forward sends a signal to the command alone, unless the terminal has sent it to both.
func (g *portableGuardian) Forward(sig syscall.Signal) {
	if g.shared && (sig == syscall.SIGINT || sig == syscall.SIGQUIT) && foreground() {
		return
	}
	g.out.post(portOrder{Op: "forward", Signal: sig})
}

// Stop sends the stop signal to the command alone, at most once, and SIGCONT.
func (g *portableGuardian) Stop() { g.out.post(portOrder{Op: "stop"}) }

// Kill sends SIGKILL to the whole tree until it is empty, also where the guardian does not react. There is no way back.
func (g *portableGuardian) Kill() {
	g.out.post(portOrder{Op: "kill"})
	g.backup.Do(func() {
		go func() {
			t := time.NewTimer(aliveWithin)
			defer t.Stop()
			select {
			case <-g.gone:
			case <-t.C:
				if !g.killing.Load() {
					g.shoot()
				}
			}
		}()
	})
}

func (g *portableGuardian) shoot() {
	g.shot.Store(true)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.collected {
		syscall.Kill(g.pid, syscall.SIGKILL)
	}
}

// Close ends a guardian that has started no command.
func (g *portableGuardian) Close() { g.out.post(portOrder{Op: "close"}) }

// Tend does nothing here: a stopped guardian is continued by whoever stopped it.
func (g *portableGuardian) Tend() {}

// Descendants counts the living processes of the tree.
func (g *portableGuardian) Descendants() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.tree == nil || g.collected {
		return 0
	}
	return len(g.tree.list())
}

func sendRights(f *os.File, fds []int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = syscall.Sendmsg(int(fd), []byte{0}, syscall.UnixRights(fds...), nil, 0)
		return !errors.Is(sent, syscall.EAGAIN)
	})
	return errors.Join(err, sent)
}

// receiveRights waits for count descriptors, which the wrapper has sent before it says so.
func receiveRights(f *os.File, count int) (fds []int) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil
	}
	raw.Read(func(fd uintptr) bool {
		b, oob := make([]byte, 1), make([]byte, syscall.CmsgSpace(4*count))
		_, n, _, _, err := syscall.Recvmsg(int(fd), b, oob, 0)
		if errors.Is(err, syscall.EAGAIN) {
			return false
		}
		if all, err := syscall.ParseSocketControlMessage(oob[:n]); err == nil {
			for i := range all {
				if got, err := syscall.ParseUnixRights(&all[i]); err == nil {
					fds = append(fds, got...)
				}
			}
		}
		return true
	})
	for _, fd := range fds {
		syscall.CloseOnExec(fd)
	}
	return fds
}

func inherited(fd int) bool {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return err == nil && flags&unix.FD_CLOEXEC == 0
}

// dropInherited lets go of the command's descriptors: 0 and 1 become /dev/null, and what is inherited above 2 is closed.
func dropInherited() {
	if null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0); err == nil {
		for fd := range 2 {
			unix.Dup2(null, fd)
		}
		syscall.Close(null)
	}
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil || limit.Cur > 4096 {
		limit.Cur = 4096
	}
	for fd := 3; fd < int(limit.Cur); fd++ {
		if inherited(fd) {
			syscall.Close(fd)
		}
	}
}

// foreground says that our process group is the terminal's: its keys reach us and the command alike.
func foreground() bool {
	fd, err := syscall.Open("/dev/tty", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer syscall.Close(fd)
	group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	return err == nil && group == syscall.Getpgrp()
}
