"""What turns a command line into a table: flags, settings, entries, calibration, rows, comparisons."""
