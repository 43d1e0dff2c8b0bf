package cmd

const gateForm = "write it as: underlease gate [flags] ID -- COMMAND [ARG...]"

// formOf returns how a command line with a command in it is written.
func formOf(command string) string {
	switch command {
	case "run":
		return runForm
	case "gate":
		return gateForm
	}
	return ""
}

const runForm = "write it as: underlease run [flags] NAME -- COMMAND [ARG...]"

const rootHelp = `underlease runs a command while holding a named lease.

  underlease run nightly-backup -- /usr/local/bin/backup.sh

Commands:
  run NAME -- COMMAND   run COMMAND under the lease NAME
  gate ID -- COMMAND    run COMMAND once for all, such as a migration
  marker                list, show, set or clear what gate has written down
  check [--for D]       inside COMMAND: is there still D before it would be stopped
  status [NAME]         is it held, by whom, since when; 75 if it is, else 0
  list                  all leases of the store
  config [NAME]         show the settings in force, and where each came from
  schema print|apply    show or make the tables that a database needs
  version               show version and build
  completion SHELL      print a completion script for bash, zsh or fish

underlease run --help shows flags.

Exit codes: those of the command that is run, and of check, status and marker
their answer; else 64 usage, 69 store does not answer, 70 bug, 71 system
refused, 75 busy, 74 lease lost, 76 to 78 store broken, denied, settings.
`

// runHelp fits a screen of 50 lines.
const runHelp = `  underlease run nightly-backup -- /usr/local/bin/backup.sh

Runs COMMAND while holding the lease NAME: at most one such run at a time.
The lease is released when COMMAND and all that it started have ended.

Usage: underlease run [flags] NAME -- COMMAND [ARG...]

The lease
  --backend URL           the store (file:); --backend-file FILE holds the URL
  --namespace TEXT        of the name (empty)
  --slots N               how many may hold it at once (1)
  --ttl D                 lease length without renewal (60s; none on file:)
  --min-hold D            it stays taken for D from its acquisition (0)
  --once-per D            one success per slot of the UTC clock, such as 1h, 1d
  --min-interval D        not before D after the last success has begun (0)
When it is busy, or the store is away
  --wait D                wait so long (0), or forever
  --on-busy skip|wait     wait is the same as --wait forever (skip)
  --busy-exit N           exit code when it was skipped, or is not due (75)
  -q, --quiet             no line when it was skipped
  --if-unavailable fail|skip|run    when the store does not answer (fail)
The command
  --max-run D             stop it after D (0: no limit)
  --drain D               time to end after a signal from outside (forever)
  --stop-signal SIGNAL    of a stop that we decide (TERM)
  --leftovers kill|wait|ignore      background processes at its end (kill)
  --isolate auto|tree|cgroup|pidns  what holds it and its children (auto)
The deadline
  --grace D               from that stop to SIGKILL (ttl/4, at most 10s)
  --margin D              from SIGKILL to the end of the lease (250ms or more)
  --renew-every D         time between renewals (ttl/6)
  --clock-drift P         clocks may differ in rate by P (1%)
  --on-lost kill|term     what a lost lease does to the command (kill)
Words
  --config FILE           settings, in place of /etc/underlease.yaml and the
                          user's; also UNDERLEASE_<FLAG> and keys of the file
  --holder LABEL          who holds it, for people (host, pid, random)
  --report FILE           how the run ended, as JSON
  -v, --verbose           log what happens; --log-level debug|info|warn|error
  --log-format text|json  of what goes to standard error (text)

Exit codes: the command's own, and 64 usage, 69 store does not answer, 70 bug,
71 system refused, 74 lease lost and command stopped, or success not recorded,
75 busy or not due, 76 store broke the contract, 77 permission denied,
78 settings, 124 --max-run, 126 cannot be run, 127 not found.
`

// gateHelp names what is particular to gate. The rest is in [runHelp].
const gateHelp = `  underlease gate --wait 5m schema-v3 -- ./migrate.sh

Runs COMMAND once for all: under the lease ID, and only while no marker says
that ID is applied. The marker is written when COMMAND has exited with 0, before
the lease is released. It is looked for three times: before the lease is asked
for, while it is held, and after it was refused.

Usage: underlease gate [flags] ID -- COMMAND [ARG...]

  --wait D                wait so long for another instance to apply it (0), or
                          forever
  --applied-if CHECK      ask CHECK in place of the marker, by sh -c: 0 applied,
                          1 not applied; anything else, and nothing runs
  --check-timeout D       how long CHECK may take (30s)
  --if-unavailable fail|skip        when the store does not answer (fail)
  -q, --quiet             no line when all is well, and none when it was skipped

Takes the other flags of run too, but --slots, --once-per and --min-interval:
see underlease run --help.

Outcomes, as the line and --report name them
  migrated          COMMAND has exited with 0, and that is written down: 0
  already-applied   nothing to do: 0
  skipped           not applied, and another instance is at it: 75 (--busy-exit)
  failed            the exit code of COMMAND; or 69, CHECK gave no answer
  done-unrecorded   COMMAND has exited with 0, and that could not be written
                    down: it will run again: 74

Exit codes: those, and the others of run.
`

