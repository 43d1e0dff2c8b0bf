package backends

import "fmt"

// Check returns a [*ConfigError] for a request that no store can serve, or nil. Every backend calls it first, before
// anything is asked of the store. Endless is [Scheme.Endless] of the store.
func (r Request) Check(endless bool) error {
	if err := CheckNames(r.Namespace, r.Lease); err != nil {
		return err
	}
	switch {
	case r.Handle == "":
		return Configf("", "the request for %q has no handle", Display(r.Namespace, r.Lease))
	case r.Slots < 1:
		return Configf("", "%d slots cannot be held: give at least 1", r.Slots)
	case r.TTL < 0:
		return Configf("", "the ttl %v is negative", r.TTL)
	case r.TTL == 0 && !endless:
		return Configf("give a ttl such as 60s", "this store needs a ttl: it cannot see that a holder's processes are gone")
	case r.Hold < 0:
		return Configf("", "the hold %v is negative", r.Hold)
	}
	return nil
}

// CheckNames returns a [*ConfigError] by the rules of [CheckNamespace] and [CheckLease], or nil.
func CheckNames(namespace, lease string) error {
	err := CheckNamespace(namespace)
	if err == nil {
		err = CheckLease(lease)
	}
	if err != nil {
		return &ConfigError{Text: err.Error()}
	}
	return nil
}

// Check returns a [*ConfigError] for a record that no store may keep, or nil.
func (p Put) Check() error {
	if err := checkKey(p.Key); err != nil {
		return &ConfigError{Text: err.Error()}
	}
	switch {
	case len(p.Value) > MaxRecord:
		return Configf("", "the record %q has %d bytes: at most %d are allowed", p.Key, len(p.Value), MaxRecord)
	case p.Version < AnyVersion:
		return Configf("", "the record %q cannot have the version %d", p.Key, p.Version)
	}
	return nil
}

func checkKey(key string) error {
	if key == "" {
		return fmt.Errorf("the key of the record is empty: give 1 to %d bytes", MaxLease)
	}
	return checkName("key", key, MaxLease)
}
