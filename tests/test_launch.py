"""With the real torchrun, a rank that fails or stalls says so and ends the others; a rank that beats goes on."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launched
import pytest
import torch
import torch.distributed as dist
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


def reduce_with_a_killed_rank(store: Path) -> None:
    """Two ranks meet; one is killed, and the other one needs it."""
    child = os.fork()
    limit = datetime.timedelta(seconds=60)
    place = {"store": dist.FileStore(str(store), 2), "rank": int(child == 0), "world_size": 2}
    try:
        dist.init_process_group("gloo", timeout=limit, **place)
        dist.all_reduce(torch.ones(1))
        if child == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def of_a_user(store: Path) -> None:
    raise RuntimeError("no Connection in the table of peers")


@pytest.mark.parametrize(("fault", "lost"), [(reduce_with_a_killed_rank, True), (of_a_user, False)])
def test_an_error_in_a_collective_is_printed_after_a_hint_and_no_other_one(
    fault, lost, tmp_path, monkeypatch, capsys
) -> None:
    """Whatever the words of an error are: a function of the user's may raise one about peers and connections."""
    monkeypatch.setattr(train_grpo, "start", lambda *_, **__: fault(tmp_path / "store"))
    monkeypatch.setattr(parallel_setup.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("perhaps another rank ended" if lost else "Traceback"), said
    assert f", in {fault.__name__}" in said and "RuntimeError" in said.strip().splitlines()[-1]
    assert json.loads((tmp_path / "error.json").read_text())["message"] in said


@pytest.mark.parametrize("program", ["train_grpo.py", "evaluate.py"])
def test_torchrun_ends_with_the_line_of_the_rank_that_refused(program, tmp_path) -> None:
    """Its own traceback comes before it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    done = subprocess.run(
        [*command, "--nproc_per_node=2", program, "absent.yaml"], cwd=launched.ROOT, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    line = "error: absent.yaml: cannot be read (No such file or directory)"
    assert done.returncode == 1 and line in done.stderr.splitlines()
    assert line in done.stderr[done.stderr.rindex("Traceback") :], done.stderr


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
