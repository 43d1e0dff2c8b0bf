//go:build linux

package servers

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// done runs SQL that has to succeed, and returns what it shows.
func done(t testing.TB, sql string, try func(context.Context, string) (string, error)) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	got, err := try(ctx, sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return got
}

// said runs a client of a database and returns what it says; its complaints are the error's.
func said(c *exec.Cmd) (string, error) {
	var out, words bytes.Buffer
	c.Stdout, c.Stderr = &out, &words
	if err := c.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, strings.TrimSpace(words.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// copied copies a file, for the user of a server alone.
func copied(t testing.TB, user *syscall.Credential, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	written(t, user, to, string(b))
}

// written writes a file, for the user of a server alone.
func written(t testing.TB, user *syscall.Credential, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if user != nil {
		own(t, path, int(user.Uid), int(user.Gid))
	}
}
