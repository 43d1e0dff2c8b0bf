//go:build linux

package servers

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// built returns a program that is built from a module in testdata/servers, once, into the cache that .ci/run uses too: by the
// checksum of its module files. What stands in the way is missing in the sense of [Require].
func built(t testing.TB, need, module, pkg, name string) string {
	t.Helper()
	path, err := build(module, pkg, name)
	if err != nil {
		Require(t, need, fmt.Errorf("%s cannot be built from testdata/servers/%s: %w", name, module, err))
	}
	return path
}

func build(module, pkg, name string) (string, error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	dir := filepath.Join(string(bytes.TrimSpace(root)), "testdata", "servers", module)
	sum := sha256.New()
	for _, file := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return "", err
		}
		sum.Write(b)
	}
	version := exec.Command("go", "version")
	version.Dir = dir
	out, err := version.Output()
	if err != nil {
		return "", fmt.Errorf("go version: %w", err)
	}
	sum.Write(out)
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(cache, "tools", name+"-"+hex.EncodeToString(sum.Sum(nil))[:16])
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	// Tests of several packages want it at the same time, and one build takes minutes.
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	half := fmt.Sprintf("%s.%d", path, os.Getpid())
	c := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", half, pkg)
	c.Dir, c.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if text, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, text)
	}
	return path, os.Rename(half, path)
}

func cacheDir() (string, error) {
	if dir := os.Getenv("UNDERLEASE_CACHE"); dir != "" {
		return dir, nil
	}
	dir := os.Getenv("XDG_CACHE_HOME")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", errors.Join(errors.New("no directory for the cache"), err)
		}
		dir = filepath.Join(home, ".cache")
	}
	return filepath.Join(dir, "underlease"), nil
}
