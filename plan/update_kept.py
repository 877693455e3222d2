"""Estimates the share of the LoRA update that remains in merged bf16 weights.

A merged weight is W + U, the base weight and its update, rounded to the nearest bf16 number. So a change of less than
half the distance to the next number has no effect until U has grown. The share is <C, U> / <U, U>, where C is the
change that remains, as in the metric sync/update_share. There are four assumptions. The weights have a standard
deviation of WEIGHTS. The update has normally distributed entries. Only B changes, so A has its initial values. The
gradients of B are noise, or noise and a signal of SIGNAL times the noise. A simulation of AdamW with rounded weights
gives the same shares (tests/rooms/plan/test_estimates.py). Nothing here imports torch.
"""

import math
from statistics import NormalDist

from facts.architectures import Architecture, Module, over_layers
from knobs import LoraConfig, OptimConfig

WEIGHTS = 0.02  # standard deviation of the matrices of the 30B
SIGNAL = 0.3
STEPS = (5, 20)  # steps after which the share is printed, in addition to the first update
EXPONENTS = range(-24, 2)  # exponents of the weights that are counted; all others together are 1e-6 of the weights
LARGE = 2.0  # in units of the distance between bf16 numbers; rounding keeps all but 1e-8 of updates above this size


def shares(
    optim: OptimConfig, lora: LoraConfig, arch: Architecture, prompts: int, steps: int
) -> dict[str, list[float]]:
    """Return the share of the update that remains after the first update and after each step in STEPS.

    Each entry has two shares: for gradients that are only noise, and for noise with a signal. ``prompts`` is the number
    of prompts per step, and ``steps`` the number of steps of the run. Steps after the end of the run are left out.
    """
    updates = prompts // optim.prompts_per_update
    rates = [optim.rate(step, steps) for step in range(min(steps, max(STEPS))) for _ in range(updates)]
    after = {"the first update": 1} | {f"step {step}": step * updates for step in STEPS if step <= steps}
    return {when: [share(rates[:n], signal, lora, arch) for signal in (0.0, SIGNAL)] for when, n in after.items()}


def share(rates: list[float], signal: float, lora: LoraConfig, arch: Architecture) -> float:
    """Return the share of the update that remains after updates with the learning rates ``rates``.

    ``signal`` is the mean of a gradient whose noise has standard deviation 1.
    """
    b = size_of_b(rates, signal)

    def size(module: Module) -> float:
        """Return the standard deviation of the update's entries, or 0 if the module has no adapter.

        The entries of A are uniform between -1 / sqrt(in) and 1 / sqrt(in).
        """
        rank = lora.rank_of(module.kind == "experts")
        return lora.alpha * b / math.sqrt(3 * module.in_size * rank) if module.target in lora.targets else 0.0

    def square(module: Module) -> float:
        return module.out_size * module.in_size * module.copies * size(module) ** 2

    kept = over_layers(arch, lambda module: square(module) * kept_of(size(module)) if size(module) else 0.0)
    return kept / over_layers(arch, square)


def size_of_b(rates: list[float], signal: float, beta: float = 0.9) -> float:
    """Return the root mean square of B's entries after AdamW's updates, assuming that the second moment has settled.

    A gradient moves B in its own update and in all later updates, because the first moment decays slowly.
    """
    moved, coming = [], 0.0
    for n, rate in reversed([*enumerate(rates, 1)]):
        coming = beta * coming + rate * (1 - beta) / (1 - beta**n)
        moved.append(coming)
    noise = sum(each**2 for each in moved)
    return math.sqrt((noise + (signal * sum(rates)) ** 2) / (1 + signal**2))


def kept_of(size: float) -> float:
    """Return the share of an update that remains after rounding, if its entries have standard deviation ``size``."""
    weight = NormalDist(sigma=WEIGHTS)
    total = 0.0
    for exponent in EXPONENTS:
        among = 2 * (weight.cdf(2.0 ** (exponent + 1)) - weight.cdf(2.0**exponent))
        total += among * rounded(size / 2.0 ** (exponent - 7))  # a bf16 number has 7 binary places
    return total


def rounded(size: float) -> float:
    """Return E[x round(x)] / E[x^2] for a normally distributed x with mean 0 and standard deviation ``size``.

    For x > 0, round(x) is the number of integers k >= 1 with x > k - 1/2. If every x below a counts as 0, the mean of x
    is size * density(a / size). The density is that of the standard normal distribution.
    """
    if size > LARGE:
        return 1.0
    density = NormalDist().pdf
    return 2 / size * sum(density((k - 0.5) / size) for k in range(1, 20))
