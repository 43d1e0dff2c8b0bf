package etcd

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// codec writes and reads the messages of a run by hand, and leaves all others to the library of protocol buffers. That reads, when it is
// used first, the description of every message of etcd: half a millisecond, which is a twentieth of a short run. Of answers it reads
// what is used here.
type codec struct{ encoding.CodecV2 }

// newCodec returns a codec for [grpc.ForceCodecV2].
func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Name implements [encoding.CodecV2]. It goes into the type of the content: without one that is what etcd knows best.
func (c codec) Name() string { return "" }

// Marshal implements [encoding.CodecV2].
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	var b []byte
	ok := true
	switch m := v.(type) {
	case *pb.RangeRequest:
		b, ok = appendRange(nil, m)
	case *pb.TxnRequest:
		b, ok = appendTxn(nil, m)
	case *pb.LeaseGrantRequest:
		b = appendInt(appendInt(nil, 1, m.TTL), 2, m.ID)
	case *pb.LeaseKeepAliveRequest:
		b = appendInt(nil, 1, m.ID)
	default:
		ok = false
	}
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func appendInt(b []byte, field protowire.Number, n int64) []byte {
	if n == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), uint64(n))
}

func appendBytes(b []byte, field protowire.Number, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return appendPart(b, field, v)
}

// appendPart writes a message or a choice, which may be empty.
func appendPart(b []byte, field protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), v)
}

// appendRange reports whether the request has nothing that is not written here.
func appendRange(b []byte, m *pb.RangeRequest) ([]byte, bool) {
	other := m.Limit != 0 || m.Revision != 0 || m.SortOrder != 0 || m.SortTarget != 0 || m.KeysOnly || m.CountOnly ||
		m.MinModRevision != 0 || m.MaxModRevision != 0 || m.MinCreateRevision != 0 || m.MaxCreateRevision != 0
	b = appendBytes(appendBytes(b, 1, m.Key), 2, m.RangeEnd)
	if m.Serializable {
		b = appendInt(b, 7, 1)
	}
	return b, !other
}

// appendTxn reports whether the request has nothing that is not written here.
func appendTxn(b []byte, m *pb.TxnRequest) ([]byte, bool) {
	for _, compare := range m.Compare {
		part := appendInt(appendInt(nil, 1, int64(compare.Result)), 2, int64(compare.Target))
		part = appendBytes(part, 3, compare.Key)
		switch union := compare.TargetUnion.(type) {
		case *pb.Compare_CreateRevision:
			part = protowire.AppendVarint(protowire.AppendTag(part, 5, protowire.VarintType), uint64(union.CreateRevision))
		case *pb.Compare_ModRevision:
			part = protowire.AppendVarint(protowire.AppendTag(part, 6, protowire.VarintType), uint64(union.ModRevision))
		default:
			return nil, false
		}
		if len(compare.RangeEnd) > 0 {
			return nil, false
		}
		b = appendPart(b, 1, part)
	}
	for _, op := range m.Success {
		var part []byte
		switch request := op.Request.(type) {
		case *pb.RequestOp_RequestPut:
			put := request.RequestPut
			if put.PrevKv || put.IgnoreLease || put.IgnoreValue {
				return nil, false
			}
			part = appendPart(nil, 2, appendInt(appendBytes(appendBytes(nil, 1, put.Key), 2, put.Value), 3, put.Lease))
		case *pb.RequestOp_RequestDeleteRange:
			del := request.RequestDeleteRange
			if del.PrevKv {
				return nil, false
			}
			part = appendPart(nil, 3, appendBytes(appendBytes(nil, 1, del.Key), 2, del.RangeEnd))
		default:
			return nil, false
		}
		b = appendPart(b, 2, part)
	}
	return b, len(m.Failure) == 0
}

// Unmarshal implements [encoding.CodecV2].
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch m := v.(type) {
	case *pb.RangeResponse:
		return fields(data.Materialize(), func(field protowire.Number, n int64, b []byte) (err error) {
			switch field {
			case 1:
				m.Header, err = header(b)
			case 2:
				var kv *mvccpb.KeyValue
				if kv, err = keyValue(b); err == nil {
					m.Kvs = append(m.Kvs, kv)
				}
			case 3:
				m.More = n != 0
			case 4:
				m.Count = n
			}
			return err
		})
	case *pb.TxnResponse:
		return fields(data.Materialize(), func(field protowire.Number, n int64, b []byte) (err error) {
			switch field {
			case 1:
				m.Header, err = header(b)
			case 2:
				m.Succeeded = n != 0
			}
			return err
		})
	case *pb.LeaseGrantResponse:
		return fields(data.Materialize(), func(field protowire.Number, n int64, b []byte) error {
			switch field {
			case 2:
				m.ID = n
			case 3:
				m.TTL = n
			case 4:
				m.Error = string(b)
			}
			return nil
		})
	case *pb.LeaseKeepAliveResponse:
		return fields(data.Materialize(), func(field protowire.Number, n int64, _ []byte) error {
			switch field {
			case 2:
				m.ID = n
			case 3:
				m.TTL = n
			}
			return nil
		})
	}
	return c.CodecV2.Unmarshal(data, v)
}

// fields calls f with each field of a message: its number, and its value where that is an integer, or its bytes. They are the caller's.
func fields(data []byte, f func(field protowire.Number, n int64, b []byte) error) error {
	for len(data) > 0 {
		field, kind, size := protowire.ConsumeTag(data)
		if size < 0 {
			return protowire.ParseError(size)
		}
		data = data[size:]
		var n uint64
		var b []byte
		switch kind {
		case protowire.VarintType:
			n, size = protowire.ConsumeVarint(data)
		case protowire.BytesType:
			b, size = protowire.ConsumeBytes(data)
		default:
			size = protowire.ConsumeFieldValue(field, kind, data)
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		if err := f(field, int64(n), b); err != nil {
			return err
		}
		data = data[size:]
	}
	return nil
}

func header(data []byte) (*pb.ResponseHeader, error) {
	h := &pb.ResponseHeader{}
	return h, fields(data, func(field protowire.Number, n int64, _ []byte) error {
		switch field {
		case 1:
			h.ClusterId = uint64(n)
		case 2:
			h.MemberId = uint64(n)
		case 3:
			h.Revision = n
		case 4:
			h.RaftTerm = uint64(n)
		}
		return nil
	})
}

func keyValue(data []byte) (*mvccpb.KeyValue, error) {
	kv := &mvccpb.KeyValue{}
	return kv, fields(data, func(field protowire.Number, n int64, b []byte) error {
		switch field {
		case 1:
			kv.Key = b
		case 2:
			kv.CreateRevision = n
		case 3:
			kv.ModRevision = n
		case 4:
			kv.Version = n
		case 5:
			kv.Value = b
		case 6:
			kv.Lease = n
		}
		return nil
	})
}
