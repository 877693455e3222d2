"""LoRA in every layout against gradients that never saw LoRA code (lora_reference.py), with negative controls.

Each rank runs `measure` once a layout and kind, in one forked world a number of ranks; each test reads one property.
The controls leave out one reduction at a time: if a test could not tell, the reduction would not be tested.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import lora_reference
import pytest
import reference
import torch
import world
from lora_reference import ALPHA, EXPERT_RANK, RANK, TARGETS, TEMPERATURE, Reference
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adapter_weights
import device as devices
import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import weights_hf
from config import InputError, LoraConfig
from parallel_setup import Parallel

TOLERANCE = 1e-4  # of a gradient, relative to its largest element; measured 2e-6
KINDS = ["qwen3_moe", "qwen2_moe"]
LAYOUTS = list(world.LAYOUTS)
SEED = 4
CONTROLS = {  # what is left out: layouts in which more than one rank takes part in it
    "tensor": ["TP2", "TP2_EP2_ETP2", "TP4_EP16"],
    "expert_tensor": ["ETP2", "TP2_EP2_ETP2", "TP4_EP4_ETP4"],
    "data": ["DP2", "EP2", "TP2_EP2_DP2", "TP4_EP16"],
    "expert_data": ["DP2", "EP2_DP4", "TP2_EP2_DP2"],
    "experts as dense": ["EP2", "TP2_EP2_ETP2", "TP4_EP16"],
}


def lora_config(**changes) -> LoraConfig:
    settings = dict(targets=TARGETS, rank=RANK, alpha=ALPHA, expert_rank=EXPERT_RANK, dropout=0.0)
    return LoraConfig(**settings | changes)


def load(path: Path, parallel: Parallel, *, recompute: bool = False, dtype: torch.dtype = torch.float32):
    arch = hf_config.read(path)
    model = model_megatron.build(arch, parallel, dtype=dtype, recompute=recompute)
    weights_hf.load(model, arch, parallel, path)
    return model, arch


def fill(adapters: dict, whole: dict[str, Tensor], arch: hf_config.Architecture, parallel: Parallel) -> None:
    pieces = adapter_weights.scatter(adapters, whole, arch, parallel)
    with torch.no_grad():
        for name, factor in lora_megatron.factors(adapters).items():
            factor.copy_(pieces[name])


def my_rows(tokens: Tensor, parallel: Parallel) -> tuple[Tensor, Tensor]:
    mine = tokens.chunk(parallel.data)[parallel.data_rank]
    mask = torch.ones_like(mine)
    mask[:, 0] = 0
    return mine, mask


def backward(model: torch.nn.Module, tokens: Tensor, parallel: Parallel) -> Tensor:
    """The loss of lora_reference.compute on this rank's rows; its log-probs.  -> (b / data, T)"""
    mine, mask = my_rows(tokens, parallel)
    weights, _ = my_rows(lora_reference.loss_weights(tokens), parallel)
    logp, entropy = model_megatron.token_logprobs(model, mine, mask, parallel, TEMPERATURE)
    (weights * (logp + 0.3 * entropy)).sum().backward()
    return logp.detach()


# ------------------------------------------------------------------------------------------------ what a rank computes


def measure(parallel: Parallel, paths: dict[str, Path], references: dict[str, Reference], tokens: Tensor) -> dict:
    """Every number that the tests below compare, for each kind."""
    return {kind: _measure(parallel, paths[kind], references[kind], tokens) for kind in paths}


