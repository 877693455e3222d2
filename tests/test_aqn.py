"""AQN against independent tables, the moments of its noise, and the noise that each matrix behind a norm sees.

Nothing here shows that an engine takes what the stream brings, or that evaluation and the trainer stay clean.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import aqn
from aqn import AqnError, norm_targets, touched_names
from architecture import Architecture, tensor_shapes
from config import derive_seed
from inputs import hf_config
from inputs.files import InputError

SIGMAS = (0.01, 0.00316, 0.001)
EVERY_NORM = ("*norm.weight",)


def architecture(kind: str, **changes: object) -> Architecture:
    """Three layers, the second dense. Qwen3: q and k norms; Qwen2: a shared expert."""
    sizes = dict(
        model_type=kind, vocab_size=32, hidden_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, moe_intermediate_size=40, num_experts=8, num_experts_per_tok=2,
        shared_expert_intermediate_size=48, mlp_only_layers=[1], norm_topk_prob=True, rms_norm_eps=1e-6,
        max_position_embeddings=64,
    )  # fmt: skip
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
    router: str = "noisy",
    sigma: float = 0.01,
    seed: int = 3,
    step: int = 5,
    bf16: str = "grid",
) -> tuple[dict[str, Tensor], aqn.NoiseReport]:
    plan = norm_targets(arch, tuple(targets), router=router)
    clean = aqn.clean_norms(model.items(), plan)
    noisy = aqn.perturb(model.items(), plan, clean, sigma=sigma, seed=seed, step=step, bf16=bf16)
    return dict(noisy), noisy.result()


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
    rows = [value.float() for name, value in noisy.items() if "norm" in name]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 7  # each norm has its own noise


def test_noise_is_added_to_the_clean_weight_each_time() -> None:
    """No argument is changed, and noise on noise is refused."""
    arch = architecture("qwen2_moe")
    model = weights(arch)
    before = {name: value.clone() for name, value in model.items()}
    plan = norm_targets(arch, ("attention", "experts"), router="clean")
    clean = aqn.clean_norms(model.items(), plan)
    first = dict(aqn.perturb(model.items(), plan, clean, sigma=0.01, seed=1, step=2))
    assert all(map(torch.equal, model.values(), before.values()))
    for norm in plan:
        make = torch.Generator().manual_seed(derive_seed(1, "aqn", 2, norm))
        assert torch.equal(first[norm], before[norm] + 0.01 * torch.randn(before[norm].shape, generator=make))
    with pytest.raises(AqnError, match="not the clean weight"):
        dict(aqn.perturb(first.items(), plan, clean, sigma=0.01, seed=1, step=3))
    with pytest.raises(AqnError, match="no clean copy"):
        aqn.perturb(model.items(), plan, {}, sigma=0.01, seed=1, step=3)


def test_part_of_a_stream_in_any_order_is_changed_as_the_whole() -> None:
    arch = architecture("qwen2_moe")
    model = weights(arch)
    plan = norm_targets(arch, ("attention", "experts"), router="clean")
    clean = aqn.clean_norms(model.items(), plan)
    whole = dict(aqn.perturb(model.items(), plan, clean, sigma=0.01, seed=1, step=2))
    touched = [name for name in model if name in touched_names(plan)]
    for part in (list(reversed(model)), touched, [name for name in touched if name not in plan]):
        found = list(aqn.perturb([(name, model[name]) for name in part], plan, clean, sigma=0.01, seed=1, step=2))
        assert [name for name, _ in found] == part
        assert all(torch.equal(value, whole[name]) for name, value in found)


def test_bf16_norms_stay_on_the_grid_or_leave_as_fp32() -> None:
    arch = architecture("qwen3_moe")
    model = weights(arch, torch.bfloat16)
    name = "model.layers.0.input_layernorm.weight"
    grid, _ = push(model, arch, ["attention"])
    precise, _ = push(model, arch, ["attention"], bf16="fp32")
    assert {value.dtype for value in grid.values()} == {torch.bfloat16}
    assert [key for key, value in precise.items() if value.dtype is torch.float32] == [
        f"model.layers.{i}.input_layernorm.weight" for i in range(3)
    ]
    assert not torch.equal(precise[name], precise[name].to(torch.bfloat16).float())


# ----------------------------------------------------------------------------------------------- who sees the noise
def behind(arch: Architecture, layer: int) -> dict[str, list[str]]:
    """The matrices that read a layer's two norms: group -> names as in the checkpoints."""
    at = f"model.layers.{layer}"
    groups = {"attention": [f"{at}.self_attn.{x}_proj.weight" for x in "qkv"]}
    if not arch.moe_layers[layer]:
        return groups | {"dense": [f"{at}.mlp.{x}_proj.weight" for x in ("gate", "up")]}
    groups["router"] = [f"{at}.mlp.gate.weight"]
    experts = range(arch.num_experts)
    groups["experts"] = [f"{at}.mlp.experts.{e}.{x}_proj.weight" for e in experts for x in ("gate", "up")]
    if arch.shared_expert_ffn_size:
        names = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")
        groups["shared"] = [f"{at}.mlp.{name}.weight" for name in names]
    return groups


