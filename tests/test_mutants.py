"""The tests are tested: what is wrong on purpose (mutants/) fails.

By default each mutant of each method dies once, in the first cell that it is listed with; under
--whole in all.
"""
from dataclasses import replace

import pytest
from cases import Case
from mutants.every import MUTANTS


def marked():
    """All mutants; those that have died before, with the mark `whole`."""
    dead, found = set(), []
    for mutant in MUTANTS:
        again = (mutant.wrong, mutant.method) in dead
        dead.add((mutant.wrong, mutant.method))
        found.append(pytest.param(mutant, id=mutant.name, marks=pytest.mark.whole if again else ()))
    return found


@pytest.mark.parametrize("mutant", marked())
def test_mutant_fails(mutant):
    cell = Case(mutant.method, **mutant.cell)
    mutant.check(cell)
    with pytest.raises(AssertionError):
        mutant.check(replace(cell, wrong=mutant.wrong))
