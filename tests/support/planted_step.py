"""Named faults of a step: questions, scores and masks, gradients, the optimizer, sums over ranks.

The names are in FAULTS at the end. Each fault is in the trainer's own functions, on every rank.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from planting import Plant, after, before, both, instead
from pytest import MonkeyPatch
from torch import Tensor

import aqn
import data_gsm8k
import grpo
import learner
import lora_megatron
import parallel_setup
import reward_gsm8k
import rollout
import train_grpo
import weight_sync
from engines.torch_sampler import TorchSampler
from hardware import kernels
from knobs import OptimConfig
from learner import Learner
from model import batches
from model.batches import MicroBatch, Rollout
from parallel_setup import Parallel
from run import input_check
from weight_sync import Push
from weights import adapter_weights, checkpoint, huggingface
from weights.policy import Policy

# ------------------------------------------------------------------------------------------------ rows and rewards


def masks(change: Callable[[Tensor], Tensor]) -> Plant:
    def masked(micro: MicroBatch, *_) -> MicroBatch:
        micro.mask = change(micro.mask)
        return micro

    return after(batches, "pack", masked)


def in_batch(change: Callable[[Rollout], None]) -> Plant:
    """What was sampled and scored is changed."""

    def changed(result: tuple, *_: object) -> tuple:
        change(result[0])
        return result

    return after(rollout, "sample", changed)


def rewards_of_this_rank(batch: Rollout) -> None:
    mine = batch.rewards[dist.get_rank() :: 2]
    batch.rewards = mine.repeat_interleave(2, 0)


def rewards_rolled(dim: int) -> Plant:
    return in_batch(lambda batch: setattr(batch, "rewards", batch.rewards.roll(1, dims=dim)))


def truncation_rolled(batch: Rollout) -> None:
    batch.truncated = batch.truncated.roll(batch.rewards.shape[1])


def equal_answers(real: Callable, *args, num_samples: int, **more) -> list:
    return [group * num_samples for group in real(*args, num_samples=1, **more)]


def order_from_the_start(patch: MonkeyPatch) -> None:
    """A resumed run asks again what the run asked from its first step on."""
    first = [0]
    before(train_grpo, "train", lambda run, *_: first.append(run.first_step))(patch)
    instead(data_gsm8k.Questions, "pick", lambda real, asked, step, count: real(asked, step - first[-1], count))(patch)


# ------------------------------------------------------------------------------------------------ the teacher


def distils(change: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor, float]]) -> Plant:
    """The teacher's part has other advantages, log-probs of the policy and of the teacher, and another weight."""

    def distilled(real: Callable, advantages: Tensor, old: Tensor, taught: Tensor, mask: Tensor, coef: float) -> Tensor:
        advantages, old, taught, coef = change(advantages, old, taught, coef)
        return real(advantages, old, taught, mask, coef)

    return instead(grpo, "distilled", distilled)


def compared_with(find: Callable[[Learner, MicroBatch], Tensor]) -> Plant:
    """The teacher is compared with other log-probs than those of the policy before the rollout's first update."""

    def loss(real: Callable, trainer: Learner, micro: MicroBatch, *rest: object) -> object:
        with MonkeyPatch.context() as patch:
            found = find(trainer, micro)
            distils(lambda advantages, _, taught, coef: (advantages, found, taught, coef))(patch)
            return real(trainer, micro, *rest)

    return instead(Learner, "_loss", loss)


@torch.no_grad()
def of_this_update(trainer: Learner, micro: MicroBatch) -> Tensor:
    return trainer._logp(micro)


