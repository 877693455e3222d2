"""SIGKILL at any moment, or a write that the system refuses: a whole checkpoint is left, and the run ends the same."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from killed import in_child, kill_me_at
from pytest import MonkeyPatch
from saved import config_in, is_whole, names, saved, tensors_of
from torch import Tensor

import checkpoint
import runlog
from input_files import InputError
from knobs import Config

RECORDS = ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl")


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def test_a_write_that_the_system_cuts_short_is_a_clear_error(tmp_path: Path, cfg: Config) -> None:
    saved(tmp_path, cfg, 1)

    def save_under_a_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the kernel refuses larger files
        with pytest.raises(InputError, match="step-000002: checkpoint not written: .*too large"):
            checkpoint.save(tmp_path, 2, tensors_of(2, size=100_000), {}, cfg)

    assert in_child(save_under_a_limit) == 0
    assert names(tmp_path) == ["step-000001"] and is_whole(checkpoint.latest(tmp_path))


def test_random_kills_during_saves_always_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    """Every tensor takes a while to be made, so most kills happen between two tensors of a file."""
    cfg = config_in(tmp_path, keep_last=1)

    def slowly(tensor: Tensor) -> checkpoint.Pending:
        return checkpoint.Pending(tuple(tensor.shape), tensor.dtype, lambda: time.sleep(0.004) or tensor)

    def pending_of(step: int) -> dict[str, dict[str, checkpoint.Pending]]:
        return {
            kind: {name: slowly(tensor) for name, tensor in named.items()}
            for kind, named in tensors_of(step, size=1000).items()
        }

    saved(tmp_path, cfg, 1)
    generator = random.Random(0)
    torn, step = 0, 1
    for _ in range(30):

        def save_for_ever(step: int = step) -> None:
            while True:
                for _ in range(2):  # the second save replaces the first
                    checkpoint.save(tmp_path, step, pending_of(step), {"cursor": step}, cfg)
                step += 1

        assert in_child(save_for_ever, generator.uniform(0.02, 0.15)) == -signal.SIGKILL
        torn += any(name.startswith(".tmp-step") for name in names(tmp_path))
        said: list[str] = []
        found = checkpoint.latest(tmp_path, said.append)
        assert is_whole(found) and found.step >= step and said == []
        step = found.step
    assert torn >= 5, "the kills did not strike while a checkpoint was being written"


@pytest.mark.parametrize("step", [1, 2, 3])
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
    found = checkpoint.find_resumable(cfg)
    log = runlog.open_run(cfg, 1, 0, resume=found and found.path.parent.parent)
    weight, first = torch.ones(3), 0
    if found:
        checkpoint.check_resume(found, cfg)
        weight, first = found.tensors["adapter"]["weight"], found.step
        log.rewind(first)
    else:
        log.log_eval(0, {"eval/greedy_accuracy": 0.0}, [{"question": q} for q in range(3)])
    for step in range(first, cfg.train.steps):
        weight = weight * 1.1 + step
        log.log_completions(step, [{"text": f"a {step}"}, {"text": f"b {step}"}])
        log.log_step(step, {"weight": weight.sum()}, {"timing/update_s": 0.1})
        if (step + 1) % 3 == 0:
            log.log_eval(step + 1, {"eval/greedy_accuracy": weight.max()}, [{"question": q} for q in range(3)])
        if (step + 1) % cfg.train.checkpoint_every == 0:
            checkpoint.save(log.run_dir, step + 1, {"adapter": {"weight": weight}}, {}, cfg)
    log.finish("done")


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
