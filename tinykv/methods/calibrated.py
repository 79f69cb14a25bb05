"""What a method learned from calibration text: its tables. They can be taken from it and given back.

What calibration finds (ranges, levels, codebooks) are a method's *tables*. They hold for one model, and for the codecs
of one method. This file takes them from a method and gives them back, and refuses what does not belong together.
"""
import copy
import inspect
import zlib

import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import Pair
from tinykv.codecs.schemes import SCHEMES
from tinykv.identity import same_model


class Calibrated:
    config = None  # of the model that it was made for
    calibrated_on = None  # when calibration had ended: the model's `identity`, the method's `stored_as`, its codecs

    @property
    def needs_calibration(self):
        """Whether `calibrate.calibrate` has to run before the next text."""
        if self.calibrated_on is not None:
            return False
        return self.needs_text or any(codec.needs_text for _, _, codec in self.each_codec())

    def each_codec(self):
        """[(layer, "k" or "v", codec)]."""
        return [(layer, kind, codec) for layer, pair in enumerate(self.codecs) for kind, codec in zip("kv", pair)]

    def calibrated(self):
        """What calibration found, for a file: {"3.k.scale": tensor, ...}, and `calibrated_on`."""
        numbers = {name: getattr(self, name) for name in self.found if self.needs_text}
        tables = {name: torch.tensor(number) for name, number in numbers.items() if number is not None}
        for layer, kind, codec in self.each_codec():
            tables |= {f"{layer}.{kind}.{name}": table.clone() for name, table in codec.calibrated().items()}
        if tables and self.calibrated_on is not None:
            tables["shapes"] = torch.tensor(shapes_of(tables))
            tables["model"], tables["stored_as"] = self.calibrated_on[0], torch.tensor(self.calibrated_on[1])
        return tables

    def restore(self, tables, model):
        """Take what `calibrated` returned, instead of calibrating on this model. Names that are not declared are
        ignored. UserError where a codec gets no table at all, or some are missing, of other shapes, of other settings,
        or of another model."""
        self.calibrated_on = None  # until the last table is there
        taken = {name: tables[name] for name in self.found if name in tables}
        for name, number in taken.items():
            setattr(self, name, number.item())
        for layer, kind, codec in self.each_codec():
            names = {name: f"{layer}.{kind}.{name}" for name in codec.tables}
            own = {name: tables[in_file] for name, in_file in names.items() if in_file in tables}
            if codec.needs_text and not own:
                what = "calibrate it" if codec.tables else f"name what `fit` sets in `tables` of {codec!r}"
                raise UserError(f"{self!r} finds no table for {kind.upper()} of layer {layer}; {what}")
            vars(codec).update(own)
            taken |= {names[name]: table for name, table in own.items()}
        if taken and ("stored_as" not in tables or tables.get("shapes") != shapes_of(taken)):
            raise UserError(f"{self!r}: some of the tables are missing, or have other shapes; give all that "
                            "`calibrated` returns, names without a layer, too")
        stored_as = int(tables.get("stored_as", self.stored_as()))
        identity = tables["model"].cpu() if "model" in tables else model.identity()
        self.calibrated_on = identity, stored_as, self.each_codec()
        self.check_model(model)

    __copy__ = copy.deepcopy  # or to calibrate one would change the tables of the other

    def stored_as(self):
        """A number for what tables depend on: the method, where keys are stored, what is kept, how codecs were made.

        Two different ones share a number once in 2^32 pairs. The number sees a codec's class, and those arguments of
        its constructor that are attributes, and texts or numbers; of what `Method.fit` reads, only `preserve`.
        """
        made_with = [type(self).__name__, self.rope, 0 if self.uses_scores else self.preserve]  # it scores none
        for _, _, codec in self.each_codec():
            names = inspect.signature(type(codec)).parameters
            values = [value for name in names if isinstance(value := getattr(codec, name, None), str | int | float)]
            made_with.append([type(codec), *values])
        return zlib.crc32(repr(made_with).encode())

    def check(self):
        """UserError for what no cache can run. A command asks as soon as the method is made, and every cache asks."""
        name = type(self).__name__
        if self.config is None:
            raise UserError(f"{name} has no config; let its constructor call super().__init__(config)")
        L = self.config.num_hidden_layers
        one_of(("pre", "post"), rope=self.rope)
        one_of(("prompt", "always"), choose=self.choose)
        preserve = 0 if self.keeps_share else self.preserve  # a share is a text, such as "1%"
        for setting, value, least in (("recent", self.recent, 0), ("block", self.block, 1), ("preserve", preserve, 0)):
            if not (hasattr(value, "__index__") and value >= least):
                raise UserError(f"{setting} of {name} must be a whole number of at least {least}; got {value!r}")
        if not isinstance(self.codecs, list | tuple) or [type(pair) for pair in self.codecs] != [Pair] * L:
            raise UserError(f"{name}: `codecs` must be a list of {L} codecs.Pair, one a layer; got {self.codecs!r}")
        for _, kind, codec in self.each_codec():
            if codec.bits is None:
                raise UserError(f"{type(codec).__name__} has no `bits`; set its nominal bits of a number, such as 4")
            if (block := self.block_of(kind)) % codec.tokens_per_group:
                raise UserError(f"a block of {block} tokens does not hold whole groups of "
                                f"{codec.tokens_per_group}; give a multiple")
        made_by = {codec.scheme for *_, codec in self.each_codec()} - {None}
        if made_by and self.scheme in SCHEMES and self.scheme not in made_by:
            raise UserError(f"{name} says scheme {self.scheme}, and its codecs are of {', '.join(made_by)}; make a new "
                            "method with this scheme")
        learning = [codec for *_, codec in self.each_codec() if codec.needs_text]
        if len(set(map(id, learning))) < len(learning):
            raise UserError(f"{name}: each layer, K and V need codecs of their own, as each is calibrated by itself")

    def check_model(self, model):
        """UserError unless the model has the config that the method was made for and, if the method was calibrated,
        computes what that model did; perhaps in another dtype."""
        if self.config != model.config:
            raise UserError(f"{self!r} was made for another config; make it for this model's, as "
                            "`hf.load_config(folder)` reads it")
        parts, L = getattr(model, "model", ()), self.config.num_hidden_layers
        if "layers" in parts and len(parts["layers"]) != L:
            raise UserError(f"the model has {len(parts['layers'])} layers, and its config says {L}; set "
                            "num_hidden_layers before the method is made")
        if self.calibrated_on is not None:
            identity, stored_as, codecs = self.calibrated_on
            same = all(now is was for (*_, now), (*_, was) in zip(self.each_codec(), codecs))
            if not same or stored_as != self.stored_as():
                raise UserError(f"{self!r}: rope, preserve, a codec, or a setting of one, has changed since it was "
                                "calibrated; make a new method with these settings, and calibrate it")
            if not same_model(identity, model.identity()):
                raise UserError(f"{self!r} was calibrated on another model; calibrate it on this one")
        filled_for = getattr(self.prefix, "filled_for", None)
        if filled_for and not (filled_for[0] == self.prefix.ids and same_model(filled_for[1], model.identity())):
            raise UserError(f"the prefix {self.prefix.name} was filled for other tokens, or another model; call its "
                            "`fill` for this one")

    @property
    def offline_bytes(self):
        """Bytes of the codecs' tables: found once, shared by all texts. A single number is no table."""
        tables = [table for *_, codec in self.each_codec() for table in codec.calibrated().values()]
        return sum(table.nbytes for table in tables if table.dim())


def shapes_of(tables):
    """A number for the names and shapes of tables, {name: tensor}."""
    return zlib.crc32(repr(sorted((name, tuple(table.shape)) for name, table in tables.items())).encode())
