"""README and docs/ are true: every command and every name exists, every example is what comes out, and what a sentence
says of a table stands in it. README's quick commands run; docs/programs/sessions.py runs the others for
their tables.
"""
import ast
import contextlib
import doctest
import glob
import json
import os
import pdb
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import conclusions
import crossed
import drawings
import notebook
import numpy as np
import pages
import pytest
import results
import sessions
import torch
from cases import link
from PIL import Image
from sessions import own_methods

import eval_ppl
from eval_ppl import compare
from tinykv import UserError, hf
from tinykv.codecs.schemes import SCHEMES
from tinykv.evaluate import Result
from tinykv.hf import EMBEDDED
from tinykv.hf.checkpoint import NoInit
from tinykv.lab.data import Windows
from tinykv.lab.run import comparisons, flags, table
from tinykv.lab.run.settings import flags_of
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PROGRAMS = ("python", "python3", "pytest", "pip", "hf")  # what a line begins with that is a command
LONG = ("--method all", "--method antkv", "omniquant", "--outliers", "--bits 4,3,2")  # seconds, on small settings, too
SMALL = ["--windows", "1", "--calib-windows", "4", "--context", "256"]


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text):
    """A page without its blocks."""
    return BLOCK.sub("", text)


# ---- commands

def commands(text):
    """Every command of a page: lines after "$ ", blocks of nothing but commands, and spans in the text."""
    found = []
    for language, block in BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif language in ("", "bash", "sh") and lines and lines[0].split()[:1] and lines[0].split()[0] in PROGRAMS:
            found += [line for line in lines if line.strip()]
    found += [span for span in SPAN.findall(prose(text)) if span.split()[0] in PROGRAMS and " " in span]
    return [part.strip() for line in found for part in re.sub(r"\s+", " ", line).split("&&")]


def script_of(words):
    """A python command's words -> (the program's file, its own words)."""
    if words[1] != "-m":
        return Path(words[1]), words[2:]
    path = Path(*words[2].split("."))
    if (ROOT / path).is_dir():
        return path / "__main__.py", words[3:]
    return path.with_suffix(".py"), words[3:]


def real_models():
    """{folder of a command: LlamaConfig}, from the table of shapes in real_models.md."""
    configs = {}
    for row in table_with("docs/real_models.md", "folder on the hub"):
        layers, width, mlp, heads, kv_heads, head, vocabulary, positions = map(int, list(row.values())[2:])
        config = LlamaConfig(vocabulary, width, mlp, layers, heads, kv_heads, head, positions, bos_token_id=1)
        folder = row["folder on the hub"].strip("`").split("/")[1]
        configs["TinyLlama" if row["model"] == "TinyLlama" else folder] = config
    return configs


class Reached(Exception):
    """The command has come as far as to load the weights."""


