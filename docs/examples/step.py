"""Two stories through a quantized cache, for a debugger: see docs/tour.md. Run it in the repository's folder."""
import sys

sys.path.insert(0, ".")
import torch

from tinykv import hf
from tinykv.cache import KVCache
from tinykv.hf import EMBEDDED
from tinykv.methods.kvsink import KVSink

model, tokenizer = hf.load(EMBEDDED)
tokens = torch.tensor([tokenizer.encode("Anna went to the river.", bos=True) * 2])
method = KVSink(model.config, emergence_layer=1, outlier_channel=49, scheme="channel-dynamic", preserve=2)
cache = KVCache(model, method, protocol="paper")
logits = model(tokens, cache)
