"""Adds adaptive quantisation noise (AQN, arXiv 2510.11696) to the sampler's RMSNorm weights.

    norms = norm_targets(arch, ["attention", "experts"])                choose the norms
    clean = clean_norms(weights, norms)                                 once, from the weights without noise
    noisy = perturb(weights, clean, report, seed=..., step=...)         for each push, with a new NoiseReport(sigma)
    check_report(report, norms)                                         after the engine has read all of noisy

The random draws depend only on (seed, step, name of the norm). The noise is added to the clean weight each time. It is
Gaussian, except where the grid of bf16 is coarser than sigma (bf16_grid_noise).
The noise on a norm reaches every module that reads the norm's output: the router and the shared expert read the same
norm as the experts. h is the hidden size. All names are Hugging Face's.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from facts.architectures import Architecture, layers, tensor_shapes
from facts.exits import AqnError, InputError
from facts.seeds import derive_seed

READERS = {  # maps a member of aqn.targets to the kinds of modules that read its norms, and their name in a message
    "attention": (("attention",), "attention"),
    "experts": (("experts",), "MoE layer"),
    "mlp": (("dense", "shared"), "dense layer and no shared expert"),
}


def norm_targets(arch: Architecture, targets: Collection[str]) -> list[str]:
    """Return the names of the norms that get noise with these ``targets``, in the order of the checkpoint.

    attention   input_layernorm of every layer, which feeds q, k and v.
    experts     post_attention_layernorm of every MoE layer.
    mlp         post_attention_layernorm of every dense layer, and of every MoE layer with a shared expert.

    Raises InputError for a target that matches no norm of this model.
    """
    norms = set()
    for target in targets:
        kinds, what = READERS[target]
        before = {f"{layer}{m.reads}.weight" for layer, m in layers(arch) if m.reads and m.kind in kinds}
        if not before:
            raise InputError(
                f"aqn.targets: {target} matches no norm, because this {arch.model_type} model has no {what}; remove it"
            )
        norms |= before
    return [name for name in tensor_shapes(arch) if name in norms]


# ----------------------------------------------------------------------------------------------------------- schedule


def sigma_at(
    step: int, total_steps: int, *, sigma_start: float, sigma_end: float, num_stages: int, schedule: str = "qerl"
) -> float:
    """Return the standard deviation of the noise at ``step`` (from 0) of ``total_steps``.

    Below, s is sigma_start, e is sigma_end, and K is num_stages.
    qerl      follows QeRL's code: the run has K stages, and a step is in stage k = floor(step K / total), at most
              K - 1. Sigma is s (e/s)^((k-1) / (K-2)), and 0 in stage 0. The last stage has exactly e. With K = 2, the
              only noisy stage has s, whereas QeRL's code divides by 0.
    paper     follows algorithm 1 of the paper: k = floor((step' - 1) / floor(total / K)), where step' = step + 1 counts
              from 1. Sigma is s (e/s)^((k-1) / (K-1)), so e is never reached, and 0 in stage 0. The paper leaves two
              cases open. If K does not divide the total, the remaining steps belong to the last stage, K - 1. With
              fewer steps than stages, each step is a stage.
    constant  uses s at every step, including the first; sigma_end and num_stages are not read.
    With K = 1 there is no noisy stage. A step beyond ``total_steps`` is treated as step ``total_steps``. Raises
    ValueError for an invalid argument.
    """
    for name, value, needed, valid in (
        ("schedule", schedule, "qerl, paper or constant", schedule in ("qerl", "paper", "constant")),
        ("step", step, "an integer of at least 0", type(step) is int and step >= 0),
        ("total_steps", total_steps, "an integer of at least 1", type(total_steps) is int and total_steps >= 1),
        ("num_stages", num_stages, "an integer of at least 1", type(num_stages) is int and num_stages >= 1),
        ("sigma_start", sigma_start, "a positive number", 0 < sigma_start < math.inf),
        ("sigma_end", sigma_end, "a positive number", 0 < sigma_end < math.inf or schedule == "constant"),
    ):
        if not valid:
            raise ValueError(f"{name}: must be {needed}, not {value!r}")
    if schedule == "constant":
        return float(sigma_start)
    step = min(step, total_steps)
    if schedule == "qerl":  # in integers, because a quotient of floats can miss a boundary
        stage, last = step * num_stages // total_steps, num_stages - 2
    else:  # paper
        stage, last = step // max(1, total_steps // num_stages), num_stages - 1
    stage = min(stage, num_stages - 1)
    if stage == 0:
        return 0.0
    if stage - 1 == last:  # (e/s)^1 s is not exactly e; qerl with K = 2 has last = 0 and uses s
        return float(sigma_end if last else sigma_start)
    return sigma_start * (sigma_end / sigma_start) ** ((stage - 1) / last)


# -------------------------------------------------------------------------------------------------------------- noise


def bf16_grid_noise(weight: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Return the bf16 ``weight`` plus noise of mean 0 and variance sigma^2 that keeps the sum on the grid of bf16.

    If the grid of bf16 is coarser than sigma, rounded Gaussian noise would mostly vanish or be biased. Let s_u and s_d
    be the steps to the next bf16 number up and down, which differ at a power of 2. The result has the shape of
    ``weight`` and is bf16.
    sigma^2 <= s_u s_d   The noise is +s_u with probability sigma^2 / (s_u (s_u + s_d)), -s_d with probability
                         sigma^2 / (s_d (s_u + s_d)), and otherwise 0. Mean and variance are exact, but the
                         distribution is not Gaussian.
    sigma^2 > s_u s_d    The noise is a Gaussian, rounded up or down at random so that the mean is exact. (Rounding to
                         nearest has a bias of up to 0.03 sigma at powers of 2.) The random rounding adds s^2 / 6 to the
                         variance (the mean over s = s_u and s = s_d), so the variance of the Gaussian is smaller by
                         this amount. The std is exact, except within one step of a power of 2, where its error is
                         at most 3 %.
    """
    clean = weight.double()
    up, down = _grid_steps(weight)
    normal = torch.randn(weight.shape, generator=generator)
    uniform = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    chance_up, chance_down = (sigma**2 / (gap * (up + down)) for gap in (up, down))
    jump = torch.where(uniform < chance_up, up, torch.where(uniform >= 1 - chance_down, -down, 0.0))
    narrower = (sigma**2 - (up**2 + down**2) / 12).clamp(min=0).sqrt()  # the mean of s^2 / 6 over both sides
    smooth = (clean + narrower * normal).float()
    rounded = _round_at_random(smooth, (uniform * 2**16).int())
    return torch.where(sigma**2 <= up * down, (clean + jump).to(torch.bfloat16), rounded)


def _round_at_random(value: Tensor, draws: Tensor) -> Tensor:
    """Round the fp32 ``value`` to bf16, up or down at random, so that the mean of the result is ``value``.

    ``draws`` are random int32 numbers from 0 to 2^16 - 1. bf16 is the upper half of fp32. Each draw is added to the
    lower half, and the carry rounds the upper half up with the right probability.
    """
    return ((value.view(torch.int32) + draws) & -(2**16)).view(torch.float32).to(torch.bfloat16)


def _grid_steps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return s_u and s_d of bf16 weights (see bf16_grid_noise) in fp64, in which their squares do not underflow."""
    above, below = (torch.nextafter(weight, torch.full_like(weight, end)).double() for end in (math.inf, -math.inf))
    return above - weight.double(), weight.double() - below


def _noisy(clean: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Return ``clean`` plus noise, in the type of ``clean``. For bf16 see bf16_grid_noise; fp32 gets Gaussian noise."""
    if clean.dtype is torch.bfloat16:
        return bf16_grid_noise(clean, sigma, generator)
    return clean + sigma * torch.randn(clean.shape, generator=generator)


def clean_norms(stream: Iterable[tuple[str, Tensor]], norms: Collection[str]) -> dict[str, Tensor]:
    """Return CPU copies of the weights whose names are in ``norms``, by name.

    ``stream`` yields (name, weight) pairs without noise, and is read to its end. Raises AqnError if a norm is missing.
    """
    clean = {name: tensor.detach().cpu().clone() for name, tensor in stream if name in norms}
    for norm in norms:
        if norm not in clean:
            raise AqnError(f"AQN: {norm} should get noise, but it is not among the weights")
    return clean


def perturb(
    stream: Iterable[tuple[str, Tensor]], clean: Mapping[str, Tensor], report: "NoiseReport", *, seed: int, step: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, whole tensor) pairs of ``stream``, with noise of std ``report.sigma`` on the norms in ``clean``.

    The stream may be in any order and contain only some of the tensors. ``clean`` is the result of clean_norms. All
    noise is drawn on the CPU, so it is the same for every rank, layout and device. Only ``report`` is modified: the
    noise is added to its statistics. Raises AqnError if a norm in the stream differs from its clean weight, because
    noise on top of earlier noise would be a random walk.
    """
    for name, tensor in stream:
        if report.sigma and name in clean:
            before = clean[name]
            if not torch.equal(tensor.detach().cpu(), before):
                raise AqnError(f"AQN: {name} is no longer the clean weight, so noise would be added to noise")
            generator = torch.Generator().manual_seed(derive_seed(seed, "aqn", step, name))
            after = _noisy(before, report.sigma, generator)
            report.add(name, after.float() - before.float(), before)
            tensor = after.to(tensor.device)
        yield name, tensor


# ------------------------------------------------------------------------------------------------------------- report


class NoiseReport:
    """The statistics of one push's noise over all norms. The noise is the pushed weight minus the clean weight."""

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.norms: set[str] = set()  # the norms whose noise was pushed
        self.num_elements = self.num_changed = 0
        self.sums = torch.zeros(3, dtype=torch.float64)  # of the noise, its squares, and their variances

    def add(self, name: str, noise: Tensor, clean: Tensor) -> None:
        """Add the ``noise`` (h,) of the norm ``name``, whose clean weight is ``clean``, to the statistics."""
        self.norms.add(name)
        noise, variance = noise.double(), self.sigma**2
        fourth = torch.full_like(noise, 3 * variance**2)  # the fourth moment of a Gaussian
        if clean.dtype is torch.bfloat16:  # jumps on the grid are rare and long, so their fourth moment is larger
            up, down = _grid_steps(clean)
            fourth = torch.where(variance <= up * down, variance * (up**3 + down**3) / (up + down), fourth)
        self.num_elements += noise.numel()
        self.num_changed += int((noise != 0).sum())
        self.sums += torch.stack([noise.sum(), (noise**2).sum(), (fourth - variance**2).sum()])

    @property
    def mean(self) -> float:
        return self.sums[0].item() / max(1, self.num_elements)

    @property
    def std(self) -> float:
        mean_square = self.sums[1].item() / max(1, self.num_elements)
        return math.sqrt(max(mean_square - self.mean**2, 0.0))  # in this order NaN stays NaN

    @property
    def std_error(self) -> float:
        """The standard error of the std, as a share of sigma."""
        return math.sqrt(self.sums[2].item()) / (2 * self.num_elements * self.sigma**2)


def check_report(report: NoiseReport, norms: Collection[str], tolerance: float = 0.1) -> None:
    """Raise AqnError unless all ``norms`` got noise in the push, with mean 0 and std sigma.

    The std may differ from sigma by ``tolerance`` times sigma, or by 5 standard errors if that is more. The standard
    error of the std is sigma / sqrt(2 n) for n Gaussian elements, which is 10 % of sigma at n = 50. If the noise
    consists of rare jumps on the grid of bf16, the standard error is larger. The mean has the same limits, with the
    standard error sigma / sqrt(n). If sigma is 0, nothing is checked.
    """
    sigma, n = report.sigma, report.num_elements
    if sigma == 0:
        return
    if not report.norms:
        raise AqnError(f"AQN: sigma is {sigma:g}, but no norm got noise, because the push had none of the targets")
    if missing := set(norms) - report.norms:
        raise AqnError(
            f"AQN: {min(missing)} should get noise, but the push did not have it ({len(missing)} such norms)"
        )
    measured = f"over {n} elements of {len(report.norms)} norms, {report.num_changed / n:.1%} of them changed"
    for what, value, needed, bound in (
        ("std", report.std, sigma, max(tolerance, 5 * report.std_error)),
        ("mean", report.mean, 0.0, max(tolerance, 5 / math.sqrt(n))),
    ):
        if not abs(value - needed) <= bound * sigma:
            raise AqnError(
                f"AQN: the {what} of the noise is {value:.3g} instead of {needed:g} +- {bound * sigma:.2g}, {measured}"
            )
