package etcd

import (
	"crypto/tls"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

// settings are what a URL says, and the variables of etcdctl where it says nothing.
type settings struct {
	scheme string
	hosts  []string // host:port each
	root   string   // of the keys

	user, password string
	tls            *tls.Config // nil: not encrypted
}

const (
	defaultPort = "2379"
	defaultRoot = "ul"
	rightForm   = "write etcd://host1,host2,host3"
)

// parse reads a URL. Errors show nothing of it that could be a secret.
func parse(u *url.URL) (s settings, err error) {
	s.scheme = strings.ToLower(u.Scheme)
	switch {
	case u.Opaque != "":
		return s, backends.Configf(rightForm, "the URL of the store names no host")
	case u.Fragment != "":
		return s, backends.Configf("write # in a password as %23", "the URL of the store has a fragment")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return s, backends.Configf(rightForm, "the parameters of the store's URL cannot be read")
	}
	encrypted := s.scheme == "etcds"
	hosts := u.Host
	if hosts == "" {
		if hosts, encrypted, err = endpoints(encrypted); err != nil {
			return s, err
		}
	}
	if s.hosts, err = network.Hosts(hosts, defaultPort, rightForm); err != nil {
		return s, err
	}
	if s.root = strings.Trim(u.Path, "/"); s.root == "" {
		s.root = defaultRoot
	}
	if err := s.login(u); err != nil {
		return s, err
	}
	if !encrypted && s.password != "" && certificates() {
		return s, backends.Configf("write etcds, or take the variables away", "a password would go unencrypted, while ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY is set")
	}
	return s, s.parameters(query, encrypted)
}

// certificates reports whether a variable names a certificate, by which etcdctl encrypts.
func certificates() bool {
	return slices.ContainsFunc([]string{"ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"}, func(name string) bool { return os.Getenv(name) != "" })
}

// endpoints reads the endpoints of etcdctl: HOST:PORT, or http or https before it. As it does, it encrypts what has no scheme where there is
// a certificate.
func endpoints(encrypted bool) (hosts string, _ bool, _ error) {
	const hint = "write host:port, http://host:port or https://host:port, several separated by commas"
	said := os.Getenv("ETCDCTL_ENDPOINTS")
	if said == "" {
		return "127.0.0.1", encrypted || certificates(), nil
	}
	var all []string
	ways := map[bool]bool{}
	for i, one := range strings.Split(said, ",") {
		one = strings.TrimSpace(one)
		scheme, host, ok := strings.Cut(one, "://")
		switch {
		case !ok:
			host = one
			ways[encrypted || certificates()] = true
		case scheme == "https":
			ways[true] = true
		case scheme == "http" && !encrypted:
			ways[false] = true
		case scheme == "http": // the URL of the store says more
		default:
			return "", false, backends.Configf(hint, "the endpoint %d in ETCDCTL_ENDPOINTS has a scheme that is neither http nor https", i+1)
		}
		host = strings.TrimSuffix(host, "/")
		if u, err := url.Parse("x://" + host); err != nil || u.Host != host || host == "" {
			return "", false, backends.Configf(hint, "the endpoint %d in ETCDCTL_ENDPOINTS is not a host with its port", i+1)
		}
		all = append(all, host)
	}
	if len(ways) > 1 {
		return "", false, backends.Configf("give all of them as https", "ETCDCTL_ENDPOINTS has endpoints with encryption and without")
	}
	return strings.Join(all, ","), encrypted || ways[true], nil
}

func (s *settings) login(u *url.URL) error {
	s.user, s.password = os.Getenv("ETCDCTL_USER"), os.Getenv("ETCDCTL_PASSWORD")
	if s.password == "" {
		s.user, s.password, _ = strings.Cut(s.user, ":")
	}
	if u.User != nil {
		s.user = u.User.Username()
		s.password, _ = u.User.Password()
	}
	if (s.user == "") != (s.password == "") {
		return backends.Configf("write etcd://USER:PASSWORD@host", "the store needs a user with a password, or neither")
	}
	return nil
}

func (s *settings) parameters(query url.Values, encrypted bool) (err error) {
	files := network.Certificates{CA: os.Getenv("ETCDCTL_CACERT"), Cert: os.Getenv("ETCDCTL_CERT"), Key: os.Getenv("ETCDCTL_KEY")}
	for _, parameter := range slices.Sorted(maps.Keys(query)) {
		switch {
		case !files.Set(parameter, query.Get(parameter)):
			return backends.Configf("known are ca, cert, key and server-name", "a store with the scheme %s has no parameter %q", s.scheme, parameter)
		case !encrypted:
			return backends.Configf("write etcds for an encrypted connection", "the parameter %q needs an encrypted connection", parameter)
		case len(query[parameter]) > 1:
			return backends.Configf("", "the parameter %q is in the store's URL more than once", parameter)
		}
	}
	if !encrypted {
		return nil
	}
	s.scheme = "etcds"
	if s.tls, err = files.Config(); err != nil {
		return err
	}
	s.tls.InsecureSkipVerify, _ = strconv.ParseBool(os.Getenv("ETCDCTL_INSECURE_SKIP_TLS_VERIFY")) // as etcdctl does; anything else is no
	return nil
}

// address is the URL for people, without anything that could be a secret.
func (s *settings) address() string {
	u := url.URL{Scheme: s.scheme, Host: strings.Join(s.hosts, ",")}
	if s.root != defaultRoot {
		u.Path = "/" + s.root
	}
	return u.String()
}

// identity is equal for URLs that differ in the order of hosts, the user or the way in which a connection is made.
func (s *settings) identity() string {
	hosts := slices.Sorted(slices.Values(s.hosts))
	return strings.Join([]string{"etcd", strings.Join(slices.Compact(hosts), ","), s.root}, "\n")
}
