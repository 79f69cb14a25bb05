"""What can be seen to be wrong before anything is computed: with the flags, with the rows together."""
from tinykv import UserError, cli, did_you_mean


def check_flags(args):
    """What can be seen to be wrong before anything is loaded."""
    if args.at_bits is not None and not args.at_bits > 0:  # nor is NaN
        raise UserError(f"--at-bits must be above 0; got {args.at_bits:g}")
    cli.check_counts(args, 2, "context")
    cli.check_counts(args, 1, "windows", "calib-windows", "draws", "batch", "prompt")
    if hasattr(args, "choose") and not args.prompt:
        raise UserError("--choose is for a text with a prompt; give --prompt, too")
    cli.check_outputs(args, json="tinykv-table", calibration="folder", plot="tinykv-figure")


def check_entries(setup, entries):
    """What can be seen to be wrong with the entries before the model is loaded."""
    args, context = setup.args, setup.context
    for title, entry in entries.items():
        if not entry.method.keeps_share and entry.method.preserve > context:
            raise UserError(f"{title} keeps {entry.method.preserve} tokens, and a window has {context}; keep fewer")
        prefix = len(entry.method.prefix.ids) if entry.method.prefix else 0
        if args.prompt and not prefix < args.prompt < context:
            raise UserError(f"--prompt {args.prompt} has to be longer than the prefix of {title}, {prefix} tokens, "
                            f"and shorter than a window, {context}")
    if args.vs is not None and args.vs not in entries and args.vs not in [title.split()[0] for title in entries]:
        raise UserError(f"--vs {args.vs}: the table has no such row or method; it has {', '.join(entries)}"
                        + did_you_mean(args.vs, entries))
