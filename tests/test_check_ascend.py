"""A record of a check counts every test that pytest ran, by its outcome."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from source import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import check_ascend

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


@pytest.mark.nightly
def test_the_record_counts_what_pytest_ran_with_each_version_and_failures_have_an_exit_code(
    check: check_ascend.Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "check.json"
    monkeypatch.setattr(Path, "absolute", lambda path: path)

    def code(chosen: str, *numbers: str) -> int:
        monkeypatch.setitem(check_ascend.CHECKS, "vllm", check._replace(selection=(*check.selection, "-k", chosen)))
        monkeypatch.setattr(sys, "argv", ["benchmarks/check_ascend.py", "vllm", *numbers, "--out", str(out)])
        return check_ascend.main()

    assert code("three or skipped", "4", "3") == 1
    record = json.loads(out.read_text())
    rows = [
        (row["versions"], row["test"], *(row[outcome] for outcome in check_ascend.OUTCOMES)) for row in record["table"]
    ]
    assert rows == [
        ("version 4", "of three", 3, 0, 0), ("version 4", "skipped", 0, 0, 1),
        ("version 3", "of three", 2, 1, 0), ("version 3", "skipped", 0, 0, 1),
    ]  # fmt: skip
    assert record["measured"]["check"] == "vllm" and record["measured"]["totals"] == {
        "version 4": {"passed": 3, "failed": 0, "skipped": 1},
        "version 3": {"passed": 2, "failed": 1, "skipped": 1},
    }
    assert [code(chosen, "4") for chosen in ("three", "skipped", "error")] == [0, 1, 1]
    with pytest.raises(SystemExit, match="exit code 5"):  # a selection without tests is no check
        code("absent", "3")


def test_versions_are_those_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("__version__ = '0.16.0'\n")
    for command in (["init", "-q"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", "--allow-empty"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert check_ascend.megatron_and_mindspeed(tmp_path) == f"MindSpeed 0.16.0 ({head[:7]}), megatron-core 0.16.1"
