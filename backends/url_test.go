package backends

import "testing"

func TestAURLMayNameSeveralHosts(t *testing.T) {
	for raw, want := range map[string]string{
		"redis://h":                     "h",
		"redis://h:1":                   "h:1",
		"redis://h1:1,h2:2":             "h1:1,h2:2",
		"redis://h1,h2:2,h3/0?a=b,c":    "h1,h2:2,h3",
		"redis://u:p%2Fw@h1:1,[::1]:2/": "h1:1,[::1]:2",
		"redis://u:a,b@h1:1":            "h1:1",
		"file:///a,b":                   "",
		"file:///a@b":                   "",
		"file:a,b":                      "",
	} {
		u, err := ParseURL(raw)
		if err != nil || u.Host != want {
			t.Errorf("ParseURL(%q): got %v, %v, want the host %q", raw, u, err, want)
		}
	}
	for _, raw := range []string{"redis://h1:1,h2:x", "redis://h1:x,h2", "redis://h1,", "redis://h1,,h2", "redis://h1,a b", "redis://h1,h2%zz", "redis://h1,[::1", "redis://u:12345/s3cret@h", "redis+cluster://:12/s3cret@h1,h2"} {
		if u, err := ParseURL(raw); err == nil {
			t.Errorf("ParseURL(%q): got %v, want an error", raw, u)
		}
	}
	u, err := ParseURL("redis://user:secret@h1:1,h2:2/0")
	if want := "redis://user:xxxxx@h1:1,h2:2/0"; err != nil || u.Redacted() != want {
		t.Errorf("redacted: got %v, %v, want %q", u.Redacted(), err, want)
	}
}
