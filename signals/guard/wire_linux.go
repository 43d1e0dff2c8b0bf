package guard

import (
	"syscall"
	"unsafe"
)

// Messages are packets of a SOCK_SEQPACKET pair between two processes of one executable, so their layout is this file and no more.

// Op is what the wrapper asks of the guardian.
type Op uint32

// What the wrapper asks.
const (
	OpHello   Op = iota + 1 // first, with the page; Arg is 1 where the command shares the caller's process group
	OpPin                   // with descriptors; answered by [Pinned]
	OpStart                 // with the sealed command, and its control group if there is one; answered by [Started] or [Refused]
	OpLook                  // a deadline came closer, or a kill was ordered: read the page
	OpForward               // Arg: signal for the command alone
	OpStop                  // the stop signal, if it has not been sent, for the command alone
	OpClose                 // end, if no command was started
	OpResume                // Arg: the stop of the command, counted, that the wrapper has followed and that is over
)

// magic begins the first message, so that the guardian knows its socket among inherited ones.
const magic = 0x756c2d6775617264 // "ul-guard"

// Order is a message to the guardian.
type Order struct {
	Op  Op
	Arg int32
}

type order struct {
	magic uint64
	Order
}

const orderSize = int(unsafe.Sizeof(order{}))

func parseOrder(b []byte) (Order, bool) {
	var o order
	if copy(unsafe.Slice((*byte)(unsafe.Pointer(&o)), orderSize), b) != orderSize || o.magic != magic {
		return Order{}, false
	}
	return o.Order, true
}

// Send gives an order, without waiting: EAGAIN where the guardian does not read. Descriptors are copied to it.
func Send(sock int, o Order, fds ...int) syscall.Errno {
	m := order{magic, o}
	return send(sock, unsafe.Slice((*byte)(unsafe.Pointer(&m)), orderSize), fds...)
}

// Kind is what the guardian reports. The first seven are those of signals.EventKind, in their order.
type Kind uint32

// What the guardian reports.
const (
	Exited Kind = iota + 1
	Leftover
	Stopping
	Killing
	Stuck
	_ // the wrapper's own finding
	Gone

	Pinned  Kind = iota + 100 // the descriptors are held
	Started                   // Pid
	Refused                   // Errno; zero: too late
	Ready                     // from a namespace's first process: it is set up
	Halted                    // the command was stopped: Status; Count of its stops
)

// Why is a reason, one of signals.Why.
type Why uint32

// The reasons, in the order of signals.Why.
const (
	WhyNone Why = iota
	WhyLease
	WhyMaxRun
	WhyDrain
	WhyOrder
	WhyOrphan
	WhyLeftover
)

// MaxPids is how many processes a report names at most.
const MaxPids = 16

// Report is a message from the guardian.
type Report struct {
	Kind   Kind
	Why    Why
	At     int64
	Status syscall.WaitStatus
	Errno  syscall.Errno
	Killed uint32 // 1: leftovers were killed
	Note   uint32 // Started: 1: the control group is in use. Refused: 1: it is the isolation that cannot be had. Exited in a namespace: 1: nothing was left
	Pid    int32
	Count  int32
	Named  int32
	Pids   [MaxPids]int32
	States [MaxPids]byte // of Pids
}

// ReportSize is the length of a report.
const ReportSize = int(unsafe.Sizeof(Report{}))

func (r *Report) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(r)), ReportSize) }

// ParseReport reads a report; false where it is none.
func ParseReport(b []byte) (r Report, ok bool) {
	ok = copy(r.bytes(), b) == ReportSize
	r.Named = min(r.Named, MaxPids)
	return r, ok
}

func (r *Report) name(s Survey) {
	r.Count, r.Named = int32(s.Count), int32(len(s.Pids))
	for i, p := range s.Pids {
		r.Pids[i] = int32(p)
	}
	copy(r.States[:], s.States)
}

