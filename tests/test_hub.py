"""Models and texts from the hub: a folder stands for what its library downloads. Nothing is fetched from beyond."""
import gzip
import hashlib
import io
import json
import shutil
import zipfile

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from test_checkpoint import PIECES, same, tiny, told
from test_data import Letters, spelled

from tinykv import UserError, hf
from tinykv.lab.data import load_windows
from tinykv.lab.data.windows import HUB_FILES
from tinykv.lab.hf.hub import HubFile, fetch_file, fetch_model, local_folder
from tinykv.lab.hf.save import save


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder of all files that the hub has."""
    def download(repo, name, repo_type, revision):
        assert (repo, repo_type, revision) == ("some/texts", "dataset", "main")
        return tmp_path / "site" / name

    def download_all(repo, **patterns):
        names = [path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.*")]
        for name in filter_repo_objects(names, **patterns):
            shutil.copy(tmp_path / "site" / name, tmp_path)
        return tmp_path
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download_all)
    fetch_model.cache_clear()
    (tmp_path / "site" / "original").mkdir(parents=True)
    return tmp_path / "site"


def offer(hub, name, body, sha256=None):
    """A HubFile that the hub has."""
    (hub / name).write_bytes(body)
    return HubFile("some/texts", name, sha256 or hashlib.sha256(body).hexdigest())


def test_a_model_by_its_name(hub):
    """config, tokenizer and weights, and not the same weights once more in another layout."""
    save(tiny(), PIECES, hub)
    for other in ("consolidated.safetensors", "original/params.json", "pytorch_model.bin"):
        (hub / other).touch()
    model, tokenizer = hf.load(local_folder("owner/tiny"))
    assert same(model, tiny()) and tokenizer.encode("the bell rings")
    assert {path.name for path in hub.parent.iterdir()} == {"site", "config.json", "model.safetensors",
                                                            "tokenizer.model"}


def test_what_the_hub_does_not_give_is_told(hub, monkeypatch):
    def fail(*given, **named):
        raise ConnectionError("no network\nand a second line")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "owner/none cannot be fetched from the hub (no network and" in told(local_folder, "owner/none")
    assert "wikitext" in told(load_windows, "wikitext2", Letters(), 8, 1)


def test_a_file_is_known_by_its_content(hub):
    path = fetch_file(offer(hub, "f.bin", b"something"))
    assert path.read_bytes() == b"something"
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
