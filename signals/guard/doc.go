// Package guard is the guardian: the process that is the parent of the command, and that kills the command and everything
// it started at the deadline, also when the wrapper is stopped, frozen, out of memory or gone.
//
// # Promise
//
//   - At the instant of a kill (see [Page]) every process of the tree is sent SIGKILL, again and again, until the kernel
//     says that no child is left (ECHILD). As a subreaper the guardian inherits what loses its parent, so setsid and
//     double forks do not escape it.
//   - A kill that has begun is not taken back, whatever the wrapper publishes later.
//   - A process outside of the tree is not signalled: a process is opened (pidfd), then its ancestry is read, then it is
//     signalled through the descriptor. There is one exception, in a kill alone: where no descriptor is to be had (kernel
//     before 5.3, no more open files), a process is signalled by its number right after its ancestry was read, and a
//     stranger would have to get that number in between. The command and its group need no descriptor: as long as the
//     command is not collected, its number cannot pass to another.
//   - Without the wrapper the command gets its stop signal at once, and the tree is dead after the grace at the latest.
//
// # How
//
// The wrapper executes its own binary as "ul-guard", with no argument and no environment. This package's init function
// diverts, before heavier packages initialise; that is why it imports little (no x/sys, no fmt). The same function starts
// the guardian in a wrapper whose command line wants one, so that both initialise side by side. The guardian finds its
// control socket among its descriptors, gets the page of deadlines with the first message, forks the command when it is
// told to, and only then leaves the caller's session, so that the command stays where a shell has put it while ^C, ^Z and
// signals to the job do not reach the guardian.
//
// It is one loop around one ppoll: a timer on CLOCK_BOOTTIME, the control socket, a pidfd of the wrapper, a pipe of signals
// and that of the canary. The command's end comes as SIGCHLD. It has no Go timer and no netpoller, and nothing else runs
// beside the loop but, once the wrapper is gone, a goroutine that tells people so and may block; while nothing happens it
// does not wake up. The timer only wakes it up: what to do follows from the clock and the page, which every turn looks at,
// and a turn neither waits for a process nor takes in more than a few.
//
// Whoever asks how much time is left gets one packet from an abstract socket that is open while the command runs: an answer that
// is computed at that moment, to nobody but the same user, root and the command's own descendants (check_linux.go).
//
// In executables that are linked with -E ulentry the command starts with the signals, descriptors and limits that the wrapper was
// started with, and not with what the Go runtime makes of them (entry_linux.go).
//
// # Limits
//
// Wrapper and guardian killed at the same instant: the command dies (PR_SET_PDEATHSIG), what it started does not. A process
// that became another user cannot be signalled by an unprivileged guardian; it is reported as stuck and never counted as
// gone. Work that was handed to a server (a container engine, ssh, at) is not part of the tree. Without /proc only the
// command, its process group and what the kernel hands over can be reached.
package guard
