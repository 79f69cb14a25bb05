"""Files: read with a clear error, written whole or not at all; and the calibration file.

Whatever is wrong with a file is a `UserError` of one line: which file, what is wrong, what to do.
"""
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from tinykv import UserError

LARGEST_JSON = 64 * 2 ** 20  # bytes
CALIBRATION = "tinykv-calibration"  # what a calibration file says that it is

# Reading

def read_json(path):
    """The object in a JSON file, as a dict."""
    check_regular(path, LARGEST_JSON)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"no {path.name} in {path.parent}; give a folder as save_pretrained writes it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); see to its permissions") from None
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or nested too deeply
        raise UserError(f"{path} is not JSON ({first_line(error)}){remedy(path)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {short(content)} instead of a JSON object{remedy(path)}")
    return content


def read_text(path, largest=None):
    """The text of a UTF-8 file, without a byte order mark, its lines ending in newlines."""
    try:
        check_regular(path, largest)
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); convert it first, with iconv for one") from None
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise UserError(f"{str(path)[:80]} cannot be read ({first_line(error)}); give a UTF-8 text file") from None


def open_safetensors(path):
    """A safetensors file, opened: its tensors are read one by one, when they are asked for."""
    from safetensors import SafetensorError, safe_open
    check_regular(path)
    try:
        return safe_open(path, framework="pt")  # checks the header against the length of the file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({first_line(error)}){remedy(path)}") from None


