"""Reads a Hugging Face config.json into an Architecture, or refuses a model that this project cannot train.

It supports Qwen3MoeForCausalLM (Qwen3-30B-A3B), Qwen2MoeForCausalLM (Qwen1.5-MoE-A2.7B) and OlmoeForCausalLM
(OLMoE-1B-7B). The first two may have some dense layers.
Every option that would change the computation is read or refused here; none is ignored. This file does not import
torch.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from facts.architectures import FAMILIES, Architecture, Family
from facts.exits import InputError
from facts.root import ROOT
from inputs.files import read_object, shown
from knobs import TinyModelConfig

PUBLISHED = ROOT / "configs"  # has <name>.config.json, to plan a run before the download

# Upper bounds far above any known model: a list of the names and shapes of all tensors must fit into memory.
MOST = {"num_hidden_layers": 1000, "num_experts": 4096, "num_local_experts": 4096, "max_position_embeddings": 2**31}
MOST_SIZE, MOST_MATRICES = 2**24, 2**17  # for any other key; for layers x experts

# Options for which only one value is supported. An absent option has this value. use_sliding_window is the switch: the
# configurations of Qwen also have a sliding_window, which is unused while the switch is false.
SUPPORTED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "clip_qkv": None,
}


def read(model_dir: str | Path) -> Architecture:
    """Return the architecture in ``model_dir``/config.json. Raises InputError for a bad file or option."""
    return parse(*_config_json(model_dir))


def _config_json(model_dir: str | Path) -> tuple[dict, str]:
    """Return the decoded config.json of ``model_dir``, and its path."""
    path = Path(model_dir) / "config.json"
    if not path.exists():
        raise InputError(f"model.path: {model_dir} has no config.json; give the folder of a Hugging Face model")
    return read_object(path), str(path)


class Raw(NamedTuple):
    """A decoded config.json, with methods that read or refuse its values by key."""

    values: dict
    where: str  # error messages begin with it

    def refuse_if(self, wrong: bool, message: str) -> None:
        if wrong:
            raise InputError(f"{self.where}: {message}")

    def refuse_unless(self, key: str, found: object, supported: object) -> None:
        self.refuse_if(found != supported, f"{key} = {shown(found)} is not supported; only {shown(supported)} is")

    def need(self, key: str, kind: type = int, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` if the key is absent or null.

        Raises InputError if the value has another type, is a number that is not positive, or is too large.
        """
        value: Any = default if self.values.get(key) is None else self.values[key]
        self.refuse_if(value is None, f"{key} is missing")
        number = kind in (int, float)
        self.refuse_if(
            (number and not (isinstance(value, int | float) and 0 < value < math.inf)) or type(value) is not kind,
            f"{key}: must be a {'positive ' * number}{kind.__name__}, not {shown(value)}",
        )
        most = MOST.get(key, MOST_SIZE)
        self.refuse_if(kind is int and value > most, f"{key}: must be at most {most}, not {shown(value)}")
        return value


