#include "textflag.h"

// ulentry is where the kernel enters an executable that is linked with -E ulentry. It takes down what the runtime is about to
// change, and goes on where the kernel would have gone without it. Stack and DX are left as they are; the kernel has set
// nothing else (System V ABI for AMD64, 3.4.1). A system call clobbers AX, CX and R11.
TEXT ulentry(SB), NOSPLIT|NOFRAME|TOPFRAME, $0
	MOVQ DX, R13

	// rt_sigprocmask(0, nil, &entryBlocked, 8)
	XORL DI, DI
	XORL SI, SI
	LEAQ ·entryBlocked(SB), DX
	MOVL $8, R10
	MOVL $14, AX
	SYSCALL

	// rt_sigaction(signal, nil, &entryNoteRoom, 8) for 1 to 64
	MOVL $1, R12
signal:
	MOVQ $0, ·entryNoteRoom(SB)
	MOVL R12, DI
	XORL SI, SI
	LEAQ ·entryNoteRoom(SB), DX
	MOVL $8, R10
	MOVL $13, AX
	SYSCALL
	CMPQ ·entryNoteRoom(SB), $1 // SIG_IGN
	JNE  heeded
	LEAL -1(R12), CX
	MOVL $1, AX
	SHLQ CX, AX
	ORQ  AX, ·entryIgnored(SB)
heeded:
	INCL R12
	CMPL R12, $64
	JLE  signal

	// fcntl(fd, F_GETFD) for 0 to 2
	XORL R12, R12
descriptor:
	MOVL R12, DI
	MOVL $1, SI
	XORL DX, DX
	MOVL $72, AX
	SYSCALL
	TESTQ AX, AX
	JGE  open
	MOVL R12, CX
	MOVL $1, AX
	SHLL CX, AX
	ORL  AX, ·entryClosed(SB)
open:
	INCL R12
	CMPL R12, $3
	JLT  descriptor

	// prlimit64(0, RLIMIT_NOFILE, nil, &entryFiles)
	XORL DI, DI
	MOVL $7, SI
	XORL DX, DX
	LEAQ ·entryFiles(SB), R10
	MOVL $302, AX
	SYSCALL

	MOVL $1, ·entryKnown(SB)
	MOVQ R13, DX
	JMP  _rt0_amd64_linux(SB)

// func rawVfork(trap, a1, a2 uintptr) (r1, err uintptr)
TEXT ·rawVfork(SB), NOSPLIT|NOFRAME, $0-40
	MOVQ trap+0(FP), AX
	MOVQ a1+8(FP), DI
	MOVQ a2+16(FP), SI
	XORL DX, DX
	XORL R10, R10
	XORL R8, R8
	POPQ R12
	SYSCALL
	PUSHQ R12
	CMPQ AX, $-4095
	JCS  made
	NEGQ AX
	MOVQ AX, err+32(FP)
	MOVQ $-1, r1+24(FP)
	RET
made:
	MOVQ AX, r1+24(FP)
	MOVQ $0, err+32(FP)
	RET
