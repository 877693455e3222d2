"""Steps of the trainer in every layout against the unsharded model in float64 with torch.optim.AdamW.

The learner gets a rollout of random completions and known rewards, and takes two steps on it, each of two updates in
micro-batches of a few rows. CASES of update_reference.py choose losses, KL, importance weights and what is left out.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import update_reference
import world
from adapted import load
from lora_reference import Named
from planted_step import OF_A_TEACHER
from reference_process import Problem
from tiers import ci, nightly
from update_reference import CASES, Updated

import grpo
from engines.interface import Completion
from learner import MOMENTS, Learner
from model.batches import Rollout
from parallel_setup import Parallel
from runlog.log import RunLog
from runlog.progress import Heartbeat, StepTimer
from weights.policy import Policy

pytestmark = [pytest.mark.device, pytest.mark.xdist_group("on_device")]
# What a layout does to gradients is in test_lora.py, in more of them.
LAYOUTS = ["TP1", "EP2", ci("TP2_EP2_DP2"), *(nightly(name) for name in world.LAYOUTS if name not in world.FEW)]
KIND = "qwen3_moe"
TOLERANCE = 1e-3  # relative, of a moment to its largest element; measured 2e-4 in the fourth update, 4e-5 in the second
OF_FACTORS = 5e-3  # of the learning rate, in the mean: AdamW's sign of a gradient near 0 is undecided; measured 1.6e-3


def steps(parallel: Parallel, path: Path, factors: Named, batch: Rollout, updates: dict[str, Updated]) -> dict:
    """For each case the largest errors of what this rank can see of the step."""
    return {case: _errors(parallel, path, factors, batch, case, expected) for case, expected in updates.items()}


def _errors(
    parallel: Parallel, path: Path, factors: Named, batch: Rollout, case: str, expected: Updated
) -> dict[str, float]:
    cfg = update_reference.config(path, case)
    model, arch = load(path, parallel)
    policy = Policy.on(cfg, arch, parallel, model)
    policy.load_(factors)
    learner = Learner(cfg, policy, pad_token=0)
    if cfg.loss.teacher:
        learner.learn_from(update_reference.teacher_of(factors).items())
    advantages = grpo.group_advantages(batch.rewards, cfg.loss.advantage)
    timer = StepTimer(Heartbeat(0, RunLog(cfg, 0)), 0, parallel.device)
    own, routes = range(parallel.rank, len(batch.prompts), parallel.world_size), iter(update_reference.routes_of(batch))
    by_prompt = [[Completion([], [], "stop", next(routes)) for _ in group] for group in batch.rewards]
    completions = [by_prompt[prompt] for prompt in own]  # those that this rank sampled
    learner.update(batch, completions, advantages.flatten(), 0, timer)
    metrics = learner.update(batch, completions, advantages.flatten(), 1, timer)
    tensors, _ = parallel.gather_objects(learner.state())[0]  # rank 0 alone gets them
    whole = {name: tensor for part in tensors.values() for name, tensor in part.items()}
    errors = {key: abs(metrics[key] / value - 1) for key, value in expected.metrics.items()}
    for moment in MOMENTS:
        of_moment = getattr(expected, moment)
        errors[moment] = max(_relative(whole[f"{name}.{moment}"], value) for name, value in of_moment.items())
    gaps = [(whole[name] - value).abs().mean() / cfg.optim.lr for name, value in expected.factors.items()]
    return errors | {"factors": float(max(gaps))}


def planted(parallel: Parallel, path: Path, factors: Named, batch: Rollout, updates: dict[str, Updated]) -> dict:
    """For each fault in the teacher's part the largest error of the steps that it changes."""
    largest = {}
    for name, (case, plant) in OF_A_TEACHER.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            errors = _errors(parallel, path, factors, batch, case, updates[case])
        largest[name] = max(error for key, error in errors.items() if key != "factors")
    return largest


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def everywhere(problem: Problem) -> Callable[[str], list[dict]]:
    """A function that takes the steps in a layout once, on every rank."""
    args = problem.paths[KIND], problem.references[KIND].factors, problem.batch, problem.updates
    return functools.cache(lambda layout: world.in_layouts([layout], steps, *args)[layout])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_the_unsharded_model_with_torchs_adamw(layout: str, case: str, everywhere) -> None:
    for rank in everywhere(layout):
        errors = dict(rank[case])
        assert errors.pop("factors") < OF_FACTORS, rank[case]
        assert max(errors.values()) < TOLERANCE, rank[case]


@pytest.fixture(scope="module")
def with_faults(problem: Problem) -> Callable[[str], dict[str, float]]:
    args = problem.paths[KIND], problem.references[KIND].factors, problem.batch, problem.updates
    return functools.cache(lambda layout: world.in_layouts([layout], planted, *args)[layout][0])


@pytest.mark.parametrize("fault", OF_A_TEACHER)
@pytest.mark.parametrize("layout", ["TP1"])
def test_each_fault_in_the_part_of_a_teacher_changes_the_steps(layout: str, fault: str, with_faults) -> None:
    """Negative control: the comparison above sees every line of what a teacher adds to a step."""
    assert with_faults(layout)[fault] > 10 * TOLERANCE
