package guard

// From arch/arm/tools/syscall.tbl.
const sysMemfdCreate = 385

const infoPid = 12 // offset of si_pid in siginfo_t

// The kernel's own trampoline (signal page) ends a handler.
func restorer() (pc, flag uintptr) { return 0, 0 }
