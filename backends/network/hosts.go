package network

import (
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/underlease/underlease/backends"
)

// Hosts reads the hosts of a URL, which commas separate, in the form of [HostPort].
func Hosts(list, port, form string) ([]string, error) {
	var all []string
	for host := range strings.SplitSeq(list, ",") {
		one, err := HostPort(host, port, form)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// HostPort reads HOST or HOST:PORT and returns HOST:PORT, with the host in lower case. Port is that of a host that names none; form, for
// people, is what a right URL looks like. Errors are a [*backends.ConfigError].
func HostPort(host, port, form string) (string, error) {
	one := url.URL{Host: host}
	if one.Hostname() == "" {
		return "", backends.Configf(form, "the URL of the store has an empty host")
	}
	if p := one.Port(); p != "" {
		port = p
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", backends.Configf(form, "the port %q of the store is not one of 1 to 65535", port)
	}
	return net.JoinHostPort(strings.ToLower(one.Hostname()), port), nil
}
