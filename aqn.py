"""Adaptive quantisation noise (AQN, arXiv 2510.11696): Gaussian noise on RMSNorm weights of the sampler's copy only.

    plan = norm_targets(arch, ["attention", "experts"], router="clean")      which norms, and who sees noise
    clean = clean_norms(weights, plan)                                       once, from the weights without noise
    noisy = perturb(weights, plan, clean, sigma=..., seed=..., step=...)     each push; a stream
    check_report(noisy.result())                                             after the stream was read

The noise is a function of (seed, step, name of the norm). It is added to the clean weight each time.
The targets say which of the matrices that read a norm's output shall see its noise. If all of them shall, only the norm
changes. A matrix that shall not see the noise of a noisy norm has it divided out of its columns:
(W diag(w / (w + d))) ((w + d) x) = W (w x). If only the router or the shared expert shall see it, their
columns are multiplied by (w + d) / w, and the norm stays clean. w clean norm weight (h,), d its noise (h,),
W a matrix that reads the norm's output (out, h), h hidden size. Names are Hugging Face's.
"""

import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from architecture import Architecture, layers, tensor_shapes
from config import derive_seed
from engines.interface import TensorStream
from inputs.files import InputError

NEAREST_ZERO = 2.0**-10  # least |noisy weight| / |clean weight|, so that w / (w + d) exists
ROLES = ("attention", "experts", "mlp", "router")
NORM = "norm.weight"  # the names of all RMSNorms end so, and no other name does
DEAD = 2.0**-30  # a smaller clean weight lets nothing pass, so no factor of a column can add noise there


class AqnError(RuntimeError):
    """The noise is not what was asked for. A run that continued would be silently wrong."""


# --------------------------------------------------------------------------------------------- which tensors, and who


@dataclass(frozen=True)
class NormNoise:
    """What the noise of one norm changes: the norm itself, or only the columns of the `scaled` matrices."""

    noisy: bool = True
    restored: tuple[str, ...] = ()  # matrices that must not see the noise of a noisy norm: columns times w / (w + d)
    scaled: tuple[str, ...] = ()  # matrices that alone see the noise of a clean norm: columns times (w + d) / w


def norm_targets(arch: Architecture, targets: Collection[str], *, router: str) -> dict[str, NormNoise]:
    """Norm name -> what its noise changes, in the order of the checkpoint.

    attention   input_layernorm of every layer, which feeds q, k and v.
    experts     post_attention_layernorm of every MoE layer, for its routed experts.
    mlp         post_attention_layernorm of every dense layer. In a MoE layer, the same norm for the shared expert: its
                gate_proj, up_proj and shared_expert_gate see the noise. Without `experts` the norm itself stays clean
                and the noise is in their columns. `experts` without `mlp` takes the noise out of their columns.
    router      the gate of every MoE layer, in its columns. Alone, it makes the disturbance that routing replay is for.
    a pattern   (fnmatch) of whole names, such as model.layers.3.*_layernorm.weight: everything that reads those norms
                sees the noise. q_norm, k_norm and the final norm can only be named so.
    With ``router`` clean, the columns of every MoE layer's gate take the noise of its norm out; with noisy, the gate
    sees what the routed experts see. The compensation is exact in fp32. In bf16, rounding leaves a part of the noise:
    in rms 14 % at sigma 0.01 and 40 % at 0.001 (w = 1). With 128 experts and 8 a token, 2 % of the tokens then change
    one of their experts at sigma 0.01, and 9 % with noisy.

    Raises InputError for a target that touches nothing, for a pattern that matches a tensor which is not the weight of
    an RMSNorm, and for the target router where ``router`` is clean.
    """
    if "router" in targets and router == "clean":
        raise InputError("aqn.targets: found router while aqn.router is clean; needed: one of the two")
    readers: dict[str, set[str]] = {}  # norm -> the kinds of modules that see its noise; all for a pattern
    for target in targets:
        for norm, reader in _norms_of(arch, target).items():
            readers.setdefault(norm, set()).add(reader)
    return {norm: _effect(arch, norm, readers[norm], router) for norm in tensor_shapes(arch) if norm in readers}


def touched_names(plan: Mapping[str, NormNoise]) -> set[str]:
    """The names of all tensors that noise of any sigma changes. A push with noise, or back to clean, brings them."""
    return {name for norm, effect in plan.items() for name in (norm,) * effect.noisy + effect.restored + effect.scaled}


