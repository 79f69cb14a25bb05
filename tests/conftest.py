"""Settings of all tests: one thread and fixed examples, so that a run gives the same result every time."""
import os

import hypothesis
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before kernels.py is imported: its kernels run line by line, on the CPU


def pytest_addoption(parser):
    parser.addoption("--method", action="append", default=[], metavar="path/to/file.py:Class",
                     help="put this method too through the matrix of test_methods.py; may be repeated")


def pytest_configure(config):
    torch.set_num_threads(1)
    fixed = {"derandomize": True, "deadline": None, "database": None, "max_examples": 60}
    hypothesis.settings.register_profile("fixed", **fixed)
    hypothesis.settings.load_profile("fixed")
