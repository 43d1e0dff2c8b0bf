#include "textflag.h"

// onSignal is entered by the kernel on the signal stack: DI = signal, SI = *siginfo_t. It writes the first 32 bytes of the
// siginfo to the pipe. Everything it clobbers is restored by sigreturn.
TEXT ·onSignal(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVL ·capturePipe(SB), DI
	MOVL $32, DX
	MOVL $1, AX               // write
	SYSCALL
	RET

TEXT ·onSignalPC(SB), NOSPLIT, $0-8
	LEAQ ·onSignal(SB), AX
	MOVQ AX, ret+0(FP)
	RET

TEXT ·sigreturn(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVL $15, AX              // rt_sigreturn
	SYSCALL
	INT $3

TEXT ·sigreturnPC(SB), NOSPLIT, $0-8
	LEAQ ·sigreturn(SB), AX
	MOVQ AX, ret+0(FP)
	RET
