//go:build linux

// Package churn makes life hard for the process that it is linked into: as long as that runs, garbage is collected and threads end, again
// and again, which is what could end a child that was forked with a parent-death signal by the wrong thread.
//
// It is for the soak test of the tree alone: a test binary imports it, and nothing else does. As its path sorts before that of
// package guard, and it needs nothing that guard does not need, it is initialised before the guardian diverts. So it works in
// guardians too, which have neither arguments nor an environment: there it looks at the environment of the parent.
package churn

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
)

// Variable asks for it: in the environment of a process, or of a guardian's parent.
const Variable = "UL_TEST_CHURN=1"

const (
	threads = 4          // that end in one round
	pause   = 20_000_000 // nanoseconds between two rounds: the load stays small
)

func init() {
	guardian := len(os.Args) == 1 && os.Args[0] == "ul-guard"
	if !asked("self") && (!guardian || !asked(strconv.Itoa(os.Getppid()))) {
		return
	}
	go func() {
		for {
			runtime.GC()
			for range threads {
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					runtime.LockOSThread() // and never unlocked: the thread ends with this function
				}()
				<-ended
			}
			ts := syscall.NsecToTimespec(pause)
			_ = syscall.Nanosleep(&ts, nil) // interrupted: the next round comes sooner
		}
	}()
}

func asked(pid string) bool {
	env, _ := os.ReadFile("/proc/" + pid + "/environ") // unreadable: nobody asks
	from := 0
	for i, c := range env {
		if c == 0 {
			if string(env[from:i]) == Variable {
				return true
			}
			from = i + 1
		}
	}
	return false
}
