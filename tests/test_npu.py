"""`device: npu` on a stand-in for the device (fake_npu.py) against cpu and gloo: the trainer's whole path but CANN.

Not covered: the kernels' numerics, their speed and memory, HCCL's timeouts, and anything asynchronous.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training
import world
from launched import launch

import config

RUNS = {  # layout: changes
    "TP1": {"rollout__top_p": 0.9},
    "TP2_EP2": {"model__recompute": True},
    "TP2_EP2_DP2": {"aqn__schedule": "constant", "replay__mode": "r3", "replay__reference": "native"},
}
FIVE = {
    "train__steps": 5, "train__checkpoint_every": 2, "parallel__timeout_seconds": 300,
    "optim__lr": 1e-3, "optim__eps": 1e-4,  # AdamW divides by small numbers: rounding must not grow in five steps
}  # fmt: skip


def settings(layout: str, model: Path, out: Path) -> config.Config:
    return training.in_layout(training.config(model, out, **FIVE, **RUNS[layout]), layout)


def train_on_npu(layout: str, model: Path, folder: Path) -> tuple[Path, list[dict]]:
    """The run folder of an interrupted and resumed training, and each rank's answers."""
    folder.mkdir()
    cfg = settings(layout, model, folder / "out").model_copy(update={"device": "npu"})
    (folder / "config.yaml").write_text(config.to_yaml(cfg))
    answer = folder / "answer"
    ranks = world.LAYOUTS[layout][0]
    with launch(ranks, "tests/npu_train.py", folder / "config.yaml", answer, log=folder / "log") as started:
        assert started.wait(500) == 0, started.text[-6000:]
    return training.only_run(cfg), [json.loads(Path(f"{answer}-{rank}").read_text()) for rank in range(ranks)]


def assert_equal_to_1e_6(found: Path, expected: Path) -> None:
    rows, wanted = training.metrics(found), training.metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted] == list(range(5))
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        gaps = {key: abs(row[key] - want[key]) / max(1, abs(want[key])) for key in want}
        apart = {key: (row[key], want[key]) for key, gap in gaps.items() if not gap <= 1e-6}
        assert not apart, (row["step"], apart)
    for name in ("eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("model") / "qwen3_moe")


@pytest.fixture(scope="module")
def on_cpu(model, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("cpu")
    return training.run_all({layout: (layout, settings(layout, model, out / layout)) for layout in RUNS})


@pytest.fixture(scope="module", params=list(RUNS))
def on_npu(request, model, tmp_path_factory) -> tuple[str, Path, list[dict]]:
    return request.param, *train_on_npu(request.param, model, tmp_path_factory.mktemp("npu") / request.param)


@pytest.mark.slow
def test_a_resumed_training_on_the_npu_has_the_cpus_metrics(on_npu, on_cpu):
    layout, run, answers = on_npu
    assert_equal_to_1e_6(run, on_cpu[layout])
    assert all(rank["device"] == "npu" for rank in answers)
