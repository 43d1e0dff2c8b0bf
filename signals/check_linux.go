package signals

import (
	"crypto/rand"
	"math"
	"strings"
	"time"

	"github.com/underlease/underlease/signals/guard"
)

const socketPrefix = "@underlease/"

// NewSocket returns a new name for the place where a guardian answers [Ask]: 128 random bits, so that nobody can be there before it. It is a
// name of the abstract namespace (unix(7)): there is no file that could be left behind, and no credential in it.
func NewSocket() string { return socketPrefix + rand.Text() }

// Ask asks the guardian of a command how much time is left. The guardian answers by its own clock and page, also while the wrapper is
// stopped. It waits for no longer than a second. The error is an [*AskError].
func Ask(socket string) (Standing, error) {
	if !strings.HasPrefix(socket, socketPrefix) {
		return Standing{}, &AskError{"has another kind of name"}
	}
	a, why := guard.Ask(socket)
	switch why {
	case 0:
	case guard.AskedSlow:
		return Standing{}, &AskError{"does not answer"}
	case guard.AskedOther:
		return Standing{}, &AskError{"does not answer this user"}
	default:
		return Standing{}, &AskError{"is not there"}
	}
	s := Standing{Left: math.MaxInt64, Term: a.Term()}
	if a.Left != guard.Never {
		s.Left = time.Duration(a.Left)
	}
	switch a.State {
	case guard.Holding:
		s.Stage = StageHolding
	case guard.Draining:
		s.Stage = StageDraining
	case guard.Ending:
		s.Stage = StageStopping
	default:
		s.Stage = StageKilling
	}
	return s, nil
}

// Exact says that this executable knows which signals were ignored and blocked and which descriptors were closed when it was started, and
// passes that on to commands: it was linked with -E ulentry.
func Exact() bool { return guard.Exact() }
