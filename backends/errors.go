package backends

import (
	"errors"
	"fmt"
	"time"
)

// The kinds of errors. A backend maps every error of its library to one of them in one function.
var (
	// ErrBusy says that the lease is held by another. The error is a [*BusyError].
	ErrBusy = errors.New("busy")
	// ErrLost says that the store knows this grant no more: it expired, was taken or was deleted. It is a fact, not a doubt.
	ErrLost = errors.New("lost")
	// ErrUnavailable says that the store gave no usable answer: what was asked may or may not have been done.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnreached is an ErrUnavailable where no connection came about: what was asked has certainly not been done.
	ErrUnreached = fmt.Errorf("%w: no connection", ErrUnavailable)
	// ErrDenied says that the store refused for lack of a right.
	ErrDenied = errors.New("permission denied")
	// ErrBroken says that the store broke the contract: a damaged, foreign or newer record.
	ErrBroken = errors.New("broken")
	// ErrNoRecord says that there is no such record.
	ErrNoRecord = errors.New("no such record")
	// ErrConflict says that the record has another version than the one compared with.
	ErrConflict = errors.New("another version of the record is there")
)

// BusyError says who holds the lease. It is [ErrBusy].
type BusyError struct {
	Namespace, Lease string

	Holder string        // of the slot that will be free first
	Slot   int           // that slot
	Term   Term          // its term
	Since  time.Time     // when it was acquired, by the store's clock
	Left   time.Duration // until it is free unless renewed; [Forever] where only its holder's end frees it
	Kept   bool          // its holder has ended; the slot stays taken until the end of its hold
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("%q is held by %s", Display(e.Namespace, e.Lease), e.Holder)
}

// Is reports whether target is [ErrBusy].
func (e *BusyError) Is(target error) bool { return target == ErrBusy }

// ConfigError says that a store's URL or settings cannot work. Nothing was asked of the store.
type ConfigError struct {
	Text string // what is wrong, which value, and what would be right
	Hint string // what to do, or empty
}

func (e *ConfigError) Error() string { return e.Text }

// Configf returns a [*ConfigError].
func Configf(hint, format string, args ...any) error {
	return &ConfigError{Text: fmt.Sprintf(format, args...), Hint: hint}
}

// Classified reports whether an error has its kind already: it says that a store's settings cannot work, that the store gave no answer,
// refused or broke the contract, or that a grant is lost.
func Classified(err error) bool {
	if _, ok := errors.AsType[*ConfigError](err); ok {
		return true
	}
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrDenied) || errors.Is(err, ErrBroken) || errors.Is(err, ErrLost)
}

// storeError is an error of a kind, with a text for people.
type storeError struct {
	kind, cause error
	text        string
}

func (e *storeError) Error() string {
	switch {
	case e.cause == nil:
		return e.text
	case e.text == "":
		return e.cause.Error()
	default:
		return e.text + ": " + e.cause.Error()
	}
}

func (e *storeError) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}

// Lost returns an [ErrLost] with a text that says how it was noticed.
func Lost(cause error, format string, args ...any) error {
	return &storeError{kind: ErrLost, cause: cause, text: fmt.Sprintf(format, args...)}
}

// Unavailable returns an [ErrUnavailable] with a text that names the address or the file.
func Unavailable(cause error, format string, args ...any) error {
	return &storeError{kind: ErrUnavailable, cause: cause, text: fmt.Sprintf(format, args...)}
}

// Unreached returns an [ErrUnreached] with a text that names the address.
func Unreached(cause error, format string, args ...any) error {
	return &storeError{kind: ErrUnreached, cause: cause, text: fmt.Sprintf(format, args...)}
}

// Denied returns an [ErrDenied] with a text that names the right that is missing.
func Denied(cause error, format string, args ...any) error {
	return &storeError{kind: ErrDenied, cause: cause, text: fmt.Sprintf(format, args...)}
}

// Broken returns an [ErrBroken] with a text that names the record.
func Broken(cause error, format string, args ...any) error {
	return &storeError{kind: ErrBroken, cause: cause, text: fmt.Sprintf(format, args...)}
}

// WithHint adds to err what a person can do about it. The kind of err stays.
func WithHint(err error, format string, args ...any) error {
	return &hinted{error: err, hint: fmt.Sprintf(format, args...)}
}

type hinted struct {
	error
	hint string
}

func (h *hinted) Unwrap() error { return h.error }

// Hint returns what a person can do about err, or nothing.
func Hint(err error) string {
	if h, ok := errors.AsType[*hinted](err); ok {
		return h.hint
	}
	if c, ok := errors.AsType[*ConfigError](err); ok {
		return c.Hint
	}
	return ""
}
