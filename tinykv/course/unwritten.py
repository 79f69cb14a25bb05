"""For the tests of a repository that was handed out: a test that fails because an answer is not
written yet is skipped, and says which."""
import re

import pytest
from hypothesis import Phase, settings

UNWRITTEN = re.compile(r"assignment \d+, \w+: [\w.]+")  # what a function without its answer raises


def pytest_sessionstart(session):
    """Hypothesis looks for no smaller example of a test that fails: that takes minutes, and an answer
    that is missing is missing in any."""
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("handed out", settings.get_profile("fixed"), phases=phases)
    settings.load_profile("handed out")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    report = result.get_result()
    found = UNWRITTEN.search(report.longreprtext) if report.failed else None
    if found:
        file, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (file, line, f"not written yet: {found[0]}")
