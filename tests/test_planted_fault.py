"""Each planted fault of the benchmark does what it says, at a place that still exists."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from source import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import planted_fault


@pytest.fixture
def sound_and_faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The module as other tests have it, and the one with the fault of the test's parameter."""
    name = planted_fault.FAULTS[request.param][0]
    sound = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, sound)  # puts it back afterwards
    planted_fault.plant(request.param)
    assert sys.modules[name] is not sound and sys.modules[name].__doc__ == sound.__doc__
    return sound, sys.modules[name]


@pytest.mark.parametrize("sound_and_faulty", ["inverted_weights"], indirect=True)
def test_inverted_weights_are_the_reciprocals(sound_and_faulty: tuple[ModuleType, ModuleType]) -> None:
    old, sampled, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -1.9]]), torch.ones(1, 2)
    weights = [module.rollout_weights(old, sampled, mask, "token", 1e3) for module in sound_and_faulty]
    assert torch.allclose(weights[0] * weights[1], mask) and not torch.allclose(*weights)


@pytest.mark.parametrize("sound_and_faulty", ["reversed_clip"], indirect=True)
def test_a_reversed_clip_stops_what_should_pass(sound_and_faulty: tuple[ModuleType, ModuleType]) -> None:
    """A ratio of 1.5 with a bad completion: PPO corrects it fully, the fault clips the gradient away."""
    gradients = []
    for module in sound_and_faulty:
        logp = torch.tensor([[0.5]]).log().requires_grad_()
        old = torch.tensor([[0.5 / 1.5]]).log()
        loss, _ = module.policy_loss(logp, old, torch.tensor([-1.0]), torch.ones(1, 1), dual_clip=0)
        loss.backward()
        gradients.append(logp.grad.item())
    assert gradients == pytest.approx([1.5, 0.0])


@pytest.mark.parametrize("sound_and_faulty", ["foreign_routes"], indirect=True)
def test_foreign_routes_are_those_of_the_token_before(sound_and_faulty: tuple[ModuleType, ModuleType]) -> None:
    routes = torch.arange(2 * 3).view(2, 3, 1, 1)  # 2 rows of 3 tokens
    found = []
    for module in sound_and_faulty:
        replay = object.__new__(module.RoutingReplay)
        replay.parallel = SimpleNamespace(tensor=1, tensor_rank=0)
        replay.uses = [0]
        with replay.replaying(routes, torch.ones(2, 3)):
            found.append(replay.routes.flatten().view(3, 2).T.tolist())  # (tokens, rows) -> (rows, tokens)
            replay.uses = [1]
    assert found == [[[0, 1, 2], [3, 4, 5]], [[2, 0, 1], [5, 3, 4]]]


@pytest.mark.parametrize("sound_and_faulty", ["rounded_down"], indirect=True)
def test_rounded_down_weights_are_never_above_the_right_ones(sound_and_faulty: tuple[ModuleType, ModuleType]) -> None:
    """With 3 bits and a largest weight of 3 the scale is 1."""
    weight = torch.tensor([[3.0, 1.4, 1.6, -0.2]])
    found = [module.rounded(weight, 3, 4).tolist() for module in sound_and_faulty]
    assert found == [[[3.0, 1.0, 2.0, 0.0]], [[3.0, 1.0, 1.0, -1.0]]]


def test_an_unknown_fault_is_refused_in_one_line(capsys: pytest.CaptureFixture) -> None:
    assert planted_fault.main(["nothing", "configs/bench.yaml"]) == 2
    assert "FAULT: found 'nothing'; needed: one of inverted_weights, " in capsys.readouterr().err
    assert planted_fault.main([]) == 2


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
