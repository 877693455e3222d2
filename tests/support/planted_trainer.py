"""Named faults of the trainer: rewards, policy, questions, the state that ranks share, and checkpoints.

The names are in FAULTS at the end. Functions that tests use without a name belong to no fault, or count the calls of
one run.
"""

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from planted_step import forget_moments
from planting import Plant, after, before, instead
from pytest import MonkeyPatch
from torch import Tensor

import data_gsm8k
import grpo
import lora_megatron
import reward_gsm8k
from learner import MOMENTS, Learner
from model.batches import MicroBatch
from parallel_setup import Parallel
from tasks.question_files import Question
from weights import checkpoint, huggingface

# ------------------------------------------------------------------------------------------------ rewards, policy


def rewards_fall(patch: MonkeyPatch) -> None:
    """Every reward is 1 in the first two steps, and 0 afterwards."""
    updates = itertools.count()
    done = [0]
    before(Learner, "update", lambda *_: done.append(next(updates) + 1))(patch)
    instead(reward_gsm8k, "score", lambda *_: float(done[-1] < 2))(patch)


def twelfth_gradient_is_large(patch: MonkeyPatch) -> None:
    calls = itertools.count(1)

    def grow(_: None, parallel: Parallel, parameters: list) -> None:
        factor = 1000 if next(calls) == 12 else 1
        for parameter in parameters:
            parameter.grad *= factor

    after(Parallel, "sync_gradients_", grow)(patch)


def sharpened(factor: float) -> Plant:
    """The head of sampler and trainer has logits that are larger by this factor."""

    @torch.no_grad()
    def sharpen(_: None, model: torch.nn.Module, *__) -> None:
        model.output_layer.weight.mul_(factor)

    return after(huggingface, "load", sharpen)


@torch.no_grad()
def fill_b(adapters: dict, *_) -> dict:
    for adapter in adapters.values():
        adapter.B.fill_(0.01)
    return adapters


@torch.no_grad()
def leak(metrics: dict, learner: Learner, *_) -> dict:
    """The noise of a push stays in the weights of the trainer, so noise would accumulate."""
    learner.policy.model.decoder.layers[-1].input_layernorm.weight.add_(0.01)
    return metrics


@torch.no_grad()
def route_natively(real: Callable, learner: Learner, micro: MicroBatch) -> Tensor:
    """The reference pass does not replay the routes."""
    if any(adapter.enabled for adapter in learner.policy.adapters.values()):
        return real(learner, micro)
    return learner.policy.logprobs(micro).logp


# ------------------------------------------------------------------------------------------------ questions


def asks_held_out_by(method: str) -> Plant:
    """The data are split correctly, but a question of the held-out part is asked."""

    def plant(patch: MonkeyPatch) -> None:
        loaded = []

        def note(questions: data_gsm8k.Questions, *_) -> data_gsm8k.Questions:
            """The held-out questions are loaded last."""
            loaded.append(questions)
            return questions

        after(data_gsm8k, "load", note)(patch)
        after(data_gsm8k.Questions, method, lambda asked, *_: [*asked[:-1], loaded[-1][0]] if loaded else asked)(patch)

    return plant


def another_question(rank: int | None = None) -> Plant:
    """The last question is another one."""
    return after(
        data_gsm8k,
        "read",
        lambda found, data, split: (
            [*found[0][:-1], Question.worked(f"What is 1 + 1 in {split}?", "#### 2")],
            *found[1:],
        ),
        rank,
    )


# ------------------------------------------------------------------------------------------------ between ranks


def one_gradient_not_summed(is_expert: bool) -> Plant:
    """On every rank, the gradient of one factor is not summed."""

    def sync(real: Callable, parallel: Parallel, parameters: list) -> None:
        of_kind = [p for p in parameters if p.is_expert == is_expert]
        left_out = [id(p) for p in of_kind[1:2]]  # a B: the gradient of every A is 0 at first
        real(parallel, [p for p in parameters if id(p) not in left_out])

    return instead(Parallel, "sync_gradients_", sync)


@torch.no_grad()
def drift(metrics: dict, learner: Learner, *_) -> dict:
    next(f for name, f in learner.policy.factors.items() if name.endswith("linear_qkv.A")).view(-1)[0] += 1e-3
    return metrics


@torch.no_grad()
def reverse_a_router(_: None, model: torch.nn.Module, *__) -> None:
    """The sum of its elements stays the same."""
    weight = model.decoder.layers[-1].mlp.router.weight
    weight.copy_(weight.flip(0))


