package guard

// From arch/x86/entry/syscalls/syscall_64.tbl.
const sysMemfdCreate = 319

const infoPid = 16 // offset of si_pid in siginfo_t

// sigreturn is where a signal handler returns to; this architecture's kernel asks for it (SA_RESTORER).
func sigreturn()

func sigreturnPC() uintptr

func restorer() (pc, flag uintptr) { return sigreturnPC(), 0x04000000 }