// Command is what is to be run. It travels in sealed memory, because it may be larger than any message and must appear in no
// process list.
type Command struct {
	Path       string
	Args       []string
	Env        []string
	StopSignal syscall.Signal
	Grace      int64
	Leftovers  Leftovers
	Isolation  Isolation
	Socket     string // where it answers a check, or empty
	Term       string // that it tells then
	Entry      Entry  // how the wrapper was started
}

// Isolation is what holds the tree together.
type Isolation uint32

// What was asked for.
const (
	IsolateTree   Isolation = iota
	IsolateCgroup           // in the control group that comes with the command, or not at all
	IsolateAnyway           // in that control group if the kernel lets us
	IsolatePidns
)

// Leftovers is what becomes of background processes.
type Leftovers uint32

// In the order of the values of signals.Leftovers.
const (
	LeftoversKill Leftovers = iota
	LeftoversWait
	LeftoversIgnore
)

// header begins the sealed memory; the strings follow, each with its length in four bytes: path, socket, term, arguments, environment.
type header struct {
	grace             int64
	args, env         int64
	signal, leftovers uint32
	isolation, _      uint32
	entry             Entry
}

const headerSize = int(unsafe.Sizeof(header{}))

// Seal writes the command into sealed memory and returns its descriptor.
func (c *Command) Seal() (int, syscall.Errno) {
	size := headerSize + 4 + len(c.Path) + 4 + len(c.Socket) + 4 + len(c.Term)
	for _, l := range [][]string{c.Args, c.Env} {
		for _, s := range l {
			size += 4 + len(s)
		}
	}
	h := header{c.Grace, int64(len(c.Args)), int64(len(c.Env)), uint32(c.StopSignal), uint32(c.Leftovers), uint32(c.Isolation), 0, c.Entry}
	b := append(make([]byte, 0, size), unsafe.Slice((*byte)(unsafe.Pointer(&h)), headerSize)...)
	put := func(s string) {
		n := len(s)
		b = append(append(b, byte(n), byte(n>>8), byte(n>>16), byte(n>>24)), s...)
	}
	put(c.Path)
	put(c.Socket)
	put(c.Term)
	for _, s := range c.Args {
		put(s)
	}
	for _, s := range c.Env {
		put(s)
	}
	fd, e := memfd("ul-command")
	if e != 0 {
		return -1, e
	}
	for rest := b; len(rest) > 0 && e == 0; {
		n, err := syscall.Write(fd, rest)
		switch {
		case err == nil:
			rest = rest[n:]
		case err != syscall.EINTR:
			e, _ = err.(syscall.Errno)
		}
	}
	if e == 0 {
		e = seal(fd, sealAll)
	}
	if e != 0 {
		syscall.Close(fd)
		return -1, e
	}
	return fd, 0
}

// unseal reads a command. Its strings live in the returned mapping.
func unseal(fd int) (c Command, mapped []byte, ok bool) {
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil || st.Size < int64(headerSize)+4 {
		return c, nil, false
	}
	b, err := syscall.Mmap(fd, 0, int(st.Size), syscall.PROT_READ, syscall.MAP_PRIVATE)
	if err != nil {
		return c, nil, false
	}
	h := (*header)(unsafe.Pointer(&b[0]))
	rest := b[headerSize:]
	get := func() string {
		n := int(rest[0]) | int(rest[1])<<8 | int(rest[2])<<16 | int(rest[3])<<24
		s := rest[4 : 4+n]
		rest = rest[4+n:]
		return unsafe.String(unsafe.SliceData(s), n)
	}
	c = Command{
		Path: get(), Socket: get(), Term: get(), Args: make([]string, h.args), Env: make([]string, h.env),
		StopSignal: syscall.Signal(h.signal), Grace: h.grace, Leftovers: Leftovers(h.leftovers),
		Isolation: Isolation(h.isolation), Entry: h.entry,
	}
	for i := range c.Args {
		c.Args[i] = get()
	}
	for i := range c.Env {
		c.Env[i] = get()
	}
	return c, b, true
}