# ------------------------------------------------------------------------------------------------ checkpoints


def in_the_second_save(change: Callable[[dict, dict], tuple[dict, dict]]) -> Plant:
    """What Learner.state returns is changed, from the second update on."""
    return after(Learner, "state", lambda found, learner: change(*found) if learner.optimizer_steps > 1 else found)


def changed(tensors: dict, part: str, change: Callable[[Tensor], Tensor]) -> dict:
    """The tensors with ``part`` in their name are changed."""
    return tensors | {name: change(value).contiguous() for name, value in tensors.items() if part in name}


def adapter_remade(part: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return in_the_second_save(
        lambda tensors, counts: (tensors | {"adapter": changed(tensors["adapter"], part, change)}, counts)
    )


def exchange(tensors: dict, counts: dict) -> tuple[dict, dict]:
    exchanged = {}
    for name, moment in tensors["optimizer"].items():
        factor, _, kind = name.rpartition(".")
        exchanged[f"{factor}.{MOMENTS[1 - MOMENTS.index(kind)]}"] = moment
    return tensors | {"optimizer": exchanged}, counts


def write_doubled(real: Callable, tensors: dict, path: Path) -> None:
    """The bytes are wrong, and the checksum of the file is that of the wrong bytes."""
    wrong = "step-000002" in str(path) and path.stem == "adapter"
    real(changed(tensors, next(iter(tensors)), lambda value: 2 * value) if wrong else tensors, path)


@torch.no_grad()
def restore_without_adapters(real: Callable, learner: Learner, *args) -> None:
    before = [factor.clone() for factor in learner.parameters]
    real(learner, *args)
    for factor, value in zip(learner.parameters, before, strict=True):
        factor.copy_(value)


MORE = {"more": torch.zeros(3)}
FAULTS: dict[str, Plant] = {
    "every reward is 0": instead(reward_gsm8k, "score", lambda *_: 0.0),
    "adapters do not start at 0": after(lora_megatron, "attach", fill_b),
    "a loss metric is not finite": after(
        grpo, "policy_loss", lambda result, *_: (result[0], result[1] | {"ppo_kl": torch.tensor(float("nan"))})
    ),
    "the advantages are not finite": after(grpo, "group_advantages", lambda advantages, *_: advantages / 0),
    "the KL has the wrong sign": after(grpo, "kl", lambda value, *_: -value),
    "noise stays in the trainer": after(Learner, "update", leak),
    "one token has all the probability": sharpened(1e4),
    "the reference has its adapters on": instead(lora_megatron, "disabled", lambda *_: contextlib.nullcontext()),
    "the reference takes other routes": instead(Learner, "_logp", route_natively),
    "every step asks the same questions": instead(
        data_gsm8k.Questions, "pick", lambda real, questions, step, count: real(questions, 0, count)
    ),
    "the held-out file is trained on": instead(
        data_gsm8k, "load", lambda real, data, _, *rest, **named: real(data, "test", *rest, **named)
    ),
    "held-out questions are asked": asks_held_out_by("pick"),
    "held-out questions are asked in a further round": asks_held_out_by("pick_more"),
    "another question": another_question(),
    "another question on rank 1": another_question(rank=1),
    "a gradient is not summed over data ranks": one_gradient_not_summed(False),
    "an expert's gradient is not summed over its copies": one_gradient_not_summed(True),
    "a factor drifts on rank 1": after(Learner, "update", drift, rank=1),
    "a router has another order on rank 1": after(huggingface, "load", reverse_a_router, rank=1),
    "B is 0 in the checkpoint": adapter_remade(".B", torch.zeros_like),
    "experts have another order in the checkpoint": adapter_remade(".experts.", lambda value: value.flip(0)),
    "moments are exchanged in the checkpoint": in_the_second_save(exchange),
    "a tensor too many in the checkpoint": in_the_second_save(
        lambda tensors, counts: (tensors | {"adapter": tensors["adapter"] | MORE}, counts)
    ),
    "another count in the checkpoint": in_the_second_save(lambda tensors, _: (tensors, {"optimizer_steps": 7})),
    "a wrong number in a file of the checkpoint": instead(checkpoint, "save_file", write_doubled),
    "moments are not restored": after(Learner, "restore", lambda _, learner, *__: forget_moments(learner)),
    "adapters are not restored": instead(Learner, "restore", restore_without_adapters),
    "the step count is not restored": after(
        Learner, "restore", lambda _, learner, *__: setattr(learner, "optimizer_steps", 0)
    ),
}
