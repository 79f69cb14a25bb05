"""How short the way is from a command to the line that rounds, and that imports point in one direction only."""
import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import eval_ppl
from tinykv.codecs.affine import Affine
from tinykv.methods.base import Method
from tinykv.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
TINYKV = ROOT / "tinykv"
FILES = {str(path.relative_to(TINYKV)): path for path in sorted(TINYKV.rglob("*.py"))}  # "methods/ott.py": its path
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
METHOD_FILES = {name.removeprefix("methods/").removesuffix(".py") for name in FILES if name.startswith("methods/")}
METHOD_FILES -= {"__init__", "base", "codebooks", "registry"}
TRITON = {"lab/triton_cache.py"}  # the one file of tinykv/ that knows the kernels, imported where they are asked for


# From the command to the rounding

class Calls:
    """A profiler: the stacks of the project's own functions at each call of one function."""

    def __init__(self, function):
        self.code = function.__code__
        self.stacks = set()

    def __call__(self, frame, event, argument):
        if event != "call" or frame.f_code is not self.code:
            return
        names = []
        while frame is not None and names[-1:] != ["main"]:
            if frame.f_code.co_filename.startswith((str(TINYKV), eval_ppl.__file__)):  # ROOT may hold a .venv
                owner = [type(frame.f_locals["self"]).__name__] if "self" in frame.f_locals else []
                names.append(".".join([*owner, frame.f_code.co_name]))
            frame = frame.f_back
        self.stacks.add(tuple(reversed(names)))


MOST = 12  # calls: ten, and two helpers
LANDMARKS = ["main", "evaluate", "Llama.forward", "Attention.forward", "LayerCache.update", "CachedRows.quantize",
             "Affine.encode"]


@pytest.mark.parametrize("protocol", ["paper", "stream"])
def test_few_calls_from_the_command_to_the_rounding(protocol, monkeypatch, capsys):
    """For every method that rounds to integers; and they lead past the places that the reading list names, in order."""
    command = (f"eval_ppl.py --method rtn,pfn,kvsink,kivi,ott --protocol {protocol} --context 300 --windows 1 "
               "--calib-windows 1")
    monkeypatch.setattr(sys, "argv", command.split())
    calls = Calls(Affine.encode)
    sys.setprofile(calls)
    try:
        eval_ppl.main()
    finally:
        sys.setprofile(None)
    assert calls.stacks
    for stack in calls.stacks:
        assert len(stack) - 1 <= MOST and [name for name in stack if name in LANDMARKS] == LANDMARKS, stack
    assert "kvsink" in capsys.readouterr().out


# Arrows

def imports_of(name):
    """The modules that a file of tinykv/ imports anywhere in it."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from tinykv import cache` imports a module, `from tinykv import UserError` does not
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module for module in modules if is_module(module)} or {node.module}
    return found


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("name", sorted(METHOD_FILES))
def test_no_method_imports_another(name):
    for module in imports_of(f"methods/{name}.py"):
        assert not module.startswith("tinykv.methods.") or module.endswith((".base", ".codebooks")), module


# the reference, each part under what it imports; everything else is in lab/
ORDER = "model kmeans codecs methods cache calibrate evaluate hf lab".split()


@pytest.mark.parametrize("name", FILES)
def test_arrows_point_down(name):
    """The reference imports nothing of the lab, nor any part of it one that comes later in ORDER; and Triton, with
    kernels.py, is imported by its cache alone."""
    part = name.partition("/")[0].removesuffix(".py")
    below = {"__init__": [""]}.get(part) or ["", *ORDER[:ORDER.index(part) + 1]]
    for module in imports_of(name):
        project, package = f"{module}.".split(".")[:2]
        assert project != "tinykv" or package in below, module
        assert project not in ("triton", "kernels") or name in TRITON, module


def test_no_module_hides_one_of_the_standard_library():
    """A file `tinykv/inspect.py` would break "run this file" in an editor, which puts its folder first on the path.

    `codecs` does not, as Python has loaded its own before any file runs.
    """
    names = {part.removesuffix(".py") for name in FILES for part in name.split("/")} - {"__init__", "__main__"}
    assert names & set(sys.stdlib_module_names) == {"codecs"}


# One interface

@pytest.mark.parametrize("name", sorted(set(FILES) - TRITON))
def test_nobody_asks_what_kind_a_codec_or_a_method_is(name):
    """`isinstance(codec, Affine)` would be a case that a new codec, or a student's, falls through."""
    kinds = {part.name for file, tree in TREES.items() if file.startswith(("codecs/", "methods/"))
             for part in tree.body if isinstance(part, ast.ClassDef)} - {"Codes"}  # what a codec returns
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            assert not asked & kinds, f"line {node.lineno}"


def test_every_method_file_is_registered_under_its_name_and_opens_with_its_row():
    """If methods.md has the method, its first line says what it is; then come its three answers, in their order."""
    assert set(METHODS) == METHOD_FILES
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert all(f"\n## {name}\n" in page for name in ("kvsink", "cq", "oscar"))
    for name, cls in METHODS.items():
        assert cls.__module__ == f"tinykv.methods.{name}" and issubclass(cls, Method)
        if f"\n## {name}\n" not in page:
            continue
        title, row = ast.get_docstring(TREES[f"methods/{name}.py"]).split("\n\n")[:2]
        assert title.lower().startswith(name)
        assert re.match(r"\s*Keep: .*Code: .*When: ", row, re.DOTALL), name


def test_pip_installs_every_module_of_the_top_level():
    """`pip install -e .`, with the version that CITATION.cff has."""
    made = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(made["tool"]["setuptools"]["py-modules"]) == sorted(path.stem for path in ROOT.glob("*.py"))
    assert f'version: "{made["project"]["version"]}"' in (ROOT / "CITATION.cff").read_text()
