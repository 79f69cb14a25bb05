"""Whose tables are these? A reader may skip this file: it has nothing of a method's idea.

What calibration finds (ranges, levels, codebooks) are a method's *tables*. They hold for one model, and for the codecs
of one method. This file takes them from a method and gives them back (`Calibrated`), keeps them in a folder (`Tables`),
and refuses what does not belong together.
"""
import copy
import hashlib
import inspect
import json
import sys
import zlib
from dataclasses import asdict
from pathlib import Path

import torch

from tinykv import UserError, all_finite, one_of
from tinykv.codecs.base import Pair
from tinykv.files import digest_of, load_tensors, save_tensors
from tinykv.identity import same_model

# The tables of a method

class Calibrated:
    """What every `Method` has beside its answers to the three questions."""
    config = None  # of the model that it was made for
    calibrated_on = None  # (`identity` of the model, `stored_as` of the method) when calibration had ended

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
            tables |= {f"{layer}.{kind}.{name}": table for name, table in codec.calibrated().items()}
        if tables and self.calibrated_on is not None:
            tables["model"], tables["stored_as"] = self.calibrated_on[0], torch.tensor(self.calibrated_on[1])
        return tables

    def restore(self, tables, model):
        """Take what `calibrated` returned, instead of calibrating on this model. Names that are not declared are
        ignored. UserError where a codec gets no table at all, or those of other settings, or of another model."""
        self.calibrated_on = None  # until the last table is there
        for name in self.found:
            if name in tables:
                setattr(self, name, tables[name].item())
        for layer, kind, codec in self.each_codec():
            names = {name: f"{layer}.{kind}.{name}" for name in codec.tables}
            own = {name: tables[in_file] for name, in_file in names.items() if in_file in tables}
            if codec.needs_text and not own:
                what = "calibrate it" if codec.tables else f"name what `fit` sets in `tables` of {codec!r}"
                raise UserError(f"{self!r} finds no table for {kind.upper()} of layer {layer}; {what}")
            vars(codec).update(own)
        stored_as = int(tables.get("stored_as", self.stored_as()))
        self.calibrated_on = tables["model"].cpu() if "model" in tables else model.identity(), stored_as
        self.check_model(model)

    __copy__ = copy.deepcopy  # or to calibrate one would change the tables of the other

    def stored_as(self):
        """A number for what tables depend on: the method, where keys are stored, what is kept, how codecs were made.

        Of two that differ, one pair in 2^32 has the same number. Of a codec it sees the class, and those arguments of
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
        learning = [codec for *_, codec in self.each_codec() if codec.needs_text]
        if len(set(map(id, learning))) < len(learning):
            raise UserError(f"{name}: each layer, K and V need codecs of their own, as each is calibrated by itself")

    def check_model(self, model):
        """UserError unless the model has the config that the method was made for and, if the method was calibrated,
        computes what that model did; perhaps in another dtype."""
        if self.config != model.config:
            raise UserError(f"{self!r} was made for another config; make it for this model's, as "
                            "`hf.load_config(folder)` reads it")
        if self.calibrated_on is not None:
            identity, stored_as = self.calibrated_on
            if stored_as != self.stored_as():
                raise UserError(f"{self!r}: rope, preserve, or a setting of a codec, has changed since it was "
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


# What made a file of tables

def hash_of(*parts):
    """The SHA-256, in hex, of what made something: another part, or edited code of this package, gives another one.

    parts: numbers, texts, tensors, lists and dicts; of another object its class's name and its attributes count. Of the
    package, what counts is the files as they were when it was loaded.
    """
    def plain(thing):
        return digest_of({"": thing}, {}) if isinstance(thing, torch.Tensor) else [type(thing).__name__, vars(thing)]
    return hashlib.sha256(json.dumps([PACKAGE, *parts], sort_keys=True, default=plain).encode()).hexdigest()


SOURCES = sorted(Path(__file__).parent.rglob("*.py"))
PACKAGE = hashlib.sha256(b"".join(map(Path.read_bytes, SOURCES))).hexdigest()  # what was loaded, if edited later, too


def fingerprint(model):
    """16 hex digits of the SHA-256 over config and weights, dtype included, and over RoPE where it is not the config's;
    the same on any device."""
    # the config, with every number as a float: 10000 and 10000.0 are one theta
    config = json.loads(json.dumps(asdict(model.config)), parse_int=float)
    weights = dict(model.named_parameters()) | dict(model.named_buffers())  # quantized weights are buffers
    freq, of_config = model.rope.freq, type(model.rope)(model.config).freq
    edited = {} if torch.allclose(freq, of_config) else {"rope": freq}  # machines differ in a last bit
    return digest_of({**weights, **edited}, config)[:16]


class Tables:
    """What calibration found for a model, in a folder: a file for each set of tensors, named by what made it.

        kept = Tables("tables", model)
        kept.put(hash_of(windows), method.calibrated())
        method.restore(kept.get(hash_of(windows)), model)

    folder: None keeps nothing. Other models, and commands that run at the same time, may share it. What the model
    computed stands in each file: a hook, which no hash of weights sees, may have been added since.
    """

    def __init__(self, folder, model):
        self.folder = None if folder is None else Path(folder)
        self.device = model.lm_head.weight.device
        self.model, self.identity = (None, None) if folder is None else (fingerprint(model), model.identity())

    def path(self, made_of):
        """The file of what something made, a `hash_of` it; None if nothing is kept of it."""
        if self.folder is None or made_of is None:
            return None
        return self.folder / f"{hash_of(self.model, made_of)[:32]}.safetensors"

    def get(self, made_of):
        """{name: tensor}; None if they are not kept, or are of a model that computes something else, or if the file
        has another one's name."""
        path = self.path(made_of)
        if path is None or not path.exists():
            return None
        tensors, notes = load_tensors(path, "tinykv-calibration", self.device)
        as_kept = notes.get("name") == path.stem and same_model(tensors.pop("model").cpu(), self.identity)
        return tensors if as_kept else None

    def put(self, made_of, tensors):
        """Keep {name: tensor}. UserError if a number in them is not finite."""
        for name, tensor in tensors.items():
            all_finite(f"numbers of {name}, which calibration found,", tensor)
        if path := self.path(made_of):
            try:
                notes = {"format": "tinykv-calibration", "name": path.stem}
                save_tensors(path, {**tensors, "model": self.identity}, notes)
            except UserError as error:  # such as a full disk: they are found, and only not kept
                print(error, file=sys.stderr, flush=True)