def _measure(parallel: Parallel, path: Path, expected: Reference, tokens: Tensor) -> dict:
    model, arch = load(path, parallel)
    mine, mask = my_rows(tokens, parallel)

    def log_probs() -> Tensor:
        with torch.no_grad():
            return torch.stack(model_megatron.token_logprobs(model, mine, mask, parallel, TEMPERATURE))

    bare = log_probs()
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED)
    factors = lora_megatron.factors(adapters)
    initial = adapter_weights.gather(adapters, factors, arch, parallel)
    out: dict = {"initial": {name: value.numpy().tobytes() for name, value in initial.items()}}
    out["zero B"] = torch.equal(log_probs(), bare)

    fill(adapters, expected.factors, arch, parallel)
    again = adapter_weights.gather(adapters, factors, arch, parallel)
    out["round trip"] = all(torch.equal(again[name], value) for name, value in expected.factors.items())
    with lora_megatron.disabled(adapters):
        out["disabled"] = torch.equal(log_probs(), bare)
    out["effect"] = float((log_probs() - bare).abs().max())

    logp = backward(model, tokens, parallel)
    out["logp error"] = float((logp[:, 1:] - expected.logp.chunk(parallel.data)[parallel.data_rank]).abs().max())
    shares = {name: factor.grad.clone() for name, factor in factors.items()}
    out["error"] = _error_after_sync(adapters, shares, arch, parallel, expected)
    out["norm"] = float(parallel.gradient_norm(list(factors.values())))
    out["with gradient"] = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for control in CONTROLS:
        with _left_out(control, parallel, factors):
            out[control] = _error_after_sync(adapters, shares, arch, parallel, expected)

    exported = dict(weights_hf.export(model, arch, parallel))
    assert exported.keys() == expected.merged.keys(), sorted(exported.keys() ^ expected.merged.keys())
    out["merged error"] = max(float((exported[name] - value).abs().max()) for name, value in expected.merged.items())
    partial = dict(weights_hf.export(model, arch, parallel, adapted_only=True))
    out["partial names"] = sorted(partial)
    out["partial equal"] = all(torch.equal(exported[name], value) for name, value in partial.items())

    out["describe"] = lora_megatron.describe(adapters, parallel)
    out["held"] = sum(factor.numel() for factor in factors.values())
    out["held once"] = sum(factor.numel() / parallel.copies(factor) for factor in factors.values())

    model, arch = load(path, parallel, recompute=True)
    adapters = lora_megatron.attach(model, lora_config(), parallel, SEED)
    fill(adapters, expected.factors, arch, parallel)
    backward(model, tokens, parallel)
    shares = {name: factor.grad.clone() for name, factor in lora_megatron.factors(adapters).items()}
    out["error with recompute"] = _error_after_sync(adapters, shares, arch, parallel, expected)
    return out


def _error_after_sync(adapters, shares: dict[str, Tensor], arch, parallel: Parallel, expected: Reference) -> float:
    factors = lora_megatron.factors(adapters)
    for name, factor in factors.items():
        factor.grad = shares[name].clone()
    parallel.sync_gradients_(list(factors.values()))
    for factor in factors.values():
        factor.is_expert = factor.dim() == 3  # what the control "experts as dense" took away; gather needs it
    gradients = {name: factor.grad for name, factor in factors.items()}
    return lora_reference.worst_error(adapter_weights.gather(adapters, gradients, arch, parallel), expected.gradients)


@contextlib.contextmanager
def _left_out(control: str, parallel: Parallel, factors: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """One reduction of sync_gradients_ skipped, or the experts' flag lost."""
    reduce, group = parallel_setup.sum_gradients_, getattr(parallel, f"{control}_group", None)
    if control == "experts as dense":
        for factor in factors.values():
            factor.is_expert = False
    parallel_setup.sum_gradients_ = lambda members, over: None if over is group else reduce(members, over)
    try:
        yield
    finally:
        parallel_setup.sum_gradients_ = reduce


# ------------------------------------------------------------------------------------------------ fixtures


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


@pytest.fixture(scope="module")
def everywhere(paths, references, tokens) -> dict[str, list]:
    return world.in_layouts(LAYOUTS, measure, paths, references, tokens)


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, kind, everywhere) -> list[dict]:
    """What every rank of one layout measured."""
    return [by_kind[kind] for by_kind in everywhere[request.param]]


# ------------------------------------------------------------------------------------------------ gradients


def test_gradients_are_those_of_the_unsharded_model(ranks):
    assert max(rank["error"] for rank in ranks) < TOLERANCE


def test_gradients_with_recompute_are_those_of_the_unsharded_model(ranks):
    assert max(rank["error with recompute"] for rank in ranks) < TOLERANCE


def test_gradient_norm_is_that_of_the_unsharded_model(ranks, references, kind):
    for rank in ranks:
        assert rank["norm"] == pytest.approx(references[kind].norm, rel=1e-5)


@pytest.mark.parametrize(("control", "layout"), [(control, name) for control in CONTROLS for name in CONTROLS[control]])
def test_leaving_out_a_reduction_is_noticed(control, layout, kind, everywhere):
    """Every rank gets a wrong gradient for some factor, far outside the tolerance."""
    assert min(by_kind[kind][control] for by_kind in everywhere[layout]) > 1e-2


def test_the_base_gets_no_gradient(ranks):
    assert all(name.endswith((".A", ".B")) for rank in ranks for name in rank["with gradient"])


# ------------------------------------------------------------------------------------------------ the adapted model


def test_a_new_adapter_changes_no_bit(ranks):
    assert all(rank["zero B"] for rank in ranks)


def test_disabled_is_the_base_bit_for_bit(ranks):
    assert all(rank["disabled"] for rank in ranks)
    assert all(rank["effect"] > 0.1 for rank in ranks)  # and enabled it was another model


