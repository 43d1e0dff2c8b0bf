package backends_test

import (
	"testing"

	"github.com/underlease/underlease/backends"
)

func TestASecretIsMaskedAndAWordIsNot(t *testing.T) {
	for _, c := range []struct {
		text    string
		secrets []string
		want    string
	}{
		{"permission denied", []string{"r"}, "permission denied"},
		{"permission denied for r", []string{"r"}, "permission denied for xxxxx"},
		{"'r' is wrong, r!", []string{"r"}, "'xxxxx' is wrong, xxxxx!"},
		{"error or r", []string{"", "r"}, "error or xxxxx"},
		{"rr r rr", []string{"r"}, "rr xxxxx rr"},
		{"no secret", []string{""}, "no secret"},
		{"password=s3cr3t_x", []string{"s3cr3t"}, "password=xxxxx_x"},
		{"as3cr3t s3cr3t4 s3cr3té", []string{"s3cr3t"}, "as3cr3t s3cr3t4 s3cr3té"},
		{"dial redis://u:p%2Fw@h", []string{"p/w"}, "dial redis://u:xxxxx@h"},
		{"dial redis://u:a%20b@h, a+b", []string{"a b"}, "dial redis://u:xxxxx@h, xxxxx"},
		{"pass-word and pass", []string{"pass", "pass-word"}, "xxxxx and xxxxx"},
		{"AUTH x!/y!", []string{"!/y!"}, "AUTH xxxxxx"},
		{"é\xffr r", []string{"r"}, "é\xffxxxxx xxxxx"},
		{"ab", []string{"ab", "ab"}, "xxxxx"},
	} {
		if got := backends.Masked(c.text, c.secrets...); got != c.want {
			t.Errorf("%q without %q: got %q, want %q", c.text, c.secrets, got, c.want)
		}
	}
}
