"""Settings of all tests: one thread and fixed examples, so that a run gives the same result every time."""
import os

import hypothesis
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before kernels.py is imported: its kernels run line by line, on the CPU


def pytest_addoption(parser):
    parser.addoption("--method", action="append", default=[], metavar="path/to/file.py:Class",
                     help="put this method, and no other, through the matrix of test_methods.py; may be repeated")


def pytest_collection_modifyitems(config, items):
    """With --method, leave out what is not of the matrix, and the tests that have no cell for such a method."""
    if config.getoption("--method"):
        out = [item for item in items if "case" not in item.fixturenames or item.name.endswith("[NOTSET]")]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def pytest_configure(config):
    torch.set_num_threads(1)
    fixed = {"derandomize": True, "deadline": None, "database": None, "max_examples": 60}
    hypothesis.settings.register_profile("fixed", **fixed)
    hypothesis.settings.load_profile("fixed")