// markerHelp is that of all its commands.
const markerHelp = `  underlease marker show schema-v3

Shows and changes what underlease gate has written down.

Usage: underlease marker list                 the markers of the namespace
       underlease marker show ID              one, and what was done by hand
       underlease marker set ID               from now on ID counts as applied
       underlease marker clear ID             the next gate runs its command

  --backend URL     the store (file:); --backend-file FILE holds the URL
  --namespace TEXT  of the ID (empty)
  --config FILE     settings, as for run
  --reason TEXT     of set and clear; kept with who did it, from where and when
  --json            print one JSON object

Exit codes: 0; 1 from show: there is no marker; 64 usage, 69 store does not
answer, 76 store broke the contract, 77 permission denied, 78 settings.
`

const checkHelp = `  underlease check --for 20s || exit 1

Inside a command that runs under a lease: is there still D before underlease
would stop it? Its guardian answers by the clock of this moment.

Usage: underlease check [--for D] [--print]

  --for D    at least so long (0: just not being stopped). With a ttl of 60s,
             as most stores have it, 29s to 49s are left at any time.
  --print    print the whole seconds that are left, or never

Exit codes: 0 yes; 1 no, because less is left, or because the command is being
stopped, by underlease or after a signal from outside; 64 usage; 74 it cannot
be known: there is no lease around this process, or no guardian answers.
`

const listHelp = `  underlease list
  underlease list --json | jq -r '.leases[] | select(.held > 0) | .lease'

Shows the leases of a store, ordered by name: which are held, by whom and since
when, what is left of them, and how their last holders ended. Takes nothing and
makes nothing there.

Usage: underlease list [flags]

  --backend URL           the store (file:); --backend-file FILE holds the URL
  --namespace TEXT        whose leases (empty)
  --config FILE           settings; all flags of run are taken, for the same
                          command line and the same file find the same store
  --json                  one JSON object, with one lease a line
  -q, --quiet             no list: only whether all of it can be read

STATE is held; kept, when its holder has ended and its hold has not; or free.
LEFT is until it is free unless renewed, and - where that takes the end of its
holder. TERM is of the holder; when free, of the last one. LAST is how the last
holder that ended did so, with its exit code.

Exit codes: 0 also when there is none; 64 usage, 69 store does not answer,
76 a record cannot be read: it is named, and the others are shown,
77 permission denied, 78 settings.
`

const statusHelp = `  underlease status nightly-backup || echo "not now"

Shows one lease as list does, and says by its exit code whether a run with the
same flags would find it held. Without NAME it shows all. Takes nothing and
makes nothing in the store.

Usage: underlease status [flags] [NAME]

  --backend URL           the store (file:); --backend-file FILE holds the URL
  --namespace TEXT        of the name (empty)
  --slots N               how many may hold it at once (1)
  --config FILE           settings; all flags of run are taken, and the section
                          of NAME counts
  --json                  the JSON object of list
  -q, --quiet             nothing but the exit code

Exit codes: 0 free: one of N slots is (without NAME: all of all leases are);
75 held, or kept by a hold; 64 usage, 69 store does not answer, 76 its record
cannot be read, 77 permission denied, 78 settings.
`

const configHelp = `  underlease config nightly-backup

Prints every setting that a run of NAME would use here and now, and where it
came from. Without NAME no section of the settings file counts. Passwords are
masked. Takes the flags of run.

Usage: underlease config [flags] [NAME]

  --json    print one JSON object

Exit codes: 0; 64 usage, 71 it could not be written, 78 settings that cannot
work, or do not fit together; these are printed all the same.
`

const schemaHelp = `  underlease schema print --backend postgres://host/db | psql postgres://host/db

A database needs tables. The first run makes them where its role may; where it
may not, somebody with more rights does it, by one of these.

Usage: underlease schema print|apply [--backend URL]

  print    print the SQL, which may be run again; asks nothing of the server
  apply    run it, and bring tables of an older version up to date

With them come two functions for the transactions of jobs, which raise an error
where a newer term was installed: underlease_guard(lease, term), before a job
writes, and underlease_mark(lease, term), which writes the marker of its gate.

Exit codes: 0 done; 64 usage; 69 the store does not answer; 76 the tables are of
a newer version; 77 permission denied; 78 settings, and stores without tables.
`

const versionHelp = `  underlease version --json

Prints version, commit, Go version and platform.

Usage: underlease version [--json]

Exit codes: 0; 64 usage, 71 it could not be written.
`

const completionHelp = `  underlease completion bash > /etc/bash_completion.d/underlease

Prints a script that completes flags, their values and the names of leases.

Usage: underlease completion bash|zsh|fish

  bash: underlease completion bash > /etc/bash_completion.d/underlease
  zsh:  underlease completion zsh > a directory of $fpath, as _underlease
  fish: underlease completion fish > ~/.config/fish/completions/underlease.fish

Exit codes: 0; 64 usage, 71 it could not be written.
`
