"""What calibration found: taken from a method and given back, and kept in a folder, each file under the name of what
made it; and such files of tensors."""
import hashlib
import json
import sys
import zlib
from dataclasses import asdict
from pathlib import Path

import torch

from tinykv import UserError, all_finite
from tinykv.cache import made_with
from tinykv.lab.files import check_regular, parse_json, write
from tinykv.model import same_model

# A method's tables: the attributes of the method in `found`, and those of its codecs in `tables`

MADE_WITH = "made with"  # what tables hold beside themselves: a number for their names and shapes, and `made_with`


def tables_of(method):
    """What calibration found, for a file: {"3.k.scale": tensor, ...}, and MADE_WITH once it has ended."""
    numbers = {name: getattr(method, name) for name in method.found if method.needs_text}
    tables = {name: torch.tensor(number) for name, number in numbers.items() if number is not None}
    for layer, kind, codec in method.each_codec():
        tables |= {f"{layer}.{kind}.{name}": table.clone() for name, table in codec.calibrated().items()}
    if tables and method.calibrated_on is not None:
        shapes = sorted((name, tuple(table.shape)) for name, table in tables.items())
        tables[MADE_WITH] = torch.tensor(zlib.crc32(repr([shapes, method.calibrated_on[1]]).encode()))
    return tables


def restore_tables(method, tables, model):
    """Take what `tables_of` gave, instead of calibrating on this model. Names that are not declared are ignored.
    UserError where a codec gets no table at all, or some are missing, of other shapes, or of other settings."""
    method.calibrated_on = None  # until the last table is there
    for name in set(method.found) & tables.keys():
        setattr(method, name, tables[name].item())
    for layer, kind, codec in method.each_codec():
        own = {name: tables[f"{layer}.{kind}.{name}"] for name in codec.tables if f"{layer}.{kind}.{name}" in tables}
        if codec.needs_text and not own:
            what = "calibrate it" if codec.tables else f"name what `fit` sets in `tables` of {codec!r}"
            raise UserError(f"{method!r} finds no table for {kind.upper()} of layer {layer}; {what}")
        vars(codec).update({**dict.fromkeys(codec.tables), **own})  # none of those it had before
    method.calibrated_on = model.identity(), made_with(method), method.each_codec()
    given, taken = (int(some.get(MADE_WITH, -1)) for some in (tables, tables_of(method)))
    if given != taken:
        method.calibrated_on = None
        raise UserError(f"{method!r}: tables are missing, have other shapes, or were found with other settings; "
                        "calibrate it, or give all that `tables_of` gives, names without a layer, too")


def table_bytes(method):
    """Bytes of the codecs' tables: found once, shared by all texts. A single number is no table."""
    tables = [table for *_, codec in method.each_codec() for table in codec.calibrated().values()]
    return sum(table.nbytes for table in tables if table.dim())


# In a folder


def hash_of(*parts):
    """The SHA-256, in hex, of what made something: another part, or edited code of this package, gives another one.

    parts: numbers, texts, tensors, lists and dicts; any other object counts by its class's name and its attributes. The
    package counts by its files as they were when it was loaded.
    """
    def plain(thing):
        return digest_of({"": thing}, {}) if isinstance(thing, torch.Tensor) else [type(thing).__name__, vars(thing)]
    return hashlib.sha256(json.dumps([PACKAGE, *parts], sort_keys=True, default=plain).encode()).hexdigest()


SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))
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
        kept.put(hash_of(windows), tables_of(method))
        restore_tables(method, kept.get(hash_of(windows)), model)

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
        computed = [tensors.pop(name).cpu() for name in known(self.identity) if name in tensors]
        as_kept = notes.get("name") == path.stem and same_model(computed, self.identity)
        return tensors if as_kept else None

    def put(self, made_of, tensors):
        """Keep {name: tensor}. UserError if a number in them is not finite."""
        for name, tensor in tensors.items():
            all_finite(f"numbers of {name}, which calibration found,", tensor)
        if path := self.path(made_of):
            try:
                notes = {"format": "tinykv-calibration", "name": path.stem}
                save_tensors(path, {**tensors, **known(self.identity)}, notes)
            except UserError as error:  # such as a full disk: they are found, and only not kept
                print(error, file=sys.stderr, flush=True)


def known(identity):
    """What a model is known by, with names for a file."""
    return {f"model {i}": part for i, part in enumerate(identity)}


# A file of tensors

def save_tensors(path, tensors, notes):
    """Write a safetensors file of {name: tensor}, and of {name: text} about them, their "format" and their digest."""
    from safetensors.torch import save
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    notes = {**notes, "digest": digest_of(tensors, notes)}
    # one text of all notes, because safetensors writes several in any order
    file = save(tensors, {"notes": json.dumps(notes, sort_keys=True)})
    write(path, lambda part: part.write_bytes(file), notes["format"])


def load_tensors(path, kind, device="cpu"):
    """What `save_tensors` wrote -> {name: tensor}, {name: text}.

    kind: what its notes say that it is, as "format". UserError for another kind of file, or if the digest in the file
    is not that of its tensors and notes.
    """
    from safetensors import SafetensorError, safe_open
    check_regular(path)
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            notes = dict(parse_json((file.metadata() or {}).get("notes", "{}")))
    except (SafetensorError, OSError, ValueError, TypeError):  # such as a file that is not whole
        notes = {}
    if notes.get("format") != kind or notes.pop("digest", None) != digest_of(tensors, notes):
        raise UserError(f"{path} is no {kind}, or a damaged one; give another name, or remove it to make it again")
    return tensors, notes


def digest_of(tensors, notes):
    """The SHA-256 of {name: tensor} and {name: text}, in hex."""
    digest = hashlib.sha256(json.dumps(notes, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        packed = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # also where one row has a stride
        digest.update(packed.view(-1).view(torch.uint8).numpy())  # (bytes)
    return digest.hexdigest()
