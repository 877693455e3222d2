"""A run that was killed and started again ends like one that never was; another layout may go on with it."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import launched
import pytest
import training
from test_train import assert_same_metrics

import checkpoint
import train_grpo
from config import Config, to_yaml

RECORDS = ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl")
EVERYTHING = {  # a rollout, updates and an evaluation that depend on all that a checkpoint must hold
    "train__steps": 5, "train__checkpoint_every": 1, "eval__every": 2, "optim__prompts_per_update": 3,
    "optim__decay": "cosine", "optim__weight_decay": 0.1, "lora__dropout": 0.1, "loss__entropy_coef": 0.05,
    "optim__tokens_per_micro_batch": 300,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("models") / "tiny")


def finished_runs(cfg: Config) -> list[Path]:
    return [path.parent for path in Path(cfg.train.out_dir).glob("*/finished.json")]


def assert_same_bytes(found: Path, expected: Path) -> None:
    for name in RECORDS:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


# ------------------------------------------------------------------------------------------------ killed anywhere


def run_in_a_session_of_its_own(layout: str, cfg: Config) -> None:
    os.setsid()
    tempfile.tempdir = str(Path(cfg.train.out_dir).parent)  # what a killed process leaves goes with the test's folder
    training.in_world(layout, training.train_each, [(layout, cfg)])


def killed_after(seconds: float, layout: str, cfg: Config) -> bool:
    """Train in forked processes, all of them SIGKILLed after a while; whether they were still running."""
    child = multiprocessing.get_context("fork").Process(target=run_in_a_session_of_its_own, args=(layout, cfg))
    child.start()
    child.join(seconds)
    running = child.exitcode is None
    if running:
        os.killpg(child.pid, signal.SIGKILL)
        child.join(30)
    assert running or child.exitcode == 0
    return running


def test_killed_again_and_again_at_any_moment(model, tmp_path) -> None:
    start = time.monotonic()
    expected = training.run_all({"": ("EP2", training.config(model, tmp_path / "whole", **EVERYTHING))})[""]
    whole = time.monotonic() - start
    cfg = training.in_layout(training.config(model, tmp_path / "killed", **EVERYTHING), "EP2")
    kills = 0
    for share in (0.4, 0.6, 0.5, 0.7, 0.8, 0.9):  # of the time that a whole run takes
        if not finished_runs(cfg):
            kills += killed_after(share * whole, "EP2", cfg)
    if not finished_runs(cfg):
        assert not killed_after(300, "EP2", cfg)
    assert kills
    (found,) = finished_runs(cfg)
    assert_same_bytes(found, expected)
    print(f"killed {kills} times, resumed {len(list(found.glob('resume-*')))} times, a whole run being {whole:.1f} s")


def test_killed_at_exact_places_under_torchrun(model, tmp_path) -> None:
    """In the middle of a step, then of a checkpoint; then the real command runs to the end."""
    whole, cfg = (
        training.in_layout(training.config(model, tmp_path / name, **EVERYTHING), "EP2") for name in ("whole", "killed")
    )
    training.in_world("EP2", training.train_each, [("EP2", whole)], False)
    path = tmp_path / "killed.yaml"
    path.write_text(to_yaml(cfg))
    # The fourth update is the second one of the second step; the second checkpoint from there is that of three steps.
    for number, (place, count, rank) in enumerate([("update", 4, 1), ("checkpoint", 2, 0)]):
        flag = tmp_path / f"flag{number}"
        fault = ("hang", place, count, rank, flag)
        with launched.launch(2, "tests/faulty_train.py", *fault, path, log=tmp_path / f"killed{number}.log") as killed:
            killed.until(flag.exists)
            killed.kill()
            assert not killed.living()
        folder = training.only_run(cfg)
        aside = list(folder.glob("checkpoints/.tmp-*"))
        assert len(aside) == (place == "checkpoint"), (place, aside)
        steps = sorted(path.name for path in folder.glob("checkpoints/step-*"))
        assert steps == [["step-000001"], ["step-000001", "step-000002"]][number]
    with launched.launch(2, "train_grpo.py", path, log=tmp_path / "last.log") as last:
        assert last.wait() == 0, last.text
    assert "after 2 of 5 steps" in last.text
    assert_same_bytes(training.only_run(cfg), training.only_run(whole))


# ------------------------------------------------------------------------------------------------ other circumstances


def rewound(run_dir: Path, folder: Path, steps: int) -> Path:
    """A copy of a finished run as it was when it had a checkpoint of ``steps`` only and had been killed."""
    copy = shutil.copytree(run_dir, folder / run_dir.name)
    (copy / "finished.json").unlink()
    for path in (copy / "checkpoints").iterdir():
        if path.name != f"step-{steps:06d}":
            shutil.rmtree(path)
    return copy


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory) -> Path:
    """A run without dropout, whose numbers no layout changes."""
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 9}
    return training.run_all({"": ("EP2", training.config(model, tmp_path_factory.mktemp("plain"), **changes))})[""]


@pytest.mark.parametrize("layout", ["TP1", "DP2", "TP2", "EP2", "TP2_EP2_ETP2"])
def test_another_layout_goes_on_with_the_same_numbers(layout, model, plain, tmp_path) -> None:
    copy = rewound(plain, tmp_path, 2)
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 9, "train__resume": str(copy)}
    cfg = training.in_layout(training.config(model, tmp_path / "out", **changes), layout)
    training.in_world(layout, training.train_each, [(layout, cfg)])
    assert (copy / "finished.json").exists() and not (tmp_path / "out").exists()
    assert_same_metrics(copy, plain)
    if layout == "EP2":
        assert_same_bytes(copy, plain)
        for name in ("adapter.safetensors", "optimizer.safetensors"):
            files = [run / "checkpoints" / "step-000005" / name for run in (copy, plain)]
            assert files[0].read_bytes() == files[1].read_bytes()
    found, expected = (checkpoint.latest(run).tensors for run in (copy, plain))
    for kind in expected:
        for name, tensor in expected[kind].items():
            gap = (found[kind][name] - tensor).abs().max()
            assert gap <= 1e-3 * tensor.abs().max(), (kind, name, gap)


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and output of train_grpo.main in a forked process: a world of one, without torchrun."""

    def work(sender) -> None:
        sys.stdout = sys.stderr = io.StringIO()
        warnings.simplefilter("ignore")
        training.lighten()
        code = train_grpo.main([str(argument) for argument in arguments])
        sender.send((code, sys.stdout.getvalue()))
        sender.close()
        os._exit(0)

    training.import_before_the_fork()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=work, args=(sender,))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join(10)