def check_words(words, folder):
    """An eval_ppl command as it is written, up to where the model would be loaded; path/to/... stands for a model."""
    with contextlib.chdir(folder):  # where the methods of a page's own are
        args = flags.parse(words)
        if args.list_methods:
            return
        config = real_models()[Path(args.model).name] if "path/to/" in args.model else hf.load_config(args.model)
        tokenizer = hf.load_tokenizer(EMBEDDED, hf.load_config(EMBEDDED))
        with (patch.object(hf, "load_config", return_value=config), pytest.raises(Reached),
              patch.object(hf, "load_tokenizer", return_value=tokenizer),
              patch.object(hf, "load_model", side_effect=Reached)):
            eval_ppl.evaluate(flags.set_up(args))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with docs/ and the methods that pages define, where commands may write beside them."""
    folder = tmp_path_factory.mktemp("docs")
    link(folder / "docs", ROOT / "docs")
    for page in PAGES:
        for name, code in own_methods(read(page)).items():
            (folder / name).write_text(code)
    return folder


@patch.dict(SCHEMES)  # a file of one's own may add a scheme
def check_command(command, folder):
    """Its program exists, and its words are right, as far as they can be checked without running it."""
    words = shlex.split(command)
    of_others = ["-m", "tinykv.lab.run.lm_eval"], ["-m", "venv"]
    if words[0] in ("pip", "hf", ".") or words[1:3] in of_others:
        return
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= index()[1], command
    if words[0] == "pytest":
        named = [word.partition("::")[0] for word in words if word.startswith("tests/")]
        assert all((ROOT / name).exists() for name in named), command
        return
    if words[1:3] == ["-m", "pdb"]:
        words = ["python", *words[3:]]
        while words[1] == "-c":  # a command of the debugger
            del words[1:3]
    script, own = script_of(words)
    assert (ROOT / script).is_file(), f"{command}: there is no {script}"
    if any(word.startswith("path/to/") and ".py:" in word for word in own) or (own and own[0].isupper()):
        return  # a class, or a word, that stands for others
    if script.name == "eval_ppl.py":
        check_words(own, folder)
    elif own and own[0].isalpha():  # what to do, of the analysis and the benchmarks
        assert own[0] in index()[0], command


COMMANDS = [(page, command) for page in PAGES for command in dict.fromkeys(commands(read(page)))]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_command_is_right(page, command, workplace):
    if "--attention triton" in command:
        pytest.importorskip("triton")  # on Linux alone
    check_command(command, workplace)


@pytest.mark.parametrize("command", [
    pytest.param(command, marks=pytest.mark.whole if any(word in command for word in LONG) else ())
    for page, command in COMMANDS if page == "README.md" and command.startswith("python eval_ppl.py ")
    and "path/to/" not in command and "triton" not in command])
def test_command_runs(command, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "argv", [*shlex.split(command)[1:], *SMALL])
    eval_ppl.main()  # ends with SystemExit where anything is wrong


def test_commands_are_found():
    """Whatever looks like a command outside of a session is one."""
    for page in PAGES:
        plain = re.sub(r"^```console\n.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in plain.splitlines() if re.match(r"\s*(python [-\w]|pytest )", line)]
        assert len(lines) <= len(commands(plain)), page


# ---- names

@cache
def index():
    """What the project's code has: (words, flags). words: the names in it, and what its strings say, docstrings left
    out; with the names of its files, of its folders, and of pdb's commands."""
    words = {name.removeprefix("do_") for name in dir(pdb.Pdb)} | {"None", "True", "False", "HF_ENDPOINT"}
    words |= set(json.loads((EMBEDDED / "config.json").read_text()))
    words |= {os.path.basename(path) for path in glob.glob("**", root_dir=ROOT, recursive=True)}  # of files
    flags = {"--help", "--model_args"}  # the latter of lm_eval
    flags |= {"--" + name.replace("_", "-") for name in flags_of(METHODS)}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tinykv/**/*.py"), *ROOT.glob("docs/**/*.py"),
                 ROOT / "tests/conftest.py"]:
        words.add(path.stem)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = None  # a docstring
            if isinstance(node, ast.arg) and path.parent.name == "examples":  # its methods' settings
                flags.add("--" + node.arg.replace("_", "-"))
        code = ast.unparse(tree)  # without comments
        words |= set(re.findall(r"\w[\w-]*", code))
        flags |= set(re.findall(r"--[a-z][\w-]*", code))
    return words, flags


def missing(span, own=()):
    """What a span of code in the text names that is not there, or None. own: names that the page itself defines."""
    words, flags = index()
    if span.split()[0] in PROGRAMS:
        return None  # a command
    for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span):
        if flag not in flags:
            return flag
    file = span.partition(":")[0]
    if re.fullmatch(r"[\w./-]+\.(py|md|json|safetensors|model|bin|png|txt)", file) or (
            "/" in file and file.split("/")[0] in {p.name for p in ROOT.iterdir()}):
        there = "path/to/" in file or (ROOT / file).exists() or file in own or ("/" not in file and file in words)
        return None if there else file
    call = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(\))?(=[\w.-]+)?", span)
    names = call[1].split(".") if call else []
    if names and names[0] in ("torch", "transformers", "np", "pd"):
        return None
    return next((name for name in names if name not in words and name not in own and name != "tinykv"), None)


def own_names(text):
    """Names that a page's own code defines, and the files that it says they lie in."""
    code = "\n".join(code for language, code in BLOCK.findall(text) if language == "python")
    return set(re.findall(r"\w+", code)) | set(own_methods(text)) | set(re.findall(r"Save it as\s+`(\w+\.py)`", text))


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    text = read(page)
    spans = SPAN.findall(prose(text))
    assert len(spans) > 10
    gone = [span for span in dict.fromkeys(spans) if missing(span, own_names(text))]
    assert not gone, f"{page} names in backticks what the code does not have: {gone}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(page))):
        path, _, anchor = target.partition("#")
        if not target.startswith("https://"):
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads], target


# ---- examples