def load_tensors(path, kind, device="cpu"):
    """What `save_tensors` wrote -> {name: tensor}, {name: text}.

    kind: what the file should be, for the error: "trained prefix", say. UserError if the digest in
    the file is not that of its tensors and notes, or if a number is not finite.
    """
    from safetensors import SafetensorError, safe_open
    check_regular(path)
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            notes = json.loads((file.metadata() or {}).get("notes", "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no {kind}, or a damaged one ({first_line(error)})") from None
    if not isinstance(notes, dict) or "digest" not in notes:
        raise UserError(f"{path} is a safetensors file, but not one that this version wrote as "
                        f"a {kind}; give another name")
    if notes.pop("digest") != digest_of(tensors, notes):
        raise UserError(f"{path} is a damaged {kind}; remove it to make it again")
    check_finite(path, tensors)
    return tensors, notes


def digest_of(tensors, notes):
    """The SHA-256 of {name: tensor} and {name: text}, in hex."""
    digest = hashlib.sha256(json.dumps(notes, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        tensor = tensor.detach().cpu().contiguous()
        digest.update(tensor.flatten().view(torch.uint8).numpy())  # (bytes)
    return digest.hexdigest()


def check_finite(what, tensors):
    """UserError if one of {name: tensor} holds a number that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise UserError(f"{what}: {name} holds numbers that are not finite; use another "
                            "--dtype, or other settings")


def check_regular(path, largest=None):
    """UserError for a folder, for a device or a pipe, which may never end, and for too many bytes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # whoever opens the file says what is wrong
        return
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is a folder, a device or a pipe; give a file")
    if largest is not None and found.st_size > largest:
        raise UserError(f"{path} has more than {largest:,} bytes, which no such file has")


# Writing

def write_json(path, content):
    try:
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    except ValueError:
        raise UserError(f"{path} is not written: a result is not finite") from None
    write(path, lambda part: part.write_text(text, encoding="utf-8"))


def save_tensors(path, tensors, notes):
    """Write a safetensors file of {name: tensor}, and of {name: text} about them and their digest."""
    from safetensors.torch import save
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    notes = {**notes, "digest": digest_of(tensors, notes)}
    # one text of all notes, because safetensors writes several in any order
    file = save(tensors, {"notes": json.dumps(notes, sort_keys=True)})
    write(path, lambda part: part.write_bytes(file))


def write(path, fill):
    """`replace_file`, with a UserError if the file cannot be written."""
    try:
        replace_file(Path(path), fill)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        raise UserError(f"{path} cannot be written ({first_line(error)}); choose another folder") from None


def replace_file(path, fill):
    """Fill a temporary file, then rename it to `path`: an interrupted write leaves the old file.

    fill: called with the temporary path, in the same folder. A file's mode stays. Of a symbolic
    link the target is replaced. A device or a pipe is written into.
    """
    special = is_special(path)
    if not special:
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
    # a name that nobody can guess, in a file that was not there before
    folder = None if special else path.parent
    handle, name = tempfile.mkstemp(prefix=".tinykv-", suffix=".tmp", dir=folder)
    os.close(handle)
    part = Path(name)
    try:
        fill(part)
        if special:
            sys.stdout.flush()  # the path may be that of stdout: what was printed comes first
            with open(part, "rb") as source, open(path, "ab") as target:
                shutil.copyfileobj(source, target)
            return
        part.chmod(mode_of(path))
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


def is_special(path):
    """Whether a path is a device, a pipe, or a file that is open already (/dev/stdout, /dev/fd/3)."""
    opened = Path(os.path.abspath(path)).parts[:2] in (("/", "dev"), ("/", "proc"))
    return path.exists() and not path.is_dir() and (opened or not path.is_file())


def mode_of(path):
    """The permissions of a file, or of one that is new."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


# What calibration found, in a file

class CalibrationFile:
    """The tables that calibration found for one model, under the name of a method and its settings.

        file = CalibrationFile("tables.safetensors", model, "wikitext2, 16 windows of 2048 tokens")
        method.restore(file.take("kvquant", calibrate_it))  # calibrates only what the file lacks
        file.save()

    path: where the tables are kept; None keeps them in memory only.
    data: describes the calibration text. A file of another model, or of other data, is an error.

    The names in a file never become attributes: `take` returns what lies under the caller's name,
    and a codec's `restore` takes from it the tables that it declares.
    """

    def __init__(self, path, model, data):
        self.path, self.model, self.data = path, model, data
        self.tables = {}  # {name: {table: tensor}}
        if path:
            self.tables = load_calibration(path, model, data)
        self.n_saved = len(self.tables)

    def take(self, name, calibrate):
        """The tables of that name, {table: tensor}: the file's, or else what calibrate() gives."""
        if name not in self.tables:
            tables = calibrate()
            check_finite(name, tables)
            self.tables[name] = tables
        return self.tables[name]

    def save(self):
        """Write the file, if there is one and something was added. What other runs added stays."""
        if self.path and len(self.tables) > self.n_saved:
            with locked(Path(self.path).resolve().parent):
                theirs = load_calibration(self.path, self.model, self.data)
                self.tables = {**theirs, **self.tables}
                save_calibration(self.path, self.model, self.data, self.tables)
            self.n_saved = len(self.tables)


@contextmanager
def locked(folder):
    """Only one process at a time is in here. Where there are no locks, none waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):  # Windows has no fcntl, some network drives no locks
            import fcntl
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which gives the lock back


def save_calibration(path, model, data, tables):
    """Write {name: {table: tensor}} of a model, with the description of the calibration text."""
    tensors = {}
    for name, of_name in tables.items():
        for table, tensor in of_name.items():
            tensors[f"{name}/{table}"] = tensor
    notes = {"format": CALIBRATION, "model": fingerprint(model), "data": data,
             "names": json.dumps(list(tables))}  # a name may have no tables
    save_tensors(path, tensors, notes)


def load_calibration(path, model, data):
    """What `save_calibration` wrote, {name: {table: tensor}}, on the model's device.

    {} if there is no such file; UserError if it is of another kind, another model or other data.
    """
    if not Path(path).exists():
        return {}
    tensors, notes = load_tensors(path, "calibration file", model.lm_head.weight.device)

    # 1. Is it a calibration file, of this model, and of this text?
    wanted = {"format": CALIBRATION, "model": fingerprint(model), "data": data}
    for what, of in wanted.items():
        if notes.get(what) != of:
            raise UserError(f"{path} is of another {what}: {notes.get(what)}, and not {of}; give "
                            "another file name")

    # 2. Sort the tensors by name
    try:
        tables = {name: {} for name in json.loads(notes["names"])}
        for key, tensor in tensors.items():
            name, _, table = key.rpartition("/")
            tables[name][table] = tensor
    except (KeyError, TypeError, ValueError, RecursionError):
        raise UserError(f"{path} is not whole, or of another version; remove it to calibrate "
                        "again") from None
    return tables


def fingerprint(model):
    """16 hex digits of the SHA-256 over config and weights, dtype included; the same on any device."""
    # the config, with every number as a float: 10000 and 10000.0 are one theta
    config = json.loads(json.dumps(asdict(model.config)), parse_int=float)
    return digest_of(dict(model.named_parameters()), config)[:16]


# Text for error messages

def short(value):
    """A value as JSON, on one line of at most 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def listed(names, most=8):
    """The first names, separated by commas, and how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", and {len(names) - most} more"
    return text


def first_line(error):
    """What an exception says, on one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[0][:200]


def first_bytes(path):
    """The first 200 bytes of a file; none if it cannot be read, which whoever opens it will report."""
    if not os.path.isfile(path):  # to open a pipe is to wait
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(200)
    except OSError:
        return b""


def remedy(path):
    """How to repair a damaged file, to be put at the end of an error."""
    if first_bytes(path).startswith(b"version https://git-lfs"):
        return "; it is the pointer that git-lfs leaves, run `git lfs pull` in its folder"
    return "; download it again"
