"""The table that `eval_ppl.py` prints: its heading, its rows, and methods at equal true bits.

A row is a dict, as the JSON has it. The first one is fp16's, with which the others are compared.
"""
import math

from tinykv.run import cli
from tinykv.weights import weight_bytes

# settings that change a method's bits and nothing else
BITS_SETTINGS = ("bits", "k_bits", "v_bits", "vq")


def print_heading(args, model, dtype, device, context, windows, models, runs, left_out):
    """What the table is of: the model, the text, the weights, and what calibration found."""
    parameters = sum(p.numel() for p in model.parameters())
    attention = "" if args.attention == "fused" else f", attention {args.attention}"
    prompt = f", prompt {args.prompt}" if args.prompt else ""
    print(f"model {args.model}: {parameters:,} parameters, {dtype}, {device}")
    whole = " (whole)" if windows.name.endswith("(whole)") else ""
    print(f"data {args.data}{whole}: {args.windows} windows of {context} tokens, "
          f"protocol {args.protocol}{prompt}, seed {args.seed}{attention}")
    for weights, smaller in models.items():
        if weights:
            print(f"weights {weights}: {weight_bytes(smaller) / 1e6:.2f} MB instead of "
                  f"{weight_bytes(model) / 1e6:.2f} MB")
    if windows.start > 1:
        what = "prompt" if args.prompt else "prefix"
        print(f"{what}: the first {windows.start} tokens of every window, which are not predicted")
    for label, why in left_out.items():
        print(f"{label} is left out: {why}")
    for title, r in runs.items():
        if r.method.describe():
            print(f"{title}: {r.method.describe()}")
        if choice_of(r, args) and (args.prompt or args.protocol == "stream"):
            when = {"prompt": "once, after the prompt", "always": "at each quantization"}
            print(f"{title}: the tokens to keep are chosen {when[choice_of(r, args)]}")


def choice_of(r, args):
    """When a run's method chooses the tokens to keep: "prompt", "always", or None where it has no
    such setting."""
    if "choose" not in r.settings:
        return None
    return r.method.choose if args.prompt else "always"


def print_claims(runs, results):
    """Say where codes take much more than the bits that the method claims."""
    for title, r in runs.items():
        claimed, held = (r.method.k_bits + r.method.v_bits) / 2, results[title].coded_bits
        if held > 1.5 * claimed + 1.5:
            print(f"{title}: {claimed:g} bits are claimed, and its codes hold {held:.1f}")


def row_of(r, result, fp16, args):
    """A row of the table, as the JSON has it. result, fp16: the `Result`s of run r and of fp16."""
    settings = {}
    for name, value in r.settings.items():
        settings[name] = value if isinstance(value, int | float | None) else str(value)
    row = {
        "label": r.label,
        "method": r.name,
        "settings": settings,
        "weights": r.weights,
        "scheme": r.method.scheme,
        "k_bits": r.method.k_bits,
        "v_bits": r.method.v_bits,
        "preserve": r.method.preserve,
        "protocol": args.protocol,
        "prompt": args.prompt,  # tokens of it, or None
        "choose": choice_of(r, args),
        "bits_nominal": (r.method.k_bits + r.method.v_bits) / 2,
        "offline_bytes": r.method.offline_bytes,
        "fault": result.fault,  # what is not finite; then nothing was measured
    }
    return {**row, **measure(result, fp16)}


def measure(result, fp16):
    """What a run cost in predictions, what its cache takes, and how long it took; None each where
    there is a fault."""
    if result.fault:
        return dict.fromkeys(measure(fp16, fp16))
    return {
        "ppl": result.ppl,
        "ppl_se": result.ppl_se,
        "delta_ppl": result.ppl - fp16.ppl,
        "kld": max(0.0, result.kl / result.targets),
        "top1": result.agree / result.targets,
        "recall": result.recall,
        "bits_true": result.bits,
        "bits_128k": result.bits_far,
        "cache_bytes": result.cache_bytes,
        "tokens_per_s": result.tokens / result.seconds,
        "seconds": result.seconds,
    }


