"""A training with a fault planted on purpose, to see whether the benchmark of methods finds it.

    torchrun --nproc_per_node=1 benchmarks/planted_fault.py FAULT configs/bench.yaml [section.key=value ...]

A fault is a function: it gets the right function of the method and returns the wrong one that takes its place while the
training runs; no file is changed. Everything else is train_grpo.py. These runs are controls: if a comparison cannot
find its fault, its other results mean nothing. No torch at the top, because sweep.py checks the names of faults without
it.
"""

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import command
from inputs.files import InputError

Function = Callable[..., Any]


def inverted_weights(right: Function) -> Function:
    """Importance weights are those of the sampler over the trainer, the reciprocals of the right ones."""
    return lambda old_logp, rollout_logp, *rest, **named: right(rollout_logp, old_logp, *rest, **named)


def reversed_clip(right: Function) -> Function:
    """PPO takes the smaller of the two losses: it clips what should pass, and passes what should be clipped.

    The smaller of -A r and -A clip(r) is minus the larger of A r and A clip(r), which is the right loss of -A. CISPO
    has no such choice, and its loss is linear in A, so it stays as it is.
    """

    def policy_loss(logp: Any, old_logp: Any, advantages: Any, mask: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        # The dual clip bounds the loss at -3 A where A < 0. The smaller loss is at most -A (1 + clip_high) there.
        options["dual_clip"] = 0
        _, statistics = right(logp, old_logp, advantages, mask, **options)
        loss, _ = right(logp, old_logp, -advantages, mask, **options)
        return -loss, statistics | {"policy_loss": -loss.detach()}

    return policy_loss


def foreign_routes(right: Function) -> Function:
    """Each token is replayed on the experts of the token before it."""
    return lambda replay, routes, *rest, **named: right(replay, routes.roll(1, 1), *rest, **named)


def lost_experts(right: Function) -> Function:
    """The adapters of the experts never reach the sampler, in training and in evaluations."""

    def merged(adapter: Any, weight: Any, experts: slice | None = None, out: Any = None) -> Any:
        if experts is None:
            return right(adapter, weight, out=out)
        return weight if out is None else out.copy_(weight)

    return merged


def rounded_down(right: Function) -> Function:
    """The sampler's weights are rounded down instead of to the nearest."""

    def rounded(weight: Any, bits: int, group: int) -> Any:
        down = weight.detach().float().clone()
        for part in down.split(group, dim=-1):  # views of `down`
            scale = (part.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=2.0**-126)
            part.div_(scale).floor_().mul_(scale)
        return down.to(weight.dtype)

    return rounded


def altered_evaluation(right: Function) -> Function:
    """Evaluations measure the policy that samples, with noise or rounding, instead of the one that is trained."""

    def evaluate(run: Any, after_steps: int) -> None:
        if after_steps:  # the policy before the first step is the base model, and has not been pushed with noise yet
            run.sampler.weights.push(after_steps, run.inputs.held_out[0].prompt)
        right(run, after_steps)

    return evaluate


# name -> the place of the right function, and the fault
FAULTS: dict[str, tuple[str, Callable[[Function], Function]]] = {
    "inverted_weights": ("grpo.rollout_weights", inverted_weights),
    "reversed_clip": ("grpo.policy_loss", reversed_clip),
    "foreign_routes": ("routing_replay.RoutingReplay.replaying", foreign_routes),
    "lost_experts": ("lora_megatron.Adapter.merged", lost_experts),
    "rounded_down": ("quantisation.rounded", rounded_down),
    "altered_evaluation": ("startup.Run.evaluate", altered_evaluation),
}


def plant(name: str) -> None:
    """Put the fault in the place of the right function; InputError for an unknown fault, or if the place is gone."""
    if name not in FAULTS:
        raise InputError(f"FAULT: found {name!r}; needed: one of {', '.join(FAULTS)}")
    place, fault = FAULTS[name]
    owner, _, attribute = place.rpartition(".")
    try:
        right = pkgutil.resolve_name(place)
    except AttributeError as error:
        raise InputError(f"{place}: not there ({error}); needed for the fault {name}") from None
    setattr(pkgutil.resolve_name(owner), attribute, fault(right))


@command
def main(arguments: list[str]) -> int:
    plant(arguments[0] if arguments else "")
    import parallel_setup
    import train_grpo

    return parallel_setup.run_command(train_grpo.main, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
