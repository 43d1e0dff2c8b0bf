package cmd

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/runner"
)

const prefix = "underlease: "

// The bounds of what waits to be written to standard error. A reader that is slower than that loses lines, and is told
// how many; nobody here ever waits for it, because the loop that has to reach a kill in time writes log lines too.
const (
	voiceLines = 512
	voiceBytes = 256 << 10
	voiceFlush = time.Second // how long Close waits for the reader
)

// voice is standard error: whatever this program says goes through it. Its methods never block.
//
// Lines are queued and written by a goroutine of its own, which starts with the first of them. Where standard error is
// closed, or its reader has gone, what is said is lost without a word.
type voice struct {
	out *os.File

	mu       sync.Mutex
	queue    [][]byte
	size     int // bytes in queue
	dropped  int // lines, since the reader was last told
	running  bool
	shut     bool
	ready    chan struct{} // capacity 1: there is something in queue, or shut is set
	finished chan struct{} // closed when the goroutine has ended

	drawn bool // the last thing queued was a waiting line, which has no end
}

func newVoice(out *os.File) *voice {
	return &voice{out: out, ready: make(chan struct{}, 1), finished: make(chan struct{})}
}

// Write queues one line. It implements [io.Writer] and always succeeds.
func (v *voice) Write(p []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.drawn {
		v.put([]byte(eraseLine))
		v.drawn = false
	}
	v.put(bytes.Clone(p))
	return len(p), nil
}

// draw shows s in place of the last line that was drawn; empty erases it.
func (v *voice) draw(s string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if s == "" && !v.drawn {
		return
	}
	v.put([]byte(eraseLine + s))
	v.drawn = s != ""
}

const eraseLine = "\r\x1b[K"

func (v *voice) put(p []byte) {
	if v.shut || v.out == nil {
		return
	}
	if len(v.queue) >= voiceLines || v.size+len(p) > voiceBytes {
		v.dropped++
		return
	}
	v.queue = append(v.queue, p)
	v.size += len(p)
	if !v.running {
		v.running = true
		go v.pump()
	}
	v.wake()
}

func (v *voice) wake() {
	select {
	case v.ready <- struct{}{}:
	default:
	}
}

func (v *voice) pump() {
	defer close(v.finished)
	for {
		p, ok := v.take()
		if !ok {
			return
		}
		v.emit(p)
	}
}

// take returns the next line, or a word on those that were dropped once there is room again, or false at the end.
func (v *voice) take() ([]byte, bool) {
	for {
		v.mu.Lock()
		switch {
		case len(v.queue) > 0:
			p := v.queue[0]
			v.queue = v.queue[1:]
			v.size -= len(p)
			v.mu.Unlock()
			return p, true
		case v.dropped > 0:
			p := fmt.Appendf(nil, "%swarn log lines dropped count=%d\n", prefix, v.dropped)
			v.dropped = 0
			v.mu.Unlock()
			return p, true
		case v.shut:
			v.mu.Unlock()
			return nil, false
		}
		v.mu.Unlock()
		<-v.ready
	}
}

// emit writes p with the bare system call: [os.File.Write] would end this program by SIGPIPE on descriptor 2, and the
// command would be killed because nobody reads a log.
func (v *voice) emit(p []byte) {
	raw, err := v.out.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Write(func(fd uintptr) bool {
		for len(p) > 0 {
			n, err := syscall.Write(int(fd), p)
			switch {
			case err == syscall.EINTR:
			case err == syscall.EAGAIN:
				return false // another process made the description non-blocking: wait for room
			case err != nil:
				return true
			default:
				p = p[n:]
			}
		}
		return true
	})
}

// close lets the reader have what is queued, for at most a second. Later words are lost.
func (v *voice) close() {
	v.draw("")
	v.mu.Lock()
	v.shut = true
	running := v.running
	v.mu.Unlock()
	if !running {
		return
	}
	v.wake()
	t := time.NewTimer(voiceFlush)
	defer t.Stop()
	select {
	case <-v.finished:
	case <-t.C:
	}
}

// say writes one line and, where there is one, its hint.
func (v *voice) say(line, hint string) {
	var b bytes.Buffer
	b.WriteString(prefix + harmless(line) + "\n")
	if hint != "" {
		b.WriteString(prefix + "hint: " + harmless(hint) + "\n")
	}
	_, _ = v.Write(b.Bytes())
}

