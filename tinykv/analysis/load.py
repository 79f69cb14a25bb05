"""What both commands read: their flags of a model and a text, and the model."""
from tinykv import hf, shared_flags


def add_flags(p, windows, longest):
    shared_flags.add_model(p)
    shared_flags.add_windows(p, windows, longest)
    shared_flags.add_bos(p)
    p.set_defaults(calib_data=None, seed=0)


def load_model(args, longest):
    """The model and its tokenizer. Sets --context where it is not given: the model's, up to `longest`."""
    shared_flags.check_counts(args, 1, "windows", "calib-windows")
    shared_flags.check_counts(args, 2, "context")
    device, config = hf.usable_device(args.device), hf.load_config(args.model)
    args.context = shared_flags.context_of(args.context, config, longest)
    tokenizer = hf.load_tokenizer(args.model, config)
    model = hf.load_model(args.model, device, shared_flags.dtype_of(args.dtype, device))
    print(f"model {args.model}, {model.lm_head.weight.dtype}, {device}")
    return model, tokenizer
