"""All attentions give the same perplexity: the visible lines, torch's own, and the kernels from packed codes."""
import functools

import pytest
import torch

from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.data import Windows
from tinykv.evaluate import measure
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

CONFIG = LlamaConfig(29, 32, 48, 2, 2, 1, 16, 64, bos_token_id=1)
TOKENS = torch.randint(2, 29, (3, 20), generator=torch.Generator().manual_seed(0))
TOKENS[:, 0] = 1
GROUPS = {"group_size": 4, "recent": 2}
SETTINGS = {"pfn": {"preserve": 2}, "kivi": GROUPS, "ott": {**GROUPS, "outlier_num": 2, "skip_layers": 0},
            "kvsink": {"preserve": 2, "emergence_layer": 0, "outlier_channel": 5}, "skvq": {**GROUPS, "preserve": 2},
            "intactkv": {"k_bits": 2, "v_bits": 2}, "cq": {"vq": "d2m8"}, "antkv": {"vq": "d2m8", "anchors": "20%"}}


@functools.cache
def model():
    torch.manual_seed(0)
    found = Llama(CONFIG).eval()
    for p in found.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=2 * p.shape[1] ** -0.5)
    return found


@functools.cache
def method(name):
    found = METHODS[name](CONFIG, **SETTINGS.get(name, {}))
    found.block = 4
    if found.needs_calibration:
        calibrate(model(), found, TOKENS)
    if found.prefix:
        found.prefix.fill(model(), model())
    return found


def perplexity(name, attention, cache_class, protocol, prompt):
    windows = Windows(TOKENS[:1, :14], [[]], "random")
    if prompt:
        windows = windows.predicted_from(prompt)
    found, fp16 = {}, None
    model().use_attention(attention)
    try:
        for each in ("fp16", name):
            found[each] = measure(model(), method(each), windows, protocol, 1, fp16, None, cache_class, prompt)
            fp16 = fp16 or found[each]
    finally:
        model().use_attention("fused")
    return found[name].ppl


@pytest.mark.parametrize("prompt", [None, 9])
@pytest.mark.parametrize("protocol", ["paper", pytest.param("stream", marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", METHODS)
def test_all_attentions_give_the_same_perplexity(name, protocol, prompt):
    """Codes are computed from what layers before have read: where one attention rounds more, later codes differ."""
    TritonCache = pytest.importorskip("tinykv.triton_cache").TritonCache
    plain = perplexity(name, "plain", KVCache, protocol, prompt)
    assert perplexity(name, "fused", KVCache, protocol, prompt) == pytest.approx(plain, rel=1e-4)
    assert perplexity(name, "triton", TritonCache, protocol, prompt) == pytest.approx(plain, rel=1e-4)
