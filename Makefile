# The targets are for people and for .ci/run alike.
#
#   make build                     bin/underlease
#   make test                      all tests
#   make lint                      gofmt, go vet, golangci-lint
#   make cross                     compile for the other systems
#   make bench                     every store beside the tools it is usual with: bin/bench.json, bin/bench.svg
#   make install PREFIX=/usr DESTDIR=/tmp/pkg

PREFIX      ?= /usr/local
DESTDIR     ?=
GO          ?= go
GOLANGCI    ?= golangci-lint
TESTFLAGS   ?=
VERSION     ?=

COMMIT      := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
CMD         := github.com/underlease/underlease/cmd
# Releases have an entry of their own on these two: the command gets signals and descriptors exactly as without us.
GOARCH      ?= $(shell $(GO) env GOARCH)
GOOS        ?= $(shell $(GO) env GOOS)
ENTRY       := $(if $(filter linux/amd64 linux/arm64,$(GOOS)/$(GOARCH)),-E ulentry)
LDFLAGS     := -s -w $(ENTRY) $(if $(VERSION),-X $(CMD).version=$(VERSION) -X $(CMD).commit=$(COMMIT))

# The systems that are compiled for. Nothing of them runs here but Linux on amd64.
CROSS := linux/arm64 linux/arm darwin/amd64 darwin/arm64 freebsd/amd64 freebsd/arm64

.PHONY: build test lint cross bench install clean

build:
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/underlease .

# The trees and the proofs measure, so that nothing may run beside them. The others wait for their servers for most of their time: three of
# them at once keep two processors busy.
test:
	$(GO) test -p 3 -parallel 4 -timeout=20m $(TESTFLAGS) $$($(GO) list ./... | grep -vE '/(proof|signals)$$')
	$(GO) test -timeout=20m $(TESTFLAGS) ./signals
	$(GO) test -parallel 4 -timeout=60m $(TESTFLAGS) ./proof
	CGO_ENABLED=0 $(GO) test -timeout=20m $(TESTFLAGS) -ldflags='-E ulentry' ./signals # the tree once more, with the entry of releases
	$(GO) test $(TESTFLAGS) -tags portable -run Portable ./signals

lint:
	@files=$$(git ls-files -z '*.go' | xargs -0r gofmt -l); \
	if [ -n "$$files" ]; then echo "not formatted:"; echo "$$files"; exit 1; fi
	$(GO) vet ./...
	$(GOLANGCI) run

cross:
	@set -e; for t in $(CROSS); do \
		echo "$$t"; \
		GOOS=$${t%/*} GOARCH=$${t#*/} CGO_ENABLED=0 $(GO) build -trimpath ./...; \
		GOOS=$${t%/*} GOARCH=$${t#*/} CGO_ENABLED=0 $(GO) vet -trimpath ./...; \
	done
	GOOS=windows GOARCH=amd64 $(GO) build -o /dev/null . # a program that refuses with one sentence
	$(GO) vet -tags portable ./signals # the guardian of the other systems, whose logic is tested here

bench: build
	$(GO) run ./proof/bench -n 300 -json bin/bench.json bin/underlease
	cd testdata/tools/plot && $(GO) run . '$(CURDIR)/bin/bench.json' '$(CURDIR)/bin/bench.svg'

# What was built is installed as it is: who installs as another user may have no Go.
install: $(if $(wildcard bin/underlease),,build)
	install -d '$(DESTDIR)$(PREFIX)/bin' \
		'$(DESTDIR)$(PREFIX)/share/man/man1' \
		'$(DESTDIR)$(PREFIX)/share/man/man5' \
		'$(DESTDIR)$(PREFIX)/share/man/man7' \
		'$(DESTDIR)$(PREFIX)/share/bash-completion/completions' \
		'$(DESTDIR)$(PREFIX)/share/zsh/site-functions' \
		'$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d' \
		'$(DESTDIR)$(PREFIX)/share/doc/underlease/examples'
	install -m 0755 bin/underlease '$(DESTDIR)$(PREFIX)/bin/underlease'
	bin/underlease completion bash > '$(DESTDIR)$(PREFIX)/share/bash-completion/completions/underlease'
	bin/underlease completion zsh > '$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_underlease'
	bin/underlease completion fish > '$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/underlease.fish'
	install -m 0644 packaging/man/*.1 '$(DESTDIR)$(PREFIX)/share/man/man1'
	install -m 0644 packaging/man/*.5 '$(DESTDIR)$(PREFIX)/share/man/man5'
	install -m 0644 packaging/man/*.7 '$(DESTDIR)$(PREFIX)/share/man/man7'
	install -m 0644 LICENSE '$(DESTDIR)$(PREFIX)/share/doc/underlease/LICENSE'
	install -m 0644 packaging/underlease.yaml '$(DESTDIR)$(PREFIX)/share/doc/underlease/examples/underlease.yaml'

clean:
	rm -rf bin dist
