// Command assets makes what a release has beside the program and the files of this tree: completions, man pages as they are
// installed, the scripts of packages, and the licences of everything that is linked.
//
//	go run ./packaging/assets DIRECTORY [SECONDS]
//
// SECONDS since 1970 are the time that every file gets: packages of Alpine have that of their scripts.
//
// It promises the same bytes for the same commit: nothing in them comes from the clock, the host or the network. Modules are those
// of the module cache. A linked module without a licence, or with one that nobody here has looked at, ends it with an error.
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// targets are the systems of .goreleaser.yaml: which modules are linked depends on them.
var targets = []string{"linux/amd64", "linux/arm64", "linux/arm", "darwin/amd64", "darwin/arm64", "freebsd/amd64"}

func main() {
	log.SetFlags(0)
	log.SetPrefix("assets: ")
	if len(os.Args) != 2 && len(os.Args) != 3 {
		log.Fatal("usage: go run ./packaging/assets DIRECTORY [SECONDS]")
	}
	err := makeAll(os.Args[1])
	if err == nil && len(os.Args) == 3 {
		err = setTimes(os.Args[1], os.Args[2])
	}
	if err != nil {
		log.Fatal(err)
	}
}

func makeAll(dir string) error {
	for _, sub := range []string{"man", "completions", "scripts"} {
		if err := os.RemoveAll(filepath.Join(dir, sub)); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	if err := manPages(filepath.Join(dir, "man")); err != nil {
		return err
	}
	if err := completions(filepath.Join(dir, "completions")); err != nil {
		return err
	}
	scripts, err := filepath.Glob("packaging/package/*.sh")
	if err != nil || len(scripts) == 0 {
		return fmt.Errorf("%d scripts, %w", len(scripts), err)
	}
	for _, script := range scripts {
		text, err := os.ReadFile(script)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "scripts", filepath.Base(script)), text, 0o644); err != nil {
			return err
		}
	}
	text, err := licences()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "THIRD-PARTY-LICENCES"), text, 0o644)
}

func setTimes(dir, seconds string) error {
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return fmt.Errorf("%q is no number of seconds", seconds)
	}
	at := time.Unix(n, 0)
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chtimes(path, at, at)
	})
}

// manPages packs the pages. Debian and its like keep them so; without a name and a time the packed bytes are always the same.
func manPages(dir string) error {
	pages, err := filepath.Glob("packaging/man/*.[0-9]")
	if err != nil || len(pages) == 0 {
		return fmt.Errorf("%d man pages, %w", len(pages), err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		var packed bytes.Buffer
		w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the level is one
		if _, err := w.Write(text); err != nil {
			return err
		}
		if err := w.Close(); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(page)+".gz"), packed.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// completions asks the program, built for the host.
func completions(dir string) error {
	for shell, file := range map[string]string{"bash": "underlease.bash", "zsh": "_underlease", "fish": "underlease.fish"} {
		text, err := output(nil, "go", "run", ".", "completion", shell)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, file), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func output(environ []string, name string, args ...string) ([]byte, error) {
	c := exec.Command(name, args...) //nolint:noctx // whoever started this ends it
	c.Env = append(append(os.Environ(), "CGO_ENABLED=0"), environ...)
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return out, nil
}

// linked is a package that the program links.
type linked struct {
	Dir    string
	Module *struct {
		Path, Version, Dir string
		Main               bool
	}
}

// licences returns the licence of Go's own library and those of the linked modules, in the order of their paths.
func licences() ([]byte, error) {
	goroot, err := output(nil, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(goroot)), "LICENSE"))
	if err != nil {
		return nil, err
	}
	found := map[string]map[string]bool{} // module and version, and its files
	for _, target := range targets {
		system, processor, _ := strings.Cut(target, "/")
		list, err := output([]string{"GOOS=" + system, "GOARCH=" + processor, "GOFLAGS=-mod=readonly"}, "go", "list", "-deps", "-json=Dir,Module", ".")
		if err != nil {
			return nil, err
		}
		for dec := json.NewDecoder(bytes.NewReader(list)); ; {
			var p linked
			if err := dec.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, err
			}
			if p.Module == nil || p.Module.Main {
				continue
			}
			if p.Module.Dir == "" {
				return nil, fmt.Errorf("%s is not in the module cache: run go mod download", p.Module.Path)
			}
			name := p.Module.Path + " " + p.Module.Version
			if found[name] == nil {
				found[name] = map[string]bool{}
			}
			// A package that was copied into a module keeps its licence beside it.
			for dir := p.Dir; ; dir = filepath.Dir(dir) {
				files, err := licenceFiles(dir)
				if err != nil {
					return nil, err
				}
				for _, f := range files {
					found[name][f] = true
				}
				if dir == p.Module.Dir || len(dir) < len(p.Module.Dir) {
					break
				}
			}
		}
	}
	var out bytes.Buffer
	out.WriteString("underlease is under the Apache License 2.0. It links what follows, each under its own licence.\n")
	section(&out, "The standard library of Go", "BSD-3-Clause", own)
	names := make([]string, 0, len(found))
	for name := range found {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := ofModule(&out, name, found[name]); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), nil
}

func ofModule(out *bytes.Buffer, name string, files map[string]bool) error {
	paths := make([]string, 0, len(files))
	for f := range files {
		paths = append(paths, f)
	}
	slices.Sort(paths)
	known := false
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		kind := kindOf(string(text))
		known = known || kind != ""
		if kind == "" {
			kind = filepath.Base(path)
		}
		section(out, name, kind, text)
	}
	if !known {
		return fmt.Errorf("%s: no licence that is known here, in %d files: look at it, and add it to kinds", name, len(files))
	}
	return nil
}

func section(out *bytes.Buffer, name, kind string, text []byte) {
	fmt.Fprintf(out, "\n%s\n%s (%s)\n", strings.Repeat("=", 80), name, kind)
	if strings.HasPrefix(kind, "MPL") {
		fmt.Fprintf(out, "Its source is the Go module of this name and version.\n")
	}
	fmt.Fprintf(out, "\n%s\n", bytes.TrimSpace(text))
}

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([-.].*)?$`)

func licenceFiles(dir string) (found []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if e.Type().IsRegular() && licenceName.MatchString(e.Name()) && !strings.HasSuffix(e.Name(), ".go") {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found, err
}

// kinds are the licences that a program under the Apache License may link, with words that stand in them alone.
var kinds = []struct{ kind, words string }{
	{"MPL-2.0", "Mozilla Public License"},
	{"Apache-2.0", "Apache License"},
	{"BSD", "Redistribution and use in source and binary forms"},
	{"ISC", "Permission to use, copy, modify, and"},
	{"MIT", "Permission is hereby granted, free of charge"},
}

func kindOf(text string) string {
	flat := strings.Join(strings.Fields(text), " ")
	for _, strange := range []string{"GNU GENERAL PUBLIC LICENSE", "GNU AFFERO", "Business Source License", "Server Side Public License", "Commons Clause"} {
		if strings.Contains(flat, strange) && !strings.Contains(flat, "Mozilla Public License") {
			return ""
		}
	}
	for _, k := range kinds {
		if strings.Contains(flat, k.words) {
			return k.kind
		}
	}
	return ""
}
