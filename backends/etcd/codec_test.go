package etcd

import (
	"math/rand/v2"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// values makes the values of messages: often none, else small ones and those at the ends.
type values struct{ *rand.Rand }

func (v values) int() int64 {
	return []int64{0, 0, 1, 127, 128, v.Int64(), -1, -1 << 63, 1<<63 - 1}[v.IntN(9)]
}

func (v values) bool() bool { return v.IntN(4) == 0 }

func (v values) bytes() []byte {
	b := make([]byte, v.IntN(3)*v.IntN(100))
	for i := range b {
		b[i] = byte(v.Uint32())
	}
	if len(b) == 0 {
		return nil // as protocol buffers read it
	}
	return b
}

func (v values) header() *pb.ResponseHeader {
	if v.bool() {
		return nil
	}
	return &pb.ResponseHeader{ClusterId: uint64(v.int()), MemberId: uint64(v.int()), Revision: v.int(), RaftTerm: uint64(v.int())}
}

func (v values) txn() *pb.TxnRequest {
	m := &pb.TxnRequest{}
	for range v.IntN(4) {
		c := &pb.Compare{Result: pb.Compare_CompareResult(v.IntN(4)), Key: v.bytes()}
		switch v.IntN(6) {
		case 0:
			c.Target, c.TargetUnion = pb.Compare_VALUE, &pb.Compare_Value{Value: v.bytes()}
		case 1, 2:
			c.Target, c.TargetUnion = pb.Compare_CREATE, &pb.Compare_CreateRevision{CreateRevision: v.int()}
		default:
			c.Target, c.TargetUnion = pb.Compare_MOD, &pb.Compare_ModRevision{ModRevision: v.int()}
		}
		if v.IntN(20) == 0 {
			c.RangeEnd = v.bytes()
		}
		m.Compare = append(m.Compare, c)
	}
	for range v.IntN(4) {
		op := &pb.RequestOp{}
		switch v.IntN(8) {
		case 0:
			op.Request = &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: v.bytes()}}
		case 1, 2, 3:
			op.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: v.bytes(), RangeEnd: v.bytes(), PrevKv: v.IntN(20) == 0}}
		default:
			op.Request = &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: v.bytes(), Value: v.bytes(), Lease: v.int(), PrevKv: v.IntN(20) == 0}}
		}
		m.Success = append(m.Success, op)
	}
	if v.IntN(10) == 0 {
		m.Failure = []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{}}}}
	}
	return m
}

// Whatever is written is read by protocol buffers as it was meant.
func TestWhatIsWrittenByHandIsTheMessage(t *testing.T) {
	v := values{rand.New(rand.NewPCG(1, 2))}
	c := newCodec()
	for range 5000 {
		read := &pb.RangeRequest{Key: v.bytes(), RangeEnd: v.bytes(), Serializable: v.bool()}
		if v.IntN(4) == 0 {
			read.Limit, read.SortOrder, read.KeysOnly = v.int(), pb.RangeRequest_SortOrder(v.IntN(3)), v.bool()
		}
		for _, m := range []proto.Message{
			read, v.txn(), &pb.LeaseGrantRequest{TTL: v.int(), ID: v.int()}, &pb.LeaseKeepAliveRequest{ID: v.int()},
			&pb.LeaseRevokeRequest{ID: v.int()}, // not by hand
		} {
			b, err := c.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			got := m.ProtoReflect().New().Interface()
			if err := proto.Unmarshal(b.Materialize(), got); err != nil || !proto.Equal(got, m) {
				t.Fatalf("got %v, %v, want %v", got, err, m)
			}
		}
	}
}

// Whatever protocol buffers write is read as it was meant, as far as it is used, and with more that a newer server may add.
func TestWhatIsReadByHandIsTheMessage(t *testing.T) {
	v := values{rand.New(rand.NewPCG(3, 4))}
	c := newCodec()
	for range 5000 {
		kvs := make([]*mvccpb.KeyValue, 0, 3)
		for range v.IntN(3) {
			kvs = append(kvs, &mvccpb.KeyValue{Key: v.bytes(), CreateRevision: v.int(), ModRevision: v.int(), Version: v.int(), Value: v.bytes(), Lease: v.int()})
		}
		for _, m := range []proto.Message{
			&pb.RangeResponse{Header: v.header(), Kvs: kvs, More: v.bool(), Count: v.int()},
			&pb.TxnResponse{Header: v.header(), Succeeded: v.bool()},
			&pb.LeaseGrantResponse{ID: v.int(), TTL: v.int(), Error: string(v.bytes()[:0])},
			&pb.LeaseKeepAliveResponse{ID: v.int(), TTL: v.int()},
			&pb.LeaseTimeToLiveResponse{ID: v.int(), Keys: [][]byte{v.bytes()}}, // not by hand
		} {
			b, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			if _, fallback := m.(*pb.LeaseTimeToLiveResponse); !fallback {
				b = append(b, 0xfa, 0x3f, 3, 'n', 'e', 'w', 0xf9, 0x3f, 1, 2, 3, 4, 5, 6, 7, 8) // two fields that nobody knows
			}
			got := m.ProtoReflect().New().Interface()
			if err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, got); err != nil || !proto.Equal(got, m) {
				t.Fatalf("got %v, %v, want %v", got, err, m)
			}
		}
	}
}

// What protocol buffers can read is no error here, and what nobody can read is nothing worse than one.
func FuzzWhatIsReadByHand(f *testing.F) {
	whole, err := proto.Marshal(&pb.RangeResponse{
		Header: &pb.ResponseHeader{Revision: 7}, Kvs: []*mvccpb.KeyValue{{Key: []byte("k"), Value: []byte("v"), Lease: 9}}, Count: 1,
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	c := newCodec()
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range []proto.Message{&pb.RangeResponse{}, &pb.TxnResponse{}, &pb.LeaseGrantResponse{}, &pb.LeaseKeepAliveResponse{}} {
			err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, m)
			if theirs := proto.Unmarshal(b, m.ProtoReflect().New().Interface()); theirs == nil && err != nil {
				t.Errorf("%T: got %v, want no error as of protocol buffers", m, err)
			}
		}
	})
}
