"""Settings of all tests: one thread and fixed examples, so that every run gives the same result.

    pytest -q            a minute and more: the tests on a part of their cases that covers the whole
    pytest -q --whole    every test on everything
    pytest tests/test_methods.py --method path/to/file.py:Class
                         the matrix of one method, and nothing else, up to the first failure
    pytest tests/test_methods.py --method path/to/file.py:Class --as pfn
                         the same, and it has to do what the method pfn does

A test, or a `pytest.param`, with the mark `whole` runs under --whole only:

    @pytest.mark.whole
    @pytest.mark.parametrize("bits", [2, pytest.param(3, marks=pytest.mark.whole)])

A test with many cases runs the first, and then one in n, where --whole runs them all. With an n that has no divisor in
common with the lengths of the lists, every value of every list still occurs:

    @pytest.mark.one_in(5)
    @pytest.mark.parametrize("axis", ["token", "channel"])
    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])

Hypothesis draws 20 examples where a test does not say how many, and 60 under --whole. Where the default is a part of a
longer list, `runs_whole(config)` tells which of the two to take.
"""
import atexit
import gc
import json
import os
import sys
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path

import hypothesis
import own_methods
import pytest
import torch

gc.disable()  # what is imported now stays: see `pytest_collection_finish`
os.environ["TRITON_INTERPRET"] = "1"  # before kernels.py is imported: kernels run on the CPU
# transformers decorates functions with it, which nothing here compiles; the compiler takes seconds to import. One test
# compiles, with the real one
compile_for_real = torch.compile
torch.compile = lambda function=None, **settings: function or (lambda of_another: of_another)


def runs_whole(config):
    """Whether everything is asked for."""
    return config.getoption("--whole")


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true",
                     help="run the whole matrix of test_methods.py, and the tests marked `whole`")
    parser.addoption("--method", action="append", default=[], metavar="path/to/file.py:Class",
                     help="put this method, and no other, through the matrix; may be repeated")
    parser.addoption("--as", metavar="NAME", help="with --method: it has to do what this built-in method does")


def pytest_configure(config):
    config.addinivalue_line("markers", "whole: runs only under --whole")
    config.addinivalue_line("markers", "one_in(n): of its cases one in n, and under --whole all")
    torch.set_num_threads(1)
    if config.getoption("--method") or config.getoption("--as"):
        own_methods.check(config.getoption("--method"), config.getoption("--as"))
        config.option.maxfail = config.option.maxfail or 1
        if config.option.tbstyle == "auto":
            config.option.tbstyle = "line"  # a check says in a line what came and what should have come
    hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None,
                                         max_examples=60 if runs_whole(config) else 20)
    hypothesis.settings.load_profile("fixed")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--method"):
        left_out = [item for item in items if not is_a_cell(item)]
    elif config.getoption("--whole"):
        left_out = []
    else:
        left_out = [item for item in items if item.get_closest_marker("whole")] + all_but_one_in_n(items)
    config.hook.pytest_deselected(items=left_out)
    left_out = set(left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    gc.freeze()  # a million objects of packages, in which there is no garbage to look for
    atexit.register(gc.unfreeze)
    gc.enable()


def all_but_one_in_n(items):
    """Of the tests with the mark `one_in`, the cases that run under --whole only."""
    left_out, n_cases = [], Counter()  # cases of each test so far
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark:
            test = item.nodeid.partition("[")[0]
            if n_cases[test] % mark.args[0] != 0:
                left_out.append(item)
            n_cases[test] += 1
    return left_out


def is_a_cell(item):
    """Whether a test is a cell of the matrix. One that has no cell for this method ends in NOTSET."""
    test = getattr(item, "function", None)
    return hasattr(test, "axes") and not item.name.endswith("[NOTSET]")


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a command in this process, by its module: (status, stdout, stderr)."""
    def run(module, *words):
        monkeypatch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, words)])
        status = 0
        try:
            module.main()
        except SystemExit as end:
            status = end.code or 0
        said = capsys.readouterr()
        return status, said.out, said.err
    return run


@pytest.fixture(scope="session")
def interpreted_quickly():
    """What Triton's interpreter does again and again, it does once: a third of the time is left."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ModuleNotFoundError:  # there are no kernels then
        yield
        return
    original, prepared = interpreter.InterpretedFunction.__call__, set()

    def call(self, *args, **kwargs):
        # a launch prepares triton.language, and so does each call of a function within it
        if self.fn.__module__ in prepared or not self.fn.__module__.startswith("triton."):
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)  # one of Triton's own modules, which no launch prepares
        return original(self, *args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        # what is the same for equal types
        for kind in (tl.block_type, tl.pointer_type):
            patch.setattr(kind, "__hash__", tl.dtype.__hash__)
        for name in ("with_element_ty", "to_ir"):
            patch.setattr(tl.block_type, name, lru_cache(getattr(tl.block_type, name)))
        # sums of integers are computed in 64 bits, too, for an assertion that only debugging evaluates
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    """The folder of a random model of one narrow layer, which is loaded and calibrated in no time."""
    from tinykv.hf import EMBEDDED
    from tinykv.lab.hf.save import save
    from tinykv.model import Llama, LlamaConfig
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("one") / "model"
    save(Llama(LlamaConfig(1024, 16, 24, 1, 2, 1, 8, 128, bos_token_id=1)), EMBEDDED / "tokenizer.model", folder)
    return folder


@pytest.fixture
def command(run, one_layer):
    """A function that runs eval_ppl.py, on the model of one layer unless --model says another."""
    import eval_ppl
    return partial(run, eval_ppl, "--model", one_layer)


@pytest.fixture
def rows_of(command, tmp_path):
    """The same, with --json: (status, stdout, {label: row})."""
    def rows_of(*words):
        path = tmp_path / "rows.json"
        status, out, _ = command(*words, "--json", path)
        return status, out, {row["label"]: row for row in json.loads(path.read_text())["rows"]}
    return rows_of
