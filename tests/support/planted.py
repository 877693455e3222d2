"""All faults that have a name, which tests plant in a forked process and `pytest --plant NAME` in a whole session.

This file has the faults of sampling: the push, the memory that trainer and sampler share, and the drawing of tokens.
planted_step.py and planted_trainer.py have those of the trainer, and planted_turns.py those of an environment's turns.
A fault without the number of a rank is planted on every rank. In a session it reaches the forked worlds of the tests,
but no program that a test starts.
"""

import dataclasses
import difflib
import itertools
from collections.abc import Callable

import planted_step
import planted_trainer
import planted_turns
import pytest
import torch
from planted_trainer import sharpened
from planting import Plant, after, before, both, instead
from pytest import MonkeyPatch
from torch import Tensor

import aqn
import lora_megatron
import reward_gsm8k
import rollout
import weight_sync
from engines import drawing
from engines.torch_decoder import Decoder
from engines.torch_sampler import TorchSampler
from lora_megatron import LoRAGroupedLinear
from rollout import Sampled
from run import tripwires
from tasks.scoring import Scorer
from weight_sync import Push
from weights import adapter_weights, huggingface

FEW = {  # a step takes about 50 ms
    "rollout__prompts_per_step": 4,
    "rollout__group_size": 2,
    "optim__prompts_per_update": 4,
    "rollout__max_new_tokens": 4,
    "eval__samples": 0,
    "eval__num_questions": 1,
    "train__steps": 5,
}
LARGE = {"rollout__prompts_per_step": 32, "rollout__group_size": 8, "optim__prompts_per_update": 32}
NOISE = {"aqn__schedule": "constant"}
SURE = {"checks__off": ("entropy", "logp_gap", "reward_constant")}

# ------------------------------------------------------------------------------------------------ no faults


def nothing(patch: MonkeyPatch) -> None:
    pass


def two_steps_count(patch: MonkeyPatch) -> None:
    patch.setattr(tripwires, "CONSTANT_STEPS", 2)


def two_steps_are_usual(patch: MonkeyPatch) -> None:
    patch.setattr(tripwires, "WINDOW", 2)
    patch.setattr(tripwires, "SPIKE_START", 2)


# A random model never answers in the right form, which a tripwire would notice.
every_answer_parsable = after(Scorer, "_of_method", lambda score, *_: score._replace(found=True))
# The most likely token has a log-prob of exactly 0, but not at temperature FLAT.
sure_policy = both(sharpened(80), every_answer_parsable)


def solved_after_two_steps(patch: MonkeyPatch) -> None:
    calls = itertools.count(1)
    rewards = after(reward_gsm8k, "score", lambda score, *_: score if next(calls) < 2 * 256 else 1.0)
    both(every_answer_parsable, rewards)(patch)


# ------------------------------------------------------------------------------------------------ the push


def pushed_otherwise(change: Callable[[str, Tensor], Tensor]) -> Plant:
    """Push ``change(name, tensor)`` instead of every tensor."""
    return after(huggingface, "export", lambda stream, *_: ((name, change(name, tensor)) for name, tensor in stream))


def stacks_otherwise(change: Callable[[Push, str, Tensor], Tensor]) -> Plant:
    """Push ``change(sync, name, stack)`` instead of every stack of experts."""
    return after(
        Push, "merged_stacks", lambda stream, sync: ((name, change(sync, name, value)) for name, value in stream)
    )


def without_lora(sync: Push, name: str, *_) -> Tensor:
    """A stack of experts of the base model."""
    return sync._for_engine(dict(sync._experts())[name].base.weight)


def without_update(expert: str) -> Plant:
    """The merge forgets the LoRA of one expert, as model.layers.1.mlp.experts.13 names it."""

    def merged(real: Callable, slot: huggingface.WeightShard) -> Tensor:
        value = real(slot)
        for place, names in enumerate(slot.blocks):
            if names[0].startswith(f"{expert}."):
                value[place] = slot.weight[place]
        return value

    layer, _, number = expert.rpartition(".")

    def stack(sync: Push, name: str, value: Tensor) -> Tensor:
        if name.startswith(f"{layer}."):
            one = slice(int(number), int(number) + 1)  # none, if the model has fewer experts
            value[one] = without_lora(sync, name)[one]
        return value

    return both(instead(huggingface, "merged", merged), stacks_otherwise(stack))


