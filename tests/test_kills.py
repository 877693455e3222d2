"""SIGKILL at any moment, or a write that the system refuses: a whole checkpoint is left, and the run ends the same.

Ctrl-C and SIGTERM end a process at once, with one line.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from killed import in_child, kill_me_at
from launched import ROOT
from pytest import MonkeyPatch
from saved import config_in, is_whole, names, opened, resumable, save, saved, tensors_of
from tiers import ci
from training import config, make_model

from facts.exits import InputError
from inputs.config import to_dict, to_yaml
from knobs import Config
from runlog import log as runlog
from weights import checkpoint

RECORDS = ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl")


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def test_a_write_that_the_system_cuts_short_is_a_clear_error(tmp_path: Path, cfg: Config) -> None:
    saved(tmp_path, cfg, 1)

    def save_under_a_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the kernel refuses larger files
        with pytest.raises(InputError, match="step-000002: checkpoint not written: .*File too large"):
            save(tmp_path, 2, tensors_of(2, size=100_000), {}, cfg)

    assert in_child(save_under_a_limit) == 0
    assert names(tmp_path) == ["step-000001"] and is_whole(checkpoint.latest(tmp_path))


@pytest.mark.parametrize("step", [2, 3, ci(1)])
def test_a_kill_at_any_file_operation_of_a_save_leaves_a_whole_one(tmp_path: Path, cfg: Config, step: int) -> None:
    """Step 1 and 2 exist: 3 is new and prunes 1, 2 replaces the newest, 1 is saved by a run that was rewound to 0."""
    saved(tmp_path / "start", cfg, 1, 2)
    for moment in range(1, 200):
        run_dir = tmp_path / "run"
        shutil.copytree(tmp_path / "start", run_dir)

        def save(run_dir: Path = run_dir, moment: int = moment) -> None:
            kill_me_at(moment)
            saved(run_dir, cfg, step)

        status = in_child(save)
        said: list[str] = []
        assert is_whole(checkpoint.latest(run_dir, said.append)) and said == []
        saved(run_dir, cfg, step)  # the repeated save removes the leftovers
        assert names(run_dir) == [f"step-{n:06d}" for n in range(max(1, step - 1), step + 1)]
        shutil.rmtree(run_dir)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 15 < moment < 199


def train(cfg: Config) -> None:
    """A small run: each weight depends on the one before, so a lost or repeated step changes every later line."""
    found = resumable(cfg)
    log = opened(cfg, resume=found and found.path.parent.parent)
    weight, first = torch.ones(3), 0
    if found:
        checkpoint.check_resume(found, to_dict(cfg))
        weight, first = found.tensors["adapter"]["weight"], found.step
        log.rewind(first)
    else:
        log.log_eval(0, {"eval/greedy_accuracy": 0.0}, [{"question": q} for q in range(3)])
    for step in range(first, cfg.train.steps):
        weight = weight * 1.1 + step
        log.log_rows("completions.jsonl", step + 1, [{"text": f"a {step}"}, {"text": f"b {step}"}])
        log.log_step(step + 1, {"weight": weight.sum()}, {"timing/update_s": 0.1})
        if (step + 1) % 3 == 0:
            log.log_eval(step + 1, {"eval/greedy_accuracy": weight.max()}, [{"question": q} for q in range(3)])
        if (step + 1) % cfg.train.checkpoint_every == 0:
            save(log.run_dir, step + 1, {"adapter": {"weight": weight}}, {}, cfg)
    log.finish("done", {})


def records(cfg: Config) -> dict[str, bytes]:
    (done,) = Path(cfg.train.out_dir).glob("*/finished.json")
    return {name: (done.parent / name).read_bytes() for name in RECORDS}


def test_a_run_killed_anywhere_ends_byte_identical_when_started_again(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "write_records", lambda *_: None)  # slow, and not read again
    whole = config_in(tmp_path / "whole", steps=6)
    assert in_child(lambda: train(whole)) == 0
    resumed = 0
    for moment in range(1, 1000, 5):
        cfg = config_in(tmp_path / str(moment), steps=6)

        def killed(cfg: Config = cfg, moment: int = moment) -> None:
            kill_me_at(moment)
            train(cfg)

        status = in_child(killed)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if not list(Path(cfg.train.out_dir).glob("*/finished.json")):
            assert in_child(lambda cfg=cfg: train(cfg)) == 0
        resumed += any(Path(cfg.train.out_dir).glob("*/resume-1"))
        assert records(cfg) == records(whole)
        shutil.rmtree(cfg.train.out_dir)
    assert status == 0 and resumed >= 15


# ------------------------------------------------------------------------------------------------ Ctrl-C and SIGTERM


BUSY = """
import hashlib, os
from runlog import progress
progress.end_on_signals(lambda: 'after step 3')
child = os.fork()
if child == 0:
    os.kill(os.getpid(), 15)  # as a pool of processes ends its workers
