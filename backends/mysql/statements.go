package mysql

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/underlease/underlease/backends"
	"github.com/underlease/underlease/backends/table"
)

// The statements carry their values in hexadecimal and in decimal: nothing has to be escaped, whatever the server's mode, and
// nothing is prepared.

// micros is the server's clock when the statement began.
const (
	micros = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
	millis = "(" + micros + " DIV 1000)"
)

func name(s string) string { return "`" + s + "`" }

// raw is bytes in SQL.
func raw(s string) string { return "X'" + hex.EncodeToString([]byte(s)) + "'" }

// text is a text in SQL.
func text(s string) string { return "CONVERT(" + raw(s) + " USING utf8mb4)" }

// document is a part of a document in SQL: what a function or a text says becomes a text in it otherwise.
func document(sql string) string { return "JSON_EXTRACT(" + sql + ", '$')" }

// part is a field of the slot at a path, as a text, or null.
func part(path, field string) string {
	if strings.HasPrefix(path, "CONCAT") {
		return "JSON_UNQUOTE(JSON_EXTRACT(slots, CONCAT(" + strings.TrimSuffix(strings.TrimPrefix(path, "CONCAT("), ")") + ", '." + field + "')))"
	}
	return "JSON_UNQUOTE(JSON_EXTRACT(slots, '" + path + "." + field + "'))"
}

func number(path, field string) string { return "CAST(" + part(path, field) + " AS SIGNED)" }

func where(k table.Key) string {
	return " WHERE namespace = " + raw(k.Namespace) + " AND lease = " + raw(k.Lease)
}

func gone(until string) string {
	return "(" + until + ") DIV 86400000 + " + strconv.FormatInt(table.Gone(0), 10)
}

func decimal(n int64) string { return strconv.FormatInt(n, 10) }

// acquire chooses a slot, by its number: the one that carries the digest, unless it is broken, else the first that is free, else
// -1. What it writes afterwards depends on that.
func (d *database) acquire(t table.Take) string {
	var b strings.Builder
	path := func(i int) string { return "$[" + strconv.Itoa(i) + "]" }
	fmt.Fprintf(&b, "UPDATE %s SET moment = %s, own = 0, choice = CASE WHEN form <> %d OR term >= %d OR JSON_SEARCH(ends, 'one', '%s', NULL, '$[*].h') IS NOT NULL THEN -1",
		d.leases(), millis, table.Form, backends.MaxTerm, t.Digest)
	for i := range t.Slots {
		fmt.Fprintf(&b, " WHEN %s = '%s' AND %s > moment THEN IF(COALESCE(%s, '') = 'break', -1, %d)",
			part(path(i), "h"), t.Digest, number(path(i), "e"), part(path(i), "q.k"), i)
	}
	for i := range t.Slots {
		fmt.Fprintf(&b, " WHEN JSON_LENGTH(slots) = %d OR (%s = '' OR %s <= moment) AND %s <= moment THEN %d",
			i, part(path(i), "h"), number(path(i), "e"), number(path(i), "k"), i)
	}
	b.WriteString(" ELSE -1 END")
	const chosen = "CONCAT('$[', choice, ']')"
	fmt.Fprintf(&b, ", own = IF(choice >= 0 AND COALESCE(%s = '%s' AND %s > moment, 0), 1, 0)", part(chosen, "h"), t.Digest, number(chosen, "e"))
	fmt.Fprintf(&b, ", revision = IF(choice >= 0, revision + 1, revision)")
	fmt.Fprintf(&b, ", ends = IF(choice >= 0 AND own = 0 AND COALESCE(%s, '') <> '', %s, ends)", part(chosen, "h"),
		d.prepend("choice", number(chosen, "t"), part(chosen, "w"), number(chosen, "b"), "'"+table.Unknown+"'", ""))
	kept := "0"
	if t.Hold > 0 {
		kept = "moment + " + decimal(t.Hold)
	}
	previous := fmt.Sprintf("CASE WHEN %s IS NULL THEN '%s' WHEN %s <> '' THEN '%s' ELSE JSON_EXTRACT(slots, CONCAT('$[', choice, '].p')) END",
		part(chosen, "h"), table.None, part(chosen, "h"), table.Unknown)
	fmt.Fprintf(&b, `, slots = CASE WHEN choice < 0 THEN slots WHEN own = 1 THEN JSON_SET(slots, CONCAT('$[', choice, '].e'), moment + %s)
		ELSE JSON_SET(slots, %s, JSON_OBJECT('h', '%s', 'w', %s, 't', GREATEST(term + 1, moment), 'b', moment, 'l', %d, 'e', moment + %d, 'd', %d, 'k', %s, 'p', %s)) END`,
		number(chosen, "l"), chosen, t.Digest, text(t.Holder), t.TTL, t.TTL, t.Hold, kept, document(previous))
	fmt.Fprintf(&b, ", gone = IF(choice < 0, gone, GREATEST(gone, %s))", gone("moment + "+decimal(max(t.TTL, t.Hold))))
	b.WriteString(", term = IF(choice >= 0 AND own = 0, GREATEST(term + 1, moment), term)")
	b.WriteString(where(t.Key))
	return b.String() + "; " + d.look(t.Key)
}

