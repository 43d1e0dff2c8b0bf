package signals

import "golang.org/x/sys/unix"

const zombie = 5 // SZOMB of sys/proc.h

// processTable returns all processes, as sysctl kern.proc.all has them.
func processTable() []tableEntry {
	all, err := unix.SysctlKinfoProcSlice("kern.proc.all")
	if err != nil {
		return nil
	}
	table := make([]tableEntry, len(all))
	for i := range all {
		p := &all[i]
		table[i] = tableEntry{
			pid: int(p.Proc.P_pid), parent: int(p.Eproc.Ppid), group: int(p.Eproc.Pgid),
			start: p.Proc.P_starttime.Nano(), dead: p.Proc.P_stat == zombie,
		}
	}
	return table
}
