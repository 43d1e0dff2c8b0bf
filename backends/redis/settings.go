package redis

import (
	"crypto/tls"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

// kind is how a URL leads to a server.
type kind int

const (
	direct kind = iota
	socket
	sentinels
	cluster
)

// settings are what a URL says.
type settings struct {
	kind     kind
	scheme   string   // as in the URL, in lower case
	hosts    []string // host:port each, or the path of a socket
	primary  string   // as the sentinels know it
	database int
	replicas int

	user, password                 string
	sentinelUser, sentinelPassword string

	tls *tls.Config // nil: not encrypted
}

const (
	defaultPort         = "6379"
	defaultSentinelPort = "26379"
	defaultPrimary      = "mymaster" // as in the configuration that Redis comes with
)

var rightForms = map[kind]string{
	direct:    "write redis://host:6379/0",
	socket:    "write redis+unix:///run/redis/redis.sock",
	sentinels: "write redis+sentinel://host1,host2,host3/primary",
	cluster:   "write redis+cluster://host1,host2,host3",
}

// parse reads a URL. Errors show nothing of it that could be a secret.
func parse(u *url.URL) (s settings, err error) {
	s.scheme = strings.ToLower(u.Scheme)
	encrypted := strings.HasPrefix(s.scheme, "rediss")
	_, way, _ := strings.Cut(s.scheme, "+")
	s.kind = map[string]kind{"": direct, "unix": socket, "sentinel": sentinels, "cluster": cluster}[way]
	form := rightForms[s.kind]
	switch {
	case u.Opaque != "" || u.Host == "" && s.kind != socket:
		return s, backends.Configf(form, "the URL of the store names no host")
	case u.Fragment != "":
		return s, backends.Configf("write # in a password as %23", "the URL of the store has a fragment")
	}
	if u.User != nil {
		s.user = u.User.Username()
		s.password, _ = u.User.Password()
		if s.user != "" && s.password == "" {
			return s, backends.Configf("write redis://:PASSWORD@host for a password alone", "the URL of the store has a user without a password")
		}
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return s, backends.Configf(form, "the parameters of the store's URL cannot be read")
	}
	if err := s.path(u, form); err != nil {
		return s, err
	}
	return s, s.parameters(query, encrypted)
}

// path reads hosts, database and primary.
func (s *settings) path(u *url.URL, form string) (err error) {
	path := strings.TrimPrefix(u.Path, "/")
	port := defaultPort
	switch s.kind {
	case socket:
		if u.Host != "" || path == "" || strings.HasSuffix(path, "/") {
			return backends.Configf(form, "the URL of the store names no absolute path of a socket")
		}
		s.hosts = []string{u.Path}
		return nil
	case sentinels:
		port = defaultSentinelPort
		if s.primary = path; path == "" {
			s.primary = defaultPrimary
		}
	case cluster:
		if path != "" && path != "0" {
			return backends.Configf(form, "a cluster has no database but 0")
		}
	case direct:
		if strings.Contains(u.Host, ",") {
			return backends.Configf("for several hosts write redis+sentinel:// or redis+cluster://", "the URL of the store names several hosts")
		}
		if path != "" {
			if s.database, err = number(path); err != nil {
				return backends.Configf(form, "the database %q of the store is not a number", path)
			}
		}
	}
	s.hosts, err = network.Hosts(u.Host, port, form)
	return err
}

func number(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	return int(n), err
}

func (s *settings) parameters(query url.Values, encrypted bool) (err error) {
	var certificates network.Certificates
	for _, parameter := range slices.Sorted(maps.Keys(query)) {
		values := query[parameter]
		value := values[len(values)-1]
		wrong := func() error {
			return backends.Configf("", "the parameter %s of the store's URL cannot be %q", parameter, value)
		}
		known, encrypting := true, false
		switch parameter {
		case "replicas":
			if s.replicas, err = number(value); err != nil || s.replicas > 100 {
				return wrong()
			}
		case "db":
			known = s.kind == socket || s.kind == sentinels
			if s.database, err = number(value); err != nil {
				return wrong()
			}
		case "sentinel-user":
			s.sentinelUser, known = value, s.kind == sentinels
		case "sentinel-password":
			s.sentinelPassword, known = value, s.kind == sentinels
		default:
			encrypting = certificates.Set(parameter, value)
			known = encrypting
		}
		switch {
		case encrypting && !encrypted:
			return backends.Configf("write rediss for an encrypted connection", "the parameter %q needs an encrypted connection", parameter)
		case !known:
			return backends.Configf("known are ca, cert, key, server-name, replicas, db, sentinel-user and sentinel-password, each where it applies",
				"a store with the scheme %s has no parameter %q", s.scheme, parameter)
		case len(values) > 1:
			return backends.Configf("", "the parameter %q is in the store's URL more than once", parameter)
		}
	}
	if !encrypted {
		return nil
	}
	s.tls, err = certificates.Config()
	return err
}

// address is the URL for people, without anything that could be a secret.
func (s *settings) address() string {
	u := url.URL{Scheme: s.scheme, Host: strings.Join(s.hosts, ",")}
	switch s.kind {
	case socket:
		u.Host, u.Path = "", s.hosts[0]
	case sentinels:
		u.Path = "/" + s.primary
	default:
	}
	if s.database != 0 {
		if s.kind == direct {
			u.Path = "/" + strconv.Itoa(s.database)
		} else {
			u.RawQuery = "db=" + strconv.Itoa(s.database)
		}
	}
	return u.String()
}

// identity is equal for URLs that differ in the order of hosts, the user or the way in which a connection is made.
func (s *settings) identity() string {
	hosts := slices.Sorted(slices.Values(s.hosts))
	parts := []string{"redis", strconv.Itoa(int(s.kind)), strings.Join(slices.Compact(hosts), ","), s.primary, strconv.Itoa(s.database)}
	return strings.Join(parts, "\n")
}

// secrets are what no text may show.
func (s *settings) secrets() []string { return []string{s.password, s.sentinelPassword} }