// prepend puts an end before the others, with the digest of a handle that was given back.
func (d *database) prepend(slot, term, holder, since, end, back string) string {
	if back != "" {
		back = ", 'h', '" + back + "'"
	}
	return fmt.Sprintf("JSON_REMOVE(JSON_ARRAY_INSERT(ends, '$[0]', JSON_OBJECT('s', %s, 't', %s, 'w', %s, 'b', %s, 'p', %s%s)), '$[%d]')",
		slot, term, holder, since, document(end), back, table.Ends)
}

// force is the condition that a grant is in force.
func force(h table.Held) string {
	path := fmt.Sprintf("$[%d]", h.Slot)
	return fmt.Sprintf("%s AND form = %d AND %s = '%s' AND %s = %d AND %s > %s",
		where(h.Key), table.Form, part(path, "h"), h.Digest, number(path, "t"), h.Term, number(path, "e"), millis)
}

// The ids that a renewal seems to have inserted.
const (
	nothingAsked   = 1
	somethingAsked = 2
)

func (d *database) renew(h table.Held) string {
	path := fmt.Sprintf("$[%d]", h.Slot)
	return fmt.Sprintf(`UPDATE %s SET revision = revision + 1, moment = %s, choice = LAST_INSERT_ID(IF(JSON_EXTRACT(slots, '%s.q') IS NULL, %d, %d)),
		gone = GREATEST(gone, %s), slots = JSON_SET(slots, '%s.e', moment + %s)%s AND COALESCE(%s, '') <> 'break'`,
		d.leases(), millis, path, nothingAsked, somethingAsked, gone("moment + "+number(path, "l")), path, number(path, "l"), force(h), part(path, "q.k"))
}

func (d *database) release(h table.Held, end []byte, drop bool) string {
	path := fmt.Sprintf("$[%d]", h.Slot)
	kept := number(path, "k")
	if drop {
		kept = "0"
	}
	return fmt.Sprintf(`UPDATE %s SET revision = revision + 1, ends = %s,
		slots = JSON_REMOVE(JSON_SET(slots, '%s.h', '', '%s.p', %s, '%s.k', %s), '%s.q')%s`,
		d.leases(), d.prepend(strconv.Itoa(h.Slot), decimal(h.Term), part(path, "w"), number(path, "b"), text(string(end)), h.Digest),
		path, path, document(text(string(end))), path, kept, path, force(h))
}

const row = "SELECT " + micros + ", form, revision, term, version, slots"

func (d *database) look(k table.Key) string { return row + " FROM " + d.leases() + where(k) }

func (d *database) read(k table.Key) string {
	return row + ", ends, records FROM " + d.leases() + where(k)
}

func (d *database) list(namespace, after string, most int) string {
	return fmt.Sprintf("%s, lease FROM %s WHERE namespace = %s AND lease > %s ORDER BY lease LIMIT %d", row, d.leases(), raw(namespace), raw(after), most)
}

func (d *database) insert(k table.Key) string {
	return fmt.Sprintf(`INSERT IGNORE INTO %s (namespace, lease, form, revision, term, version, gone, slots, ends, records)
		VALUES (%s, %s, %d, 1, 0, 0, %s, '[]', '[]', '{}')`, d.leases(), raw(k.Namespace), raw(k.Lease), table.Form, gone(millis))
}

func (d *database) write(k table.Key, c table.Change) string {
	var b strings.Builder
	fmt.Fprintf(&b, "UPDATE %s SET revision = revision + 1, version = %d", d.leases(), c.Version)
	if c.Gone != 0 {
		fmt.Fprintf(&b, ", gone = %d", c.Gone)
	}
	for _, column := range []struct {
		name string
		text []byte
	}{{"slots", c.Slots}, {"ends", c.Ends}, {"records", c.Records}} {
		if column.text != nil {
			fmt.Fprintf(&b, ", %s = %s", column.name, text(string(column.text)))
		}
	}
	fmt.Fprintf(&b, "%s AND form = %d AND revision = %d", where(k), table.Form, c.Revision)
	if c.Before != 0 {
		fmt.Fprintf(&b, " AND %s < %d", millis, c.Before)
	}
	return b.String()
}

func (d *database) prune() string {
	return fmt.Sprintf("DELETE FROM %s WHERE gone < %s DIV 86400000 ORDER BY gone LIMIT 2", d.leases(), millis)
}

func (d *database) mark(k table.Key) string {
	return "SELECT version, written, value FROM " + name(d.settings.table+"_marks") + where(k)
}

func (d *database) unmark(k table.Key, version int64) string {
	return "DELETE FROM " + name(d.settings.table+"_marks") + where(k) + " AND version <= " + decimal(version)
}

func (d *database) leases() string { return name(d.settings.table) }
