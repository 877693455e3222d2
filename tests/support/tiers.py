"""Choose the runs of run_tests.sh that include a case: all of them, only --ci and --all, or only --all.

The marks `ci` and `nightly` of a test, or of one of its cases, say it. Without a mark, a case is in all runs.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

left_out = {"ci", "nightly"}  # the marks that do not run; conftest.py sets both before the first test file is imported
elsewhere: set[str] = set()  # layouts of other numbers of ranks than those of `pytest --device`


def ci(*values: object) -> ParameterSet:
    """A case that is too slow for a developer's run."""
    return pytest.param(*values, marks=pytest.mark.ci)


def nightly(*values: object) -> ParameterSet:
    """A case that is too slow for each push."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def asked(cases: Iterable) -> list[Any]:
    """The values of those cases that run, for what measures several at once."""
    values = []
    for case in cases:
        if not isinstance(case, ParameterSet):
            values.append(case)
        elif not left_out & {mark.name for mark in case.marks}:
            values.append(case.values[0] if len(case.values) == 1 else case.values)
    return [value for value in values if not (isinstance(value, str) and value in elsewhere)]


def runs(item: pytest.Item) -> bool:
    """Whether a test runs, by its marks and by the layout that is one of its parameters."""
    marks = {mark.name for mark in item.iter_markers()}
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return not left_out & marks and not any(isinstance(value, str) and value in elsewhere for value in parameters)
