"""Quantized weights in a command: their flags, their label, and the model that has them, which a folder may keep."""
from functools import partial

from tinykv import UserError, one_of
from tinykv.lab import cli
from tinykv.lab.shared_flags import list_of
from tinykv.lab.tables import hash_of
from tinykv.lab.weights import QUANTIZERS, quantize, restore

FULL_PRECISION = "full precision"  # the label of weights that are not quantized


def add_weights(p, several):
    """The flags of weight quantization.

    several: --weights and --w-bits take lists; without --weights, weights are not quantized.
    """
    more = "[,...]" if several else ""
    group = p.add_argument_group("quantized weights")
    group.add_argument("--weights", metavar=f"NAME{more}", type=list_of(str, several),
                       default=None if several else "rtn",
                       help=f"how the linear layers' weights are quantized: {', '.join(QUANTIZERS)}")
    group.add_argument("--w-bits", metavar=f"B{more}", type=list_of(int, several),
                       default=None if several else "3", help="2 to 8" + " (default: 4)" * several)
    group.add_argument("--w-group-size", metavar="G", type=int,
                       help="inputs that share a scale (default: the largest divisor of a layer's inputs up to 128)")


def quantizers_of(args):
    """Each of --weights at each of --w-bits, by label: {"awq-3": Quantizer}; "awq-3-g64" with groups."""
    if not args.weights and (args.w_bits or args.w_group_size):
        raise UserError("--w-bits and --w-group-size are for quantized weights; give --weights, too")
    quantizers = {}
    groups = f"-g{args.w_group_size}" if args.w_group_size else ""
    for name in args.weights or []:
        one_of(QUANTIZERS, weights=name)
        for bits in args.w_bits or [4]:
            quantizers[f"{name}-{bits}{groups}"] = QUANTIZERS[name](bits, args.w_group_size)
    return quantizers


def weights_label(weights, quantizer, data, windows):
    """How weights are quantized, for a prefix's file: the quantizer's label, None for full precision, and what it was
    calibrated on, the text's name and its windows (W, T)."""
    if weights is None:
        return FULL_PRECISION
    return f"{weights}, {data} {hash_of(windows)[:16]}" if quantizer.needs_text else weights


def quantized_model(model, name, quantizer, windows, kept):
    """The model with quantized weights. Calibrated ones are taken from kept `Tables`, or added to them. windows (W, T):
    to calibrate on, where `quantizer.needs_text`."""
    made_of = hash_of(windows, quantizer) if quantizer.needs_text else None
    tensors = kept.get(made_of)
    if tensors is not None:
        return restore(model, quantizer, tensors)
    cli.step(f"quantizing weights {name}")
    quantized = quantize(model, quantizer, windows, partial(cli.bar, what=name, unit="block"))
    kept.put(made_of, quantized.model["layers"].state_dict())
    return quantized
