"""Training runs whose sampler differs from the trainer on purpose: rounded weights, wrong experts, noise on logits."""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path

import pytest
import training
from planting import Plant

from checks.planted_fault import named_faults
from facts.exits import InputError, Tripped

pytestmark = pytest.mark.nightly
# The policy does not change, so all evaluations must be those of the clean run.
STILL = {"optim__lr": 1e-30, "train__steps": 2, "eval__every": 1, "loss__kl": "none"}
DISTURBED = {"rounded": "rounded=3", "flips": "flips", "flips_r3": "flips", "noise": "noise=0.5"}


def planted(faults: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for place, wrong in named_faults(faults):
            patch.setattr(place, wrong(pkgutil.resolve_name(place)))

    return plant


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")

    def config(name: str, *off: str) -> training.Config:
        mode = "r3" if "r3" in name else "off"
        return training.config(model, out / name, **STILL, checks__off=("adapters", *off), replay__mode=mode)

    cfgs = {"clean": config("clean")} | {name: config(name, "logp_gap") for name in DISTURBED}
    jobs = {"clean": (lambda patch: None, cfgs["clean"], "TP1")}
    jobs |= {name: (planted(fault), cfgs[name], "TP1") for name, fault in DISTURBED.items()}
    checked = {f"{name}, checked": (planted(DISTURBED[name]), config(f"{name}_checked"), "TP1") for name in DISTURBED}
    ended = training.raised_each(jobs | checked)
    assert all(ended[name] == [(InputError, "")] for name in jobs), ended
    for name in checked:
        ((kind, message),) = ended[name]
        if "r3" in name:
            assert message == ""
        else:
            assert kind is Tripped and message.startswith("checks.logp_gap: step 1: sampler and trainer differ by ")
    return {name: training.only_run(cfg) for name, cfg in cfgs.items()}


def test_a_disturbed_sampler_is_far_from_the_trainer_and_a_replay_of_its_routes_brings_it_back(runs) -> None:
    """The fixture has shown that the check logp_gap stops these runs, unless it is off."""
    gaps = {name: training.metrics(run)[1]["rollout/logp_gap_mean"] for name, run in runs.items()}
    assert min(gaps["rounded"], gaps["flips"], gaps["noise"]) > 1e-3 > 1e-4 > max(gaps["flips_r3"], gaps["clean"])


@pytest.mark.parametrize("name", DISTURBED)
def test_evaluations_are_those_of_the_trained_policy_to_the_last_bit(runs, name: str) -> None:
    for file in ("eval.jsonl", "eval_outcomes.jsonl"):
        assert (runs[name] / file).read_bytes() == (runs["clean"] / file).read_bytes()
    evaluations = (runs["clean"] / "eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, 1, 2]
    sampled = [(runs[label] / "completions.jsonl").read_text() for label in (name, "clean")]
    assert sampled[0] != sampled[1], "control: the disturbance changes what is sampled for training"
