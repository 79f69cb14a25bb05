"""Files: read with a clear word, written whole or not at all, known by what made them."""

import pytest
import torch
from cases import link
from safetensors.torch import save

from tinykv import UserError, hf
from tinykv.hf import EMBEDDED
from tinykv.hf.config import read_json
from tinykv.lab import files
from tinykv.lab.files import read_text, write_json
from tinykv.lab.tables import Tables, hash_of, load_tensors, save_tensors
from tinykv.lab.weights import AWQ, GPTQ

# ---- written

def test_the_target_of_a_link_is_replaced(tmp_path):
    target, linked = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    write_json(target, {"a": 0}, "thing")
    link(linked, target)
    write_json(linked, {"a": 1}, "thing")
    assert linked.is_symlink() and read_json(target) == read_json(linked) == {"format": "thing", "a": 1}
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")

    def fill(part):
        part.write_text("half")
        raise OSError(28, "No space left on device")
    with pytest.raises(UserError, match="No space left"):
        files.write(path, fill)
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == "old" and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("path", ["file/x.json", "x" * 300 + ".json"])
def test_a_path_that_cannot_be_written_to(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="written"):
        write_json(tmp_path / path, {})


@pytest.mark.parametrize("written", ["mine", '{"format": "tinykv-numbers"}'])
def test_what_the_program_did_not_write_stays(tmp_path, written):
    """Nor is a kind of its own replaced by another, which a command reads."""
    path = tmp_path / "x"
    path.write_text(written)
    with pytest.raises(UserError, match=f"{path} already exists, and is no tinykv-table"):
        write_json(path, {"a": 1}, "tinykv-table")
    assert path.read_text() == written and not list(tmp_path.glob("*.tmp"))


# ---- read

@pytest.mark.parametrize("read, content, said", [
    (read_json, b"{", "not JSON"), (read_json, b"\xff", "not JSON"),
    (read_text, b"\xff", "cannot be read"), (read_text, None, "is no file"), (read_json, None, "is no file")])
def test_what_cannot_be_read_is_one_line(tmp_path, read, content, said):
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_has_neither_a_mark_nor_returns(tmp_path):
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert read_text(tmp_path / "x") == "a\nb\n"


@pytest.mark.parametrize("change", [
    lambda data: data[:-1] + b"\1", lambda data: data.replace(b'\\"b', b'\\"c'), lambda data: data[:-3],
    lambda data: save({"a": torch.ones(2)}), lambda data: save({}, {"notes": '{"format": "thing"}'})],
    ids=["a digit", "a note", "the end", "no notes", "no digest"])
def test_tensors_are_whole_or_refused(tmp_path, change):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.arange(4.0)}, {"format": "thing", "of": "b"})
    tensors, notes = load_tensors(path, "thing")
    assert tensors["a"].tolist() == [0, 1, 2, 3] and notes == {"format": "thing", "of": "b"}
    with pytest.raises(UserError, match="no other thing"):
        load_tensors(path, "other thing")
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    with pytest.raises(UserError, match="thing"):
        load_tensors(path, "thing")


# ---- known by what made it

def test_a_hash_tells_contents_apart():
    tokens = torch.arange(6)
    parts = [(tokens,), (tokens.view(2, 3),), (tokens.int(),), (tokens + 1,), ([0, 1, 2, 3, 4, 5],), ("012345",),
             (tokens, [1]), (tokens, [2]), ([1], tokens), ("a", "bc"), ("ab", "c"), (1, 23), (12, 3), ({"bits": 2},),
             ({"bits": 3},), (AWQ(3),), (AWQ(4),), (GPTQ(3),), ([GPTQ(3)],), (None,), ("None",)]
    found = [hash_of(*of) for of in parts]
    assert len(set(found)) == len(found) and all(len(hex) == 64 for hex in found)
    assert hash_of(tokens.clone(), {"b": 1, "a": 2}) == hash_of(tokens, {"a": 2, "b": 1})


def test_a_folder_of_tables_gives_what_was_put_there(tmp_path):
    """Two at the same time lose nothing."""
    model, _ = hf.load(EMBEDDED)
    kept, other = Tables(tmp_path / "new", model), Tables(tmp_path / "new", model)
    kept.put("made of 1", {"0.k.scale": torch.ones(2)})
    other.put("made of 2", {})
    for folder in (kept, other):
        assert folder.get("made of 1")["0.k.scale"].tolist() == [1, 1] and folder.get("made of 2") == {}
        assert folder.get("made of 3") is None and folder.get(None) is None
    with pytest.raises(UserError, match="not finite"):
        kept.put("made of 4", {"x": torch.tensor([float("nan")])})
    assert len(list((tmp_path / "new").iterdir())) == 2
    nothing = Tables(None, model)
    nothing.put("made of 1", {"x": torch.ones(1)})
    assert nothing.get("made of 1") is None
