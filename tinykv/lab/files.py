"""Files: read with a clear error, written whole or not at all.

Whatever is wrong with a file is a `UserError` of one line: which file, what is wrong, what to do.
"""
import json
import math
import os
import secrets
from pathlib import Path

from tinykv import UserError, first_line

LARGEST = 2 ** 30  # bytes of a text


# Reading

def parse_json(text):
    """What a text says as JSON, a dict, a list, or a word. ValueError where it says nothing."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_text(path, largest=LARGEST):
    """The text of a UTF-8 file, without a byte order mark, its lines ending in newlines."""
    check_regular(path, largest)
    try:
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise UserError(f"{path} cannot be read ({first_line(error)}); give a UTF-8 text file") from None


def check_regular(path, largest=math.inf):
    """UserError for a folder, for a device or a pipe, which may never end, and for too many bytes."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is no file; give a file")
    if os.path.getsize(path) > largest:
        raise UserError(f"{path} is larger than {largest:,} bytes, so it cannot be such a file")


# Writing

def write_json(path, content, kind=None):
    """ValueError for a number that is not finite, which JSON does not know. kind: see `check_target`."""
    marked = {"format": kind, **content} if kind else content
    text = json.dumps(marked, indent=2, allow_nan=False) + "\n"
    write(path, lambda part: part.write_text(text, encoding="utf-8"), kind)


def write(path, fill, kind=None):
    """Fill a temporary file, then rename it to `path`: an interrupted write leaves the old file.

    fill: called with the temporary path, in the same folder. kind: see `check_target`.
    """
    path = Path(path).resolve()  # of a link, the target is replaced
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # nobody else's, nor a link that waits there
    try:
        check_target(path, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fill(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({first_line(error)}); choose another folder") from None


def check_target(path, kind, sign=None):
    """UserError unless `path` is new, or a file of this kind, which this program wrote before.

    kind: the name that such a file says near its beginning or, as a PDF, near its end, such as "tinykv-table", unless
    it has another `sign` there. None: whatever it is.
    """
    if not os.path.exists(path):
        return
    if os.path.isfile(path) and os.access(path, os.R_OK):
        with open(path, "rb") as file:
            ends = file.read(4096)
            file.seek(max(0, os.path.getsize(path) - 8192))
            ends += file.read()
        if kind is None or (sign or kind).encode() in ends:
            return
    raise UserError(f"{path} already exists, and is no {kind or 'file'} that this program wrote; choose another name, "
                    "or delete it")
