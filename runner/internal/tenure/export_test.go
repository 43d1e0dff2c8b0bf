package tenure

import "time"

// Phase returns how far the tenure has come.
func (m *Machine) Phase() Phase { return m.phase }

// Margin returns the margin in force.
func (m *Machine) Margin() time.Duration { return m.margin }
