#include "textflag.h"

// onSignal is entered by the kernel on the signal stack: R0 = signal, R1 = *siginfo_t. It writes the first 32 bytes of the
// siginfo to the pipe. Everything it clobbers is restored by sigreturn.
TEXT ·onSignal(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVW ·capturePipe(SB), R0
	MOVD $32, R2
	MOVD $64, R8              // write
	SVC
	RET

TEXT ·onSignalPC(SB), NOSPLIT, $0-8
	MOVD $·onSignal(SB), R0
	MOVD R0, ret+0(FP)
	RET
