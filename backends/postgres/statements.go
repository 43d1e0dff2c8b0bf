package postgres

import (
	"strconv"
	"strings"
	"sync"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// sql makes statements with the names of the tables in them.
type sql struct {
	fill *strings.Replacer

	mu   sync.Mutex
	made map[string]string
}

// of returns a statement. It is made when it is first asked for: a run needs two or three of them, and waits for that.
func (s *sql) of(statement string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, ok := s.made[statement]
	if !ok {
		text = s.fill.Replace(s.fill.Replace(statement)) // what is filled in has names, too
		s.made[statement] = text
	}
	return text
}

// micros is the server's clock. It is read when it is reached, not when the transaction began.
//
// Source: PostgreSQL, Current Date/Time: clock_timestamp() changes even within a statement.
const micros = `floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint`

// durable waits for the commit where the role would not. It is null.
const durable = `CASE WHEN current_setting('synchronous_commit') = 'off' THEN nullif(set_config('synchronous_commit', 'on', true), 'on') END`

func quoted(name string) string { return `"` + name + `"` }

// name returns the name of a table for SQL.
func (s *settings) name(suffix string) string {
	if s.schema == "" {
		return quoted(s.table + suffix)
	}
	return quoted(s.schema) + "." + quoted(s.table+suffix)
}

func statements(s *settings) *sql {
	return &sql{made: map[string]string{}, fill: strings.NewReplacer(
		"{leases}", s.name(""), "{micros}", micros, "{durable}", durable, "{none}", table.None, "{unknown}", table.Unknown,
		"{largest}", strconv.FormatInt(int64(backends.MaxTerm), 10), "{length}", strconv.Itoa(table.Ends),
		"{form}", strconv.Itoa(table.Form), "{slot}", newSlot, "{choice}", choice, "{fresh}", fresh,
		"{day}", "86400000", "{days}", strconv.FormatInt(table.Gone(0), 10),
		"{named}", strconv.Itoa(len(queued)-len("%s")+queueDigits),
		"{row}", row, "{marks}", s.name("_marks"),
	)}
}

// newSlot is what an acquisition puts into a slot. Parameters: 3 digest, 5 holder, 6 ttl, 7 hold.
const newSlot = `jsonb_build_object('h', $3::text, 'w', $5::text, 't', term, 'b', ms, 'l', $6::bigint, 'e', ms + $6::bigint,
	'd', $7::bigint, 'k', CASE WHEN $7::bigint > 0 THEN ms + $7::bigint ELSE 0 END, 'p', p)`

// fresh is the condition that the handle of an acquisition was not given back.
const fresh = `NOT u.ends @> jsonb_build_array(jsonb_build_object('h', $3::text))`

// choice is the slot that an acquisition gets: none, one row at most. The clock is read once, and after the row u was locked:
// a subquery with a volatile function is not merged into another one.
const choice = `(SELECT y.i, y.s, y.own, n.ms, greatest(u.term + 1, n.ms) AS term,
		CASE WHEN y.s IS NULL THEN '{none}'::jsonb WHEN y.s->>'h' <> '' THEN '{unknown}'::jsonb ELSE y.s->'p' END AS p
	FROM (SELECT {micros} / 1000 AS ms OFFSET 0) n, LATERAL (
		SELECT x.i, x.s, x.own FROM (
			SELECT (o.n - 1)::int AS i, o.s, o.s->>'h' = $3 AND (o.s->>'e')::bigint > n.ms AS own
			FROM jsonb_array_elements(u.slots) WITH ORDINALITY o(s, n)
			UNION ALL SELECT jsonb_array_length(u.slots), NULL, false
		) x
		WHERE x.own OR x.i < $4::int AND (x.s IS NULL OR (x.s->>'h' = '' OR (x.s->>'e')::bigint <= n.ms) AND (x.s->>'k')::bigint <= n.ms)
		ORDER BY x.own DESC, x.i LIMIT 1
	) y
	WHERE NOT y.own OR y.s->'q'->>'k' IS DISTINCT FROM 'break')`

// inserted makes the row of a lease that is new, with its first slot.
const inserted = `WITH a AS (
	INSERT INTO {leases} AS u (namespace, lease, form, revision, term, version, gone, slots, ends, records)
	SELECT $1::bytea, $2::bytea, {form}, 1, term, 0, (ms + greatest($6::bigint, $7::bigint)) / {day} + {days}, jsonb_build_array({slot}), '[]', '{}'
	FROM (SELECT ms, ms AS term, '{none}'::jsonb AS p, {durable} FROM (SELECT {micros} / 1000 AS ms OFFSET 0) m OFFSET 0) n
	ON CONFLICT (namespace, lease) DO UPDATE SET (revision, term, gone, slots, ends) = `

// Parameters: 1 namespace, 2 lease, 3 digest, 4 slots, 5 holder, 6 ttl, 7 hold. What stands in the way is read from the
// statement's own snapshot, which may be older than the row that was found to be taken; then it explains nothing.
const acquire = acquireRow + returned + outcome

const acquireRow = inserted + `(
		SELECT u.revision + 1,
			CASE WHEN c.own THEN u.term ELSE c.term END,
			greatest(u.gone, (c.ms + greatest($6::bigint, $7::bigint)) / {day} + {days}),
			CASE
				WHEN c.own THEN jsonb_set(u.slots, ARRAY[c.i::text, 'e'], to_jsonb(c.ms + (c.s->>'l')::bigint))
				WHEN c.s IS NULL THEN u.slots || jsonb_build_array((SELECT {slot} FROM (SELECT c.term, c.ms, c.p) v))
				ELSE jsonb_set(u.slots, ARRAY[c.i::text], (SELECT {slot} FROM (SELECT c.term, c.ms, c.p) v))
			END,
			CASE
				WHEN c.own OR c.s IS NULL OR c.s->>'h' = '' THEN u.ends
				ELSE (jsonb_build_array(jsonb_build_object('s', c.i, 't', c.s->'t', 'w', c.s->'w', 'b', c.s->'b', 'p', c.p)) || u.ends) - {length}
			END
		FROM {choice} c
	)
	WHERE u.form = {form} AND u.term < {largest} AND {fresh} AND EXISTS (SELECT FROM {choice} c)`

const returned = `
RETURNING form, revision, term, version, slots`

// leave gives the session its own name back, and with it the place among those that wait, if there was a grant.
//
// Parameters: 8 the name.
const leave = `, set_config('application_name', $8, false)`

// The same from a connection on which somebody waits.
const (
	acquireQueued    = acquireRow + returned + leave + outcome
	acquireOneQueued = acquireOneRow + returned + leave + outcome
	takeOneQueued    = takeOne + leave
)

// outcome is the row that was written, or the one that is in the way.
const outcome = `
)
SELECT {micros}, form, revision, term, version, slots FROM a
UNION ALL
SELECT {micros}, form, revision, term, version, slots FROM {leases}
WHERE namespace = $1::bytea AND lease = $2::bytea AND NOT EXISTS (SELECT FROM a)`

// assignOne and freeOne are what becomes of a row, and of which, for who may take the first slot alone.
const (
	assignOne = `(
		SELECT u.revision + 1,
			CASE WHEN n.own THEN u.term ELSE term END,
			greatest(u.gone, (ms + greatest($6::bigint, $7::bigint)) / {day} + {days}),
			CASE WHEN n.own THEN jsonb_set(u.slots, '{0,e}', to_jsonb(ms + (s->>'l')::bigint)) ELSE jsonb_set(u.slots, '{0}', {slot}) END,
			CASE
				WHEN n.own OR s IS NULL OR s->>'h' = '' THEN u.ends
				ELSE (jsonb_build_array(jsonb_build_object('s', 0, 't', s->'t', 'w', s->'w', 'b', s->'b', 'p', p)) || u.ends) - {length}
			END
		FROM (SELECT ms, u.slots->0 AS s, u.slots->0->>'h' = $3 AND (u.slots->0->>'e')::bigint > ms IS TRUE AS own, greatest(u.term + 1, ms) AS term,
			CASE WHEN u.slots = '[]' THEN '{none}'::jsonb WHEN u.slots->0->>'h' <> '' THEN '{unknown}'::jsonb ELSE u.slots->0->'p' END AS p
			FROM (SELECT {micros} / 1000 AS ms OFFSET 0) m) n
	)`

	freeOne = `u.form = {form} AND u.term < {largest} AND {fresh} AND $4::int = 1 AND (
		u.slots = '[]' OR CASE
			WHEN u.slots->0->>'h' = $3 AND (u.slots->0->>'e')::bigint > {micros} / 1000 THEN u.slots->0->'q'->>'k' IS DISTINCT FROM 'break'
			ELSE (u.slots->0->>'h' = '' OR (u.slots->0->>'e')::bigint <= {micros} / 1000) AND (u.slots->0->>'k')::bigint <= {micros} / 1000
		END)`
)

// acquireOne is acquire for who may take the first slot alone. To a server's process that was just started for this connection,
// and has to look up everything that a statement mentions, it is worth one to two milliseconds.
const acquireOne = acquireOneRow + returned + outcome

const acquireOneRow = inserted + assignOne + `
	WHERE ` + freeOne

// takeOne is acquireOne where the one slot was given back, as it is for most, which is worth another millisecond. Where it changes nothing,
// the other one has to be asked.
const takeOne = `UPDATE {leases} AS u SET (revision, term, gone, slots) = (
		SELECT u.revision + 1, term, greatest(u.gone, (ms + greatest($6::bigint, $7::bigint)) / {day} + {days}), jsonb_build_array({slot})
		FROM (SELECT ms, greatest(u.term + 1, ms) AS term, u.slots->0->'p' AS p FROM (SELECT {micros} / 1000 AS ms OFFSET 0) m) n
	)
	WHERE namespace = $1::bytea AND lease = $2::bytea AND u.form = {form} AND u.term < {largest} AND {fresh} AND $4::int = 1
		AND u.slots->0->>'h' = '' AND u.slots->1 IS NULL AND (u.slots->0->>'k')::bigint <= {micros} / 1000
	RETURNING {micros}, form, revision, term, version, slots, {durable}`

// Parameters: 1 namespace, 2 lease, 3 slot, 4 digest, 5 term.
const renew = `UPDATE {leases} AS u SET
	revision = u.revision + 1,
	gone = greatest(u.gone, ({micros} / 1000 + (u.slots->$3::int->>'l')::bigint) / {day} + {days}),
	slots = jsonb_set(u.slots, ARRAY[$3::int::text, 'e'], to_jsonb({micros} / 1000 + (u.slots->$3::int->>'l')::bigint))
WHERE namespace = $1::bytea AND lease = $2::bytea AND form = {form}
	AND u.slots->$3::int->>'h' = $4 AND (u.slots->$3::int->>'t')::bigint = $5::bigint
	AND (u.slots->$3::int->>'e')::bigint > {micros} / 1000
	AND u.slots->$3::int->'q'->>'k' IS DISTINCT FROM 'break'
RETURNING u.slots->$3::int ? 'q', {durable}`

// Nobody waits until a release is on the disk: one that a crash forgets leaves a lease that runs out.
//
// Parameters: 1 namespace, 2 lease, 3 slot, 4 digest, 5 term, 6 end, 7 whether the hold is dropped, 8 channel.
const release = `UPDATE {leases} AS u SET
		revision = u.revision + 1,
		slots = jsonb_set(u.slots, ARRAY[$3::int::text], (u.slots->$3::int) - 'q' || jsonb_build_object(
			'h', '', 'p', $6::jsonb, 'k', CASE WHEN $7::bool THEN 0 ELSE (u.slots->$3::int->>'k')::bigint END)),
		ends = (jsonb_build_array(jsonb_build_object('s', $3::int, 't', $5::bigint, 'w', u.slots->$3::int->'w', 'b', u.slots->$3::int->'b',
			'p', $6::jsonb, 'h', $4::text)) || u.ends) - {length}
	WHERE namespace = $1::bytea AND lease = $2::bytea AND form = {form}
		AND u.slots->$3::int->>'h' = $4 AND (u.slots->$3::int->>'t')::bigint = $5::bigint
		AND (u.slots->$3::int->>'e')::bigint > {micros} / 1000
	RETURNING pg_notify($8, ''), set_config('synchronous_commit', 'off', true)`

const row = `{micros}, form, revision, term, version, slots`

const look = `SELECT {row} FROM {leases} WHERE namespace = $1::bytea AND lease = $2::bytea`

// lookQueued is look, and how many sessions of this database wait for the lease and came before. Names that others cannot read are null.
//
// Source: PostgreSQL, pg_stat_activity: "application_name" is shown to everybody, as pid and datid are; what a session does is not.
const lookQueued = `SELECT {row}, (
	SELECT count(*) FROM pg_stat_get_activity(NULL) a, pg_stat_get_activity(pg_backend_pid()) me
	WHERE a.datid = me.datid AND left(a.application_name, {named}) = left(me.application_name, {named})
		AND (a.application_name COLLATE "C", a.pid) < (me.application_name COLLATE "C", me.pid)
) FROM {leases} WHERE namespace = $1::bytea AND lease = $2::bytea`

const read = `SELECT {row}, ends, records FROM {leases} WHERE namespace = $1::bytea AND lease = $2::bytea`

// Parameters: 1 namespace, 2 the lease after which they come, 3 how many.
const list = `SELECT {row}, encode(lease, 'hex') FROM {leases} WHERE namespace = $1::bytea AND lease > $2::bytea ORDER BY lease LIMIT $3::int`

const insert = `INSERT INTO {leases} (namespace, lease, form, revision, term, version, gone, slots, ends, records)
SELECT $1::bytea, $2::bytea, {form}, 1, 0, 0, {micros} / 1000 / {day} + {days}, '[]', '[]', '{}'
ON CONFLICT (namespace, lease) DO NOTHING`

// Parameters: 1 namespace, 2 lease, 3 revision, 4 before, 5 version, 6 gone, 7 slots, 8 ends, 9 records, 10 channel or null.
const write = `WITH d AS MATERIALIZED (SELECT {durable}), w AS (
	UPDATE {leases} SET
		revision = revision + 1, version = $5::bigint, gone = coalesce(nullif($6::int, 0), gone),
		slots = $7::jsonb, ends = coalesce($8::jsonb, ends), records = coalesce($9::jsonb, records)
	WHERE namespace = $1::bytea AND lease = $2::bytea AND form = {form} AND revision = $3::bigint
		AND ($4::bigint = 0 OR {micros} / 1000 < $4::bigint)
	RETURNING 1
)
SELECT CASE WHEN $10::text IS NOT NULL THEN pg_notify($10, '')::text END, (SELECT count(*) FROM d) FROM w`

// A row that somebody works on is passed over, and looked at again after it was locked.
const prune = `DELETE FROM {leases} WHERE ctid = ANY (ARRAY(
	SELECT ctid FROM {leases} WHERE gone < (SELECT {micros} / 1000 / {day}) ORDER BY gone LIMIT 2 FOR UPDATE SKIP LOCKED
)) AND gone < (SELECT {micros} / 1000 / {day})`

const mark = `SELECT version, written, value FROM {marks} WHERE namespace = $1::bytea AND lease = $2::bytea`

// Parameters: 1 namespace, 2 lease, 3 the newest version.
const unmark = `DELETE FROM {marks} WHERE namespace = $1::bytea AND lease = $2::bytea AND version <= $3::bigint`
