"""A real model: three methods on SmolLM2-135M-Instruct, and the search for its outlier.

    python docs/programs/smollm2.py --out DIR
    TINYKV_SMOLLM2=DIR pytest tests/test_smollm2.py
"""
import os
from pathlib import Path

import pytest

from eval_ppl import compare

FOLDER = os.environ.get("TINYKV_SMOLLM2")
pytestmark = pytest.mark.skipif(not FOLDER, reason="needs TINYKV_SMOLLM2, a folder by docs/programs/smollm2.py")

PERPLEXITY = {"fp16": 38.137, "rtn": 194.767, "pfn": 50.029, "kvsink": 46.519}
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def table():
    """Three bits, and one range for each channel of the keys, calibrated beforehand."""
    text = Path(__file__).parent / "prose.txt"
    return compare("rtn,pfn,kvsink", model=FOLDER, data=str(text), context=256, windows=2, calib_windows=2, bits=3,
                   scheme="channel-static")


@pytest.mark.parametrize("method", PERPLEXITY)
def test_perplexity(table, method):
    found = {row["label"]: row["ppl"] for row in table}
    assert found[method] == pytest.approx(PERPLEXITY[method], rel=TOLERANCE)


def test_the_outlier_is_found(table):
    """After layer 2, at `<|im_start|>` and several ` the`; after layer 11 the first token has one 30 times as large."""
    assert "kvsink: emergence layer 2, outlier channel 507 (found in 2 of 2 calibration windows)" in str(table)