@pytest.fixture
def file(model, plain, tmp_path) -> Path:
    """The configuration of the plain run, for one process; its out_dir is tmp_path / "out"."""
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 9}
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(training.config(model, tmp_path / "out", **changes)))
    return path


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "out").iterdir()}


def test_a_changed_value_is_refused_by_name_and_nothing_is_touched(plain, file, tmp_path) -> None:
    copy = rewound(plain, tmp_path / "out", 2)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    code, text = command(file, f"train.resume={copy}", "optim.lr=0.02", "eval.samples=2")
    assert code == 2 and text.count("error: ") == 1
    assert "optim.lr: 0.01 -> 0.02" in text and "eval.samples: 1 -> 2" in text
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_auto_goes_on_with_the_unfinished_run_of_this_configuration_only(plain, file, tmp_path) -> None:
    copy = rewound(plain, tmp_path / "out", 2)
    code, text = command(file, "train.seed=3", "train.steps=1")
    assert code == 0 and "resumed" not in text and len(folders(tmp_path)) == 2, text
    code, text = command(file)
    assert code == 0 and f"resumed {copy.name} after 2 of 5 steps" in text and len(folders(tmp_path)) == 2, text
    assert_same_metrics(copy, plain)
    shutil.rmtree(copy / "checkpoints")
    code, text = command(file, f"train.resume={copy}")
    assert code == 2 and f"error: train.resume: {copy} holds no usable checkpoint" in text


def test_a_finished_run_and_resume_never_start_a_new_one(plain, file, tmp_path) -> None:
    shutil.copytree(plain, tmp_path / "out" / plain.name)
    code, text = command(file)
    assert code == 0 and "resumed" not in text and len(folders(tmp_path)) == 2, text
    (new,) = [path for path in (tmp_path / "out").iterdir() if path.name != plain.name]
    (new / "finished.json").unlink()
    code, text = command(file, "train.resume=never")
    assert code == 0 and "resumed" not in text and len(folders(tmp_path)) == 3, text


def test_resuming_a_finished_run_by_name_leaves_its_numbers_alone(plain, file, tmp_path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "out" / plain.name))
    code, text = command(file, f"train.resume={copy}")
    assert code == 0 and "after 5 of 5 steps" in text
    assert_same_bytes(copy, plain)
    assert (copy / "finished.json").exists()
