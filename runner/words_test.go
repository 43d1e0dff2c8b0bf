package runner

import (
	"testing"
	"time"
)

func TestADurationIsWrittenWithoutItsEmptyParts(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                               "0s",
		time.Second:                     "1s",
		time.Minute:                     "1m",
		10 * time.Minute:                "10m",
		time.Hour:                       "1h",
		30 * time.Hour:                  "30h",
		time.Hour + 30*time.Minute:      "1h30m",
		time.Hour + time.Second:         "1h0m1s",
		-time.Hour:                      "-1h",
		1500 * time.Millisecond:         "1.5s",
		1500*time.Millisecond + 300_000: "1.5s",
		1500*time.Millisecond + 700_000: "1.501s",
		999 * time.Microsecond:          "999µs",
		59*time.Second + 999_999_999:    "1m",
		Forever:                         "forever",
	} {
		if got := Short(d); got != want {
			t.Errorf("%v: got %s, want %s", d, got, want)
		}
		if d == Forever {
			continue
		}
		if back, err := time.ParseDuration(Exact(d)); back != d || err != nil {
			t.Errorf("%v: got %s, which is read as %v (%v)", d, Exact(d), back, err)
		}
	}
}
