"""Damaged inputs, seeded: each must end in one clear line, or be accepted with numbers that are finite.

    python tests/fuzz.py 10000     how they ended, and every case that ended badly
    python tests/fuzz.py 1 4711    that case alone, with its traceback

A case is made from its number alone. Its kind is the number modulo the number of kinds.
"""
import atexit
import contextlib
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import eval_ppl  # noqa: E402
from tinykv import UserError, hf  # noqa: E402
from tinykv.data import load_windows  # noqa: E402
from tinykv.evaluate import measure  # noqa: E402
from tinykv.methods.registry import METHODS  # noqa: E402
from tinykv.model import Llama, LlamaConfig  # noqa: E402
from tinykv.run.cli import EMBEDDED  # noqa: E402
from tinykv.run.runs import SETTINGS  # noqa: E402

TEXT = "Balo lives in Eastwick. Where does Balo live? In Eastwick.\n" * 30
ODD = [None, True, -1, 0, 1, 2 ** 31, 2 ** 63, 10 ** 400, 1.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800",
       "1e9", [], [1], {}, {"a": 1}, [[[]]], "<s>", "nul\0"]
WORDS = ["", "0", "-1", "1", "3.5", "1e99999999", "nan", "9" * 5000, "x" * 5000, "1,2", ",", "bos", "1%", "101%",
         "d8m256", "d0m0", "kivi", "all", "on", "token-static", "kvquant", "none", "meta", "cuda:9", "\udc80",
         "~nouser/x", "tales"]


# Damage

def change_json(rng, value):
    """A JSON value with one odd thing somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: change_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], change_json(rng, value[place]), *value[place + 1:]]
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice([-1, 1, 7, 1000])
    return rng.choice(ODD)


def change_bytes(rng, content):
    """Bytes cut off, flipped, put in, or replaced by something else."""
    place, how = rng.randrange(len(content) + 1), rng.randrange(5)
    if how == 0:
        return content[:place]
    if how == 1:
        return content[:place] + rng.randbytes(rng.randrange(1, 9)) + content[place:]
    if how == 2:
        return rng.choice([b"", b"[" * 200_000, b'{"a":' * 100_000, b"\xff" * 64, b"version https://git-lfs"])
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 3, 30])):
        changed[rng.randrange(min(len(changed), rng.choice([64, 4096, 10 ** 9])))] = rng.randrange(256)
    return bytes(changed)


def change_header(rng, content):
    """A safetensors file with a header that says something else."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(change_json(rng, json.loads(content[8:end]))).encode(errors="replace")
    return len(header).to_bytes(8, "little") + header + content[end:]


def damage_config(rng, folder):
    path = folder / rng.choice([name for name in ("config.json", "tokenizer_config.json") if (folder / name).exists()])
    path.write_text(json.dumps(change_json(rng, json.loads(path.read_text()))), errors="replace")


def damage_bytes(rng, folder):
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    path.write_bytes(change_bytes(rng, path.read_bytes()))


def damage_header(rng, folder):
    path = folder / "model.safetensors"
    path.write_bytes(change_header(rng, path.read_bytes()))


def damage_weights(rng, folder):
    """One tensor that is odd."""
    from safetensors.torch import load_file, save_file
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    tensors[name] = rng.choice([
        tensor.int(), tensor * float("nan"), tensor * 1e30, tensor * 1e6, tensor[:1], tensor[:0],
        tensor.to(torch.complex64), tensor.to(torch.float8_e4m3fn)])
    save_file(tensors, path)


def damage_tokenizer(rng, folder):
    """A tokenizer.json of its own, changed."""
    vocabulary = {chr(32 + i): i for i in range(60)} | {"<s>": 60, "</s>": 61, "[UNK]": 62}
    whole = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
             "added_tokens": [{"id": 60, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                               "normalized": False, "special": True}],
             "pre_tokenizer": {"type": "Whitespace"}, "decoder": None,
             "model": {"type": rng.choice(["WordLevel", "BPE"]), "vocab": vocabulary, "merges": [],
                       "unk_token": "[UNK]", "continuing_subword_prefix": "", "max_input_chars_per_word": 100}}
    (folder / "tokenizer.model").unlink(missing_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(change_json(rng, whole)), errors="replace")


# Cases

