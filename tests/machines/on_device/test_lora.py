"""LoRA in every layout against gradients from code without LoRA (lora_reference.py), with negative controls.

Each rank runs `measure` once for each layout and kind. Each control leaves out one reduction, which the tests must
notice. Then: the targets that can be adapted or are refused, and bf16 bases.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import lora_reference
import pytest
import torch
import world
from adapted import SEED, adapt, backward, gather, load, lora_config
from lora_reference import EXPERT_RANK, KINDS, RANK, Reference
from measured import CONTROLS, measure
from reference_process import Problem
from safetensors.torch import load_file
from tiers import ci, nightly
from torch import Tensor
from world import Place

import lora_megatron
from facts.exits import InputError
from knobs import LoraConfig
from parallel_setup import Parallel
from weights import adapter_weights, huggingface

pytestmark = pytest.mark.xdist_group("on_device")  # the files that share the fixture `problem`

# Of a gradient, relative to its largest element; measured 2e-6 on a CPU, on a device not yet.
TOLERANCE = 1e-4 if Place.device.type == "cpu" else 1e-3
LAYOUTS = world.TESTED


# ------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def references(problem: Problem) -> dict[str, Reference]:
    return problem.references


@pytest.fixture(scope="module")
def everywhere(problem: Problem) -> Callable[[str], list[dict]]:
    """A function that measures a layout once, on every rank."""
    args = problem.paths, problem.references, problem.tokens
    return functools.cache(lambda layout: world.in_layouts([layout], measure, *args)[layout])


@pytest.fixture(scope="module")
def skewed(problem) -> tuple[Reference, list]:
    """Rows of one repeated token: few experts get all tokens, and ranks without these experts get none."""
    tokens, paths = torch.full((8, 16), 7), {"qwen3_moe": problem.paths["qwen3_moe"]}
    expected = lora_reference.compute(paths["qwen3_moe"], tokens)
    return expected, world.in_layouts(["TP2_EP4"], measure, paths, {"qwen3_moe": expected}, tokens)["TP2_EP4"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, kind, everywhere) -> list[dict]:
    """The measurements of every rank of one layout."""
    return [by_kind[kind] for by_kind in everywhere(request.param)]


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.slow
@pytest.mark.device
def test_gradients_and_their_norm_are_those_of_the_unsharded_model(ranks, references, kind):
    for rank in ranks:
        assert rank["error"] < TOLERANCE and rank["error with recompute"] < TOLERANCE
        assert rank["norm"] == pytest.approx(references[kind].norm, rel=1e-5)
        assert all(name.endswith((".A", ".B")) for name in rank["with gradient"])  # none of the base


@pytest.mark.device
def test_log_probs_passes_and_export_with_merged_weights_are_those_of_the_merged_model(ranks):
    for rank in ranks:
        logp_error, error = rank["errors with merged weights"]
        assert max(rank["logp error"], logp_error) < TOLERANCE / 10 and error < TOLERANCE
        assert rank["merged error"] < 1e-6


@pytest.mark.ci
def test_gradients_are_right_on_ranks_whose_experts_get_no_token(skewed):
    expected, by_rank = skewed
    A = expected.gradients["model.layers.0.mlp.experts.gate_up_proj.A"]
    idle = [expert for expert in range(16) if not A[expert].any()]
    assert any(set(range(first, first + 4)) <= set(idle) for first in (0, 4, 8, 12)), idle  # of one of 4 ranks
    for by_kind in by_rank:
        assert by_kind["qwen3_moe"]["error"] < TOLERANCE
        assert by_kind["qwen3_moe"]["error with recompute"] < TOLERANCE


@pytest.mark.device
@pytest.mark.parametrize(
    ("control", "layout"), [world.tiered(name, control, name) for control in CONTROLS for name in CONTROLS[control]]
)
def test_leaving_out_a_reduction_is_noticed(control, layout, kind, everywhere):
    """Every rank gets a wrong gradient for some factor, far outside the tolerance."""
    assert min(by_kind[kind][control] for by_kind in everywhere(layout)) > 1e-2


@pytest.mark.device
@pytest.mark.parametrize("layout", map(world.tiered, ["TP2_EP2_DP2", "DP2", "TP2", "TP4_EP16"]))
def test_counting_every_copy_in_the_norm_is_noticed(layout, kind, everywhere, references):
    for by_kind in everywhere(layout):
        assert by_kind[kind]["norm with copies"] > 1.01 * references[kind].norm


# ------------------------------------------------------------------------------------------------ the adapted model


@pytest.mark.device
def test_a_new_and_a_disabled_adapter_change_no_bit(ranks):
    assert all(rank["zero B"] and rank["disabled"] for rank in ranks)
    assert all(rank["without gradients"] for rank in ranks)  # nor does a pass without them, as of the old policy
    assert all(rank["effect"] > 0.1 for rank in ranks)  # with the adapters on, it was another model


@pytest.mark.parametrize("layout", [world.tiered(name) for name, (ranks, *_) in world.LAYOUTS.items() if ranks <= 4])
def test_partial_export_brings_exactly_what_the_adapters_change(layout, everywhere, references, problem, kind):
    base = load_file(problem.paths[kind] / "model.safetensors")
    changed = sorted(name for name, value in references[kind].merged.items() if not torch.equal(value, base[name]))
    for by_kind in everywhere(layout):
        fused = {huggingface.fused_group(name) for name in changed}  # the biases of q, k and v come with their weights
        whole = sorted(name for name in by_kind[kind]["names"] if huggingface.fused_group(name) in fused)
        assert by_kind[kind]["partial names"] == whole
        assert by_kind[kind]["partial equal"]


def test_factors_at_the_start_and_saved_ones_do_not_depend_on_the_layout(ranks, everywhere, kind):
    """Every layout cuts its shards from the same whole tensors, and gathers the same whole tensors again."""
    for rank in ranks:
        assert rank["initial"] == everywhere("TP1")[0][kind]["initial"]
        assert rank["round trip"]


def test_initial_factors_are_uniform_and_each_experts_own(everywhere, kind):
    initial = everywhere("TP1")[0][kind]["initial"]
    experts = torch.frombuffer(bytearray(initial["model.layers.0.mlp.experts.gate_up_proj.A"]), dtype=torch.float32)
    experts = experts.view(16, 64, EXPERT_RANK)
    assert 0.99 / 8 < experts.abs().max() <= 1 / 8  # +-1 / sqrt(64), as PEFT draws it
    assert abs(experts.std() - 1 / 8 / 3**0.5) < 2e-3
    assert len({expert.numpy().tobytes() for expert in experts}) == 16
    layers = {initial[f"model.layers.{i}.self_attn.qkv_proj.A"] for i in range(3)}
    assert len(layers) == 3
    assert not any(any(value) for name, value in initial.items() if name.endswith(".B"))


def test_every_parameter_is_counted_once(ranks, references, kind):
    total = sum(value.numel() for value in references[kind].factors.values())
    assert sum(rank["held once"] for rank in ranks) == total
    for rank in ranks:
        first, *lines = rank["describe"].splitlines()
        assert f"{total:,} trainable parameters (" in first and f"{rank['held']:,} on this rank" in first
        assert sum(int(re.search(r"([\d,]+) parameters", line)[1].replace(",", "")) for line in lines) == total


# ------------------------------------------------------------------------------------------------ what may be adapted


def choices(parallel: Parallel, path: Path, tokens: Tensor) -> dict:
    """Targets, and refusals of factors that are missing, surplus or misshapen."""
    out: dict = {"refusals": []}
    model, _ = load(path, parallel)
    unchecked = LoraConfig.model_construct(**dict(lora_config()) | {"targets": ("linear_qkv", "linear_q")})
    with pytest.raises(InputError, match="^lora.targets: linear_q matches no module of this model; remove it$"):
        lora_megatron.attach(model, unchecked, parallel, SEED)
    for targets in (("linear_fc1", "linear_fc2"), ("router",)):
        model, arch = load(path, parallel)
        adapters = lora_megatron.attach(model, lora_config(targets=targets, expert_rank=0), parallel, SEED)
        backward(model, tokens, parallel)
        out[targets] = list(adapters), {name: tuple(f.shape) for name, f in lora_megatron.factors(adapters).items()}
    model, arch = load(path, parallel)
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED)
    whole = gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    broken = [("model.layers.1.mlp.gate.A", whole | {"model.layers.1.mlp.gate.A": torch.zeros(1)})]
    for name, value in whole.items():
        longer = [torch.cat([value, value.narrow(dim, 0, 1)], dim) for dim in range(value.dim())]
        broken += [(name, whole | {name: wrong}) for wrong in (*longer, value[0], value[:0])]
        broken.append((name, {key: other for key, other in whole.items() if key != name}))
    for name, tensors in broken:
        with pytest.raises(InputError) as refused:
            adapter_weights.scatter(adapters, tensors, arch, parallel)
        out["refusals"].append((name, str(refused.value)))
    return out


@pytest.fixture(scope="module")
def chosen(problem) -> dict:
    return world.in_layouts(["TP1"], choices, problem.paths["qwen2_moe"], problem.tokens)["TP1"][0]


def test_targets_are_adapted_where_they_are_and_nowhere_else(chosen):
    assert chosen[("router",)][0] == [f"decoder.layers.{i}.mlp.router.lora" for i in (0, 2)]
    names, shapes = chosen[("linear_fc1", "linear_fc2")]
    assert names == [
        f"decoder.layers.{where}.linear_fc{i}"
        for where in ("0.mlp.experts", "0.mlp.shared_experts", "1.mlp", "2.mlp.experts", "2.mlp.shared_experts")
        for i in (1, 2)
    ]
    assert shapes["decoder.layers.0.mlp.experts.linear_fc1.A"] == (16, 64, RANK)  # expert rank 0: that of the others


def test_adapters_of_another_model_are_refused_by_name(chosen, problem):
    assert len(chosen["refusals"]) > 5 * len(problem.references["qwen2_moe"].factors)
    for name, line in chosen["refusals"]:
        assert line.startswith("checkpoint: ") and name in line, line


# ------------------------------------------------------------------------------------------------ bf16


def in_bf16(parallel: Parallel, path: Path, expected: Reference, tokens: Tensor) -> tuple[set[torch.dtype], float]:
    """The dtypes of the factors and gradients of a bf16 model, and the cosine of its gradient with fp32's."""
    model, arch, adapters = adapt(path, parallel, expected.factors, dtype=torch.bfloat16)
    backward(model, tokens, parallel)
    factors = lora_megatron.factors(adapters)
    parallel.sync_gradients_(list(factors.values()))
    whole = gather(adapters, {key: f.grad for key, f in factors.items()}, arch, parallel)
    flat = torch.cat([value.flatten().cpu() for value in whole.values()])
    true = torch.cat([expected.gradients[key].flatten() for key in whole])
    dtypes = {f.dtype for f in factors.values()} | {f.grad.dtype for f in factors.values()}
    return dtypes, float(torch.cosine_similarity(flat, true, dim=0))


@pytest.mark.device
@pytest.mark.parametrize("layout", ["TP2_EP2", ci("TP2_EP4"), *map(nightly, ["TP1", "TP4_EP4_DP2", "TP4_EP16"])])
def test_bf16_model_trains_fp32_factors(layout, problem):
    args = problem.paths["qwen2_moe"], problem.references["qwen2_moe"], problem.tokens
    for dtypes, cosine in world.in_layouts([layout], in_bf16, *args)[layout]:
        print(f"cosine of the bf16 model's LoRA gradient with fp32's: {cosine:.4f}")
        assert dtypes == {torch.float32} and cosine > 0.95