print('the child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)  # like a collective: Python calls no handler before it returns
"""


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, "0"), (signal.SIGINT, "1")])
def test_a_signal_ends_a_process_that_waits_in_foreign_code_with_one_line_of_rank_0(number, rank) -> None:
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        env=os.environ | {"RANK": rank},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    line = f"\nended by {number.name} after step 3\n" if rank == "0" else ""
    assert busy.stdout.readline() == f"the child ended with {-signal.SIGTERM}\n"
    time.sleep(0.2)
    busy.send_signal(number)
    try:
        _, error = busy.communicate(timeout=20)
    finally:
        busy.kill()
    assert busy.returncode == 128 + number and error == line


def started(path: Path, log: Path, *launcher: str) -> subprocess.Popen:
    """train_grpo.py as the leader of a process group, as a terminal starts a command."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, *launcher, "train_grpo.py", str(path)],
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def pressed(process: subprocess.Popen, ready: Callable[[], bool], log: Path) -> list[str]:
    """Ctrl-C when ``ready``. The lines of the log, if the process then ends soon, with 130 and without a traceback."""
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    try:
        code = process.wait(60)
    finally:
        process.kill()
    assert code == 130 and "Traceback" not in log.read_text() and "signal" not in log.read_text(), log.read_text()
    return [line for line in log.read_text().splitlines() if line]


@pytest.mark.ci
def test_ctrl_c_during_the_imports_ends_with_one_line(tmp_path: Path) -> None:
    process = started(tmp_path / "absent.yaml", tmp_path / "log")

    def catches_sigterm() -> bool:
        caught = next(x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    lines = pressed(process, catches_sigterm, tmp_path / "log")
    assert lines == ["ended by SIGINT before a step of this start; the same command starts it again"]


@pytest.mark.ci
@pytest.mark.slow
def test_ctrl_c_in_a_run_of_two_ranks_ends_with_one_line_that_names_the_checkpoint(tmp_path: Path) -> None:
    """Through the launcher of the run_*.sh scripts. The line is right: the same command goes on from there."""
    model, log = make_model(tmp_path / "model"), tmp_path / "log"
    cfg = config(model, tmp_path / "out", parallel__expert=2, train__steps=1000, train__checkpoint_every=2)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    launcher = ("launch/first_code.py", "--standalone", "--local-addr=localhost", "--nproc_per_node=2")
    process = started(tmp_path / "config.yaml", log, *launcher)
    lines = pressed(process, lambda: "step 4/1000" in log.read_text(), log)
    (run,) = (tmp_path / "out").iterdir()
    done = len((run / "metrics.jsonl").read_text().splitlines())
    last = names(run)[-1]
    assert lines[-2].startswith(f"step {done}/1000")
    assert lines[-1] == (
        f"ended by SIGINT after step {done} of 1000; the same command continues from {run}/checkpoints/{last}"
    )
    assert resumable(cfg).path == run / "checkpoints" / last
