package mysql

import (
	"crypto/tls"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"

	driver "github.com/go-sql-driver/mysql"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/network"
	"github.com/underlease/underlease/backends/table"
)

// settings are what a URL says.
type settings struct {
	scheme   string
	hosts    []string // host:port each; none with a socket
	socket   string
	database string
	table    string

	user, password string
	tls            *tls.Config // nil: not encrypted
	fallback       bool        // to a connection that is not
}

const (
	defaultPort = "3306"
	rightForm   = "write mysql://user:password@host:3306/database"
)

// parse reads a URL. Errors show nothing of it that could be a secret.
func parse(u *url.URL) (*settings, error) {
	s := &settings{scheme: strings.ToLower(u.Scheme), table: table.DefaultName, database: strings.TrimPrefix(u.Path, "/")}
	query, err := url.ParseQuery(u.RawQuery)
	switch {
	case err != nil:
		return nil, backends.Configf(rightForm, "the parameters of the store's URL cannot be read")
	case u.Opaque != "" || u.Host == "" && query.Get("socket") == "":
		return nil, backends.Configf(rightForm, "the URL of the store names no host")
	case u.Host != "" && query.Get("socket") != "":
		return nil, backends.Configf("write mysql:///database?socket=/path", "the URL of the store names a host and a socket")
	case u.Fragment != "":
		return nil, backends.Configf("write # in a password as %23", "the URL of the store has a fragment")
	case s.database == "" || strings.Contains(s.database, "/"):
		return nil, backends.Configf(rightForm, "the URL of the store names no database")
	}
	if u.User != nil {
		s.user = u.User.Username()
		s.password, _ = u.User.Password()
	}
	if u.Host != "" {
		if s.hosts, err = network.Hosts(u.Host, defaultPort, rightForm); err != nil {
			return nil, err
		}
	}
	return s, s.parameters(query)
}

func (s *settings) parameters(query url.Values) (err error) {
	mode, files, named := "false", network.Certificates{}, false
	for _, name := range slices.Sorted(maps.Keys(query)) {
		value := query[name][0]
		switch {
		case len(query[name]) > 1:
			return backends.Configf("", "the parameter %q is in the store's URL more than once", name)
		case name == "table":
			s.table, err = value, table.CheckName("table", value)
		case name == "socket":
			if s.socket = value; !strings.HasPrefix(value, "/") {
				err = backends.Configf("write mysql:///database?socket=/path", "the socket of the store has no absolute path")
			}
		case name == "tls":
			if mode = value; !slices.Contains([]string{"true", "false", "skip-verify", "preferred"}, value) {
				err = backends.Configf("one of true, false, skip-verify and preferred", "the parameter tls of the store's URL cannot be %q", value)
			}
		case files.Set(name, value):
			named = true
		default:
			err = backends.Configf("known are table, tls, ca, cert, key, server-name and socket", "a store with the scheme %s has no parameter %q", s.scheme, name)
		}
		if err != nil {
			return err
		}
	}
	switch {
	case mode != "false":
		return s.encrypt(mode, &files)
	case named:
		return backends.Configf("write tls=true, too", "certificates need an encrypted connection")
	}
	return nil
}

func (s *settings) encrypt(mode string, files *network.Certificates) (err error) {
	if s.tls, err = files.Config(); err != nil {
		return err
	}
	s.tls.InsecureSkipVerify = mode != "true" //nolint:gosec // asked for
	s.fallback = mode == "preferred"
	return nil
}

// config is how the library connects to a host, or to the socket.
func (s *settings) config(host string) *driver.Config {
	c := driver.NewConfig()
	c.User, c.Passwd, c.DBName = s.user, s.password, s.database
	c.Net, c.Addr = "tcp", host
	if s.socket != "" {
		c.Net, c.Addr = "unix", s.socket
	}
	if s.tls != nil {
		c.TLS = s.tls.Clone()
		if name, _, err := net.SplitHostPort(host); err == nil && c.TLS.ServerName == "" {
			c.TLS.ServerName = name
		}
		c.AllowFallbackToPlaintext = s.fallback
	}
	c.ClientFoundRows, c.MultiStatements, c.CheckConnLiveness = true, true, true
	c.Logger = silence{}
	return c
}

// address is the URL for people, without anything that could be a secret.
func (s *settings) address() string {
	u := url.URL{Scheme: s.scheme, Host: strings.Join(s.hosts, ","), Path: "/" + s.database}
	more := url.Values{}
	if s.table != table.DefaultName {
		more.Set("table", s.table)
	}
	if s.socket != "" {
		more.Set("socket", s.socket)
	}
	u.RawQuery = more.Encode()
	return u.String()
}

// identity is equal for URLs that differ in the order of hosts or the user.
func (s *settings) identity() string {
	hosts := slices.Sorted(slices.Values(s.hosts))
	return strings.Join([]string{"mysql", strings.Join(slices.Compact(hosts), ","), s.socket, s.database, s.table}, "\n")
}
