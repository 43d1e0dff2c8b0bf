package needed

import "testing"

func TestAListAsksForItsNamesAndAllForEveryOne(t *testing.T) {
	for list, want := range map[string]bool{"": false, "bash": true, "cron,bash": true, "all": true, "cron": false, "bashful": false} {
		if got := by(list, "bash"); got != want {
			t.Errorf("%q: got bash required %t, want %t", list, got, want)
		}
	}
}
