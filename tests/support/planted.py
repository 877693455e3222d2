"""Faults that tests plant in a forked process before it trains; each changes one place of the code."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from planting import Plant, after, before, instead
from pytest import MonkeyPatch
from torch import Tensor

import aqn
import checkpoint
import data_gsm8k
import grpo
import lora_megatron
import reward_gsm8k
import tripwires
import weight_sync
import weights_hf
from engines import torch_sampler
from engines.interface import Rule
from engines.torch_decoder import Decoder
from engines.torch_sampler import TorchSampler
from inputs.question_files import Row
from learner import MOMENTS, Learner
from parallel_setup import Parallel
from rollout import MicroBatch
from weight_sync import WeightSync

FEW = {  # a step takes about 50 ms
    "rollout__prompts_per_step": 4, "rollout__group_size": 2, "optim__prompts_per_update": 4,
    "rollout__max_new_tokens": 4, "eval__samples": 0, "eval__num_questions": 1, "train__steps": 5,
}  # fmt: skip
LARGE = {"rollout__prompts_per_step": 32, "rollout__group_size": 8, "optim__prompts_per_update": 32}
NOISE = {"aqn__schedule": "constant"}
SURE = {"checks__entropy": "off", "checks__logp_gap": "off", "checks__reward_constant": "off"}


def nothing(patch: MonkeyPatch) -> None:
    pass


def two_steps_count(patch: MonkeyPatch) -> None:
    patch.setattr(tripwires, "CONSTANT_STEPS", 2)


def two_steps_are_usual(patch: MonkeyPatch) -> None:
    patch.setattr(tripwires, "WINDOW", 2)
    patch.setattr(tripwires, "SPIKE_START", 2)


def on_rank_1(plant: Plant) -> Plant:
    return lambda patch: plant(patch) if torch.distributed.get_rank() == 1 else None


def both(first: Plant, second: Plant) -> Plant:
    return lambda patch: (first(patch), second(patch))


def rewards_fall(patch: MonkeyPatch) -> None:
    """Every reward is 1 in the first two steps, and 0 afterwards."""
    updates = itertools.count()
    done = [0]
    before(Learner, "update", lambda *_: done.append(next(updates) + 1))(patch)
    instead(reward_gsm8k, "score", lambda *_: float(done[-1] < 2))(patch)


no_reward = instead(reward_gsm8k, "score", lambda *_: 0.0)


# A random model never answers in the right form, which a tripwire would notice.
every_answer_parsable = instead(reward_gsm8k, "parsable", lambda *_: True)


def solved_after_two_steps(patch: MonkeyPatch) -> None:
    calls = itertools.count(1)
    rewards = after(reward_gsm8k, "score", lambda score, *_: score if next(calls) < 2 * 256 else 1.0)
    both(every_answer_parsable, rewards)(patch)


# ------------------------------------------------------------------------------------------------ the push


def pushed_otherwise(change: Callable[[str, Tensor], Tensor]) -> Plant:
    """Push ``change(name, tensor)`` instead of every tensor."""
    return after(weights_hf, "export", lambda stream, *_: ((name, change(name, tensor)) for name, tensor in stream))


def stacks_otherwise(change: Callable[[WeightSync, str, Tensor], Tensor]) -> Plant:
    """Push ``change(sync, name, stack)`` instead of every stack of experts."""
    return after(
        WeightSync, "_merged_stacks", lambda stream, sync: ((name, change(sync, name, value)) for name, value in stream)
    )


def without_lora(sync: WeightSync, name: str) -> Tensor:
    """A stack of experts of the base model."""
    return sync._for_engine(dict(sync._experts())[name].base.weight)


def without_update(expert: str) -> Plant:
    """The merge forgets the LoRA of one expert, as model.layers.1.mlp.experts.13 names it."""

    def merged(real: Callable, slot: weights_hf.Slot) -> Tensor:
        value = real(slot)
        for place, names in enumerate(slot.blocks):
            if names[0].startswith(f"{expert}."):
                value[place] = slot.weight[place]
        return value

    layer, _, number = expert.rpartition(".")

    def stack(sync: WeightSync, name: str, value: Tensor) -> Tensor:
        if name.startswith(f"{layer}."):
            one = slice(int(number), int(number) + 1)  # none, if the model has fewer experts
            value[one] = without_lora(sync, name)[one]
        return value

    return both(instead(weights_hf, "merged", merged), stacks_otherwise(stack))


# The merge forgets the LoRA of the routed experts of layer 1.
experts_delta_dropped = stacks_otherwise(
    lambda sync, name, value: without_lora(sync, name) if ".layers.1." in name else value
)
# The router of layer 0 is pushed with its experts in another order.
gate_permuted = pushed_otherwise(
    lambda name, tensor: tensor.roll(1, 0) if name == "model.layers.0.mlp.gate.weight" else tensor
)
adapters_never_pushed = both(
    after(weights_hf, "merged", lambda value, slot: slot.weight),
    stacks_otherwise(lambda sync, name, value: without_lora(sync, name)),
)


def nan_in_one_expert(patch: MonkeyPatch) -> None:
    """In the push of step 2."""
    broken, pushes = "model.layers.1.mlp.experts.down_proj", itertools.count()

    def change(sync: WeightSync, name: str, value: Tensor) -> Tensor:
        if name == broken and next(pushes) == 1:
            value[5] = float("nan")
        return value

    stacks_otherwise(change)(patch)


def engine_with(part: str, change: Callable[[Decoder, str, Tensor], Tensor]) -> Plant:
    """The engine takes ``change(engine, name, tensor)`` instead of every tensor with ``part`` in its name."""
    return instead(
        Decoder, "load_weights",
        lambda real, engine, stream: real(
            engine, [(name, change(engine, name, value) if part in name else value) for name, value in stream]
        ),
    )  # fmt: skip


# After its first load, the engine ignores the norms that are pushed.
engine_without_norms = engine_with(
    "norm", lambda engine, name, value: engine.slots[name].clone() if engine.ready else value
)
engine_with_larger_norms = engine_with("norm", lambda engine, name, value: value * 1.05)
noise_too_strong = instead(aqn, "_noisy", lambda real, clean, sigma, *rest: real(clean, 2 * sigma, *rest))


@torch.no_grad()
def leak(metrics: dict, learner: Learner, *_) -> dict:
    """The noise of a push stays in the weights of the trainer, so noise would accumulate."""
    learner.model.decoder.layers[1].input_layernorm.weight.add_(0.01)
    return metrics


noise_in_the_trainer = after(Learner, "update", leak)
# The norms of another class are pushed.
noise_on_a_class_that_is_not_pushed = both(
    after(aqn, "touched_names", lambda names, _: {name.replace("input", "post_attention") for name in names}),
    after(aqn, "clean_norms", lambda clean, *_: clean | {
        f"model.layers.{layer}.input_layernorm.weight": torch.ones(32) for layer in (0, 1)
    }),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ the policy


@torch.no_grad()
def fill_b(adapters: dict, *_) -> dict:
    for adapter in adapters.values():
        adapter.B.fill_(0.01)
    return adapters


adapters_not_at_zero = after(lora_megatron, "attach", fill_b)
loss_metric_not_finite = after(
    grpo, "policy_loss", lambda result, *_: (result[0], result[1] | {"ppo_kl": torch.tensor(float("nan"))})
)
gradient_not_finite = after(grpo, "group_advantages", lambda advantages, *_: advantages / 0)


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

    return after(weights_hf, "load", sharpen)


policy_without_entropy = sharpened(1e4)  # one token has all the probability
# The most likely token has a log-prob of exactly 0, but not at temperature FLAT.
sure_policy = both(sharpened(80), every_answer_parsable)
sure_policy_watched_at_temperature_1 = both(sure_policy, lambda patch: patch.setattr(weight_sync, "FLAT", 1.0))
reference_with_adapters_on = instead(lora_megatron, "disabled", lambda *_: contextlib.nullcontext())


@torch.no_grad()
def route_natively(real: Callable, learner: Learner, micro: MicroBatch) -> Tensor:
    """The reference pass does not replay the routes."""
    with lora_megatron.disabled(learner.adapters):
        return learner._logp(micro).logp


reference_on_other_routes = instead(Learner, "_reference_logp", route_natively)
kl_of_the_wrong_sign = after(grpo, "kl", lambda value, *_: -value)

# ------------------------------------------------------------------------------------------------ sampling, questions

one_sample_for_the_whole_group = after(
    TorchSampler, "sample", lambda groups, *_: [[group[0]] * len(group) for group in groups]
)
each_sample_twice = after(
    TorchSampler, "sample", lambda groups, *_: [[group[j - j % 2] for j in range(len(group))] for group in groups]
)


def without_end(_: None, sampler: TorchSampler, *__) -> None:
    sampler.stop_tokens = frozenset()
    sampler.is_stop[:] = False


end_token_never_recognised = after(TorchSampler, "__init__", without_end)


def chosen_by(change: Callable[[Rule], Rule]) -> Plant:
    """The sampler chooses tokens by another rule, but reports the log-probs of the right one."""

    def pick(real: Callable, logits: Tensor, uniform: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        if uniform is None:
            return real(logits, uniform, rule)
        token, _ = real(logits, uniform, change(rule))
        return token, torch.log_softmax(logits.float() / rule.temperature, -1).gather(-1, token[:, None])[:, 0]

    return instead(torch_sampler, "pick", pick)


always_the_first_step = instead(data_gsm8k.Questions, "pick", lambda real, asked, step, count: real(asked, 0, count))
trained_on_the_held_out_file = instead(data_gsm8k, "load", lambda real, data, _, *rest: real(data, "test", *rest))


def asks_held_out_by(method: str) -> Plant:
    """The data are split correctly, but a question of the held-out part is asked."""

    def plant(patch: MonkeyPatch) -> None:
        parts = []
        after(data_gsm8k, "load", lambda found, *_: (parts.append(found), found)[1])(patch)
        after(data_gsm8k.Questions, method, lambda found, *_: [*found[:-1], parts[-1][0]])(patch)

    return plant


asks_held_out_questions = asks_held_out_by("pick")
asks_held_out_questions_later = asks_held_out_by("pick_more")


# The last question is another one.
another_question = after(
    data_gsm8k, "read",
    lambda found, cfg, split: ([*found[0][:-1], Row.worked(f"What is 1 + 1 in {split}?", "#### 2")], *found[1:]),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ between ranks


def one_gradient_not_summed(is_expert: bool) -> Plant:
    """On every rank, the gradient of one factor is not summed."""

    def sync(real: Callable, parallel: Parallel, parameters: list) -> None:
        left = [p for p in parameters if p.is_expert == is_expert][1]  # a B: the gradient of every A is 0 at first
        real(parallel, [p for p in parameters if p is not left])

    return instead(Parallel, "sync_gradients_", sync)


@torch.no_grad()
def drift(metrics: dict, learner: Learner, *_) -> dict:
    next(f for name, f in learner.factors.items() if name.endswith("linear_qkv.A")).view(-1)[0] += 1e-3
    return metrics


a_factor_that_drifts = after(Learner, "update", drift)


@torch.no_grad()
def reverse_a_norm(_: None, model: torch.nn.Module, *__) -> None:
    """One rank has the elements of a norm in reverse order; the sum is the same."""
    weight = model.decoder.layers[1].input_layernorm.weight
    values = torch.arange(len(weight)).float()
    weight.copy_(values.flip(0) if torch.distributed.get_rank() == 1 else values)


a_norm_in_another_order = after(weights_hf, "load", reverse_a_norm)

# ------------------------------------------------------------------------------------------------ checkpoints


def in_the_second_save(change: Callable[[dict, dict], tuple[dict, dict]]) -> Plant:
    """What Learner.state returns is changed, from the second update on."""
    return after(
        Learner, "state", lambda found, learner: change(*found) if learner.optimizer_steps > 1 else found
    )  # fmt: skip


def changed(tensors: dict, part: str, change: Callable[[Tensor], Tensor]) -> dict:
    """The tensors with ``part`` in their name are changed when they are made."""
    return tensors | {
        name: old._replace(make=lambda old=old: change(old.make())) for name, old in tensors.items() if part in name
    }


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


moments_exchanged = in_the_second_save(exchange)
MORE = {"more": checkpoint.Pending((3,), torch.float32, lambda: torch.zeros(3))}
a_tensor_more = in_the_second_save(
    lambda tensors, counts: (tensors | {"adapter": tensors["adapter"] | MORE}, counts)
)  # fmt: skip
another_count = in_the_second_save(lambda tensors, _: (tensors, {"optimizer_steps": 7}))


def write_doubled(real: Callable, path: Path, tensors: dict) -> str:
    """The bytes are wrong, and the checksum of the file is that of the wrong bytes."""
    wrong = "step-000002" in str(path) and path.stem == "adapter"
    return real(path, changed(tensors, next(iter(tensors)), lambda value: 2 * value) if wrong else tensors)


a_file_with_a_wrong_number = instead(checkpoint, "_write_tensors", write_doubled)


def forget_moments(_: None, learner: Learner, *__) -> None:
    for moments in learner.moments.values():
        for value in moments.values():
            value.zero_()


moments_not_restored = after(Learner, "restore", forget_moments)


@torch.no_grad()
def restore_without_adapters(real: Callable, learner: Learner, *args) -> None:
    before = [factor.clone() for factor in learner.parameters]
    real(learner, *args)
    for factor, value in zip(learner.parameters, before, strict=True):
        factor.copy_(value)


adapters_not_restored = instead(Learner, "restore", restore_without_adapters)
step_count_not_restored = after(Learner, "restore", lambda _, learner, *__: setattr(learner, "optimizer_steps", 0))
