//go:build linux || darwin || freebsd

// The runtime would read the limits of the control group and all mounts of the host at every start, and the limits once a
// second afterwards, to choose how many threads compute. Neither wrapper nor guardian computes.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command underlease runs a command while holding a named lease.
package main

import (
	"os"

	"github.com/underlease/underlease/cmd"
)

func main() {
	os.Exit(cmd.Main())
}
