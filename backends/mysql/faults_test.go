//go:build linux

package mysql

import (
	"fmt"
	"testing"

	"github.com/underlease/underlease/backends/backendtest/faults"
	"github.com/underlease/underlease/backends/backendtest/servers"
	"github.com/underlease/underlease/backends/table"
	"github.com/underlease/underlease/backends/table/tabletest"
)

var harness = tabletest.Harness{
	Start: func(t *testing.T, o tabletest.Options) tabletest.Server {
		return servers.StartMariaDB(t, servers.MariaDBOptions{Clock: o.Clock, Zone: o.Zone, Args: []string{"--innodb-flush-log-at-trx-commit=1"}})
	},
	URL: func(addr string) string { return "mysql://lease@" + addr + "/lease" }, Open: opened,
	Words:    faults.Words{OfAcquire: "own = 0, choice = CASE", OfRenew: "LAST_INSERT_ID", OfRelease: "JSON_REMOVE(JSON_SET(slots"},
	Greeting: 1, Busy: 1, Columns: "term, revision, slots, ends, records, gone",
	Mark: "CALL underlease_mark('%s', %d, '%s')", Sleeping: "DO SLEEP(1)",
	Waiting: "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
	Where:   func(namespace, lease string) string { return where(table.Key{Namespace: namespace, Lease: lease}) },
	Collide: map[string]string{"deadlock": collide(1213), "lock wait": collide(1205), "changed": collide(1020)},
	Rest:    "DROP TRIGGER collide; DROP SEQUENCE collisions",
	Stuff: func(namespace string, n int) []string {
		return []string{fmt.Sprintf(`INSERT INTO underlease (namespace, lease, form, revision, term, version, gone, slots, ends, records)
			SELECT %s, CONCAT('row-', LPAD(seq, 6, '0')), 1, 1, 1, 0, 100, '[]', '[]', '{}' FROM seq_0_to_%d`, raw(namespace), n-1)}
	},
}

func TestWhatADatabaseHasToBear(t *testing.T) { tabletest.Run(t, harness) }

// collide makes two of three writes fail. A sequence goes on whatever becomes of a transaction.
func collide(number int) string {
	return fmt.Sprintf(`CREATE SEQUENCE collisions;
		DELIMITER //
		CREATE TRIGGER collide BEFORE UPDATE ON underlease FOR EACH ROW
		BEGIN
			IF NEXTVAL(collisions) %% 3 <> 0 THEN SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = %d, MESSAGE_TEXT = 'others'; END IF;
		END//`, number)
}
