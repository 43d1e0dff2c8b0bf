// Package needed ends a test that lacks what it needs of the machine: a program, a permission, a file system. It is skipped, and says so; where the
// variable UNDERLEASE_TEST_REQUIRE asks for it, as it does where everything is to be tested, it fails.
package needed

import (
	"os"
	"strings"
	"testing"
)

// Require ends the test if something is missing. Need is the name by which UNDERLEASE_TEST_REQUIRE asks for it.
func Require(t testing.TB, need string, missing error) {
	t.Helper()
	if missing == nil {
		return
	}
	if by(os.Getenv("UNDERLEASE_TEST_REQUIRE"), need) {
		t.Fatalf("%s is required, and missing: %v", need, missing)
	}
	t.Skipf("SKIPPED, not tested here: %s is missing: %v", need, missing)
}

// by reports whether a list, names with commas between them, asks for a need. "all" asks for every one.
func by(list, need string) bool {
	for name := range strings.SplitSeq(list, ",") {
		if name == need || name == "all" {
			return true
		}
	}
	return false
}
