package signals_test

import (
	"github.com/underlease/underlease/runner"
	"github.com/underlease/underlease/signals"
)

var (
	_ runner.Tree  = (*signals.Guardian)(nil)
	_ runner.Alarm = (*signals.Alarm)(nil)
)