def _norms_of(arch: Architecture, target: str) -> dict[str, str]:
    """The norms of a target -> the kind of module that sees their noise; all for a pattern."""
    names = list(tensor_shapes(arch))
    if target not in ROLES:
        matched = [name for name in names if fnmatchcase(name, target)]
        others = [name for name in matched if not name.endswith(NORM)]
        if len(matched) == len(others):
            raise InputError(
                f"aqn.targets: {target!r} matches no RMSNorm of this {arch.model_type} model; needed: "
                f"{', '.join(ROLES)}, or a pattern of whole names such as "
                + next(name for name in names if name.endswith(NORM))
            )
        if others:
            raise InputError(f"aqn.targets: {target!r} matches {others[0]}, which is not the weight of an RMSNorm")
        return dict.fromkeys(matched, "all")
    kinds = ("dense", "shared") if target == "mlp" else (target,)
    kind_by_norm = {f"{layer}{m.reads}.weight": m.kind for layer, m in layers(arch) if m.reads and m.kind in kinds}
    if not kind_by_norm:
        lacks = "dense layer and no shared expert" if target == "mlp" else "MoE layer"
        raise InputError(f"aqn.targets: {target} touches no norm: this {arch.model_type} model has no {lacks}")
    return kind_by_norm


def _effect(arch: Architecture, norm: str, readers: set[str], router: str) -> NormNoise:
    """What the noise of ``norm`` changes if only modules of the kinds ``readers`` may see it (all: every one)."""
    gate, shared = (
        tuple(
            f"{layer}{block}.weight"
            for layer, module in layers(arch)
            if module.kind == kind and f"{layer}{module.reads}.weight" == norm
            for block in module.blocks
        )
        for kind in ("router", "shared")
    )
    if readers <= {"router", "shared"}:
        return NormNoise(noisy=False, scaled=gate * ("router" in readers) + shared * ("shared" in readers))
    return NormNoise(restored=gate * (router == "clean") + shared * (not readers & {"shared", "all"}))


# ----------------------------------------------------------------------------------------------------------- schedule


def sigma_at(
    step: int, total_steps: int, *, sigma_start: float, sigma_end: float, num_stages: int, schedule: str = "qerl"
) -> float:
    """The standard deviation of the noise at ``step`` (from 0) of ``total_steps``; s = sigma_start, e = sigma_end.

    qerl      as the code of QeRL: the run has K = num_stages stages, and a step is in stage k = floor(step K / total),
              at most K - 1. Sigma is s (e/s)^((k-1) / (K-2)), and 0 in stage 0. The last stage has exactly e. With
              K = 2 the only noisy stage has s, where the code of QeRL divides by 0.
    paper     as algorithm 1 of the paper: k = floor((step' - 1) / floor(total / K)), where step' = step + 1 counts
              from 1. Sigma is s (e/s)^((k-1) / (K-1)), so e is never reached, and 0 in stage 0. Two cases are open in
              the paper: if K does not divide the total, the remaining steps belong to the last stage, K - 1; with
              fewer steps than stages, each step is a stage.
    constant  s at every step, also the first; sigma_end and num_stages are not read.
    With K = 1 there is no noisy stage. A step after the end counts as the end. Raises ValueError for an argument out of
    range.
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
            raise ValueError(f"{name}: found {value!r}; needed: {needed}")
    if schedule == "constant":
        return float(sigma_start)
    step = min(step, total_steps)
    if schedule == "qerl":  # in integers, because a quotient of floats can miss a boundary
        stage, last = step * num_stages // total_steps, num_stages - 2
    else:
        stage, last = step // max(1, total_steps // num_stages), num_stages - 1
    stage = min(stage, num_stages - 1)
    if stage == 0:
        return 0.0
    if stage - 1 == last:  # (e/s)^1 s is not exactly e; qerl with K = 2 has last = 0 and uses s
        return float(sigma_end if last else sigma_start)
    return sigma_start * (sigma_end / sigma_start) ** ((stage - 1) / last)


# -------------------------------------------------------------------------------------------------------------- noise


def bf16_grid_noise(weight: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """The bf16 ``weight`` plus noise of mean 0 and variance sigma^2, drawn on the grid of bf16.  -> same shape, bf16

    Rounded Gaussian noise would mostly vanish, or be biased, where the grid of bf16 is coarser than sigma. Let s_u and
    s_d be the steps to the next bf16 number up and down, which differ at a power of 2.
    sigma^2 <= s_u s_d   +s_u with probability sigma^2 / (s_u (s_u + s_d)), -s_d with sigma^2 / (s_d (s_u + s_d)), else
                         no change. Mean and variance are exact; the shape is not Gaussian.
    sigma^2 > s_u s_d    a Gaussian, rounded up or down at random so that the mean is exact (rounding to nearest has a
                         bias of up to 0.03 sigma at powers of 2). This rounding adds s^2 / 6 to the variance, so the
                         Gaussian has that much less. The std is exact, but within one step of a power of 2 only to 3 %.
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
    """fp32 -> bf16, rounded up or down so that the mean over all ``draws`` (int32, from 0 to 2^16 - 1) is ``value``.

    bf16 is the upper half of fp32. A random lower half is added; it carries with the right probability.
    """
    return ((value.view(torch.int32) + draws) & -(2**16)).view(torch.float32).to(torch.bfloat16)


