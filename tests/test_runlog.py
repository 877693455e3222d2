"""A run's folder: nothing in it is lost, overwritten, torn or private, and a rewound one repeats itself."""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import saved
from pytest import MonkeyPatch
from saved import config_in
from tiers import ci

from knobs import Config
from runlog import log as runlog
from runlog import progress, run_record
from runlog.progress import Heartbeat


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config_in(tmp_path)


OpenRun = Callable[..., runlog.RunLog]


@pytest.fixture
def open_run(monkeypatch: MonkeyPatch) -> Iterator[OpenRun]:
    """RunLog.open without the slow look at the environment; what it opened is closed when the test ends."""
    monkeypatch.setattr(run_record, "environment", lambda world_size: {"world_size": world_size})
    logs = []

    def opened(*arguments: object, **named: object) -> runlog.RunLog:
        logs.append(saved.opened(*arguments, **named))
        return logs[-1]

    yield opened
    for log in logs:
        log.close()


@pytest.fixture
def log(cfg: Config, open_run: OpenRun) -> runlog.RunLog:
    return open_run(cfg, world_size=1, rank=0)


def fill(log: runlog.RunLog, first: int, end: int) -> None:
    """The steps after ``first`` up to ``end``, whose numbers depend on the step; an evaluation before, and every 2."""
    if first == 0:
        log.log_eval(0, {"eval/greedy_accuracy": 0.25}, [{"question": q, "greedy": [0]} for q in range(3)])
    for step in range(first + 1, end + 1):
        log.log_rows("completions.jsonl", step, [{"text": f"{step}\n{n}\u2028"} for n in range(2)])
        log.log_rows("moe.jsonl", step, [{"moe/load_max": [step, step / 7]}])
        log.log_step(step, {"reward/mean": step / 7}, {"timing/generate_s": 1.0})
        if step % 2 == 0:
            outcomes = [{"question": q, "greedy": [q]} for q in range(3)]
            log.log_eval(step, {"eval/greedy_accuracy": step / 3}, outcomes)


RECORDS = ("metrics.jsonl", "moe.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl")


def records(run_dir: Path) -> dict[str, bytes]:
    return {name: (run_dir / name).read_bytes() for name in RECORDS}


# ---------------------------------------------------------------- the folder


def test_two_runs_of_one_second_get_two_folders(cfg: Config, monkeypatch: MonkeyPatch, open_run: OpenRun) -> None:
    moment = runlog.datetime(2030, 1, 2, 3, 4, 5)
    monkeypatch.setattr(runlog, "datetime", types.SimpleNamespace(now=lambda: moment))
    logs = [open_run(cfg, 1, 0) for _ in range(3)]
    assert [log.run_dir.name for log in logs] == [f"tiny-20300102-030405{suffix}" for suffix in ("", "-2", "-3")]


def test_other_ranks_write_nothing(cfg: Config, open_run: OpenRun) -> None:
    log = open_run(cfg, world_size=2, rank=1)
    fill(log, 0, 2)
    log.rewind(1)
    log.say("quiet")
    log.finish("quiet", {})
    assert log.evaluations() == [] and not Path(cfg.train.out_dir).exists()


# ---------------------------------------------------------------- lines


def test_floats_survive_exactly_keep_their_order_and_are_null_if_not_finite(log: runlog.RunLog) -> None:
    metrics = {"b": 0.1 + 0.2, "a": np.float32(0.1), "tiny": 5e-324, "count": np.int64(3)}
    log.log_step(1, metrics | {"c": math.nan, "d": np.float32("-inf")}, {})
    assert (log.run_dir / "metrics.jsonl").read_text() == (
        '{"step": 1, "b": 0.30000000000000004, "a": 0.10000000149011612, "tiny": 5e-324, "count": 3,'
        ' "c": null, "d": null, "nonfinite": ["c", "d"]}\n'
    )


def test_a_long_run_says_what_is_left_and_a_long_phase_that_it_is_at_work(
    cfg: Config, open_run: OpenRun, monkeypatch: MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """100 steps. The first takes 90 s, and 60 s of an evaluation follow it: 99 more of 150 s are 4 h 8 min."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log = open_run(cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 100})}), 1, 0)
    heartbeat = Heartbeat(0, log)

    def later(seconds: float, place: str = "") -> list[str]:
        now[0] += seconds
        heartbeat.beat(place)
        return capsys.readouterr().out.splitlines()

    capsys.readouterr()
    assert later(20, "sync of step 1") == [] and later(40) == ["at work after: sync of step 1"] and later(20) == []
    now[0] += 10
    log.log_step(1, {"reward/mean": 0.5}, {"timing/step_s": 90.0})
    assert capsys.readouterr().out == "step 1/100  reward 0.500  90.0 s = other 90.0  2 h 28 min left\n"
    assert later(60, "3 of 9 questions") == ["at work after: 3 of 9 questions  4 h 8 min left"]
    log.log_step(100, {}, {"timing/step_s": 1.0})
    assert capsys.readouterr().out == "step 100/100  1.0 s = other 1.0\n"
    assert all(key in runlog.LEGEND for label, key, _ in runlog.PROGRESS)


# ---------------------------------------------------------------- finish


def test_finish_hashes_the_records(log: runlog.RunLog, capsys: pytest.CaptureFixture) -> None:
    fill(log, 0, 4)
    log.finish("arithmetic accuracy 25.0 % -> 66.7 %", {"entropy": "step 9: 1e-5"})
    done = json.loads((log.run_dir / "finished.json").read_text())
    assert done["result"] == "arithmetic accuracy 25.0 % -> 66.7 %" and done["checks"] == {"entropy": "step 9: 1e-5"}
    for name in ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl"):
        assert done["sha256"][name] == hashlib.sha256((log.run_dir / name).read_bytes()).hexdigest()
    assert capsys.readouterr().out.splitlines()[-1] == done["result"]


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("tear", [b"\x00" * 40, b'{"step": 5, "x": "\xff', ci(b""), ci(b'{"step": 5, "rew')])
@pytest.mark.parametrize("back_to", [4, 1, ci(3), ci(2)])
def test_a_rewound_run_equals_one_never_stopped(cfg: Config, tear: bytes, back_to: int, open_run: OpenRun) -> None:
    whole = open_run(cfg, 1, 0)
    fill(whole, 0, 6)
    killed = open_run(cfg, 1, 0)
    fill(killed, 0, 4)
    killed.close()
    for name in (*RECORDS, "timing.jsonl"):
        with open(killed.run_dir / name, "ab") as file:
            file.write(tear)
    again = open_run(cfg, 1, 0, resume=killed.run_dir)
    again.rewind(back_to)
    fill(again, back_to, 6)
    assert records(again.run_dir) == records(whole.run_dir)
    assert len(run_record.read_lines(again.run_dir / "timing.jsonl")) == 6
    assert [row["step"] for row in again.evaluations()] == [0, 2, 4, 6]
    assert (again.run_dir / "resume-1" / "environment.json").exists()


def test_outcomes_whose_summary_was_not_written_are_forgotten(cfg: Config, open_run: OpenRun) -> None:
    log = open_run(cfg, 1, 0)
    fill(log, 0, 2)
    before = records(log.run_dir)
    with open(log.run_dir / "eval_outcomes.jsonl", "a") as file:  # killed in the evaluation at step 2, logged again
        file.write('{"step": 3, "question": 0}\n')
    log.rewind(2)
    log.log_eval(2, log.evaluations()[-1] | {}, [{"question": q, "greedy": [q]} for q in range(3)])
    assert records(log.run_dir) == before
