"""KVSink (Su and Yuan, 2025): find the attention sinks by the outlier that marks them, and keep those.

    Keep: the k tokens with the largest |H^lE[:, c]|, in the layers after lE.   Code: any scheme.
    When: at once, in blocks in a stream.

Algorithm 1. Sink tokens carry a huge value in one fixed channel c of the hidden state, from the output of the emergence
layer lE on. So one look at one channel of one block's output tells where the sinks are:
    S = top-k of |H^lE[i, c]| over tokens i;  layers l > lE keep K_l, V_l of S exact and code the rest.
Layers up to lE have stored their keys before S is known, so they code everything.

Paper and practice.
- lE and c come from the paper's Table 3 for the models in it, recognised by their config. Its layers count from 0: the
  figures show sinks "beyond layers 0 and 1" where the table says 1. The table lists up to four channels; the method
  uses one and does not say which: here the first. On any other model both are found by `sinks.find_outlier`; if there
  is no such outlier, the first k tokens are kept as PFN does, and the command says so.
- k tokens are always kept, though there may be only one to three real sinks: the surplus costs its 16 bits, no more.
- S is chosen over the whole window in the `paper` protocol, so an early query profits from a later choice. In a stream
  it is the top-k of what has been seen: a new sink takes the place of a weaker one, which is then read as its code. The
  paper freezes S after the prefill; in a stream from nothing there is no prefill to freeze it after.
- With static ranges the sinks are left out of the calibration, as the paper asks.
"""
import torch

from tinykv import UserError, sinks
from tinykv.methods.base import SchemeMethod, first_tokens

# Table 3, by (model type, layers, hidden size, MLP size, KV heads, vocabulary, positions): emergence layer and outlier
# channel (the first listed). The last three tell LLaMA-2 from LLaMA-1 and from other models of the same shape.
TABLE_3 = {
    ("llama", 32, 4096, 11008, 32, 32000, 4096): (1, 2533),  # LLaMA-2-7B and its chat model
    ("llama", 40, 5120, 13824, 40, 32000, 4096): (3, 4743),  # LLaMA-2-13B
    ("mistral", 32, 4096, 14336, 8, 32000, 32768): (1, 2070),  # Mistral-7B
    ("llama", 32, 4096, 14336, 8, 128256, 8192): (1, 788),  # LLaMA-3-8B
    ("llama", 32, 4096, 14336, 8, 128256, 131072): (1, 788),  # LLaMA-3.1-8B
    ("llama", 16, 2048, 8192, 8, 128256, 131072): (1, 400),  # LLaMA-3.2-1B
    ("llama", 28, 3072, 8192, 8, 128256, 131072): (1, 588),  # LLaMA-3.2-3B
}


class KVSink(SchemeMethod):
    compare = ("rtn", "pfn")

    def __init__(self, config, preserve=5, emergence_layer=None, outlier_channel=None, **scheme):
        super().__init__(config, **scheme)
        if preserve < 1:
            raise UserError(f"kvsink has to preserve at least 1 token; got {preserve} (rtn preserves none)")
        if (emergence_layer is None) != (outlier_channel is None):
            raise UserError("give both the emergence layer and the outlier channel, or neither")
        self.preserve, self.source, self.search = preserve, "given", False
        self.layer, self.channel = emergence_layer, outlier_channel
        shape = (config.model_type, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
                 config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
        if emergence_layer is None and shape in TABLE_3:
            (self.layer, self.channel), self.source = TABLE_3[shape], "the paper's Table 3"
        elif emergence_layer is None:
            self.source, self.search, self.needs_calibration = None, True, True
        elif not (0 <= emergence_layer < config.num_hidden_layers and 0 <= outlier_channel < config.hidden_size):
            raise UserError(f"emergence layer {emergence_layer} and channel {outlier_channel} are not in a model of "
                            f"{config.num_hidden_layers} layers and {config.hidden_size} channels")

    def calibrate(self, model, windows, progress=None):
        if self.search:
            self._found(sinks.find_outlier(model, windows))
        super().calibrate(model, windows, progress)

    def _found(self, outlier):
        self.layer, self.channel = outlier or (None, None)
        self.source = "found on the calibration windows" if outlier else "nothing found"

    def learned(self):
        found = [self.layer, self.channel] if self.layer is not None else [-1, -1]
        return {**super().learned(), "outlier": torch.tensor(found)} if self.search else super().learned()

    def restore(self, learned):
        super().restore(learned)
        if self.search:
            layer, channel = learned["outlier"].tolist()
            self._found(None if layer < 0 else (layer, channel))

    def observe(self, state, layer, hidden, start):
        """state: (score, position), each (B, k): the best outliers seen so far."""
        if layer != self.layer:
            return state
        B, T, _ = hidden.shape
        score = hidden[..., self.channel].float().abs()  # (B, T)
        position = torch.arange(start, start + T, device=hidden.device).expand(B, T)  # (B, T)
        if state is not None:
            score, position = torch.cat([state[0], score], 1), torch.cat([state[1], position], 1)  # (B, k + T)
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :self.preserve]  # (B, k), ties: the earlier
        return score.gather(1, order), position.gather(1, order)  # (B, k) both

    def keep(self, cache, kind, n, state):
        if self.source is None:
            raise UserError("kvsink does not know the outlier of this model yet; call its `calibrate` first")
        if self.layer is None:  # a model without outliers: PFN
            return first_tokens(cache, self.preserve)  # (B, 1, n)
        if cache.layer <= self.layer:
            return None
        return state[1][:, None]  # (B, 1, k)

    def describe(self):
        if self.layer is None:
            return f"no stable outlier in this model: the first {self.preserve} tokens are kept"
        return f"emergence layer {self.layer}, outlier channel {self.channel} ({self.source})"