EXAMPLES = [(page, code) for page in PAGES for language, code in BLOCK.findall(read(page))
            if language == "python" and page != "docs/huggingface.md"]  # which test_huggingface.py runs


def check_example(code):
    """A block of python: what it prints is what stands there; each block runs by itself."""
    if ">>>" not in code:
        return exec(compile(code, "<block>", "exec"), {"__name__": "block"})
    test = doctest.DocTestParser().get_doctest(code, {}, "block", None, 0)
    said = []
    with patch.dict(SCHEMES):  # an example may add a scheme
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("page, code", EXAMPLES)
def test_example(page, code, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_example(code)


def test_the_changed_line_of_the_tour_undoes_pfn(tmp_path):
    """Its five tokens are worth nothing without the first: on a part of the tour's windows, and shorter ones."""
    before, after = re.findall(r"^[-+](        .*)$", read("docs/tour.md"), re.MULTILINE)
    code = (ROOT / "tinykv/methods/pfn.py").read_text()
    assert code.count(before) == 1
    (tmp_path / "pfn.py").write_text(code.replace(before, after))
    table = compare(f"rtn,pfn,{tmp_path / 'pfn.py'}:PFN", windows=2, calib_windows=2, context=256)
    _, rtn, pfn, changed = [row["ppl"] for row in table]
    assert pfn < 0.5 * rtn and changed > 0.8 * rtn


def test_the_notebook_is_the_tour(monkeypatch):
    """docs/tour.ipynb is what its program makes of the tour; its examples run in turn."""
    cells, names = notebook.cells_of(read("docs/tour.md")), {}
    assert read("docs/tour.ipynb") == notebook.notebook(cells), "run `python docs/programs/notebook.py`"
    monkeypatch.chdir(ROOT / "docs")  # where a notebook starts
    for kind, cell in cells:
        if kind == "code" and not cell.startswith(("%", "!")):
            exec(cell, names)
    assert "22 coded (2 of them kept)" in repr(names["keys"])


def test_words_explains_every_column_of_a_table():
    rows = [row["column"] for rows in tables(read("docs/words.md")) for row in rows if "column" in row]
    explained = set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert explained >= {*table.COLUMNS, *comparisons.compared_with_one([], None).head}


# ---- the walk through the debugger

SESSIONS = [page for page in PAGES if "(Pdb)" in read(page)]


@pytest.mark.parametrize("page", SESSIONS)
def test_the_debugger_says_what_the_page_says(page):
    now = sessions.session(read(page))
    assert now == read(page), "run `python docs/programs/sessions.py --only pdb` and read the page again"


def test_an_editor_debugs_what_the_page_does():
    first, ladder, tests = json.loads(read(".vscode/launch.json"))["configurations"]
    assert f"$ python -m pdb eval_ppl.py {shlex.join(first['args'])}\n" in read("docs/walkthrough.md")
    assert first["program"] == "${workspaceFolder}/eval_ppl.py" and tests["module"] == "pytest"
    assert ladder["program"] == "${file}" in tests["args"]


# ---- what commands print; training differs between machines

PRINTED = [(page, command, len(printed.split("\n\n"))) for page in PAGES
           for command, printed in sessions.COMMAND.findall(read(page)) if "embedded_sinks" not in command]


@pytest.mark.whole  # minutes
@pytest.mark.parametrize("page, command, n", [("README.md", "python eval_ppl.py --method kvsink", 1), *PRINTED])
def test_the_command_prints_what_the_page_says(page, command, n, tmp_path):
    """Figures are drawn elsewhere."""
    command, text = command.replace("docs/figures", str(tmp_path)), read(page)
    assert sessions.tables_of(command, n, own_methods(text)) in text, "run docs/programs/sessions.py"


# ---- numbers

def tables(text):
    """The tables of a page, each a list of {column: cell}."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found.append([dict(zip(head, row)) for row in rows])
    return found


def table_with(page, column):
    """A page's first table that has this column."""
    return next(rows for rows in tables(read(page)) if column in rows[0])


def test_every_row_of_the_methods_has_its_page():
    text = read("docs/methods.md")
    pages = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    rows = [row["method"].split("](")[0].strip("[`") for row in tables(text)[0]]
    assert len(rows) > 9 and "fp16" in rows
    for name in rows:
        assert "**Idea.**" in pages[name]
        if name != "fp16":
            assert "**Eight numbers" in pages[name] and "$" in pages[name]
            # in a repository that was handed out, a method to be written has its numbers in the assignment
            assert ">>>" in pages[name] or "](course/" in pages[name]


def test_sizes_of_real_models_are_what_their_shapes_give():
    """The sizes and times of real_models.md from its shapes."""
    for config, size in zip(real_models().values(), table_with("docs/real_models.md", "parameters")):
        with torch.device("meta"), NoInit():
            parameters = sum(p.numel() for p in Llama(config).parameters())
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # numbers
        cache = token * int(size["context"])
        assert size["parameters"] == f"{parameters:,}"
        assert size["weights, GiB"] == f"{2 * parameters / 2 ** 30:.1f}"
        assert size["cache of a token, KiB"] == f"{2 * token / 1024:g}"
        assert size["16 bits, GiB"] == f"{2 * cache / 2 ** 30:.2f}"
        assert size["2 bits, GiB"] == f"{cache / 4 / 2 ** 30:.2f}"
        work = 2 * parameters * 16 * int(size["context"])
        assert size["GPU"] == f"{work / 1e14:.0f} s"
        assert size["CPU"] == f"{work / 0.5e12 / 60:.0f} min"


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_a_page_has_the_figures_of_the_data(page, tmp_path, monkeypatch):
    """A wrong one, planted in a table or a sentence that is written from data, is found."""
    assert not pages.wrong_in(page), "run `python docs/programs/pages.py`, which says what to do"
    text, wrong = page.read_text(encoding="utf-8"), tmp_path / page.relative_to(pages.ROOT)
    parts = [block.span(2) for block in results.WRITTEN.finditer(text)]
    parts += [pages.pattern(said).search(text).span() for said in pages.sentences.of_page(pages.name_of(page))]
    digits = [[i for i in range(*part) if text[i].isdigit()] for part in parts]
    last = [found[-1] for found in digits if found]
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    wrong.parent.mkdir(parents=True, exist_ok=True)
    for place in last[::max(1, len(last) // 4)]:
        wrong.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1:], encoding="utf-8")
        assert pages.wrong_in(wrong), text[:place].splitlines()[-1]


def test_every_sentence_of_the_data_has_its_page():
    assert {name.replace("readme", "README") for name in pages.sentences.OF_PAGE} <= {*map(pages.name_of, pages.PAGES)}


def test_the_rows_of_the_data_are_those_of_the_claims():
    data = results.read_data()
    of_others = results.OWN, results.PREFIX, results.PLANTED
    assert not [row for model in results.NAMES for row in data[model]
                if row not in results.rows_of(model) and not row.startswith(of_others)]


@pytest.mark.parametrize("said, found", [
    ("It loses 0.5 of\nit.", None), ("It loses 0.6 of it.", "the page does not say: loses 0.5"),
    ("It gains 0.5 of it.", "does not say")])
def test_a_page_says_what_the_data_have(said, found, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setitem(pages.sentences.OF_PAGE, "page.md", lambda: [f"loses {1 / 2}"])
    (tmp_path / "page.md").write_text(said)
    wrong = pages.wrong_in(tmp_path / "page.md")
    assert any(found in line for line in wrong) if found else not wrong


def test_a_sentence_gets_new_figures_and_keeps_its_lines():
    page, said = "In layers 2 and 3 they\nhave 0.21 and 0.05 of it.", "they have 0.25 and 0.06 of it"
    assert pages.with_figures(page, said) == "In layers 2 and 3 they\nhave 0.25 and 0.06 of it."
    assert pages.with_figures(page, said.replace("have", "had")) == page  # other words: the author's affair


CLAIM = results.Claim("it helps: `a` - `b`, `--bits 2`", "less (Figure 1)")


def measured(monkeypatch, loss, kl, spread):
    """SmolLM2's row `a` is so far above `b`, in 16 windows with this spread."""
    rows = {name: {what: [[round(1e5 * (3 + above + (-1) ** i * wave)) for i in range(16)]]
                   for what, above in (("nll", more[0]), ("kl", more[1]))} | {"bits": 2}
            for name, more, wave in (("a --bits 2", (loss, kl), spread), ("b --bits 2", (0, 0), 0))}
    monkeypatch.setitem(pages.tables.DATA, "SmolLM2", rows)


def test_rows_of_another_calibration_text_read_the_windows_of_the_others(monkeypatch):
    """Of a file, these are the first half's."""
    def stop(*_, windows, **more):
        seen.append(windows.tokens)
        raise Reached
    loaded, seen = hf.load(EMBEDDED), []
    monkeypatch.setattr(results, "calibrate_all", lambda *_: None)
    monkeypatch.setattr(results, "measure", lambda *_, **more: stop(**more))
    for text in "", " --calib-data tales":
        args, entry = results.entry_of(f"rtn{text}", "embedded", loaded, "--data",
                                       str(ROOT / "docs" / "results_data.md"), "--context", "64", "--windows", "4")
        with pytest.raises(Reached):
            results.measure_group("embedded", loaded, [("rtn", args, entry)], {})
    assert torch.equal(*seen)


def test_rows_of_other_windows_are_no_pairs():
    """Known by the windows' tokens; the shorter row's are enough."""
    one, other = (results.witness(torch.arange(8).view(4, 2) + start) for start in (0, 9))
    rows = [{"windows": windows, "nll": [[1] * (len(windows) // 4)]} for windows in (one, one[:12], other, "")]
    assert results.shape_of(*rows[:2]) == (1, 3)
    assert results.shape_of({"nll": 6 * [[1, 2]]}, {"nll": [[1, 2]]}) == (6, 2)
    for wrong in rows[2], {"nll": [[1] * 4]}:
        with pytest.raises(UserError, match="different windows"):
            results.compared(rows[0], wrong)


CONCLUSION = "**One loses least** of all, and **a term** is a word."


@pytest.mark.parametrize("text, holds, found", [
    (CONCLUSION, [True, True], None), (CONCLUSION, [True, False], "do not bear out: One loses least"),
    (CONCLUSION + " **So does two.**", [True], "without a predicate in conclusions.py: So does two."),
    ("One loses least of all.", [True], "not in bold: One loses least")])
def test_what_is_bold_is_borne_out(text, holds, found, monkeypatch):
    monkeypatch.setitem(conclusions.TERMS, "README.md", {"a term"})
    monkeypatch.setitem(conclusions.OF_PAGE, "README.md", lambda: {"One loses least": holds})
    wrong = conclusions.wrong_in("README.md", text)
    assert any(found in line for line in wrong) if found else not wrong


def test_what_is_bold_would_not_be_borne_out_by_rows_that_are_alike(monkeypatch):
    """So no conclusion holds whatever the data are."""
    def alike(row, above):
        shapes = {kind: np.shape(row[kind]) for kind in ("nll", "kl", "along") if kind in row}
        return row | {kind: np.full(shape, 1e5 * (3 + above)).tolist() for kind, shape in shapes.items()}
    for rows in pages.tables.DATA.values():
        for row in rows:
            monkeypatch.setitem(rows, row, alike(rows[row], above="fp16" not in row))
    for found in pages.tables.NEEDLES.values():
        for row in found:
            monkeypatch.setitem(found, row, found["fp16"][:len(found[row])])
    said = {words: holds for of_page in conclusions.OF_PAGE.values() for words, holds in of_page().items()}
    assert not [words for words, holds in said.items() if all(holds)]


@pytest.mark.parametrize("along, grown", [([[1, 5], [2, 7], [1, 5]], True), ([[1, 5], [7, 2], [3, 3]], False)])
def test_a_loss_grows_if_its_pairs_agree(along, grown, monkeypatch):
    row = {"along": [[1e5 * loss for loss in pair] for pair in along]}
    monkeypatch.setitem(pages.tables.DATA["SmolLM2"], "a --context 4096", row)
    assert conclusions.grows("a") == grown


def test_the_share_of_a_loss_that_is_left(monkeypatch):
    rows = {"fp16": [1, 1, 1], "a": [3, 5, 4], "b": [2, 3, 2]}  # above it: 2, 4, 3 and 1, 2, 1
    monkeypatch.setattr(crossed, "row_of", lambda name, *_: {"nll": [[1e5 * loss for loss in rows[name]]]})
    share, error = crossed.share_left("a", "b", where="")
    assert share == pytest.approx(4 / 9) and error == pytest.approx(0.0556, abs=1e-3)
    assert conclusions.below((share, error), 0.6) and not conclusions.below((share, error), 0.5)


@pytest.mark.parametrize("loss, kl, verdict", [(-1, 1, "same"), (1, -1, "**other**: more"), (0, -1, "same")])
def test_a_verdict_is_by_loss_then_by_kl(loss, kl, verdict, monkeypatch):
    """Also where they say the opposite, which they do in no claim of the pages. Other verdicts stand in these."""
    measured(monkeypatch, loss, kl, spread=0.01)
    assert pages.tables.verdict(CLAIM) == verdict and "KL" in pages.tables.finding(CLAIM, "SmolLM2").text
    assert pages.tables.marked_verdict(CLAIM) == verdict + " †" * (loss == 0)  # Holm's correction asks for the loss
    assert pages.tables.cell(pages.tables.verdict, CLAIM._replace(rows="`c` - `b`")) == "-"  # which was not measured


@pytest.mark.parametrize("mean, spread, sign", [(0, 0.01, "none"), (0, 0.3, "open"), (0.2, 0.3, "open"),
                                                (0.04, 0.08, "open"), (0.03, 0.001, "more")])
def test_none_is_said_where_the_interval_is_narrow(mean, spread, sign, monkeypatch):
    measured(monkeypatch, mean, 0, spread)
    assert pages.tables.finding(CLAIM, "SmolLM2").sign == sign


def test_holm():
    """The smallest p is held against level / n, the next one against level / (n - 1), up to the first that fails."""
    assert pages.tables.holm([0.04, 0.001, 0.012, 0.5]) == 2
    assert pages.tables.holm([0.03, 0.04]) == pages.tables.holm([]) == 0 and pages.tables.holm([0.01, 0.04]) == 2


def test_losses_along_a_text_have_errors():
    row = {"nll": [[1, 2, 3]], "along": [[100000, 0], [200000, 0], [300000, 0]]}
    (first, error), last = results.along(row)
    assert (round(first, 9), round(error, 9), last) == (2, round(3 ** -0.5, 9), (0, 0))
    assert results.along(row | {"along": [[200000, 0]]}) == [(2, None), (0, None)]  # of all pairs together


def test_a_pair_is_added_to_the_mean_of_older_ones(monkeypatch):
    monkeypatch.setattr(results, "write_data", lambda data: None)
    row = {"bits": 16, "windows": "0a1b", "nll": [[1, 2]], "kl": [[0, 0]], "along": [[300000, 0]]}  # of two pairs
    windows = Windows(torch.tensor([[1, 2]]), [[]])
    new = Result(nll=[3.5], nll_along=[[6.0, 1.0]], kl=[0.0], bits=[16], targets=1, windows=windows)
    exact = Result(nll_along=[[0.0, 4.0]])
    results.add_pair("fp16", "--context 4096", new, exact, {"SmolLM2": {results.at("fp16"): row}})
    assert row["along"] == [[400000, -100000]] and row["nll"] == [[1, 2, 350000]]
    assert row["windows"] == "0a1b" + results.witness(windows.tokens)


def test_a_claim_is_two_rows_on_each_model():
    claim = results.Claim("it helps: `a --x 1 / 2` - `b`, `--bits 3 / 4 --y 5`, `--z 6` / `--z 7 --w 8`", "-")
    assert results.pair(claim, "embedded") == ["a --bits 3 --x 1 --y 5 --z 6", "b --bits 3 --y 5 --z 6"]
    assert results.pair(claim, "SmolLM2") == ["a --bits 4 --w 8 --x 2 --y 5 --z 7", "b --bits 4 --w 8 --y 5 --z 7"]


def test_a_method_has_its_drawing():
    folder = pages.ROOT / "docs" / "figures" / "methods"
    assert {path.stem for path in folder.iterdir()} == drawings.DRAWN.keys()
    assert all((folder / f"{name}.svg").read_text() == drawings.drawing(name) for name in drawings.DRAWN)


@pytest.mark.parametrize("name, draw", [("loss", results.draw), ("length", results.draw_along)])
def test_a_figure_shows_what_the_record_has(name, draw, tmp_path):
    """Drawn again, it has the same words and numbers; another number makes another figure."""
    kept = pages.ROOT / "docs" / "figures" / f"{name}.png"
    drawn = [tmp_path / f"{i}.png" for i in range(2)]
    data = results.read_data()
    draw(data, drawn[0])
    for rows in data.values():
        for row in rows.values():
            row["nll"][0][0] += 10 ** 4
            row["along"] = [(torch.tensor(pair) + 10 ** 3).tolist() for pair in row.get("along", [])]
    draw(data, drawn[1])
    same, other = (Image.open(path).text["Comment"] for path in drawn)
    assert Image.open(kept).text["Comment"] == same != other, "draw it again, with --plot"
