package cmd

// faulty panics in the runtime, in a line that a test knows.
func faulty() {
	var none map[string]int
	_ = none
	none["x"] = 1 // line 7
}
