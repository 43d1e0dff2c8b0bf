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
// older one, without an fsync, and puts that rename on the disk too in an fsync of the file after it. So does ext4: the first is its
// option auto_da_alloc, which is on unless somebody switched it off, the second its one journal, which keeps the rename in the
// transaction that the fsync commits. ext3 keeps that order by its journal. They share their number with ext2, on which, as with
// noauto_da_alloc, a crash of the host in the moments after a release or within an acquire can leave an empty record, which is told
// as damaged.
//
// Source: Linux, Documentation/admin-guide/ext4.rst, auto_da_alloc; fs/ext4/fsync.c, ext4_fsync_journal, and the change time that
// fs/ext4/namei.c, ext4_rename, gives the file. tmpfs does not outlive a crash.
func ordered(magic int64) bool {
	return magic == unix.EXT4_SUPER_MAGIC || magic == unix.TMPFS_MAGIC
}
