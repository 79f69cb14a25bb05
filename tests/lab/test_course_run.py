"""The course as its users run it: by commands alone, in processes of their own. `pytest --whole`, minutes of it; by
default only what needs another process than this one, where Triton's interpreter has been asked for."""
import csv
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from test_course import FAULTS, NAMES, PARTS, ROOT, confined, given_text, right_text

from docs.course import assignments, grade, handout, notebook
from docs.course.assignments import PAGE
from docs.programs.notebook import notebook as text_of

pytestmark = confined
SEED = "2039187523"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def said(*words, cwd=ROOT, status=0):
    """What Python prints, given these words."""
    words = [sys.executable, *map(str, words)]
    result = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == status, (words, result.stdout[-2000:], result.stderr[-2000:])
    return result.stdout + result.stderr


def hand_in(folder, **files):
    """Write files, {name: text or bytes}, that a student hands in; `__` in a name is a dot."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        data = data.encode() if isinstance(data, str) else data
        (folder / name.replace("__", ".")).write_bytes(data)


def right(part):
    """A right file, as a student hands it in."""
    return assignments.naming(part, right_text(part)) if part.endswith(PAGE) else right_text(part)


def wrong(part):
    return right(part).replace(*next(iter(FAULTS[part].values())))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A repository that was handed out."""
    folder = tmp_path_factory.mktemp("course") / "out"
    said("-m", "docs.course.handout", folder, "--pages", ",".join(NAMES))
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_an_answer_has_all_points_under_all_limits(part, monkeypatch, tmp_path):
    """By what each grading begins with: in a process of its own, with nothing set that a user does not set."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tests = grade.right_values(part, int(SEED), tmp_path)
    assert sum(test["points"] for test in tests.values()) == grade.points_of(part) > 0


@pytest.mark.whole
def test_a_class_is_graded_and_one_student_again(tmp_path):
    """Right and wrong answers of every part, and what else is handed in; marks of one run stand beside another's."""
    one, mixed = tmp_path / "one", tmp_path / "mixed"
    for part in PARTS:
        hand_in(one / "ann" / part, mine__py=right(part))
        hand_in(one / "bob" / part, mine__py=wrong(part))
    text = right_text("kvsink")
    hand_in(mixed / "cat", starter__py=text.encode("utf-16"))
    hand_in(mixed / "eve", notebook__ipynb="{}")
    hand_in(mixed / "fay", starter__py=text.replace("\n", "\r\n"), page__py=right("kvsink_page"))
    hand_in(mixed / "hal", starter__py=text, other__py=given_text("kvsink"))
    hand_in(mixed / "ivy")
    hand_in(mixed / "jon", starter__py=f"{text}\n\ndef outlier(hidden):\n    while True: pass\n")
    marks, record = tmp_path / "points.csv", tmp_path / "record.json"
    words = "--seed", SEED, "--points", marks, "--json", record
    said("-m", "docs.course.grade", one, *words)
    told = said("-m", "docs.course.grade", mixed, "--assignment", "kvsink", *words)
    for why in ("UTF-16", "notebook.ipynb", "ivy: no Python file"):
        assert re.search(why, told), (why, told)
    assert re.search("100%  kvsink  fay/starter.py  hal/starter.py", said("-m", "docs.course.similar", mixed))

    def rows():
        return {row["student"]: row for row in csv.DictReader(marks.open())}
    before, of = rows(), {part: grade.points_of(part) for part in PARTS}
    assert before["ann"]["total"] == "640" and before["fay"]["total"] == "80" and before["hal"]["total"] == "66"
    assert {part: int(before["ann"][part]) for part in PARTS} == of
    assert all(int(before["bob"][part]) < of[part] for part in PARTS) and len(before) == 8
    assert int(before["jon"]["kvsink"]) < of["kvsink"]
    (one / "bob" / "kvsink" / "mine.py").write_text(text)
    said("-m", "docs.course.grade", one, "--assignment", "kvsink", *words, "--students", "bob")
    after = rows()
    assert after.pop("bob")["kvsink"] == "66" and before.pop("bob") and after == before
    assert len({(report["student"], report["file"]) for report in json.loads(record.read_text())}) == 40


