"""More bits where the loss asks for them: a method whose codecs differ by layer, and for keys and values.

    python eval_ppl.py --method docs/examples/by_layer.py:ByLayer --larger 16 --model DIR --data FILE

There are 2 L codecs, one for the keys and one for the values of each layer. Those that gain most have the large format,
and the others the small one. What a codec would gain is found in calibration text. If a key, or a value, moves by its
rounding error e, the loss moves by about g . e, where g is the loss's gradient. Its sign is chance, but its square,
summed over all tokens, says how far the predictions move (half of it is the KL divergence, by Fisher's information):

    gain = sum (g . e)^2 of the small format - sum (g . e)^2 of the large one

Two controls choose as many without the loss: `ends` takes the first and the last layers, as some engines do, and
`chance` draws.
"""
import random
import sys
from pathlib import Path
from typing import Annotated

from tinykv import at_least, one_of
from tinykv.codecs.base import BLOCK, Codec, Pair
from tinykv.lab.run.settings import load_class
from tinykv.methods.base import Method

formats = sys.modules[load_class(f"{Path(__file__).with_name('formats.py')}:Formats").__module__]


class Either(Codec):
    """The small format or the large one, as the method says when the gain of every codec is known."""
    needs_text = needs_gradient = True
    tables = ("gain",)

    def __init__(self, config, kind, small, large, method):
        self.small, self.large, self.method, self.gain = small, large, method, None
        self.codecs = {name: formats.format_codec(name, config, kind, formats.FORMATS[name][1])
                       for name in (small, large)}

    def fit(self, rows, kept, gradient=None, seed=0):
        moved = {}  # by the errors of a format
        for name, codec in self.codecs.items():
            error = codec.decode(codec.encode(rows)) - rows.float()  # (W, Hkv, T, d)
            of_token = (gradient.float() * error).sum(-1)  # (W, Hkv, T)
            moved[name] = of_token.square().sum()
        self.gain = moved[self.small] - moved[self.large]

    @property
    def chosen(self):
        return self.codecs[self.large if self in self.method.best() else self.small]

    @property
    def bits(self):
        return self.chosen.bits if self.gain is not None else self.codecs[self.small].bits

    def encode(self, x, ignore=None):
        return self.chosen.encode(x, ignore)

    def decode(self, codes):
        return self.chosen.decode(codes)


class ByLayer(Method):
    """`larger` of the 2 L codecs have the large format. by: loss, or for comparison ends or chance."""
    block = BLOCK

    def __init__(self, config, small: Annotated[str, "the format of most codecs"] = "nvfp4",
                 large: Annotated[str, "the format of those that gain most"] = "fp8",
                 larger: Annotated[int, "how many codecs have the large format, of 2 a layer"] = 16,
                 by: Annotated[str, "how they are chosen: loss, ends or chance"] = "loss"):
        super().__init__(config)
        one_of(formats.FORMATS, small=small, large=large)
        one_of(("loss", "ends", "chance"), by=by)
        at_least(0, larger=larger)
        self.scheme, self.larger, self.by = f"{small}/{large}", larger, by
        self.codecs = [Pair(*(Either(config, kind, small, large, self) for kind in "kv"))
                       for _ in range(config.num_hidden_layers)]

    def best(self):
        """The codecs of the large format."""
        last = len(self.codecs) - 1
        order = {"loss": lambda layer, kind, codec: -codec.gain,
                 "ends": lambda layer, kind, codec: min(layer, last - layer),
                 "chance": lambda layer, kind, codec: random.Random(f"{layer}{kind}").random()}[self.by]
        ordered = sorted(self.each_codec(), key=lambda each: order(*each))
        return [codec for *_, codec in ordered[:self.larger]]

    def describe(self):
        chosen = self.best()
        return f"{self.scheme.split('/')[1]}: " + ", ".join(
            f"{kind.upper()} of layer {layer}" for layer, kind, codec in self.each_codec() if codec in chosen)
