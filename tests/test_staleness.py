"""rollout.staleness: the policy of K steps ago samples, that policy is judged, and a resume repeats it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
import training
from refused import refusal

from facts.exits import InputError, Tripped
from learner import Learner

TINY = Path(__file__).resolve().parent.parent / "configs" / "tiny_cpu.yaml"
STALE = {"loss__importance": "token", "train__steps": 4, "train__completions_logged": 4, "train__keep_last": 9}


def completions(run: Path) -> list[str]:
    """The logged completions of each step."""
    by_step: dict[str, list[str]] = {}
    for line in (run / "completions.jsonl").read_text().splitlines():
        step, rest = line.split(", ", 1)
        by_step.setdefault(step, []).append(rest)
    return ["\n".join(lines) for lines in by_step.values()]


def test_the_policy_of_k_steps_ago_samples(model, tmp_path) -> None:
    """Against runs that never move, and against the checkpoints: draws depend on the step, not on the policy."""

    def run(name: str, **changes) -> tuple[str, training.Config]:
        return "EP2", training.config(model, tmp_path / name, **STALE | changes)

    runs = training.run_all(
        {
            "frozen": run("frozen", optim__lr=1e-30, checks__off=("adapters", "impossible")),
            "0": run("0"),
            "1": run("1", rollout__staleness=1, train__checkpoint_every=1),
            "2": run("2", rollout__staleness=2, train__checkpoint_every=1),
        }
    )
    asked = {name: completions(path) for name, path in runs.items()}
    for name, first in (("0", 1), ("1", 2), ("2", 3)):
        same = [one == other for one, other in zip(asked[name], asked["frozen"], strict=True)]
        assert same == [True] * first + [False] * (4 - first), (name, same)
    # The first update is the same one, so step 2 of staleness 0 samples with the policy that step 3 of staleness 1 has.
    adapters = {step: training.whole(runs["1"], step, "adapter") for step in range(1, 5)}
    for step in (2, 3, 4):
        behind = training.whole(runs["1"], step, "adapter-behind-1")
        assert all(torch.equal(behind[name], adapters[step - 1][name]) for name in behind)
    kinds = [
        sorted(p.stem for p in training.checkpoint_of(runs["2"], step).glob("adapter*.safetensors")) for step in (1, 4)
    ]
    assert kinds == [["adapter", "adapter-behind-1"], ["adapter", "adapter-behind-1", "adapter-behind-2"]]
    for name in ("0", "1", "2"):
        for row in training.metrics(runs[name]):
            assert row["rollout/logp_gap_max"] < 1e-4, row  # judged with the policy that sampled
            moved = abs(row["rollout/importance_mean"] - 1) > 1e-5
            assert moved == (name != "0" and row["step"] > 1), (name, row)


def test_a_sampler_that_has_another_policy_than_said_stops_the_run(model, tmp_path) -> None:
    """Current instead of old factors in the push alone: the gap, judged with the old ones, shows it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real, calls = Learner.sampling_policy, []

        def policy(learner: Learner) -> contextlib.AbstractContextManager:
            calls.append(None)
            return contextlib.nullcontext() if len(calls) % 2 else real(learner)  # the push comes first

        patch.setattr(Learner, "sampling_policy", policy)

    cfg = training.config(model, tmp_path, **STALE | {"rollout__staleness": 1})
    for kind, message in training.raised(plant, cfg, "TP1"):
        assert kind is Tripped and "checks.logp_gap: step 2: sampler and trainer differ by" in message, message


def test_a_checkpoint_without_the_older_factors_is_refused(model, tmp_path) -> None:
    changes = STALE | {"train__checkpoint_every": 1, "train__steps": 2, "rollout__staleness": 1}
    run = training.run_all({"": ("TP1", training.config(model, tmp_path / "a", **changes))})[""]
    folder = training.checkpoint_of(run, 2)
    (folder / "adapter-behind-1.safetensors").unlink()
    sums = json.loads((folder / "checksums.json").read_text())
    del sums["adapter-behind-1.safetensors"]
    (folder / "checksums.json").write_text(json.dumps(sums))
    cfg = training.config(model, tmp_path / "b", **changes | {"train__resume": str(run), "train__steps": 3})
    assert training.raised(lambda patch: None, cfg) == [
        (
            InputError,
            "checkpoint: found adapter, optimizer, optimizer_steps 2; needed: adapter, optimizer, "
            "adapter-behind-1 and a number of steps",
        )
    ]


def test_old_samples_need_weights_or_the_word_that_there_are_none() -> None:
    assert refusal(TINY, "rollout.staleness=1") == (
        "rollout.staleness: 1 trains on samples of an older policy; needed: a loss.importance, which corrects for it, "
        "or loss.importance uncorrected"
    )
    assert refusal(TINY, "loss.importance=uncorrected") == (
        "loss.importance: uncorrected is for rollout.staleness above 0; needed: none"
    )
