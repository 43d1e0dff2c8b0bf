//go:build race

package signals_test

const raceDetector = true
