//go:build linux

// Command job is what the proofs run under a lease: a command that says, in stamps, when it was alive.
//
//	job DIR DURATION [WORD...]
//
// It writes its stamps into DIR until DURATION is over, and its term to standard output once it has begun. The words:
//
//	stubborn   ignore SIGTERM
//	obedient   end at SIGTERM as when DURATION is over
//	tree       start descendants that stamp too, ignore SIGTERM and live for a minute: a background process, one in a
//	           session of its own, and one whose parent ends at once
package main

import (
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/underlease/underlease/proof/stamps"
)

// beatEvery is the time between two stamps.
const beatEvery = 5 * time.Millisecond

const (
	leaf = "-leaf" // a descendant
	fork = "-fork" // one that starts a descendant and ends
)

func main() {
	log.SetFlags(0)
	if err := job(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		log.Fatal("job: ", err)
	}
}

func job(dir, duration string, words []string) error {
	d, err := time.ParseDuration(duration)
	if err != nil {
		return err
	}
	over := time.NewTimer(d)
	term, err := strconv.ParseInt(os.Getenv("UNDERLEASE_TERM"), 10, 64)
	if err != nil {
		return err
	}
	has := func(word string) bool { return slices.Contains(words, word) }
	if has(fork) {
		return start(dir, true, leaf)
	}
	first := stamps.Begin
	if has(leaf) {
		first = stamps.Join
	}
	if has(leaf) || has("stubborn") {
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
	}
	told := make(chan os.Signal, 1)
	if has("obedient") {
		signal.Notify(told, syscall.SIGTERM)
	}
	w, err := stamps.Create(dir, first, term)
	if err != nil {
		return err
	}
	if first == stamps.Begin {
		if _, err := fmt.Fprintln(os.Stdout, term); err != nil {
			return err
		}
	}
	if has("tree") {
		for _, word := range []string{leaf, fork} {
			if err := start(dir, false, word); err != nil {
				return err
			}
		}
		if err := start(dir, true, leaf); err != nil {
			return err
		}
	}
	beat := time.NewTicker(beatEvery)
	for {
		select {
		case <-beat.C:
			if err := w.Put(stamps.Beat); err != nil {
				return err
			}
		case <-over.C:
			return w.Put(stamps.End)
		case <-told:
			return w.Put(stamps.End)
		}
	}
}

// start leaves a descendant behind.
func start(dir string, session bool, word string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	c := &exec.Cmd{Path: self, Args: []string{self, dir, "1m", word}, SysProcAttr: &syscall.SysProcAttr{Setsid: session}}
	return c.Start()
}
