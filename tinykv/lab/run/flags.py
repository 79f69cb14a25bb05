"""The flags of eval_ppl.py, and what they, the model and the machine decide: entries, and the cache."""
from tinykv import UserError
from tinykv.cache import PROTOCOLS, KVCache
from tinykv.lab import cli, plots, shared_flags
from tinykv.lab.run.entries import build_entries, check_entries
from tinykv.lab.run.settings import add_settings, load_class
from tinykv.methods.registry import METHODS


def parser(asked=(), about=None):
    """asked: the methods of --method; those of the user's own have settings of their own. about: the description."""
    parent = cli.Parser(
        usage="%(prog)s [--method NAME[,NAME...]] [--model DIR|OWNER/NAME] [more flags]", description=about,
        epilog="A setting applies to every method that takes it; if none does, the command stops with an error.\n"
               "If you ask for a single method, the table also shows its baselines where they take the settings.")
    p = parent.add_argument_group("start here")
    add_method(p)
    p.add_argument("--list-methods", action="store_true", help="print the methods and their settings, and stop")
    shared_flags.add_model(p)
    p.add_argument("--through", choices=("tinykv", "transformers"),
                   help="whose code runs the model (default: tinykv's, or transformers' where tinykv has none for it)")
    shared_flags.add_windows(p, windows=16, longest=4096, count=shared_flags.count_or_all)
    p.add_argument("--protocol", choices=PROTOCOLS, default="paper",
                   help="paper: tokens are quantized before any query reads them; stream: as in generation")
    p = parent.add_argument_group("text and calibration")
    p.add_argument("--prompt", metavar="P", type=int,
                   help="the first P tokens of a window are read in one pass, the others as in generation; "
                        "protocol paper quantizes the prompt before it is read")
    shared_flags.add_bos(p, "given")
    p.add_argument("--seed", type=int, default=0, help="which tales are read")
    shared_flags.add_calibration(p)
    p.add_argument("--draws", metavar="N", type=int, default=1,
                   help="calibrate methods N times, each on text of its own, and print means; +- and t are then over "
                        "draws and windows; weights are quantized once, on the first draw's text")
    p = parent.add_argument_group("speed and output")
    p.add_argument("--batch", metavar="B", type=int, help="windows at a time (default: about 4096 tokens)")
    shared_flags.add_attention(p, "triton", "compiled")
    p.add_argument("--wide", action="store_true", help="print all columns of the table")
    p.add_argument("--json", metavar="PATH", help="also write the table, with every window's loss")
    p.add_argument("--vs", metavar="NAME",
                   help="also compare each row, window by window, with this one, or with this method's row of "
                        "the same settings")
    p.add_argument("--plot", metavar="FILE.png|pdf|svg",
                   help="also draw perplexity against true bits, or against kept tokens if --preserve is a list")
    shared_flags.add_weights(parent, several=True)
    # no settings: `set_up` sets them
    parent.set_defaults(config=None, tokenizer=None, devices=None, loaded=None, cache_class=None, entries=None,
                        left_out=None)
    add_settings(parent, asked)
    parent.meant = {"--keep": "--preserve", "--text": "--data", "--kv-cache-dtype": "--scheme", "-ctk": "--scheme",
                    **{name: f"--method {name}" for name in METHODS}}
    return parent


def add_method(p):
    p.add_argument("--method", metavar="NAME[,NAME...]", type=shared_flags.list_of(str), default="kvsink",
                   help="names from --list-methods, 'all', or path/to/file.py:Class")


def set_up(args, loaded=None):
    """The flags, with what the model and the machine decide (see `shared_flags.set_up`), with the `entries` that are
    asked for, and with the `cache_class` that evaluates them. loaded: a (model, tokenizer) to use instead of --model.
    """
    shared_flags.set_up(args, 4096, loaded)
    args.batch = shared_flags.batch_of(args.batch, args.context)
    args.cache_class, check = cache_class_of(args)
    args.entries, args.left_out = build_entries(args, args.config, args.tokenizer, check)
    check_entries(args, args.entries)
    return args


def cache_class_of(args):
    """The cache class that --attention evaluates with, and what checks a method for it, or for a model of transformers,
    besides. UserError if triton has no GPU, or torch no compiler."""
    if args.loaded and hasattr(args.loaded[0], "check_method"):
        return KVCache, args.loaded[0].check_method
    if args.attention == "compiled":
        from tinykv.lab import compiled_cache  # only now: it needs torch's compiler
        compiled_cache.check_compiler(args.device)
        return compiled_cache.CompiledCache, None
    if args.attention == "triton":
        from tinykv.lab import triton_cache  # only now: it needs triton
        triton_cache.check_device(args.device)
        return triton_cache.TritonCache, triton_cache.check_kernels
    return KVCache, None


def parse(words=None, methods=None, given=None, about=None):
    """The arguments of a command line. about: what --help begins with. `compare` passes methods instead of --method,
    and {flag: value} instead of words."""
    load_class.cache_clear()  # a file may have been edited since
    if isinstance(methods, str):
        methods = [name.strip() for name in methods.split(",")]
    elif methods is None:
        first = cli.Parser(add_help=False)
        add_method(first)
        methods = first.parse_known_args(words)[0].method
    methods = list(methods) if isinstance(methods, list | tuple) else [methods]
    p = parser(methods, about)
    args = p.parse_args(words if given is None else words_of(p, given))
    args.method = methods

    # refuse what is visibly wrong before anything is loaded
    shared_flags.check_counts(args, 1, "draws", "batch", "prompt")
    if hasattr(args, "choose") and not args.prompt:
        raise UserError("--choose is for a text with a prompt; give --prompt, too")
    shared_flags.check_outputs(args, json="tinykv-table", calibration="folder", plot=plots.KIND)
    if args.plot:
        plots.suffix_of(args.plot)
    return args


def words_of(p, given):
    """The words of a command line, for {flag: value}: a list is a flag's list, and True a flag that takes no value.
    Settings of methods that are neither texts nor numbers are handed on as they are."""
    words = []
    for name, value in given.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        kind = p.get_default("settings").get(name)
        if kind in (bool, str) and value is not None and not all(isinstance(x, str) for x in values):
            p.set_defaults(**{name: values})
        elif value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and (value is not False or p.get_default(name) is not False):
            words.append(f"--{name.replace('_', '-')}={','.join(map(str, values))}")
    return words


def check_effect(given, *without):
    """UserError for flags that are given, {flag: value}, and have no effect."""
    refused = sorted({"help", "list_methods", "method", *without} & set(given))
    if refused:
        raise UserError(f"{', '.join(refused)}: no effect here; leave it out")
