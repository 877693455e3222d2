"""Flipped routes and noisy logits in training runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import training
from refused import refusal

pytestmark = pytest.mark.nightly
TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny_cpu.yaml"
SHORT = {"train__steps": 2, "loss__kl": "none"}


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")

    def run(name: str, **changes) -> tuple[str, training.Config]:
        return "TP1", training.config(model, out / name, **SHORT | changes)

    return training.run_all({
        "clean": run("clean"),
        "flips": run("flips", rollout__route_flips=0.5),
        "flips_r3": run("flips_r3", rollout__route_flips=0.5, replay__mode="r3"),
        "noise": run("noise", rollout__logit_noise=0.5),
    })  # fmt: skip


def test_a_disturbed_sampler_is_far_from_the_trainer_and_a_replay_of_its_routes_brings_it_back(runs) -> None:
    gaps = {name: training.metrics(runs[name])[1]["rollout/logp_gap_mean"] for name in runs}
    assert min(gaps["flips"], gaps["noise"]) > 1e-3 > 1e-4 > max(gaps["flips_r3"], gaps["clean"])
    for name in ("flips", "flips_r3", "noise"):  # judged on a probe without the disturbance
        assert all(row["sync/probe_gap"] < 1e-5 for row in training.metrics(runs[name]))


def test_a_disturbed_engine_other_than_the_embedded_one_is_refused() -> None:
    assert (
        "rollout.route_flips, rollout.logit_noise: for tests; needed: 0, or a tiny_model and rollout.engine torch"
        in refusal(TINY, "rollout.logit_noise=0.5", "rollout.engine=vllm")
    )
