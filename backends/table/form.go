package table

import (
	"strings"

	"github.com/underlease/underlease/backends"
)

// CheckForm compares the columns that tables have, each as table, name and type, with those that they need, by table: as
// "name type, name type". A table without any is not there, and is not missed. Nothing but people can give a table a column back that
// was taken from it: the error says so.
func CheckForm(address string, need map[string]string, have [][3]string) error {
	for named, columns := range need {
		found := map[string]string{}
		for _, c := range have {
			if strings.EqualFold(c[0], named) { // some servers keep names in lower case
				found[c[1]] = c[2]
			}
		}
		if len(found) == 0 {
			continue
		}
		for column := range strings.SplitSeq(columns, ", ") {
			name, kind, _ := strings.Cut(column, " ")
			wrong := "is missing"
			switch is := found[name]; is {
			case kind:
				continue
			case "":
			default:
				wrong = "is " + is + " in the place of " + kind
			}
			return backends.WithHint(backends.Broken(nil, "%s: the tables have another form: the column %s of %s %s", address, name, named, wrong),
				"give it back with ALTER TABLE, as underlease schema print shows it; or, while nobody holds a lease, drop the table %s: "+
					"the next run makes it anew", named)
		}
	}
	return nil
}
