package runner

import (
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/runner/internal/tenure"
	"github.com/underlease/underlease/signals"
)

// The defaults of the deadline, and what the margin grows by for each process that has to be killed.
const (
	longestGrace     = 10 * time.Second
	shortestMargin   = 250 * time.Millisecond
	marginPerProcess = 300 * time.Microsecond // measured: 200 microseconds to find and signal one

	shortestCall = 200 * time.Millisecond
	longestCall  = 3 * time.Second

	// A store without expiry is only looked at.
	lookEvery = 2 * time.Second
	lookLimit = time.Second

	longestAcquire = 5 * time.Second
)

// Settle fills in the defaults that depend on other settings and refuses relations that cannot work with a
// [*RelationError]. Endless says that the store's grants need no ttl. A settled Spec settles to itself.
func (s *Spec) Settle(endless bool) error {
	if s.Isolate == signals.IsolatePidns && s.Leftovers == signals.LeftoversIgnore {
		return relationf("use --isolate tree or --leftovers wait",
			"--isolate pidns and --leftovers ignore do not go together: a PID namespace ends with its run, and so does everything in it")
	}
	if err := s.Once.settle(s); err != nil {
		return err
	}
	if s.TTL == 0 {
		if !endless {
			return relationf("leave --ttl out for the default, or give at least 2s",
				"--ttl none works only on a store whose leases end with their processes, which is file:")
		}
		s.Grace = defaultTo(s.Grace, longestGrace)
		s.Margin = defaultTo(s.Margin, shortestMargin)
		s.RenewEvery = defaultTo(s.RenewEvery, lookEvery)
		return nil
	}
	if s.TTL < MinTTL {
		return relationf("", "--ttl %s is too short: at least %s", Short(s.TTL), Short(MinTTL))
	}
	if s.Margin == Auto {
		s.growMargin = true
	}
	s.Grace = defaultTo(s.Grace, min(s.TTL/4, longestGrace))
	s.Margin = defaultTo(s.Margin, min(shortestMargin, s.TTL/4))
	s.RenewEvery = defaultTo(s.RenewEvery, s.TTL/6)
	if s.Margin > s.TTL/4 {
		return relationf("", "--margin %s is more than a quarter of --ttl %s: at most %s", Short(s.Margin), Short(s.TTL), Short(s.TTL/4))
	}
	c := s.tenure()
	budget, need, ok := c.Fits()
	switch {
	case ok:
		return nil
	case budget <= 0:
		return relationf("lengthen --ttl or shorten --grace",
			"--ttl %s leaves no time to run: --grace %s and --margin %s take all of it", Short(s.TTL), Short(s.Grace), Short(s.Margin))
	default:
		return relationf("lengthen --ttl, or shorten --renew-every or --grace",
			"--renew-every %s is too long for --ttl %s with --grace %s and --margin %s: with two attempts of %s it takes %s of the %s before the stop",
			Short(s.RenewEvery), Short(s.TTL), Short(s.Grace), Short(s.Margin), Short(s.CallLimit()), Short(need), Short(budget))
	}
}

// CallLimit returns how long one renewal may take before it is abandoned.
func (s *Spec) CallLimit() time.Duration {
	if s.TTL == 0 {
		return lookLimit
	}
	return min(max(s.RenewEvery/3, shortestCall), longestCall)
}

// acquireLimit returns how long one attempt to acquire may take.
func (s *Spec) acquireLimit() time.Duration {
	if s.TTL == 0 {
		return longestAcquire
	}
	return min(longestAcquire, s.TTL/2)
}

func (s *Spec) tenure() tenure.Config {
	return tenure.Config{
		TTL:        s.TTL,
		Drift:      s.ClockDrift,
		Grace:      s.Grace,
		Margin:     s.Margin,
		RenewEvery: s.RenewEvery,
		CallLimit:  s.CallLimit(),
		MaxRun:     s.MaxRun,
		Drain:      s.Drain,
		LossGrace:  s.OnLost == LostTerm,
	}
}

func (s *Spec) request(handle string) backends.Request {
	return backends.Request{
		Namespace: s.Namespace,
		Lease:     s.Lease,
		Holder:    s.Holder,
		Handle:    handle,
		Slots:     s.Slots,
		TTL:       s.TTL,
		Hold:      s.MinHold,
	}
}

func defaultTo(d, fallback time.Duration) time.Duration {
	if d == Auto {
		return fallback
	}
	return d
}
