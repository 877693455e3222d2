"""Routing replay in whole runs: with all other features of a run, and with a sampler whose router is disturbed.

routing_replay.py's own properties are in test_routing_replay.py; here the trainer loop is shown to use them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import training
import world
from torch import Tensor

import train_grpo
import weights_hf
from learner import Learner
from tripwires import Heartbeat

ROUTER_TOO = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
UPDATES = {"optim__prompts_per_update": 2, "train__steps": 2}  # three updates a step
RUNS = {
    "r3": ("TP2_EP2_DP2", UPDATES | {"replay__mode": "r3", "model__recompute": True}),
    "r2": ("TP2_EP2_DP2", UPDATES | {"replay__mode": "r2", "model__recompute": True}),
    "r3 alone": ("TP1", UPDATES | {"replay__mode": "r3"}),
    "r2 alone": ("TP1", UPDATES | {"replay__mode": "r2"}),
    "off": ("TP1", UPDATES),
    "all": (
        "TP2_EP2_DP2",
        {"replay__mode": "r3", "lora__targets": ROUTER_TOO, "aqn__schedule": "constant", "loss__importance": "token"},
    ),
}
EDGE = 0.05  # so small gates are nearly undecided: a disturbance changes the chosen experts, but hardly their weights
DISTURBANCE = 0.002


@pytest.fixture(scope="module")
def rows(model: Path, tmp_path_factory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("runs")
    jobs = {name: (layout, training.config(model, out / name, **changes)) for name, (layout, changes) in RUNS.items()}
    return {name: training.metrics(run) for name, run in training.run_all(jobs).items()}


@pytest.mark.parametrize("mode", ["r3", "r2"])
def test_replay_with_updates_recompute_and_every_kind_of_parallelism_is_the_run_on_one_rank(mode: str, rows) -> None:
    found, alone = rows[mode], rows[f"{mode} alone"]
    assert len(found) == 2
    for row, want in zip(found, alone, strict=True):
        assert row["replay/differing_frac"] == want["replay/differing_frac"]
        for key in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "rollout/logp_gap_mean"):
            assert row[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key


def train_padded(jobs: list) -> None:
    """The trainer computes padded rows instead of packed lines."""
    training.after(Learner, "__init__", lambda result, self, *args, **kwargs: setattr(self, "packs", False))
    training.train_each(jobs)


@pytest.mark.parametrize("mode", ["r3", "r2"])
def test_packed_lines_replay_as_padded_rows_do(mode: str, rows, model: Path, tmp_path: Path) -> None:
    layout, changes = RUNS[mode]
    cfg = training.in_layout(training.config(model, tmp_path, **changes), layout)
    training.in_world(layout, train_padded, [(layout, cfg)])
    for padded, packed in zip(training.metrics(training.only_run(cfg)), rows[mode], strict=True):
        for key in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "rollout/logp_gap_mean"):
            assert packed[key] == pytest.approx(padded[key], rel=1e-4, abs=1e-6), key
        # r2 also records the routes of padding, where rows are padded.
        expected = pytest.approx(padded["replay/differing_frac"], rel=0.1 if mode == "r2" else 0)
        assert packed["replay/differing_frac"] == expected and packed["replay/differing_frac"] > 0


@pytest.mark.parametrize("mode", ["r3", "r2"])
def test_an_undisturbed_sampler_makes_replay_change_the_later_updates_only(mode: str, rows) -> None:
    """The first update of a step would choose the same routes; later updates would choose others."""
    replayed, free = rows[f"{mode} alone"], rows["off"]
    assert replayed[0]["rollout/logp_gap_max"] < 1e-5
    assert replayed[0]["replay/differing_frac"] > 0 and replayed[0]["actor/loss"] != free[0]["actor/loss"]
    assert replayed[0]["reward/mean"] == free[0]["reward/mean"]


def test_replay_lora_on_the_router_and_noise_together_on_four_ranks(rows) -> None:
    assert len(rows["all"]) == 3
    for row in rows["all"]:
        assert row["aqn/sigma"] == 0.01 and row["aqn/probe_shift"] > 0 and row["actor/grad_norm"] > 0
        assert 0 < row["replay/differing_frac"] < 0.5 and 0 < row["rollout/importance_mean"] < 2


def train_disturbed(jobs: list) -> None:
    """The trainer's routers are nearly undecided, and the sampler gets them with a small disturbance."""
    training.lighten()
    load, export = weights_hf.load, weights_hf.export

    @torch.no_grad()
    def undecided(model: torch.nn.Module, *args) -> None:
        load(model, *args)
        for layer in model.decoder.layers:
            layer.mlp.router.weight.mul_(EDGE)

    def disturbed(*args, **kwargs):
        def change(tensor: Tensor) -> Tensor:
            return tensor + DISTURBANCE * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))

        for name, tensor in export(*args, **kwargs):
            yield name, change(tensor) if name.endswith("mlp.gate.weight") else tensor

    weights_hf.load, weights_hf.export = undecided, disturbed
    for layout, cfg in jobs:
        train_grpo.train(cfg, world.open_layout(layout), Heartbeat(0, 0))
        training.parallel_setup.close_layout()


def test_replay_takes_most_of_a_disturbed_routers_gap_away(model: Path, tmp_path: Path) -> None:
    cfgs = [
        training.config(model, tmp_path / mode, replay__mode=mode, checks__logp_gap="off", train__steps=1)
        for mode in ("off", "r3")
    ]
    training.in_world("TP1", train_disturbed, [("TP1", cfg) for cfg in cfgs])
    (free,), (replayed,) = (training.metrics(training.only_run(cfg)) for cfg in cfgs)
    gaps = [row["rollout/logp_gap_mean"] for row in (free, replayed)]
    assert gaps[0] > 1e-4 and gaps[1] < gaps[0] / 5, gaps
    assert replayed["replay/differing_frac"] > 0.05
    print(f"gap {gaps[0]:.2g} -> {gaps[1]:.2g}")
