package cmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

// reportVersion changes when a reader of the report has to. New fields do not change it.
const reportVersion = 1

// report is the object that --report writes. Its fields are always there; what is not known is null.
type report struct {
	Version  int            `json:"version"`
	Outcome  runner.Outcome `json:"outcome"`
	Reason   string         `json:"reason"`    // for people; empty when all went well
	ExitCode int            `json:"exit_code"` // 128+n where Signal is there
	Signal   *string        `json:"signal"`    // the command was ended by it, and so were we

	Lease     string         `json:"lease"`
	Namespace string         `json:"namespace"`
	Slot      *int           `json:"slot"`
	Term      *backends.Term `json:"term"`
	RunID     *string        `json:"run_id"`
	Holder    string         `json:"holder"`
	Store     string         `json:"store"` // without credentials

	Started  bool    `json:"started"`   // whether a command ran
	WaitedMs int64   `json:"waited_ms"` // until the lease was ours, or until we gave up
	HeldMs   int64   `json:"held_ms"`   // from the acquisition to its end
	RanMs    int64   `json:"ran_ms"`    // from the start of the command to the end of its last process
	Renewals int     `json:"renewals"`
	Released bool    `json:"released"` // the store confirmed it
	Busy     *busy   `json:"busy"`     // who was in the way
	Done     *done   `json:"done"`     // the success that made this run needless
	Previous *string `json:"previous"` // how the last holder ended: none, ok, failed, unknown
}

type busy struct {
	Holder string        `json:"holder"`
	Slot   int           `json:"slot"`
	Term   backends.Term `json:"term"`
	Since  *time.Time    `json:"since"`
	LeftMs *int64        `json:"left_ms"` // null: until its holder ends
	Kept   bool          `json:"kept"`    // its holder has ended; what is left is the rest of its hold
}

func (p *program) reportOf(r runner.Result, code int) report {
	out := report{
		Version: reportVersion, Outcome: r.Outcome, Reason: p.reasonOf(r), ExitCode: code,
		Lease: p.lease, Namespace: p.s.namespace, Holder: p.s.holder,
		Started: r.Started, WaitedMs: r.Waited.Milliseconds(), HeldMs: r.Held.Milliseconds(), RanMs: r.Ran.Milliseconds(),
		Renewals: r.Renewals, Released: r.Released,
	}
	switch {
	case p.store != nil:
		out.Store = p.store.Address
	case p.settled:
		out.Store = mask(p.s.backend)
	}
	if r.Signal != 0 {
		out.Signal = new(signals.Name(r.Signal))
	}
	if g := r.Grant; g.Term != 0 {
		out.Slot, out.Term = &g.Slot, &g.Term
		out.RunID, out.Previous = new(r.RunID()), new(runner.Previous(g.Previous))
	}
	if b := r.Busy; b != nil {
		out.Busy = &busy{Holder: b.Holder, Slot: b.Slot, Term: b.Term, Kept: b.Kept}
		if !b.Since.IsZero() {
			out.Busy.Since = new(b.Since.UTC())
		}
		if b.Left != backends.Forever {
			out.Busy.LeftMs = new(b.Left.Milliseconds())
		}
	}
	out.Done = p.doneOf(r.Done)
	return out
}

// reportFile is a report that can be written.
type reportFile struct {
	path   string   // of a regular file, which is replaced in one step where that can be; or
	direct *os.File // something else, which is written to
}

// openReport checks that a report can be written to path, without a trace where it will be a file. /dev/stdout and the
// like mean our own descriptor, whatever it is open on: to open them anew would write over what others have written.
func openReport(path string) (*reportFile, error) {
	if fd, ok := ownDescriptor(path); ok {
		copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if flags, err := unix.FcntlInt(uintptr(copied), unix.F_GETFL, 0); err != nil || flags&unix.O_ACCMODE == unix.O_RDONLY {
			_ = unix.Close(copied)
			return nil, fmt.Errorf("%s is not open for writing", path)
		}
		return &reportFile{direct: os.NewFile(uintptr(copied), path)}, nil
	}
	p, err := locate(path)
	if err != nil {
		return nil, err
	}
	defer p.close()
	kind := p.stat.Mode & unix.S_IFMT
	switch {
	case !p.there:
	case kind == unix.S_IFDIR:
		return nil, fmt.Errorf("%s is a directory: name a file", path)
	case p.magic, kind != unix.S_IFREG:
		// The output of another process, where it is a file, has more in it than our report.
		f, err := p.open(unix.O_APPEND)
		if err != nil {
			return nil, err
		}
		return &reportFile{direct: f}, nil
	default:
		if err := p.trust("a file in a directory that everybody may write to"); err != nil {
			return nil, err
		}
		f, err := p.open(0)
		if err != nil {
			return nil, err
		}
		_ = f.Close() // nothing was written
	}
	tmp, name, err := p.createTemp()
	switch {
	case err == nil:
		_ = tmp.Close() // nothing was written
		if err := unix.Unlinkat(p.dir, name, 0); err != nil {
			return nil, fmt.Errorf("cannot write into the directory of %s: %w", path, err)
		}
	case !p.there || !isDenied(err):
		return nil, err
	}
	return &reportFile{path: path}, nil
}

// ownDescriptor returns the descriptor of ours that path names.
func ownDescriptor(path string) (int, bool) {
	switch path {
	case "/dev/stdout":
		return 1, true
	case "/dev/stderr":
		return 2, true
	}
	for _, dir := range []string{"/dev/fd/", "/proc/self/fd/"} {
		if number, ok := strings.CutPrefix(path, dir); ok {
			fd, err := strconv.Atoi(number)
			return fd, err == nil && fd >= 0
		}
	}
	return 0, false
}

func (f *reportFile) write(r report) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(r); err != nil {
		return err
	}
	if f.direct != nil {
		defer func() { _ = f.direct.Close() }()                       // the write has been checked
		_ = f.direct.SetWriteDeadline(time.Now().Add(reportPatience)) //nolint:forbidigo // a deadline of package os is a time of day
		_, err := f.direct.Write(b.Bytes())
		return err
	}
	// The command may have made its directory anew since the start: what counts is what is there now.
	p, err := locate(f.path)
	if err != nil {
		return err
	}
	defer p.close()
	if p.there {
		if p.magic || p.stat.Mode&unix.S_IFMT != unix.S_IFREG {
			return fmt.Errorf("%s is not the regular file that it was", f.path)
		}
		if err := p.trust("a file in a directory that everybody may write to"); err != nil {
			return err
		}
	}
	return p.replace(b.Bytes())
}

// reportPatience is how long a pipe that nobody reads may keep a run from its end, where the descriptor has deadlines.
const reportPatience = time.Second
