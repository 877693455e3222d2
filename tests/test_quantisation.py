"""int4 experts: codes as compressed-tensors packs them; a model that computes with them."""

from __future__ import annotations

from pathlib import Path

import lora_reference
import pytest
import reference
import torch
import training
import world
from adapted import gather, load, lora_config, move
from measured import measure_quantised
from safetensors.torch import load_file, save_file
from tiers import asked, ci, nightly
from torch import Tensor

import export
import lora_megatron
from facts import limits
from facts.exits import InputError
from facts.limits import INT4_GROUP
from hardware import kernels, quantisation
from inputs import hf_config, rules
from parallel_setup import Parallel
from weights import adapter_weights, huggingface

LAYOUTS = ["TP1", "TP2_EP2_DP2", ci("EP2_DP4")]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
TOLERANCE = 1e-4  # of a gradient, relative to its largest element
SIZES = {"moe_intermediate_size": 128}  # a quarter of it is a whole group


# ---------------------------------------------------------------- the format


def packed_by_compressed_tensors(weight: Tensor) -> dict[str, Tensor]:
    """Codes and scales of a matrix by the package compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=INT4_GROUP)
    groups = weight.unflatten(-1, (-1, INT4_GROUP))
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, None)
    codes = quantize(x=weight, scale=scales, zero_point=None, args=args, dtype=torch.int8)
    return {"codes": pack_to_int32(codes, 4), "scales": scales}


def edges(dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices at the ends of what a scale can be: zero as a whole or in part, denormal, near to zero, and large."""
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    mixed = 0.05 * weight
    mixed[3], mixed[5, :64] = 0, 0
    mixed[7, ::2] *= 1000
    mixed[9, :16] = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0] * 2)
    found = {"zero": 0 * weight.abs(), "-0": -0.0 * weight.abs(), "zeros in part": mixed}
    found |= {f"{size:g}": weight * size for size in (1e-44, 1e-38, 7.9e-36, 1e-20, 1e37)}
    found["rows of all sizes"] = weight * torch.logspace(-44, 37, 24)[:, None]
    return {name: matrix.to(dtype) for name, matrix in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_scales_are_those_of_compressed_tensors(dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors", reason="comes with vLLM (bash run_cpu.sh --vllm)")
    for what, weight in edges(dtype).items():
        found, expected = quantisation.quantise(weight), packed_by_compressed_tensors(weight)
        for field, value in expected.items():
            assert getattr(found, field).float().equal(value.float()), (what, field)
        assert found.scales.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_denormal_and_large_matrices_stay_finite_and_keep_their_zeros(dtype: torch.dtype) -> None:
    for what, weight in edges(dtype).items():
        value = quantisation.quantise(weight).checked(what).dequantised()
        assert value.isfinite().all() and not value[weight == 0].any(), what
        assert (value - weight).abs().max() <= 0.26 * weight.abs().max() + 3e-35, what  # near 0 all may become 0


def test_a_weight_that_int4_cannot_hold_is_named(tmp_path: Path) -> None:
    """3.4e38 is the largest number of fp32; int4 has no code for +7.5 of its steps, and -8 of them are more."""
    weight = torch.full((2, 32), -3.4e38)
    with pytest.raises(InputError, match=rf"{EXPERT}: in int4 its scales .*such weights in float32; needed"):
        quantisation.frozen({EXPERT: weight}, EXPERT, torch.float32, "int4")
    path = reference.save("qwen3_moe", tmp_path / "whole", **SIZES)
    broken = load_file(path / "model.safetensors") | {EXPERT: -3.4e38 * torch.ones(128, 64)}
    save_file(broken, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=f"{EXPERT}: in int4 its scales hold values"):
        world.in_layouts(["TP1"], loads, path)


def loads(parallel: Parallel, path: Path) -> None:
    load(path, parallel, quantisation="int4")


def test_storage_has_the_bytes_that_the_plan_counts() -> None:
    stored = quantisation.empty((4, 256, 128), dtype=torch.bfloat16)
    bytes_ = stored.codes.nbytes + stored.scales.nbytes
    assert bytes_ == 4 * limits.int4_bytes(256, 128, element=2)
    assert bytes_ < 0.29 * 4 * 256 * 128 * 2


@pytest.mark.parametrize("every", [1, 3, 7, 32])
def test_some_inputs_are_those_of_the_whole(every: int) -> None:
    packed = quantisation.quantise(torch.randn(3, 16, 96, generator=torch.Generator().manual_seed(0)))
    assert packed.inputs(every).equal(packed.dequantised()[..., ::every])


# ---------------------------------------------------------------- every layout


def twin(path: Path, folder: Path) -> dict[str, Tensor]:
    """A copy of the model at ``path`` in ``folder``, with the experts that the codes stand for; its tensors."""
    tensors = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        if ".mlp.experts." in key:
            tensors[key] = quantisation.quantise(tensor).dequantised()
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("kind", ["qwen2_moe", nightly("qwen3_moe")])
def test_log_probs_and_gradients_are_those_of_the_model_that_the_codes_stand_for(kind: str, tmp_path: Path) -> None:
    path, tokens = reference.save(kind, tmp_path / "whole", **SIZES), reference.tokens()
    tensors = twin(path, tmp_path / "twin")
    expected = lora_reference.compute(tmp_path / "twin", tokens)
    found = world.in_layouts(asked(LAYOUTS), measure_quantised, path, tensors, expected, tokens)
    for rank in (rank for ranks in found.values() for rank in ranks):
        assert rank["unequal"] == []  # to the last bit, also from shards
        assert len(rank["errors"]) == 3  # plain, with recompute, and with merged weights
        for logp_error, error in rank["errors"]:
            assert logp_error < 1e-4 and error < TOLERANCE
        assert rank["merged error"] < 1e-5
        assert all(name.endswith((".A", ".B")) for name in rank["trained"]) and rank["trained"]


def trained_policy(parallel: Parallel, path: Path, dtype: torch.dtype) -> tuple[dict, dict]:
    """The LoRA factors after a step, and the merged weights that the trainer pushes."""
    model, arch = load(path, parallel, dtype=dtype, quantisation="int4")
    adapters = lora_megatron.attach(model, lora_config(), parallel, 0)
    move(adapters, arch, parallel, step=1)
    factors = gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    return factors, {key: value.clone() for key, value in huggingface.export(model, arch, parallel)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_export_is_the_policy_that_was_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    path = reference.save("qwen3_moe", tmp_path / "whole", **SIZES)
    ((factors, trained),) = world.in_layouts(["TP1"], trained_policy, path, dtype)["TP1"]
    arch = hf_config.read(path)
    modules = list(adapter_weights.adapted_modules(arch, lora_config()))
    base, alpha = huggingface.read_model(path, arch), lora_config().alpha
    for key, value in export.merged_tensors(base, arch, modules, factors, alpha, dtype, "int4"):
        assert torch.equal(value, trained[key]), key


# ---------------------------------------------------------------- bounded pieces


def test_bounded_pieces_give_the_product_and_the_gradient_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 192, 256, generator=generator)
    packed = quantisation.empty((5, 192, 256), torch.float32)
    for expert in range(5):
        packed[expert].copy_(quantisation.quantise(weight[expert]))
    counts, seen = torch.tensor([3, 0, 4, 1, 0]), []
    x, grad = (torch.randn(8, size, generator=generator) for size in (256, 192))
    whole = packed.dequantised()
    assert (whole - weight).abs().max() < 0.8
    rows = torch.arange(5).repeat_interleave(counts)
    expected = torch.einsum("ni,noi->no", x, whole[rows]), torch.einsum("no,noi->ni", grad, whole[rows])
    real = quantisation.Packed.dequantised
    monkeypatch.setattr(
        quantisation.Packed, "dequantised", lambda self: (seen.append(self.shape.numel() * 4), real(self))[1]
    )
    monkeypatch.setattr(
        kernels, "PIECE", 5 * 256 * 128 * 4
    )  # 128 of 192 rows at a time, then 170 -> 128 of 256 columns
    x.requires_grad_()
    y = kernels.quantised_grouped_mm(x, packed, counts)
    y.backward(grad)
    assert torch.allclose(y, expected[0], atol=1e-4) and torch.allclose(x.grad, expected[1], atol=1e-4)
    assert len(seen) == 4 and max(seen) <= kernels.PIECE and sum(seen) == 2 * whole.numel() * 4


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": 80}, "int4 with hidden_size 80; needed: a multiple of 32"),
        ({"moe_intermediate_size": 48}, "int4 with moe_intermediate_size 48; needed: a multiple of 32"),
    ],
)
def test_sizes_that_cut_a_group_are_refused(sizes: dict, said: str, tmp_path: Path) -> None:
    arch = hf_config.read(reference.save("qwen3_moe", tmp_path / "m", **sizes))
    for name, refused in (("int4", True), ("none", False)):
        problems = rules.trainer_problems(training.config(tmp_path, tmp_path, model__quantisation=name), arch, 1)
        assert (said in "; ".join(problems)) == refused
