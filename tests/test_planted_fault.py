"""Each planted fault of the benchmark does what it says, at a place that still exists."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from source import ROOT

import grpo

sys.path.insert(0, str(ROOT / "benchmarks"))

import planted_fault


@pytest.fixture
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with the fault of the test's parameter, beside the sound one that other tests have imported."""
    name = planted_fault.FAULTS[request.param][0]
    monkeypatch.setitem(sys.modules, name, importlib.import_module(name))  # puts the sound one back afterwards
    planted_fault.plant(request.param)
    return sys.modules[name]


@pytest.mark.parametrize("faulty", sorted(planted_fault.FAULTS), indirect=True)
def test_every_fault_has_its_place_and_changes_only_that(faulty: ModuleType) -> None:
    sound = importlib.util.find_spec(faulty.__name__)
    assert Path(faulty.__file__) == Path(sound.origin) and faulty.__doc__ == sys.modules[faulty.__name__].__doc__


@pytest.mark.parametrize("faulty", ["inverted_weights"], indirect=True)
def test_inverted_weights_are_the_reciprocals(faulty: ModuleType) -> None:
    old, sampled, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -1.9]]), torch.ones(1, 2)
    weights = [module.rollout_weights(old, sampled, mask, "token", 1e3) for module in (grpo, faulty)]
    assert torch.allclose(weights[0] * weights[1], mask) and not torch.allclose(*weights)


@pytest.mark.parametrize("faulty", ["reversed_clip"], indirect=True)
def test_a_reversed_clip_stops_what_should_pass(faulty: ModuleType) -> None:
    """A ratio of 1.5 with a bad completion: PPO corrects it fully, the fault clips the gradient away."""
    gradients = []
    for module in (grpo, faulty):
        logp = torch.tensor([[0.5]]).log().requires_grad_()
        old = torch.tensor([[0.5 / 1.5]]).log()
        loss, _ = module.policy_loss(logp, old, torch.tensor([-1.0]), torch.ones(1, 1), dual_clip=0)
        loss.backward()
        gradients.append(logp.grad.item())
    assert gradients == pytest.approx([1.5, 0.0])


def test_an_unknown_fault_is_refused_in_one_line(capsys: pytest.CaptureFixture) -> None:
    assert planted_fault.main(["nothing", "configs/bench.yaml"]) == 2
    assert "FAULT: found 'nothing'; needed: one of inverted_weights, " in capsys.readouterr().err
    assert planted_fault.main([]) == 2


def train(folder: Path, *script: str) -> dict[str, str]:
    """Two steps of configs/bench.yaml on a random model.  -> file of the run -> its text"""
    given = [
        "configs/bench.yaml", "name=x", f"model.path={folder / 'model'}", "tiny_model.warm_start_steps=0",
        "rollout.prompts_per_step=4", "rollout.max_new_tokens=8", "rollout.round_bits=3", "replay.mode=r3",
        "optim.prompts_per_update=4", "optim.warmup_steps=0", "optim.lr=0.05", "loss.entropy_coef=0.1", "train.steps=2",
        "eval.num_questions=16", "checks.logp_gap=off", "checks.adapters=off", f"train.out_dir={folder / script[-1]}",
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


@pytest.mark.parametrize(
    ("fault", "differs"),
    [("foreign_routes", "metrics.jsonl"), ("lost_experts", "metrics.jsonl"), ("altered_evaluation", "eval.jsonl")],
)
def test_a_training_with_a_fault_differs_and_its_command_names_the_fault(
    fault: str, differs: str, sound: tuple[Path, dict[str, str]]
) -> None:
    folder, right = sound
    wrong = train(folder, "benchmarks/planted_fault.py", fault)
    assert right[differs] != wrong[differs]
    assert wrong["command.txt"].startswith(f"python benchmarks/planted_fault.py {fault} configs/bench.yaml name=x ")
    assert right["command.txt"].startswith("python train_grpo.py configs/bench.yaml ")
