"""Faults that tests plant in a forked process before it trains; each changes one place of the code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from training import after

import aqn
import checkpoint
import data_gsm8k
import grpo
import lora_megatron
import parallel_setup
import reward_gsm8k
import weight_sync
import weights_hf
from engines import torch_sampler
from engines.interface import Rule
from engines.torch_decoder import Decoder
from engines.torch_sampler import TorchSampler
from knobs import Config
from learner import MOMENTS, Learner

FEW = {  # a step takes about 50 ms
    "rollout__prompts_per_step": 4, "rollout__group_size": 2, "optim__prompts_per_update": 4,
    "rollout__max_new_tokens": 4, "eval__samples": 0, "eval__num_questions": 1, "train__steps": 5,
}  # fmt: skip
LARGE = {"rollout__prompts_per_step": 32, "rollout__group_size": 8, "optim__prompts_per_update": 32}
NOISE = {"aqn__schedule": "constant"}
SURE = {"checks__entropy": "off", "checks__logp_gap": "off", "checks__reward_constant": "off"}


def nothing() -> None:
    pass


def on_rank_1(plant: Callable[[], None]) -> None:
    if torch.distributed.get_rank() == 1:
        plant()


def every_answer_parsable() -> None:
    """Count every answer as parsable: a random model never answers in the right form, which a tripwire would notice."""
    reward_gsm8k.parsable = lambda *args: True


def solved_after_two_steps() -> None:
    every_answer_parsable()
    calls, real = [], reward_gsm8k.score

    def score(*args: str) -> float:
        calls.append(1)
        return real(*args) if len(calls) < 2 * 256 else 1.0

    reward_gsm8k.score = score


# ------------------------------------------------------------------------------------------------ the push


def pushed_otherwise(change: Callable[[str, Tensor], Tensor]) -> None:
    """Push ``change(name, tensor)`` instead of every tensor."""
    after(weights_hf, "export", lambda stream, *_: ((name, change(name, tensor)) for name, tensor in stream))


def experts_delta_dropped() -> None:
    """The merge forgets the LoRA of the routed experts of layer 1."""

    def base(value: Tensor, slot: weights_hf.Slot) -> Tensor:
        return slot.weight if slot.expert is not None and ".layers.1." in slot.names[0] else value

    after(weights_hf, "merged", base)


def gate_permuted() -> None:
    """The router of layer 0 is pushed with its experts in another order."""
    gate = "model.layers.0.mlp.gate.weight"
    pushed_otherwise(lambda name, tensor: tensor.roll(1, 0) if name == gate else tensor)


def adapters_never_pushed() -> None:
    after(weights_hf, "merged", lambda value, slot: slot.weight)


def nan_in_one_expert() -> None:
    broken, seen = "model.layers.1.mlp.experts.5.down_proj.weight", []

    def change(name: str, tensor: Tensor) -> Tensor:
        seen.append(name)
        return tensor * float("nan") if name == broken and seen.count(name) == 3 else tensor  # in the push of step 2

    pushed_otherwise(change)


def engine_with_norms(change: Callable[[Decoder, str, Tensor], Tensor]) -> None:
    """The engine takes ``change(engine, name, norm)`` instead of every norm that is pushed."""
    real = Decoder.load_weights

    def load_weights(self: Decoder, stream) -> None:
        real(self, [(name, change(self, name, value) if "norm" in name else value) for name, value in stream])

    Decoder.load_weights = load_weights


def engine_without_norms() -> None:
    """After its first load, the engine ignores the norms that are pushed."""
    engine_with_norms(lambda engine, name, value: engine.slots[name].clone() if engine.ready else value)


def engine_with_larger_norms() -> None:
    engine_with_norms(lambda engine, name, value: value * 1.05)


def noise_too_strong() -> None:
    real = aqn._noisy
    aqn._noisy = lambda clean, sigma, *rest: real(clean, 2 * sigma, *rest)


def noise_in_the_trainer() -> None:
    """The noise of a push stays in the weights of the trainer, so noise would accumulate."""

    @torch.no_grad()
    def leak(metrics: dict, learner: Learner, *_) -> dict:
        learner.model.decoder.layers[1].input_layernorm.weight.add_(0.01)
        return metrics

    after(Learner, "update", leak)


def noise_on_a_class_that_is_not_pushed() -> None:
    """The norms of another class are pushed."""
    real = aqn.touched_names
    aqn.touched_names = lambda plan: {name.replace("input", "post_attention") for name in real(plan)}
    after(aqn, "clean_norms", lambda clean, *_: clean | {
        f"model.layers.{layer}.input_layernorm.weight": torch.ones(32) for layer in (0, 1)
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ the policy


def adapters_not_at_zero() -> None:
    @torch.no_grad()
    def attach(adapters: dict, *_) -> dict:
        for name, factor in lora_megatron.factors(adapters).items():
            if name.endswith(".B"):
                factor.fill_(0.01)
        return adapters

    after(lora_megatron, "attach", attach)


def loss_metric_not_finite() -> None:
    after(grpo, "policy_loss", lambda result, *_: (result[0], result[1] | {"ppo_kl": torch.tensor(float("nan"))}))


def gradient_not_finite() -> None:
    after(grpo, "group_advantages", lambda advantages, *_: advantages / 0)


def twelfth_gradient_is_large() -> None:
    calls = []

    def grow(_: None, parallel: parallel_setup.Parallel, parameters: list) -> None:
        calls.append(1)
        if len(calls) == 12:
            for parameter in parameters:
                parameter.grad *= 1000

    after(parallel_setup.Parallel, "sync_gradients_", grow)


def policy_without_entropy(sharper: float = 1e4) -> None:
    """A head so sharp that one token has all the probability, in sampler and trainer."""

    @torch.no_grad()
    def sharpen(_: None, model: torch.nn.Module, *__) -> None:
        model.output_layer.weight.mul_(sharper)

    after(weights_hf, "load", sharpen)


def sure_policy() -> None:
    """The most likely token has a log-prob of exactly 0, but not at temperature FLAT. All answers are parsable."""
    policy_without_entropy(80)
    every_answer_parsable()


def sure_policy_watched_at_temperature_1() -> None:
    sure_policy()
    weight_sync.FLAT = 1.0


def reference_with_adapters_on() -> None:
    lora_megatron.disabled = lambda adapters: contextlib.nullcontext()


def kl_of_the_wrong_sign() -> None:
    after(grpo, "kl", lambda value, *_: -value)


# ------------------------------------------------------------------------------------------------ sampling, questions


def one_sample_for_the_whole_group() -> None:
    after(TorchSampler, "sample", lambda groups, *_: [[group[0]] * len(group) for group in groups])


def each_sample_twice() -> None:
    after(
        TorchSampler, "sample", lambda groups, *_: [[group[j - j % 2] for j in range(len(group))] for group in groups]
    )


def end_token_never_recognised() -> None:
    def without_end(_: None, sampler: TorchSampler, *__) -> None:
        sampler.stop_tokens = frozenset()
        sampler.is_stop[:] = False

    after(TorchSampler, "__init__", without_end)


def chosen_by(change: Callable[[Rule], Rule]) -> None:
    """The sampler chooses tokens by another rule, but reports the log-probs of the right one."""
    real = torch_sampler.pick

    def pick(logits: Tensor, uniform: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        if uniform is None:
            return real(logits, uniform, rule)
        token, _ = real(logits, uniform, change(rule))
        return token, torch.log_softmax(logits.float() / rule.temperature, -1).gather(-1, token[:, None])[:, 0]

    torch_sampler.pick = pick


def always_the_first_step() -> None:
    real = data_gsm8k.Questions.pick
    data_gsm8k.Questions.pick = lambda self, step, count: real(self, 0, count)


def trained_on_the_held_out_file() -> None:
    real = data_gsm8k.load
    data_gsm8k.load = lambda data, split, *rest: real(data, "test", *rest)


def asks_held_out_questions() -> None:
    """The data are split correctly, but a question of the held-out part is asked."""
    parts = []
    after(data_gsm8k, "load", lambda found, *_: (parts.append(found), found)[1])
    after(data_gsm8k.Questions, "pick", lambda found, *_: [*found[:-1], parts[-1][0]])


def another_question() -> None:
    """The last question is another one."""

    def change(found: tuple, cfg: Config, split: str) -> tuple:
        return [*found[0][:-1], (f"What is 1 + 1 in {split}?", "#### 2")], *found[1:]

    after(data_gsm8k, "read", change)


# ------------------------------------------------------------------------------------------------ between ranks


def one_gradient_not_summed(is_expert: bool) -> None:
    """On every rank, the gradient of one factor is not summed."""
    real = parallel_setup.Parallel.sync_gradients_

    def sync(self: parallel_setup.Parallel, parameters: list) -> None:
        of_a_kind = [p for p in parameters if p.is_expert == is_expert]
        left = of_a_kind[1]  # a B, because the gradient of every A is 0 at first
        real(self, [p for p in parameters if p is not left])

    parallel_setup.Parallel.sync_gradients_ = sync


def a_factor_that_drifts() -> None:
    @torch.no_grad()
    def drift(metrics: dict, learner: Learner, *_) -> dict:
        next(f for name, f in learner.factors.items() if name.endswith("linear_qkv.A")).view(-1)[0] += 1e-3
        return metrics

    after(Learner, "update", drift)


def a_norm_in_another_order() -> None:
    """One rank has the elements of a norm in reverse order; the sum is the same."""

    @torch.no_grad()
    def change(_: None, model: torch.nn.Module, *__) -> None:
        weight = model.decoder.layers[1].input_layernorm.weight
        values = torch.arange(len(weight)).float()
        weight.copy_(values.flip(0) if torch.distributed.get_rank() == 1 else values)

    after(weights_hf, "load", change)


# ------------------------------------------------------------------------------------------------ checkpoints


def in_the_second_save(change: Callable[[dict, dict, Learner], tuple[dict, dict]]) -> None:
    """What Learner.state returns is changed, from the second update on."""
    after(Learner, "state", lambda found, learner: change(*found, learner) if learner.optimizer_steps > 1 else found)


def remade(kind: str, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The tensors of a kind with ``part`` in their name are changed when they are made for the second save."""

    def changed(tensors: dict, counts: dict, _: Learner) -> tuple[dict, dict]:
        named = {
            name: old._replace(make=lambda old=old: change(old.make())) if part in name else old
            for name, old in tensors[kind].items()
        }
        return tensors | {kind: named}, counts

    in_the_second_save(changed)


