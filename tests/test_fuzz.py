"""A small share of the damaged inputs of fuzz.py, each of which ends in one line or in finite numbers."""
import pytest
from fuzz import KINDS, run_case


@pytest.mark.parametrize("number", range(5 * len(KINDS)))
def test_a_damaged_input_ends_well(number):
    kind, ended, said = run_case(number)
    assert ended in ("refused", "accepted"), (kind, ended, said)