@contextlib.contextmanager
def held_for_good(real: Callable, policy: Policy, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The factors stay those of the teacher."""
    adapter_weights.copy_(policy.factors, values)
    yield


def rewards_in_spite_of_zero(real: Callable, rewards: Tensor, norm: object = "std") -> Tensor:
    return real(rewards, "std" if norm == "zero" else norm)


# The case of update_reference.py that finds each of them is beside it.
OF_A_TEACHER: dict[str, tuple[str, Plant]] = {
    "a teacher that pushes away": (
        "a teacher alone",
        distils(lambda advantages, old, taught, coef: (advantages, old, taught, -coef)),
    ),
    "a teacher without its weight": (
        "a teacher alone",
        distils(lambda advantages, old, taught, coef: (advantages, old, taught, 1.0)),
    ),
    "a teacher in place of the rewards": (
        "rewards, a teacher, KL, gspo",
        distils(lambda advantages, old, taught, coef: (0 * advantages, old, taught, coef)),
    ),
    "rewards in spite of zero": ("a teacher alone", instead(grpo, "group_advantages", rewards_in_spite_of_zero)),
    "a teacher compared with the sampler": (
        "a teacher alone",
        compared_with(lambda trainer, micro: micro.rollout_logp),
    ),
    "a teacher compared with the policy of each update": ("a teacher alone", compared_with(of_this_update)),
    "a teacher that is the base": (
        "a teacher alone",
        instead(Learner, "learn_from", lambda real, trainer, taught: real(trainer, [(n, 0 * x) for n, x in taught])),
    ),
    "a teacher on the routes of the update, r3": (
        "a teacher, the sampler's routes",
        instead(Learner, "_freely", lambda real, trainer, micro: trainer._logp(micro)),
    ),
    "a teacher on the routes of the update, r2": (
        "a teacher, the old policy's routes",
        instead(Learner, "_freely", lambda real, trainer, micro: trainer._logp(micro)),
    ),
    "the teacher's log-probs of the next token": (
        "a teacher alone",
        after(Learner, "_freely", lambda logp, *_: logp.roll(-1, 1)),
    ),
    "a policy that becomes its teacher": ("a teacher alone", instead(Policy, "holding", held_for_good)),
    "another estimate of the KL to the teacher": (
        "a teacher alone",
        instead(grpo, "kl", lambda real, logp, ref, kind, mask: real(logp, ref, "k2" if kind == "k1" else kind, mask)),
    ),
}


# ------------------------------------------------------------------------------------------------ gradients


def gradients(change: Callable[[torch.nn.Parameter, Parallel], object]) -> Plant:
    """``change`` is called with every parameter after the sum over ranks, and changes its gradient in place."""

    def each(_: None, parallel: Parallel, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            change(parameter, parallel)

    return after(Parallel, "sync_gradients_", each)


def scaled(factor: Callable[[torch.nn.Parameter], float]) -> Plant:
    return gradients(lambda parameter, _: parameter.grad.mul_(factor(parameter)))


def is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Whether every tensor rank has this factor and a part of its gradient."""
    return parameter.is_partial


def without_tensor_sum(real: Callable, parallel: Parallel, parameters: list[torch.nn.Parameter]) -> None:
    kept = [parameter.is_partial for parameter in parameters]
    for parameter in parameters:
        parameter.is_partial = False
    real(parallel, parameters)
    for parameter, is_partial in zip(parameters, kept, strict=True):
        parameter.is_partial = is_partial


def over_the_wrong_group(real: Callable, parallel: Parallel, parameters: list[torch.nn.Parameter]) -> None:
    real(dataclasses.replace(parallel, expert_data_group=parallel.data_group), parameters)


def after_every_micro_batch(real: Callable, trainer: Learner, *args) -> tuple:
    """The gradients are summed over ranks, and at the end of the update once more."""
    trainer.parallel.sync_gradients_(trainer.parameters)
    return real(trainer, *args)


def twice(real: Callable, *args) -> None:
    real(*args)
    real(*args)


def backward_without_its_mean(ctx, grad: Tensor) -> tuple:
    x, weight, scale = ctx.saved_tensors
    return grad * weight * scale, None, None


# ------------------------------------------------------------------------------------------------ the optimizer


def forget_moments(trainer: Learner, *_) -> None:
    for moments in trainer.moments.values():
        for value in moments.values():
            value.zero_()


def local_clip(real: Callable, trainer: Learner, step: int) -> float:
    """Clips by the norm of this rank's gradients, and reports the true one."""
    true = trainer.parallel.gradient_norm(trainer.parameters).item()
    local = sum(parameter.grad.square().sum() for parameter in trainer.parameters) ** 0.5
    with MonkeyPatch.context() as patch:
        patch.setattr(Parallel, "gradient_norm", lambda *_: local)
        real(trainer, step)
    return true


def counts(name: str, count: Callable[[learner.Update], float]) -> Plant:
    """A loss is divided by another number."""
    return after(Learner, "_prepare", lambda update, *_: update._replace(counts=update.counts | {name: count(update)}))


def own_tokens(update: learner.Update) -> float:
    return float(sum(micro.mask.sum() for micro in update.micro_batches))


def own_sequences(update: learner.Update) -> float:
    return float(sum(micro.mask.any(1).sum() for micro in update.micro_batches))


# ------------------------------------------------------------------------------------------------ adapters and noise


def scale_doubled(adapters: dict, *_) -> dict:
    for adapter in adapters.values():
        adapter.scale *= 2
    return adapters


def place_on_the_rank(real: Callable, seed: int, what: str, key: str) -> int:
    """The draw of an expert's factor depends on its place on its rank; each of two ranks has two experts."""
    return real(seed, what, re.sub(r"\d+$", lambda found: str(int(found[0]) % 2), key))


def swapped_experts(pieces: dict, adapters: dict, *_: object) -> dict:
    factors = lora_megatron.factors(adapters)
    return {name: piece.flip(0) if factors[name].is_expert else piece for name, piece in pieces.items()}


def save_without_b(real: Callable, run_dir: object, step: int, tensors: dict, *args, **kwargs) -> None:
    adapter = {name: value * (not name.endswith(".B")) for name, value in tensors["adapter"].items()}
    real(run_dir, step, tensors | {"adapter": adapter}, *args, **kwargs)


def add_the_first_noise(real: Callable, *args) -> dict:
    """The trainer asks for the noise of step 0 in every step; aqn.py itself is sound."""
    with MonkeyPatch.context() as patch:
        instead(aqn, "perturb", lambda real, *args, step, **kwargs: real(*args, step=0, **kwargs))(patch)
        return real(*args)


def noise_of_the_rank(real: Callable, *args, seed: int, **more) -> dict:
    return real(*args, seed=seed + dist.get_rank(), **more)


def refuse_the_layout(*_: object) -> None:
    raise RuntimeError("planted: rank 1 opens no layout")


FAULTS: dict[str, Plant] = {
    "advantages of the wrong sign": after(grpo, "group_advantages", lambda found, *_: -found),
    "advantages that are not centred": after(grpo, "group_advantages", lambda found, rewards, *_: rewards),
    "shuffled advantages": after(grpo, "group_advantages", lambda found, *_: found.roll(1, 1)),
    "advantages of the other rank's prompts": after(
        grpo, "group_advantages", lambda found, *_: found.roll(dist.get_rank(), 0) if dist.is_initialized() else found
    ),
    **{name: plant for name, (_, plant) in OF_A_TEACHER.items()},
    "the reward of another answer": rewards_rolled(1),
    "rewards of the neighbouring prompt": rewards_rolled(0),
    "rewards of this rank's prompts only": in_batch(rewards_of_this_rank),
    "rewards flipped in the run": after(
        input_check.Inputs, "score", lambda scored, *_: [one._replace(reward=1 - one.reward) for one in scored]
    ),
    "rewards flipped in the method": after(reward_gsm8k, "score", lambda x, *_: 1 - x),
    "the truncated answers of the next prompt": in_batch(truncation_rolled),
    "answers in the order of ranks": after(
        rollout, "in_prompt_order", lambda _, by_rank, count, tensor: by_rank[::tensor].flatten(0, 1)[:count].cpu()
    ),
    "equal answers in each group": instead(TorchSampler, "sample", equal_answers),
    "the end token is no stop token": after(data_gsm8k, "stop_token_ids", lambda *_: {258}),
    "order that starts again at a resume": order_from_the_start,
    "the first token masked": masks(lambda mask: mask * mask.roll(1, 1)),
    "half of the tokens masked": masks(lambda mask: mask * (torch.arange(mask.shape[1]) % 2)),
    "both ranks train the same half": after(
        batches, "plan", lambda shares, *_: [[share[0]] * len(share) for share in shares]
    ),
    "only the last micro-batch counts": before(Learner, "_loss", lambda trainer, *_: trainer.policy.model.zero_grad()),
    "another mean over tokens": instead(
        grpo, "aggregate_loss", lambda real, *args, **more: real(*args, **more | {"aggregate": "token-mean"})
    ),
    "the loss divided by this rank's tokens": counts("num_tokens", own_tokens),
    "sequences counted on this rank": counts("num_sequences", own_sequences),
    "no gradient for the experts": scaled(lambda parameter: not parameter.is_expert),
    "no gradient for one expert": gradients(lambda p, _: p.is_expert and p.grad[0].zero_()),
    "gradients 8 times too large": scaled(lambda _: 8),
    "gradients divided by the number of ranks": gradients(lambda p, parallel: p.grad.div_(parallel.world_size)),
    "expert gradients doubled": scaled(lambda parameter: 1 + parameter.is_expert),
    "expert gradients summed over the wrong group": instead(Parallel, "sync_gradients_", over_the_wrong_group),
    "gradients of replicated factors doubled": scaled(lambda parameter: 1 + is_replicated(parameter)),
    "replicated factors not summed over tensor ranks": instead(Parallel, "sync_gradients_", without_tensor_sum),
    "no sum over data ranks": instead(Parallel, "sync_gradients_", lambda *_: None),
    "gradients summed after every micro-batch": instead(Learner, "_loss", after_every_micro_batch),
    "gradients summed twice": instead(Parallel, "sync_gradients_", twice),
    "copies counted twice in the norm": after(Parallel, "copies", lambda *_: 1),
    "gradients clipped by this rank's norm": instead(Learner, "_step", local_clip),
    "gradients never clipped": after(Parallel, "gradient_norm", lambda norm, *_: norm * 0.01),
    "a wrong backward pass of a kernel": lambda patch: patch.setattr(
        kernels._RmsNorm, "backward", staticmethod(backward_without_its_mean)
    ),
    "positions wrong on both sides": instead(kernels, "rotary", lambda real, x, cos, sin: real(x, cos, -0.5 * sin)),
    "moments forgotten in each update": before(Learner, "_step", forget_moments),
    "moments forgotten between steps": before(Learner, "_prepare", forget_moments),
    "the optimizer's step count forgotten": before(
        Learner, "_step", lambda trainer, _: setattr(trainer, "optimizer_steps", 0)
    ),
    "another learning rate": after(OptimConfig, "rate", lambda rate, *_: rate * 2),
    "another learning rate for the optimizer alone": instead(
        learner, "adamw", lambda real, *args, lr, **more: real(*args, lr=2 * lr, **more)
    ),
    "metrics of this rank": instead(Parallel, "sum_over_data", lambda _, __, x: x.detach()),
    "metrics summed over tensor ranks": instead(
        Parallel, "sum_over_data", lambda _, parallel, x: parallel.sum_over_ranks(x)
    ),
    "LoRA's scale wrong on both sides": after(lora_megatron, "attach", scale_doubled),
    "experts that start equal on both ranks": instead(lora_megatron, "derive_seed", place_on_the_rank),
    "experts exchanged at a restore": after(adapter_weights, "scatter", swapped_experts),
    "B saved as 0": instead(checkpoint, "save", save_without_b),
    "shards joined in the wrong order in the sampler": both(
        instead(huggingface, "gather", lambda real, *args: real(*args).flip(0)),
        instead(weight_sync, "gather", lambda real, *args: real(*args).flip(0)),
    ),
    "one noise in all steps of the run": instead(Push, "_add_noise", add_the_first_noise),
    "rank 1 opens no layout": instead(parallel_setup, "open_layout", refuse_the_layout, rank=1),
    "other noise on each rank": instead(weight_sync.aqn, "perturb", noise_of_the_rank),
}