CASES = [  # targets, router -> who sees noise in Qwen3 (no shared expert), in Qwen2
    (["experts"], "noisy", {"experts", "router"}, {"experts", "router"}),
    (["experts"], "clean", {"experts"}, {"experts"}),
    (["mlp"], "noisy", {"dense"}, {"dense", "shared"}),
    (["experts", "mlp"], "clean", {"experts", "dense"}, {"experts", "dense", "shared"}),
    (["*.post_attention_layernorm.weight"], "noisy", {"experts", "router", "dense"},
     {"experts", "router", "dense", "shared"}),
    (["router"], "noisy", {"router"}, {"router"}),
    (["router", "mlp"], "noisy", {"router", "dense"}, {"router", "dense", "shared"}),
    (["mlp", "attention"], "clean", {"dense", "attention"}, {"dense", "shared", "attention"}),
    (["model.norm.weight"], "clean", set(), set()),
]  # fmt: skip


def case_id(value) -> str:
    """An id that is the same in every process. The order of a set is not."""
    return "+".join(sorted(value)) if isinstance(value, set) else str(value)[:45]


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(("targets", "router", "qwen3", "qwen2"), CASES, ids=case_id)
def test_noise_reaches_exactly_the_consumers_that_were_asked_for(
    kind: str, targets: list[str], router: str, qwen3: set[str], qwen2: set[str]
) -> None:
    """A consumer computes W (w x): it sees the clean w if W' diag(w') = W diag(w), the noise if it is W diag(w + d)."""
    arch, seeing = architecture(kind), qwen3 if kind == "qwen3_moe" else qwen2
    model = weights(arch)
    noisy, report = push(model, arch, targets, router=router)
    aqn.check_report(report)
    changed = {name for name in model if not torch.equal(model[name], noisy[name])}
    assert changed == touched_names(norm_targets(arch, targets, router=router))
    for layer in range(arch.num_layers):
        for group, names in behind(arch, layer).items():
            norm = f"model.layers.{layer}.{'input' if group == 'attention' else 'post_attention'}_layernorm.weight"
            make = torch.Generator().manual_seed(derive_seed(3, "aqn", 5, norm))
            noise = 0.01 * torch.randn(model[norm].shape, generator=make) if group in seeing else 0.0
            for name in names:
                wanted = model[name] * (model[norm] + noise)
                torch.testing.assert_close(noisy[name] * noisy[norm], wanted, rtol=1e-6, atol=0, msg=name)
    assert ("model.norm.weight" in changed) == ("model.norm.weight" in targets)


