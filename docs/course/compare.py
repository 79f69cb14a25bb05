"""What a submission gave, beside what is right.

A value is noted as plain JSON, so that it can leave the process that made it: what a student's process hands over is
read as numbers, and never run.
"""
import inspect
import math
import re
import textwrap
from contextlib import suppress

import numpy as np
import torch

from docs.course.compiles import ASKED, verdict

WIDEST = 12  # numbers of a row that is shown
MOST = 48  # of a list in a hint
LARGEST = 20_000  # numbers of a tensor; a right one has fewer
LONGEST = 4_000  # characters of a text, or a hint: finding lists takes their square
# formats in which a number is either right or wrong
STORED = ("torch.float16", "torch.uint8", "torch.int16", "torch.float8_e4m3fn")


def plain(value):
    """A tensor, a number, None, or a list of them, as JSON can hold it."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # none that says what it likes of itself
        x = value.detach().float() if value.dtype == torch.float8_e4m3fn else value.detach()
        numbers = [] if x.numel() > LARGEST else [shorter(n) for n in x.flatten().tolist()]
        return {"dtype": str(value.dtype), "shape": list(value.shape), "numbers": numbers}
    if isinstance(value, np.generic):  # one number of numpy's
        value = value.item()
    if getattr(type(value), "__iter__", None) in (list.__iter__, tuple.__iter__):  # no class that iterates otherwise
        return [plain(part) for part in value]
    if isinstance(value, str):
        return value[:LONGEST]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return shorter(value)
    return {"type": type(value).__name__}


def shorter(number):
    """Seven digits: all that fp32 has."""
    return float(f"{number:.7g}") if isinstance(number, float) else number


def difference(given, right, tolerance, names="", path=()):
    """What is wrong with a noted value, in words; "" if nothing is. tolerance: of a float, relative to the largest that
    it stands with. names: as `place_of` takes them. path: where it stands in the lists that are compared."""
    place = place_of(path, names)
    if isinstance(right, list):
        if not isinstance(given, list) or len(given) != len(right):
            return f"{place}It has to be {kind(right)}; yours is {kind(given)}."
        parts = ((g, r, tolerance, names, (*path, i)) for i, (g, r) in enumerate(zip(given, right)))
        return next(filter(None, (difference(*part) for part in parts)), "")
    if isinstance(right, dict):
        if "type" in right and given == right:  # a model, say
            return ""
        if not fits(given, right):
            return f"{place}It has to be {kind(right)}; yours is {kind(given)}."
        exact = right["dtype"] in STORED
        return unequal(given["numbers"], right["numbers"], 0 if exact else tolerance, names, path, right["shape"])
    if isinstance(given, dict) and given.get("shape") == []:  # a tensor of one number is a number
        given = given["numbers"][0]
    if isinstance(right, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        return unequal([given], [right], tolerance, names, path, [])
    if type(given) is type(right) and given == right:
        return ""
    types = [f" of type {type(value).__name__}" if given == right else "" for value in (given, right)]
    return f"{place}Yours is {kind(given)}{types[0]}; right is {kind(right)}{types[1]}."


def complaints(given, right, errors):
    """What is wrong with the values that a test has noted, each behind its hint. errors: a function that gives what a
    compiler says against its kernels."""
    for (value, *_), (wanted, hint, tolerance, names) in zip(given, right):
        if told := difference(value, wanted, tolerance, names):
            yield f"{hint}\n{told}"
        elif str(wanted).startswith(ASKED) and (told := verdict(wanted, errors())):
            yield told


def shortest(told):
    """Of what is wrong in a test, the shortest of those that are about the same as the first."""
    return short(min((text for text in told if text.split()[0] == told[0].split()[0]), key=len))


def place_of(path, names, index=()):
    """Where a value stands in lists in lists, and a number in a tensor, in words. names: of the first levels, what a
    value there is called, or by `|` each of them; and after each `;`, of a tensor with so many dimensions, what these
    are. Of "keys|values, layer; token, channel" the path (1, 0) and the index (7, 2) are "Values, layer 0, token 7,
    channel 2: "."""
    levels, *axes = [part.split(", ") for part in names.split("; ")]
    said = [level.split("|")[i] if "|" in level else f"{level} {i}" for level, i in zip(filter(None, levels), path)]
    if rest := path[len(said):]:
        said.append(f"value {''.join(f'[{i}]' for i in rest)}, counted from 0")
    dimensions = next((axis for axis in axes if len(axis) == len(index)), None)
    if dimensions:
        said += [f"{dimension} {i}" for dimension, i in zip(dimensions, index)]
    elif index:
        said.append(f"at {list(index)}, counted from 0")
    return ", ".join(said).capitalize() + ": " * bool(said)


