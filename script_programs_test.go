//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/mem"
	"github.com/underlease/underlease/cmd"
	"github.com/underlease/underlease/signals"
)

// programs are what the scripts run besides what every system has.
var programs = map[string]func(){
	"underlease":   underlease,
	"beat":         beat,
	"tree":         tree,
	"sigprint":     sigprint,
	"unprivileged": unprivileged,
	"privileged":   privileged,
	"delegated":    delegated,
	"environ":      environ,
	"descriptor":   descriptor,
	"jsonlines":    jsonlines,
	"started":      started,
	"heard":        heard,
}

// underlease is the program itself, with a store in the memory of each process that can hang and lose answers.
func underlease() {
	os.Exit(cmd.MainWith(map[string]backends.Scheme{"mem": mem.Scheme(mem.NewServer(mem.Options{}))}))
}

// beat FILE appends a stamp to FILE every 20 ms: what, instant, pid and term. The first one says begin.
func beat() {
	stubborn := flag.Bool("stubborn", false, "ignore TERM")
	session := flag.Bool("setsid", false, "lead a session of its own")
	lasts := flag.Duration("for", 0, "end after that")
	slow := flag.Duration("slow", 0, "end that long after TERM, with a stamp term when it comes")
	flag.Parse()
	f, err := os.OpenFile(flag.Arg(0), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(err)
	term, _ := strconv.ParseInt(os.Getenv("UNDERLEASE_TERM"), 10, 64)
	write := func(what string) {
		if _, err := fmt.Fprintf(f, "%s %d %d %d\n", what, signals.Now(), os.Getpid(), term); err != nil {
			os.Exit(1)
		}
	}
	terminated := make(chan os.Signal, 1)
	switch {
	case *stubborn:
		signal.Ignore(syscall.SIGTERM)
	case *slow > 0:
		signal.Notify(terminated, syscall.SIGTERM)
	}
	if *session {
		_, err := syscall.Setsid()
		must(err)
	}
	write("begin")
	var end <-chan time.Time
	if *lasts > 0 {
		end = time.NewTimer(*lasts).C
	}
	pace := time.NewTicker(20 * time.Millisecond)
	for {
		select {
		case <-pace.C:
			write("beat")
			if _, err := os.Stat(flag.Arg(0)); err != nil { // its test is over, and has failed
				os.Exit(1)
			}
		case <-terminated:
			write("term")
			end = time.NewTimer(*slow).C
		case <-end:
			write("end")
			return
		}
	}
}

// tree NAME is a shell with a background child, one in a session of its own and one of a double fork, each of which beats, into
// NAME-back, NAME-session and NAME-double; the shell becomes the one that beats into NAME-main. Flags of beat go to all.
func tree() {
	name, flags := os.Args[len(os.Args)-1], os.Args[1:len(os.Args)-1]
	const script = `name=$1; shift
beat "$@" "$name-back" &
beat "$@" -setsid "$name-session" &
(beat "$@" -setsid "$name-double" &)
exec beat "$@" "$name-main"`
	sh, err := exec.LookPath("sh")
	must(err)
	must(syscall.Exec(sh, append([]string{"sh", "-c", script, "sh", name}, flags...), os.Environ()))
}

// sigprint FILE writes the name of every signal that it gets into FILE, a line each, after a first line `ready`. It ends when it gets
// KILL or after SIGUSR2.
func sigprint() {
	got := make(chan os.Signal, 64)
	signal.Notify(got)
	f, err := os.OpenFile(os.Args[1], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(err)
	fmt.Fprintln(f, "ready")
	for s := range got {
		sig := s.(syscall.Signal)
		if sig == syscall.SIGURG { // the runtime sends it to itself
			continue
		}
		fmt.Fprintln(f, signals.Name(sig))
		if sig == syscall.SIGUSR2 {
			return
		}
	}
}

// unprivileged CMD... becomes CMD as a user who is not root: 65534 where root runs the tests, else nobody new.
func unprivileged() {
	if os.Geteuid() == 0 {
		must(syscall.Setgroups(nil))
		must(syscall.Setgid(65534))
		must(syscall.Setuid(65534))
	}
	path, err := exec.LookPath(os.Args[1])
	must(err)
	must(syscall.Exec(path, os.Args[1:], os.Environ()))
}

// privileged CMD... becomes CMD as root, if it was made setuid for that: as sudo does.
func privileged() {
	must(syscall.Setresuid(0, 0, 0))
	path, err := exec.LookPath(os.Args[1])
	must(err)
	must(syscall.Exec(path, os.Args[1:], os.Environ()))
}

// delegated FILE CMD... runs CMD in a new control group (v2) that belongs to the user of unprivileged, writes the name of its directory into FILE,
// removes it afterwards and ends as CMD did.
func delegated() {
	own, err := ownGroup()
	must(err)
	dir := fmt.Sprintf("%s/ulscript-%d", own, os.Getpid())
	must(os.Mkdir(dir, 0o755))
	must(os.Chown(dir, 65534, 65534))
	must(os.Chown(dir+"/cgroup.procs", 65534, 65534))
	must(os.WriteFile(os.Args[1], []byte(dir), 0o644))
	f, err := os.Open(dir)
	must(err)
	c := exec.Command(os.Args[2], os.Args[3:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	err = c.Run()
	if _, ended := errors.AsType[*exec.ExitError](err); !ended {
		must(err)
	}
	must(os.Remove(dir)) // fails where anything was left in it
	os.Exit(c.ProcessState.ExitCode())
}

// ownGroup returns the directory of the control group (v2) that this process is in.
func ownGroup() (string, error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	own := regexp.MustCompile(`(?m)^0::(.*)$`).FindSubmatch(groups)
	mount := regexp.MustCompile(`(?m)^\S+ \S+ \S+ (\S+) (\S+) .* - cgroup2 `).FindSubmatch(mounts)
	if own == nil || mount == nil {
		return "", errors.New("no control groups of version 2")
	}
	return string(mount[2]) + "/" + strings.TrimPrefix(strings.TrimPrefix(string(own[1]), string(mount[1])), "/"), nil
}

// environ prints its environment, a Go string literal a line.
func environ() {
	for _, entry := range os.Environ() {
		fmt.Printf("%q\n", entry)
	}
}

// descriptor N reads a line from descriptor N and writes it.
func descriptor() {
	n, err := strconv.Atoi(os.Args[1])
	must(err)
	line, err := bufio.NewReader(os.NewFile(uintptr(n), "inherited")).ReadString('\n')
	must(err)
	fmt.Print(line)
}

// jsonlines FILE fails unless FILE has lines, and each of them is one JSON object.
func jsonlines() {
	f, err := os.Open(os.Args[1])
	must(err)
	n := 0
	for lines := bufio.NewScanner(f); lines.Scan(); n++ {
		var object map[string]any
		if err := json.Unmarshal(lines.Bytes(), &object); err != nil {
			must(fmt.Errorf("%q: %w", lines.Text(), err))
		}
	}
	if n == 0 {
		must(errors.New("there is no line"))
	}
}

// started CMD... becomes CMD, started with signals ignored and blocked and with descriptors closed, by their numbers: -ignore 13,15.
// LISTEN_PID and WATCHDOG_PID become its own with -listen, and descriptor 3 a listening socket.
func started() {
	runtime.LockOSThread()
	ignore := flag.String("ignore", "", "signals")
	block := flag.String("block", "", "signals")
	shut := flag.String("close", "", "descriptors")
	listen := flag.Bool("listen", false, "as socket activation does")
	flag.Parse()
	numbers := func(s string) (all []uint) {
		for word := range strings.SplitSeq(s, ",") {
			if n, err := strconv.ParseUint(word, 10, 7); err == nil {
				all = append(all, uint(n))
			}
		}
		return all
	}
	path, err := exec.LookPath(flag.Arg(0))
	must(err)
	env := os.Environ()
	if *listen {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		must(err)
		must(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
		must(unix.Listen(fd, 1))
		if fd != 3 {
			must(unix.Dup3(fd, 3, 0))
			must(unix.Close(fd))
		}
		pid := strconv.Itoa(os.Getpid())
		env = append(env, "LISTEN_FDS=1", "LISTEN_PID="+pid, "WATCHDOG_PID="+pid, "NOTIFY_SOCKET=/run/none", "LISTEN_PIDFDID=1")
	}
	var set [2]uint64
	for _, sig := range numbers(*ignore) {
		action := struct{ handler, flags, restorer, mask uintptr }{handler: 1}
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0); e != 0 {
			must(e)
		}
	}
	for _, sig := range numbers(*block) {
		set[0] |= 1 << (sig - 1)
	}
	if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&set)), 0, 8, 0, 0); e != 0 {
		must(e)
	}
	for _, fd := range numbers(*shut) {
		must(unix.Close(int(fd)))
	}
	must(syscall.Exec(path, flag.Args(), env))
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
}
