"""The self-test on schedules: it finds each planted fault of rate, noise and order, and blames no legitimate run."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import aqn
import config
import data_gsm8k
import learner
from config_rules import OTHER_RULES
from plan import self_test_schedules

TINY = str(Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml")


def picked(change: Callable[..., list]) -> Callable:
    """A data_gsm8k.Questions.pick that returns ``change(real pick, questions, step, count)``."""
    real = data_gsm8k.Questions.pick
    return lambda self, step, count: change(real, self, step, count)


def in_file_order(_: Callable, questions: data_gsm8k.Questions, step: int, count: int) -> list:
    return [questions[place % len(questions)] for place in range(step * count, (step + 1) * count)]


def shuffled_in_a_step(_: Callable, questions: data_gsm8k.Questions, step: int, count: int) -> list:
    return random.Random(step).sample(in_file_order(_, questions, step, count), count)


def drawn_anew(_: Callable, questions: data_gsm8k.Questions, step: int, count: int) -> list:
    return random.Random(step).sample(list(questions), count)


def first_epoch_again(real: Callable, questions: data_gsm8k.Questions, step: int, count: int) -> list:
    return real(questions, step % (len(questions) // count), count)


def any_seed(real: Callable, questions: data_gsm8k.Questions, step: int, count: int) -> list:
    return real(dataclasses.replace(questions, seed=0), step, count)


def by_calls() -> Callable:
    calls = itertools.count()
    return lambda real, questions, step, count: real(questions, next(calls), count)


def rates(change: Callable) -> tuple[object, str, Callable]:
    real = learner.learning_rate
    return learner, "learning_rate", lambda optim, step, steps: change(real, optim, step, steps)


def sigmas(change: Callable[[int, int], int]) -> tuple[object, str, Callable]:
    real = aqn.sigma_at
    return aqn, "sigma_at", lambda step, steps, **keys: real(change(step, steps), steps, **keys)


def noises(change: Callable[..., dict]) -> tuple[object, str, Callable]:
    real = aqn.perturb
    return aqn, "perturb", lambda *args, **keys: real(*args, **keys | change(**keys))


PICK = (data_gsm8k.Questions, "pick")
SCHEDULES = {  # fault: owner, name and stand-in of a function, the check that must find it
    "questions in the order of the file": (*PICK, picked(in_file_order), "order"),
    "questions shuffled only within a step": (*PICK, picked(shuffled_in_a_step), "order"),
    "questions drawn anew in each step": (*PICK, picked(drawn_anew), "order"),
    "one order for all epochs": (*PICK, picked(first_epoch_again), "order"),
    "one order for all seeds": (*PICK, picked(any_seed), "order"),
    "an order that counts calls, and so starts again at a resume": (*PICK, picked(by_calls()), "order"),
    "a rate that falls twice as fast": (
        *rates(lambda real, optim, step, steps: real(optim, min(2 * step, steps - 1), steps)), "rate",
    ),
    "a rate that falls one step late": (
        *rates(lambda real, optim, step, steps: real(optim, max(0, step - 1), steps)), "rate",
    ),
    "noise that grows": (*sigmas(lambda step, steps: steps - 1 - step), "sigma"),
    "stages one step late": (*sigmas(lambda step, _: max(0, step - 1)), "sigma"),
    "the same noise in each step": (*noises(lambda **_: {"step": 0}), "noise"),
    "the same noise in every hundredth step": (*noises(lambda step, **_: {"step": step % 100}), "noise"),
    "the same noise for each seed": (*noises(lambda **_: {"seed": 0}), "noise"),
    "noise of another size": (*noises(lambda sigma, **_: {"sigma": 1.05 * sigma}), "noise"),
    "the same noise on each norm": (aqn, "derive_seed", lambda *key: config.derive_seed(*key[:-1]), "noise"),
}  # fmt: skip
FALLING = ("optim.decay=cosine", "optim.warmup_steps=7", "aqn.schedule=qerl", "train.steps=3000", "train.seed=5")


def findings_on_schedules(*changes: str) -> self_test_schedules.Findings:
    findings = self_test_schedules.Findings()
    cfg, _ = config.resolve_config(TINY, [*FALLING, *changes], rules=OTHER_RULES)
    self_test_schedules.schedules(cfg, findings)
    return findings


@pytest.mark.parametrize("fault", SCHEDULES)
def test_a_fault_of_a_schedule_is_found_by_its_check(fault: str, monkeypatch) -> None:
    owner, name, stand_in, check = SCHEDULES[fault]
    monkeypatch.setattr(owner, name, stand_in)
    findings = findings_on_schedules()
    assert [name for name, (good, _) in findings.items() if not good] == [check], findings


LEGITIMATE = {
    "one step": ("train.steps=1", "aqn.schedule=constant"),
    "a billion steps": ("train.steps=1000000000", "aqn.num_stages=1000000"),
    "more stages than steps": ("train.steps=12", "aqn.num_stages=100"),
    "warm-up longer than the run": ("train.steps=5", "optim.decay=linear"),
    "warm-up as long as the run": ("train.steps=7", "optim.min_lr_ratio=0"),
    "two stages": ("aqn.num_stages=2",),
    "two of the paper's stages": ("aqn.num_stages=2", "aqn.schedule=paper"),
    "the paper's stages": ("aqn.schedule=paper", "train.steps=1234", "aqn.num_stages=7"),
    "constant noise": ("aqn.schedule=constant", "optim.decay=constant"),
    "growing noise": ("aqn.sigma_start=1e-4", "aqn.sigma_end=1"),
    "one prompt a step": ("rollout.prompts_per_step=1", "optim.prompts_per_update=1"),
    "one question": ("data.num_train=1", "rollout.prompts_per_step=1", "optim.prompts_per_update=1"),
    "a prime number of questions": ("data.num_train=4093",),
    "all questions in one step": ("data.num_train=32", "train.steps=9"),
    "a million questions": ("data.num_train=1000000", "rollout.prompts_per_step=8", "optim.prompts_per_update=8"),
}


@pytest.mark.parametrize("what", LEGITIMATE)
def test_no_schedule_of_an_unusual_but_legitimate_configuration_is_blamed(what: str) -> None:
    findings = findings_on_schedules(*LEGITIMATE[what])
    assert findings.good() and {"order", "rate"} <= findings.keys(), findings