@cache
def small_model():
    """A folder with a model of two narrow layers, and the tokenizer of the embedded one."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    torch.manual_seed(0)
    config = LlamaConfig(1024, 16, 16, 2, 2, 1, 8, 64, bos_token_id=1, eos_token_id=2)
    hf.save(Llama(config), EMBEDDED / "tokenizer.model", folder)
    return folder


def load_and_read(rng, folder, damage):
    """Load a damaged copy of a small model, and read a text with it."""
    model_folder = folder / "model"
    shutil.copytree(small_model(), model_folder)
    damage(rng, model_folder)
    (folder / "text.txt").write_text(TEXT)
    model, tokenizer = hf.load(model_folder)
    windows = load_windows(str(folder / "text.txt"), tokenizer, 16, 1, bos="none")
    fp16 = measure(model, METHODS["fp16"](model.config), windows)
    rtn = measure(model, METHODS["rtn"](model.config, 2, 2, "token-dynamic"), windows, fp16=fp16)
    assert torch.tensor([fp16.ppl, fp16.bits, rtn.ppl, rtn.kl, rtn.bits]).isfinite().all(), (fp16, rtn)


def run_command(*words):
    """eval_ppl.py on a small model. What it exits with, and that its JSON is JSON."""
    argv, sys.argv = sys.argv, ["eval_ppl.py", *map(str, words)]
    try:
        eval_ppl.main()
    except SystemExit as end:
        if end.code:
            raise UserError(f"status {end.code}") from None
    finally:
        sys.argv = argv


def small():
    return ["--model", small_model(), "--context", "24", "--windows", "1", "--calib-windows", "1"]


def learned_file(rng, folder):
    """A calibration file, changed after it was written."""
    path = folder / "learned.safetensors"
    words = ["--method", rng.choice(["rtn", "kvsink", "skvq", "kvquant"]), "--calibration", path, *small()]
    run_command(*words)
    change = rng.choice([change_bytes, change_header])
    path.write_bytes(change(rng, path.read_bytes()))
    run_command(*words)


def command_line(rng, folder):
    """Flags with odd values."""
    method = rng.choice([*METHODS, "rtn,kivi"])
    words = ["--method", method]
    flags = ["--" + name.replace("_", "-") for name in SETTINGS]
    flags += ["--json", "--calibration", "--data", "--model", "--device", "--seed", "--bos", "--batch", "--context",
              "--windows", "--weights", "--w-bits", "--protocol", "--dtype", "--method", "--calib-windows"]
    for _ in range(rng.randrange(1, 4)):
        words += [rng.choice(flags), rng.choice([*WORDS, *range(10)])]
    (folder / "here").mkdir()
    with contextlib.chdir(folder / "here"):
        run_command(*small(), *words)


def odd_text(rng, folder):
    """A text of odd characters, with and without blanks, damaged or not."""
    letters = rng.choice(["x", "ab", " \n", "Balo lives. ", "\ufeff\r\n\t\0", "e\u0301\u200d\U0001f600", "東京",
                          "<s></s>"])
    text = "".join(rng.choices(letters, k=rng.choice([0, 1, 100, 10_000, 200_000]))).encode()
    if rng.random() < 0.3:
        text = change_bytes(rng, text)
    (folder / "text.txt").write_bytes(text)
    flag = rng.choice(["--data", "--calib-data", "--prefix"])
    method = {"--data": "fp16", "--calib-data": "rtn", "--prefix": "intactkv"}[flag]
    run_command("--method", method, flag, folder / "text.txt", *small())


KINDS = {
    "config": lambda rng, folder: load_and_read(rng, folder, damage_config),
    "bytes": lambda rng, folder: load_and_read(rng, folder, damage_bytes),
    "safetensors": lambda rng, folder: load_and_read(rng, folder, damage_header),
    "weights": lambda rng, folder: load_and_read(rng, folder, damage_weights),
    "tokenizer": lambda rng, folder: load_and_read(rng, folder, damage_tokenizer),
    "learned": learned_file,
    "text": odd_text,
    "command": command_line,
}


def run_case(number):
    """-> (kind, how it ended, what was said)."""
    kind = list(KINDS)[number % len(KINDS)]
    said, ended, clock = io.StringIO(), "accepted", time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            out = io.TextIOWrapper(io.BytesIO())  # what a command finds as its stdout
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
                KINDS[kind](random.Random(number), Path(folder))
        except UserError as error:
            ended = "refused"
            said.write(str(error))
        except AssertionError:
            ended = "not finite"
            said.write(traceback.format_exc())
        except KeyboardInterrupt:
            raise
        except BaseException:
            ended = "traceback"
            said.write(traceback.format_exc())
    if "Traceback" in said.getvalue() and ended == "refused":
        ended = "traceback"
    if time.process_time() - clock > 10:
        ended = "over 10 s"
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 2 ** 21:  # in KiB
        ended = "over 2 GB"
    return kind, ended, said.getvalue()


def main():
    cases, first = [int(word) for word in [*sys.argv[1:], 0][:2]]
    torch.set_num_threads(1)
    found = Counter()
    for number in range(first, first + cases):
        kind, ended, said = run_case(number)
        found[kind, ended] += 1
        if ended not in ("refused", "accepted"):
            print(f"case {number}, {kind}: {ended}\n{said}", flush=True)
    print(*sorted(found.items()), sep="\n")


if __name__ == "__main__":
    main()
