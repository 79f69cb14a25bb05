"""What the commands share: the embedded model, checks of what was asked for, the progress bar, a table as text."""
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError

EMBEDDED = Path(__file__).parent / "assets" / "tales"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name, device):
    """The dtype of a name; without one fp32 on a CPU, where half-precision products are slow, and bf16 elsewhere."""
    return DTYPES[name or ("fp32" if device.type == "cpu" else "bf16")]


def check_context(context, config):
    if context > config.max_position_embeddings:
        raise UserError(f"--context {context} is longer than the {config.max_position_embeddings} positions that this "
                        "model was made for; ask for fewer tokens")


def check_folder(flag, path):
    """The folder that a file is to be written to has to be there."""
    if path and not Path(path).absolute().parent.is_dir():
        raise UserError(f"--{flag} {path}: there is no folder {Path(path).parent}")


def bar(windows, what, total=None):
    """A progress bar on stderr: from the second second on, and only where somebody watches."""
    return tqdm(windows, what, total, leave=False, unit="window", delay=1, file=sys.stderr,
                disable=not sys.stderr.isatty())


def figure(value, form):
    """A number as it stands in a table; "-" where there is none."""
    if isinstance(value, str):
        return value
    return "-" if value is None else format(value, form)


def print_columns(head, lines, left):
    """Lines of words under their heads, the first `left` columns flush left."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    for line in [head, *lines]:
        print("  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))))