def parse(values: dict, where: str = "config.json") -> Architecture:
    """Return the architecture in a decoded config.json. Error messages begin with ``where``."""
    raw = Raw(values, where)
    supported = list(FAMILIES)  # a list, because a JSON value may not be hashable
    raw.refuse_if(
        values.get("model_type") not in supported,
        f"model_type {shown(values.get('model_type'))} is not supported; use one of {', '.join(supported)}",
    )
    family = FAMILIES[values["model_type"]]
    _refuse_unsupported(raw, family)
    theta = _rope_theta(raw)
    num_layers = raw.need("num_hidden_layers")
    num_experts = _num_experts(raw, num_layers)
    hidden, heads, kv_heads = (raw.need(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    raw.refuse_if(
        heads % kv_heads > 0, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    )
    head_dim = raw.need("head_dim", int, hidden // heads)
    raw.refuse_if(head_dim % 2 > 0, f"head_dim: must be even for RoPE, not {head_dim}")
    top_k, normalised = raw.need("num_experts_per_tok"), raw.need("norm_topk_prob", bool, False)
    raw.refuse_if(top_k > num_experts, f"num_experts_per_tok {top_k} exceeds num_experts {num_experts}")
    # The softmax over one chosen expert is always 1, so the router could not learn, and Megatron refuses this.
    raw.refuse_if(top_k == 1 and normalised, "norm_topk_prob = true with num_experts_per_tok 1 is not supported")
    return Architecture(
        model_type=values["model_type"],
        vocab_size=raw.need("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dense_ffn_size=raw.need("intermediate_size"),
        expert_ffn_size=raw.need(family.expert_width),
        shared_expert_ffn_size=raw.need("shared_expert_intermediate_size") if family.shared_expert else 0,
        num_experts=num_experts,
        experts_per_token=top_k,
        norm_topk_prob=normalised,
        moe_layers=_moe_layers(raw, num_layers),
        qkv_bias=family.qkv_bias and raw.need("qkv_bias", bool, True),
        tied_head=raw.need("tie_word_embeddings", bool, False),
        rope_theta=theta,
        rms_norm_eps=raw.need("rms_norm_eps", float),
        max_positions=raw.need("max_position_embeddings"),
    )


def _refuse_unsupported(raw: Raw, family: Family) -> None:
    """Raise InputError if an option would change the computation in a way that is not supported."""
    raw.refuse_unless("architectures", raw.values.get("architectures") or [family.class_name], [family.class_name])
    for key, only in SUPPORTED.items():
        raw.refuse_unless(key, raw.values.get(key, only), only)
    quantised = raw.values.get("quantization_config")
    raw.refuse_if(
        quantised is not None,
        f"quantization_config: found {shown(quantised)}, a quantised checkpoint; use one in bf16, fp16 or fp32 "
        "(model.quantisation int4 quantises its experts on loading)",
    )
    for layer_type in raw.need("layer_types", list, []):
        raw.refuse_unless("layer_types", layer_type, "full_attention")


def _rope_theta(raw: Raw) -> float:
    """Return the base of RoPE. Raises InputError for RoPE scaling and for two different bases.

    transformers 4 writes rope_theta and rope_scaling; transformers 5 writes one object, rope_parameters.
    """
    rope = raw.need("rope_parameters", dict, {}) | raw.need("rope_scaling", dict, {})
    for key, only in {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}.items():
        raw.refuse_unless("rope scaling", rope.pop(key, only), only)
    outside = raw.values.get("rope_theta", rope.get("rope_theta", 10000.0))
    theta = rope.pop("rope_theta", outside)
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    raw.refuse_if(not number or not 0 < theta < 1e30, f"rope_theta: must be a positive number, not {shown(theta)}")
    raw.refuse_if(theta != outside, f"rope_theta: is {shown(outside)}, but {shown(theta)} in rope_parameters")
    raw.refuse_if(bool(rope), f"rope_parameters: {', '.join(sorted(rope))} cannot be used")
    return float(theta)


def _num_experts(raw: Raw, num_layers: int) -> int:
    """Return the number of routed experts, which transformers 5 writes as num_local_experts for Qwen3MoE."""
    num_experts = raw.need("num_local_experts" if "num_local_experts" in raw.values else "num_experts")
    other = raw.values.get("num_experts", num_experts)
    raw.refuse_if(other != num_experts, f"num_local_experts {num_experts} and num_experts {shown(other)} differ")
    raw.refuse_if(
        num_layers * num_experts > MOST_MATRICES,
        f"{num_layers} layers of {num_experts} experts have more than {MOST_MATRICES} experts in all",
    )
    return num_experts


def _moe_layers(raw: Raw, num_layers: int) -> tuple[bool, ...]:
    """Return, for each layer, whether it has experts."""
    sparse_step, dense = raw.need("decoder_sparse_step", int, 1), raw.need("mlp_only_layers", list, [])
    for layer in dense:
        raw.refuse_if(
            layer not in range(num_layers),
            f"mlp_only_layers: there is no layer {shown(layer)}; list layers from 0 to {num_layers - 1}",
        )
    return tuple(i not in dense and (i + 1) % sparse_step == 0 for i in range(num_layers))


def planned(path: str, tiny: TinyModelConfig | None, row_tokens: int) -> tuple[Architecture, str]:
    """Return the architecture that a run would train, and the source of its description. This needs no weights."""
    raw, where = settings(path, tiny, row_tokens)
    return parse(raw, where), where


def settings(path: str, tiny: TinyModelConfig | None, row_tokens: int) -> tuple[dict, str]:
    """Return the decoded config.json of a model, and the source of its description.

    If ``tiny`` is set, the source is the section tiny_model, and the model takes rows of ``row_tokens`` tokens.
    Otherwise the source is the folder ``path``. If this folder does not exist, the source is the published config.json
    in configs/ for a model with the folder's name. Raises InputError if that does not exist either.
    """
    if tiny is not None:
        return tiny_settings(tiny, row_tokens), "tiny_model"
    folder = Path(path)
    published = PUBLISHED / f"{folder.name}.config.json"
    if folder.exists() or not published.is_file():
        return _config_json(folder)
    return read_object(published), f"configs/{published.name}, as published"


def tiny_settings(tiny: TinyModelConfig, row_tokens: int) -> dict:
    """Return the config.json of the model that ``tiny`` describes, for rows of at least ``row_tokens`` tokens."""
    family = FAMILIES[tiny.architecture]
    return {
        "architectures": [family.class_name],
        "model_type": tiny.architecture,
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": 4 * tiny.hidden_size,  # for dense layers, or for experts in a family without dense layers
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.head_dim,
        "num_experts": tiny.num_experts,
        "num_experts_per_tok": tiny.experts_per_token,
        family.expert_width: tiny.expert_width,
        "norm_topk_prob": family.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": family.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": max(512, row_tokens),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "eos_token_id": 2,
        **({"shared_expert_intermediate_size": 64} if family.shared_expert else {}),
        **({"qkv_bias": True} if family.qkv_bias else {}),
    }
