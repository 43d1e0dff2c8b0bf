package signals

import (
	"strings"
	"testing"
)

func TestOurControlGroupIsFoundAmongMounts(t *testing.T) {
	const (
		proc    = "22 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw\n"
		unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
		hybrid  = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n" +
			"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
		readOnly = "612 600 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw\n"
		superRO  = "612 600 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup ro\n"
		part     = "612 600 0:26 /docker/4f1c /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"
		blank    = "612 600 0:26 / /mnt/control\\040groups\\134 rw - cgroup2 cgroup rw\n"
	)
	for _, c := range []struct{ name, mounts, own, dir, err string }{
		{"unified", proc + unified, "/system.slice/cron.service", "/sys/fs/cgroup/system.slice/cron.service", ""},
		{"unified, at its root", proc + unified, "/", "/sys/fs/cgroup", ""},
		{"hybrid", proc + hybrid, "/user.slice", "/sys/fs/cgroup/unified/user.slice", ""},
		{"read-only", proc + readOnly, "/", "", "/sys/fs/cgroup is mounted read-only"},
		{"read-only superblock", proc + superRO, "/", "", "/sys/fs/cgroup is mounted read-only"},
		{"one of two is read-only", readOnly + hybrid, "/", "/sys/fs/cgroup/unified", ""},
		{"part of the hierarchy", part, "/docker/4f1c/x", "/sys/fs/cgroup/x", ""},
		{"its root", part, "/docker/4f1c", "/sys/fs/cgroup", ""},
		{"a neighbour whose name begins alike", part, "/docker/4f1cd", "", "our control group /docker/4f1cd is not below what is mounted at /sys/fs/cgroup"},
		{"outside of our view", unified, "/../other", "", "our control group /../other is not below what is mounted at /sys/fs/cgroup"},
		{"blanks", blank, "/a", `/mnt/control groups\/a`, ""},
		{"only version 1", strings.ReplaceAll(hybrid, "cgroup2", "cgroup"), "/", "", "no control groups of version 2 are mounted"},
		{"nothing", "", "/", "", "no control groups of version 2 are mounted"},
		{"damaged", "30 23 - cgroup2 \n", "/", "", "no control groups of version 2 are mounted"},
	} {
		dir, err := unifiedDir(c.mounts, c.own)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if dir != c.dir || text != c.err {
			t.Errorf("%s: got %q and %q, want %q and %q", c.name, dir, text, c.dir, c.err)
		}
	}
	for groups, want := range map[string]string{
		"0::/a b\n":                          "/a b",
		"9:name=systemd:/\n0::/user.slice\n": "/user.slice",
		"1:cpu:/\n":                          "",
		"":                                   "",
	} {
		if got := unifiedGroup(groups); got != want {
			t.Errorf("own group in %q: got %q, want %q", groups, got, want)
		}
	}
}
