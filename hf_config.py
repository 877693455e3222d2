"""A Hugging Face config.json -> the architecture this project trains, or a refusal by name.

Supported: Qwen3MoeForCausalLM (Qwen3-30B-A3B) and Qwen2MoeForCausalLM (Qwen1.5-MoE-A2.7B), with dense layers mixed in.
Every option that would change the computation is either read here or refused here; nothing is ignored. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from input_files import InputError, read_object, shown
from knobs import Config

PUBLISHED = Path(__file__).resolve().parent / "configs"  # <name>.config.json: what can be planned before it is here

# The largest that is tried, far above any known model: what is a name and a shape for each tensor must end.
MOST = {"num_hidden_layers": 1000, "num_experts": 4096, "num_local_experts": 4096, "max_position_embeddings": 2**31}
MOST_SIZE, MOST_MATRICES = 2**24, 2**17  # of any other; layers x experts

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}


@dataclass(frozen=True)
class Architecture:
    """What the model computes; sizes are of the whole, unsharded model."""

    model_type: str  # qwen3_moe | qwen2_moe
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_ffn_size: int  # width of the layers that are not MoE
    expert_ffn_size: int
    shared_expert_ffn_size: int  # 0: no shared expert
    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool  # softmax over the chosen experts (True) or over all of them (False)
    moe_layers: tuple[bool, ...]  # per layer: MoE or dense
    qk_norm: bool  # RMSNorm on each head's query and key (Qwen3)
    qkv_bias: bool  # (Qwen2)
    tied_head: bool  # lm_head is the embedding
    rope_theta: float
    rms_norm_eps: float
    max_positions: int

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def read(model_dir: str | Path) -> Architecture:
    """The architecture described by ``model_dir``/config.json.

    Raises InputError when the file is missing or broken, and for every architecture or option that is not supported.
    """
    return parse(*_raw(model_dir))


def _raw(model_dir: str | Path) -> tuple[dict, str]:
    """The decoded config.json of ``model_dir``, and its path."""
    path = Path(model_dir) / "config.json"
    if not path.exists():
        raise InputError(f"model.path: no config.json in {model_dir}; needed: a Hugging Face model directory")
    return read_object(path), str(path)


def parse(raw: dict, where: str = "config.json") -> Architecture:
    """The architecture in a decoded config.json; ``where`` leads its error messages."""

    def need(key: str, kind: type = int, default: object = None):
        """The value of ``key``, a positive one if it is a number; ``default`` where it is absent or null."""
        value = default if raw.get(key) is None else raw[key]
        if value is None:
            raise InputError(f"{where}: {key} is missing")
        number = kind in (int, float)
        if type(value) is not kind or (number and not 0 < value < math.inf):
            raise InputError(f"{where}: {key}: expected a {'positive ' * number}{kind.__name__}, found {shown(value)}")
        if kind is int and value > (most := MOST.get(key, MOST_SIZE)):
            raise InputError(f"{where}: {key}: found {shown(value)}; needed: at most {most}")
        return value

    def refuse_unless(key: str, found: object, supported: object) -> None:
        if found != supported:
            raise InputError(f"{where}: {key} = {shown(found)} is not supported; only {shown(supported)} is")

    model_type = raw.get("model_type")
    if model_type not in list(ARCHITECTURES):  # a list, as JSON may give what has no hash
        names = ", ".join(ARCHITECTURES)
        raise InputError(f"{where}: model_type {shown(model_type)} is not supported; supported: {names}")
    names = raw.get("architectures") or [ARCHITECTURES[model_type]]
    refuse_unless("architectures", names, [ARCHITECTURES[model_type]])
    qwen3 = model_type == "qwen3_moe"

    refuse_unless("hidden_act", raw.get("hidden_act", "silu"), "silu")
    # use_sliding_window decides; Qwen configs carry a sliding_window number that is unused while it is false.
    refuse_unless("use_sliding_window", raw.get("use_sliding_window", False), False)
    for layer_type in need("layer_types", list, []):
        refuse_unless("layer_types", layer_type, "full_attention")
    refuse_unless("attention_dropout", raw.get("attention_dropout", 0.0), 0.0)
    refuse_unless("quantization_config", raw.get("quantization_config"), None)
    if qwen3:
        refuse_unless("attention_bias", raw.get("attention_bias", False), False)
    # transformers 4 writes rope_theta and rope_scaling, transformers 5 one rope_parameters object.
    rope = need("rope_parameters", dict, {}) | need("rope_scaling", dict, {})
    for key in ("rope_type", "type"):
        refuse_unless("rope scaling", rope.pop(key, "default"), "default")
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0))
    rotary = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    refuse_unless("partial_rotary_factor", rotary, 1.0)
    if rope:
        raise InputError(f"{where}: rope_parameters: {', '.join(sorted(rope))} not supported")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e30:
        raise InputError(f"{where}: rope_theta: expected a positive number, found {shown(theta)}")

    # transformers 5 saves Qwen3MoE's num_experts as num_local_experts.
    num_layers = need("num_hidden_layers")
    num_experts = need("num_local_experts" if "num_local_experts" in raw else "num_experts")
    if raw.get("num_experts", num_experts) != num_experts:
        raise InputError(f"{where}: num_local_experts {num_experts} and num_experts {shown(raw['num_experts'])} differ")
    if num_layers * num_experts > MOST_MATRICES:
        raise InputError(f"{where}: {num_layers} layers of {num_experts} experts; needed: at most {MOST_MATRICES}")
    hidden, heads, kv_heads = need("hidden_size"), need("num_attention_heads"), need("num_key_value_heads")
    if heads % kv_heads:
        raise InputError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = need("head_dim", int, hidden // heads)
    if head_dim % 2:
        raise InputError(f"{where}: head_dim: found {head_dim}; needed: an even number, for RoPE")
    if need("num_experts_per_tok") > num_experts:
        raise InputError(f"{where}: num_experts_per_tok {raw['num_experts_per_tok']} exceeds num_experts {num_experts}")
    if raw["num_experts_per_tok"] == 1 and need("norm_topk_prob", bool, False):
        # Each weight would be softmax over one logit, 1: the router cannot learn, and Megatron refuses it.
        raise InputError(f"{where}: norm_topk_prob = true with num_experts_per_tok 1 is not supported")
    sparse_step, dense = need("decoder_sparse_step", int, 1), need("mlp_only_layers", list, [])
    if odd := [layer for layer in dense if layer not in range(num_layers)]:
        raise InputError(f"{where}: mlp_only_layers: found {shown(odd[0])}; needed: layers from 0 to {num_layers - 1}")
    return Architecture(
        model_type=model_type,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dense_ffn_size=need("intermediate_size"),
        expert_ffn_size=need("moe_intermediate_size"),
        shared_expert_ffn_size=0 if qwen3 else need("shared_expert_intermediate_size"),
        num_experts=num_experts,
        experts_per_token=raw["num_experts_per_tok"],
        norm_topk_prob=need("norm_topk_prob", bool, False),
        moe_layers=tuple(i not in dense and (i + 1) % sparse_step == 0 for i in range(num_layers)),
        qk_norm=qwen3,
        qkv_bias=not qwen3 and need("qkv_bias", bool, True),
        tied_head=need("tie_word_embeddings", bool, False),
        rope_theta=float(theta),
        rms_norm_eps=need("rms_norm_eps", float),
        max_positions=need("max_position_embeddings"),
    )


def planned(cfg: Config) -> tuple[Architecture, str]:
    """The architecture that a run of ``cfg`` would have, and where it is described; no weights are needed.

    That is the tiny_model section, or model.path, or, where that folder is absent, the published config.json of the
    model of that name in configs/. Raises InputError where there is none of these.
    """
    raw, where = settings(cfg)
    return parse(raw, where), where


def settings(cfg: Config) -> tuple[dict, str]:
    """What `planned` reads: the decoded config.json, and where it is described."""
    if cfg.tiny_model is not None:
        return tiny_settings(cfg), "tiny_model"
    folder = Path(cfg.model.path)
    published = PUBLISHED / f"{folder.name}.config.json"
    if folder.exists() or not published.is_file():
        return _raw(folder)
    return read_object(published), f"configs/{published.name}, as published"


def tiny_settings(cfg: Config) -> dict:
    """config.json of the model that cfg.tiny_model describes."""
    tiny = cfg.tiny_model
    qwen3 = tiny.architecture == "qwen3_moe"
    settings = {
        "architectures": [ARCHITECTURES[tiny.architecture]],
        "model_type": tiny.architecture,
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": 4 * tiny.hidden_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.head_dim,
        "num_experts": tiny.num_experts,
        "num_experts_per_tok": tiny.experts_per_token,
        "moe_intermediate_size": tiny.expert_width,
        "norm_topk_prob": qwen3,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": max(512, cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    if not qwen3:
        settings |= {"shared_expert_intermediate_size": tiny.shared_expert_width, "qkv_bias": True}
    return settings
