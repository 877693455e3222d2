"""With the real torchrun, a rank that fails or stalls says so and ends the others; a rank that beats goes on."""

from __future__ import annotations

import subprocess
import sys
import time

import launched
import pytest
import training

import parallel_setup
import train_grpo
from checks import launched as launched_question
from config import to_yaml
from runlog import EXIT_CODE


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "stall", "limit"), [("raise", 0, 15), ("hang", 20, 45)])
def test_a_rank_that_fails_or_hangs_ends_all_ranks_within_seconds(fault, stall, limit, model, tmp_path) -> None:
    """A rank that stands still is noticed after 20 s; torchrun notices at once that a rank has ended."""
    cfg = training.config(model, tmp_path / "out", parallel__expert=2, train__stall_seconds=stall)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    flag = tmp_path / "flag"
    arguments = (fault, "update", 2, 1, flag, tmp_path / "config.yaml")
    with launched.launch(2, "tests/support/faulty_train.py", *arguments, log=tmp_path / "log") as started:
        started.until(flag.exists)
        struck = time.monotonic()
        code = started.wait(60)
        seconds = time.monotonic() - struck
        assert code != 0 and seconds < limit, (code, seconds, started.text)
        assert not started.living()
    said = started.text
    assert "step 1/3" in said and "step 2/3" not in said
    assert ("a deliberate fault in process" in said) == (fault == "raise")
    if fault == "raise":
        assert said.count("Traceback") <= 3, said  # of each rank, and that of torchrun about them
    else:  # rank 1 hangs, and rank 0 waits for it in a collective
        assert "rank 0: stood still for" in said and "rank 1: stood still for" in said, said
        assert said.count("of step 2 (train.stall_seconds = 20)") == 2, said
        assert "in strike" in said and "in all_reduce" in said, said


def test_the_traceback_of_a_lost_connection_is_printed_after_the_hint(monkeypatch, capsys) -> None:
    """HCCL and NCCL word errors of their own in this way, too."""

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(train_grpo, "start", lost)
    monkeypatch.setattr(parallel_setup.time, "sleep", lambda seconds: None)
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0].startswith("perhaps another rank ended") and said[1].startswith("Traceback")
    assert any(", in lost" in line for line in said) and said[-1] == "RuntimeError: Connection closed by peer"


def test_a_missing_file_in_the_middle_of_a_training_has_a_traceback(monkeypatch, capsys) -> None:
    """It may be a library's own: then the line alone would blame the user's input."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file", "library.so")

    monkeypatch.setattr(train_grpo, "start", missing)
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0].startswith("Traceback") and any(", in missing" in line for line in said)
    assert said[-1] == "error: library.so: No such file"


def test_a_question_to_all_ranks_names_a_file_in_one_line_and_shows_the_traceback_of_other_errors(capsys) -> None:
    def question(error: Exception) -> int:
        def refuse(*_: object) -> None:
            raise error

        args = launched_question.command_line("--groups", "x").parse_args(["configs/tiny_cpu.yaml"])
        return launched_question.ask(args, refuse, lambda *_: pytest.fail("not reached"))

    assert question(FileNotFoundError(2, "No such file", "a/b")) == 2
    assert capsys.readouterr().err == "error: a/b: No such file\n"
    for error in (ConnectionResetError("lost"), UnicodeDecodeError("utf-8", b"x", 0, 1, "of a library")):
        with pytest.raises(type(error)):
            question(error)


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(3 * int(os.environ['RANK']))", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_launcher_ends_with_the_code_of_the_rank_that_ended_first_and_no_traceback(ending, code, tmp_path) -> None:
    (tmp_path / "script.py").write_text(f"import os, sys\n{ending}\n")
    command = [sys.executable, "parallel_setup.py", "--standalone", "--local-addr=localhost", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, tmp_path / "script.py"], cwd=launched.ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code and "Traceback" not in done.stderr and "ChildFailed" not in done.stderr, done.stderr
    assert "ended first, with exit code" in done.stderr.splitlines()[-1]


def watched(seconds: int, script: str) -> subprocess.CompletedProcess:
    """Run ``script`` in a process with a heartbeat ``beat`` of rank 3; returns its output and exit code."""
    program = f"import time; from runlog import Heartbeat; beat = Heartbeat(3, {seconds})\n{script}\nprint('done')"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=launched.ROOT, capture_output=True, text=True, timeout=60)


def test_a_process_that_stalls_reports_place_and_stack_and_ends() -> None:
    ended = watched(1, "def long_wait(): time.sleep(30)\nbeat.beat('update of step 7')\nlong_wait()")
    assert ended.returncode == EXIT_CODE and "done" not in ended.stdout
    assert "rank 3: stood still for" in ended.stderr and "after: update of step 7" in ended.stderr
    assert "train.stall_seconds = 1" in ended.stderr and "in long_wait" in ended.stderr


def test_a_process_that_stalls_after_a_wait_ends() -> None:
    assert watched(1, "with beat.waiting(): time.sleep(2)\ntime.sleep(30)").returncode == EXIT_CODE


def test_a_process_that_beats_or_is_not_watched_goes_on() -> None:
    beats = "for _ in range(12): time.sleep(0.25); beat.beat('alive')"
    waits = "with beat.waiting(): time.sleep(4)"  # for ranks that have more to do, and heartbeats of their own
    for seconds, script in ((2, f"{beats}\nbeat.stop(); time.sleep(3)"), (0, "time.sleep(1.5)"), (1, waits)):
        ended = watched(seconds, script)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
