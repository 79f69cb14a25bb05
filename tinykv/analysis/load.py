"""What both commands read: the model, and the windows to calibrate on."""
from tinykv import hf, shared_flags
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data import load_windows


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


def load_calibration(args, tokenizer, device):
    """The windows to calibrate on, tokens (C, T)."""
    n = args.calib_windows or CALIBRATION_WINDOWS
    return load_windows(args.data, tokenizer, args.context, n, "calibration", bos=args.bos).tokens.to(device)
