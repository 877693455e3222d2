"""Runs the training with a fault planted on purpose, to test whether the benchmark of methods finds the fault.

    torchrun --nproc_per_node=1 checks/planted_fault.py FAULT configs/bench.yaml [section.key=value ...]

FAULT is a name, or NAME=VALUE (rounded=3), or several of these joined by + (rounded=3+inverted_weights).
A fault is a function. It gets a right function of the method or the sampler, and returns a wrong function. The wrong
function replaces the right one while the training runs; no file is changed. Everything else runs as in train_grpo.py.
Faults of the method are controls: if a comparison cannot find such a fault, its other results mean nothing.
Faults of the sampler create mismatches between sampler and trainer, and the benchmark compares methods under these
mismatches. Faults of the sampler need checks.off=[logp_gap], because this check finds them.
This file does not import torch at the top, because sweep.py checks the names of faults without torch.
"""

import functools
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from facts.exits import InputError
from facts.seeds import derive_seed
from inputs.config import command, resolve_config
from inputs.files import shown
from knobs import Config, Merging

Function = Callable[..., Any]

ROUND_GROUP = 32  # this many neighbouring inputs of an output share a scale


# ------------------------------------------------------------------------------------------------ faults of the method


def inverted_weights(right: Function) -> Function:
    """Invert the importance weights: divide the sampler's probabilities by the trainer's, instead of the reverse."""
    return lambda old_logp, rollout_logp, *rest, **named: right(rollout_logp, old_logp, *rest, **named)


