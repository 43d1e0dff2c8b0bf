//go:build !linux && !darwin && !freebsd

// Command underlease runs a command while holding a named lease.
package main

import "os"

// A system where a tree of processes cannot be held and killed in time gets no promise that would not be kept.
func main() {
	_, _ = os.Stderr.WriteString("underlease: this system is not supported: it runs on Linux, macOS and FreeBSD\n")
	os.Exit(78)
}
