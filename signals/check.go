package signals

import (
	"syscall"
	"time"
)

// Standing is what a guardian says to who asks.
type Standing struct {
	Left  time.Duration // until the stop signal; the largest one for never
	Stage Stage
	Term  string // of the lease; a list of them where there are several
}

// Stage is how far a run is on its way to its end.
type Stage int

// The stages, in their order.
const (
	StageHolding  Stage = iota + 1
	StageDraining       // a signal from outside asked the command to finish
	StageStopping       // we sent it the stop signal, or it is due
	StageKilling        // the kill has begun
)

// AskError says why a guardian could not be asked.
type AskError struct{ what string }

func (e *AskError) Error() string { return "the guardian " + e.what }

// Ends says that a signal is a request to finish. Others, such as HUP for "read your settings again", are none.
func Ends(sig syscall.Signal) bool {
	switch sig {
	case syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT:
		return true
	default:
		return false
	}
}