// harmless writes whatever could move a cursor, end a line or turn the direction of writing as an escape.
func harmless(s string) string {
	if isHarmless(s) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, r)
		case !harmlessRune(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return b.String()
}

func isHarmless(s string) bool {
	for _, r := range s {
		if !harmlessRune(r) {
			return false
		}
	}
	return utf8.ValidString(s)
}

func harmlessRune(r rune) bool {
	return r >= ' ' && r < 0x7f || r >= 0xa0 && unicode.IsPrint(r)
}

// logFormat is how log lines are written.
type logFormat string

// The values of --log-format.
const (
	formatText logFormat = "text"
	formatJSON logFormat = "json"
)

// newLogger returns a logger that writes lines of the form "underlease: LEVEL MESSAGE key=value" to w, or JSON objects.
// A duration is written as 1.5s in text, and as an integer of milliseconds under its key with _ms in JSON; one that
// has no end is "forever" and null.
func newLogger(w io.Writer, format logFormat, least slog.Level) *slog.Logger {
	if format == formatJSON {
		return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: least, ReplaceAttr: jsonAttr}))
	}
	shared := &textOutput{w: w}
	inner := slog.NewTextHandler(&shared.attrs, &slog.HandlerOptions{Level: least, ReplaceAttr: textAttr})
	return slog.New(&textHandler{inner: inner, out: shared})
}

func jsonAttr(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindDuration:
		a.Key += "_ms"
		if d := a.Value.Duration(); d == runner.Forever {
			a.Value = slog.AnyValue(nil)
		} else {
			a.Value = slog.Int64Value(d.Milliseconds())
		}
	case slog.KindString:
		a.Value = slog.StringValue(harmless(a.Value.String())) // JSON itself would let DEL and C1 pass
	case slog.KindAny:
		if err, ok := a.Value.Any().(error); ok {
			a.Value = slog.StringValue(harmless(err.Error()))
		} else if raw, err := json.Marshal(a.Value.Any()); err == nil && !isHarmless(string(raw)) {
			a.Value = slog.StringValue(harmless(string(raw)))
		}
	}
	return a
}

func textAttr(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey || a.Key == slog.MessageKey) {
		return slog.Attr{}
	}
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(runner.Short(a.Value.Duration()))
	}
	return a
}

// textOutput is where the handlers that were derived from one another meet.
type textOutput struct {
	mu    sync.Mutex
	attrs bytes.Buffer // of the record in hand
	w     io.Writer
}

// textHandler puts our own head before the attributes as [slog.TextHandler] writes them.
type textHandler struct {
	inner slog.Handler
	out   *textOutput
}

func (h *textHandler) Enabled(ctx context.Context, l slog.Level) bool { return h.inner.Enabled(ctx, l) }

func (h *textHandler) Handle(ctx context.Context, r slog.Record) error {
	o := h.out
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attrs.Reset()
	if err := h.inner.Handle(ctx, r); err != nil {
		return err
	}
	line := prefix + strings.ToLower(r.Level.String()) + " " + harmless(r.Message)
	if o.attrs.Len() > 1 {
		line += " "
	}
	_, err := io.WriteString(o.w, line+o.attrs.String())
	return err
}

func (h *textHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &textHandler{inner: h.inner.WithAttrs(attrs), out: h.out}
}

func (h *textHandler) WithGroup(name string) slog.Handler {
	return &textHandler{inner: h.inner.WithGroup(name), out: h.out}
}

// terminalWidth returns the columns of the terminal that f is, or 0 where it is none that can rewrite a line.
func terminalWidth(f *os.File, term string) int {
	if f == nil || term == "dumb" {
		return 0
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return 0
	}
	width := 0
	_ = raw.Control(func(fd uintptr) {
		if _, err := unix.IoctlGetTermios(int(fd), termiosRequest); err != nil {
			return
		}
		width = 80
		if size, err := unix.IoctlGetWinsize(int(fd), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			width = int(size.Col)
		}
	})
	return width
}

// fit cuts s to columns, so that a terminal never wraps it. Every rune counts as one column: names in wide scripts are
// cut late rather than early, by the bytes that they have more.
func fit(s string, columns int) string {
	if utf8.RuneCountInString(s) < columns {
		return s
	}
	r := []rune(s)
	return string(r[:max(columns-2, 0)]) + "…"
}
