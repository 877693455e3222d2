"""What the tests of this folder compare with, computed once."""

from __future__ import annotations

import pytest
import reference_process
import world
from reference_process import Problem


@pytest.fixture(scope="session")
def problem(tmp_path_factory) -> Problem:
    folder = tmp_path_factory.mktemp("reference")
    return reference_process.read(world.made_once(reference_process.make, folder))