@pytest.mark.parametrize(("bf16", "sigma"), [("grid", 0.01), ("fp32", 0.001), ("grid", 0.001)])
def test_in_bf16_most_of_the_noise_is_kept_from_a_clean_router(bf16: str, sigma: float) -> None:
    """Only rounding remains in W' w'. In rms it is less than half of the noise that the router would see."""
    arch = architecture("qwen2_moe", hidden_size=512)
    model = weights(arch, torch.bfloat16)
    noisy, report = push(model, arch, ["experts"], router="clean", sigma=sigma, bf16=bf16)
    aqn.check_report(report)
    gate, norm = "model.layers.0.mlp.gate.weight", "model.layers.0.post_attention_layernorm.weight"
    left = noisy[gate].float() * noisy[norm].float() - model[gate].float() * model[norm].float()
    noise = model[gate].float() * (noisy[norm].float() - model[norm].float())
    assert left.std() < 0.5 * noise.std()


def test_compensation_holds_where_a_weight_or_its_noisy_copy_is_near_zero() -> None:
    """A weight of 0 stays 0 for a matrix that must not see the noise, and w + d is kept away from 0."""
    arch = architecture("qwen2_moe")
    model = weights(arch)
    norm = "model.layers.0.post_attention_layernorm.weight"
    make = torch.Generator().manual_seed(derive_seed(3, "aqn", 5, norm))
    noise = 0.01 * torch.randn(96, generator=make)
    model[norm][0], model[norm][1], model[norm][2] = 0.0, -noise[1], -noise[2] * (1 + 1e-5)  # w + d = 0 in the second
    noisy, report = push(model, arch, ["experts"], router="clean")
    assert (noisy[norm][1:3].abs() >= model[norm][1:3].abs() / 1024).all() and noisy[norm][0] == noise[0]
    for name in ("gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate"):
        changed = noisy[f"model.layers.0.mlp.{name}.weight"]
        assert changed.isfinite().all()
        torch.testing.assert_close(
            changed * noisy[norm], model[f"model.layers.0.mlp.{name}.weight"] * model[norm], rtol=1e-6, atol=0
        )
    # fp32 cannot represent this noise: 0 / 0 at the weight 0.
    nothing, _ = push(model, arch, ["experts"], router="clean", sigma=1e-46)
    assert all(value.isfinite().all() for value in nothing.values())
    only_shared, report = push(model, arch, ["mlp"])
    column = only_shared["model.layers.0.mlp.shared_expert_gate.weight"][0]
    assert column.isfinite().all() and column[0] == model["model.layers.0.mlp.shared_expert_gate.weight"][0, 0]
    assert report.num_changed == report.num_elements - 1


# -------------------------------------------------------------------------------------------------------------- targets
ALL_MOE, ALL_DENSE = {"mlp_only_layers": []}, {"mlp_only_layers": [0, 1, 2]}


