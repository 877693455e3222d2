"""A rank that stalls says so and ends the run. A rank that beats goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import launched
import pytest
import training

from config import to_yaml
from tripwires import EXIT_CODE


def watched(seconds: int, script: str) -> subprocess.CompletedProcess:
    """Run ``script`` in a process with a heartbeat ``beat`` of rank 3; returns its output and exit code."""
    program = f"import time; from tripwires import Heartbeat; beat = Heartbeat(3, {seconds})\n{script}\nprint('done')"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=launched.ROOT, capture_output=True, text=True, timeout=60)


def test_a_process_that_stalls_reports_place_and_stack_and_ends() -> None:
    ended = watched(1, "def long_wait(): time.sleep(30)\nbeat.beat('update of step 7')\nlong_wait()")
    assert ended.returncode == EXIT_CODE and "done" not in ended.stdout
    assert "rank 3: stood still for" in ended.stderr and "after: update of step 7" in ended.stderr
    assert "train.stall_seconds = 1" in ended.stderr and "in long_wait" in ended.stderr


@pytest.mark.parametrize(
    ("seconds", "script"),
    [
        (2, "for _ in range(12): time.sleep(0.25); beat.beat('alive')"),
        (1, "beat.stop(); time.sleep(2.5)"),
        (0, "time.sleep(1.5)"),
    ],
    ids=["beats", "stopped", "off"],
)
def test_a_process_that_beats_or_is_not_watched_goes_on(seconds: int, script: str) -> None:
    ended = watched(seconds, script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.slow
def test_a_run_with_a_rank_that_hangs_ends_by_itself_and_says_where(tmp_path: Path) -> None:
    model = training.make_model(tmp_path / "model")
    cfg = training.config(model, tmp_path / "out", parallel__expert=2, train__stall_seconds=10)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    flag = tmp_path / "flag"
    arguments = ("hang", "update", 2, 1, flag, tmp_path / "config.yaml")
    with launched.launch(2, "tests/support/faulty_train.py", *arguments, log=tmp_path / "log") as started:
        started.until(flag.exists)
        hung = time.monotonic()
        code = started.wait(60)
        seconds = time.monotonic() - hung
        assert code != 0 and seconds < 30, (code, seconds, started.text)
        assert not started.living()
    said = started.text
    for rank in (0, 1):  # rank 1 hangs, and rank 0 waits for it in a collective
        assert f"rank {rank}: stood still for" in said, said
    assert said.count("of step 2 (train.stall_seconds = 10)") == 2, said
    assert "in strike" in said and "in all_reduce" in said, said
    print(f"ended {seconds:.1f} s after the rank hung, with exit code {code}")
