"""The course's grader is a grader: right answers get all points, wrong ones lose the points that they should, with the
message that names the fault, and nothing that a submission does spoils the run.

tests/course/ has a folder for each assignment: own.py is the project's own code behind the starter's names, second.py
a second answer, written from the handout, and wrong.py the changes that make it wrong.
"""
import importlib.util
from pathlib import Path

import pytest

from tinykv.course import check
from tinykv.course.runner import grade

ROOT = Path(__file__).parent.parent
ANSWERS = Path(__file__).parent / "course"
NAMES = check.names()


def starter(name):
    return ROOT / "docs" / "course" / f"{check.load(name).number}-{name}" / "starter.py"


def wrong_of(name):
    """The table of an assignment's wrong.py."""
    spec = importlib.util.spec_from_file_location("wrong", ANSWERS / name / "wrong.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


def failed(report):
    """{name: message} of the checks that failed."""
    return {outcome.name: outcome.message for outcome in report.outcomes if not outcome.passed}


# ---- each assignment

@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(2, 10))])
@pytest.mark.parametrize("answer", ["own", "second"])
@pytest.mark.parametrize("name", NAMES)
def test_right_answers_get_all_points(name, answer, seed):
    report = grade(ANSWERS / name / f"{answer}.py", seed, here=True)
    assert failed(report) == {}


@pytest.mark.parametrize("name, wrong", [(name, wrong) for name in NAMES for wrong in wrong_of(name)])
def test_wrong_answers_lose_the_points_they_should(name, wrong, tmp_path, request):
    old, new, expected = wrong_of(name)[wrong]
    text = (ANSWERS / name / "second.py").read_text(encoding="utf-8")
    assert text.count(old) == 1, "the text to be changed has to occur once"
    file = tmp_path / "submission.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    for seed in range(3) if request.config.getoption("--whole") else [0]:
        messages = failed(grade(file, seed, here=True))
        assert set(messages) == set(expected), messages
        for key, words in expected.items():
            assert words in messages[key]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_starter_gets_nothing(name):
    report = grade(starter(name), here=True)
    assert report.points == 0
    for message in failed(report).values():
        assert message.startswith("Not written yet"), message


@pytest.mark.parametrize("name", NAMES)
def test_an_assignment_is_whole(name):
    """Its points are 80, it has ten wrong answers at least, and its handout has every part."""
    assert check.load(name).points == 80
    assert len(wrong_of(name)) >= 10
    handout = (starter(name).parent / "handout.md").read_text(encoding="utf-8")
    for part in ("## Aim", "## Background", "## Eight numbers", "## Tasks", "## Questions", "## Time"):
        assert part in handout
    assert f"python -m tinykv.course.grade docs/course/{starter(name).parent.name}/starter.py" in handout
