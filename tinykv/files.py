"""Files: read with a clear word for what is wrong with one, and written whole or not at all."""
import json
import os
import re
from contextlib import suppress
from pathlib import Path

from tinykv import UserError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


# Reading

def checked(folder):
    """The folder as a Path, if it is one."""
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{folder} is a file; give the checkpoint folder that it lies in")
    if HUB_NAME.fullmatch(str(folder)):
        raise UserError(f"no folder {folder}; if it is a name on the Hugging Face hub, download it first with "
                        f"`hf download {folder} --local-dir {path.name}`, then give the folder {path.name}")
    raise UserError(f"no folder {folder}; give the folder of a checkpoint in Hugging Face format")


def read_json(path):
    """The object in a JSON file, as a dict."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"no {path.name} in {path.parent}; give a folder as save_pretrained writes it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); see to its permissions") from None
    except ValueError as error:  # malformed, or not UTF-8
        raise UserError(f"{path} is not JSON ({error}){remedy(path)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {short(content)} instead of a JSON object{remedy(path)}")
    return content


def open_safetensors(path):
    from safetensors import SafetensorError, safe_open
    try:
        return safe_open(path, framework="pt")  # checks the header against the length of the file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({first_line(error)}){remedy(path)}") from None


def load_tensors(path, what, device="cpu"):
    """What `save_tensors` wrote: tensors, notes. UserError if it cannot be read; what: it is called so."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is no {what}, or a damaged one ({error})") from None


# Writing

def write_json(path, content):
    write(path, lambda part: part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def write(path, fill):
    """Fill a file under a temporary name, then rename it: a save that is cut short leaves the old file."""
    from safetensors import SafetensorError
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fill(part)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written ({first_line(error)}); choose another folder") from None
    finally:
        with suppress(OSError):
            part.unlink()


def save_tensors(path, tensors, notes):
    """A safetensors file, whole or not at all: {name: tensor}, and {name: text} about them."""
    from safetensors.torch import save
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write(path, lambda part: part.write_bytes(save(tensors, notes)))  # save_file would let only the owner read it


# Words for errors

def short(value):
    """A value as it was written, on one line and not too long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def listed(names, most=8):
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def first_line(error):
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[0][:200]


def head(path):
    """The beginning of a file; nothing if it cannot be read, which whoever opens it will say."""
    try:
        with open(path, "rb") as file:
            return file.read(200)
    except OSError:
        return b""


def remedy(path):
    if head(path).startswith(b"version https://git-lfs"):
        return "; it is the pointer that git-lfs leaves, run `git lfs pull` in its folder"
    return "; download it again"
