"""What turns a command line into a table: setup, flags, entries, ranks, rows, comparisons."""
