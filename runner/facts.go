package runner

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/underlease/underlease/backends"
)

// The facts that a command learns. They never share a name with a setting.
const (
	factName     = "UNDERLEASE_NAME"
	factTerm     = "UNDERLEASE_TERM"
	factSlot     = "UNDERLEASE_SLOT"
	factHeldBy   = "UNDERLEASE_HELD_BY"
	factRunID    = "UNDERLEASE_RUN_ID"
	factPrevious = "UNDERLEASE_PREVIOUS"
	factHeld     = "UNDERLEASE_HELD"

	// A report belongs to one run, so that this setting is not passed on.
	settingReport = "UNDERLEASE_REPORT"
)

// FactSocket is the variable that tells a command where its guardian answers; see [signals.Ask].
const FactSocket = "UNDERLEASE_SOCKET"

// Facts returns the names of the variables that tell a command about its run.
func Facts() []string {
	return []string{factName, factTerm, factSlot, factHeldBy, factRunID, factPrevious, FactSocket, factHeld}
}

// environ returns the command's environment: what was inherited, byte for byte and in its order, less the facts of
// another run, and with those of this run last. A grant without a term gives none: then the command runs without a lease.
func environ(inherited []string, g backends.Grant, identity, socket string) []string {
	chain := ""
	env := make([]string, 0, len(inherited)+8)
	for _, entry := range inherited {
		name, value, _ := strings.Cut(entry, "=")
		switch name {
		case factHeld:
			chain = value
		case factName, factTerm, factSlot, factHeldBy, factRunID, factPrevious, FactSocket, settingReport:
		default:
			env = append(env, entry)
		}
	}
	env = append(env, factName+"="+g.Lease, factHeldBy+"="+g.Holder)
	if g.Term != 0 {
		chain = strings.TrimLeft(chain+" "+link(identity, g.Namespace, g.Lease)+":"+g.Term.String(), " ")
		env = append(env,
			factTerm+"="+g.Term.String(),
			factSlot+"="+strconv.Itoa(g.Slot),
			factRunID+"="+runID(g),
			factPrevious+"="+Previous(g.Previous),
		)
		if socket != "" {
			env = append(env, FactSocket+"="+socket)
		}
	}
	if chain != "" {
		env = append(env, factHeld+"="+chain)
	}
	return env
}

func runID(g backends.Grant) string {
	return idOf(g) + "/" + g.Term.String()
}

// idOf names a lease in a run's id, another one for every lease: a slash within a name is %2F there.
func idOf(g backends.Grant) string {
	inner := strings.NewReplacer("%", "%25", "/", "%2F")
	return backends.Display(inner.Replace(g.Namespace), inner.Replace(g.Lease))
}

// Previous says in one word how the last holder ended: none, ok, failed or unknown.
func Previous(e backends.End) string {
	switch e.Outcome {
	case backends.OutcomeNone, string(OutcomeOK):
		return e.Outcome
	case string(OutcomeUnrecorded):
		return string(OutcomeOK) // as far as the command goes
	case backends.OutcomeUnknown, "":
		return backends.OutcomeUnknown
	default:
		return string(OutcomeFailed)
	}
}

// link names a lease of a store in the chain of leases that are held around a command. It is a hash, so that the chain
// gives away neither addresses nor names.
func link(identity, namespace, lease string) string {
	h := sha256.New()
	for _, part := range []string{identity, namespace, lease} {
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part) // a hash takes everything
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// heldTerms returns the terms with which the chain in env names the lease.
func heldTerms(env []string, identity, namespace, lease string) []backends.Term {
	var terms []backends.Term
	want := link(identity, namespace, lease)
	for _, entry := range env {
		chain, ok := strings.CutPrefix(entry, factHeld+"=")
		if !ok {
			continue
		}
		for one := range strings.FieldsSeq(chain) {
			hash, term, _ := strings.Cut(one, ":")
			n, err := strconv.ParseInt(term, 10, 64)
			if hash == want && err == nil {
				terms = append(terms, backends.Term(n))
			}
		}
	}
	return terms
}
