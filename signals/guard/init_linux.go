package guard

import "os"

// Name is the guardian's whole command line, and the name that process lists show: another one than the wrapper's, so that a signal to all
// processes of that name does not reach it.
const Name = "ul-guard"

func init() {
	if len(os.Args) == 1 && os.Args[0] == Name {
		os.Exit(run())
	}
}
