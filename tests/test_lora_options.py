"""Targets that can be adapted or are refused; dropout with recompute; bf16 bases; the cost of frozen experts."""

from __future__ import annotations

from pathlib import Path

import lora_reference
import pytest
import reference
import torch
import world
from adapted import SEED, backward, fill, load, lora_config
from lora_reference import RANK, Reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adapter_weights
import kernels
import lora_megatron
from input_files import InputError
from knobs import LoraConfig
from parallel_setup import Parallel

KINDS = ["qwen3_moe", "qwen2_moe"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return {kind: reference.save(kind, folder / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return reference.tokens(rows=8, length=16)


@pytest.fixture(scope="module")
def references(paths, tokens) -> dict[str, Reference]:
    return {kind: lora_reference.compute(reference.load(path), tokens) for kind, path in paths.items()}


# ------------------------------------------------------------------------------------------------ what may be adapted


def choices(parallel: Parallel, path: Path, tokens: Tensor) -> dict:
    """Targets, ranks and refusals."""
    out: dict = {"refusals": {}}
    model, _ = load(path, parallel)
    unchecked = LoraConfig.model_construct(**dict(lora_config()) | {"targets": ("linear_qkv", "linear_q")})
    try:
        lora_megatron.attach(model, unchecked, parallel, SEED)
    except InputError as error:
        out["no such module"] = str(error)
    for targets in (("linear_qkv",), ("linear_fc1", "linear_fc2"), ("router",)):
        model, arch = load(path, parallel)
        adapters = lora_megatron.attach(model, lora_config(targets=targets, expert_rank=0), parallel, SEED)
        backward(model, tokens, parallel)
        out[targets] = list(adapters), {name: tuple(f.shape) for name, f in lora_megatron.factors(adapters).items()}
    model, arch = load(path, parallel)
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED)
    whole = adapter_weights.gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    broken = {"surplus": whole | {"model.layers.1.mlp.gate.A": torch.zeros(1)}}
    for name, value in whole.items():
        broken[f"{name} missing"] = {key: other for key, other in whole.items() if key != name}
        longer = [torch.cat([value, value.narrow(dim, 0, 1)], dim) for dim in range(value.dim())]
        for number, wrong in enumerate([*longer, value[0], value[None], value[:0]]):
            broken[f"{name} misshapen {number}"] = whole | {name: wrong}
    for what, tensors in broken.items():
        try:
            adapter_weights.scatter(adapters, tensors, arch, parallel)
            out["refusals"][what] = "taken"
        except InputError as error:
            out["refusals"][what] = str(error)
    return out


@pytest.fixture(scope="module")
def chosen(paths, tokens) -> dict:
    return world.in_layouts(["TP1"], choices, paths["qwen2_moe"], tokens)["TP1"][0]


def test_a_target_that_matches_nothing_is_refused_by_name(chosen):
    assert chosen["no such module"] == "lora.targets: linear_q matches no module of this model"


def test_the_router_is_adapted_only_if_asked(chosen):
    assert not any("router" in name for name in chosen[("linear_fc1", "linear_fc2")][0])
    assert chosen[("router",)][0] == [f"decoder.layers.{i}.mlp.router.lora" for i in (0, 2)]


def test_fc_targets_are_dense_shared_and_routed(chosen):
    names = chosen[("linear_fc1", "linear_fc2")][0]
    assert names == [
        f"decoder.layers.{where}.linear_fc{i}"
        for where in ("0.mlp.experts", "0.mlp.shared_experts", "1.mlp", "2.mlp.experts", "2.mlp.shared_experts")
        for i in (1, 2)
    ]


def test_expert_rank_0_is_the_rank_of_the_others(chosen):
    assert chosen[("linear_fc1", "linear_fc2")][1]["decoder.layers.0.mlp.experts.linear_fc1.A"] == (16, 64, RANK)


def test_adapters_of_another_model_are_refused_by_name(chosen, references):
    refusals = chosen["refusals"]
    assert len(refusals) > 6 * len(references["qwen2_moe"].factors)
    for what, line in refusals.items():
        name = "model.layers.1.mlp.gate.A" if what == "surplus" else what.split()[0]
        assert line.startswith("checkpoint: ") and name in line, (what, line)


# ------------------------------------------------------------------------------------------------ dropout, bf16


def dropouts(parallel: Parallel, path: Path, expected: Reference, tokens: Tensor) -> dict:
    """Log-probs and gradients of this rank under dropout, with and without recompute, and in bf16."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    out: dict = {}
    for name, dropout, recompute, training in (
        ("none", 0.0, False, True),
        ("eval", 0.5, False, False),
        ("kept", 0.5, False, True),
        ("recomputed", 0.5, True, True),
    ):
        model, arch = load(path, parallel, recompute=recompute)
        adapters = lora_megatron.attach(model, lora_config(dropout=dropout), parallel, SEED)
        fill(adapters, expected.factors, arch, parallel)
        model.train(training)
        torch.manual_seed(7)  # without tensor parallelism, dropout draws from this generator
        model_parallel_cuda_manual_seed(7)  # with tensor parallelism, it draws from Megatron's
        logp = backward(model, tokens, parallel)
        gradients = {key: factor.grad for key, factor in lora_megatron.factors(adapters).items()}
        out[name] = logp, gradients
    model, arch = load(path, parallel, dtype=torch.bfloat16)
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED)
    fill(adapters, expected.factors, arch, parallel)
    backward(model, tokens, parallel)
    factors = lora_megatron.factors(adapters)
    parallel.sync_gradients_(list(factors.values()))
    whole = adapter_weights.gather(adapters, {key: f.grad for key, f in factors.items()}, arch, parallel)
    out["bf16 dtypes"] = {f.dtype for f in factors.values()} | {f.grad.dtype for f in factors.values()}
    flat = torch.cat([value.flatten() for value in whole.values()])
    true = torch.cat([expected.gradients[key].flatten() for key in whole])
    out["bf16 cosine"] = float(torch.cosine_similarity(flat, true, dim=0))
    return out


@pytest.fixture(scope="module", params=["TP1", "TP2_EP2_ETP2"])
def dropped(request, paths, references, tokens) -> list[dict]:
    args = paths["qwen2_moe"], references["qwen2_moe"], tokens
    return world.in_layouts([request.param], dropouts, *args)[request.param]


def test_dropout_acts_in_training_only(dropped):
    for rank in dropped:
        assert torch.equal(rank["eval"][0], rank["none"][0])
        assert (rank["kept"][0] - rank["none"][0]).abs().max() > 0.1


def test_recompute_draws_the_same_dropout_mask_again(dropped):
    for rank in dropped:
        assert torch.equal(rank["recomputed"][0], rank["kept"][0])
        assert lora_reference.worst_error(rank["recomputed"][1], rank["kept"][1]) < 1e-6


def test_bf16_model_trains_fp32_factors(dropped):
    for rank in dropped:
        print(f"cosine of the bf16 model's LoRA gradient with fp32's: {rank['bf16 cosine']:.4f}")
        assert rank["bf16 dtypes"] == {torch.float32}
        assert rank["bf16 cosine"] > 0.95


# ------------------------------------------------------------------------------------------------ frozen experts


class _Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(result.alias_info for result in func._schema.returns):
            self.seen.add(tuple(out.shape))
        return out


def expert_gradient_shapes(parallel: Parallel, path: Path, tokens: Tensor) -> tuple:
    """Shapes of the frozen experts, and of the tensors of a backward pass with frozen and (control) trained experts."""
    model, _ = load(path, parallel)
    lora_megatron.attach(model, lora_config(), parallel, SEED)
    bases = [p for name, p in model.named_parameters() if name.endswith("base.weight") and p.dim() == 3]
    with _Shapes() as frozen:
        backward(model, tokens, parallel)
    for base in bases:
        base.requires_grad_()
    with _Shapes() as trained:
        backward(model, tokens, parallel)
    shapes = {tuple(base.shape) for base in bases}
    return shapes, shapes & frozen.seen, shapes & trained.seen


@pytest.mark.parametrize("loop", [False, True], ids=["grouped kernel", "loop over experts"])
def test_no_weight_gradient_of_frozen_experts_is_formed(loop, paths, tokens, monkeypatch):
    if loop:  # the fallback of grouped_mm for widths that the kernel does not support
        monkeypatch.setattr(kernels, "_grouped_mm_takes", lambda weight: False)
    args = paths["qwen3_moe"], tokens
    shapes, frozen, trained = world.in_layouts(["TP1"], expert_gradient_shapes, *args)["TP1"][0]
    assert shapes == {(16, 64, 64), (16, 32, 64)}  # (E, h, 2 w) and (E, w, h)
    assert frozen == set()
    assert trained == shapes  # control: the hook sees such tensors
