"""The Hugging Face hub: checkpoints by their names, and texts.

huggingface_hub does the work. It resumes a download that was cut off, keeps files below $HF_HOME, and honours
HF_ENDPOINT (a mirror), HF_TOKEN (for models behind a licence) and HF_HUB_OFFLINE.
"""
import hashlib
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Timer

from tinykv import UserError

PATIENCE = 2  # seconds


@dataclass(frozen=True)
class HubFile:
    """A file of a data set on the hub, known by its content."""
    repo: str
    name: str
    sha256: str
    revision: str = "main"


HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/model


def local_folder(name):
    """A folder's path as it is; a model's name on the hub -> the folder that it is downloaded to."""
    if HUB_NAME.fullmatch(str(name)) and not os.path.exists(name):
        return fetch_model(str(name))
    return name


@cache
def fetch_model(name):
    """owner/model -> the folder of its config, tokenizer and weights."""
    from huggingface_hub import snapshot_download
    with hub_faults(name):
        return Path(snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "tokenizer.model"],
            ignore_patterns=["*/*", "consolidated*"]))  # the same weights once more, in Meta's or Mistral's layout


def fetch_file(file):
    """A HubFile -> its path. It is downloaded if it is not there, and its SHA-256 is checked."""
    from huggingface_hub import hf_hub_download
    with hub_faults(f"{file.name} of {file.repo}"):
        path = hf_hub_download(file.repo, file.name, repo_type="dataset", revision=file.revision)
    with open(path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256:
        raise UserError(f"{path} has SHA-256 {digest} instead of {file.sha256}; delete it, and it is fetched again")
    return path


@contextmanager
def hub_faults(what):
    """Around a download: whatever the hub's library raises is a UserError of one line. If it takes seconds, a line on
    stderr says what is looked for."""
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()  # not a line for each retry
    slow = Timer(PATIENCE, print, [f"looking for {what} on the hub"], {"file": sys.stderr, "flush": True})
    slow.start()
    try:
        yield
    except Exception as error:  # of many kinds: no network, no such name, a licence to accept, a full disk
        raise UserError(f"{what} cannot be fetched from the hub ({' '.join(str(error).split())[:300]}); give a folder, "
                        "or a file, of this machine, or HF_HUB_OFFLINE=1 and what `hf download` has fetched") from None
    finally:
        slow.cancel()
