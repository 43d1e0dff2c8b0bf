//go:build linux

package faults

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/underlease/underlease/backends"
)

// Trouble is how a mistake in a URL, or a state of a server, has to be told.
type Trouble struct {
	URL        string
	Kind       error // nil: a *ConfigError
	Text, Hint string
}

// Matches says in what way an error is not of the kind, or lacks the text.
func (c Trouble) Matches(err error) error {
	is, want := errors.Is(err, c.Kind), fmt.Sprint(c.Kind)
	if c.Kind == nil {
		_, is = errors.AsType[*backends.ConfigError](err)
		want = "a *ConfigError"
	}
	if !is || !strings.Contains(fmt.Sprint(err), c.Text) {
		return fmt.Errorf("got %w, want %s with %q", err, want, c.Text)
	}
	return nil
}

// Check checks an error of a store, which may show none of the secrets.
func (c Trouble) Check(t *testing.T, name string, s *backends.Store, err error, secrets ...string) {
	t.Helper()
	t.Logf("%s: %v (hint: %s)", name, err, backends.Hint(err))
	if wrong := c.Matches(err); wrong != nil {
		t.Errorf("%s: %v", name, wrong)
	}
	if !strings.Contains(backends.Hint(err), c.Hint) {
		t.Errorf("%s: got %q with the hint %q, want %q", name, err, backends.Hint(err), c.Hint)
	}
	shown := fmt.Sprintf("%v %+v %s %s", err, err, backends.Hint(err), s.Address)
	for _, secret := range secrets {
		if strings.Contains(shown, secret) {
			t.Errorf("%s: a secret is shown: %s", name, shown)
		}
	}
}