def moments_exchanged() -> None:
    def exchange(tensors: dict, counts: dict, _: Learner) -> tuple[dict, dict]:
        factors = [name.removesuffix(".exp_avg_sq") for name in tensors["optimizer"] if name.endswith(".exp_avg_sq")]
        exchanged = {f"{name}.{moment}": tensors["optimizer"][f"{name}.{other}"]
                     for name in factors for moment, other in zip(MOMENTS, MOMENTS[::-1], strict=True)}  # fmt: skip
        return tensors | {"optimizer": exchanged}, counts

    in_the_second_save(exchange)


def a_tensor_more() -> None:
    more = checkpoint.Pending((3,), torch.float32, lambda: torch.zeros(3))
    in_the_second_save(lambda tensors, counts, _: (tensors | {"adapter": tensors["adapter"] | {"more": more}}, counts))


def another_count() -> None:
    in_the_second_save(lambda tensors, counts, _: (tensors, {"optimizer_steps": 7}))


def a_file_with_a_wrong_number() -> None:
    """The bytes are wrong, and the checksum of the file is that of the wrong bytes."""
    real = checkpoint._write_tensors

    def write(path: Path, tensors: dict) -> str:
        if "step-000002" in str(path) and path.stem == "adapter":
            name = next(iter(tensors))
            tensors = tensors | {name: tensors[name]._replace(make=lambda old=tensors[name]: 2 * old.make())}
        return real(path, tensors)

    checkpoint._write_tensors = write


def moments_not_restored() -> None:
    def forget(_: None, learner: Learner, *__) -> None:
        for name in MOMENTS:
            for value in learner.moments[name].values():
                value.zero_()

    after(Learner, "restore", forget)


def adapters_not_restored() -> None:
    real = Learner.restore

    def restore(self: Learner, *args) -> None:
        before = [factor.detach().clone() for factor in self.parameters]
        real(self, *args)
        with torch.no_grad():
            for factor, value in zip(self.parameters, before, strict=True):
                factor.copy_(value)

    Learner.restore = restore


def step_count_not_restored() -> None:
    after(Learner, "restore", lambda _, learner, *__: setattr(learner, "optimizer_steps", 0))
