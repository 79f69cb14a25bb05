"""What calibration found, kept in a folder, each file under the name of what made it; and such files of tensors."""
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tinykv import UserError, all_finite
from tinykv.hf.files import check_regular, parse_json, write
from tinykv.identity import same_model


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
