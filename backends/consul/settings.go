package consul

import (
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
)

// settings are what a URL says, and the variables of Consul's own client where it says nothing.
type settings struct {
	config  *api.Config
	host    string // host:port, or the path of a socket
	root    string // of the keys
	least   time.Duration
	secrets []string
}

const (
	defaultPort = "8500"
	defaultRoot = "ul"
	rightForm   = "write consul://host:8500"

	// Source: Consul HTTP API, Session.TTL: between 10s and 86400s; the lower limit is session_ttl_min.
	defaultLeast = 10 * time.Second
	longest      = 24 * time.Hour
)

// parse reads a URL. Errors show nothing of it that could be a secret.
func parse(u *url.URL) (s settings, err error) {
	switch {
	case u.Opaque != "":
		return s, backends.Configf(rightForm, "the URL of the store names no host")
	case u.Fragment != "":
		return s, backends.Configf("write # in a token as %23", "the URL of the store has a fragment")
	case strings.Contains(u.Host, ","):
		return s, backends.Configf("name the agent on this host, which knows the servers", "the URL of the store names several hosts")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return s, backends.Configf(rightForm, "the parameters of the store's URL cannot be read")
	}
	s = settings{config: api.DefaultConfig(), least: defaultLeast}
	if u.Host != "" {
		s.config.Address, s.config.Scheme = u.Host, "http"
	}
	if strings.ToLower(u.Scheme) == "consuls" {
		s.config.Scheme = "https"
	}
	if err := s.endpoint(); err != nil {
		return s, err
	}
	if s.root = strings.Trim(u.Path, "/"); s.root == "" {
		s.root = defaultRoot
	}
	if u.User != nil {
		token, ok := u.User.Password()
		if u.User.Username() != "" || !ok {
			return s, backends.Configf("write consul://:TOKEN@host", "the URL of the store has a user, and Consul knows tokens alone")
		}
		s.config.Token, s.config.TokenFile = token, ""
	}
	if err := s.parameters(query); err != nil {
		return s, err
	}
	return s, s.token()
}

// endpoint reads the address, which a variable may give in any form that Consul's own client takes.
func (s *settings) endpoint() (err error) {
	scheme, rest, ok := strings.Cut(s.config.Address, "://")
	switch {
	case ok && scheme == "unix":
		s.host = rest
		return nil
	case ok && scheme == "https":
		s.config.Scheme = "https"
	case !ok:
		rest = s.config.Address
	}
	host, path, _ := strings.Cut(rest, "/")
	if s.host, err = network.HostPort(host, defaultPort, rightForm); err != nil {
		return err
	}
	s.config.Address = s.host
	if path != "" {
		s.config.PathPrefix = "/" + path
	}
	return nil
}

func (s *settings) parameters(query url.Values) error {
	for _, parameter := range slices.Sorted(maps.Keys(query)) {
		value, encrypted := query.Get(parameter), false
		switch parameter {
		case "token-file":
			s.config.TokenFile, s.config.Token = value, ""
		case "datacenter":
			s.config.Datacenter = value
		case "namespace":
			s.config.Namespace = value
		case "partition":
			s.config.Partition = value
		case "session-ttl-min":
			d, err := time.ParseDuration(value)
			if err != nil || d <= 0 || d > longest {
				return backends.Configf("write a duration such as 1s", "the parameter session-ttl-min of the store's URL cannot be %q", value)
			}
			s.least = d
		case "ca":
			s.config.TLSConfig.CAFile, encrypted = value, true
		case "cert":
			s.config.TLSConfig.CertFile, encrypted = value, true
		case "key":
			s.config.TLSConfig.KeyFile, encrypted = value, true
		case "server-name":
			s.config.TLSConfig.Address, encrypted = value, true
		default:
			return backends.Configf("known are token-file, datacenter, namespace, partition, session-ttl-min, ca, cert, key and server-name",
				"a store with the scheme %s has no parameter %q", s.scheme(), parameter)
		}
		switch {
		case encrypted && s.config.Scheme != "https":
			return backends.Configf("write consuls for an encrypted connection", "the parameter %q needs an encrypted connection", parameter)
		case len(query[parameter]) > 1:
			return backends.Configf("", "the parameter %q is in the store's URL more than once", parameter)
		}
	}
	client := network.Certificates{Cert: s.config.TLSConfig.CertFile, Key: s.config.TLSConfig.KeyFile}
	return client.Paired()
}

func (s *settings) token() error {
	if file := s.config.TokenFile; file != "" {
		b, err := os.ReadFile(file)
		if err != nil {
			return backends.Configf("", "the file of the token cannot be read: %v", err)
		}
		s.config.Token, s.config.TokenFile = strings.TrimSpace(string(b)), ""
	}
	s.secrets = append(s.secrets, s.config.Token)
	if auth := s.config.HttpAuth; auth != nil {
		s.secrets = append(s.secrets, auth.Password)
	}
	return nil
}

// scheme is that of the URL.
func (s *settings) scheme() string {
	if s.config.Scheme == "https" {
		return "consuls"
	}
	return "consul"
}

// address is the URL for people, without anything that could be a secret.
func (s *settings) address() string {
	u := url.URL{Scheme: s.scheme(), Host: s.host}
	if strings.HasPrefix(s.host, "/") {
		u.Host, u.Path = "", s.host
	}
	if s.root != defaultRoot {
		u.Path += "/" + s.root
	}
	q := url.Values{}
	for name, value := range map[string]string{"datacenter": s.config.Datacenter, "namespace": s.config.Namespace, "partition": s.config.Partition} {
		if value != "" {
			q.Set(name, value)
		}
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// identity is equal for URLs that differ in the token or the way in which a connection is made.
func (s *settings) identity() string {
	return strings.Join([]string{"consul", s.host, s.root, s.config.Datacenter, s.config.Namespace, s.config.Partition}, "\n")
}
