"""What turns a command line into a table: flags, settings, entries, calibration, ranks, rows, comparisons."""
