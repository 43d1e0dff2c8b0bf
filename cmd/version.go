package cmd

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/underlease/underlease/signals"
)

// version and commit are set by the linker in a release. Else the build information of the Go toolchain tells them.
var version, commit string

// build is what version prints.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit"`   // empty where the build does not know
	Modified bool   `json:"modified"` // the tree had changes beside the commit
	Go       string `json:"go"`
	Platform string `json:"platform"`
	Exact    bool   `json:"exact"` // signals, closed descriptors and limits reach the command as without us
}

func buildVersion() build {
	b := build{Version: version, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Exact: signals.Exact()}
	if b.Version != "" {
		return b
	}
	b.Version = "devel"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		b.Version = v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func (p *program) versionCommand() *cobra.Command {
	asJSON := false
	c := &cobra.Command{
		Use:               "version",
		Short:             "Show version and build",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("underlease version [--json]", "%q stands after version", args[0])
			}
			b := buildVersion()
			if asJSON {
				return writeJSON(p.out, b)
			}
			line := "underlease " + b.Version
			if b.Commit != "" {
				line += " (" + b.Commit
				if b.Modified {
					line += ", modified"
				}
				line += ")"
			}
			inherited := "as Go leaves them"
			if b.Exact {
				inherited = "exact"
			}
			_, err := fmt.Fprintf(p.out, "%s\n%s %s, inherited signals: %s\n", line, b.Go, b.Platform, inherited)
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "")
	return p.withHelp(c, versionHelp)
}
