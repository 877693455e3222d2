"""A record of a check counts every test that pytest ran, by its outcome."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from source import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import check_ascend

from lab import npu_checks

TESTS = """
import os, pytest
@pytest.mark.parametrize("n", [1, 2, 3])
def test_of_three(n):
    assert n < int(os.environ["NUMBER"])
def test_skipped():
    pytest.skip("no reason")
@pytest.fixture
def broken():
    raise ValueError
def test_in_error(broken): ...
"""


@pytest.fixture
def check(tmp_path: Path) -> check_ascend.Check:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    selection = ("-c", str(tmp_path / "pytest.ini"), str(tmp_path))
    return check_ascend.Check("some tests", selection, "NUMBER", lambda target: f"version {target}")


def test_rows_count_what_pytest_ran_with_each_version(check: check_ascend.Check) -> None:
    def counted(number: str) -> dict:
        rows = check_ascend.run(check, Path(number))
        assert {row["versions"] for row in rows} == {f"version {number}"}
        return {row["test"]: [row[outcome] for outcome in check_ascend.OUTCOMES] for row in rows}

    assert counted("3") == {"of three": [2, 1, 0], "skipped": [0, 0, 1], "in error": [0, 1, 0]}
    assert counted("4")["of three"] == [3, 0, 0]


def test_a_selection_without_tests_is_no_check(check: check_ascend.Check) -> None:
    with pytest.raises(SystemExit, match="exit code 5"):
        check_ascend.run(check._replace(selection=(*check.selection, "-k", "absent")), Path("3"))


@pytest.mark.parametrize(("chosen", "number", "code"), [("three", "4", 0), ("three", "3", 1), ("skipped", "4", 1)])
def test_the_file_is_a_record_of_a_check_and_failures_have_an_exit_code(
    check: check_ascend.Check, chosen: str, number: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "check.json"
    some = check._replace(selection=(*check.selection, "-k", chosen))
    monkeypatch.setitem(check_ascend.CHECKS, "vllm", some)
    monkeypatch.setattr(sys, "argv", ["benchmarks/check_ascend.py", "vllm", number, "--out", str(out)])
    monkeypatch.setattr(Path, "absolute", lambda path: path)
    assert check_ascend.main() == code
    found = npu_checks.Checked.model_validate(json.loads(out.read_text())["measured"])
    assert found.check == "vllm" and list(found.totals) == [f"version {number}"]
    assert sum(found.totals[f"version {number}"].values()) == (3 if chosen == "three" else 1)


def test_versions_are_those_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("__version__ = '0.12.1'\n")
    for command in (["init", "-q"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", "--allow-empty"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert check_ascend.megatron_and_mindspeed(tmp_path) == f"MindSpeed 0.12.1 ({head[:7]}), megatron-core 0.12.1"
