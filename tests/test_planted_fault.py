"""Each planted fault of the benchmark does what it says, and a fault without a place to go is an error."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from source import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import planted_fault

import routing_replay

Pair = tuple[Callable, Callable]


@pytest.fixture
def right_and_wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The function of the method, and what stands in its place with the fault of the test's parameter."""
    place, _ = planted_fault.FAULTS[request.param]
    right = pkgutil.resolve_name(place)
    monkeypatch.setattr(place, right)  # puts it back afterwards
    planted_fault.plant(request.param)
    return right, pkgutil.resolve_name(place)


@pytest.mark.parametrize("right_and_wrong", ["inverted_weights"], indirect=True)
def test_inverted_weights_are_the_reciprocals(right_and_wrong: Pair) -> None:
    old, sampled, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -1.9]]), torch.ones(1, 2)
    weights = [rollout_weights(old, sampled, mask, "token", 1e3) for rollout_weights in right_and_wrong]
    assert torch.allclose(weights[0] * weights[1], mask) and not torch.allclose(*weights)


@pytest.mark.parametrize("right_and_wrong", ["reversed_clip"], indirect=True)
def test_a_reversed_clip_stops_what_should_pass_and_passes_what_should_be_stopped(right_and_wrong: Pair) -> None:
    """Ratios of 1.5, limit 1.2. PPO has the losses 1.5 for A = -1, and -1.2 for A = 1, where a limit has no gradient."""
    found = []
    for policy_loss in right_and_wrong:
        logp = torch.tensor([[0.5], [0.5]]).log().requires_grad_()
        old = logp.detach() - torch.tensor(1.5).log()
        loss, measured = policy_loss(logp, old, torch.tensor([-1.0, 1.0]), torch.ones(2, 1), num_tokens=1)
        loss.backward()
        assert measured["policy_loss"] == loss and measured["clip_frac"] == 1
        found.append([loss.item(), *logp.grad.flatten().tolist()])
    assert found == [pytest.approx([1.5 - 1.2, 1.5, 0.0]), pytest.approx([1.2 - 1.5, 0.0, -1.5])]


@pytest.mark.parametrize("right_and_wrong", ["foreign_routes"], indirect=True)
def test_foreign_routes_are_those_of_the_token_before(right_and_wrong: Pair) -> None:
    routes = torch.arange(2 * 3).view(2, 3, 1, 1)  # 2 rows of 3 tokens
    found = []
    for replaying in right_and_wrong:
        replay = object.__new__(routing_replay.RoutingReplay)
        replay.parallel, replay.uses = SimpleNamespace(tensor=1, tensor_rank=0), [0]
        with replaying(replay, routes, torch.ones(2, 3)):
            found.append(replay.routes.flatten().view(3, 2).T.tolist())  # (tokens, rows) -> (rows, tokens)
            replay.uses = [1]
    assert found == [[[0, 1, 2], [3, 4, 5]], [[2, 0, 1], [5, 3, 4]]]


@pytest.mark.parametrize("right_and_wrong", ["rounded_down"], indirect=True)
def test_rounded_down_weights_are_never_above_the_right_ones(right_and_wrong: Pair) -> None:
    """With 3 bits the largest weight of a group is 3 scales, so the scales of the two groups are 1 and 2."""
    weight = torch.tensor([[3.0, 1.4, 1.6, -0.2, -6.0, 3.2]])
    found = [rounded(weight, 3, 4).tolist() for rounded in right_and_wrong]
    assert found == [[[3.0, 1.0, 2.0, 0.0, -6.0, 4.0]], [[3.0, 1.0, 1.0, -1.0, -6.0, 2.0]]]


def test_a_fault_that_cannot_be_planted_is_refused_in_one_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ([], ["nothing", "configs/bench.yaml"]):
        assert planted_fault.main(given) == 2
    assert "FAULT: found 'nothing'; needed: one of inverted_weights, " in capsys.readouterr().err
    monkeypatch.delattr("routing_replay.RoutingReplay.replaying")
    assert planted_fault.main(["foreign_routes", "configs/bench.yaml"]) == 2
    assert "error: routing_replay.RoutingReplay.replaying: not there (" in capsys.readouterr().err


def train(folder: Path, *script: str) -> dict[str, str]:
    """Two steps of configs/bench.yaml on a model that has hardly learned.  -> file of the run -> its text"""
    given = [
        "configs/bench.yaml", "name=x", f"model.path={folder / 'model'}", "tiny_model.warm_start_steps=60",
        "rollout.prompts_per_step=4", "rollout.max_new_tokens=24", "rollout.round_bits=3", "replay.mode=r3",
        "optim.prompts_per_update=4", "optim.warmup_steps=0", "optim.lr=0.05", "loss.entropy_coef=0.1", "train.steps=2",
        "lora.targets=[linear_fc1,linear_fc2]", "eval.num_questions=64", "eval.every=1",
        "checks.logp_gap=off", "checks.adapters=off", f"train.out_dir={folder / script[-1]}",
    ]  # fmt: skip
    ended = subprocess.run([sys.executable, *script, *given], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = (folder / script[-1]).glob("x-*")
    return {name: (run / name).read_text() for name in ("command.txt", "metrics.jsonl", "eval.jsonl")}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a run without a fault, and its files."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder, "train_grpo.py")


def test_adapters_of_experts_that_never_arrive_leave_the_sampler_as_it_was(sound: tuple[Path, dict]) -> None:
    """With LoRA on the experts only, both evaluations after an update are those of the base model."""
    folder, right = sound
    wrong = train(folder, "benchmarks/planted_fault.py", "lost_experts")
    assert evaluations(right)[0] != evaluations(right)[1]
    assert evaluations(wrong)[0] == evaluations(wrong)[1] == evaluations(wrong)[2]
    assert wrong["command.txt"].startswith("python benchmarks/planted_fault.py lost_experts configs/bench.yaml name=x ")
    assert right["command.txt"].startswith("python train_grpo.py configs/bench.yaml ")


def test_an_altered_evaluation_is_that_of_the_rounded_policy_and_changes_nothing_else(
    sound: tuple[Path, dict],
) -> None:
    folder, right = sound
    wrong = train(folder, "benchmarks/planted_fault.py", "altered_evaluation")
    assert right["metrics.jsonl"] == wrong["metrics.jsonl"]
    first, *later = zip(evaluations(right), evaluations(wrong), strict=True)
    assert first[0] == first[1] and any(a != b for a, b in later)


def evaluations(run: dict[str, str]) -> list[dict]:
    return [json.loads(line) | {"step": 0} for line in run["eval.jsonl"].splitlines()]