@pytest.mark.whole
def test_a_student_works_in_what_was_handed_out(out, tmp_path):
    """The grader and pytest write what is missing, and a right file has all points at seed 0."""
    for name in NAMES:
        folder = out / assignments.folder_of(name).relative_to(ROOT)
        told = said("-m", "pytest", "-q", folder, cwd=out, status=1)
        assert "not written yet: " in told and "0 of 80 points" in told and told.count("\n") < 6, told
    folder = out / assignments.folder_of("triton").relative_to(ROOT)
    (folder / "starter.py").write_text(right_text("triton"), encoding="utf-8")
    (folder / "page.py").write_text(right("triton_page"), encoding="utf-8")
    assert "80 of 80 points" in said("-m", "pytest", "-q", folder, cwd=out)
    grade_it = "-m", "docs.course.grade", folder / "starter.py", "--seed"
    assert "64 of 64 points" in said(*grade_it, "0", cwd=out)
    assert "right values for --seed 0 alone" in said(*grade_it, "1", cwd=out, status=2)


@pytest.mark.whole
@pytest.mark.parametrize("name", handout.NOTEBOOKS)
def test_a_notebook_runs_where_it_lies(name, out, tmp_path, monkeypatch):
    """Its checks, and the file that it writes, from another working directory."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = out / assignments.folder_of(name).relative_to(ROOT)
    code, helpers = right_text(name).split("\n\n\n# answer: helpers\n")
    answer = code.replace("\n\n\n# Task 1", f"\n\n{helpers}\n\n# Task 1")  # a cell needs what it calls above it
    cells = nbformat.reads(text_of(notebook.cells_of(name, answer)), 4)
    nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    printed = "".join(output.get("text", "") for cell in cells.cells for output in cell.get("outputs", []))
    assert sum(int(points) for points, _ in re.findall(r"(\d+) of (\d+) points", printed)) == grade.points_of(name)
    assert "FAILED" not in printed
    assert "66 of 66 points" in said("-m", "docs.course.grade", folder / "starter.py", cwd=out)


@pytest.mark.whole
def test_gradescopes_container_grades_what_is_handed_in(tmp_path):
    """The zip's own script, where its folders are others: both files, one, two versions, none, and a notebook. What a
    file reads off a message is of no use to the next one."""
    said("-m", "docs.course.gradescope", "affine", SEED, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        file.extractall(tmp_path / "source")
    script = (tmp_path / "source" / "run_autograder").read_text()
    script = script.replace("/autograder/python/bin/python", sys.executable).replace("/autograder", str(tmp_path))
    (tmp_path / "results").mkdir()

    def results(number, **files):
        (tmp_path / "submission_metadata.json").write_text(json.dumps({"id": number}))
        subprocess.run(["rm", "-rf", tmp_path / "submission"])
        hand_in(tmp_path / "submission", **files)
        subprocess.run(["bash", "-ec", script], env=ENVIRONMENT, check=True)
        return json.loads((tmp_path / "results" / "results.json").read_text())
    text, page = right_text("affine"), right("affine_page")
    assert results(1, starter__py=text, page__py=page)["score"] == 80
    assert results(2, starter__py=text, a__py=given_text("affine"), page__py=given_text("affine_page"))["score"] == 66
    assert "page.py names no" in results(6, starter__py=text, page__py=right_text("affine_page"))["output"]
    for files in {}, {"notebook__ipynb": "{}"}:
        empty = results(3, **files)
        assert empty["score"] == 0 and "no Python file" in empty["output"]
        assert sum(test["max_score"] for test in empty["tests"]) == 80
    told = {number: {test["output"] for test in results(number, starter__py=wrong("affine"))["tests"]} - {""}
            for number in (4, 5)}
    assert len(told) == 2 and told[4] != told[5]
