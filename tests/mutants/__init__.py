"""Methods, codecs and caches that are wrong on purpose, each with the checks that have to notice.

A mutant that survives is a hole in the tests. One file a method has what can go wrong in that
method, and common.py what can go wrong in any. codec_mutants.py does the same for test_codecs.py.
"""
