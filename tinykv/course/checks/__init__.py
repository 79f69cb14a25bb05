"""One file for each assignment: docs/course/authors.md says how it is written."""
