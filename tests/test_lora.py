"""LoRA in every layout against gradients from code without LoRA (lora_reference.py), with negative controls.

Each rank runs `measure` once for each layout and kind, in one forked world for each number of ranks. Each test reads
one property. Each control leaves out one reduction, which the tests must notice.
"""

from __future__ import annotations

import re
from pathlib import Path

import lora_reference
import pytest
import reference
import torch
import world
from lora_reference import EXPERT_RANK, Reference
from measured import CONTROLS, measure
from safetensors.torch import load_file
from torch import Tensor

import weights_hf

TOLERANCE = 1e-4  # of a gradient, relative to its largest element; measured 2e-6
KINDS = ["qwen3_moe", "qwen2_moe"]
LAYOUTS = list(world.LAYOUTS)


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


@pytest.fixture(scope="module")
def skewed(paths) -> tuple[Reference, list]:
    """Rows of one repeated token: few experts get all tokens, and ranks without these experts get none."""
    tokens, kind = torch.full((8, 16), 7), "qwen3_moe"
    expected = lora_reference.compute(reference.load(paths[kind]), tokens)
    return expected, world.in_layouts(["TP2_EP4"], measure, {kind: paths[kind]}, {kind: expected}, tokens)["TP2_EP4"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, kind, everywhere) -> list[dict]:
    """The measurements of every rank of one layout."""
    return [by_kind[kind] for by_kind in everywhere[request.param]]


# ------------------------------------------------------------------------------------------------ gradients


def test_gradients_are_those_of_the_unsharded_model(ranks):
    assert max(rank["error"] for rank in ranks) < TOLERANCE


def test_gradients_with_recompute_are_those_of_the_unsharded_model(ranks):
    assert max(rank["error with recompute"] for rank in ranks) < TOLERANCE


def test_passes_with_merged_weights_have_the_same_log_probs_and_gradients(ranks):
    assert max(rank["merged logp error"] for rank in ranks) < 1e-5
    assert max(rank["error with merged weights"] for rank in ranks) < TOLERANCE


def test_gradients_are_right_on_ranks_whose_experts_get_no_token(skewed):
    expected, by_rank = skewed
    A = expected.gradients["model.layers.0.mlp.experts.gate_up_proj.A"]
    idle = [expert for expert in range(16) if not A[expert].any()]
    assert any(set(range(first, first + 4)) <= set(idle) for first in (0, 4, 8, 12)), idle  # of one of 4 ranks
    for by_kind in by_rank:
        assert by_kind["qwen3_moe"]["error"] < TOLERANCE
        assert by_kind["qwen3_moe"]["error with recompute"] < TOLERANCE


def test_gradient_norm_is_that_of_the_unsharded_model(ranks, references, kind):
    for rank in ranks:
        assert rank["norm"] == pytest.approx(references[kind].norm, rel=1e-5)


@pytest.mark.parametrize(("control", "layout"), [(control, name) for control in CONTROLS for name in CONTROLS[control]])
def test_leaving_out_a_reduction_is_noticed(control, layout, kind, everywhere):
    """Every rank gets a wrong gradient for some factor, far outside the tolerance."""
    assert min(by_kind[kind][control] for by_kind in everywhere[layout]) > 1e-2


@pytest.mark.parametrize("layout", ["DP2", "TP2", "ETP2", "TP2_EP4", "TP4_EP16"])
def test_counting_every_copy_in_the_norm_is_noticed(layout, kind, everywhere, references):
    for by_kind in everywhere[layout]:
        assert by_kind[kind]["norm with copies"] > 1.01 * references[kind].norm


def test_the_base_gets_no_gradient(ranks):
    assert all(name.endswith((".A", ".B")) for rank in ranks for name in rank["with gradient"])


# ------------------------------------------------------------------------------------------------ the adapted model


def test_a_new_adapter_changes_no_bit(ranks):
    assert all(rank["zero B"] for rank in ranks)


def test_disabled_is_the_base_bit_for_bit(ranks):
    assert all(rank["disabled"] for rank in ranks)
    assert all(rank["effect"] > 0.1 for rank in ranks)  # with the adapters on, it was another model


def test_log_probs_are_those_of_the_merged_model(ranks):
    assert max(rank["logp error"] for rank in ranks) < 1e-5


def test_export_merges_the_adapters(ranks):
    assert max(rank["merged error"] for rank in ranks) < 1e-6


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if world.LAYOUTS[name][0] <= 4])
def test_partial_export_brings_exactly_what_the_adapters_change(layout, everywhere, references, paths, kind):
    base = load_file(paths[kind] / "model.safetensors")
    changed = sorted(name for name, value in references[kind].merged.items() if not torch.equal(value, base[name]))
    for by_kind in everywhere[layout]:
        fused = {weights_hf.fused_group(name) for name in changed}  # the biases of q, k and v come with their weights
        whole = sorted(name for name in by_kind[kind]["names"] if weights_hf.fused_group(name) in fused)
        assert by_kind[kind]["partial names"] == whole
        assert by_kind[kind]["partial equal"]


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
    """Every layout cuts its shards from the same whole tensors, and gathers the same whole tensors again."""
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
