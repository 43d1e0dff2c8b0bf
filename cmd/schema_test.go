package cmd

import (
	"context"
	"net/url"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends"
)

func TestSchemaIsPrintedOrApplied(t *testing.T) {
	var failure error
	w := newWorld(t)
	w.schemes["db"] = backends.Scheme{
		Schema: func(u *url.URL) (string, error) { return "CREATE TABLE t;\n", failure },
		Apply: func(ctx context.Context, u *url.URL) (string, error) {
			if _, limited := ctx.Deadline(); !limited {
				t.Error("Apply has no limit")
			}
			return "made it at " + u.Host, failure
		},
	}
	if code, out, errs := w.do("schema", "print", "--backend", "db://u:s3cr3t@h"); code != 0 || out != "CREATE TABLE t;\n" || errs != "" {
		t.Errorf("print: got %d, %q and %q, want the SQL", code, out, errs)
	}
	w.environ = append(w.environ, "UNDERLEASE_BACKEND=db://u:s3cr3t@h")
	if code, out, errs := w.do("schema", "apply"); code != 0 || out != "made it at h\n" || errs != "" {
		t.Errorf("apply: got %d, %q and %q, want what was done", code, out, errs)
	}
	for _, c := range []struct {
		err  error
		code int
	}{
		{backends.Unavailable(nil, "no answer"), 69},
		{backends.Broken(nil, "a newer version"), 76},
		{backends.WithHint(backends.Denied(nil, "may not create"), "ask somebody"), 77},
		{backends.Configf("", "no such database"), 78},
	} {
		failure = c.err
		code, out, errs := w.do("schema", "apply")
		named := "" // where the URL stands that is wrong
		if c.code == 78 {
			named = "UNDERLEASE_BACKEND: "
		}
		if code != c.code || out != "" || !strings.HasPrefix(errs, "underlease: "+named+c.err.Error()+"\n") {
			t.Errorf("%v: got %d, %q and %q, want %d and the error", c.err, code, out, errs, c.code)
		}
		if hint := backends.Hint(c.err); hint != "" && !strings.Contains(errs, "hint: "+hint) {
			t.Errorf("%v: got %q, want the hint %q", c.err, errs, hint)
		}
	}
	if code, out, errs := w.do("schema", "print", "--backend", "mem:"); code != 78 || out != "" || !strings.Contains(errs, "needs no schema") {
		t.Errorf("a store without tables: got %d, %q and %q, want 78", code, out, errs)
	}
	for args, want := range map[string]string{
		"schema":         "print or apply is missing",
		"schema aply":    `schema cannot "aply"` + "\nunderlease: hint: did you mean underlease schema apply",
		"schema print x": `"x" stands after print`,
	} {
		if code, out, errs := w.do(strings.Fields(args)...); code != 64 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%s: got %d, %q and %q, want 64 and %q", args, code, out, errs, want)
		}
	}
	if code, out, errs := w.do("schema", "--help"); code != 0 || out != schemaHelp || errs != "" {
		t.Errorf("--help: got %d, %q and %q, want the help", code, out, errs)
	}
}
