"""Codecs, a file each, and the named pairs of them (`schemes.py`)."""