def nan_in_one_expert(patch: MonkeyPatch) -> None:
    """In the push of step 2."""
    broken, pushes = "model.layers.1.mlp.experts.down_proj", itertools.count()

    def change(sync: Push, name: str, value: Tensor) -> Tensor:
        if name == broken and next(pushes) == 1:
            value[5] = float("nan")
        return value

    stacks_otherwise(change)(patch)


def overflow_in_step_2(patch: MonkeyPatch) -> None:
    """Activations of the second rollout overflow, though all weights are finite."""

    def sample(real: Callable, engine: TorchSampler, *args: object, step: int, **options: object) -> object:
        if step == 1:
            after(engine.decoder, "logits", lambda logits, *_: logits * float("nan"))(patch)
        return real(engine, *args, step=step, **options)

    instead(rollout, "sample", sample)(patch)


def engine_with(part: str, change: Callable[[Decoder, str, Tensor], Tensor], rank: int | None = None) -> Plant:
    """The engine takes ``change(engine, name, tensor)`` instead of every tensor with ``part`` in its name."""
    return instead(
        Decoder,
        "load_weights",
        lambda real, engine, stream: real(
            engine, [(name, change(engine, name, value) if part in name else value) for name, value in stream]
        ),
        rank,
    )


def engine_without_norms(rank: int | None = None) -> Plant:
    """After its first load, the engine ignores the norms that are pushed."""
    return engine_with("norm", lambda engine, name, value: engine.slots[name].clone() if engine.ready else value, rank)


def skip_push(real: Callable, sync: Push) -> None:
    """The engine keeps its base weights."""
    with MonkeyPatch.context() as patch:
        patch.setattr(sync.engine, "load_weights", lambda tensors: [None for _ in tensors])
        real(sync)


def norms_of_another_class(pushed: tuple[float, dict[str, Tensor]], *_: object) -> tuple[float, dict[str, Tensor]]:
    """The names of the norms before attention are those of the norms before the experts."""
    checksum, norms = pushed
    return checksum, {name.replace("input", "post_attention"): norm for name, norm in norms.items()}


# ------------------------------------------------------------------------------------------------ shared memory


def noise_left_in(result: object, sync: Push, *_: object) -> object:
    """The last expert of the last layer has noise, as small as AQN's, after the push."""
    places = [linear.buffer for _, linear in sync._experts() if getattr(linear, "buffer", None) is not None]
    for place in places[-1:]:
        place[-1] += (1e-3 * torch.randn(place[-1].shape, generator=torch.Generator().manual_seed(0))).to(place.dtype)
    return result


# ------------------------------------------------------------------------------------------------ drawing

drawn_right = drawing.inverse_cdf


def draws(change: Callable[[Tensor, Tensor], Tensor], only_later: bool = False, rank: int | None = None) -> Plant:
    """The sampler draws by change(probabilities, uniform numbers), and reports the right log-probs.

    ``only_later``: all tokens but the first, because an engine may sample after the prompt by other code.
    """
    calls: list[int] = []

    def drawn(real: Callable, p: Tensor, u: Tensor) -> Tensor:
        calls.append(1)
        return (real if only_later and len(calls) == 1 else change)(p, u)

    return both(
        before(TorchSampler, "_run_wave", lambda *_: calls.clear()), instead(drawing, "inverse_cdf", drawn, rank)
    )


def warmer(rank: int | None = None) -> Plant:
    return draws(lambda p, u: drawn_right(p ** (1 / 1.3), u), rank=rank)


def top_3(p: Tensor, u: Tensor) -> Tensor:
    kept, ids = p.topk(min(3, p.shape[1]))
    return ids.gather(1, drawn_right(kept, u))


def seeds(change: Callable[[list[int]], list[int]]) -> Plant:
    """The sampler takes other seeds."""
    return instead(TorchSampler, "sample", lambda real, *args, seeds, **more: real(*args, seeds=change(seeds), **more))


def groups(change: Callable[[list], list]) -> Plant:
    """The samples of one prompt are other ones."""
    return after(TorchSampler, "sample", lambda found, *_: [change(group) for group in found])


def without_end(_: None, sampler: TorchSampler, *__) -> None:
    sampler.stop_tokens = frozenset()
    sampler.is_stop[:] = False


def swapped(real: Callable, *args, **more) -> Sampled:
    """rollout.sample_step that samples step 3 before step 2, and gives each out as the other one."""
    *others, step = args
    return real(*others, {1: 2, 2: 1}.get(step, step), **more)


