package etcd

import (
	"encoding/binary"
	"errors"

	"github.com/underlease/underlease/backends/quorum"
)

// The messages of etcd that are needed, in the encoding of protocol buffers, and the words of its refusals.
//
// Source: etcd, api/etcdserverpb/rpc.proto, api/mvccpb/kv.proto and api/v3rpc/rpctypes/error.go.

// Methods.
const (
	methodRange        = "/etcdserverpb.KV/Range"
	methodTxn          = "/etcdserverpb.KV/Txn"
	methodGrant        = "/etcdserverpb.Lease/LeaseGrant"
	methodRevoke       = "/etcdserverpb.Lease/LeaseRevoke"
	methodKeepAlive    = "/etcdserverpb.Lease/LeaseKeepAlive"
	methodLeft         = "/etcdserverpb.Lease/LeaseTimeToLive"
	methodWatch        = "/etcdserverpb.Watch/Watch"
	methodStatus       = "/etcdserverpb.Maintenance/Status"
	methodAuthenticate = "/etcdserverpb.Auth/Authenticate"
)

// Refusals.
const (
	saysNoLease          = "etcdserver: requested lease not found"
	saysLeaseExists      = "etcdserver: lease already exists"
	saysTTL              = "etcdserver: too large lease TTL"
	saysNoAuth           = "etcdserver: authentication is not enabled"
	saysAuthFailed       = "etcdserver: authentication failed, invalid user ID or password"
	saysNoUser           = "etcdserver: user name is empty"
	saysUnknownUser      = "etcdserver: user name not found"
	saysDenied           = "etcdserver: permission denied"
	saysNotGranted       = "etcdserver: permission is not granted to the role"
	saysToken            = "etcdserver: invalid auth token"
	saysManagement       = "etcdserver: invalid auth management"
	saysOldRevision      = "etcdserver: revision of auth store is old"
	saysNoLeader         = "etcdserver: no leader"
	saysLeaderChanged    = "etcdserver: leader changed"
	saysNotLeader        = "etcdserver: not leader"
	saysLearner          = "etcdserver: rpc not supported for learner"
	saysFull             = "etcdserver: mvcc: database space exceeded"
	saysCorrupt          = "etcdserver: corrupt cluster"
	saysCompacted        = "etcdserver: mvcc: required revision has been compacted"
	saysFuture           = "etcdserver: mvcc: required revision is a future revision"
	saysTooMany          = "etcdserver: too many requests"
	saysNotCapable       = "etcdserver: not capable"
	kindVarint           = 0
	kindFixed64          = 1
	kindBytes            = 2
	kindFixed32          = 5
	compareCreate        = 1
	compareMod           = 2
	compareLease         = 4
	compareCreateNumber  = 5
	compareModNumber     = 6
	compareLeaseNumber   = 8
	operationPut         = 2
	operationDeleteRange = 3
)

func appendTag(b []byte, field, kind uint64) []byte {
	return binary.AppendUvarint(b, field<<3|kind)
}

// appendInt leaves a zero out, as protocol buffers do.
func appendInt(b []byte, field uint64, n int64) []byte {
	if n == 0 {
		return b
	}
	return appendSet(b, field, n)
}

// appendSet writes a number also where it is zero: which of several fields is set says something.
func appendSet(b []byte, field uint64, n int64) []byte {
	return binary.AppendUvarint(appendTag(b, field, kindVarint), uint64(n))
}

func appendBytes[T []byte | string](b []byte, field uint64, v T) []byte {
	if len(v) == 0 {
		return b
	}
	return appendPart(b, field, v)
}

// appendPart writes a message, which may be empty.
func appendPart[T []byte | string](b []byte, field uint64, v T) []byte {
	b = binary.AppendUvarint(appendTag(b, field, kindBytes), uint64(len(v)))
	return append(b, v...)
}

// behind returns the key behind all that begin with a prefix.
func behind(prefix string) string {
	b := []byte(prefix)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i] < 0xff {
			b[i]++
			return string(b[:i+1])
		}
	}
	return "\x00" // all keys from the first one on
}

func rangeRequest(prefix string, serializable bool) []byte {
	b := appendBytes(appendBytes(nil, 1, prefix), 2, behind(prefix))
	if serializable {
		b = appendInt(b, 7, 1)
	}
	return b
}

func txnRequest(t quorum.Txn) (b []byte, err error) {
	for _, check := range t.Checks {
		compare := func(target int64, field uint64, n int64) {
			part := appendBytes(appendInt(nil, 2, target), 3, check.Key) // the first field, the result, is zero: equal
			b = appendPart(b, 1, appendSet(part, field, n))
		}
		if check.Version == 0 { // there is no such key
			compare(compareCreate, compareCreateNumber, 0)
			continue
		}
		compare(compareMod, compareModNumber, check.Version)
		if check.Session != "" {
			id, err := number(check.Session)
			if err != nil {
				return nil, err
			}
			compare(compareLease, compareLeaseNumber, id)
		}
	}
	for _, w := range t.Writes {
		part := appendBytes(nil, 1, w.Key)
		operation := uint64(operationDeleteRange)
		if !w.Delete {
			id, err := number(w.Session)
			if err != nil {
				return nil, quorum.ErrGone
			}
			operation, part = operationPut, appendInt(appendBytes(part, 2, w.Value), 3, id)
		}
		b = appendPart(b, 2, appendPart(nil, operation, part))
	}
	return b, nil
}