def fits(given, right):
    """Whether it is a tensor of the right shape and dtype. Where integers are asked for, any will do."""
    if not isinstance(given, dict) or "type" in {*given, *right} or given["shape"] != right["shape"]:
        return False
    if len(given["numbers"]) != len(right["numbers"]):
        return False
    both_integers = right["dtype"] in ("torch.int64", "torch.int32") and "int" in given["dtype"]
    return given["dtype"] == right["dtype"] or both_integers


def unequal(given, right, tolerance, names, path, shape):
    """The first number that is off, and how many are, in words; "" if none is."""
    sizes = [abs(r) for r in right if math.isfinite(r)]
    room = tolerance * max(sizes, default=0) if any(isinstance(r, float) for r in right) else 0
    off = [i for i, (g, r) in enumerate(zip(given, right)) if not (g == r or abs(g - r) <= room)]
    if not off:
        return ""
    first, width = off[0], shape[-1] if shape else 1
    index = [int(i) for i in np.unravel_index(first, shape)] if len(right) > 1 else []
    place = place_of(path, names, index)
    digits = 4 if brief(given[first]) != brief(right[first]) else 7  # enough to see that they differ
    said = f"{place}yours is {brief(given[first], digits)}; right is {brief(right[first], digits)}."
    if 1 < width <= WIDEST:  # the row in which it stands
        begin = first - first % width
        rows = (", ".join(map(brief, numbers[begin:begin + width])) for numbers in (given, right))
        said += " That row: yours [{}]; right [{}].".format(*rows)
    return said + (f" {len(off)} of {len(right)} numbers are off." if len(right) > 1 else "")


def brief(number, digits=4):
    return f"{number:.{digits}g}" if isinstance(number, float) else str(number)


def short(text):
    """A hint without whole tensors: of a long list only how it begins."""
    def cut(match):
        numbers = len(re.findall(r"[\w.-]+", match[0]))
        return match[0] if numbers <= MOST else f"{match[0][:40].rpartition(',')[0]}, ...]"
    return re.sub(r"\[[\[\w., \]+-]*\]", cut, text[:LONGEST])


def called(function, given):
    """A call, in words."""
    pairs = zip(parameters_of(function, given), given)
    return f"{function.__name__} with " + ", ".join(f"{name} = {told(x)}" for name, x in pairs)


def parameters_of(function, given):
    """What a function calls the arguments that it is given."""
    names = []
    with suppress(TypeError, ValueError):  # what is not written in Python may have no signature
        names = [*inspect.signature(function).parameters]
    return (names + ["an argument"] * len(given))[:len(given)]


def told(value):
    """A value, in words; of a large tensor how it begins, for `short`, and of a model its class."""
    if isinstance(value, torch.nn.Module) or type(value).__repr__ is object.__repr__:
        return type(value).__name__
    if isinstance(value, torch.Tensor) and value.numel() > MOST:
        return f"{value.flatten()[:MOST + 1].tolist()} of shape {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(told, value))}]"
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


def kind(value):
    """What a value is, in words."""
    if isinstance(value, dict) and "shape" in value:
        return f"a tensor {tuple(value['shape'])} of {value['dtype'].removeprefix('torch.')}"
    if isinstance(value, dict):
        return f"of type {value.get('type')}"
    if isinstance(value, list):
        return f"{len(value)} values"
    return textwrap.shorten(repr(value), 200)
