package cmd

import "github.com/underlease/underlease/backends"

// Main runs the program and returns its exit code.
func Main() int { return MainWith(nil) }

// MainWith is [Main] with further kinds of stores, by the scheme of their URLs.
func MainWith(further map[string]backends.Scheme) int { return execute(deps{}) }
