"""Adaptive quantisation noise (AQN, arXiv 2510.11696): Gaussian noise on RMSNorm weights of the rollout's copy only.

    plan = norm_targets(arch, ["attention", "experts"], router="clean")     which norms, who behind them sees the noise
    clean = clean_norms(weights, plan)                                      once, from the weights without noise
    noisy, report = perturb(weights, plan, clean, sigma=..., seed=..., step=...)    each push; then check_report(report)

Noise is a function of (seed, step, name of the norm), added to the clean weight each time. A consumer of the norm that
must not see it gets the inverse in its columns: (W diag(w / (w + d))) ((w + d) x) = W (w x). Legend: w clean norm
weight (h,), d its noise (h,), W a matrix behind the norm (out, h), h hidden size. Names are Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from config import derive_seed
from hf_config import Architecture
from input_files import InputError

ROLES = ("attention", "experts", "mlp", "router")
NEAREST_ZERO = 2.0**-10  # a noisy weight stays this share of its clean size away from 0, so that w / (w + d) exists
DEAD = 2.0**-30  # a channel with a smaller clean weight passes nothing on: no scaling of columns can put noise there


class AqnError(RuntimeError):
    """The noise is not what was asked for; a run that went on would be silently wrong."""


# ----------------------------------------------------------------------------------------------------------- schedule


def sigma_at(
    step: int, total_steps: int, *, sigma_start: float, sigma_end: float, num_stages: int, schedule: str = "qerl"
) -> float:
    """The noise's standard deviation at ``step`` (from 0) of a run of ``total_steps``; s = sigma_start, e = sigma_end.

    qerl      as the QeRL code: of K = num_stages stages of the whole run, a step is in k = floor(step K / total), at
              most K - 1; sigma is s (e/s)^((k-1) / (K-2)), and 0 where k = 0. The last stage has exactly e; with
              K = 2 the only noisy one has s (the code divides by 0).
    paper     as the paper's algorithm 1: k = floor((step' - 1) / floor(total / K)) with step' = step + 1 counting from
              1; sigma is s (e/s)^((k-1) / (K-1)), so that e is never quite reached, and 0 where k = 0. What the paper
              leaves open: steps over when K does not divide the total belong to the last stage, K - 1, and with fewer
              steps than stages each step is a stage.
    constant  s at every step, the first included; sigma_end and num_stages are not read.
    K = 1 has no noisy stage. A step past the end counts as the end. Raises ValueError for an argument out of range.
    """
    if schedule not in ("qerl", "paper", "constant"):
        raise ValueError(f"schedule: found {schedule!r}; needed: qerl, paper or constant")
    for name, value, least in (("step", step, 0), ("total_steps", total_steps, 1), ("num_stages", num_stages, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: found {value!r}; needed: an integer of at least {least}")
    for name, value in (("sigma_start", sigma_start), ("sigma_end", sigma_end)):
        if not 0 < value < math.inf and (name, schedule) != ("sigma_end", "constant"):
            raise ValueError(f"{name}: found {value!r}; needed: a positive number")
    if schedule == "constant":
        return float(sigma_start)
    step = min(step, total_steps)
    if schedule == "qerl":
        stage = step * num_stages // total_steps  # in integers: a quotient of floats can miss a boundary
    else:
        stage = step // max(1, total_steps // num_stages)
    stage = min(stage, num_stages - 1)
    if stage == 0:
        return 0.0
    last = num_stages - 2 if schedule == "qerl" else num_stages - 1
    if stage - 1 == last:  # (e/s)^1 s is not e to the last bit; K = 2 of qerl has last = 0 and means s
        return float(sigma_end if last else sigma_start)
    return sigma_start * (sigma_end / sigma_start) ** ((stage - 1) / last)


# ------------------------------------------------------------------------------------------------------------ targets


@dataclass(frozen=True)
class NormNoise:
    """What the noise of one norm changes. Either the norm itself, or the columns of `scaled` as if it were there."""

    noisy: bool = True
    restored: tuple[str, ...] = ()  # matrices behind a noisy norm that must not see it: columns times w / (w + d)
    scaled: tuple[str, ...] = ()  # matrices behind a clean norm that alone see the noise: columns times (w + d) / w


def norm_targets(arch: Architecture, targets: Sequence[str], *, router: str) -> dict[str, NormNoise]:
    """Norm name -> what its noise changes, in the order of the layers.

    attention   input_layernorm of every layer, which feeds q, k and v.
    experts     post_attention_layernorm of every MoE layer, as its routed experts see it.
    mlp         post_attention_layernorm of every dense layer; in a MoE layer the shared expert's share of that norm:
                its gate_proj, up_proj and shared_expert_gate see the noise. Without `experts` the norm itself stays
                clean and the noise is in their columns; `experts` without `mlp` takes it out of their columns.
    router      the gate of every MoE layer, in its columns; alone, it makes what routing replay is for.
    a pattern   (fnmatch) of whole names, such as model.layers.3.*_layernorm.weight: everything behind those norms
                sees the noise. The only way to q_norm, k_norm and the final norm.
    ``router`` clean takes the noise of every MoE layer's norm out of its gate's columns; noisy lets the gate see what
    the routed experts see. Taking it out is exact in fp32. In bf16 rounding leaves some, in rms 14 % at sigma 0.01
    and 40 % at 0.001 (w = 1); of 128 experts, 8 a token, 2 % of the tokens change some at 0.01; 9 % with noisy.

    Raises InputError for a string in place of a list, an empty list, a target that touches nothing, a pattern that
    matches a tensor which is not an RMSNorm's weight, and the target router where ``router`` is clean.
    """
    if router not in ("noisy", "clean"):
        raise ValueError(f"router: found {router!r}; needed: noisy or clean")
    if isinstance(targets, str) or not isinstance(targets, Sequence) or not all(isinstance(t, str) for t in targets):
        raise InputError(f"aqn.targets: found {targets!r}; needed: a list of names, such as [attention, experts]")
    if not targets:
        raise InputError(f"aqn.targets: found an empty list; needed: some of {', '.join(ROLES)}, or name patterns")
    if "router" in targets and router == "clean":
        raise InputError("aqn.targets: found router while aqn.router is clean; needed: one of the two")
    seen_by: dict[str, set[str]] = {}
    for target in targets:
        for norm, consumers in _resolve(arch, target).items():
            seen_by.setdefault(norm, set()).update(consumers)
    return {norm: _effect(arch, norm, seen_by[norm], router) for norm in _norms(arch) if norm in seen_by}


def touched_names(plan: Mapping[str, NormNoise]) -> set[str]:
    """Every tensor that the plan changes, whatever sigma is: what a push with noise, or back to clean, must bring."""
    names = {norm for norm, effect in plan.items() if effect.noisy}
    return names.union(*(effect.restored + effect.scaled for effect in plan.values()))


def _norms(arch: Architecture) -> dict[str, int]:
    """Every RMSNorm weight of the model -> the MoE layer that it feeds, -1 if it feeds none."""
    norms = {}
    for i, is_moe in enumerate(arch.moe_layers):
        norms[f"model.layers.{i}.input_layernorm.weight"] = -1
        if arch.qk_norm:
            norms |= {f"model.layers.{i}.self_attn.{letter}_norm.weight": -1 for letter in "qk"}
        norms[f"model.layers.{i}.post_attention_layernorm.weight"] = i if is_moe else -1
    return norms | {"model.norm.weight": -1}


def _other_names(arch: Architecture) -> Iterator[str]:
    """The names of all tensors that are not norms, and some that only other models have."""
    yield from ("model.embed_tokens.weight", "lm_head.weight")
    experts = [f"mlp.experts.{expert}" for expert in range(arch.num_experts)]
    for i in range(arch.num_layers):
        yield from (f"model.layers.{i}.mlp.{gate}.weight" for gate in ("gate", "shared_expert_gate"))
        yield from (f"model.layers.{i}.self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias"))
        for block in ("mlp", "mlp.shared_expert", *experts):
            yield from (f"model.layers.{i}.{block}.{part}_proj.weight" for part in ("gate", "up", "down"))


def _resolve(arch: Architecture, target: str) -> dict[str, set[str]]:
    """The norms of a target -> who sees it: all, or of a MoE layer its experts (and router), router or shared."""
    norms = _norms(arch)
    if target not in ROLES:
        if found := {norm: {"all"} for norm in norms if fnmatchcase(norm, target)}:
            other = next((name for name in _other_names(arch) if fnmatchcase(name, target)), None)
            if other is None:
                return found
            raise InputError(f"aqn.targets: {target!r} matches {other}, which is not an RMSNorm's weight")
        needed = f"needed: {', '.join(ROLES)}, or a pattern of whole names such as {next(iter(norms))}"
        raise InputError(f"aqn.targets: {target!r} matches no RMSNorm of this {arch.model_type} model; {needed}")
    if target == "attention":
        return {norm: {"all"} for norm in norms if norm.endswith(".input_layernorm.weight")}
    behind = {norm: layer >= 0 for norm, layer in norms.items() if norm.endswith(".post_attention_layernorm.weight")}
    if target in ("experts", "router"):
        found = {norm: {target} for norm, is_moe in behind.items() if is_moe}
    else:
        shared = bool(arch.shared_expert_ffn_size)
        found = {norm: {"shared" if is_moe else "all"} for norm, is_moe in behind.items() if shared or not is_moe}
    if not found:
        lacks = "dense layer and no shared expert" if target == "mlp" else "MoE layer"
        raise InputError(f"aqn.targets: {target} touches no norm: this {arch.model_type} model has no {lacks}")
    return found


def _effect(arch: Architecture, norm: str, seen_by: set[str], router: str) -> NormNoise:
    layer = _norms(arch)[norm]
    if layer < 0:
        return NormNoise()
    mlp = f"model.layers.{layer}.mlp"
    gate, shared = (f"{mlp}.gate.weight",), ()
    if arch.shared_expert_ffn_size:
        inputs = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")
        shared = tuple(f"{mlp}.{name}.weight" for name in inputs)
    if seen_by <= {"router", "shared"}:
        return NormNoise(noisy=False, scaled=gate * ("router" in seen_by) + shared * ("shared" in seen_by))
    restored = gate if router == "clean" else ()
    return NormNoise(restored=restored if seen_by & {"shared", "all"} else restored + shared)


# -------------------------------------------------------------------------------------------------------------- noise


def bf16_grid_noise(weight: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """The bf16 ``weight`` plus noise of mean 0 and variance sigma^2, in bf16, drawn on bf16's own grid.  -> same shape

    Gaussian noise, rounded, would mostly vanish or be biased where bf16 is coarser than sigma. With s_u and s_d the
    steps to the next bf16 number up and down (they differ at a power of 2):
    sigma^2 <= s_u s_d   +s_u with probability sigma^2 / (s_u (s_u + s_d)), -s_d with sigma^2 / (s_d (s_u + s_d)), else
                         no change: mean and variance exact, the shape not Gaussian.
    above                a Gaussian, rounded up or down at random so that the mean stays (rounding to the nearest is
                         biased by up to 0.03 sigma at powers of 2); that adds s^2 / 6 of variance, so the Gaussian has
                         so much less. Std exact but within one step of a power of 2, where it is right to 3 %.
    """
    if weight.dtype is not torch.bfloat16:
        raise ValueError(f"bf16_grid_noise: found {weight.dtype}; needed: torch.bfloat16")
    clean = weight.double()
    up, down = _gaps(weight)
    normal = torch.randn(weight.shape, generator=generator)
    uniform = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    chance_up, chance_down = (sigma**2 / (gap * (up + down)) for gap in (up, down))
    jump = torch.where(uniform < chance_up, up, torch.where(uniform >= 1 - chance_down, -down, 0.0))
    narrower = (sigma**2 - (up**2 + down**2) / 12).clamp(min=0).sqrt()  # mean of s^2 / 6 over both sides
    smooth = (clean + narrower * normal).float()
    rounded = _round_at_random(smooth, (uniform * 2**16).int())
    return torch.where(sigma**2 <= up * down, (clean + jump).to(torch.bfloat16), rounded)


def _round_at_random(value: Tensor, draws: Tensor) -> Tensor:
    """fp32 -> bf16, up or down so that the mean over int32 ``draws`` from 0 to 2^16 - 1 is ``value``.

    bf16 is the upper half of fp32: a random lower half carries into it with the chance that the remainder has.
    """
    return ((value.view(torch.int32) + draws) & -(2**16)).view(torch.float32).to(torch.bfloat16)


def _gaps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """s_u and s_d of bf16 weights, in fp64, where their squares do not underflow."""
    above, below = (torch.nextafter(weight, torch.full_like(weight, end)).double() for end in (math.inf, -math.inf))
    return above - weight.double(), weight.double() - below


def _noisy(clean: Tensor, sigma: float, grid: bool, generator: torch.Generator) -> Tensor:
    """``clean`` plus noise, in bf16 if ``grid``, else fp32; no nearer to 0 than NEAREST_ZERO of its clean size."""
    if grid:
        noisy = bf16_grid_noise(clean, sigma, generator)
    else:
        noisy = clean.float() + sigma * torch.randn(clean.shape, generator=generator)
    floor = NEAREST_ZERO * clean.abs().to(noisy.dtype)
    return torch.where(noisy.abs() < floor, torch.copysign(floor, noisy), noisy)


def clean_norms(stream: Iterable[tuple[str, Tensor]], plan: Mapping[str, NormNoise]) -> dict[str, Tensor]:
    """Copies, on the CPU, of the plan's norms from a stream without noise, which is read to its end."""
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
) -> tuple[Iterator[tuple[str, Tensor]], NoiseReport]:
    """The (name, whole tensor) stream with the plan's noise, and its report, which is complete once that has been read.

    The stream may come in any order and bring a part of the tensors only. ``clean`` is clean_norms' result. All noise
    is drawn on the CPU: no rank, layout or device changes it. Nothing given is changed. fp32 norms get Gaussian noise.
    With ``bf16`` "grid" bf16 norms get bf16_grid_noise. With "fp32" they get Gaussian noise and leave as fp32, for an
    engine that keeps it so; but norms whose noise is also a matter of bf16 columns stay on the grid: columns times
    1.001 round to what they were, times a jump of the grid they do not.

    A weight that the noise would bring to 0 is kept NEAREST_ZERO of its clean size away from it, and where the noise is
    in a matrix's columns, a channel whose clean weight is under DEAD stays as it is (nothing passes it); both count in
    the report as they are. Raises AqnError if ``clean`` lacks a norm, or the stream's norm is not the clean one: noise
    on noise would be a random walk.
    """
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma: found {sigma!r}; needed: a number of at least 0")
    if bf16 not in ("grid", "fp32"):
        raise ValueError(f"bf16: found {bf16!r}; needed: grid or fp32")
    if sigma == 0:
        return iter(stream), NoiseReport(0.0)
    if lacking := [norm for norm in plan if norm not in clean]:
        raise AqnError(f"AQN: no clean copy of {lacking[0]} ({len(lacking)} of {len(plan)} norms lack one)")
    report = NoiseReport(float(sigma), missing=touched_names(plan))

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(seed, "aqn", step, name))

    norms: dict[str, Tensor] = {}  # noisy ones by name
    columns: dict[str, Tensor] = {}  # matrix -> factor of each column, (h,) fp32
    for norm, effect in plan.items():
        weight = clean[norm]
        on_grid = weight.dtype is torch.bfloat16 and (bf16 == "grid" or bool(effect.restored + effect.scaled))
        noisy = _noisy(weight, sigma, on_grid, generator(norm))
        before, after = weight.float(), noisy.float()
        if effect.noisy:
            norms[norm] = noisy
            restoring = torch.where(before == after, 1.0, before / after)  # a weight of 0 without noise would be 0 / 0
            columns |= dict.fromkeys(effect.restored, restoring)
        else:
            columns |= dict.fromkeys(effect.scaled, torch.where(before.abs() < DEAD, 1.0, after / before))
    scaled = {name: norm for norm, effect in plan.items() for name in effect.scaled}

    def changed() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            report.missing.discard(name)
            if name in norms:
                if not torch.equal(tensor.detach().cpu(), clean[name]):
                    raise AqnError(f"AQN: {name} is not the clean weight any more; noise must not pile up on noise")
                result = norms[name]
                report.add_(result.float() - clean[name].float(), clean[name], result.dtype is torch.bfloat16)
                yield name, result.to(tensor.device)
            elif name in columns:
                precise = tensor.float() * columns[name].to(tensor.device)
                result = precise.to(tensor.dtype)  # to the nearest: what is left of the noise is least
                if name in scaled:
                    norm = scaled[name]
                    if result.dtype is torch.bfloat16:  # to the nearest, a factor near 1 would move no weight at all
                        draws = torch.randint(2**16, tensor.shape, dtype=torch.int32, generator=generator(name))
                        result = _round_at_random(precise, draws.to(tensor.device))
                    if name == plan[norm].scaled[0]:
                        change = _noise_in_columns(tensor, result, clean[norm])
                        report.add_(change, clean[norm], result.dtype is torch.bfloat16)
                yield name, result
            else:
                yield name, tensor

    return changed(), report


