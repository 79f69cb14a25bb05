"""What commands, tables and files ask of a method. None of it is needed to see how a method works."""
from tinykv.codecs.base import CALIBRATION_WINDOWS


class Described:
    """The part of `Method` that names, saves and prints."""
    name = None  # in the table; None: the name that it was asked for by
    scheme = None  # the name of the pair of codecs
    k_bits = v_bits = 16  # nominal bits of a number
    bits_settings = ()  # settings, beside the bits themselves, that its bits hang on: for --at-bits
    preserve = 0  # tokens kept, as the table says (OTT: the size of its pool)
    keeps_share = False  # True: `preserve` is a percentage of the text
    # The methods to show beside this one when it is asked for alone, and settings for them.
    compare = {}
    calibration_windows = CALIBRATION_WINDOWS  # that it should see, unless the user says otherwise

    @property
    def needs_calibration(self):
        """Whether `calibrate.calibrate` has to run before the next text."""
        passes = self.passes > 0 or any(codec.passes for _, _, codec in self.each_codec())
        return passes and not self.calibrated()

    def each_codec(self):
        """[(layer, "k" or "v", codec)]."""
        return [(layer, kind, codec) for layer, pair in enumerate(self.codecs) for kind, codec in zip("kv", pair)]

    def calibrated(self):
        """What calibration found, to be saved: {"3.k.scale": tensor, ...}."""
        return {f"{layer}.{kind}.{name}": table for layer, kind, codec in self.each_codec()
                for name, table in codec.calibrated().items()}

    def restore(self, tables):
        """Take over what `calibrated` gave, instead of calibrating; only what a codec declares."""
        for layer, kind, codec in self.each_codec():
            for name in codec.tables:
                if f"{layer}.{kind}.{name}" in tables:
                    setattr(codec, name, tables[f"{layer}.{kind}.{name}"])

    @property
    def offline_bytes(self):
        """Bytes of the codecs' tables: found once, shared by all texts."""
        return sum(table.nbytes for _, _, codec in self.each_codec() for table in codec.calibrated().values())

    def describe(self):
        """One line for the user: what was chosen or found."""
        return ""

    def __repr__(self):
        codec = self.scheme or "codec of its own"
        return f"{type(self).__name__}({codec}, {self.k_bits:g}-bit K, {self.v_bits:g}-bit V)"
