"""What the tests of this folder compare with, computed once.

The fixture imports what it needs, so that a package that cannot be imported fails the tests with its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from reference_process import Problem


@pytest.fixture(scope="session")
def problem(tmp_path_factory) -> Problem:
    import reference_process
    import world

    folder = tmp_path_factory.mktemp("reference")
    return reference_process.read(world.made_once(reference_process.make, folder))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Say why a file of tests cannot be imported: with --tb=no pytest only names the file."""
    if report.failed:
        print(f"{report.nodeid}: {str(report.longrepr).splitlines()[-1].removeprefix('E').strip()}")
