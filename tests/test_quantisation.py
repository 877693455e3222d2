"""Quantised experts and attention: codes as compressed-tensors packs them; a model that computes with them."""

from __future__ import annotations

import json
import re
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

import adapter_weights
import export
import lora_megatron
import quantisation
import weights_hf
from hardware import kernels
from inputs import hf_config, layout_rules
from inputs.files import InputError
from parallel_setup import Parallel

LAYOUTS = ["TP1", "TP2_EP2_DP2", "TP2_EP2_ETP2", ci("ETP2"), ci("EP2_DP4")]
WITH_ATTENTION = ["TP2_EP2", ci("TP1"), ci("TP2")]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
TOLERANCE = 1e-4  # of a gradient, relative to its largest element
SIZES = {"moe_intermediate_size": 128}  # a quarter of it is a whole group of every format
GROUPED = SIZES | {"num_key_value_heads": 4}  # two query heads share a key/value head
ATTENTION = r"|\.self_attn\.[qkvo]_proj\.weight"


# ---------------------------------------------------------------- the formats


def packed_by_compressed_tensors(weight: Tensor, name: str) -> dict[str, Tensor]:
    """Codes, scales and factors of a matrix by the package compressed-tensors."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    form = hf_config.FORMATS[name]
    size = form.group or weight.shape[1]
    if form.float:
        weight, fp8 = weight.float(), torch.float8_e4m3fn
        args = QuantizationArgs(
            num_bits=4, type="float", strategy="tensor_group", group_size=size, scale_dtype=fp8, zp_dtype=fp8
        )
        factor = generate_gparam(weight.amin(), weight.amax())
    else:
        strategy = {"strategy": "group", "group_size": size} if form.group else {"strategy": "channel"}
        args, factor = QuantizationArgs(num_bits=form.bits, type="int", **strategy), None
    groups = weight.unflatten(-1, (-1, size))
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, factor)
    dtype = None if form.float else torch.int8
    codes = quantize(x=weight, scale=scales, zero_point=None, args=args, dtype=dtype, global_scale=factor)
    packed = pack_fp4_to_uint8(codes) if form.float else pack_to_int32(codes, form.bits)
    return {"codes": packed, "scales": scales, "factors": torch.empty(0) if factor is None else factor}


def edges(dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices at the ends of what a scale can be: zero as a whole or in part, denormal, near to zero, and large."""
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    mixed = 0.05 * weight
    mixed[3], mixed[5, :64] = 0, 0
    mixed[7, ::2] *= 1000
    mixed[9, :16] = torch.tensor([0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0] * 2)  # ties of nvfp4
    found = {"zero": 0 * weight.abs(), "-0": -0.0 * weight.abs(), "zeros and ties": mixed}
    found |= {f"{size:g}": weight * size for size in (1e-44, 1e-38, 7.9e-36, 1e-20, 1e37)}
    found["rows of all sizes"] = weight * torch.logspace(-44, 37, 24)[:, None]
    return {name: matrix.to(dtype) for name, matrix in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", hf_config.FORMATS)
def test_codes_and_scales_are_those_of_compressed_tensors(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors", reason="comes with vLLM (bash run_cpu.sh --vllm)")
    for what, weight in edges(dtype).items():
        found, expected = quantisation.quantise(weight, name), packed_by_compressed_tensors(weight, name)
        for field, value in expected.items():
            assert getattr(found, field).float().equal(value.float()), (what, field)
        assert found.scales.dtype == (torch.float8_e4m3fn if name == "nvfp4" else dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", hf_config.FORMATS)
def test_zero_denormal_and_large_matrices_stay_finite_and_keep_their_zeros(name: str, dtype: torch.dtype) -> None:
    for what, weight in edges(dtype).items():
        value = quantisation.quantise(weight, name).checked(what).dequantised()
        assert value.isfinite().all() and not value[weight == 0].any(), what
        assert (value - weight).abs().max() <= 0.26 * weight.abs().max() + 3e-35, what  # near 0 all may become 0
    assert quantisation.factor_of(torch.zeros(2, 16)).tolist() == [1.0]
    assert quantisation.factor_of(torch.full((2, 16), 1e-36)).tolist() == [1.0]  # 448 x 6 / 1e-36 is above 3.4e38
    assert quantisation.factor_of(torch.full((2, 16), 2.0)).tolist() == [1344.0]


def test_a_weight_that_a_format_cannot_hold_is_named() -> None:
    """3.4e38 is the largest number of fp32; int8 has no code for +127.5 of its steps, and -128 of them are more."""
    with pytest.raises(InputError, match=rf"{EXPERT}: in int8 its scales .*such weights in float32; needed"):
        quantisation.frozen({EXPERT: torch.full((2, 32), -3.4e38)}, EXPERT, torch.float32, "int8")
    codes = quantisation.quantise(torch.ones(2, 16), "nvfp4")
    stored = {
        f"{EXPERT}_packed": codes.codes,
        f"{EXPERT}_scale": codes.scales,
        f"{EXPERT}_global_scale": torch.zeros(1),
    }
    with pytest.raises(InputError, match=rf"{EXPERT}: in nvfp4 its scales"):  # 1 / 0
        quantisation.frozen(stored, EXPERT, torch.float32, "nvfp4")


@pytest.mark.parametrize("name", hf_config.FORMATS)
def test_storage_has_the_bytes_that_the_format_says(name: str) -> None:
    stored = quantisation.empty(name, (4, 256, 128), blocks=2, dtype=torch.bfloat16)
    bytes_ = sum(tensor.nbytes for tensor in stored.values())
    factors = 4 * 4 * (name == "nvfp4")  # the second of two joined matrices has a factor of its own
    assert bytes_ == 4 * hf_config.FORMATS[name].bytes(256, 128, element=2) + factors
    assert bytes_ < {"int8": 0.51, "int4": 0.29, "nvfp4": 0.29}[name] * 4 * 256 * 128 * 2


# ---------------------------------------------------------------- every layout


def twin(path: Path, name: str, folder: Path, also: str = "") -> dict[str, Tensor]:
    """A copy of the model at ``path`` in ``folder``, with the experts that the codes stand for; its tensors.

    ``also``: the pattern of further tensors that are quantised.
    """
    tensors = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        if re.search(r"\.mlp\.experts\.\d+\." + also, key):
            tensors[key] = quantisation.quantise(tensor, name).dequantised()
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def measure(folder: Path, kind: str, layouts: list[str], attention: bool) -> dict[str, list]:
    sizes, also = (GROUPED, ATTENTION) if attention else (SIZES, "")
    path, tokens = reference.save(kind, folder / "whole", **sizes), reference.tokens()
    formats = {}
    for name in hf_config.FORMATS:
        tensors = twin(path, name, folder / name, also)
        formats[name] = tensors, lora_reference.compute(folder / name, tokens)
    return world.in_layouts(layouts, measure_quantised, path, formats, tokens, attention)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("qwen2_moe", False), nightly("qwen3_moe", True), nightly("qwen3_moe", False), nightly("qwen2_moe", True)],
)
def test_log_probs_and_gradients_are_those_of_the_model_that_the_codes_stand_for(
    kind: str, attention: bool, tmp_path: Path
) -> None:
    for layout, ranks in measure(tmp_path, kind, asked(WITH_ATTENTION if attention else LAYOUTS), attention).items():
        _, tensor, _, expert_tensor = world.LAYOUTS[layout]
        split = max(expert_tensor, tensor if attention else 1) > 1
        for rank in ranks:
            assert rank.keys() == hf_config.FORMATS.keys() - ({"int8"} if split else set())
            for found in rank.values():
                assert found["unequal"] == []  # to the last bit, also from shards
                assert len(found["errors"]) == 3  # plain, with recompute, and with merged weights
                for logp_error, error in found["errors"]:
                    assert logp_error < 1e-4 and error < TOLERANCE
                assert found["merged error"] < 1e-5
                assert all(name.endswith((".A", ".B")) for name in found["trained"]) and found["trained"]


# ---------------------------------------------------------------- checkpoints


def compressed(path: Path, name: str, folder: Path, also: str = "") -> Path:
    """The model at ``path`` as compressed-tensors stores it, with the routed experts in the format ``name``.

    ``also``: the pattern of further tensors in this format; then the configuration names what is not quantised.
    """
    form, tensors = hf_config.FORMATS[name], {}
    for key, tensor in load_file(path / "model.safetensors").items():
        if not re.search(r"\.mlp\.experts\." + also, key):
            tensors[key] = tensor
            continue
        packed = quantisation.quantise(tensor, name)
        tensors |= {f"{key}_packed": packed.codes, f"{key}_scale": packed.scales}
        extra = {"global_scale": packed.factors} if form.float else {"shape": torch.tensor(tensor.shape)}
        tensors |= {f"{key}_{what}": value for what, value in extra.items()}
    strategy = "tensor_group" if form.float else "group" if form.group else "channel"
    weights = {"num_bits": form.bits, "type": "float" if form.float else "int", "strategy": strategy, "symmetric": True}
    groups = {"group_0": {"targets": ["re:.*mlp.experts.*"], "weights": weights | {"group_size": form.group or None}}}
    about = json.loads((path / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    if also:
        groups["group_0"]["targets"] = ["Linear"]
        about["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$", r"re:.*layers\.1\.mlp\..*"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(about))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(parallel: Parallel, path: Path, folder: Path, name: str, attention: bool = False) -> bool:
    """Whether a rank has the same codes and scales from the quantised checkpoint as from the one without."""
    settings = {"quantisation": name, "quantises_attention": attention}
    models = [load(each, parallel, **settings)[0] for each in (path, folder)]
    first, second = (dict(model.named_buffers()) for model in models)
    assert any("linear_qkv.codes" in key for key in first) == attention
    return all(torch.equal(first[key].view(torch.uint8), second[key].view(torch.uint8)) for key in first)


@pytest.mark.parametrize("name", hf_config.FORMATS)
def test_a_quantised_checkpoint_has_the_codes_that_are_made_on_loading(name: str, tmp_path: Path) -> None:
    path = reference.save("qwen3_moe", tmp_path / "whole", **GROUPED)
    folder, experts = compressed(path, name, tmp_path / "c", ATTENTION), compressed(path, name, tmp_path / "experts")
    assert hf_config.read(folder).stored_attention and not hf_config.read(experts).stored_attention
    layouts = ["TP1"] if name == "int8" else asked(["TP2_EP2", ci("TP1"), ci("TP2_EP2_ETP2")])
    for each, attention in ((experts, False), (experts, True), (folder, True)):  # what is missing is made on loading
        found = world.in_layouts(layouts, loaded, path, each, name, attention)
        assert all(all(ranks) for ranks in found.values())
    cfg = training.config(folder, tmp_path, model__quantisation=name)
    said = f"model.quantised: [experts], but the checkpoint has attention in {name}; needed: [experts, attention]"
    assert said in layout_rules.layout_problems(cfg, hf_config.read(folder), 1)


def test_what_a_checkpoint_holds_must_be_what_the_run_says(tmp_path: Path) -> None:
    path = reference.save("qwen3_moe", tmp_path / "whole", **SIZES)
    folder = compressed(path, "int4", tmp_path / "codes")
    arch = hf_config.read(folder)
    cfg = training.config(folder, tmp_path, model__quantisation="nvfp4")
    said = "model.quantisation: nvfp4, but the checkpoint has its experts in int4; needed: int4"
    assert said in layout_rules.layout_problems(cfg, arch, 1)
    cfg = training.config(folder, tmp_path, model__quantisation="int4", rollout__engine="vllm")
    assert any(
        "vllm cannot take the policy of a quantised" in said for said in layout_rules.layout_problems(cfg, arch, 1)
    )
    stored, codes = (load_file(source / "model.safetensors") for source in (path, folder))
    packed, scale = f"{EXPERT}_packed", f"{EXPERT}_scale"
    for source, tensors, name, broken, said in (
        (path, stored, "int8", {EXPERT: -3.4e38 * torch.ones(128, 64)}, f"{EXPERT}: in int8 its scales hold values"),
        (
            folder,
            codes,
            "int4",
            {packed: codes[packed][:, 1:].contiguous()},
            r"has shape \[128, 7\], config.json needs",
        ),
        (folder, codes, "int4", {scale: codes[scale] * torch.inf}, "its scales hold values that are not finite"),
        (folder, codes, "int4", {packed: codes[packed].long()}, "has dtype int64; supported: int32"),
    ):
        save_file(tensors | broken, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match=said):
            world.in_layouts(["TP1"], loaded, source, source, name)


def trained_policy(parallel: Parallel, path: Path, name: str, dtype: torch.dtype, attention: bool) -> tuple[dict, dict]:
    """The LoRA factors after a step, and the merged weights that the trainer pushes."""
    model, arch = load(path, parallel, dtype=dtype, quantisation=name, quantises_attention=attention)
    adapters = lora_megatron.attach(model, lora_config(), parallel, 0)
    move(adapters, arch, parallel, step=1)
    factors = gather(adapters, lora_megatron.factors(adapters), arch, parallel)
    return factors, {key: value.clone() for key, value in weights_hf.export(model, arch, parallel)}


@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    [
        ("int8", False, torch.float32),
        ("int4", True, torch.float32),
        ("nvfp4", True, torch.bfloat16),
        ("nvfp4", False, torch.float32),
    ],
)
def test_an_export_is_the_policy_that_was_trained(
    name: str, attention: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = reference.save("qwen3_moe", tmp_path / "whole", **GROUPED)
    ((factors, trained),) = world.in_layouts(["TP1"], trained_policy, path, name, dtype, attention)["TP1"]
    sources = [path]
    if dtype == torch.float32:  # the codes of this checkpoint are those of the fp32 weights
        sources.append(compressed(path, name, tmp_path / "codes", ATTENTION * attention))
    for source in sources:
        arch = hf_config.read(source)
        modules = list(adapter_weights.adapted_modules(arch, lora_config()))
        base = weights_hf.read_model(source, arch)
        alpha = lora_config().alpha
        for key, value in export.merged_tensors(base, arch, modules, factors, alpha, dtype, name, attention):
            assert torch.equal(value, trained[key]), key


# ---------------------------------------------------------------- bounded pieces


@pytest.mark.parametrize("name", hf_config.FORMATS)
def test_bounded_pieces_give_the_product_and_the_gradient_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 192, 256, generator=generator)  # each is two matrices, one above the other
    packed = quantisation.Packed(
        **quantisation.empty(name, (5, 192, 256), 2, torch.float32), format=name, dtype=torch.float32
    )
    for expert in range(5):
        packed[expert].fill_([*weight[expert].chunk(2)], [*weight[expert].chunk(2)])
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

INT4 = {"model__quantisation": "int4"}


@pytest.mark.parametrize(
    ("changes", "sizes", "attention", "said"),
    [
        (INT4, {"hidden_size": 80}, False, "int4 with hidden_size 80; needed: a multiple of 32"),
        (
            INT4 | {"parallel__expert_tensor": 4},
            {"moe_intermediate_size": 64},
            False,
            "expert_tensor: 4 ranks split the 64 inputs .* a scale for 32 inputs; needed: 1, or",
        ),
        (INT4, {"head_dim": 6}, True, "int4 with num_attention_heads x head_dim 48; needed: a multiple of 32"),
        (
            INT4 | {"parallel__tensor": 2},
            {"head_dim": 12},
            True,
            "parallel.tensor: 2 ranks split the 96 inputs .* a scale for 32 inputs; needed: 1, or shards",
        ),
        (
            {"model__quantisation": "int8", "parallel__tensor": 2},
            {"head_dim": 16},
            True,
            "parallel.tensor: 2 ranks split the 128 inputs .* one scale for a whole row; needed: 1",
        ),
    ],
)
def test_sizes_that_cut_a_group_are_refused(
    changes: dict, sizes: dict, attention: bool, said: str, tmp_path: Path
) -> None:
    """Sizes of the attention matter only if it is quantised."""
    arch = hf_config.read(reference.save("qwen3_moe", tmp_path / "m", **sizes))
    ranks = changes.get("parallel__tensor", 1) * changes.get("parallel__expert_tensor", 1)
    for quantised in (["experts"], ["experts", "attention"]):
        cfg = training.config(tmp_path, tmp_path, **changes, model__quantised=tuple(quantised))
        refused = re.search(said, "; ".join(layout_rules.layout_problems(cfg, arch, ranks)))
        assert bool(refused) == (not attention or "attention" in quantised)


def test_the_backward_pass_keeps_no_dequantised_attention(tmp_path: Path) -> None:
    path = reference.save("qwen3_moe", tmp_path / "whole", **GROUPED)
    world.in_layouts(["TP1"], no_weight_is_kept, path)


def no_weight_is_kept(parallel: Parallel, path: Path) -> None:
    """The autograd graph of a quantised linear has no tensor as large as its weight."""
    model, _ = load(path, parallel, quantisation="int4", quantises_attention=True)
    for name in ("linear_qkv", "linear_proj"):
        linear, kept = getattr(model.decoder.layers[0].self_attention, name), []
        x = torch.randn(3, 1, linear.weight.shape[1], requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):  # noqa: B023
            y, _ = linear(x)
        assert not [tensor for tensor in kept if tensor.numel() >= linear.weight.numel()]
        y.sum().backward()
        assert torch.allclose(x.grad, linear.weight.sum(0).expand_as(x), atol=1e-5)
