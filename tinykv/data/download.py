"""WikiText-2 and C4: downloaded once, over https, into $TINYKV_CACHE or ~/.cache/tinykv.

Size and SHA-256 are checked on every use, so a file that was put there by hand is as good as a
downloaded one. The checksums are those that Hugging Face's `datasets` library recorded for these
files.

Why not `torch.hub.download_url_to_file`: it follows a redirection from https to http, has no
timeout, and writes whatever a server sends to the disk before it looks at the checksum.
"""
import hashlib
import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

from tinykv import UserError
from tinykv.storage import replace_file

SCHEMES = ("https",)  # of the addresses that may be asked, redirections included
CHUNK = 2 ** 20  # bytes read at a time


@dataclass(frozen=True)
class Source:
    """A file on the network. size in bytes."""
    url: str
    size: int
    sha256: str


C4 = "https://huggingface.co/datasets/allenai/c4/resolve/1588ec454efa1a09f29cd18ddd04fe05fc8653a2/en/"
SOURCES = {
    "wikitext2": Source("https://wikitext.smerity.com/wikitext-2-raw-v1.zip", 4721645,
                        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "c4 test": Source(C4 + "c4-validation.00000-of-00008.json.gz", 40471190,
                      "1f25b6af12da84115301d4ee93ea5246c8fea5bb4a2008472794d95b917cc97f"),
    "c4 calibration": Source(C4 + "c4-train.00000-of-01024.json.gz", 319308785,
                             "8ef8d75b0e045dec4aa5123a671b4564466b0707086a7ed1ba8721626dfffbc9"),
}


def fetch(source):
    """The path of the file, checked. It is downloaded if it is not there."""
    folder = os.environ.get("TINYKV_CACHE") or "~/.cache/tinykv"
    try:
        path = Path(folder).expanduser() / source.url.rpartition("/")[2]
    except RuntimeError as error:  # of ~name, where nobody has that name
        raise UserError(f"TINYKV_CACHE is {folder}: {error}; give a folder") from None
    if not os.path.exists(path):  # unlike Path.exists, also for a name that no file can have
        download(source, path)
        return path
    fault = find_fault(path, source)
    if fault:
        raise UserError(f"{path} {fault}; delete it, and it is fetched again")
    return path


def find_fault(path, source):
    """What is wrong with the file, for an error message; None if nothing is."""
    size = path.stat().st_size
    if size != source.size:
        return f"has {size} bytes instead of {source.size}"
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != source.sha256:
        return f"has SHA-256 {digest.hexdigest()} instead of {source.sha256}"
    return None


def download(source, path):
    """Download to a temporary file, check it, and rename it: `path` is never half a file."""
    by_hand = f"put that file, with SHA-256 {source.sha256}, at {path}"
    try:
        replace_file(path, lambda part: receive(source, part, by_hand))
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{source.url} cannot be fetched ({error}); {by_hand}") from None


def receive(source, path, by_hand):
    """Download to `path`; UserError, ending in `by_hand`, if what came is not the file."""
    copy(source, path)
    fault = find_fault(path, source)
    if fault:
        raise UserError(f"{source.url} {fault}; {by_hand}")


def copy(source, path):
    """From the network into a file. Stops as soon as there is more than the file should have."""
    request = urllib.request.Request(check_scheme(source.url), headers={"User-Agent": "tinykv"})
    opener = urllib.request.build_opener(HttpsRedirections)
    name = source.url.rpartition("/")[2]
    with opener.open(request, timeout=60) as reply, open(path, "wb") as file:
        # disable=None: no bar where there is no terminal
        with tqdm(total=source.size, unit="B", unit_scale=True, desc=name, disable=None) as bar:
            while file.tell() <= source.size and (chunk := reply.read(CHUNK)):
                file.write(chunk)
                bar.update(len(chunk))


def check_scheme(url):
    """The address itself; OSError if it is not https."""
    if urlsplit(url).scheme not in SCHEMES:
        raise OSError(f"{url} is not {' or '.join(SCHEMES)}")
    return url


class HttpsRedirections(urllib.request.HTTPRedirectHandler):
    """Follows a redirection only to another https address."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return super().redirect_request(req, fp, code, msg, headers, check_scheme(newurl))
