"""The embedded model shows what the papers study: the rule by which it was chosen, and the order of the methods."""
import pytest
import torch

from eval_ppl import compare
from tinykv.hf import EMBEDDED, load
from tinykv.lab.analysis import norms, sinks
from tinykv.lab.analysis.walk import Text, rows_of, walk
from tinykv.lab.data import load_windows
from tinykv.lab.differences import paired


@pytest.fixture(scope="module")
def embedded():
    """Test windows, whose sinks are the <s> that begin a story."""
    model, tokenizer = load(EMBEDDED)
    tokens = load_windows("tales", tokenizer, 1024, 2).tokens
    return Text(model, tokens, tokens == tokenizer.bos_id, layer=0)


def received(text, marks):
    """Of each block, the attention that the first token and later ones of marks (W, T) receive."""
    by_window = [torch.stack([sinks.sink_scores(at).mean(0) for at in walk(text.model, window)])  # (L, T)
                 for window in text.windows]
    found = torch.stack(by_window, dim=1)  # (L, W, T)
    later = marks.clone()
    later[:, 0] = False
    return [{"first": of_block[:, 0].mean().item(), "later": of_block[later].mean().item()} for of_block in found]


@pytest.fixture(scope="module")
def table():
    """{label: row} at two bits and at three, offset."""
    return {row["label"]: row for row in compare("rtn,pfn,kvsink", bits=[3, 2], windows=6, calib_windows=2)}


def test_it_is_small():
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 2e6


def test_it_has_the_sinks_of_the_rule(embedded):
    """First <s>: .5 in one block and .3 in another; later ones: .2 in two. In the blocks that have sinks, their values
    are small."""
    scores = received(embedded, embedded.marks)
    first = sorted((row["first"] for row in scores), reverse=True)
    later = sorted((row["later"] for row in scores), reverse=True)
    assert first[0] >= 0.5 and first[1] >= 0.3 and later[1] >= 0.2
    lengths = [row["v sinks"] for row, score in zip(rows_of(norms, embedded), scores) if score["first"] >= 0.3]
    assert max(lengths) < 0.4


def test_facts_are_answered(table):
    assert table["fp16"]["answers"] >= 0.95


@pytest.mark.parametrize("worse, better", [("rtn", "pfn"), ("pfn", "kvsink")])
@pytest.mark.parametrize("bits", [3, 2])
def test_static_grids_need_their_sinks(table, bits, worse, better):
    """Keeping the first five tokens is clearly better than none, and those that KVSink finds than the first: paired."""
    rows = [table[f"{name} bits={bits}"]["window_nll"] for name in (worse, better)]
    difference, _, _, p, _ = paired(*rows)
    assert difference > 0 and p < 0.01
