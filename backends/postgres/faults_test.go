//go:build linux

package postgres

import (
	"fmt"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/table/tabletest"
)

var harness = tabletest.Harness{
	Start: func(t *testing.T, o tabletest.Options) tabletest.Server {
		p := servers.StartPostgres(t, servers.PostgresOptions{Clock: o.Clock, Durable: true})
		if o.Zone != "" {
			p.Do("ALTER ROLE lease SET timezone = '" + o.Zone + "'")
		}
		return p
	},
	URL: func(addr string) string { return "postgres://lease@" + addr + "/lease?sslmode=disable" }, Open: opened,
	Words:    faults.Words{OfAcquire: "SET (revision, term, gone, slots", OfRenew: "RETURNING u.slots->$3", OfRelease: "RETURNING pg_notify"},
	Greeting: 1, Busy: 2, Columns: "term, revision, slots, ends, records, gone", Where: where,
	Mark: "SELECT underlease_mark('%s', %d, '%s')", Sleeping: "SELECT pg_sleep(1)",
	Waiting: "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%(revision, term, gone, slots%' AND pid <> pg_backend_pid()",
	Collide: map[string]string{"deadlock": collide("deadlock_detected"), "serialization": collide("serialization_failure")},
	Rest:    "DROP TRIGGER collide ON underlease; DROP FUNCTION collide; DROP SEQUENCE collisions",
	Stuff: func(namespace string, n int) []string {
		return []string{fmt.Sprintf(`INSERT INTO underlease SELECT '\x%x', convert_to('row-' || lpad(i::text, 6, '0'), 'UTF8'), 1, 1, 1, 0, 100, '[]', '[]', '{}' FROM generate_series(0, %d) i`, namespace, n-1)}
	},
}

func TestWhatADatabaseHasToBear(t *testing.T) { tabletest.Run(t, harness) }

// collide makes two of three writes fail. A sequence goes on whatever becomes of a transaction.
func collide(condition string) string {
	return `CREATE SEQUENCE collisions; GRANT USAGE ON collisions TO lease;
		CREATE FUNCTION collide() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF nextval('collisions') % 3 <> 0 THEN RAISE EXCEPTION 'others' USING ERRCODE = '` + condition + `'; END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER collide BEFORE UPDATE ON underlease FOR EACH ROW EXECUTE FUNCTION collide()`
}
