package postgres

import (
	"context"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// askPrimary is how long a replica may take to say where its primary is.
const askPrimary = 500 * time.Millisecond

// version is that of the tables.
const version = 1

// schema makes the tables where they are not there, and changes nothing that is. The fill factor leaves room in each page, so
// that a renewal changes no index.
//
// Source: PostgreSQL, Heap-Only Tuples.
const schema = `-- the leases, one row each
CREATE TABLE IF NOT EXISTS {leases} (
	namespace bytea    NOT NULL,
	lease     bytea    NOT NULL,
	form      smallint NOT NULL, -- of what follows
	revision  bigint   NOT NULL, -- grows with every write
	term      bigint   NOT NULL, -- the last one
	version   bigint   NOT NULL, -- the last one of a record
	gone      integer  NOT NULL, -- the day since 1970 after which the row may go
	slots     jsonb    NOT NULL,
	ends      jsonb    NOT NULL,
	records   jsonb    NOT NULL,
	PRIMARY KEY (namespace, lease)
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS {index} ON {leases} (gone);

-- the terms that are installed at this database, for {guard}
CREATE TABLE IF NOT EXISTS {fences} (
	lease text   PRIMARY KEY,
	term  bigint NOT NULL
);

-- {guard} is called in the transaction of a job, with UNDERLEASE_NAME and UNDERLEASE_TERM, before it writes. It raises an
-- error where a newer term was installed, and installs this one; whoever has a newer term waits until the transaction is over.
CREATE OR REPLACE FUNCTION {guard}(lease text, term bigint) RETURNS void LANGUAGE plpgsql AS $guard$
DECLARE
	newest bigint;
BEGIN
	IF $1 IS NULL OR $1 = '' OR $2 IS NULL OR $2 <= 0 THEN
		RAISE EXCEPTION 'underlease: the guard needs a lease and its term' USING ERRCODE = 'invalid_parameter_value';
	END IF;
	-- Several transactions of one term do not wait for one another.
	PERFORM FROM {fences} f WHERE f.lease = $1 AND f.term = $2 FOR SHARE;
	IF FOUND THEN
		RETURN;
	END IF;
	INSERT INTO {fences} AS f (lease, term) VALUES ($1, $2)
	ON CONFLICT ON CONSTRAINT {fencekey} DO UPDATE SET term = greatest(f.term, excluded.term)
	RETURNING f.term INTO newest;
	IF newest > $2 THEN
		RAISE EXCEPTION 'underlease: the term % of "%" is older than %, which is installed', $2, $1, newest
			USING ERRCODE = 'integrity_constraint_violation', HINT = 'the lease was lost: stop this job';
	END IF;
END
$guard$;

-- the markers that jobs have written in transactions of their own, by {mark}
CREATE TABLE IF NOT EXISTS {marks} (
	namespace bytea  NOT NULL,
	lease     bytea  NOT NULL,
	term      bigint NOT NULL, -- under which it was written
	version   bigint NOT NULL, -- as that of a record
	written   bigint NOT NULL, -- milliseconds since 1970
	value     text   NOT NULL,
	PRIMARY KEY (namespace, lease)
);

-- {mark} is called in the transaction of a job that runs under underlease gate, with UNDERLEASE_NAME and UNDERLEASE_TERM:
-- the marker of the gate and what the job has written are there both, or neither is. It calls the guard, and raises an error where
-- another run was faster.
CREATE OR REPLACE FUNCTION {mark}(lease text, term bigint, namespace text DEFAULT '') RETURNS void LANGUAGE plpgsql AS $mark$
#variable_conflict use_column
DECLARE
	plain text   := CASE WHEN $3 = '' THEN $1 ELSE $3 || '/' || $1 END;
	ms    bigint := floor(extract(epoch FROM clock_timestamp()) * 1000);
	l     record;
	other bigint;
BEGIN
	IF $3 IS NULL THEN
		RAISE EXCEPTION 'underlease: a namespace is a text; without one leave it out' USING ERRCODE = 'invalid_parameter_value';
	END IF;
	PERFORM {guard}(plain, $2);
	SELECT slots->0 AS slot, version, records ? '6d61726b6572' AS applied INTO l -- 'marker' in hexadecimal
		FROM {leases} WHERE namespace = convert_to($3, 'UTF8') AND lease = convert_to($1, 'UTF8');
	IF l.slot IS NULL OR l.slot->>'h' = '' OR (l.slot->>'t')::bigint <> $2 THEN
		RAISE EXCEPTION 'underlease: nobody holds "%" with the term %', plain, $2
			USING ERRCODE = 'integrity_constraint_violation', HINT = 'the lease was lost: stop this job; a namespace is the third argument';
	END IF;
	INSERT INTO {marks} AS m (namespace, lease, term, version, written, value)
	SELECT convert_to($3, 'UTF8'), convert_to($1, 'UTF8'), $2, greatest(l.version + 1, ms), ms, json_build_object(
		'version', 1, 'term', $2, 'holder', l.slot->>'w', 'run_id', plain || '/' || $2, 'at_ms', (l.slot->>'b')::bigint,
		'took_ms', greatest(0, ms - (l.slot->>'b')::bigint), 'until_ms', greatest(0, ms - (l.slot->>'b')::bigint))::text
	WHERE NOT l.applied
	ON CONFLICT ON CONSTRAINT {markskey} DO UPDATE SET term = m.term
	RETURNING term INTO other;
	IF other IS DISTINCT FROM $2 THEN
		RAISE EXCEPTION 'underlease: "%" is applied already', plain
			USING ERRCODE = 'unique_violation', HINT = 'roll this transaction back: another run has done its work';
	END IF;
END
$mark$;

-- which of these there are
CREATE TABLE IF NOT EXISTS {version} (version integer NOT NULL);
INSERT INTO {version} (version) SELECT {number} WHERE NOT EXISTS (SELECT FROM {version});
`

func (s *settings) schemaSQL() string {
	return strings.NewReplacer(
		"{leases}", s.name(""), "{index}", quoted(s.table+"_gone"), "{fences}", s.name("_fences"), "{guard}", s.name("_guard"),
		"{marks}", s.name("_marks"), "{mark}", s.name("_mark"), "{markskey}", quoted(s.table+"_marks_pkey"),
		"{fencekey}", quoted(s.table+"_fences_pkey"), "{version}", s.name("_schema"), "{number}", strconv.Itoa(version),
	).Replace(schema)
}

// Schema returns the SQL that makes what a store needs, for people whose role may not: it may be run again and again.
func Schema(u *url.URL) (string, error) {
	s, err := parse(u)
	if err != nil {
		return "", err
	}
	return "BEGIN;\n" + s.schemaSQL() + "COMMIT;\n" + s.rights(), nil
}

// rights are what a role needs that does not own the tables.
func (s *settings) rights() string {
	return "\n-- what another role needs:\n" +
		"-- GRANT SELECT, INSERT, UPDATE, DELETE ON " + s.name("") + " TO role; -- underlease\n" +
		"-- GRANT SELECT, DELETE ON " + s.name("_marks") + " TO role; -- underlease gate and underlease marker\n" +
		"-- GRANT SELECT, INSERT, UPDATE ON " + s.name("_fences") + " TO role; -- jobs that call the guard\n" +
		"-- GRANT SELECT ON " + s.name("") + " TO role; -- jobs that write a marker, beside that, with\n" +
		"-- GRANT SELECT, INSERT, UPDATE ON " + s.name("_marks") + " TO role;\n"
}

// Apply makes what a store needs and brings it up to date. It returns what it did, in words.
func Apply(ctx context.Context, u *url.URL) (string, error) {
	d, err := newDatabase(u)
	if err != nil {
		return "", err
	}
	defer d.pool.Close()
	before, err := d.version(ctx)
	switch {
	case d.Missing(err):
	case err != nil:
		return "", d.Classify(ctx, err)
	case before > version:
		return "", backends.WithHint(backends.Broken(nil, "%s: the schema has the version %d, and this program knows %d", d.address, before, version), "update underlease on this host")
	}
	if err := d.checkForm(ctx); err != nil {
		return "", d.Classify(ctx, err)
	}
	if err := d.Create(ctx); err != nil {
		return "", d.Classify(ctx, err)
	}
	if before == 0 {
		return "made version " + strconv.Itoa(version) + " of the schema at " + d.address, nil
	}
	return "version " + strconv.Itoa(version) + " of the schema was there at " + d.address, nil
}

// columns are those of the tables, by what their names end with.
var columns = map[string]string{
	"": "namespace bytea, lease bytea, form smallint, revision bigint, term bigint, version bigint, gone integer, " +
		"slots jsonb, ends jsonb, records jsonb",
	"_fences": "lease text, term bigint",
	"_marks":  "namespace bytea, lease bytea, term bigint, version bigint, written bigint, value text",
	"_schema": "version integer",
}

// checkForm looks whether the tables that are there have their columns.
func (d *database) checkForm(ctx context.Context) error {
	need := map[string]string{}
	var names []string
	for suffix, all := range columns {
		need[d.settings.table+suffix] = all
		names = append(names, "('"+d.settings.table+suffix+"', '"+d.settings.name(suffix)+"')")
	}
	got, err := d.query(ctx, `SELECT t.name, a.attname, a.atttypid::regtype FROM (VALUES `+strings.Join(names, ", ")+`) t(name, quoted)
		JOIN pg_attribute a ON a.attrelid = to_regclass(t.quoted) WHERE a.attnum > 0 AND NOT a.attisdropped`)
	if err != nil {
		return err
	}
	var have [][3]string
	for _, c := range got {
		have = append(have, [3]string{string(c[0]), string(c[1]), string(c[2])})
	}
	return table.CheckForm(d.address, need, have)
}

func (d *database) version(ctx context.Context) (int, error) {
	got, err := d.query(ctx, `SELECT max(version) FROM `+d.settings.name("_schema"))
	if err != nil || len(got) != 1 || got[0][0] == nil {
		return 0, err
	}
	return strconv.Atoi(string(got[0][0]))
}

// creating is the key of the advisory lock under which tables are made.
const creating = 0x756e6465726c6561 // "underlea"

// Create implements [table.Database]. All of it is one transaction, under a lock that others who do the same wait for.
func (d *database) Create(ctx context.Context) error {
	err := d.pool.Do(ctx, func(c *conn) error {
		_, err := c.Exec(ctx, "BEGIN; SELECT pg_advisory_xact_lock("+strconv.FormatInt(creating, 10)+"); SET LOCAL client_min_messages = warning; "+d.settings.schemaSQL()+"COMMIT").ReadAll()
		if err != nil && !c.IsClosed() && c.TxStatus() != 'I' {
			_, _ = c.Exec(ctx, "ROLLBACK").ReadAll() // else the connection is closed, which does it too
		}
		return err
	})
	switch code(err) {
	case alreadyThere, unique, duplicateObject:
		return nil // by hand, and without the lock
	}
	return err
}
