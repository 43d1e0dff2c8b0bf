package guard

import (
	"math"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Never is the instant of what does not happen.
const Never int64 = math.MaxInt64

// Deadlines are the instants at which the guardian acts by itself; signals.Deadlines says what each of them means.
type Deadlines struct {
	StopAt, KillAt       int64
	RunStopAt, RunKillAt int64
	DrainKillAt          int64
}

// Page is the memory that wrapper and guardian share. The wrapper writes the deadlines, each side latches its own kill.
//
// The deadlines exist twice. The writer fills the copy that is not in force and then counts Generation up, so that a writer which is
// stopped half-way, for ever perhaps, never keeps the reader from a whole set of deadlines.
type Page struct {
	generation atomic.Uint64 // its lowest bit says which copy is in force
	copies     [2][5]atomic.Int64

	ordered atomic.Int64 // by the wrapper: when it ordered the kill; 0 for not yet. Never taken back
	killing atomic.Int64 // by the guardian: when its kill began; 0 for not yet. Never taken back
	beat    atomic.Int64 // by the guardian: its latest sign of life during a kill
	canary  atomic.Int64 // by the guardian: pid of a child of its own that is not of the tree; 0 for none
	top     atomic.Int64 // by the guardian: pid of the first process of the tree's namespace, itself not of the tree; 0 for none

	draining atomic.Int64 // by the wrapper: when a signal from outside first asked the command to finish; 0 for not yet
}

const pageSize = 4096

// NewPage makes a page, with every deadline at [Never], and returns its descriptor for the guardian.
func NewPage() (*Page, int, syscall.Errno) {
	fd, e := memfd("ul-page")
	if e != 0 {
		return nil, -1, e
	}
	p, e := (*Page)(nil), syscall.Errno(0)
	if err := syscall.Ftruncate(fd, pageSize); err != nil {
		e, _ = err.(syscall.Errno)
	}
	if e == 0 {
		e = seal(fd, sealSize) // nobody can make it shorter under us
	}
	if e == 0 {
		p, e = mapPage(fd)
	}
	if e != 0 {
		syscall.Close(fd)
		return nil, -1, e
	}
	p.Write(Deadlines{Never, Never, Never, Never, Never})
	return p, fd, 0
}

func mapPage(fd int) (*Page, syscall.Errno) {
	b, err := syscall.Mmap(fd, 0, pageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		e, _ := err.(syscall.Errno)
		return nil, e
	}
	return (*Page)(unsafe.Pointer(&b[0])), 0
}

// Unmap gives the memory back. The page must not be used any more.
func (p *Page) Unmap() {
	syscall.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(p)), pageSize))
}

// Write replaces the deadlines. There is one writer.
func (p *Page) Write(d Deadlines) {
	g := p.generation.Load() + 1
	c := &p.copies[g&1]
	for i, at := range [...]int64{d.StopAt, d.KillAt, d.RunStopAt, d.RunKillAt, d.DrainKillAt} {
		c[i].Store(at)
	}
	p.generation.Store(g)
}

// Read returns one whole set of deadlines.
func (p *Page) Read() Deadlines {
	for {
		g := p.generation.Load()
		c := &p.copies[g&1]
		d := Deadlines{c[0].Load(), c[1].Load(), c[2].Load(), c[3].Load(), c[4].Load()}
		if p.generation.Load() == g {
			return d
		}
	}
}

// Order latches the wrapper's order to kill.
func (p *Page) Order(now int64) { p.ordered.CompareAndSwap(0, now) }

// Drain notes that a signal from outside asks the command to finish.
func (p *Page) Drain(now int64) { p.draining.CompareAndSwap(0, now) }

// Killing returns when the guardian's kill began and when it last showed a sign of life in it; zeros before.
func (p *Page) Killing() (since, beat int64) { return p.killing.Load(), p.beat.Load() }

// Top returns the pid of the first process of the tree's namespace, or 0 where the tree is in none of its own.
func (p *Page) Top() int { return int(p.top.Load()) }

// Canary returns the pid of the child of the guardian that does not belong to the tree, or 0.
func (p *Page) Canary() int { return int(p.canary.Load()) }