def _grid_steps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """s_u and s_d of bf16 weights (see bf16_grid_noise), in fp64, where their squares do not underflow."""
    above, below = (torch.nextafter(weight, torch.full_like(weight, end)).double() for end in (math.inf, -math.inf))
    return above - weight.double(), weight.double() - below


def _noisy(clean: Tensor, sigma: float, grid: bool, generator: torch.Generator) -> Tensor:
    """``clean`` plus noise, in bf16 if ``grid``, else fp32. Its size is at least NEAREST_ZERO times the clean size."""
    if grid:
        noisy = bf16_grid_noise(clean, sigma, generator)
    else:
        noisy = clean.float() + sigma * torch.randn(clean.shape, generator=generator)
    floor = NEAREST_ZERO * clean.abs().to(noisy.dtype)
    return torch.where(noisy.abs() < floor, torch.copysign(floor, noisy), noisy)


def clean_norms(stream: Iterable[tuple[str, Tensor]], plan: Mapping[str, NormNoise]) -> dict[str, Tensor]:
    """Copies, on the CPU, of the plan's norms. The stream is read to its end, and has no noise."""
    return {name: tensor.detach().cpu().clone() for name, tensor in stream if name in plan}


def perturb(
    stream: Iterable[tuple[str, Tensor]],
    plan: Mapping[str, NormNoise],
    clean: Mapping[str, Tensor],
    *,
    sigma: float,
    seed: int,
    step: int,
    bf16: str = "grid",
) -> "TensorStream[NoiseReport]":
    """Adds the plan's noise to a stream of (name, whole tensor). The result of the stream is a report on the noise.

    The stream may have any order, and may bring only a part of the tensors. ``clean`` is the result of clean_norms. All
    noise is drawn on the CPU, so it is the same on every rank, layout and device. No argument is changed.

    Norms in fp32 get Gaussian noise. Norms in bf16 get bf16_grid_noise if ``bf16`` is "grid". If it is "fp32", they get
    Gaussian noise and become fp32, for an engine that keeps its norms in fp32. An exception is a norm whose noise also
    changes the columns of a bf16 matrix. It gets bf16_grid_noise in any case, because a bf16 column times 1.001 is
    rounded back to its old value.

    A weight that the noise would bring to 0 keeps NEAREST_ZERO of its clean size. Where the noise changes the columns
    of a matrix, a channel whose clean weight is below DEAD gets no noise. The report counts the noise after both rules.
    Raises AqnError if ``clean`` lacks a norm, or if the stream's norm is not the clean one: noise on noise would be a
    random walk.
    """
    if sigma and (lacking := [norm for norm in plan if norm not in clean]):
        raise AqnError(f"AQN: no clean copy of {lacking[0]} ({len(lacking)} of {len(plan)} norms lack one)")

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(seed, "aqn", step, name))

    norms: dict[str, Tensor] = {}  # the noisy norms
    columns: dict[str, Tensor] = {}  # matrix -> factor of each column, (h,) fp32
    for norm, effect in plan.items() if sigma else ():
        weight = clean[norm]
        on_grid = weight.dtype is torch.bfloat16 and (bf16 == "grid" or bool(effect.restored + effect.scaled))
        noisy = _noisy(weight, sigma, on_grid, generator(norm))
        before, after = weight.float(), noisy.float()
        if effect.noisy:
            norms[norm] = noisy
        # A weight of 0 without noise would give 0 / 0.
        columns |= dict.fromkeys(effect.restored, torch.where(before == after, 1.0, before / after))
        columns |= dict.fromkeys(effect.scaled, torch.where(before.abs() < DEAD, 1.0, after / before))
    scaled = {name: norm for norm, effect in plan.items() for name in effect.scaled}

    def changed() -> Generator[tuple[str, Tensor], None, NoiseReport]:
        missing, moments = touched_names(plan) if sigma else set(), []
        for name, tensor in stream:
            missing.discard(name)
            if name in norms:
                if not torch.equal(tensor.detach().cpu(), clean[name]):
                    raise AqnError(f"AQN: {name} is not the clean weight any more; noise must not pile up on noise")
                noisy = norms[name]
                moments.append(noise_moments(noisy.float() - clean[name].float(), clean[name], sigma, noisy.dtype))
                tensor = noisy.to(tensor.device)
            elif name in columns:
                precise = tensor.float() * columns[name].to(tensor.device)
                result = precise.to(tensor.dtype)  # round to nearest: smallest residual noise
                if name in scaled:
                    if result.dtype is torch.bfloat16:  # to nearest, a factor near 1 would change no weight at all
                        draws = torch.randint(2**16, tensor.shape, dtype=torch.int32, generator=generator(name))
                        result = _round_at_random(precise, draws.to(tensor.device))
                    norm = clean[scaled[name]]
                    if name == plan[scaled[name]].scaled[0]:
                        moments.append(
                            noise_moments(_noise_in_columns(tensor, result, norm), norm, sigma, result.dtype)
                        )
                tensor = result
            yield name, tensor
        return NoiseReport(float(sigma), moments, missing)

    return TensorStream(changed())