def _noise_in_columns(before: Tensor, after: Tensor, norm: Tensor) -> Tensor:
    """The noise on ``norm`` that a matrix's changed columns amount to (least squares).  (out, h) twice, (h,) -> (h,)"""
    before, after = before.float(), after.float()
    size = (before * before).sum(0)
    scale = torch.where(size == 0, 0.0, ((after - before) * before).sum(0) / size)
    return norm.float() * scale.cpu()


# ------------------------------------------------------------------------------------------------------------- report


@dataclass
class NoiseReport:
    """What the noise of one push came to, as cast minus clean weight, pooled over the norms."""

    sigma: float  # asked for
    num_modules: int = 0  # norms whose noise went past: on the norm, or in the columns of those that alone see it
    num_elements: int = 0
    num_changed: int = 0  # elements that are not the clean ones after the cast
    missing: set[str] = field(default_factory=set)  # to be changed, and not in the stream
    total: float = 0.0  # of the changes
    sum_squares: float = 0.0
    square_variance: float = 0.0  # sum of the variances of the squared changes, as expected

    def add_(self, change: Tensor, clean: Tensor, grid: bool) -> None:
        """Count one norm's ``change``; ``grid`` says that it was drawn on bf16's grid."""
        change = change.double()
        self.num_modules += 1
        self.num_elements += change.numel()
        self.num_changed += int((change != 0).sum())
        self.total += float(change.sum())
        self.sum_squares += float((change**2).sum())
        fourth = torch.full_like(change, 3 * self.sigma**4)  # a Gaussian's fourth moment
        if grid:  # the three-point rule's is larger: rare, long jumps
            up, down = _gaps(clean)
            jumps = self.sigma**2 * (up**3 + down**3) / (up + down)
            fourth = torch.where(self.sigma**2 <= up * down, jumps, fourth)
        self.square_variance += float((fourth - self.sigma**4).sum())

    @property
    def changed_share(self) -> float:
        return self.num_changed / max(1, self.num_elements)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.num_elements)

    @property
    def std(self) -> float:
        variance = self.sum_squares / max(1, self.num_elements) - self.mean**2
        return math.sqrt(max(variance, 0.0))  # in this order NaN stays NaN