def of_another_rank(dimension: str, kind: str) -> Plant:
    """A rank takes the factors of ``kind`` that belong to the next rank of ``dimension``."""

    place = f"{dimension}_rank"

    def piece(real: Callable, name: str, factor, whole: Tensor, arch, parallel) -> Tensor:
        following = (getattr(parallel, place) + 1) % getattr(parallel, dimension)
        moved = dataclasses.replace(parallel, **{place: following}) if kind in name else parallel
        return real(name, factor, whole, arch, moved)

    return instead(adapter_weights, "piece", piece)


# ------------------------------------------------------------------------------------------------ by name

FAULTS: dict[str, Plant] = {
    **planted_trainer.FAULTS,
    **planted_step.FAULTS,
    **planted_turns.FAULTS,
    "experts of layer 1 are pushed without their update": stacks_otherwise(
        lambda sync, name, value: without_lora(sync, name) if ".layers.1." in name else value
    ),
    "one expert is pushed without its update": without_update("model.layers.1.mlp.experts.13"),
    "a router is pushed in another order": pushed_otherwise(
        lambda name, tensor: tensor.roll(1, 0) if name == "model.layers.0.mlp.gate.weight" else tensor
    ),
    "adapters are never pushed": both(
        after(huggingface, "merged", lambda value, slot: slot.weight), stacks_otherwise(without_lora)
    ),
    "rank 1 is never pushed to": instead(Push, "clean", skip_push, rank=1),
    "the engine ignores pushed norms": engine_without_norms(),
    "the engine ignores pushed norms on rank 1": engine_without_norms(rank=1),
    "the engine has larger norms on rank 1": engine_with("norm", lambda engine, name, value: value * 1.05, rank=1),
    "noise is twice as strong": instead(aqn, "_noisy", lambda real, clean, sigma, *rest: real(clean, 2 * sigma, *rest)),
    "norms of another class are pushed for the noise": after(Push, "_push_policy", norms_of_another_class),
    "noise is watched at temperature 1": lambda patch: patch.setattr(weight_sync, "FLAT", 1.0),
    "the merge into shared memory has another scale": instead(
        lora_megatron,
        "merge",
        lambda real, w, a, b, scale, out=None: real(w, a, b, scale * (1 if out is None else 1.1), out),
    ),
    "the merge into shared memory is that of the push": instead(
        LoRAGroupedLinear, "weight", lambda real, linear: real(linear) if linear.buffer is None else linear.buffer
    ),
    "experts have the update of their neighbour": after(
        LoRAGroupedLinear, "products", lambda pair, *_: [factor.roll(1, 0) for factor in pair]
    ),
    "experts have a quarter of their update": after(
        LoRAGroupedLinear, "products", lambda pair, *_: [factor / 2 for factor in pair]
    ),
    "noise stays in shared memory": after(Push, "_push_policy", noise_left_in),
    "temperature x 1.3": warmer(),
    "temperature x 1.3 on rank 1": warmer(rank=1),
    "top-k 3": draws(top_3),
    "top-k 3 after the first token": draws(top_3, only_later=True),
    "one random stream for both replicas": instead(  # each replica counts its own prompts
        rollout, "derive_seed", lambda real, seed, what, step, place, *rest: real(seed, what, step, place // 2, *rest)
    ),
    "one sample for the whole group": groups(lambda group: group[:1] * len(group)),
    "seeds are ignored": seeds(lambda found: torch.randint(2**62, (len(found),)).tolist()),
    "the end token is never recognised": after(TorchSampler, "__init__", without_end),
    "two rollouts in the wrong order": instead(rollout, "sample_step", swapped),
    "experts of another rank": of_another_rank("expert", ".experts."),
    "columns of another rank": of_another_rank("tensor", "linear_proj"),
    "rows of another rank": of_another_rank("tensor", "linear_qkv"),
}


def for_the_session(name: str) -> MonkeyPatch:
    """Plant the fault ``name`` in this process. Undo the result to remove it. UsageError for an unknown name."""
    if name not in FAULTS:
        nearest = difflib.get_close_matches(name, FAULTS, n=3, cutoff=0)
        raise pytest.UsageError(
            f"--plant: {name!r} is no fault of tests/support/planted.py; nearest: {', '.join(nearest)}"
        )
    patch = MonkeyPatch()
    FAULTS[name](patch)
    return patch
