#include "textflag.h"

// ulentry is where the kernel enters an executable that is linked with -E ulentry. It takes down what the runtime is about to
// change, and goes on where the kernel would have gone without it. The stack is left as it is; a system call clobbers R0.
TEXT ulentry(SB), NOSPLIT|NOFRAME|TOPFRAME, $0
	// rt_sigprocmask(0, nil, &entryBlocked, 8)
	MOVD ZR, R0
	MOVD ZR, R1
	MOVD $·entryBlocked(SB), R2
	MOVD $8, R3
	MOVD $135, R8
	SVC

	// rt_sigaction(signal, nil, &entryNoteRoom, 8) for 1 to 64
	MOVD $1, R19
	MOVD $1, R20
	MOVD ZR, R21
	MOVD $·entryNoteRoom(SB), R22
signal:
	MOVD ZR, (R22)
	MOVD R19, R0
	MOVD ZR, R1
	MOVD R22, R2
	MOVD $8, R3
	MOVD $134, R8
	SVC
	MOVD (R22), R3
	CMP  $1, R3 // SIG_IGN
	BNE  heeded
	ORR  R20, R21
heeded:
	LSL  $1, R20
	ADD  $1, R19
	CMP  $64, R19
	BLE  signal
	MOVD R21, ·entryIgnored(SB)

	// fcntl(fd, F_GETFD) for 0 to 2
	MOVD ZR, R19
	MOVD $1, R20
	MOVD ZR, R21
descriptor:
	MOVD R19, R0
	MOVD $1, R1
	MOVD ZR, R2
	MOVD $25, R8
	SVC
	CMP  $0, R0
	BGE  open
	ORR  R20, R21
open:
	LSL  $1, R20
	ADD  $1, R19
	CMP  $3, R19
	BLT  descriptor
	MOVW R21, ·entryClosed(SB)

	// prlimit64(0, RLIMIT_NOFILE, nil, &entryFiles)
	MOVD ZR, R0
	MOVD $7, R1
	MOVD ZR, R2
	MOVD $·entryFiles(SB), R3
	MOVD $261, R8
	SVC

	MOVD $1, R0
	MOVW R0, ·entryKnown(SB)
	MOVD ZR, R0
	JMP  _rt0_arm64_linux(SB)

// func rawVfork(trap, a1, a2 uintptr) (r1, err uintptr)
TEXT ·rawVfork(SB), NOSPLIT|NOFRAME, $0-40
	MOVD trap+0(FP), R8
	MOVD a1+8(FP), R0
	MOVD a2+16(FP), R1
	MOVD ZR, R2
	MOVD ZR, R3
	MOVD ZR, R4
	SVC
	CMN  $4095, R0
	BCC  made
	NEG  R0, R0
	MOVD R0, err+32(FP)
	MOVD $-1, R0
	MOVD R0, r1+24(FP)
	RET
made:
	MOVD R0, r1+24(FP)
	MOVD ZR, err+32(FP)
	RET
