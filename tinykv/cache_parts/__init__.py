"""What cache.py leaves out, as it is not the idea: running scores, what a text is refused for, a cache that records."""
