//go:build darwin || freebsd

package file

import (
	"context"
	"time"
)

// There is no inotify here, and kqueue would need a descriptor for every file: waiters look every second, and holders when they renew.
const (
	inAttrib uint32 = 1 << iota
	inCloseWrite
	inDelete
	inDeleteSelf
	inModify
	inMovedFrom
	inMovedTo
	inMoveSelf
)

// watch never notifies.
type watch struct{}

func (c *Client) watch(context.Context) *watch { return nil }

func (w *watch) close() {}

func (w *watch) add(string, uint32) {}

func (w *watch) wait(ctx context.Context, limit time.Duration, _ func(name string, mask uint32) bool) bool {
	pause(ctx, max(limit, time.Millisecond))
	return false
}
