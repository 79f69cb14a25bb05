"""IntactKV's prefix as the user gives it: bos, a text file, or a file that train_intact.py wrote."""
import json

from tinykv import UserError
from tinykv.methods.intactkv import Prefix
from tinykv.storage import fingerprint, load_tensors, read_text, save_tensors

FORMAT = "tinykv-prefix"
FULL_PRECISION = "full precision"  # the label of weights that are not quantized


def open_prefix(what, tokenizer, config):
    """"bos", or the path of a text file or of a trained prefix (.safetensors) -> Prefix."""
    if what == "bos":
        if tokenizer.bos_id is None:
            raise UserError("this tokenizer has no BOS; give a text file for a prefix")
        return Prefix(what, [tokenizer.bos_id])
    if what.endswith(".safetensors"):
        return load_prefix(what, config)
    text = read_text(what).rstrip("\n")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return Prefix(what, [*bos, *tokenizer.encode(text)])


def fill_prefix(prefix, full, quantized, weights=FULL_PRECISION):
    """Give a prefix its keys and values for `quantized`, whose weights have this label.

    A trained prefix has them already. UserError if it was trained for another model, or for other
    weights.
    """
    if prefix.trained_for is None:
        prefix.fill(full, quantized)
    elif prefix.trained_for != {"model": fingerprint(full), "weights": weights}:
        raise UserError(f"the prefix {prefix} was trained for another model or for other weights, "
                        f"{prefix.trained_for}; train it for {weights} of this model")


def save_prefix(path, prefix):
    """Write a trained prefix, whole or not at all."""
    notes = {"format": FORMAT, **prefix.trained_for, "ids": json.dumps(prefix.ids)}
    save_tensors(path, {"keys": prefix.keys, "values": prefix.values}, notes)


def load_prefix(path, config):
    """What `save_prefix` wrote. UserError for another file, or one of another kind of model."""
    tensors, notes = load_tensors(path, "trained prefix")
    if notes.get("format") != FORMAT:
        raise UserError(f"{path} is a safetensors file, but not one that train_intact.py wrote")
    ids = json.loads(notes["ids"])
    shape = (config.num_hidden_layers, config.num_key_value_heads, len(ids), config.head_dim)
    if tensors["keys"].shape != shape or max(ids) >= config.vocab_size:
        raise UserError(f"the prefix {path} was trained for another model: it has keys of shape "
                        f"{tuple(tensors['keys'].shape)}, and not {shape}, or tokens that this model "
                        "does not know")
    trained_for = {"model": notes["model"], "weights": notes["weights"]}
    return Prefix(str(path), ids, tensors["keys"], tensors["values"], trained_for)
