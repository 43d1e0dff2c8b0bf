//go:build unix

package signals

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
)

// Parse reads the name of a signal: TERM, SIGTERM, 15, RTMIN+3, RTMAX-1; capitals do not matter.
func Parse(s string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n >= 1 && n <= int(lastRealTime) {
			return syscall.Signal(n), nil
		}
		return 0, fmt.Errorf("%q is not a signal: numbers go from 1 to %d", s, lastRealTime)
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	for n, known := range names {
		if known != "" && known == name {
			return syscall.Signal(n), nil
		}
	}
	switch name {
	case "POLL":
		return syscall.SIGIO, nil
	case "IOT":
		return syscall.SIGABRT, nil
	case "CLD":
		return syscall.SIGCHLD, nil
	}
	if sig, ok := realTime(name); ok {
		return sig, nil
	}
	return 0, fmt.Errorf("%q is not a signal: give a name such as TERM, a number or RTMIN+1", s)
}

func realTime(name string) (syscall.Signal, bool) {
	if rtMin > lastRealTime {
		return 0, false
	}
	base, sign := rtMin, "+"
	rest, ok := strings.CutPrefix(name, "RTMIN")
	if !ok {
		if rest, ok = strings.CutPrefix(name, "RTMAX"); !ok {
			return 0, false
		}
		base, sign = lastRealTime, "-"
	}
	if rest == "" {
		return base, true
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(rest, sign), 10, 8)
	if err != nil || !strings.HasPrefix(rest, sign) || int(n) > int(lastRealTime-rtMin) {
		return 0, false
	}
	if sign == "-" {
		return base - syscall.Signal(n), true
	}
	return base + syscall.Signal(n), true
}

// Name is the name of a signal without its prefix, as [Parse] reads it.
func Name(sig syscall.Signal) string {
	switch {
	case sig > 0 && int(sig) < len(names):
		return names[sig]
	case sig >= rtMin && sig <= lastRealTime:
		return "RTMIN+" + strconv.Itoa(int(sig-rtMin))
	default:
		return strconv.Itoa(int(sig))
	}
}
