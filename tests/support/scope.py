"""Which cases of a test run: a case of every property by default, and all of them with `bash run_tests.sh --all`.

Whole tests that only --all runs have the marker `full`.
"""

from __future__ import annotations

from collections.abc import Iterable

all_asked = False  # conftest.py sets it before the first test file is imported


def cases(always: Iterable, only_all: Iterable) -> list:
    """The cases to run: those of ``always``, and with --all those of ``only_all`` too."""
    return [*always, *(only_all if all_asked else ())]
