"""What CQ and AnTKV share: a method on codebooks."""
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.codecs.codebook import FEWEST, make_codebooks
from tinykv.methods.base import Method


class CodebookMethod(Method):
    """A method on codebooks. Its own idea is what to keep and when to quantize. Settings as of `make_codebooks`."""

    def __init__(self, config, vq=None, bits=None, sensitivity="fisher"):
        super().__init__(config)
        self.codecs = make_codebooks(config, vq, bits, sensitivity)
        codec = self.codecs[0].k
        self.scheme = codec.name
        # weights need four times as much text; but 4,096 centroids would take minutes
        if codec.needs_gradient and codec.m <= 1024:
            self.calibration_windows = 4 * CALIBRATION_WINDOWS

    def describe(self):
        """The format, and what the codebook that has the fewest vectors was calibrated on."""
        codecs = [codec for *_, codec in self.each_codec()]
        line = f"{codecs[0].name}, codebooks of a head"
        if self.calibrated_on is not None:
            least, samples = min(codecs, key=lambda codec: codec.effective), min(codec.samples for codec in codecs)
            line += f", each calibrated on {samples:,.0f} vectors"
            line += f"; by their weights worth {least.effective:,.0f} or more"
            if least.effective < FEWEST * least.m:
                line += f": few (below {FEWEST} a centroid), so give more --calib-windows, or fewer centroids"
        return line