func grantRequest(id, ttl int64) []byte { return appendInt(appendInt(nil, 1, ttl), 2, id) }
func leaseRequest(id int64) []byte      { return appendInt(nil, 1, id) }

func watchRequest(prefix string, from int64) []byte {
	return appendPart(nil, 1, appendInt(appendBytes(appendBytes(nil, 1, prefix), 2, behind(prefix)), 3, from))
}

func authenticateRequest(user, password string) []byte {
	return appendBytes(appendBytes(nil, 1, user), 2, password)
}

// errMessage is an answer that is no message.
var errMessage = errors.New("an answer cannot be read")

// fields calls f with each field of a message: its number, and its value where that is an integer, or its bytes.
func fields(b []byte, f func(field uint64, n int64, b []byte) error) error {
	take := func() (n uint64, ok bool) {
		n, size := binary.Uvarint(b)
		if size <= 0 {
			return 0, false
		}
		b = b[size:]
		return n, true
	}
	for len(b) > 0 {
		tag, ok := take()
		if !ok || tag>>3 == 0 {
			return errMessage
		}
		var n uint64
		var value []byte
		size := uint64(0)
		switch tag & 7 {
		case kindVarint:
			n, ok = take()
		case kindBytes:
			size, ok = take()
		case kindFixed64:
			size = 8
		case kindFixed32:
			size = 4
		default:
			return errMessage
		}
		if !ok || size > uint64(len(b)) {
			return errMessage
		}
		value, b = b[:size:size], b[size:]
		if tag&7 == kindFixed64 || tag&7 == kindFixed32 {
			continue // none of ours
		}
		if err := f(tag>>3, int64(n), value); err != nil {
			return err
		}
	}
	return nil
}

// revision reads the header of an answer. Source: a store without keys is at the revision 1.
func revision(b []byte) (n int64, err error) {
	err = fields(b, func(field uint64, v int64, _ []byte) error {
		if field == 3 {
			n = v
		}
		return nil
	})
	if err == nil && n <= 0 {
		err = errMessage
	}
	return n, err
}

// headed says that an answer without a header is none.
func headed(version int64, err error) error {
	if err == nil && version == 0 {
		return errMessage
	}
	return err
}

func rangeResponse(b []byte) (v quorum.View, err error) {
	err = fields(b, func(field uint64, _ int64, b []byte) (err error) {
		switch field {
		case 1:
			v.Version, err = revision(b)
		case 2:
			var pair quorum.Pair
			if pair, err = keyValue(b); err == nil {
				v.Pairs = append(v.Pairs, pair)
			}
		}
		return err
	})
	return v, headed(v.Version, err)
}

func keyValue(b []byte) (p quorum.Pair, err error) {
	return p, fields(b, func(field uint64, n int64, b []byte) error {
		switch field {
		case 1:
			p.Key = string(b)
		case 2:
			p.Created = n
		case 3:
			p.Version = n
		case 5:
			p.Value = b
		case 6:
			p.Session = name(n)
		}
		return nil
	})
}

func txnResponse(b []byte) (version int64, ok bool, err error) {
	err = fields(b, func(field uint64, n int64, b []byte) (err error) {
		switch field {
		case 1:
			version, err = revision(b)
		case 2:
			ok = n != 0
		}
		return err
	})
	return version, ok, headed(version, err)
}

// ttlResponse reads the ttl that an answer about a lease has: granted, kept or left. It may be negative.
func ttlResponse(b []byte) (seconds int64, err error) {
	version := int64(0)
	err = fields(b, func(field uint64, n int64, b []byte) (err error) {
		switch field {
		case 1:
			version, err = revision(b)
		case 3:
			seconds = n
		}
		return err
	})
	return seconds, headed(version, err)
}

// happened is what a watch says.
type happened struct {
	revision  int64 // of the store
	created   bool  // the first word
	events    bool
	canceled  bool
	compacted bool
	reason    string
}

func watchResponse(b []byte) (h happened, err error) {
	err = fields(b, func(field uint64, n int64, b []byte) error {
		switch field {
		case 1:
			h.revision, err = revision(b)
			return err
		case 3:
			h.created = n != 0
		case 4:
			h.canceled = n != 0
		case 5:
			h.compacted = n != 0
		case 6:
			h.reason = string(b)
		case 11:
			h.events = true
		}
		return nil
	})
	return h, err
}

// stringResponse reads one field of text.
func stringResponse(b []byte, number uint64) (text string, err error) {
	err = fields(b, func(field uint64, _ int64, b []byte) error {
		if field == number {
			text = string(b)
		}
		return nil
	})
	return text, err
}

func authenticateResponse(b []byte) (token string, err error) { return stringResponse(b, 2) }
func statusResponse(b []byte) (version string, err error)     { return stringResponse(b, 2) }
