"""The table of architectures: the modules of a layer, their names, and how ranks split them. Needs no torch.

weights/, aqn, export and the engines derive their tables from `modules`. So does the plan, except for the tensors that
a forward pass keeps and the kernels that it launches. To support another model of a known kind, add a row to FAMILIES.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

Number = TypeVar("Number", int, float)


class Family(NamedTuple):
    """The properties that all models of one ``model_type`` share."""

    class_name: str  # the only entry of `architectures` in config.json
    qk_norm: str  # RMSNorm of queries and keys: head (of each head) | projection (of all heads together); empty: none
    shared_expert: bool
    qkv_bias: bool  # whether the queries, keys and values may have a bias
    norm_topk_prob: bool  # for a tiny model; a real one has it in its config.json
    expert_width: str = "moe_intermediate_size"  # key of config.json with the width of an expert
    rms_norm_eps: float = 1e-6  # for a tiny model


FamilyName = Literal["qwen3_moe", "qwen2_moe", "olmoe"]
FAMILIES: dict[FamilyName, Family] = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "head", shared_expert=False, qkv_bias=False, norm_topk_prob=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", "", shared_expert=True, qkv_bias=True, norm_topk_prob=False),
    "olmoe": Family(
        "OlmoeForCausalLM", "projection", shared_expert=False, qkv_bias=False, norm_topk_prob=False,
        expert_width="intermediate_size", rms_norm_eps=1e-5,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """The settings of a model's computation. The sizes are those of the whole, unsharded model."""

    model_type: FamilyName
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
    moe_layers: tuple[bool, ...]  # for each layer: MoE (True) or dense
    qkv_bias: bool
    tied_head: bool  # lm_head has the weights of the embedding
    rope_theta: float
    rms_norm_eps: float
    max_positions: int

    @property
    def qk_norm(self) -> str:
        return FAMILIES[self.model_type].qk_norm

    @property
    def query_size(self) -> int:
        """The number of outputs of the query projection, and of inputs of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """The number of outputs of the key projection. The value projection has as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """The number of rows of the fused query, key and value projection."""
        return self.query_size + 2 * self.key_size


@dataclass(frozen=True)
class Module:
    """A linear layer or a norm in a layer of the model. One module represents all routed experts."""

    megatron: str  # the name of its weight in a layer of Megatron's model
    blocks: Mapping[str, tuple[int, ...]]  # Hugging Face's modules, in the order in which they are joined -> (out, in)
    kind: str  # norm | attention | dense | experts | shared | router
    fused: str = ""  # the joint name of the blocks in checkpoints of adapters
    target: str = ""  # the member of lora.targets that adapts it
    split: int | None = None  # the dimension of the blocks that ranks split; None: every rank has all of it
    reads: str = ""  # the norm whose output it multiplies
    bias: bool = False
    copies: int = 1  # number of experts

    @property
    def part(self) -> str:
        """A short name. It is unique in a layer, which has either dense matrices or those of a shared expert."""
        name = (self.fused or next(iter(self.blocks))).rpartition(".")[2]
        return f"experts.{name}" if self.kind == "experts" else name

    @functools.cached_property
    def out_size(self) -> int:
        return sum(shape[0] for shape in self.blocks.values())

    @functools.cached_property
    def in_size(self) -> int:
        """The number of columns of a matrix, or 1 for a norm, which is a vector."""
        return math.prod(next(iter(self.blocks.values()))[1:])


@functools.cache
def modules(arch: Architecture, is_moe: bool) -> tuple[Module, ...]:
    """Return the modules of an MoE or a dense layer, in the order in which weights are pushed to an engine."""
    h, query, key = arch.hidden_size, arch.query_size, arch.key_size
    before, after = "input_layernorm", "post_attention_layernorm"
    qkv = {"self_attn.q_proj": (query, h), "self_attn.k_proj": (key, h), "self_attn.v_proj": (key, h)}
    found = [
        Module("input_layernorm.weight", {before: (h,)}, "norm"),
        Module(
            "self_attention.linear_qkv.weight", qkv, "attention", "self_attn.qkv_proj", "linear_qkv", 0, before,
            bias=arch.qkv_bias,
        ),
    ]  # fmt: skip
    whole = arch.qk_norm == "projection"
    found += [
        Module(
            f"self_attention.{x}_layernorm.weight",
            {f"self_attn.{x}_norm": (size if whole else arch.head_dim,)},
            "norm",
            split=0 if whole else None,
        )
        for x, size in (("q", query), ("k", key))
        if arch.qk_norm
    ]
    output = {"self_attn.o_proj": (h, query)}
    found += [
        Module("self_attention.linear_proj.weight", output, "attention", "self_attn.o_proj", "linear_proj", 1),
        Module("pre_mlp_layernorm.weight", {after: (h,)}, "norm"),
    ]

    def swiglu(megatron: str, name: str, kind: str, width: int, copies: int = 1) -> None:
        fused = name.replace(".{}", "")
        gate_up = {f"{name}.gate_proj": (width, h), f"{name}.up_proj": (width, h)}
        down = {f"{name}.down_proj": (h, width)}
        rows, columns = (None, None) if kind == "experts" else (0, 1)  # a rank has whole experts
        in_name, out_name = f"{fused}.gate_up_proj", f"{fused}.down_proj"
        fc1, fc2 = f"{megatron}.linear_fc1.weight", f"{megatron}.linear_fc2.weight"
        found.append(Module(fc1, gate_up, kind, in_name, "linear_fc1", rows, after, copies=copies))
        found.append(Module(fc2, down, kind, out_name, "linear_fc2", columns, copies=copies))

    if not is_moe:
        swiglu("mlp", "mlp", "dense", arch.dense_ffn_size)
        return tuple(found)
    router = {"mlp.gate": (arch.num_experts, h)}
    found.append(Module("mlp.router.weight", router, "router", "mlp.gate", "router", reads=after))
    swiglu("mlp.experts", "mlp.experts.{}", "experts", arch.expert_ffn_size, arch.num_experts)
    if arch.shared_expert_ffn_size:
        swiglu("mlp.shared_experts", "mlp.shared_expert", "shared", arch.shared_expert_ffn_size)
        gate = {"mlp.shared_expert_gate": (1, h)}
        found.append(Module("mlp.shared_experts.gate_weight", gate, "shared", reads=after))
    return tuple(found)


@functools.cache
def every_module(arch: Architecture) -> tuple[Module, ...]:
    """Return the modules of each kind of layer, dense or MoE, that the model has."""
    return tuple(module for is_moe in sorted({*arch.moe_layers}) for module in modules(arch, is_moe))


def over_layers(arch: Architecture, number: Callable[[Module], Number]) -> Number:
    """Return the sum of ``number(module)`` over all modules of all layers."""
    return sum(arch.moe_layers.count(is_moe) * sum(map(number, modules(arch, is_moe))) for is_moe in {*arch.moe_layers})


def layers(arch: Architecture) -> Iterator[tuple[str, Module]]:
    """Yield every module, layer by layer, together with the prefix of its layer's names, such as `model.layers.0.`."""
    for i, is_moe in enumerate(arch.moe_layers):
        for module in modules(arch, is_moe):
            yield f"model.layers.{i}.", module


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes, by name, of exactly the tensors that a model directory of this architecture contains."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, arch.hidden_size)}
    for layer, module in layers(arch):
        for expert in range(module.copies):
            for block, shape in module.blocks.items():
                name = layer + block.format(expert)
                shapes[f"{name}.weight"] = shape
                if module.bias:
                    shapes[f"{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (arch.hidden_size,)
    if not arch.tied_head:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return shapes
