package guard

// From include/uapi/asm-generic/unistd.h.
const sysMemfdCreate = 279

const infoPid = 16 // offset of si_pid in siginfo_t

// The kernel's own trampoline (vDSO) ends a handler.
func restorer() (pc, flag uintptr) { return 0, 0 }
