package cmd

// faulty panics in the runtime when it gets nil. The line in
// which it does so is known to a test: number 7.
func faulty(m map[string]int) {
	// see above
	m["x"] = 1
}