def _noise_in_columns(before: Tensor, after: Tensor, norm: Tensor) -> Tensor:
    """The noise on ``norm`` that a change of a matrix's columns amounts to (least squares).  (out, h) twice -> (h,)"""
    before, after = before.float(), after.float()
    size = (before * before).sum(0)
    scale = torch.where(size == 0, 0.0, ((after - before) * before).sum(0) / size)
    return norm.float() * scale.cpu()


# ------------------------------------------------------------------------------------------------------------- report


def noise_moments(noise: Tensor, clean: Tensor, sigma: float, dtype: torch.dtype) -> Tensor:
    """What the report needs to know of the ``noise`` (h,) on the weight ``clean``.  -> (5,) fp64

    The numbers of elements and of changed elements, their sum, the sum of their squares, and the expected variance of
    this sum. bf16 noise was drawn on the grid.
    """
    noise = noise.double()
    fourth = torch.full_like(noise, 3 * sigma**4)  # the fourth moment of a Gaussian
    if dtype is torch.bfloat16:  # jumps on the grid are rare and long, so their fourth moment is larger
        up, down = _grid_steps(clean)
        fourth = torch.where(sigma**2 <= up * down, sigma**2 * (up**3 + down**3) / (up + down), fourth)
    return torch.tensor(
        [noise.numel(), (noise != 0).sum(), noise.sum(), (noise**2).sum(), (fourth - sigma**4).sum()],
        dtype=torch.float64,
    )


class NoiseReport:
    """The noise of one push, pooled over the norms: pushed weight minus clean weight."""

    def __init__(self, sigma: float, moments: Sequence[Tensor] = (), missing: Iterable[str] = ()) -> None:
        """``moments``: noise_moments of every norm. ``missing``: tensors that should change but were not pushed."""
        self.sigma, self.missing = sigma, set(missing)
        self.num_modules = len(moments)  # norms whose noise was pushed, on the norm or in the columns of matrices
        elements, changed, total, squares, variance = sum(moments, torch.zeros(5, dtype=torch.float64)).tolist()
        self.num_elements, self.num_changed, n = int(elements), int(changed), max(1, int(elements))
        self.mean = total / n
        self.std = math.sqrt(max(squares / n - self.mean**2, 0.0))  # in this order NaN stays NaN
        self.std_error = math.sqrt(variance) / (2 * n * sigma**2) if sigma else 0.0  # of the std, as a share of sigma


def check_report(report: NoiseReport, tolerance: float = 0.1) -> None:
    """Raise AqnError unless all of the noise was pushed, with the mean and std that were asked for.

    The std may differ by ``tolerance`` times sigma, or by 5 of its standard errors where that is more. For n Gaussian
    elements a standard error is sigma / sqrt(2 n), which is 10 % at n = 50; rare jumps on the grid of bf16 have a
    larger one. The same holds for the mean, whose standard error is sigma / sqrt(n). Sigma 0 needs no check.
    """
    sigma, n = report.sigma, report.num_elements
    if sigma == 0:
        return
    if report.num_modules == 0:
        raise AqnError(f"AQN: sigma is {sigma:g} but no norm got noise: none of the targets was in the push")
    if report.missing:
        raise AqnError(
            f"AQN: {min(report.missing)} should change and was not in the push ({len(report.missing)} such tensors)"
        )
    measured = f"over {n} elements of {report.num_modules} norms, {report.num_changed / n:.1%} of them changed"
    for what, value, needed, bound in (
        ("std", report.std, sigma, max(tolerance, 5 * report.std_error)),
        ("mean", report.mean, 0.0, max(tolerance, 5 / math.sqrt(n))),
    ):
        if not abs(value - needed) <= bound * sigma:
            raise AqnError(f"AQN: realised {what} {value:.3g}, needed {needed:g} +- {bound * sigma:.2g}, {measured}")
