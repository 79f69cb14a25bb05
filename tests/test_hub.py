"""Models and texts from the hub: a server on this machine stands for it. Nothing is fetched from beyond."""
import gzip
import hashlib
import http.server
import io
import json
import threading
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from test_checkpoint import PIECES, same, tiny, told
from test_data import Letters, spelled

from tinykv import UserError, hf
from tinykv.hf.hub import HubFile, fetch_file, fetch_model
from tinykv.lab.data import load_windows
from tinykv.lab.data.windows import HUB_FILES

COMMIT = "c" * 40


class Requests(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, each with the headers that the hub gives; and the paths of GET requests in `asked`."""

    def do_GET(self):
        self.server.asked.append(self.path)
        super().do_GET()

    def end_headers(self):
        file = Path(self.translate_path(self.path))
        if file.is_file():
            self.send_header("ETag", f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, which the hub's library asks instead of the hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Requests, directory=tmp_path / "site"))
    server.folder, server.asked = tmp_path / "site", []
    site = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(constants, "ENDPOINT", site)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", site + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    fetch_model.cache_clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def put(hub, path, body):
    """A file on the site."""
    file = hub.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(body)


def offer(hub, name, body, sha256=None):
    """A HubFile that the site has."""
    put(hub, f"datasets/some/texts/resolve/main/{name}", body)
    return HubFile("some/texts", name, sha256 or hashlib.sha256(body).hexdigest())


def test_a_model_by_its_name(hub, tmp_path):
    """config, tokenizer and weights, and not the same weights once more in another layout."""
    hf.save(tiny(), PIECES, tmp_path / "model")
    content = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    content |= {"consolidated.safetensors": b"x", "original/params.json": b"x", "pytorch_model.bin": b"x"}
    tree = [{"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in content.items()]
    put(hub, "api/models/owner/tiny/revision/main", json.dumps({"id": "owner/tiny", "sha": COMMIT}).encode())
    put(hub, f"api/models/owner/tiny/tree/{COMMIT}", json.dumps(tree).encode())
    for name, body in content.items():
        put(hub, f"owner/tiny/resolve/{COMMIT}/{name}", body)
    model, tokenizer = hf.load("owner/tiny")
    assert same(model, tiny()) and tokenizer.encode("the bell rings")
    asked = [path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path]
    assert sorted(asked) == sorted(path.name for path in (tmp_path / "model").iterdir())  # each once


def test_a_name_that_the_hub_does_not_have_is_told(hub):
    assert "owner/none" in told(hf.load, "owner/none") and hub.asked


def test_a_text_without_a_network_is_one_line(hub, monkeypatch):
    hub.shutdown()
    hub.server_close()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert "wikitext" in told(load_windows, "wikitext2", Letters(), 8, 1)


def test_a_file_is_fetched_once_and_known_by_its_content(hub):
    file = offer(hub, "f.bin", bytes(range(256)) * 1000)
    path = fetch_file(file)
    assert Path(path).read_bytes() == bytes(range(256)) * 1000 and fetch_file(file) == path and len(hub.asked) == 1
    text = told(fetch_file, offer(hub, "g.bin", b"something else", sha256="0" * 64))
    assert "SHA-256" in text and "g.bin" in text


# WikiText-2 and C4, in small

def shard(texts, tail=b""):
    return gzip.compress(b"".join(json.dumps({"text": t, "url": "u"}).encode() + b"\n" for t in texts) + tail)


def text_of(*arguments):
    return spelled(load_windows(*arguments, bos="none"))


def test_wikitext2(hub, monkeypatch):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("wikitext-2-raw/wiki.test.raw",
                         " \n = Tea = \n \n A\u2028b\x85c \r\n\t\n = = Leaf = = \n last")
        archive.writestr("wikitext-2-raw/wiki.train.raw",
                         " \n = One = \n x \n = = Sub = = \n = Two = \n y \n \n = Three = \n z \n")
    monkeypatch.setitem(HUB_FILES, "wikitext2", offer(hub, "w.zip", file.getvalue()))
    # A row is a line with its newline, or "": line by line, joined by two newlines.
    rows = ["", " = Tea = \n", "", " A\u2028b\x85c \n", "", " = = Leaf = = \n", " last"]
    want = "<s>" + "\n\n".join(rows)
    assert text_of("wikitext2", Letters(), len(want) - 2, 1) == want
    with pytest.raises(UserError, match=f"has {len(want) - 2} tokens"):
        load_windows("wikitext2", Letters(), len(want) - 1, 1)
    # the articles are read from all over the split: the first, the third, the second
    want = "<s>\n\n = One = \n\n\n x \n\n\n = = Sub = = \n<s> = Three = \n\n\n z \n<s> = Two = \n\n\n y \n\n\n"
    assert text_of("wikitext2", Letters(), len(want) - 6, 1, "calibration") == want


def test_c4(hub, monkeypatch):
    texts = [f"t{i}\n\u2028é" for i in range(1103)]
    monkeypatch.setitem(HUB_FILES, "c4 test", offer(hub, "v.json.gz", shard(texts)))
    monkeypatch.setitem(HUB_FILES, "c4 calibration", offer(hub, "t.json.gz", shard(["one", "two", "xyz"], b"{")))
    want = "<s>" + " ".join(texts[:1100])
    assert text_of("c4", Letters(), len(want) - 2, 1) == want
    with pytest.raises(UserError, match=rf"c4 \(test\) has {len(want) - 2} tokens"):
        load_windows("c4", Letters(), len(want) - 1, 1)
    # Read no further than needed: the fourth line, which is broken, would be an error.
    assert text_of("c4", Letters(), 2, 5, "calibration") == "<s>one<s>two<s>x"
    assert load_windows("c4", Letters(), 2, 5, "calibration").tokens.dtype == torch.int64