def test_log_probs_are_those_of_the_merged_model(ranks):
    assert max(rank["logp error"] for rank in ranks) < 1e-5


def test_export_merges_the_adapters(ranks):
    assert max(rank["merged error"] for rank in ranks) < 1e-6


def test_partial_export_brings_exactly_what_the_adapters_change(ranks, references, paths, kind):
    base = load_file(paths[kind] / "model.safetensors")
    changed = sorted(name for name, value in references[kind].merged.items() if not torch.equal(value, base[name]))
    for rank in ranks:
        assert rank["partial names"] == changed
        assert rank["partial equal"]


def test_initial_factors_do_not_depend_on_the_layout(ranks, everywhere, kind):
    for rank in ranks:
        assert rank["initial"] == everywhere["TP1"][0][kind]["initial"]


def test_initial_factors_are_uniform_and_each_experts_own(everywhere, kind):
    initial = everywhere["TP1"][0][kind]["initial"]
    experts = torch.frombuffer(bytearray(initial["model.layers.0.mlp.experts.gate_up_proj.A"]), dtype=torch.float32)
    experts = experts.view(16, 64, EXPERT_RANK)
    assert 0.99 / 8 < experts.abs().max() <= 1 / 8  # +-1 / sqrt(64), as PEFT draws it
    assert abs(experts.std() - 1 / 8 / 3**0.5) < 2e-3
    assert len({expert.numpy().tobytes() for expert in experts}) == 16
    layers = {initial[f"model.layers.{i}.self_attn.qkv_proj.A"] for i in range(3)}
    assert len(layers) == 3
    assert not any(any(value) for name, value in initial.items() if name.endswith(".B"))


def test_factors_saved_in_any_layout_load_in_any_other(ranks):
    """Every layout takes its shards out of the same whole tensors, and gives the same whole tensors back."""
    assert all(rank["round trip"] for rank in ranks)


def test_describe_counts_every_parameter_once(ranks, references, kind):
    total = sum(value.numel() for value in references[kind].factors.values())
    assert sum(rank["held once"] for rank in ranks) == total
    for rank in ranks:
        first, *lines = rank["describe"].splitlines()
        assert f"{total:,} trainable parameters ({total * 4 / 2**20:.2f} MiB" in first
        assert f"{rank['held']:,} on this rank" in first
        assert sum(int(re.search(r"([\d,]+) parameters", line)[1].replace(",", "")) for line in lines) == total
        assert any("experts linear_fc1: 2 layers x 16 experts" in line for line in lines)


# ------------------------------------------------------------------------------------------------ what may be adapted


def choices(parallel: Parallel, path: Path, tokens: Tensor) -> dict:
    """Targets, ranks and refusals."""
    out: dict = {}
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
    whole = adapter_weights.gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    name = next(iter(whole))
    for what, broken in {
        "missing": {key: value for key, value in whole.items() if key != name},
        "surplus": whole | {"model.layers.0.self_attn.o_proj.A": torch.zeros(1)},
        "misshapen": whole | {name: torch.zeros(3, 5)},
    }.items():
        try:
            adapter_weights.scatter(adapters, broken, arch, parallel)
        except InputError as error:
            out[what] = str(error)
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


@pytest.mark.parametrize("what", ["missing", "surplus", "misshapen"])
def test_adapters_of_another_model_are_refused(what, chosen):
    assert chosen[what].startswith("checkpoint: ")
    assert ("o_proj.A" if what == "surplus" else "model.layers.0.mlp.gate.A") in chosen[what]


# ------------------------------------------------------------------------------------------------ dropout, bf16


def dropouts(parallel: Parallel, path: Path, expected: Reference, tokens: Tensor) -> dict:
    """Log-probs and own gradients under dropout, with and without recompute, and in bf16."""
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
        torch.manual_seed(7)
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
    """Every shape that any operation returns in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(result.alias_info for result in func._schema.returns):
            self.seen.add(tuple(out.shape))
        return out


def expert_gradient_shapes(parallel: Parallel, path: Path, tokens: Tensor) -> tuple:
    """Shapes of the frozen experts, and what a backward pass makes with them frozen and (control) not."""
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
    if loop:  # what grouped_mm falls back to for widths that the kernel does not take
        monkeypatch.setattr(devices, "_grouped_mm_takes", lambda weight: False)
    args = paths["qwen3_moe"], tokens
    shapes, frozen, trained = world.in_layouts(["TP1"], expert_gradient_shapes, *args)["TP1"][0]
    assert shapes == {(16, 64, 64), (16, 32, 64)}  # (E, h, 2 w) and (E, w, h)
    assert frozen == set()
    assert trained == shapes  # the hook would have seen them