def check_report(report: NoiseReport, tolerance: float = 0.1) -> None:
    """Raise AqnError unless the noise that was asked for went past, whole, and looks like it.

    The std may be off by ``tolerance`` of sigma, or by 5 of its standard errors where that is more: of n Gaussian
    elements one is sigma / sqrt(2 n), 10 % at n = 50; jumps on bf16's grid that are rare make it larger. The mean
    likewise, its standard error being sigma / sqrt(n). With sigma 0 there is nothing to check.
    """
    sigma, n = report.sigma, report.num_elements
    if sigma == 0:
        return
    if report.num_modules == 0:
        raise AqnError(f"AQN: sigma is {sigma:g} but no norm got noise: none of the targets was in the push")
    if report.missing:
        first = min(report.missing)
        raise AqnError(f"AQN: {first} should change and was not in the push ({len(report.missing)} such tensors)")
    error = math.sqrt(report.square_variance) / (2 * n * sigma**2)  # of the std, relative, as expected
    found = f"over {n} elements of {report.num_modules} norms, {report.changed_share:.1%} of them changed"
    for what, value, needed, bound in (
        ("std", report.std, sigma, max(tolerance, 5 * error)),
        ("mean", report.mean, 0.0, max(tolerance, 5 / math.sqrt(n))),
    ):
        if not abs(value - needed) <= bound * sigma:
            raise AqnError(f"AQN: realised {what} {value:.3g}, needed {needed:g} +- {bound * sigma:.2g}, {found}")
