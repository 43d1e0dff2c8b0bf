package signals

import "syscall"

// childAttr cannot bind the command to its guardian's life: this system has no such thing.
func childAttr(ownGroup bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: ownGroup} }
