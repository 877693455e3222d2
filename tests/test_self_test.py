"""preflight.py --self-test runs tests/on_device where it is asked to, and ends with what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launched
import pytest
from source import ROOT
from tiers import nightly

TINY = str(ROOT / "configs" / "tiny_cpu.yaml")
PLANTED = {  # fault: a test that must fail
    "": "",
    "advantages of the wrong sign": "test_update.py::test_steps_are_those_of_the_unsharded_model",
    "gradients divided by the number of ranks": "test_lora.py::test_gradients_and_their_norm",
    "expert gradients doubled": "test_lora.py::test_gradients_and_their_norm",
}


def self_test(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "preflight.py", "--self-test", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [fault if fault == "expert gradients doubled" else nightly(fault) for fault in PLANTED]
)
def test_two_ranks_of_a_cpu_are_judged_and_a_line_names_each_failed_test(fault: str, tmp_path, monkeypatch) -> None:
    """The process of the reference has the folders of PYTHONPATH, where packages may lie."""
    log = launched.noting_starts(tmp_path, monkeypatch)
    done = self_test(TINY, "--ranks", "2", PYTEST_ADDOPTS=f"--plant '{fault}'" if fault else "")
    assert done.returncode == (1 if fault else 0), done.stdout[-3000:] + done.stderr[-3000:]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED tests/on_device/")]
    assert all("[TP1" not in line for line in failed)  # only two ranks
    assert bool(failed) == bool(fault) and (not fault or any(PLANTED[fault] in line for line in failed)), failed
    assert (" failed" in done.stdout.splitlines()[-1]) == bool(fault) and " passed" in done.stdout.splitlines()[-1]
    assert "reference_process" in log.read_text()


STAND_IN = {"PYTEST_PLUGINS": "with_fake_npu", "PYTHONPATH": str(ROOT / "tests" / "support")}


@pytest.mark.ci
def test_the_operators_of_the_stand_in_npu_equal_their_formulas() -> None:
    done = self_test(TINY, "device=npu", **STAND_IN, PYTEST_ADDOPTS="-k 2-none")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("1 passed"), done


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("fault", [*PLANTED, "rank 1 opens no layout"])
def test_two_launched_ranks_of_the_stand_in_npu_are_judged(fault: str, tmp_path: Path, monkeypatch) -> None:
    """A rank that raises ends the others, with its error. Only the layout that has most kinds of parallelism is run."""
    chosen = "-k 'TP2_EP2 or 2-none'" + (f" --plant '{fault}'" if fault else "")
    for name, value in (STAND_IN | {"PYTEST_ADDOPTS": chosen}).items():
        monkeypatch.setenv(name, value)
    with launched.launch(2, "preflight.py", "--self-test", TINY, "device=npu", log=tmp_path / "log") as launch:
        code = launch.wait(300)
    assert code == (1 if fault else 0), launch.text[-3000:]
    if fault in PLANTED:
        assert PLANTED[fault] in launch.text and " passed" in launch.text
    else:
        assert "RuntimeError: planted: rank 1 opens no layout" in launch.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([TINY, "--ranks", "3"], "error: found 3 ranks; needed: one of [1, 2, 4, 8, 16]"),
        ([TINY, "device=npu"], "error: device: npu: torch_npu is not installed; needed: requirements/npu.txt"),
        (["none.yaml"], "error: none.yaml: "),
    ],
)
def test_what_cannot_be_tested_here_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = self_test(*arguments)
    assert done.returncode == 2, done
    assert said in done.stderr.splitlines()[-1], done.stderr
