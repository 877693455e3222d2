"""tests/mutants.py in a made repository: which faults its tests find, and when a change loses one."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "a.py": "def double(x):\n    return x + x\n\n\ndef positive(x):\n    return x > 0\n",
    "b.py": "def unused(x):\n    return x - 1\n",
    "tests/test_a.py": """
import pytest

import a


@pytest.fixture(scope="module")
def flag():
    return a.positive(1)


def test_flag(flag):
    assert flag


def test_flag_again(flag):
    assert flag is True


def test_double():
    assert a.double(2) == 4
""",
    "tests/mutants.jsonl": "",
    "run_tests.sh": f'exec {sys.executable} -m pytest -p xdist.plugin "$@"\n',
    ".gitignore": "__pycache__/\n",
}
TOOL = "import sys; sys.path.insert(0, 'tests'); import mutants; mutants.warm_up = lambda: None; mutants.main()"


def commit(repository: Path, file: str, text: str) -> None:
    (repository / file).write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    subprocess.run(["git", *identity, "commit", "--quiet", "-m", "a"], cwd=repository, check=True)


def tool(repository: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of tests/mutants.py."""
    command = [sys.executable, "-c", TOOL, *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds
    done = subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def letters(repository: Path) -> dict[str, dict[str, str]]:
    """{function with the fault: {test: letter}} of the matrix, without the tests that do not execute it."""
    stored = json.loads(lzma.decompress((repository / "tests" / "kill_matrix.json.xz").read_bytes()))
    tests = [test.partition("::")[2] for test, _, _ in stored["tests"]]
    faults = map(json.loads, (repository / "tests" / "mutants.jsonl").read_text().splitlines())
    rows = {fault["function"]: zip(tests, stored["rows"][fault["id"]], strict=True) for fault in faults}
    return {function: {test: letter for test, letter in row if letter != "."} for function, row in rows.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A made repository whose faults have been chosen, recorded and run."""
    repository = tmp_path_factory.mktemp("made")
    (repository / "tests").mkdir()
    for file, text in FILES.items():
        (repository / file).write_text(text)
    for path in Path(__file__).parent.glob("mutants*.py"):
        shutil.copy(path, repository / "tests")
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    commit(repository, "pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["."]\n')
    assert "3 drawn" in tool(repository, "choose")[1]
    commit(repository, "a.py", FILES["a.py"])
    tool(repository, "record")
    executed = {"positive": {"test_flag": "-", "test_flag_again": "-"}, "double": {"test_double": "-"}, "unused": {}}
    assert letters(repository) == executed  # a shared fixture counts for every test that uses it
    _, output = tool(repository, "run")
    assert "b.py unused, sign: return x - 1: no test executes it" in output
    assert "a.py positive, comparison: return x > 0: no test fails" in output
    return repository


@pytest.fixture
def repository(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "made")


def test_a_test_finds_a_fault_if_it_fails_with_it(measured: Path) -> None:
    passed = {"test_flag": "p", "test_flag_again": "p"}
    assert letters(measured) == {"positive": passed, "double": {"test_double": "F"}, "unused": {}}


def test_a_second_run_plants_nothing_and_an_unchanged_commit_has_lost_nothing(repository: Path) -> None:
    assert " passed of " not in tool(repository, "run")[1]
    code, output = tool(repository, "check")
    assert code == 0 and "0 of 3 faults are planted again" in output


def test_a_fault_is_lost_with_its_only_finder(repository: Path) -> None:
    commit(repository, "tests/test_a.py", FILES["tests/test_a.py"].partition("def test_double")[0])
    for _ in range(2):  # the first check must not forget the finder
        code, output = tool(repository, "check")
        assert code == 1 and "double, sign: return x + x: lost; it was found by tests/test_a.py::test_double" in output


def test_another_test_that_finds_the_fault_takes_the_place_of_its_finder(repository: Path) -> None:
    commit(repository, "tests/test_a.py", FILES["tests/test_a.py"].replace("test_double", "test_twice"))
    assert tool(repository, "check")[0] == 0
    assert letters(repository)["double"]["test_twice"] == "F"


def test_a_statement_that_goes_asks_for_another_fault(repository: Path) -> None:
    commit(repository, "a.py", FILES["a.py"].replace("x + x", "2 * x"))
    code, output = tool(repository, "check")
    assert code == 1 and "its statement is gone" in output and "a.py: 1 faults fewer than the rule asks for" in output
    assert "2 of 3 kept, 1 drawn" in tool(repository, "choose")[1]
    commit(repository, "b.py", FILES["b.py"])
    assert tool(repository, "check")[0] == 0
