package postgres

import (
	"errors"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// settings are what a URL says, with what the environment adds.
type settings struct {
	scheme        string
	config        *pgconn.Config
	schema, table string
}

const rightForm = "write postgres://user@host:5432/database"

// known are the parameters of libpq that mean something here. Others would be sent to the server, or mean nothing.
//
// Source: PostgreSQL, Parameter Key Words of libpq.
var known = []string{
	"application_name", "channel_binding", "connect_timeout", "dbname", "host", "krbsrvname", "options", "passfile", "password", "port",
	"service", "servicefile", "sslcert", "sslkey", "sslmode", "sslnegotiation", "sslpassword", "sslrootcert", "sslsni", "target_session_attrs", "user",
}

// parse reads a URL. Errors show nothing of it that could be a secret.
func parse(u *url.URL) (s *settings, err error) {
	s = &settings{scheme: strings.ToLower(u.Scheme), table: table.DefaultName}
	switch {
	case u.Opaque != "":
		return nil, backends.Configf(rightForm, "the URL of the store names no host")
	case u.Fragment != "":
		return nil, backends.Configf("write # in a password as %23", "the URL of the store has a fragment")
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return nil, backends.Configf(rightForm, "the parameters of the store's URL cannot be read")
	}
	pairs := map[string]string{}
	if u.User != nil {
		pairs["user"] = u.User.Username()
		if password, ok := u.User.Password(); ok {
			pairs["password"] = password
		}
	}
	if err := hosts(u.Host, pairs); err != nil {
		return nil, err
	}
	if name := strings.TrimPrefix(u.Path, "/"); name != "" {
		pairs["dbname"] = name
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		values := query[name]
		value := values[0]
		switch {
		case len(values) > 1:
			return nil, backends.Configf("", "the parameter %q is in the store's URL more than once", name)
		case name == "table":
			s.table, err = value, table.CheckName("table", value)
		case name == "schema":
			s.schema, err = value, table.CheckName("schema", value)
		case !slices.Contains(known, name):
			return nil, backends.Configf("known are table, schema, and those of libpq: "+strings.Join(known, ", "), "a store with the scheme %s has no parameter %q", s.scheme, name)
		default:
			pairs[name] = value
		}
		if err != nil {
			return nil, err
		}
	}
	several := strings.Contains(pairs["host"], ",")
	if _, ok := pairs["target_session_attrs"]; several && !ok && os.Getenv("PGTARGETSESSIONATTRS") == "" {
		pairs["target_session_attrs"] = "read-write"
	}
	s.config, err = pgconn.ParseConfig(words(pairs))
	if err != nil {
		// The library's own error repeats what it was given.
		return nil, backends.Configf(rightForm, "the settings of the store cannot be used: %s", reason(err))
	}
	s.config.RuntimeParams["client_encoding"] = "UTF8"
	if s.config.RuntimeParams["application_name"] == "" {
		s.config.RuntimeParams["application_name"] = "underlease"
	}
	return s, nil
}

// hosts reads a list of hosts.
func hosts(list string, pairs map[string]string) error {
	if list == "" {
		return nil // the environment's, or the default
	}
	var names, ports []string
	for host := range strings.SplitSeq(list, ",") {
		one := url.URL{Host: host}
		if one.Hostname() == "" {
			return backends.Configf(rightForm, "the URL of the store has an empty host")
		}
		port := one.Port()
		if n, err := strconv.ParseUint(port, 10, 16); port != "" && (err != nil || n == 0) {
			return backends.Configf(rightForm, "the port %q of the store is not one of 1 to 65535", port)
		}
		names, ports = append(names, one.Hostname()), append(ports, port)
	}
	pairs["host"] = strings.Join(names, ",")
	if strings.Trim(strings.Join(ports, ""), "") != "" {
		for i, port := range ports {
			if port == "" {
				ports[i] = "5432"
			}
		}
		pairs["port"] = strings.Join(ports, ",")
	}
	return nil
}

// words writes settings in the form of keywords and values.
//
// Source: PostgreSQL, Keyword/Value Connection Strings: in single quotes, with quotes and backslashes escaped.
func words(pairs map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(pairs)) {
		b.WriteString(name + "='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(pairs[name]) + "' ")
	}
	return b.String()
}

// reason is the innermost of what a library says, which repeats nothing that it was given but the name of a file.
func reason(err error) string {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err.Error()
		}
		if path, ok := errors.AsType[*os.PathError](err); ok {
			return path.Error()
		}
		err = next
	}
}

// places are the hosts, host:port each or the path of a socket.
func (s *settings) places() []string {
	all := []string{place(s.config.Host, s.config.Port)}
	for _, f := range s.config.Fallbacks {
		if p := place(f.Host, f.Port); !slices.Contains(all, p) {
			all = append(all, p)
		}
	}
	return all
}

func place(host string, port uint16) string {
	return net.JoinHostPort(strings.ToLower(host), strconv.Itoa(int(port)))
}

// address is the URL for people, without anything that could be a secret.
func (s *settings) address() string {
	u := url.URL{Scheme: s.scheme, Host: strings.Join(s.places(), ","), Path: "/" + s.config.Database}
	if strings.HasPrefix(s.config.Host, "/") {
		u.Host, u.RawQuery = "", "host="+s.config.Host
	}
	more := url.Values{}
	if s.schema != "" {
		more.Set("schema", s.schema)
	}
	if s.table != table.DefaultName {
		more.Set("table", s.table)
	}
	if len(more) > 0 {
		u.RawQuery = strings.Trim(u.RawQuery+"&"+more.Encode(), "&")
	}
	return u.String()
}

// identity is equal for URLs that differ in the order of hosts or the user.
func (s *settings) identity() string {
	list := s.places()
	slices.Sort(list)
	return strings.Join([]string{"postgres", strings.Join(list, ","), s.config.Database, s.schema, s.table}, "\n")
}
