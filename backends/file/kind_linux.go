package file

import "golang.org/x/sys/unix"

// fileSystem returns the magic number of the file system of a path.
func fileSystem(path string) (int64, error) {
	var st unix.Statfs_t
	err := again(func() error { return unix.Statfs(path, &st) })
	return int64(st.Type), fault("statfs", path, err) //nolint:unconvert // the type is not the same on every architecture
}

// The file systems that are refused, by the numbers of statfs(2).
//
// Source: linux/magic.h, and statfs(2) for those that are not in it.
var networks = map[int64]string{
	unix.NFS_SUPER_MAGIC:  "nfs",
	unix.SMB_SUPER_MAGIC:  "smb",
	unix.SMB2_SUPER_MAGIC: "smb",
	unix.CIFS_SUPER_MAGIC: "cifs",
	unix.FUSE_SUPER_MAGIC: "fuse",
	unix.V9FS_MAGIC:       "9p",
	unix.CODA_SUPER_MAGIC: "coda",
	unix.AFS_SUPER_MAGIC:  "afs",
	unix.CEPH_SUPER_MAGIC: "ceph",
	unix.NCP_SUPER_MAGIC:  "ncp",
	0x01161970:            "gfs2",
	0x7461636f:            "ocfs2",
	0x0BD00BD0:            "lustre",
	0x47504653:            "gpfs",
}

func networkName(magic int64) string { return networks[int64(uint32(magic))] }

// ordered reports whether a file system puts the data of a new file on the disk before the rename that gives it the name of an
// older one, without an fsync. On ext4 that is the option auto_da_alloc, which is on unless somebody switched it off; ext3
// keeps that order by its journal. They share their number with ext2, on which, as with noauto_da_alloc, a crash of the
// host in the moments after a release can leave an empty record, which is told as damaged.
//
// Source: Linux, Documentation/admin-guide/ext4.rst, auto_da_alloc. tmpfs does not outlive a crash.
func ordered(magic int64) bool {
	return magic == unix.EXT4_SUPER_MAGIC || magic == unix.TMPFS_MAGIC
}
