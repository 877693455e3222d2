"""Each planted fault of the benchmark does what it says, and a fault without a place to go is an error."""

import json
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import agents
import pytest
import torch
from planting import instead
from source import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import planted_fault
from planted_fault import FAULTS

from lab import curves


def right_and_wrong(name: str) -> tuple[Callable, Callable]:
    """The function of the method, and what the fault puts in its place."""
    place, fault = FAULTS[name]
    right = pkgutil.resolve_name(place)
    return right, fault(right)


def test_inverted_weights_are_the_reciprocals_and_rounded_down_weights_are_never_larger() -> None:
    """With 3 bits the largest weight of a group is 3 scales, so the scales of the two groups are 1 and 2."""
    old, sampled = torch.tensor([[0.2, 0.3]]).log(), torch.tensor([[0.1, 0.6]]).log()
    given = old, sampled, torch.ones(1, 2), "token", 1e3
    ratios = [rollout_weights(*given)[0].tolist() for rollout_weights in right_and_wrong("inverted_weights")]
    assert ratios == [pytest.approx([2.0, 0.5]), pytest.approx([0.5, 2.0])]
    weight = torch.tensor([[3.0, 1.4, 1.6, -0.2, -6.0, 3.2]])
    found = [rounded(weight, 3, 4).tolist() for rounded in right_and_wrong("rounded_down")]
    assert found == [[[3.0, 1.0, 2.0, 0.0, -6.0, 4.0]], [[3.0, 1.0, 1.0, -1.0, -6.0, 2.0]]]


def test_a_reversed_clip_stops_what_should_pass_and_passes_what_should_be_stopped() -> None:
    """Ratios 1.5, limit 1.2. PPO has the losses 1.5 for A = -1, and -1.2 for A = 1, where a limit has no gradient."""
    found = []
    for policy_loss in right_and_wrong("reversed_clip"):
        logp = torch.tensor([[0.5], [0.5]]).log().requires_grad_()
        old = logp.detach() - torch.tensor(1.5).log()
        loss, measured = policy_loss(logp, old, torch.tensor([-1.0, 1.0]), torch.ones(2, 1), num_tokens=1)
        loss.backward()
        assert measured["policy_loss"] == loss and measured["clip_frac"] == 1
        found.append([loss.item(), *logp.grad.flatten().tolist()])
    assert found == [pytest.approx([1.5 - 1.2, 1.5, 0.0]), pytest.approx([1.2 - 1.5, 0.0, -1.5])]


def test_foreign_routes_are_those_of_the_token_before() -> None:
    routes, found = torch.arange(2 * 3).view(2, 3, 1, 1), []  # 2 rows of 3 tokens
    for replaying in right_and_wrong("foreign_routes"):
        replay = SimpleNamespace(
            uses=[], parallel=SimpleNamespace(tensor=1, tensor_rank=0)
        )  # of a model without layers
        with replaying(replay, routes, torch.ones(2, 3)):
            found.append(replay.routes.view(3, 2).t().tolist())  # time-major
    assert found == [[[0, 1, 2], [3, 4, 5]], [[2, 0, 1], [5, 3, 4]]]


def test_a_fault_that_cannot_be_planted_is_refused_in_one_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planted_fault.main(["nothing", "configs/bench.yaml"]) == 2
    assert "FAULT: found 'nothing'; needed: one of inverted_weights, " in capsys.readouterr().err
    monkeypatch.delattr("routing_replay.RoutingReplay.replaying")
    assert planted_fault.main(["foreign_routes", "configs/bench.yaml"]) == 2
    assert "error: routing_replay.RoutingReplay.replaying: not there (" in capsys.readouterr().err


def train(folder: Path, *script: str, bits: int = 3) -> tuple[str, str, list[dict]]:
    """Two steps of configs/bench.yaml on a model that has hardly learned.  -> command, metrics, evaluations"""
    given = [
        "configs/bench.yaml", "name=x", f"model.path={folder / 'model'}", "tiny_model.warm_start_steps=20",
        "rollout.prompts_per_step=4", "rollout.max_new_tokens=24", f"rollout.round_bits={bits}", "replay.mode=r3",
        "optim.prompts_per_update=4", "optim.warmup_steps=0", "optim.lr=0.05", "loss.entropy_coef=0.1", "train.steps=2",
        "lora.targets=[linear_fc1,linear_fc2]", "eval.num_questions=64", "eval.every=1",
        "checks.off=[logp_gap, adapters]", f"train.out_dir={folder / f'{script[-1]}{bits}'}",
    ]  # fmt: skip
    log, no_curves = folder / f"{script[-1]}{bits}.log", instead(curves, "draw_curves", lambda *_: None)
    code, text = agents.start(1, *script, *given, log=log, plant=no_curves, light=False).end()
    assert code == 0, text
    (run,) = (folder / f"{script[-1]}{bits}").glob("x-*")
    command, metrics, evals = ((run / name).read_text() for name in ("command.txt", "metrics.jsonl", "eval.jsonl"))
    return command, metrics, [json.loads(line) | {"step": 0} for line in evals.splitlines()]


@pytest.mark.nightly
def test_faults_of_pushes_and_evaluations_do_in_a_training_what_they_say(tmp_path: Path) -> None:
    """LoRA is on the experts only, so without them all evaluations are those of the base model.

    Experts whose weights are rounded are pushed by name, and others as stacks, so both are tried.
    """
    _, metrics, right = train(tmp_path, "train_grpo.py")
    for bits in (0, 3):
        command, _, lost = train(tmp_path, "benchmarks/planted_fault.py", "lost_experts", bits=bits)
        assert right[0] == lost[0] == lost[1] == lost[2] and right[0] != right[1]
    assert command.startswith(
        "torchrun --nnodes=1 --nproc_per_node=1 benchmarks/planted_fault.py lost_experts configs/bench.yaml name=x "
    )
    _, same_metrics, altered = train(tmp_path, "benchmarks/planted_fault.py", "altered_evaluation")
    assert metrics == same_metrics  # the rounded policy is evaluated, and nothing else changes
    assert right[0] == altered[0] and right[1:] != altered[1:]