def reversed_clip(right: Function) -> Function:
    """Make PPO take the smaller of its two losses, so that it clips exactly where it should not.

    A is the advantage, and r the ratio. The smaller of -A r and -A clip(r) is minus the larger of A r and A clip(r).
    That larger one is the right loss for an advantage of -A. CISPO does not choose between two losses, and its loss is
    linear in A, so this fault does not change it.
    """

    def policy_loss(logp: Any, old_logp: Any, advantages: Any, mask: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        # The dual clip bounds the loss at -3 A where A < 0. The smaller loss is at most -A (1 + clip_high) there.
        options["dual_clip"] = 0
        _, statistics = right(logp, old_logp, advantages, mask, **options)
        loss, _ = right(logp, old_logp, -advantages, mask, **options)
        return -loss, statistics | {"policy_loss": -loss.detach()}

    return policy_loss


def foreign_routes(right: Function) -> Function:
    """Replay each token with the experts of the token before it."""
    return lambda replay, routes, *rest, **named: right(replay, routes.roll(1, 1), *rest, **named)


def lost_experts(right: Function) -> Function:
    """Leave the experts' adapters out of the sampler's weights, both in training and in evaluations."""

    def merged(adapter: Any, weight: Any, experts: slice | None = None, out: Any = None) -> Any:
        if experts is None:
            return right(adapter, weight, out=out)
        return weight if out is None else out.copy_(weight)

    return merged


def altered_evaluation(right: Any) -> Any:
    """Make evaluations measure the sampler's policy, with its noise or rounding, instead of the trained policy.

    ``right`` is the class Push. The first evaluation, which measures the base model, is not altered.
    """

    class AlteredPush(right):
        def __call__(self, step: int, probe: list[int]) -> dict[str, float]:
            self.next = step + 1, probe
            return super().__call__(step, probe)

        def clean(self) -> None:
            """Push with the noise of the next step. Before the first step, do nothing."""
            again = getattr(self, "next", None)
            if again:
                self(*again)
                self.next = again

    return AlteredPush


def permuted_teacher(right: Function) -> Function:
    """Exchange the teacher's adapters in the first half of the layers with those in the second half."""

    def read(*given: Any) -> Any:
        names, factors = zip(*right(*given), strict=True)
        return zip(names[len(names) // 2 :] + names[: len(names) // 2], factors, strict=True)

    return read


# ------------------------------------------------------------------------------------------------ faults of the sampler


def rounded_weights(weight: Any, bits: int, group: int = ROUND_GROUP, *, down: bool = False) -> Any:
    """Round weights to whole multiples of a scale, as in a sampler whose weights have ``bits`` bits.

    Every ``group`` neighbouring inputs of an output share one scale. The scale maps the largest absolute value to the
    largest integer, 2^(bits - 1) - 1 (symmetric). The last group may be smaller. With ``down``, multiples are rounded
    down instead of to the nearest integer.

    (out, in) -> (out, in)
    """
    import torch

    largest = 2 ** (bits - 1) - 1
    parts = []
    for part in weight.detach().float().split(group, dim=-1):
        scale = (part.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        multiples = part / scale
        parts.append((multiples.floor() if down else multiples.round()) * scale)
    return torch.cat(parts, dim=-1).to(weight.dtype)


def rounding_push(right: Any, changed: Function) -> Any:
    """Return a subclass of ``right``, the class Push, that changes the engine's weights for the training samples.

    The engine then gets ``changed(push, step, name, tensor)`` instead of each tensor. Evaluations and the trainer use
    the policy itself.
    """
    from facts.architectures import tensor_shapes

    class RoundingPush(right):
        def __init__(self, way: Any, engine: Any) -> None:
            cfg, policy = way.cfg, way.policy
            if cfg.aqn.schedule != "off":
                raise InputError(f"aqn.schedule: {cfg.aqn.schedule}; needed with a fault that rounds weights: off")
            if cfg.merging is Merging.NOWHERE:
                raise InputError(f"rollout.sync: {cfg.rollout.sync}; needed with a fault that rounds weights: merged")
            self.matrices = {name for name in tensor_shapes(policy.arch) if name.endswith("_proj.weight")}
            super().__init__(way, engine)

        def _usable_stacks(self) -> dict[str, Any]:
            """Return no stacks, so that the trainer does not compute with experts in the engine's memory."""
            return {}

        def tensors(self, only: set[str] | None = None) -> Any:
            """Yield the tensors of a push. Add all matrices to ``only``, so that the push undoes their rounding."""
            return super().tensors(None if only is None else only | self.matrices)

        def __call__(self, step: int, probe: list[int]) -> dict[str, float]:
            metrics = super().__call__(step, probe)
            named = ((name, changed(self, step, name, x)) for name, x in self.tensors(set()))
            self._load(self.engine.load_weights, named)
            return metrics

    return RoundingPush


def rounded(right: Any, bits: str, *, down: bool = False) -> Any:
    """Sample the training completions with weights of 3, 4 or 8 bits, as an int8 or int4 engine does.

    The embedding, head, norms, biases, routers and shared-expert gates are not rounded. ``right`` is the class
    Push. With ``down``, the weights are rounded down instead of to the nearest multiple.
    """

    def changed(push: Any, step: int, name: str, weight: Any) -> Any:
        return rounded_weights(weight, int(bits), down=down) if name in push.matrices else weight

    return rounding_push(right, changed)


def on_grid(weight: Any, merged: Any, places: int, offset: Any) -> Any:
    """Return W + d floor(U / d + offset), which rounds the update U = ``merged`` - W to whole multiples of d.

    W is ``weight``, and d is the distance between neighbouring numbers near W that have ``places`` binary places. bf16
    has 7 binary places. An ``offset`` of 0.5 rounds U / d to the nearest integer. An offset that is uniform in [0, 1)
    rounds U / d up or down at random. The mean over many merges is then W + U. All tensors are fp32. W may have any
    shape.
    """
    exponent = weight.abs().clamp(min=1e-12).frexp().exponent  # 2^(exponent - 1) <= |W| < 2^exponent; 0 has none
    spacing = (exponent - 1 - places).float().exp2()
    return weight + ((merged - weight) / spacing + offset).floor() * spacing


def uniform(seed: int, step: int, name: str, like: Any) -> Any:
    """Draw numbers in [0, 1) in the shape of ``like``. They depend on (seed, step, name), and not on the rank."""
    import torch

    generator = torch.Generator().manual_seed(derive_seed(seed, "coarse", step, name))
    return torch.rand(like.shape, generator=generator).to(like.device)


def refuse_other_merges(cfg: Any) -> None:
    """Raise InputError unless adapters are merged only in pushes, into whole fp32 tensors, without recomputation."""
    if cfg.merging is not Merging.PUSHES or cfg.rollout.expert_parallel or cfg.model.recompute:
        raise InputError(
            f"model.dtype, rollout.sync, rollout.expert_parallel, model.recompute: {cfg.model.dtype}, "
            f"{cfg.rollout.sync}, {cfg.rollout.expert_parallel}, {cfg.model.recompute}; needed with a fault that "
            "merges on a grid: fp32, merged, False, False"
        )


def coarse(right: Any, places: str, *, offsets: Function = lambda *of: 0.5) -> Any:
    """Sample the training completions with weights that are merged on a grid of ``places`` binary places (`on_grid`).

    With fewer places than bf16 has, the large updates of a tiny model lose as large a share as small updates lose in
    bf16. fault/update_share and fault/update_error are the metrics sync/update_share and sync/update_error for this
    merge. ``right`` is the class Push. ``offsets(seed, step, name, tensor)`` returns the offsets for a tensor.
    """
    import torch

    from weights import huggingface

    def changed(push: Any, step: int, name: str, merged: Any) -> Any:
        weight = push.base[name]
        kept = on_grid(weight, merged, int(places), offsets(push.cfg.train.seed, step, name, merged))
        pair = torch.stack([merged - weight, kept - merged]).flatten(1)
        push.products += (pair @ pair.t()).cpu()
        return kept

    rounding: Any = rounding_push(right, changed)

    class CoarsePush(rounding):
        def __init__(self, way: Any, engine: Any) -> None:
            refuse_other_merges(way.cfg)
            super().__init__(way, engine)
            self.base = dict(huggingface.export(self.model, self.arch, self.parallel, merge=False))

        def __call__(self, step: int, probe: list[int]) -> dict[str, float]:
            self.products = torch.zeros(2, 2)  # <U, U>, <U, C - U>; .., <C - U, C - U>; C is the part of U that is kept
            metrics = super().__call__(step, probe)
            (own, both), (_, lost) = self.products.tolist()
            return metrics | {
                "fault/update_share": 1 + both / own if own else 1.0,
                "fault/update_error": (lost / own) ** 0.5 if own else 0.0,
            }

    return CoarsePush


def coarse_passes(right: Function, places: str) -> Function:
    """Make the trainer compute with the weights that `coarse` gives the sampler.

    The backward pass ignores the rounding: the LoRA factors get their gradients as if the weights were W + U
    (see `on_grid`).
    """
    from lora_megatron import merge

    def coarse_merge(weight: Any, first: Any, second: Any, scale: float, out: Any = None) -> Any:
        kept = on_grid(weight, merge(weight, first, second, scale), int(places), 0.5)
        return kept if out is None else out.copy_(kept)

    def logprobs(policy: Any, micro: Any) -> Any:
        refuse_other_merges(policy.cfg)
        for adapter in policy.adapters.values():
            adapter.merges = True
        with mock.patch("lora_megatron.merge", coarse_merge):
            return right(policy, micro)

    return logprobs


def flips(right: Function) -> Function:
    """Make the sampler replace the lowest-ranked expert of each sampled token with the next best one, in training.

    It does this in every MoE layer. The weights of the experts are as if the replaced expert did not exist. Prompt
    tokens keep their experts.
    """

    def sample(engine: Any, *rest: Any, **named: Any) -> Any:
        decoder = embedded(engine, "flips").decoder
        route, decode = decoder._route, decoder.decode

        def next_best(logits: Any) -> tuple[Any, Any]:
            _, experts = route(logits)
            return route(logits.scatter(1, experts[:, -1:], float("-inf")))

        def decode_flipped(*given: Any) -> tuple[Any, list[Any]]:
            with mock.patch.object(decoder, "_route", next_best):
                return decode(*given)

        with mock.patch.object(decoder, "decode", decode_flipped):
            return right(engine, *rest, **named)

    return sample


def noise(right: Function, size: str) -> Function:
    """Add normal noise with standard deviation ``size`` to the sampler's logits in training, new for each token.

    The random number that draws a token is also the seed of its noise.
    """

    def sample(engine: Any, *rest: Any, **named: Any) -> Any:
        import torch

        from engines import torch_sampler

        pick = torch_sampler.pick

        def pick_noisy(logits: Any, uniform: Any, temperature: float) -> tuple[Any, Any]:
            seeds = [derive_seed(number, "logit noise") for number in uniform.flatten().tolist()]
            rows = [torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            return pick(logits + float(size) * torch.stack(rows).to(logits.device), uniform, temperature)

        with mock.patch.object(torch_sampler, "pick", pick_noisy):
            return right(embedded(engine, "noise"), *rest, **named)

    return sample


def embedded(engine: Any, fault: str) -> Any:
    """Return ``engine``. Raises InputError, which names ``fault``, unless the engine is the embedded sampler."""
    from engines.torch_sampler import TorchSampler

    if not isinstance(engine, TorchSampler):
        raise InputError(f"rollout.engine: found {type(engine).__name__}; needed for the fault {fault}: torch")
    return engine


# ------------------------------------------------------------------------------------------------ planting


class Fault(NamedTuple):
    """A fault, and the function or class that it replaces."""

    place: str  # the full name of the right function or class
    wrong: Function  # (right one) -> wrong one; with ``values``: (right one, value) -> wrong one
    values: str = ""  # a regular expression for the values that the fault takes; empty if it takes none


BITS = "3|4|8"
PLACES = r"-?\d"
FAULTS = {
    "inverted_weights": Fault("grpo.rollout_weights", inverted_weights),
    "reversed_clip": Fault("grpo.policy_loss", reversed_clip),
    "permuted_teacher": Fault("weights.teacher.read", permuted_teacher),
    "foreign_routes": Fault("model.routing_replay.RoutingReplay.replaying", foreign_routes),
    "lost_experts": Fault("lora_megatron.Adapter.merged", lost_experts),
    "altered_evaluation": Fault("weight_sync.Push", altered_evaluation),
    "rounded": Fault("weight_sync.Push", rounded, BITS),
    "rounded_down": Fault("weight_sync.Push", functools.partial(rounded, down=True), BITS),
    "coarse": Fault("weight_sync.Push", coarse, PLACES),
    "coarse_stochastic": Fault("weight_sync.Push", functools.partial(coarse, offsets=uniform), PLACES),
    "coarse_fixed": Fault(
        "weight_sync.Push", functools.partial(coarse, offsets=lambda seed, step, *of: uniform(seed, 0, *of)), PLACES
    ),
    "coarse_biased": Fault(
        "weight_sync.Push", functools.partial(coarse, offsets=lambda *of: uniform(*of) ** 2), PLACES
    ),
    "coarse_passes": Fault("weights.policy.Policy.logprobs", coarse_passes, PLACES),
    "flips": Fault("rollout.sample", flips),
    "noise": Fault("rollout.sample", noise, r"\d+(\.\d+)?"),
}
# Maps a fault of the method to the configurations in which it changes nothing, as a condition and in words.
IDLE: dict[str, tuple[Callable[[Config], bool], str]] = {
    "inverted_weights": (lambda c: not c.loss.corrects, "loss.importance is none or uncorrected"),
    "reversed_clip": (
        lambda c: c.loss.kind == "cispo" or c.optim.prompts_per_update == c.rollout.prompts_per_step,
        "loss.kind is cispo, or each rollout has one update (optim.prompts_per_update is rollout.prompts_per_step)",
    ),
    "permuted_teacher": (lambda c: not c.loss.teacher, "there is no loss.teacher"),
    "foreign_routes": (lambda c: c.replay.mode == "off", "replay.mode is off"),
    "lost_experts": (
        lambda c: c.merging is Merging.NOWHERE or not c.lora.expert_targets,
        "lora.targets adapts no expert, or the factors are pushed without being merged (rollout.sync)",
    ),
}


def named_faults(text: str) -> list[tuple[str, Function]]:
    """Return the place and the function of each fault in ``text``. Raises InputError for an unknown name or value."""
    return [_named_fault(one) for one in text.split("+")]


def _named_fault(text: str) -> tuple[str, Function]:
    name, _, value = text.partition("=")
    if name not in FAULTS:
        raise InputError(f"fault: found {shown(name)}; needed: one of {', '.join(FAULTS)}")
    place, wrong, values = FAULTS[name]
    if not re.fullmatch(values, value):
        needed = f"{name}=VALUE, a value like {values}" if values else f"{name}, which takes no value"
        raise InputError(f"fault: found {shown(text)}; needed: {needed}")
    return place, lambda right: wrong(right, *filter(None, [value]))


def refuse_idle(text: str, cfg: Config) -> None:
    """Raise InputError if a fault in ``text`` changes nothing in a run with this configuration."""
    for name in text.split("+"):
        changes_nothing, reason = IDLE.get(name, (lambda c: False, ""))
        if changes_nothing(cfg):
            raise InputError(f"fault: {name} changes nothing, because {reason}; choose another fault or configuration")


def plant(text: str) -> None:
    """Replace the correct functions with the faulty ones. Raises InputError for an unknown fault."""
    for place, wrong in named_faults(text):
        owner, _, attribute = place.rpartition(".")
        setattr(pkgutil.resolve_name(owner), attribute, wrong(pkgutil.resolve_name(place)))


@command
def main(arguments: list[str]) -> int:
    text = arguments[0] if arguments else ""
    plant(text)
    import parallel_setup
    import train_grpo

    def resolve(*given: Any) -> tuple[Config, list[str]]:
        cfg, notes = resolve_config(*given)
        refuse_idle(text, cfg)
        return cfg, notes

    with mock.patch("run.command.resolve_config", resolve):
        return parallel_setup.run_command(train_grpo.main, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
