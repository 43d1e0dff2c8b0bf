// Command underlease runs a command while holding a named lease.
package main

import (
	"os"

	"github.com/underlease/underlease/cmd"
)

func main() {
	os.Exit(cmd.Main())
}
