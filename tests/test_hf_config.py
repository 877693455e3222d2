"""config.json -> Architecture: the two real models as published, and a refusal by name for everything else."""

from __future__ import annotations

import dataclasses
import json
import math

import published
import pytest

from facts.architectures import Architecture, tensor_shapes
from facts.exits import InputError
from inputs import hf_config

REAL = {
    "Qwen3-30B-A3B": (published.QWEN3_30B_A3B, 30_532_122_624),
    "Qwen1.5-MoE-A2.7B": (published.QWEN15_MOE, 14_315_784_192),
}


@pytest.fixture(scope="module", params=REAL)
def real(request) -> tuple[dict, int]:
    return REAL[request.param]


# ------------------------------------------------------------------------------------------------ what is accepted


def test_real_models_have_their_published_number_of_parameters(real):
    raw, parameters = real
    shapes = tensor_shapes(hf_config.parse(raw))
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_transformers_counts_the_same_parameters_and_shapes(real):
    """Built on the meta device, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw, parameters = real
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    shapes = tensor_shapes(hf_config.parse(raw))
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name:  # fused in transformers 5's memory, apart in files
            assert shapes.pop(name) == tuple(parameter.shape), name
    assert all(".mlp.experts." in name for name in shapes)


def test_every_field_of_a_real_config_is_read():
    arch = hf_config.parse(published.QWEN3_30B_A3B)
    assert arch == Architecture(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        dense_ffn_size=6144,
        expert_ffn_size=768,
        shared_expert_ffn_size=0,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
        moe_layers=(True,) * 48,
        qkv_bias=False,
        tied_head=False,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_positions=40960,
    )
    assert arch.qkv_size == 32 * 128 + 2 * 4 * 128
    arch = hf_config.parse(published.QWEN15_MOE)
    assert (arch.head_dim, arch.shared_expert_ffn_size, arch.qkv_bias, arch.qk_norm) == (128, 5632, True, "")
    assert (arch.num_experts, arch.experts_per_token, arch.norm_topk_prob) == (60, 4, False)


def test_the_shipped_sizes_are_those_of_the_chat_models():
    """The Instruct model differs from the hybrid in its positions; Qwen1.5-MoE's chat model has its base's sizes."""
    instruct, chat = (
        hf_config.parse(json.loads((hf_config.PUBLISHED / f"{name}.config.json").read_text()))
        for name in ("Qwen3-30B-A3B-Instruct-2507", "Qwen1.5-MoE-A2.7B-Chat")
    )
    hybrid = hf_config.parse(published.QWEN3_30B_A3B)
    assert instruct == dataclasses.replace(hybrid, rope_theta=1e7, max_positions=262_144)
    assert chat == hf_config.parse(published.QWEN15_MOE)


def test_what_transformers_5_writes_is_the_same_architecture_and_absent_keys_mean_what_it_means(real, tmp_path):
    """rope_parameters for rope_theta, num_local_experts for Qwen3MoE's num_experts, layer_types, dtype."""
    from transformers import AutoConfig

    raw, _ = real
    keys = {"rope_theta", "tie_word_embeddings", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "qkv_bias"}
    for given in (raw, {name: value for name, value in raw.items() if name not in keys}):
        AutoConfig.for_model(**given).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert "rope_parameters" in written and "rope_theta" not in written
        assert hf_config.parse(written | {"architectures": raw["architectures"]}) == hf_config.parse(given)


@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        ({}, "MMMMMMMM"),
        ({"decoder_sparse_step": 2}, "dMdMdMdM"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, "ddMddddd"),
        ({"mlp_only_layers": [0, 7]}, "dMMMMMMd"),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, "MMMMMMMM"),
    ],
)
def test_which_layers_are_moe(changes, moe):
    arch = hf_config.parse(published.QWEN15_MOE | {"num_hidden_layers": 8} | changes)
    assert "".join("M" if is_moe else "d" for is_moe in arch.moe_layers) == moe


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED = [  # (config to start from, what differs, what the line says)
    (
        published.QWEN3_30B_A3B,
        {"model_type": "llama"},
        "model_type 'llama' is not supported; supported: qwen3_moe, qwen2_moe",
    ),
    (published.QWEN3_30B_A3B, {"architectures": ["Qwen2MoeForCausalLM"]}, "only ['Qwen3MoeForCausalLM'] is"),
    (published.QWEN3_30B_A3B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu' is"),
    (published.QWEN3_30B_A3B, {"attention_bias": True}, "attention_bias = true is not supported"),
    (published.QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
    (published.QWEN15_MOE, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (
        published.QWEN3_30B_A3B,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope scaling = 'yarn' is not supported",
    ),
    (published.QWEN3_30B_A3B, {"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope scaling = 'yarn'"),
    (
        published.QWEN3_30B_A3B,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn"}},
        "rope scaling = 'yarn' is not supported",
    ),
    (published.QWEN3_30B_A3B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    (published.QWEN3_30B_A3B, {"rope_theta": "1e6"}, "rope_theta: expected a positive number"),
    (
        published.QWEN3_30B_A3B,
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: found {'quant_method': 'fp8'}, a quantised checkpoint; needed: one in bf16, ",
    ),
    (
        published.QWEN3_30B_A3B,
        {"num_key_value_heads": 5},
        "num_attention_heads 32 is not a multiple of num_key_value_heads 5",
    ),
    (published.QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds num_experts 128"),
    (published.QWEN3_30B_A3B, {"num_experts": None}, "num_experts is missing"),
    (published.QWEN3_30B_A3B, {"num_local_experts": 64}, "num_local_experts 64 and num_experts 128 differ"),
    (published.QWEN3_30B_A3B, {"num_experts_per_tok": 1}, "norm_topk_prob"),
    (published.QWEN3_30B_A3B, {"hidden_size": 2048.0}, "hidden_size: expected a positive int, found 2048.0"),
    (published.QWEN3_30B_A3B, {"vocab_size": -1}, "vocab_size: expected a positive int, found -1"),
    (published.QWEN3_30B_A3B, {"rms_norm_eps": math.nan}, "rms_norm_eps: expected a positive float"),
    (published.QWEN3_30B_A3B, {"head_dim": 127}, "head_dim"),
    (published.QWEN3_30B_A3B, {"norm_topk_prob": "true"}, "norm_topk_prob: expected a bool, found 'true'"),
    (published.QWEN15_MOE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    (published.QWEN15_MOE, {"mlp_only_layers": [24]}, "mlp_only_layers: found 24; needed: layers from 0 to 23"),
]


@pytest.mark.parametrize(("raw", "changes", "line"), REFUSED, ids=[str(changes) for _, changes, _ in REFUSED])
def test_options_that_are_not_computed_are_refused(raw, changes, line):
    with pytest.raises(InputError) as caught:
        hf_config.parse(raw | changes, "somewhere/config.json")
    assert line in str(caught.value)
    assert str(caught.value).startswith("somewhere/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "model.path: no config.json in .*; needed: a Hugging Face model directory"),
        (b'{"model_type": "qwen3', "config.json: not valid JSON"),
        (b"\xff\xfe\x00", "config.json: not UTF-8 text at byte 0"),
        (b"[1, 2]", "config.json: expected a JSON object, found list"),
    ],
)
def test_files_that_are_no_config_are_refused(content, line, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=line) as caught:
        hf_config.read(tmp_path)
    assert str(tmp_path) in str(caught.value)
