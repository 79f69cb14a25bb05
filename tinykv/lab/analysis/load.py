"""What both commands read: their flags of a model and a text, and the model."""
from tinykv import hf
from tinykv.lab import shared_flags


def add_flags(p, windows, longest):
    """windows: of them by default; longest: tokens of one. What is no flag here is as `calibration_text` reads it."""
    shared_flags.add_model(p)
    shared_flags.add_windows(p, windows, longest)
    shared_flags.add_bos(p)
    p.set_defaults(calib_data=None, calib_context=None, seed=0)


def load_model(args, longest):
    """The model. longest: see `shared_flags.set_up`, which this calls."""
    shared_flags.set_up(args, longest)
    print(f"model {args.model}, {args.dtype}, {args.device}")
    return hf.load_model(args.folder, args.devices, args.dtype)
