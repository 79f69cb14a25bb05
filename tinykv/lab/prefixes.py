"""IntactKV's prefix as the user gives it: bos, a text file, or a file that train_intact.py wrote."""
import json

from tinykv import UserError
from tinykv.lab.files import read_text
from tinykv.lab.tables import load_tensors, save_tensors
from tinykv.methods.intactkv import Prefix

FORMAT = "tinykv-prefix"  # what the file says that it is


def open_prefix(what, tokenizer):
    """"bos", or the path of a text file or of a trained prefix (.safetensors) -> Prefix."""
    if what == "bos":
        if tokenizer.bos_id is None:
            raise UserError("this tokenizer has no BOS; give a text file for a prefix")
        return Prefix(what, [tokenizer.bos_id])
    if what.endswith(".safetensors"):
        return load_prefix(what)
    text = read_text(what).rstrip("\n")
    if not text:
        raise UserError(f"{what} is empty; give a text for a prefix, or bos")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return Prefix(what, [*bos, *tokenizer.encode(text)])


def save_prefix(path, prefix):
    """Write a trained prefix, whole or not at all."""
    notes = {"format": FORMAT, **prefix.trained_for, "ids": json.dumps(prefix.ids)}
    save_tensors(path, {"keys": prefix.keys, "values": prefix.values}, notes)


def load_prefix(path):
    """What `save_prefix` wrote."""
    tensors, notes = load_tensors(path, FORMAT)
    trained_for = {"model": notes["model"], "weights": notes["weights"]}
    return Prefix(str(path), json.loads(notes["ids"]), tensors["keys"], tensors["values"], trained_for)
