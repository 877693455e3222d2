"""AQN against independent tables, the moments of its noise, and which norms get it.

Nothing here shows that an engine takes what the stream brings, or that evaluation and the trainer stay clean.
"""

import contextlib
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import aqn
from aqn import norm_targets
from facts.architectures import Architecture, tensor_shapes
from facts.exits import AqnError, InputError
from facts.seeds import derive_seed
from inputs import hf_config

SIGMAS = (0.01, 0.00316, 0.001)
EVERY_NORM = ("attention", "experts", "mlp")


def architecture(kind: str, **changes: object) -> Architecture:
    """Three layers, the second dense. Qwen3: q and k norms; Qwen2: a shared expert."""
    sizes = dict(
        model_type=kind,
        vocab_size=32,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        moe_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
    )
    return hf_config.parse(sizes | changes)


def weights(arch: Architecture, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of a whole model; norms around 1, none near 0."""
    make = torch.Generator().manual_seed(seed)
    return {
        name: (0.1 * torch.randn(shape, generator=make) + (len(shape) == 1 and "norm" in name)).to(dtype)
        for name, shape in tensor_shapes(arch).items()
    }


def push(
    model: dict[str, Tensor],
    arch: Architecture,
    targets: Iterable[str],
    *,
    sigma: float = 0.01,
    seed: int = 3,
    step: int = 5,
) -> tuple[dict[str, Tensor], aqn.NoiseReport]:
    clean = aqn.clean_norms(model.items(), norm_targets(arch, tuple(targets)))
    report = aqn.NoiseReport(sigma)
    return dict(aqn.perturb(model.items(), clean, report, seed=seed, step=step)), report


# ------------------------------------------------------------------------------------------------------------- schedule
def test_sigma_in_numbers_known_from_the_qerl_code_and_the_paper() -> None:
    """0.01 -> 0.001, 10 stages, 100 steps: 0.01 x 10^(-(k-1)/8) in stage k of the code, 10^(-(k-1)/9) in the paper.

    18 steps, 14 stages: step 9 opens stage 7, though 9 / (18 / 14) is less than 7 in floats.
    """
    ends = {"sigma_start": 0.01, "sigma_end": 0.001}
    code = [0, 0.01, 0.00749894, 0.00562341, 0.00421697, 0.00316228, 0.00237137, 0.00177828, 0.00133352, 0.001]
    paper = [0, 0.01, 0.00774264, 0.00599484, 0.00464159, 0.00359381, 0.00278256, 0.00215443, 0.00166810, 0.00129155]
    constant = [0.01] * 10
    for schedule, table in (("qerl", code), ("paper", paper), ("constant", constant)):
        found = [aqn.sigma_at(step, 100, **ends, num_stages=10, schedule=schedule) for step in range(5, 100, 10)]
        assert found == pytest.approx(table, abs=5e-9)
    assert [aqn.sigma_at(step, 100, **ends, num_stages=10) for step in (10, 90)] == [0.01, 0.001]  # to the last bit
    assert aqn.sigma_at(120, 100, **ends, num_stages=10) == 0.001  # after the last step
    assert aqn.sigma_at(50, 100, **ends, num_stages=1) == 0  # the first stage has no noise
    # 25 steps, 10 stages: the code's stages have 2.5 steps, the paper's 2.
    for schedule, opens in (("qerl", 5), ("paper", 4)):
        found = [aqn.sigma_at(step, 25, **ends, num_stages=10, schedule=schedule) for step in (opens - 1, opens)]
        assert found == pytest.approx([0.01, {"qerl": code, "paper": paper}[schedule][2]], abs=5e-9)
    assert 9 / (18 / 14) < 7
    assert aqn.sigma_at(9, 18, **ends, num_stages=14) == pytest.approx(0.01 * 0.1 ** (6 / 12), rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 1.0},
        {"total_steps": 0},
        {"num_stages": True},
        {"sigma_end": 0.0},
        {"sigma_start": math.nan},
        {"schedule": "off"},
    ],
)
def test_sigma_of_impossible_arguments_is_refused(wrong: dict) -> None:
    right = {"step": 1, "total_steps": 10, "sigma_start": 0.01, "sigma_end": 0.001, "num_stages": 5}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        aqn.sigma_at(**right | wrong)


# ---------------------------------------------------------------------------------------------------------------- noise
@pytest.mark.parametrize(("ratio", "scale"), [(0.3, 4.0), (0.72, 1.0), (1.01, 0.5), (1.5, 1.0)])
def test_grid_noise_is_right_for_mantissas_of_all_kinds_and_both_signs(ratio: float, scale: float) -> None:
    """Of the 128 bf16 numbers in [1, 2) times a power of 2: those near the powers of 2 and some between.

    Sigma in units of the step above, 2^-7: under the grid, just above it for the powers of 2, and for the others.
    """
    sigma = scale * ratio * 2.0**-7
    numbers = torch.tensor([128, 129, 130, 132, 160, 200, 250, 253, 254, 255]) * scale / 128
    clean = torch.cat([numbers, -numbers]).to(torch.bfloat16)[:, None].expand(-1, 25_000)
    change = aqn.bf16_grid_noise(clean, sigma, torch.Generator().manual_seed(2)).double() - clean.double()
    assert change.mean(1).abs().max() < 0.03 * sigma
    assert (change.std(1) / sigma - 1).abs().max() < 0.05


def test_grid_noise_on_zeros_and_subnormals_is_gaussian() -> None:
    for value in (0.0, -0.0, 1e-40, -1e-40, 1e-6):
        clean = torch.full((10**5,), value).to(torch.bfloat16)
        change = aqn.bf16_grid_noise(clean, 0.01, torch.Generator().manual_seed(4)).double()
        assert abs(change.mean()) < 0.02 * 0.01 and change.std().item() == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_depends_on_seed_step_and_name_alone(dtype: torch.dtype) -> None:
    arch = architecture("qwen2_moe")
    model = weights(arch, dtype)
    first, _ = push(model, arch, EVERY_NORM)
    assert all(torch.equal(first[name], again) for name, again in push(model, arch, EVERY_NORM)[0].items())
    # Fewer targets, another order and other matrices do not change the noise of a norm.
    some, _ = push(dict(reversed(weights(arch, dtype).items())), arch, ["attention"])
    name = "model.layers.2.input_layernorm.weight"
    assert torch.equal(first[name], some[name])
    for other in ({"seed": 4}, {"step": 6}, {"step": 105}):  # the step is 5, and no remainder of it
        assert not torch.equal(first[name], push(model, arch, EVERY_NORM, **other)[0][name])
    ones = {name: torch.ones_like(value) if "norm" in name else value for name, value in model.items()}
    noisy, _ = push(ones, arch, EVERY_NORM)
    rows = [value.float() for name, value in noisy.items() if "layernorm" in name]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 6  # each norm has its own noise


def test_noise_is_added_to_the_clean_weight_each_time() -> None:
    """No argument is changed, and noise on noise is refused."""
    arch = architecture("qwen2_moe")
    model = weights(arch)
    before = {name: value.clone() for name, value in model.items()}
    norms = norm_targets(arch, ("attention", "experts"))
    clean = aqn.clean_norms(model.items(), norms)
    first = dict(aqn.perturb(model.items(), clean, aqn.NoiseReport(0.01), seed=1, step=2))
    assert all(map(torch.equal, model.values(), before.values()))
    for norm in norms:
        make = torch.Generator().manual_seed(derive_seed(1, "aqn", 2, norm))
        assert torch.equal(first[norm], before[norm] + 0.01 * torch.randn(before[norm].shape, generator=make))
    with pytest.raises(AqnError, match="no longer the clean weight"):
        dict(aqn.perturb(first.items(), clean, aqn.NoiseReport(0.01), seed=1, step=3))
    with pytest.raises(AqnError, match=f"{norms[0]} should get noise, but it is not among the weights"):
        aqn.clean_norms([(name, tensor) for name, tensor in model.items() if name != norms[0]], norms)


# -------------------------------------------------------------------------------------------------------------- targets
ALL_MOE, ALL_DENSE = {"mlp_only_layers": []}, {"mlp_only_layers": [0, 1, 2]}
BEFORE_QKV = [(layer, "input") for layer in range(3)]
BEFORE_MOE, BEFORE_DENSE = [(0, "post_attention"), (2, "post_attention")], [(1, "post_attention")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "targets", "expected"),
    [
        ("qwen3_moe", ["attention"], BEFORE_QKV),
        ("qwen3_moe", ["experts"], BEFORE_MOE),
        ("qwen3_moe", ["mlp"], BEFORE_DENSE),
        ("qwen2_moe", ["mlp"], BEFORE_DENSE + BEFORE_MOE),  # the norm before the shared expert
        ("qwen2_moe", ["experts", "attention"], BEFORE_MOE + BEFORE_QKV),
    ],
    ids=str,
)
def test_noise_changes_the_norms_before_the_targets_and_nothing_else(
    kind: str, targets: list[str], expected: list[tuple[int, str]], dtype: torch.dtype
) -> None:
    arch = architecture(kind)
    model = weights(arch, dtype)
    noisy, report = push(model, arch, targets)
    aqn.check_report(report, norm_targets(arch, targets))
    changed = {name for name in model if not torch.equal(model[name], noisy[name])}
    assert changed == {f"model.layers.{layer}.{which}_layernorm.weight" for layer, which in expected}
    assert {value.dtype for value in noisy.values()} == {dtype}


@pytest.mark.parametrize(
    ("changes", "targets", "message"),
    [
        (ALL_MOE, ("attention", "mlp"), "mlp matches no norm, because .* no dense layer and no shared expert"),
        (ALL_DENSE, ("experts",), "experts matches no norm, because .* no MoE layer"),
    ],
)
def test_targets_that_the_model_lacks_are_refused(changes: dict, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        norm_targets(architecture("qwen3_moe", **changes), targets)


# --------------------------------------------------------------------------------------------------------------- report
@pytest.mark.parametrize(("dtype", "sigma"), [(torch.float32, 0.01), (torch.bfloat16, 0.001)])
def test_report_says_what_the_weights_say(dtype: torch.dtype, sigma: float) -> None:
    arch = architecture("qwen3_moe", hidden_size=2048, num_experts=2)
    make = torch.Generator().manual_seed(1)
    norms = [f"model.layers.{i}.{which}_layernorm.weight" for i in range(3) for which in ("input", "post_attention")]
    model = {name: (1 + 0.1 * torch.randn(2048, generator=make)).to(dtype) for name in norms}
    noisy, report = push(model, arch, ["attention", "experts", "mlp"], sigma=sigma)
    aqn.check_report(report, norms)
    change = torch.cat([noisy[name].double() - model[name].double() for name in norms])
    assert (report.norms, report.num_elements, report.sigma) == ({*norms}, 6 * 2048, sigma)
    assert report.num_changed == (change != 0).sum()
    assert report.mean == pytest.approx(change.mean().item(), abs=1e-9)
    assert report.std == pytest.approx(change.std(correction=0).item(), rel=1e-6)
    assert report.std == pytest.approx(sigma, rel=0.1)


def test_a_push_without_the_norms_is_stopped() -> None:
    arch = architecture("qwen2_moe")
    model = weights(arch)
    norms = norm_targets(arch, ("attention", "experts"))
    clean = aqn.clean_norms(model.items(), norms)

    def check(names: Iterable[str]) -> None:
        report, stream = aqn.NoiseReport(0.01), [(name, model[name]) for name in names]
        assert len(list(aqn.perturb(stream, clean, report, seed=0, step=0))) == len(stream)
        aqn.check_report(report, clean)

    check(model)
    check(norms)
    with pytest.raises(AqnError, match="no norm got noise"):
        check(name for name in model if "norm" not in name)
    lost = "model.layers.1.input_layernorm.weight"
    with pytest.raises(AqnError, match=lost):
        check(name for name in model if name != lost)


@pytest.mark.parametrize(
    ("scale", "shift", "n", "stopped"),
    [
        (0.91, 0.0, 10_000, ""),
        (1.11, 0.0, 10_000, "std"),
        (math.nan, 0.0, 10_000, "std"),
        (1.4, 0.0, 64, ""),  # five standard errors of 64 elements are 44 %
        (1.5, 0.0, 64, "std"),
        (1.0, 0.09, 10_000, ""),
        (1.0, 0.11, 10_000, "mean"),
    ],
)
def test_noise_of_another_std_or_mean_is_stopped(scale: float, shift: float, n: int, stopped: str) -> None:
    """The change has mean shift x sigma and std scale x sigma, exactly."""
    noise = 0.005 * (torch.tensor([1.0, -1.0]).repeat(n // 2) * scale + shift)
    report = aqn.NoiseReport(0.005)
    report.add("norm", noise, torch.ones(n))
    with pytest.raises(AqnError, match=f"the {stopped} of the noise") if stopped else contextlib.nullcontext():
        aqn.check_report(report, ["norm"])


def test_noise_lost_in_bf16_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise on the grid, rounding removes most of the noise at sigma 0.001, and the rest is wrong."""
    arch = architecture("qwen3_moe", hidden_size=1024, num_experts=2)
    model = weights(arch, torch.bfloat16)

    def rounded(weight: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        return (weight.float() + sigma * torch.randn(weight.shape, generator=generator)).to(torch.bfloat16)

    monkeypatch.setattr(aqn, "bf16_grid_noise", rounded)
    with pytest.raises(AqnError, match="the std of the noise"):
        aqn.check_report(push(model, arch, ["attention"], sigma=0.001)[1], [])
