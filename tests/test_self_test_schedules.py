"""The self-test on schedules: it finds each planted fault of rate, noise and order, and blames no legitimate run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from planting import Plant, instead

import aqn
import config
import learner
from checks import self_test_schedules
from data_gsm8k import Questions
from inputs.config_rules import OTHER_RULES

TINY = str(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")


def in_file_order(_: Callable, questions: Questions, step: int, count: int) -> list:
    return [questions[place % len(questions)] for place in range(step * count, (step + 1) * count)]


def noises(change: Callable[..., dict]) -> Plant:
    return instead(aqn, "perturb", lambda real, *args, **keys: real(*args, **keys | change(**keys)))


CALLS = itertools.count()
SCHEDULES = {  # fault: how it is planted, the check that must find it
    "questions in the order of the file": (instead(Questions, "pick", in_file_order), "order"),
    "questions shuffled only within a step": (
        instead(Questions, "pick", lambda real, questions, step, count: random.Random(step).sample(
            in_file_order(real, questions, step, count), count)), "order",
    ),
    "one order for all epochs": (
        instead(Questions, "pick", lambda real, questions, step, count: real(
            questions, step % (len(questions) // count), count)), "order",
    ),
    "an order that counts calls, and so starts again at a resume": (
        instead(Questions, "pick", lambda real, questions, step, count: real(questions, next(CALLS), count)), "order",
    ),
    "a rate that falls twice as fast": (
        instead(learner, "learning_rate", lambda real, optim, step, steps: real(
            optim, min(2 * step, steps - 1), steps)), "rate",
    ),
    "a rate that falls one step late": (
        instead(learner, "learning_rate", lambda real, optim, step, steps: real(
            optim, max(0, step - 1), steps)), "rate",
    ),
    "noise that grows": (
        instead(aqn, "sigma_at", lambda real, step, steps, **keys: real(steps - 1 - step, steps, **keys)), "sigma",
    ),
    "stages one step late": (
        instead(aqn, "sigma_at", lambda real, step, steps, **keys: real(max(0, step - 1), steps, **keys)), "sigma",
    ),
    "the same noise in each step": (noises(lambda **_: {"step": 0}), "noise"),
    "the same noise in every hundredth step": (noises(lambda step, **_: {"step": step % 100}), "noise"),
    "the same noise for each seed": (noises(lambda **_: {"seed": 0}), "noise"),
    "noise of another size": (noises(lambda sigma, **_: {"sigma": 1.05 * sigma}), "noise"),
    "the same noise on each norm": (instead(aqn, "derive_seed", lambda real, *key: real(*key[:-1])), "noise"),
}  # fmt: skip
FALLING = ("optim.decay=cosine", "optim.warmup_steps=7", "aqn.schedule=qerl", "train.steps=3000", "train.seed=5")


def findings_on_schedules(*changes: str) -> self_test_schedules.Findings:
    findings = self_test_schedules.Findings()
    cfg, _ = config.resolve_config(TINY, [*FALLING, *changes], rules=OTHER_RULES)
    self_test_schedules.schedules(cfg, findings)
    return findings


@pytest.mark.parametrize("fault", SCHEDULES)
def test_a_fault_of_a_schedule_is_found_by_its_check(fault: str, monkeypatch) -> None:
    plant, check = SCHEDULES[fault]
    plant(monkeypatch)
    findings = findings_on_schedules()
    assert [name for name, (good, _) in findings.items() if not good] == [check], findings


LEGITIMATE = [
    ("train.steps=1", "aqn.schedule=constant"),
    ("train.steps=1000000000", "aqn.num_stages=1000000"),
    ("train.steps=7", "optim.min_lr_ratio=0", "aqn.num_stages=100"),  # as many steps of warm-up
    ("aqn.num_stages=2", "aqn.schedule=paper", "optim.decay=linear"),
    ("aqn.sigma_start=1e-4", "aqn.sigma_end=1", "optim.decay=constant"),
    ("data.num_train=1", "rollout.prompts_per_step=1", "optim.prompts_per_update=1"),
    ("data.num_train=4093",),  # a prime number
    ("data.num_train=1000000", "rollout.prompts_per_step=8", "optim.prompts_per_update=8"),
]


@pytest.mark.parametrize("changes", LEGITIMATE, ids=" ".join)
def test_no_schedule_of_an_unusual_but_legitimate_configuration_is_blamed(changes: tuple[str, ...]) -> None:
    findings = findings_on_schedules(*changes)
    assert findings.good() and {"order", "rate"} <= findings.keys(), findings
