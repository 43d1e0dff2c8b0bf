package all

// Nearest returns the one of names that s was most likely meant to be, or nothing where none is close. Of two that are
// equally close the first one wins.
func Nearest(s string, names []string) string {
	const longest = 100 // nobody means a name by more; the work grows with the square of it
	if len(s) > longest {
		return ""
	}
	best, found := min(3, max(1, len(s)/2))+1, ""
	for _, n := range names {
		if d := distance(s, n); d < best {
			best, found = d, n
		}
	}
	return found
}

// distance counts the bytes to insert, delete, replace or swap with a neighbour until a is b.
func distance(a, b string) int {
	before, last := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row := make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j]+cost, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