@pytest.mark.parametrize(
    ("kind", "changes", "targets", "router", "message"),
    [
        ("qwen3_moe", {}, ("expert",), "noisy", "matches no RMSNorm.*attention, experts, mlp"),
        ("qwen3_moe", {}, ("attention", "model.layers.7.input_layernorm.weight"), "noisy", "model.layers.7"),
        ("qwen3_moe", {}, ("*",), "noisy", "which is not the weight of an RMSNorm"),
        ("qwen3_moe", {}, ("model.layers.0.mlp.gate.weight",), "noisy", "matches no RMSNorm"),
        ("qwen3_moe", ALL_MOE, ("attention", "mlp"), "noisy", "no dense layer and no shared expert"),
        ("qwen3_moe", ALL_DENSE, ("experts",), "noisy", "no MoE layer"),
        ("qwen2_moe", {}, ("*.q_norm.weight",), "noisy", "q_norm"),
        ("qwen3_moe", ALL_DENSE, ("router",), "noisy", "router touches no norm"),
        ("qwen3_moe", ALL_MOE, ("experts", "router"), "clean", "router is clean"),
    ],
)
def test_targets_that_cannot_be_meant_or_that_the_model_lacks_are_refused(
    kind: str, changes: dict, targets: tuple[str, ...], router: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        norm_targets(architecture(kind, **changes), targets, router=router)


# --------------------------------------------------------------------------------------------------------------- report
@pytest.mark.parametrize(("dtype", "sigma"), [(torch.float32, 0.01), (torch.bfloat16, 0.001)])
def test_report_says_what_the_weights_say(dtype: torch.dtype, sigma: float) -> None:
    arch = architecture("qwen3_moe", hidden_size=2048, num_experts=2)
    make = torch.Generator().manual_seed(1)
    norms = [f"model.layers.{i}.{which}_layernorm.weight" for i in range(3) for which in ("input", "post_attention")]
    model = {name: (1 + 0.1 * torch.randn(2048, generator=make)).to(dtype) for name in norms}
    noisy, report = push(model, arch, ["attention", "experts", "mlp"], sigma=sigma)
    aqn.check_report(report)
    change = torch.cat([noisy[name].double() - model[name].double() for name in norms])
    assert (report.num_modules, report.num_elements, report.sigma) == (6, 6 * 2048, sigma)
    assert report.num_changed == (change != 0).sum() and report.missing == set()
    assert report.mean == pytest.approx(change.mean().item(), abs=1e-9)
    assert report.std == pytest.approx(change.std(correction=0).item(), rel=1e-6)
    assert report.std == pytest.approx(sigma, rel=0.1)


@pytest.mark.parametrize(("dtype", "sigma"), [(torch.float32, 0.01), (torch.bfloat16, 0.001)])
def test_report_measures_noise_that_is_in_columns(dtype: torch.dtype, sigma: float) -> None:
    """With mlp alone on MoE layers no norm changes, but the shared expert's columns amount to noise of std sigma."""
    arch = architecture("qwen2_moe", hidden_size=1024, num_experts=2, mlp_only_layers=[])
    noisy, report = push(weights(arch, dtype), arch, ["mlp"], sigma=sigma)
    aqn.check_report(report)
    assert (report.num_modules, report.num_elements) == (3, 3 * 1024)
    assert report.std == pytest.approx(sigma, rel=0.1) and noisy["model.norm.weight"].dtype is dtype


def test_a_push_without_the_norms_is_stopped() -> None:
    arch = architecture("qwen2_moe")
    model = weights(arch)
    plan = norm_targets(arch, ("attention", "experts"), router="clean")
    clean = aqn.clean_norms(model.items(), plan)

    def report_of(names: Iterable[str]) -> aqn.NoiseReport:
        stream = [(name, model[name]) for name in names]
        noisy = aqn.perturb(stream, plan, clean, sigma=0.01, seed=0, step=0)
        assert len(list(noisy)) == len(stream)
        return noisy.result()

    aqn.check_report(report_of(model))
    aqn.check_report(report_of(touched_names(plan)))
    with pytest.raises(AqnError, match="no norm got noise"):
        aqn.check_report(report_of(name for name in model if "norm" not in name))
    for lost in ("model.layers.2.mlp.gate.weight", "model.layers.1.input_layernorm.weight"):
        with pytest.raises(AqnError, match=lost):
            aqn.check_report(report_of(name for name in model if name != lost))
    unread = aqn.perturb(model.items(), plan, clean, sigma=0.01, seed=0, step=0)
    with pytest.raises(RuntimeError, match="not read to its end"):
        unread.result()
    next(iter(unread))
    with pytest.raises(RuntimeError, match="not read to its end"):
        unread.result()


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
    report = aqn.NoiseReport(0.005, [aqn.noise_moments(noise, torch.ones(n), 0.005, torch.float32)])
    with pytest.raises(AqnError, match=f"realised {stopped}") if stopped else contextlib.nullcontext():
        aqn.check_report(report)


def test_noise_lost_in_bf16_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise on the grid, rounding removes most of the noise at sigma 0.001, and the rest is wrong."""
    arch = architecture("qwen3_moe", hidden_size=1024, num_experts=2)
    model = weights(arch, torch.bfloat16)

    def rounded(weight: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        return (weight.float() + sigma * torch.randn(weight.shape, generator=generator)).to(torch.bfloat16)

    monkeypatch.setattr(aqn, "bf16_grid_noise", rounded)
    with pytest.raises(AqnError, match="realised std"):
        aqn.check_report(push(model, arch, ["attention"], sigma=0.001)[1])
