"""Odd words and odd texts: each ends in one clear line, or is accepted with numbers that are finite."""
import contextlib
import io
import os
import sys
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import PIECES, tiny

import eval_ppl
from tinykv import hf
from tinykv.lab.run.settings import flags_of
from tinykv.methods.registry import METHODS

FLAGS = [*flags_of(METHODS), "data", "model", "device", "dtype", "seed", "bos", "batch", "context", "windows",
         "calib_windows", "weights", "w_bits", "protocol", "prompt", "vs"]
WORDS = ["", "0", "-1", "1", "2", "3.5", "1e99999999", "nan", "9" * 5000, "1,2", ",", "bos", "1%", "101%", "d8m256",
         "d0m0", "kivi", "all", "on", "token-static", "kvquant", "none", "meta", "cuda:9", "\udc80", "~nouser/x",
         "tales"]
LETTERS = ["x", " ", "\n", "Balo lives. ", "\ufeff", "\r", "\0", "e\u0301\u200d\U0001f600", "東", "<s>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of two narrow layers."""
    path = tmp_path_factory.mktemp("fuzz")
    hf.save(tiny(), PIECES, path / "model")
    return path


def run(folder, words):
    """The command in that folder, on that model: it ends with 0, or says in one line what is wrong."""
    small = ["--model", "model", "--context", "24", "--windows", "1", "--calib-windows", "1", "--json", "out.json"]
    out, err = io.TextIOWrapper(io.BytesIO(), errors="replace"), io.StringIO()
    with (contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          patch.object(sys, "argv", ["eval_ppl.py", *small, *words])):
        try:
            eval_ppl.main()
        except SystemExit as end:
            out.seek(0)
            assert end.code in (1, 2) and "Traceback" not in out.read()
            assert end.code == 1 or err.getvalue().splitlines()[-1].startswith("eval_ppl.py: error: ")


@given(method=st.sampled_from([*METHODS, "rtn,kivi"]),
       words=st.dictionaries(st.sampled_from(FLAGS), st.sampled_from(WORDS), min_size=1, max_size=3))
def test_odd_words_end_well(folder, method, words):
    run(folder, ["--method", method, *(f"--{flag.replace('_', '-')}={word}" for flag, word in words.items())])


@given(text=st.lists(st.sampled_from(LETTERS), max_size=20), times=st.sampled_from([1, 100]),
       what=st.sampled_from(["--data fp16", "--calib-data rtn", "--prefix intactkv"]))
def test_odd_texts_end_well(folder, text, times, what):
    flag, method = what.split()
    (folder / "text.txt").write_bytes("".join(text * times).encode())
    run(folder, ["--method", method, flag, os.fspath(folder / "text.txt")])
