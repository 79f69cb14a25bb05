"""`pytest tests/test_methods.py --method FILE:Class`: right methods pass, wrong ones are told what is wrong.

The methods are those of wrong_methods.py. By default each wrong one goes through the check that has to notice; under
--whole pytest runs as its author would run it.
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

import invariants
import own_methods
import pytest
import wrong_methods as own
from cases import Case

from tinykv.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
OWN = "tests/wrong_methods.py"
#   class: (--as, check, scheme, words of what is said)
WRONG = {
    "OneTooMany": ("pfn", "cache_holds_the_expected_rows", "token-dynamic",
                   r"layer 0, keys, sequence 0, KV head 0: .* tokens \[0, 1, 2, 3\] are kept; pfn keeps \[0, 1, 2\]"),
    "NotThere": (None, "cache_holds_the_expected_rows", "token-dynamic",
                 r"gave token 8, which is neither recent nor kept: CachedRows\(layer 0, K: 8 tokens"),
    "FirstSequenceChooses": (None, "batch_rows_are_independent", "token-dynamic",
                             r"layer 1, keys, sequence 1 of 3: kept are .* by head, and alone"),
    "Remembers": (None, "same_twice_and_after_reset", "token-dynamic", "a method holds nothing of a text"),
    "Swapped": (None, "codes_are_what_is_claimed", None, "decoded keys are further from the keys than their mean is"),
    "Fake": (None, "codes_are_what_is_claimed", None, r"you claim 2 bits for keys \(`bits` .*\), .* codes takes 32.0"),
    "Silent": (None, "codes_are_what_is_claimed", None, r"said to have 16 bits \(`bits` .*\), and decode to other"),
    "Forgets": (None, "cache_holds_the_expected_rows", "token-dynamic", "says that 3 tokens are kept, and none is"),
    "SignLost": (None, "codes_are_what_is_claimed", None, "a codec of 4 bits loses .* rounding with one bit less"),
    "Unstored": (None, "codes_are_what_is_claimed", None, "is the scale that codes are made by the one that is stored"),
    "Observes": (None, "sixteen_bits_are_fp16", "token-dynamic", "the logits are off fp16's"),
    "Scores": (None, "attention_sees_the_cache", "token-dynamic", "other keys for the new tokens"),
    "Clears": (None, "cache_holds_the_expected_rows", "token-dynamic", "is quantized and reads as 0, 0"),
    "Doubles": (None, "codes_are_what_is_claimed", None, "`encode` writes into the tensor"),
    "KeptTokensCount": (None, "placeholders_do_not_matter", "channel-dynamic", "leave the tokens of `ignore` out"),
}
RIGHT = ["HeavyHitters", "LastOfTheBlock"]
TOUR, = re.findall(r"```python\n(from[^`]*class HeavyHitters[^`]*)```", (ROOT / "docs/tour.md").read_text())


def outcome(check, case):
    """What the author is told; None where the check passes."""
    try:
        getattr(invariants, f"check_{check}")(case)
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_said_of_a_wrong_method(name):
    like, check, scheme, words = WRONG[name]
    case = Case(getattr(own, name), scheme, batch=3, heads_per_kv=2, like=METHODS.get(like))
    assert re.search(words, outcome(check, case) or "nothing")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("check", ["cache_holds_the_expected_rows", "placeholders_do_not_matter"])
@pytest.mark.parametrize("scheme", ["channel-dynamic", "kvquant"])
def test_a_token_may_be_dropped_again(name, check, scheme):
    assert outcome(check, Case(getattr(own, name), scheme, heads_per_kv=1)) is None


@pytest.mark.parametrize("scheme", ["token-dynamic", "channel-static"])
def test_a_method_may_ask_what_a_code_would_lose(scheme):
    assert outcome("placeholders_do_not_matter", Case(own.WorstCoded, scheme)) is None


@pytest.mark.parametrize("methods, like, said", [
    (["nowhere.py:Mine"], None, "no file nowhere.py"),
    ([f"{OWN}:Mine"], None, "no subclass .* named 'Mine'"),
    ([f"{OWN}:Swapped"], "pfn", "does not take .*preserve.*, as pfn does"),
    ([f"{OWN}:Swapped"], "pfm", "--as pfm: there are fp16, rtn, pfn"),
    ([], "pfn", "give --method, too")])
def test_what_cannot_be_tested_is_one_line(methods, like, said):
    with pytest.raises(pytest.UsageError, match=said) as caught:
        own_methods.check(methods, like)
    assert "\n" not in str(caught.value)


# ---- as the author runs it

def run(*words):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_methods.py",
                           *words], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.whole  # a process for each, which imports torch
@pytest.mark.parametrize("name", WRONG)
def test_the_suite_stops_at_the_first_failure(name):
    like = ["--as", WRONG[name][0]] if WRONG[name][0] else []
    status, out = run("--method", f"{OWN}:{name}", *like)
    assert status == 1 and "1 failed" in out and "stopping after 1 failures" in out, out
    assert re.search(r"\.py:\d+: ", out) and len(out.splitlines()) < 20, out


RIGHT_FILES = [*((OWN, name, []) for name in RIGHT), ("tour.py", "HeavyHitters", []),
               *((f"docs/examples/{file}.py", name, []) for file, name in (
                   ("turboquant", "TurboQuant"), ("neighbours", "H2O"), ("neighbours", "Sinks"))),
               *((f"tinykv/methods/{name}.py", cls.__name__, like) for name, cls in METHODS.items()
                 for like in ([], ["--as", name]))]


@pytest.mark.whole
@pytest.mark.parametrize("file, name, like", RIGHT_FILES)
def test_right_methods_pass(file, name, like, tmp_path):
    """Those of the docs, too, and copies of the built-in ones."""
    if file == "tour.py":
        (tmp_path / file).write_text(TOUR)
    else:
        shutil.copy(ROOT / file, tmp_path)
    status, out = run("--method", f"{tmp_path / Path(file).name}:{name}", *like)
    assert status == 0, out
