//go:build portable

package signals

import (
	"os"
	"strconv"
	"strings"
	"syscall"
)

const portableSuffix = "-portable"

// processTable returns all processes, so that the tracker of systems that have no subreapers can be tested here.
func processTable() (table []tableEntry) {
	dir, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, d := range dir {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + d.Name() + "/stat")
		if err != nil {
			continue
		}
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		p := tableEntry{pid: pid, dead: f[0] == "Z" || f[0] == "X"}
		p.parent, _ = strconv.Atoi(f[1])
		p.group, _ = strconv.Atoi(f[2])
		p.start, _ = strconv.ParseInt(f[19], 10, 64)
		table = append(table, p)
	}
	return table
}

var portCaught = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGTSTP}

func childAttr(ownGroup bool) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: ownGroup}
}
