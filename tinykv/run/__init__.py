"""What turns a command line into runs: flags, runs, the table, ranks."""
