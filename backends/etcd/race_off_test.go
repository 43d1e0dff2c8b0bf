//go:build !race

package etcd

const race = false
