package table

import (
	"strconv"

	"github.com/underlease/underlease/backends"
)

// Rows reads rows that a server has answered: clock in microseconds, form, revision, term, version, slots, and more, which is left alone.
func Rows(address string, k Key, got [][][]byte) ([]*Row, error) {
	var all []*Row
	for _, columns := range got {
		r := &Row{Key: k, Slots: columns[5]}
		if err := numbers(columns, &r.Micros, &r.Form, &r.Revision, &r.Term, &r.Version); err != nil {
			return nil, backends.Broken(err, "%s: a number in the row of %q cannot be read", address, backends.Display(k.Namespace, k.Lease))
		}
		all = append(all, r)
	}
	return all, nil
}

// First reads the first row of an answer, or returns nil where it has none.
func First(address string, k Key, got [][][]byte, err error) (*Row, error) {
	if err != nil || len(got) == 0 {
		return nil, err
	}
	all, err := Rows(address, k, got[:1])
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// FirstMark reads a marker that a server has answered, by its version, when it was written and value, or returns nil.
func FirstMark(address string, k Key, got [][][]byte, err error) (*Mark, error) {
	if err != nil || len(got) == 0 {
		return nil, err
	}
	m := &Mark{Value: got[0][2]}
	if err := numbers(got[0], &m.Version, &m.Written); err != nil {
		return nil, backends.Broken(err, "%s: a number of the marker of %q cannot be read", address, backends.Display(k.Namespace, k.Lease))
	}
	return m, nil
}

func numbers(columns [][]byte, into ...*int64) (err error) {
	for i, to := range into {
		if *to, err = strconv.ParseInt(string(columns[i]), 10, 64); err != nil {
			return err
		}
	}
	return nil
}