def print_table(rows, room):
    """Print the rows in lines of at most `room` characters."""
    head = ["method", "scheme", "keep", "ppl", "+-", "delta", "KL", "top-1", "recall",
            "bits", "true", "128K", "cache KB", "s"]
    lines = []
    for row in rows:
        if row["fault"]:
            lines.append([row["label"], row["scheme"] or "-", str(row["preserve"]), "not finite",
                          *["-"] * 10])
            continue
        bits = f"{row['k_bits']:g}"
        if row["v_bits"] != row["k_bits"]:
            bits += f"/{row['v_bits']:g}"
        lines.append([
            row["label"], row["scheme"] or "-", str(row["preserve"]),
            f"{row['ppl']:.3f}", cli.figure(row["ppl_se"], ".3f"), f"{row['delta_ppl']:+.3f}",
            f"{row['kld']:.4f}", f"{row['top1']:.1%}", cli.figure(row["recall"], ".1%"),
            bits, f"{row['bits_true']:.2f}", f"{row['bits_128k']:.2f}",
            f"{row['cache_bytes'] / 1024:.0f}", f"{row['seconds']:.1f}"])
    matter = ["method", "keep", "ppl", "delta", "recall", "bits", "true", "s"]
    if any(row["weights"] for row in rows):
        head.insert(0, "weights")
        matter.insert(0, "weights")
        for row, line in zip(rows, lines):
            line.insert(0, row["weights"] or "-")
    cli.print_columns(head, lines, len(head) - 12, matter, room)


def lines_of(rows, varied):
    """{name of a line: its rows}.

    A row's label is its method, and then the settings that were swept: "pfn scheme=kvquant bits=2".
    The rows of a line differ in one setting: the first in their label that is one of `varied`.
    """
    lines = {}
    for row in rows:
        words = row["label"].split(" ")
        along_the_line = [word for word in words if word.partition("=")[0] in varied]
        if along_the_line:
            words.remove(along_the_line[0])
        if row["weights"]:
            words.append(row["weights"])
        lines.setdefault(" ".join(words), []).append(row)
    return lines


def at_bits(rows, bits):
    """What each method has at `bits` true bits: rows of `label`, `ppl`, `kld`, `between`, `tables`.

    rows: of the table, fp16's first. Rows of a method that differ in bits alone lie on a line. The
    loss and KL at `bits` are interpolated between the two nearest rows of the line, linearly in the
    bits. `between`: their true bits; `tables`: the bytes of their calibrated tables. A line that
    does not reach so far has no row.
    """
    found = []
    for label, line in lines_of(rows[1:], BITS_SETTINGS).items():
        below = max((row for row in line if row["bits_true"] <= bits), default=None,
                    key=lambda row: row["bits_true"])
        above = min((row for row in line if row["bits_true"] >= bits), default=None,
                    key=lambda row: row["bits_true"])
        if below is None or above is None:
            continue
        low, high = below["bits_true"], above["bits_true"]
        share = (bits - low) / (high - low) if high > low else 0.0  # of the upper row
        loss = (1 - share) * math.log(below["ppl"]) + share * math.log(above["ppl"])  # nats
        found.append({
            "label": label,
            "ppl": math.exp(loss),
            "kld": (1 - share) * below["kld"] + share * above["kld"],
            "between": (low, high),
            "tables": (below["offline_bytes"], above["offline_bytes"]),
        })
    return found


def print_at_bits(rows, bits):
    """The table of `at_bits`, or why there is none."""
    found = at_bits(rows, bits)
    if not found:
        print(f"no method has rows on both sides of {bits:g} true bits that differ in bits alone; "
              "give a list of --bits, or of --vq")
        return
    lines = []
    for row in found:
        delta = row["ppl"] - rows[0]["ppl"]
        lines.append([row["label"], f"{row['ppl']:.3f}", f"{delta:+.3f}", f"{row['kld']:.4f}",
                      *(f"{x:.2f}" for x in row["between"]),
                      *(f"{x / 1024:.0f}" for x in row["tables"])])
    head = [f"at {bits:g} true bits", "ppl", "delta", "KL", "from", "to", "tables KB", "to"]
    cli.print_columns(head, lines, left=1)
