package mysql

import (
	"context"
	"database/sql/driver"
	"net/url"
	"strconv"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// version is that of the tables.
const version = 1

// What makes the tables where they are not there, and changes nothing that is.
const (
	leasesSQL = `-- the leases, one row each
CREATE TABLE IF NOT EXISTS {leases} (
	namespace VARBINARY(100) NOT NULL,
	lease     VARBINARY(200) NOT NULL,
	form      SMALLINT NOT NULL, -- of what follows
	revision  BIGINT   NOT NULL, -- grows with every write
	term      BIGINT   NOT NULL, -- the last one
	version   BIGINT   NOT NULL, -- the last one of a record
	gone      INT      NOT NULL, -- the day since 1970 after which the row may go
	moment    BIGINT   NOT NULL DEFAULT 0, -- of the last statement; what a statement notes for itself
	choice    INT      NOT NULL DEFAULT 0, -- the slot that it has chosen
	own       TINYINT  NOT NULL DEFAULT 0, -- whether that was its own before
	slots     LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	ends      LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	records   LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	PRIMARY KEY (namespace, lease),
	KEY gone (gone)
) ENGINE=InnoDB`

	fencesSQL = `-- the terms that are installed at this database, for {guard}
CREATE TABLE IF NOT EXISTS {fences} (
	lease VARBINARY(1024) NOT NULL PRIMARY KEY,
	term  BIGINT          NOT NULL
) ENGINE=InnoDB`

	marksSQL = `-- the markers that jobs have written in transactions of their own, by {mark}
CREATE TABLE IF NOT EXISTS {marks} (
	namespace VARBINARY(100) NOT NULL,
	lease     VARBINARY(200) NOT NULL,
	term      BIGINT NOT NULL, -- under which it was written
	version   BIGINT NOT NULL, -- as that of a record
	written   BIGINT NOT NULL, -- milliseconds since 1970
	value     LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	PRIMARY KEY (namespace, lease)
) ENGINE=InnoDB`

	versionSQL = `-- which of these there are
CREATE TABLE IF NOT EXISTS {version} (only_one TINYINT NOT NULL PRIMARY KEY, version INT NOT NULL) ENGINE=InnoDB`

	numberSQL = `INSERT IGNORE INTO {version} (only_one, version) VALUES (1, {number})`

	guardSQL = `CREATE PROCEDURE {guard}(IN of_lease VARCHAR(301) CHARACTER SET utf8mb4, IN of_term BIGINT)
	MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
	DECLARE newest BIGINT;
	IF of_lease IS NULL OR of_lease = '' OR of_term IS NULL OR of_term <= 0 THEN
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'underlease: the guard needs a lease and its term';
	END IF;
	INSERT INTO {fences} (lease, term) VALUES (of_lease, of_term) ON DUPLICATE KEY UPDATE term = GREATEST(term, of_term);
	SELECT term INTO newest FROM {fences} WHERE lease = CAST(of_lease AS BINARY) FOR UPDATE; -- the newest, not that of a snapshot
	IF newest > of_term THEN
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'underlease: the term is older than the one that is installed: the lease was lost, stop this job';
	END IF;
END`
)

const aboutGuard = `-- {guard} is called in the transaction of a job, with UNDERLEASE_NAME and UNDERLEASE_TERM, before it writes. It raises an
-- error where a newer term was installed, and installs this one; whoever has a newer term waits until the transaction is over. The
-- job has to roll its transaction back when it gets the error.
`

// The row of the lease is read without a lock: one would keep renewals waiting until the job commits.
const markSQL = `CREATE PROCEDURE {mark}(IN of_lease VARCHAR(200) CHARACTER SET utf8mb4, IN of_term BIGINT, IN of_namespace VARCHAR(100) CHARACTER SET utf8mb4)
	MODIFIES SQL DATA SQL SECURITY INVOKER
BEGIN
	DECLARE ms BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000;
	DECLARE plain VARCHAR(301) CHARACTER SET utf8mb4 DEFAULT IF(of_namespace = '', of_lease, CONCAT(of_namespace, '/', of_lease));
	DECLARE present, since, last, other BIGINT;
	DECLARE applied INT;
	DECLARE holder TEXT CHARACTER SET utf8mb4;
	IF of_namespace IS NULL THEN
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'underlease: a namespace is a text; the empty one is none';
	END IF;
	CALL {guard}(plain, of_term);
	SELECT CAST(JSON_UNQUOTE(JSON_EXTRACT(slots, '$[0].t')) AS SIGNED), CAST(JSON_UNQUOTE(JSON_EXTRACT(slots, '$[0].b')) AS SIGNED),
			JSON_UNQUOTE(JSON_EXTRACT(slots, '$[0].w')), version, JSON_CONTAINS_PATH(records, 'one', '$."6d61726b6572"') -- 'marker' in hexadecimal
		INTO present, since, holder, last, applied
		FROM {leases} WHERE namespace = CAST(of_namespace AS BINARY) AND lease = CAST(of_lease AS BINARY)
			AND JSON_UNQUOTE(JSON_EXTRACT(slots, '$[0].h')) <> '';
	IF present IS NULL OR present <> of_term THEN
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'underlease: nobody holds the lease with this term: it was lost, stop this job';
	END IF;
	IF applied = 1 THEN
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'underlease: it is applied already: roll this transaction back';
	END IF;
	INSERT INTO {marks} (namespace, lease, term, version, written, value)
		VALUES (CAST(of_namespace AS BINARY), CAST(of_lease AS BINARY), of_term, GREATEST(last + 1, ms), ms, JSON_OBJECT(
			'version', 1, 'term', of_term + 0, 'holder', holder, 'run_id', CONCAT(plain, '/', of_term), 'at_ms', since + 0, -- a variable alone would be a text
			'took_ms', GREATEST(0, ms - since), 'until_ms', GREATEST(0, ms - since)))
		ON DUPLICATE KEY UPDATE term = term;
	SELECT term INTO other FROM {marks} WHERE namespace = CAST(of_namespace AS BINARY) AND lease = CAST(of_lease AS BINARY) FOR UPDATE;
	IF other <> of_term THEN
		SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'underlease: it is applied already: roll this transaction back';
	END IF;
END`

const aboutMark = `-- {mark} is called in the transaction of a job that runs under underlease gate, with UNDERLEASE_NAME, UNDERLEASE_TERM and
-- the namespace, or '': the marker of the gate and what the job has written are there both, or neither is. It calls the guard, and
-- raises an error where another run was faster. Mind that CREATE, ALTER and DROP commit the transaction that they stand in.
`

func (s *settings) fill(sql string) string {
	return strings.NewReplacer(
		"{leases}", name(s.table), "{fences}", name(s.table+"_fences"), "{guard}", name(s.table+"_guard"),
		"{marks}", name(s.table+"_marks"), "{mark}", name(s.table+"_mark"),
		"{version}", name(s.table+"_schema"), "{number}", strconv.Itoa(version),
	).Replace(sql)
}

// Schema returns the SQL that makes what a store needs, for people whose user may not: it may be run again and again.
func Schema(u *url.URL) (string, error) {
	s, err := parse(u)
	if err != nil {
		return "", err
	}
	return s.fill(leasesSQL + ";\n\n" + fencesSQL + ";\n\n" + aboutGuard + "DROP PROCEDURE IF EXISTS {guard};\nDELIMITER //\n" + guardSQL + "//\nDELIMITER ;\n\n" +
		marksSQL + ";\n\n" + aboutMark + "DROP PROCEDURE IF EXISTS {mark};\nDELIMITER //\n" + markSQL + "//\nDELIMITER ;\n\n" +
		versionSQL + ";\n" + numberSQL + ";\n\n-- what another user needs:\n" +
		"-- GRANT SELECT, INSERT, UPDATE, DELETE ON {leases} TO user; -- underlease\n" +
		"-- GRANT SELECT, DELETE ON {marks} TO user; -- underlease gate and underlease marker\n" +
		"-- GRANT SELECT, INSERT, UPDATE ON {fences} TO user; -- jobs that call the guard, with\n" +
		"-- GRANT EXECUTE ON PROCEDURE {guard} TO user;\n" +
		"-- GRANT SELECT ON {leases} TO user; -- jobs that write a marker, beside that, with\n" +
		"-- GRANT SELECT, INSERT, UPDATE ON {marks} TO user;\n" +
		"-- GRANT EXECUTE ON PROCEDURE {mark} TO user;\n"), nil
}

// Apply makes what a store needs and brings it up to date. It returns what it did, in words.
func Apply(ctx context.Context, u *url.URL) (string, error) {
	d, err := newDatabase(u)
	if err != nil {
		return "", err
	}
	defer d.pool.Close()
	before := 0
	got, err := d.query(ctx, d.settings.fill("SELECT MAX(version) FROM {version}"))
	switch {
	case d.Missing(err):
	case err != nil:
		return "", d.Classify(ctx, err)
	case len(got) == 1 && got[0][0] != nil:
		if before, err = strconv.Atoi(string(got[0][0])); err != nil {
			return "", backends.Broken(err, "%s: the version of the schema cannot be read", d.address)
		}
	}
	if before > version {
		return "", backends.WithHint(backends.Broken(nil, "%s: the schema has the version %d, and this program knows %d", d.address, before, version), "update underlease on this host")
	}
	if err := d.checkForm(ctx); err != nil {
		return "", d.Classify(ctx, err)
	}
	if err := d.create(ctx, true); err != nil {
		return "", d.Classify(ctx, err)
	}
	if before == 0 {
		return "made version " + strconv.Itoa(version) + " of the schema at " + d.address, nil
	}
	return "version " + strconv.Itoa(version) + " of the schema was there at " + d.address, nil
}

// Create implements [table.Database]. The procedures are left out where the user may not make any: jobs alone need them.
func (d *database) Create(ctx context.Context) error { return d.create(ctx, false) }

// columns are those of the tables, by what their names end with.
var columns = map[string]string{
	"": "namespace varbinary, lease varbinary, form smallint, revision bigint, term bigint, version bigint, gone int, moment bigint, " +
		"choice int, own tinyint, slots longtext, ends longtext, records longtext",
	"_fences": "lease varbinary, term bigint",
	"_marks":  "namespace varbinary, lease varbinary, term bigint, version bigint, written bigint, value longtext",
	"_schema": "only_one tinyint, version int",
}

// checkForm looks whether the tables that are there have their columns.
func (d *database) checkForm(ctx context.Context) error {
	need := map[string]string{}
	var names []string
	for suffix, all := range columns {
		need[d.settings.table+suffix] = all
		names = append(names, text(d.settings.table+suffix))
	}
	got, err := d.query(ctx, "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name IN ("+
		strings.Join(names, ", ")+")")
	if err != nil {
		return err
	}
	var have [][3]string
	for _, c := range got {
		have = append(have, [3]string{string(c[0]), string(c[1]), strings.ToLower(string(c[2]))})
	}
	return table.CheckForm(d.address, need, have)
}

// clear deletes a procedure that is not what it has to be. One that is stays: with it would go who may execute it.
func (d *database) clear(ctx context.Context, c *conn, procedure, sql string) error {
	got, err := c.rows(ctx, "SELECT routine_definition FROM information_schema.routines WHERE routine_schema = DATABASE() AND routine_type = 'PROCEDURE' AND routine_name = "+
		text(procedure))
	if err != nil || len(got) == 0 {
		return err
	}
	if body := string(got[0][0]); body != "" && strings.HasSuffix(sql, body) {
		return nil
	}
	_, err = c.Conn.(driver.ExecerContext).ExecContext(ctx, "DROP PROCEDURE IF EXISTS "+name(procedure), nil)
	return c.lost(err)
}

// alreadyThere is the code for a procedure that is.
const alreadyThere = 1304

// create makes the tables under a lock of the server that others who do the same wait for; it ends with the connection, too.
func (d *database) create(ctx context.Context, all bool) error {
	lock := "'underlease " + d.settings.table + "'"
	return d.pool.Do(ctx, func(c *conn) error {
		got, err := c.rows(ctx, "SELECT GET_LOCK("+lock+", 20)")
		if err != nil {
			return err
		}
		if len(got) != 1 || string(got[0][0]) != "1" {
			return backends.WithHint(backends.Unavailable(nil, "%s: somebody else makes the tables, and has not done for 20 s", d.address),
				"SHOW PROCESSLIST shows who holds the lock %s", lock)
		}
		defer func() { _, _ = c.rows(ctx, "SELECT RELEASE_LOCK("+lock+")") }()
		run := func(sql string) error {
			_, err := c.Conn.(driver.ExecerContext).ExecContext(ctx, c.begin(d.settings.fill(sql)), nil)
			return c.lost(err)
		}
		for _, sql := range []string{leasesSQL, fencesSQL, marksSQL, versionSQL, numberSQL} {
			if err := run(sql); err != nil {
				return err
			}
		}
		for suffix, sql := range map[string]string{"_guard": guardSQL, "_mark": markSQL} {
			if all {
				if err := d.clear(ctx, c, d.settings.table+suffix, d.settings.fill(sql)); err != nil {
					return err
				}
			}
			err := run(sql)
			switch number := code(err); {
			case err == nil, number == alreadyThere, number != 0 && !all:
			default:
				return err
			}
		}
		return nil
	})
}
