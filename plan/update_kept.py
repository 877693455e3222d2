"""What share of the LoRA update do merged bf16 weights hold?

W + U is rounded to the nearest bf16 number, so a change of less than half of the distance to the next number is lost
until U has grown. The share is <C, U> / <U, U> of the change C that is left, as in the metric sync/update_share.
Assumed: weights with a standard deviation of WEIGHTS, an update of normally distributed entries, which B alone makes,
and gradients of B that are noise, or noise and a signal of SIGNAL of its size. A simulation of AdamW with rounded
weights gives the same (tests/rooms/plan/test_estimates.py). Nothing here imports torch.
"""

import math
from statistics import NormalDist

from facts.architectures import Architecture, Module, over_layers
from knobs import LoraConfig, OptimConfig

WEIGHTS = 0.02  # of the 30B's matrices
SIGNAL = 0.3
STEPS = (5, 20)  # at whose ends the share is told, after that of the first update
EXPONENTS = range(-24, 2)  # of the weights that are counted; all others together are 1e-6 of them
LARGE = 2.0  # distances of bf16 numbers: of an entry of that size rounding leaves all but 1e-8


def shares(
    optim: OptimConfig, lora: LoraConfig, arch: Architecture, prompts: int, steps: int
) -> dict[str, list[float]]:
    """When -> the share of the update that the merged weights hold, by noise alone and with a signal.

    ``prompts``: of a step; ``steps``: of the run.
    """
    updates = prompts // optim.prompts_per_update
    rates = [optim.rate(step, steps) for step in range(min(steps, max(STEPS))) for _ in range(updates)]
    after = {"the first update": 1} | {f"step {step}": step * updates for step in STEPS if step <= steps}
    return {when: [share(rates[:n], signal, lora, arch) for signal in (0.0, SIGNAL)] for when, n in after.items()}


def share(rates: list[float], signal: float, lora: LoraConfig, arch: Architecture) -> float:
    """The share after updates with these learning rates; ``signal`` is the mean of a gradient whose noise has std 1."""
    b = size_of_b(rates, signal)

    def size(module: Module) -> float:
        """Of the update's entries, as those of A are uniform to 1 / sqrt(in); 0 of a module without an adapter."""
        rank = lora.rank_of(module.kind == "experts")
        return lora.alpha * b / math.sqrt(3 * module.in_size * rank) if module.target in lora.targets else 0.0

    def square(module: Module) -> float:
        return module.out_size * module.in_size * module.copies * size(module) ** 2

    kept = over_layers(arch, lambda module: square(module) * kept_of(size(module)) if size(module) else 0.0)
    return kept / over_layers(arch, square)


def size_of_b(rates: list[float], signal: float, beta: float = 0.9) -> float:
    """The root mean square of B's entries after AdamW's updates, whose second moment has settled.

    The gradient of an update moves B in all later ones, by the decaying first moment.
    """
    moved, coming = [], 0.0
    for n, rate in reversed([*enumerate(rates, 1)]):
        coming = beta * coming + rate * (1 - beta) / (1 - beta**n)
        moved.append(coming)
    noise = sum(each**2 for each in moved)
    return math.sqrt((noise + (signal * sum(rates)) ** 2) / (1 + signal**2))


def kept_of(size: float) -> float:
    """The share of an update with entries of standard deviation ``size`` that rounding leaves in the weights."""
    weight = NormalDist(sigma=WEIGHTS)
    total = 0.0
    for exponent in EXPONENTS:
        among = 2 * (weight.cdf(2.0 ** (exponent + 1)) - weight.cdf(2.0**exponent))
        total += among * rounded(size / 2.0 ** (exponent - 7))  # 7 binary places of a bf16 number
    return total


def rounded(size: float) -> float:
    """E[x round(x)] / E[x^2] of a normal x with this standard deviation.

    round(x) is the sum over k of 1 where x is above k - 1/2, and E[x where x > a] is size x density(a / size).
    """
    if size > LARGE:
        return 1.0
    density = NormalDist().pdf
    return 2 / size * sum(density((k - 0.5) / size) for k in range(1, 20))
